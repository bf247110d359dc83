{{/* A text with each name replaced by its value. list: the text, a list of names and values */}}
{{- define "batch-dispatcher.filled" -}}
{{- $text := index . 0 -}}
{{- range chunk 2 (index . 1) -}}
{{- $text = replace (index . 0) (index . 1) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* An expression with matchers on each series of the dispatcher, including recorded ones. list: the expression, the matchers */}}
{{- define "batch-dispatcher.narrowed" -}}
{{- $select := index . 1 -}}
{{- $every := regexReplaceAll "\\b((?:pool:)?batch_dispatcher_[a-z0-9_]+(?::[a-z0-9]+)?)" (index . 0) "${1}{<select>}" -}}
{{- $every | replace "{<select>}{" "{<select>," | replace (printf "<select>,%s" $select) "<select>" | replace "<select>" $select -}}
{{- end -}}
