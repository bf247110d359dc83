{{/* "true" if the queue is the Valkey of the chart. */}}
{{- define "batch-dispatcher.ownQueue" -}}
{{- $named := or .Values.redis.existingSecret.name (dig "queue" "url" "" .Values.config) -}}
{{- if kindIs "bool" .Values.valkey.enabled -}}{{ if .Values.valkey.enabled }}true{{ end }}{{- else -}}{{ if not $named }}true{{ end }}{{- end -}}
{{- end -}}

{{- define "batch-dispatcher.ownQueueHost" -}}
{{- printf "%s-valkey.%s.svc" (include "batch-dispatcher.fullname" .) (include "batch-dispatcher.namespace" .) -}}
{{- end -}}

{{/* Set a value in a map. list: the map, the path of a setting, its value */}}
{{- define "batch-dispatcher.put" -}}
{{- $map := index . 0 -}}
{{- $parts := splitList "." (index . 1) -}}
{{- range initial $parts -}}
{{- if not (kindIs "map" (get $map .)) -}}{{- $_ := set $map . dict -}}{{- end -}}
{{- $map = get $map . -}}
{{- end -}}
{{- $_ := set $map (last $parts) (index . 2) -}}
{{- end -}}

{{/* Value of a setting as JSON: from the settings, else the default of the program, else "". list: the settings, the path */}}
{{- define "batch-dispatcher.setting" -}}
{{- $value := index . 0 -}}
{{- range splitList "." (index . 1) -}}
{{- if kindIs "map" $value -}}{{- $value = get $value . -}}{{- else -}}{{- $value = "" -}}{{- end -}}
{{- end -}}
{{- if and (kindIs "string" $value) (not $value) (gt (len .) 2) -}}
{{- $value = get (index . 2) (index . 1) -}}
{{- end -}}
{{- toJson $value -}}
{{- end -}}

{{- define "batch-dispatcher.filesPath" -}}/etc/batch-dispatcher/files{{- end -}}

{{/* Configuration of the dispatcher as JSON. Fails if values contradict each other. */}}
{{- define "batch-dispatcher.settings" -}}
{{- include "batch-dispatcher.validate" . -}}
{{- $settings := deepCopy .Values.config -}}
{{- $pool := dict "name" .Values.pool.name "namespace" (include "batch-dispatcher.poolNamespace" .) -}}
{{- $_ := set $settings "pool" $pool -}}
{{- $_ := set $settings "gateway" (deepCopy .Values.gateway) -}}
{{- if .Values.inferenceObjective.create -}}
{{- $_ := set $settings.gateway "objective" (include "batch-dispatcher.objective" .) -}}
{{- end -}}
{{- /* Probes and scrapes come from outside the pod. */}}
{{- include "batch-dispatcher.put" (list $settings "admin.host" "0.0.0.0") -}}
{{- if and (include "batch-dispatcher.ownQueue" .) (not .Values.valkey.existingSecret.name) -}}
{{- include "batch-dispatcher.put" (list $settings "queue.url" (printf "redis://%s:6379" (include "batch-dispatcher.ownQueueHost" .))) -}}
{{- end -}}
{{- range $setting, $_ := .Values.secretFiles -}}
{{- include "batch-dispatcher.put" (list $settings $setting (printf "%s/%s" (include "batch-dispatcher.filesPath" $) $setting)) -}}
{{- end -}}
{{- if and .Values.sidecar.enabled (include "batch-dispatcher.findsPicker" .) -}}
{{- $port := include "batch-dispatcher.setting" (list .Values.config "signals.epp.port" (.Files.Get "files/settings.json" | fromJson).defaults) -}}
{{- $scheme := ternary "https" "http" (not (empty (dig "signals" "epp" "tls" dict .Values.config))) -}}
{{- include "batch-dispatcher.put" (list $settings "signals.epp.urls" (list (printf "%s://127.0.0.1:%s" $scheme $port))) -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* Hash of the settings that a running dispatcher cannot reload. Only these restart the pods. */}}
{{- define "batch-dispatcher.restartChecksum" -}}
{{- $settings := include "batch-dispatcher.settings" . | fromJson -}}
{{- $bound := dict -}}
{{- range (.Files.Get "files/settings.json" | fromJson).restart -}}
{{- $_ := set $bound . (include "batch-dispatcher.setting" (list $settings .)) -}}
{{- end -}}
{{- toJson $bound | sha256sum -}}
{{- end -}}

{{- define "batch-dispatcher.port" -}}
{{- include "batch-dispatcher.setting" (list .Values.config "admin.port" (.Files.Get "files/settings.json" | fromJson).defaults) -}}
{{- end -}}

{{/* Non-empty if the watch finds the endpoint picker, as in dispatcher/signals/kubernetes/capacity.py. */}}
{{- define "batch-dispatcher.findsPicker" -}}
{{- if not (or (dig "signals" "epp" "urls" list .Values.config) (dig "signals" "epp" "service" "" .Values.config) (include "batch-dispatcher.asksServers" .)) -}}true{{- end -}}
{{- end -}}

{{/* Non-empty if the metrics of the model servers are read. */}}
{{- define "batch-dispatcher.asksServers" -}}
{{- if or (dig "signals" "vllm" "urls" list .Values.config) (dig "signals" "vllm" "service" "" .Values.config) -}}true{{- end -}}
{{- end -}}

{{/* Non-empty if the served models are observed, as in dispatcher/features/models/settings.py. */}}
{{- define "batch-dispatcher.observesModels" -}}
{{- $observe := dig "serving" "observe" "auto" .Values.config -}}
{{- if and (ne $observe "off") (or (ne $observe "auto") .Values.config.models) -}}true{{- end -}}
{{- end -}}

{{/* Non-empty if the model lists of the endpoints are read. */}}
{{- define "batch-dispatcher.asksModels" -}}
{{- if and (include "batch-dispatcher.observesModels" .) (ne (dig "serving" "observe" "auto" .Values.config) "gateway") -}}true{{- end -}}
{{- end -}}

{{/* Non-empty if the dispatcher may read model rewrites. */}}
{{- define "batch-dispatcher.readsRewrites" -}}
{{- $said := .Values.rbac.modelRewrites -}}
{{- if kindIs "invalid" $said -}}{{ include "batch-dispatcher.observesModels" . }}{{- else if $said -}}true{{- end -}}
{{- end -}}

{{/* Non-empty if the metrics of the picker are read directly, with the token of the service account. */}}
{{- define "batch-dispatcher.scrapesByToken" -}}
{{- $epp := dig "signals" "epp" dict .Values.config -}}
{{- $source := dig "signals" "source" "auto" .Values.config -}}
{{- if not (or (eq $source "prometheus") (include "batch-dispatcher.asksServers" .) (hasKey .Values.secretFiles "signals.epp.token_file") $epp.token_file) -}}true{{- end -}}
{{- end -}}

{{/* Port of a URL: the explicit one, else the default of its scheme. */}}
{{- define "batch-dispatcher.portOf" -}}
{{- $authority := regexReplaceAll "^[a-z+]+://([^/@]*@)?([^/]*).*$" . "${2}" -}}
{{- $port := regexFind ":[0-9]+$" $authority | trimPrefix ":" -}}
{{- if $port -}}{{ $port }}
{{- else if hasPrefix "redis" . -}}6379
{{- else if hasPrefix "https" . -}}443
{{- else -}}80{{- end -}}
{{- end -}}
