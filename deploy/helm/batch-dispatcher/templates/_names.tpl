{{- define "batch-dispatcher.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all names. The longest label with it is the revision of the StatefulSet: 45 characters, "-valkey" and a
     hash of up to 11 characters make 63. A truncated name ends with a hash of the full name, so that long names differ. */}}
{{- define "batch-dispatcher.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name (include "batch-dispatcher.name" .) -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if contains (include "batch-dispatcher.name" .) .Release.Name -}}
{{- $name = .Release.Name -}}
{{- end -}}
{{- if gt (len $name) 45 -}}{{ trunc 36 $name | trimSuffix "-" }}-{{ sha256sum $name | trunc 8 }}{{- else -}}{{ $name }}{{- end -}}
{{- end -}}

{{- define "batch-dispatcher.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "batch-dispatcher.serviceAccount" -}}
{{- if .Values.sidecar.enabled -}}
{{- .Values.sidecar.serviceAccount -}}
{{- else if .Values.serviceAccount.create -}}
{{- default (include "batch-dispatcher.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Unique per release, because neither part can contain a colon. */}}
{{- define "batch-dispatcher.clusterName" -}}
{{- printf "%s:%s:metrics" (include "batch-dispatcher.namespace" .) (include "batch-dispatcher.fullname" .) -}}
{{- end -}}

{{/* The namespace of the pool may contain another release with the same name. */}}
{{- define "batch-dispatcher.roleName" -}}
{{- $name := include "batch-dispatcher.fullname" . -}}
{{- if eq (include "batch-dispatcher.namespace" .) (include "batch-dispatcher.poolNamespace" .) -}}{{ $name }}{{- else -}}{{ printf "%s:%s" (include "batch-dispatcher.namespace" .) $name }}{{- end -}}
{{- end -}}

{{- define "batch-dispatcher.poolNamespace" -}}
{{- default (include "batch-dispatcher.namespace" .) .Values.pool.namespace -}}
{{- end -}}

{{- define "batch-dispatcher.objective" -}}
{{- default (include "batch-dispatcher.fullname" .) .Values.inferenceObjective.name -}}
{{- end -}}

{{/* API version of the InferenceObjective: the older one only if the cluster serves no other. */}}
{{- define "batch-dispatcher.objectiveApi" -}}
{{- $new := "llm-d.ai/v1alpha2" -}}
{{- $old := "inference.networking.x-k8s.io/v1alpha2" -}}
{{- $onlyOld := and (.Capabilities.APIVersions.Has (printf "%s/InferenceObjective" $old)) (not (.Capabilities.APIVersions.Has (printf "%s/InferenceObjective" $new))) -}}
{{- default (ternary $old $new $onlyOld) .Values.inferenceObjective.apiVersion -}}
{{- end -}}

{{/* list: the root, the component */}}
{{- define "batch-dispatcher.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "batch-dispatcher.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Selector of the pods in which the dispatcher runs. */}}
{{- define "batch-dispatcher.runsIn" -}}
{{- if .Values.sidecar.enabled -}}{{ toYaml .Values.sidecar.podLabels }}{{- else -}}{{ include "batch-dispatcher.selector" (list . "dispatcher") }}{{- end -}}
{{- end -}}

{{/* list: the root, the component, its own labels. The version is not a label of pods, so that a new chart version alone
     restarts no pods. */}}
{{- define "batch-dispatcher.podLabels" -}}
{{ include "batch-dispatcher.selector" . }}
{{- with mergeOverwrite dict (default dict (index . 0).Values.commonLabels) (default dict (index (append . dict) 2)) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of every object. list: the root, the component, its own labels, its own annotations */}}
{{- define "batch-dispatcher.about" -}}
{{- $root := index . 0 -}}
{{- $own := concat . (list dict dict) -}}
labels:
  helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
  {{- include "batch-dispatcher.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  app.kubernetes.io/part-of: batch-dispatcher
  {{- with mergeOverwrite dict (default dict $root.Values.commonLabels) (default dict (index $own 2)) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with mergeOverwrite dict (default dict $root.Values.commonAnnotations) (default dict (index $own 3)) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name of an image without its tag. list: the root, the values of the image */}}
{{- define "batch-dispatcher.imageName" -}}
{{- $image := index . 1 -}}
{{- list (default (dig "imageRegistry" "" (default dict (index . 0).Values.global)) $image.registry) $image.repository | compact | join "/" -}}
{{- end -}}

{{/* list: the root, the values of an image, its default tag */}}
{{- define "batch-dispatcher.image" -}}
{{- $image := index . 1 -}}
{{- $name := include "batch-dispatcher.imageName" . -}}
{{- if $image.digest -}}{{ $name }}@{{ $image.digest }}{{- else -}}{{ $name }}:{{ default (index . 2) $image.tag }}{{- end -}}
{{- end -}}
