{{/* A quantity of Kubernetes, such as 512Mi or 100m, as a number. */}}
{{- define "batch-dispatcher.quantity" -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $unit := regexFind "([KMGTPE]i|[mkMGTPE])?$" (toString .) -}}
{{- mulf (trimSuffix $unit (toString .) | float64) (get $factors $unit) -}}
{{- end -}}

{{/* Checks that a schema cannot express. All problems are reported together, each with its solution. Only the first
     template that includes this reports them: `helm lint` continues after a failure and would repeat them. */}}
{{- define "batch-dispatcher.validate" -}}
{{- if not (hasKey . "IsValidated") -}}
{{- $_ := set . "IsValidated" true -}}
{{- $wrong := list -}}
{{- $config := .Values.config -}}
{{- $facts := .Files.Get "files/settings.json" | fromJson -}}
{{- $defaults := $facts.defaults -}}
{{- if not .Values.pool.name -}}
{{- $wrong = append $wrong "pool.name: is required: the name of your InferencePool (--set pool.name=NAME)" -}}
{{- end -}}
{{- if not .Values.gateway.url -}}
{{- $wrong = append $wrong "gateway.url: is required: the URL of the inference gateway (--set gateway.url=http://HOST)" -}}
{{- end -}}
{{- range $name := list "pool" "gateway" -}}
{{- if hasKey $config $name -}}
{{- $wrong = append $wrong (printf "config.%s: %s belongs to the top level of the values, not below config" $name $name) -}}
{{- end -}}
{{- end -}}

{{/* the queue */}}
{{- $url := dig "queue" "url" "" $config -}}
{{- $secret := .Values.redis.existingSecret.name -}}
{{- $own := include "batch-dispatcher.ownQueue" . -}}
{{- $queues := list -}}
{{- if $secret -}}{{- $queues = append $queues "redis.existingSecret.name" -}}{{- end -}}
{{- if $url -}}{{- $queues = append $queues "config.queue.url" -}}{{- end -}}
{{- if $own -}}{{- $queues = append $queues "valkey.enabled" -}}{{- end -}}
{{- if gt (len $queues) 1 -}}
{{- $wrong = append $wrong (printf "%s: name more than one queue: keep one of them" (join ", " $queues)) -}}
{{- else if not $queues -}}
{{- $wrong = append $wrong "valkey.enabled: is false, and no other queue is configured: set redis.existingSecret.name (or config.queue.url, without a password). A queue inside the dispatcher's pod would have no producers" -}}
{{- end -}}
{{- if contains "@" $url -}}
{{- $wrong = append $wrong "config.queue.url: contains a user or a password, which a ConfigMap must not contain: put the URL into a Secret and name that in redis.existingSecret.name" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if and $own (eq (toString .name) "BATCH_DISPATCHER__QUEUE__URL") -}}
{{- $wrong = append $wrong "extraEnv: BATCH_DISPATCHER__QUEUE__URL names another queue than the chart's own Valkey: set redis.existingSecret.name instead, or config.queue.url in addition, without the password" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.valkey.existingSecret.name (not $own) -}}
{{- $wrong = append $wrong "valkey.existingSecret.name: the chart's own Valkey is not used; for your own queue set redis.existingSecret.name" -}}
{{- end -}}

