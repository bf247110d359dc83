{{/* Parts of every pod that runs the program: environment, files, rights. */}}

{{/* list: the root, a Secret with another URL of the queue, variables that override extraEnv */}}
{{- define "batch-dispatcher.env" -}}
{{- $queue := "BATCH_DISPATCHER__QUEUE__URL" -}}
{{- $other := index (append . dict) 1 -}}
{{- $more := index (concat . (list dict dict)) 2 -}}
{{- with index . 0 -}}
{{- if $other.name }}
- name: {{ $queue }}
  valueFrom:
    secretKeyRef: {{ dict "name" $other.name "key" $other.key | toJson }}
{{- else if .Values.redis.existingSecret.name }}
- name: {{ $queue }}
  valueFrom:
    secretKeyRef: {{ dict "name" .Values.redis.existingSecret.name "key" .Values.redis.existingSecret.key | toJson }}
{{- else if and (include "batch-dispatcher.ownQueue" .) .Values.valkey.existingSecret.name }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef: {{ dict "name" .Values.valkey.existingSecret.name "key" .Values.valkey.existingSecret.key | toJson }}
- name: {{ $queue }}
  value: redis://:$(VALKEY_PASSWORD)@{{ include "batch-dispatcher.ownQueueHost" . }}:6379
{{- end }}
{{- range .Values.extraEnv }}
{{- if not (or (and $other.name (eq .name $queue)) (hasKey $more .name)) }}
{{ list . | toYaml }}
{{- end }}
{{- end }}
{{- range $name, $value := $more }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Mounts are directories, because the kubelet does not update a file mounted with subPath. */}}
{{- define "batch-dispatcher.mounts" -}}
- name: dispatcher-config
  mountPath: /etc/batch-dispatcher/config
  readOnly: true
{{- if .Values.secretFiles }}
- name: dispatcher-files
  mountPath: {{ include "batch-dispatcher.filesPath" . }}
  readOnly: true
{{- end }}
- name: dispatcher-tmp
  mountPath: /tmp
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "batch-dispatcher.volumes" -}}
- name: dispatcher-config
  configMap:
    name: {{ include "batch-dispatcher.fullname" . | quote }}
{{- if .Values.secretFiles }}
- name: dispatcher-files
  projected:
    defaultMode: {{ if .Values.sidecar.enabled }}0444{{ else }}0440{{ end }}
    sources:
{{- range $setting, $from := .Values.secretFiles }}
      - {{ ternary "secret" "configMap" (not (empty $from.secret)) }}:
          name: {{ default $from.configMap $from.secret | quote }}
          items: [{key: {{ $from.key | quote }}, path: {{ $setting }}}]
{{- end }}
{{- end }}
- name: dispatcher-tmp
  emptyDir: {}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Container of the dispatcher, without the readiness probe, which depends on the pod. */}}
{{- define "batch-dispatcher.dispatcher" -}}
name: dispatcher
{{ include "batch-dispatcher.container" (list .) }}
args: [run, --config, /etc/batch-dispatcher/config/config.yaml{{ if .Values.observe }}, --observe{{ end }}]
ports:
  - name: admin
    containerPort: {{ include "batch-dispatcher.port" . }}
    protocol: TCP
livenessProbe: {{- merge (dict "httpGet" (dict "path" "/livez" "port" "admin")) .Values.livenessProbe | toYaml | nindent 2 }}
resources: {{- toYaml .Values.resources | nindent 2 }}
{{- end -}}

{{- define "batch-dispatcher.grace" -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- $defaults := (.Files.Get "files/settings.json" | fromJson).defaults -}}
{{- include "batch-dispatcher.setting" (list .Values.config "shutdown.drain_s" $defaults) | float64 | ceil | int | add 15 -}}
{{- else -}}{{ .Values.terminationGracePeriodSeconds }}{{- end -}}
{{- end -}}

{{/* Image, environment and mounts of a container. list: as for env */}}
{{- define "batch-dispatcher.container" -}}
{{- $env := include "batch-dispatcher.env" . | trim -}}
{{- with index . 0 -}}
image: {{ include "batch-dispatcher.image" (list . .Values.image .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- /* A sidecar cannot set the security context of the pod, so its container needs all of it. */}}
{{- $ofPod := ternary (omit (include "batch-dispatcher.podSecurityContext" . | fromYaml) "fsGroup") dict .Values.sidecar.enabled }}
securityContext: {{- merge (deepCopy (default dict .Values.securityContext)) $ofPod | toYaml | nindent 2 }}
{{- with $env }}
env: {{- . | nindent 2 }}
{{- end }}
{{- with .Values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts: {{- include "batch-dispatcher.mounts" . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* OpenShift assigns user and group ids to each namespace and rejects others, so the ids of the chart are omitted there. */}}
{{- define "batch-dispatcher.podSecurityContext" -}}
{{- $context := deepCopy (default dict .Values.podSecurityContext) -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" -}}
{{- range list "runAsUser" "runAsGroup" "fsGroup" -}}
{{- if eq (toString (get $context .)) "65532" -}}{{- $_ := unset $context . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Spec of a pod without its containers. list: the root, whether it uses the Kubernetes API */}}
{{- define "batch-dispatcher.pod" -}}
{{- $asks := index . 1 -}}
{{- with index . 0 -}}
serviceAccountName: {{ include "batch-dispatcher.serviceAccount" . | quote }}
automountServiceAccountToken: {{ and $asks .Values.kubernetes.enabled }}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "batch-dispatcher.podSecurityContext" . | nindent 2 }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- if .Values.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with default (ternary "ClusterFirstWithHostNet" "" .Values.hostNetwork) .Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes: {{- include "batch-dispatcher.volumes" . | nindent 2 }}
{{- end -}}
{{- end -}}
