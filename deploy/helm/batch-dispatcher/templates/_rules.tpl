{{/* list: a text, a list of names and values: each name replaced by its value. */}}
{{- define "batch-dispatcher.filled" -}}
{{- $text := index . 0 -}}
{{- range chunk 2 (index . 1) -}}
{{- $text = replace (index . 0) (index . 1) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* list: an expression, matchers. The expression with them on each series of ours, recorded ones too. */}}
{{- define "batch-dispatcher.narrowed" -}}
{{- $select := index . 1 -}}
{{- $every := regexReplaceAll "\\b((?:pool:)?batch_dispatcher_[a-z0-9_]+(?::[a-z0-9]+)?)" (index . 0) "${1}{<select>}" -}}
{{- $every | replace "{<select>}{" "{<select>," | replace (printf "<select>,%s" $select) "<select>" | replace "<select>" $select -}}
{{- end -}}