{{/* files */}}
{{- $settings := dict "gateway" .Values.gateway "signals" (default dict $config.signals) "serving" (default dict $config.serving) "admin" (default dict $config.admin) -}}
{{- range $setting, $from := .Values.secretFiles -}}
{{- if ne (include "batch-dispatcher.setting" (list $settings $setting)) "\"\"" -}}
{{- $wrong = append $wrong (printf "secretFiles: %s: the setting already names a file: remove one of the two" $setting) -}}
{{- end -}}
{{- if eq (empty $from.secret) (empty $from.configMap) -}}
{{- $wrong = append $wrong (printf "secretFiles: %s: name either a secret or a configMap" $setting) -}}
{{- end -}}
{{- end -}}
{{- range $where, $tls := dict "gateway" (default dict .Values.gateway.tls) "signals.prometheus" (dig "signals" "prometheus" "tls" dict $config) "signals.epp" (dig "signals" "epp" "tls" dict $config) "signals.vllm" (dig "signals" "vllm" "tls" dict $config) "serving" (dig "serving" "tls" dict $config) -}}
{{- $cert := or $tls.cert_file (hasKey $.Values.secretFiles (printf "%s.tls.cert_file" $where)) -}}
{{- $key := or $tls.key_file (hasKey $.Values.secretFiles (printf "%s.tls.key_file" $where)) -}}
{{- if ne (empty $cert) (empty $key) -}}
{{- $wrong = append $wrong (printf "%s.tls: cert_file and key_file are needed together" $where) -}}
{{- end -}}
{{- end -}}
{{- range $where, $headers := dict "gateway" (default dict .Values.gateway.headers) "config.signals.prometheus" (dig "signals" "prometheus" "headers" dict $config) -}}
{{- range $name, $_ := $headers -}}
{{- if regexMatch (printf "(?i:%s)" $facts.secret_name) $name -}}
{{- $setting := trimPrefix "config." $where -}}
{{- $file := ternary (printf "a bearer token by secretFiles (%s.token_file), else " $setting) "" (eq (lower $name) "authorization") -}}
{{- $wrong = append $wrong (printf "%s.headers: %s looks like a secret, which a ConfigMap must not contain: set %sall headers by extraEnv from a Secret (BATCH_DISPATCHER__%s__HEADERS, a JSON object)" $where $name $file ($setting | upper | replace "." "__")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $urls := dict "gateway.url" .Values.gateway.url "config.signals.prometheus.url" (dig "signals" "prometheus" "url" "" $config) "config.tracing.endpoint" (dig "tracing" "endpoint" "" $config) -}}
{{- range $setting, $value := $urls -}}
{{- if regexMatch "^[a-z]+://[^/]*@" $value -}}
{{- $variable := trimPrefix "config." $setting | upper | replace "." "__" -}}
{{- $wrong = append $wrong (printf "%s: contains a user or a password, which a ConfigMap must not contain: remove them, and set the whole URL by extraEnv from a Secret (BATCH_DISPATCHER__%s)" $setting $variable) -}}
{{- end -}}
{{- end -}}

{{/* relations between settings, as in the program */}}
{{- $max := include "batch-dispatcher.setting" (list $config "retry.max_s" $defaults) | float64 -}}
{{- if lt $max (include "batch-dispatcher.setting" (list $config "retry.base_s" $defaults) | float64) -}}
{{- $wrong = append $wrong "config.retry.max_s: must not be below retry.base_s" -}}
{{- end -}}
{{- $upper := dig "budget" "upper" nil $config -}}
{{- $room := subf 1.0 (include "batch-dispatcher.setting" (list $config "budget.reserve" $defaults) | float64) -}}
{{- if and $upper (lt (float64 $upper) (subf $room 0.000000001)) -}}
{{- $wrong = append $wrong (printf "config.budget.upper: must not be below 1 − reserve (%v): readings of an idle pool would always be rejected" $room) -}}
{{- end -}}
{{- $age := dig "signals" "max_age_s" nil $config -}}
{{- $twice := mulf 2 (include "batch-dispatcher.setting" (list $config "signals.interval_s" $defaults) | float64) -}}
{{- if and $age (lt (float64 $age) $twice) -}}
{{- $wrong = append $wrong (printf "config.signals.max_age_s: must be at least two intervals (%v s), or every other reading is stale" $twice) -}}
{{- end -}}
{{- $silence := dig "queue" "owner_timeout_s" nil $config -}}
{{- $lease := include "batch-dispatcher.setting" (list $config "queue.lease_s" $defaults) | float64 -}}
{{- if and $silence (gt (float64 $silence) $lease) -}}
{{- $wrong = append $wrong (printf "config.queue.owner_timeout_s: must not be above queue.lease_s (%v)" $lease) -}}
{{- end -}}
{{- $prometheus := dig "signals" "prometheus" "url" "" $config -}}
{{- if and (eq (dig "signals" "source" "auto" $config) "prometheus") (not $prometheus) -}}
{{- $wrong = append $wrong "config.signals.prometheus.url: is required when signals.source is prometheus" -}}
{{- end -}}
{{- if and (not (or .Values.kubernetes.enabled .Values.sidecar.enabled $prometheus)) (include "batch-dispatcher.findsPicker" .) -}}
{{- $wrong = append $wrong "kubernetes.enabled: is false, so the endpoint picker cannot be found: set config.signals.epp.urls, config.signals.epp.service or config.signals.prometheus.url, or config.signals.vllm without a picker" -}}
{{- end -}}
{{- $drain := include "batch-dispatcher.setting" (list $config "shutdown.drain_s" $defaults) | float64 -}}
{{- $grace := .Values.terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $grace)) (le (float64 $grace) $drain) -}}
{{- $wrong = append $wrong (printf "terminationGracePeriodSeconds: must be above shutdown.drain_s (%v), or running requests are killed and repeated" $drain) -}}
{{- end -}}

{{/* values that Kubernetes would reject or misinterpret */}}
{{- $name := include "batch-dispatcher.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- $wrong = append $wrong (printf "fullnameOverride: the release's objects would be called %q, which Kubernetes rejects for a Service: set a name of lower-case letters, digits and - that begins with a letter" $name) -}}
{{- end -}}
{{- range $where := list "image" "valkey.image" -}}
{{- $image := ternary $.Values.image $.Values.valkey.image (eq $where "image") -}}
{{- $whole := include "batch-dispatcher.imageName" (list $ $image) -}}
{{- if not (regexMatch "^([a-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$" $whole) -}}
{{- $wrong = append $wrong (printf "%s.repository: %q is not the name of an image (lower-case letters, digits, dots, dashes, slashes): put the host of your registry into %s.registry, and a tag or digest into %s.tag or %s.digest" $where $whole $where $where $where) -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.image.pullPolicy "Never" -}}
{{- $built := "no image is published: build and push it (make image REGISTRY=registry.example/team), and set what the command prints; for an image that was loaded into every node, set image.pullPolicy=Never" -}}
{{- if not (contains "/" (include "batch-dispatcher.imageName" (list . .Values.image))) -}}
{{- $wrong = append $wrong (printf "image.registry: is required, because %s" $built) -}}
{{- end -}}
{{- if not (or .Values.image.tag .Values.image.digest) -}}
{{- $wrong = append $wrong (printf "image.digest: is required (or image.tag), because %s" $built) -}}
{{- end -}}
{{- end -}}
{{- $ours := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "app.kubernetes.io/part-of" "helm.sh/chart" -}}
{{- range $where, $labels := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "service.labels" .Values.service.labels "monitoring.podMonitor.labels" .Values.monitoring.podMonitor.labels "monitoring.serviceMonitor.labels" .Values.monitoring.serviceMonitor.labels "monitoring.rules.labels" .Values.monitoring.rules.labels "monitoring.dashboard.labels" .Values.monitoring.dashboard.labels -}}
{{- range $label, $_ := $labels -}}
{{- if has $label $ours -}}
{{- $wrong = append $wrong (printf "%s: %s is a label that the chart sets itself and uses in selectors: remove it from %s" $where $label $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $where, $resources := dict "resources" .Values.resources "valkey.resources" .Values.valkey.resources -}}
{{- range $name, $asked := (default dict $resources).requests -}}
{{- $limit := dig "limits" $name nil $resources -}}
{{- if and (not (kindIs "invalid" $limit)) (gt (include "batch-dispatcher.quantity" $asked | float64) (include "batch-dispatcher.quantity" $limit | float64)) -}}
{{- $wrong = append $wrong (printf "%s.requests.%s: %v is above %s.limits.%s (%v): raise the limit, or remove it by null" $where $name $asked $where $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.dnsPolicy "None") (not (default dict .Values.dnsConfig).nameservers) -}}
{{- $wrong = append $wrong "dnsConfig.nameservers: is required with dnsPolicy None" -}}
{{- end -}}
{{- if and .Values.hostNetwork .Values.networkPolicy.enabled -}}
{{- $wrong = append $wrong "networkPolicy.enabled: a NetworkPolicy has no effect on pods in the network of their node: set hostNetwork or networkPolicy.enabled to false" -}}
{{- end -}}
{{- if and $own .Release.IsUpgrade -}}
{{- $server := printf "%s-valkey" $name -}}
{{- /* The lookup finds nothing in `helm template`, or if the StatefulSet was deleted. */ -}}
{{- with (lookup "apps/v1" "StatefulSet" (include "batch-dispatcher.namespace" .) $server).spec -}}
{{- $claims := .volumeClaimTemplates -}}
{{- $volume := $.Values.valkey.persistence -}}
{{- $remedy := printf "which an upgrade cannot change: keep it, or delete the StatefulSet without its pod first (kubectl -n %s delete statefulset %s --cascade=orphan)" (include "batch-dispatcher.namespace" $) $server -}}
{{- if ne $volume.enabled (not (empty $claims)) -}}
{{- $wrong = append $wrong (printf "valkey.persistence.enabled: is %v, and this release was installed with %v, %s" $volume.enabled (not $volume.enabled) $remedy) -}}
{{- else if $claims -}}
{{- $claim := (first $claims).spec -}}
{{- $size := $claim.resources.requests.storage -}}
{{- if ne (include "batch-dispatcher.quantity" $size) (include "batch-dispatcher.quantity" $volume.size) -}}
{{- $wrong = append $wrong (printf "valkey.persistence.size: is %s, and this release was installed with %s, %s" $volume.size $size $remedy) -}}
{{- end -}}
{{- if ne (default "" $claim.storageClassName) $volume.storageClass -}}
{{- $wrong = append $wrong (printf "valkey.persistence.storageClass: is %q, and this release was installed with %q, %s" $volume.storageClass (default "" $claim.storageClassName) $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* the rest of the chart */}}
{{- if and .Values.networkPolicy.enabled (include "batch-dispatcher.asksModels" .) (not (dig "serving" "urls" list $config)) (not .Values.networkPolicy.egress.models.ports) -}}
{{- $wrong = append $wrong (printf "networkPolicy.egress.models.ports: is required: the targetPorts of the pool, which a chart cannot see (kubectl -n %s get inferencepool %s -o jsonpath='{.spec.targetPorts}')" (include "batch-dispatcher.poolNamespace" .) .Values.pool.name) -}}
{{- end -}}
{{- if and .Values.test.payload (hasKey (fromJson .Values.test.payload) "Error") -}}
{{- $wrong = append $wrong "test.payload: is not a JSON object" -}}
{{- end -}}
{{- if and .Values.inferenceObjective.create .Values.gateway.objective -}}
{{- $wrong = append $wrong "gateway.objective: is set by inferenceObjective.create: remove it, or name the objective in inferenceObjective.name" -}}
{{- end -}}
{{- if .Values.keda.enabled -}}
{{- if gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas) -}}
{{- $wrong = append $wrong "keda.minReplicas: must not be above keda.maxReplicas" -}}
{{- end -}}
{{- if not (or .Values.keda.redis.address $own (regexMatch "^rediss?://" $url)) -}}
{{- $wrong = append $wrong "keda.redis.address: is required: host:port of the queue's server, which cannot be read from a Secret, a Sentinel or a Cluster URL" -}}
{{- end -}}
{{- if and $own .Values.valkey.existingSecret.name (not .Values.keda.redis.existingSecret.name) -}}
{{- $wrong = append $wrong "keda.redis.existingSecret.name: is required: valkey.existingSecret gives the server a password" -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled) (dig "admin" "token_file" "" $config) -}}
{{- $wrong = append $wrong "config.admin.token_file: the monitor needs the token's Secret: set secretFiles (admin.token_file) instead" -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled -}}
{{- $wrong = append $wrong "monitoring.serviceMonitor.enabled: each pod would be scraped twice: use either podMonitor or serviceMonitor" -}}
{{- end -}}
{{- if .Values.sidecar.enabled -}}
{{- if and .Values.kubernetes.enabled .Values.rbac.create (not .Values.sidecar.serviceAccount) -}}
{{- $wrong = append $wrong "sidecar.serviceAccount: is required: the endpoint picker's, which gets the rights" -}}
{{- end -}}
{{- if not .Values.sidecar.deployment -}}
{{- $wrong = append $wrong "sidecar.deployment: is required: the name of the endpoint picker's Deployment" -}}
{{- end -}}
{{- if not .Values.sidecar.podLabels -}}
{{- $wrong = append $wrong "sidecar.podLabels: is required: the labels of the endpoint picker's pods" -}}
{{- end -}}
{{- range $name := list "keda" "networkPolicy" "checkHook" -}}
{{- if (get $.Values $name).enabled -}}
{{- $wrong = append $wrong (printf "%s.enabled: is incompatible with sidecar.enabled: the pods are the endpoint picker's" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "extraContainers" "extraInitContainers" "runtimeClassName" "hostNetwork" "dnsPolicy" "dnsConfig" -}}
{{- if get $.Values $name -}}
{{- $wrong = append $wrong (printf "%s: is incompatible with sidecar.enabled: the pods are the endpoint picker's" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "the values are wrong:\n- %s\n" (join "\n- " $wrong)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
