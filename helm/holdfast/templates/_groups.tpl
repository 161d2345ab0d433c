{{/* The groups of workers, as JSON: what each sets, over `worker`; its config over the one of all. */}}
{{- define "holdfast.groups" -}}
{{- $groups := dict -}}
{{- range $name, $own := .Values.workers -}}
{{- if not (kindIs "invalid" $own) -}}
{{- $group := mustMergeOverwrite (deepCopy $.Values.worker) (deepCopy $own) -}}
{{- $config := mustMergeOverwrite (deepCopy $.Values.config) (deepCopy $.Values.worker.config) (deepCopy ($own.config | default dict)) -}}
{{- range $queue, $settings := $config.queues -}}
{{- if kindIs "invalid" $settings -}}
{{- $_ := unset $config.queues $queue -}}
{{- end -}}
{{- end -}}
{{- $_ := set $group "config" $config -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* The port of health and metrics. Takes the context of a group. */}}
{{- define "holdfast.healthPort" -}}
{{- $listen := .group.config.health.listen -}}
{{- $port := regexFind "[0-9]+$" $listen | default "0" | int -}}
{{- if or (eq $port 0) (hasPrefix "127." $listen) (hasPrefix "[::1]" $listen) -}}
{{- fail (printf "workers.%s: health.listen %q cannot be reached by the probes: it must be an address of the pod with a port, such as 0.0.0.0:9464" .name $listen) -}}
{{- end -}}
{{- $port -}}
{{- end -}}

{{/* The configuration of the exporter, as JSON: what concerns it, and the queues of all groups. Takes
     the root. */}}
{{- define "holdfast.exporterConfig" -}}
{{- $config := pick .Values.config "database" "log" "exporter" -}}
{{- $queues := dict -}}
{{- range $name, $group := include "holdfast.groups" . | fromJson -}}
{{- $queues = merge $queues ($group.config.queues | default dict) -}}
{{- end -}}
{{- toJson (set $config "queues" $queues) -}}
{{- end -}}

{{/* The port of the exporter. Takes the root. */}}
{{- define "holdfast.exporterPort" -}}
{{- $listen := .Values.config.exporter.listen -}}
{{- $port := regexFind "[0-9]+$" $listen | default "0" | int -}}
{{- if or (eq $port 0) (hasPrefix "127." $listen) (hasPrefix "[::1]" $listen) -}}
{{- fail (printf "config.exporter.listen %q cannot be reached by the probes: it must be an address of the pod with a port, such as 0.0.0.0:9465" $listen) -}}
{{- end -}}
{{- $port -}}
{{- end -}}

{{/* The most workers of a group. Takes it. */}}
{{- define "holdfast.most" -}}
{{- ternary .autoscaling.maxReplicas .replicas .autoscaling.enabled | int -}}
{{- end -}}

{{/* Connections that all workers open while a rollout doubles them: each its pool, and one to
     listen. Takes the groups. */}}
{{- define "holdfast.connections" -}}
{{- $all := 0 -}}
{{- range . -}}
{{- $all = add $all (mul 2 (include "holdfast.most" . | int) (add 1 (int .config.database.pool_size))) -}}
{{- end -}}
{{- $all -}}
{{- end -}}

{{/* What is missing, and what cannot work together. Takes the root. */}}
{{- define "holdfast.check" -}}
{{- $_ := required "database.existingSecret is not set: name a Secret that holds the URL of the database" .Values.database.existingSecret -}}
{{- $groups := include "holdfast.groups" . | fromJson -}}
{{- if not $groups -}}
{{- fail "workers: there is no group, so nothing would run" -}}
{{- end -}}
{{- range $name, $group := $groups -}}
{{- $queues := $group.config.queues | default dict -}}
{{- if not $queues -}}
{{- fail (printf "workers.%s: no queue is configured, so it would serve nothing: add one to config.queues" $name) -}}
{{- end -}}
{{- range ($group.config.worker | default dict).queues -}}
{{- if not (hasKey $queues .) -}}
{{- fail (printf "workers.%s: config.worker.queues names %q, which is not in config.queues" $name .) -}}
{{- end -}}
{{- end -}}
{{- with $group.autoscaling -}}
{{- if and .enabled (not .metrics) -}}
{{- fail (printf "workers.%s: autoscaling.metrics is empty: name a metric that counts running work" $name) -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "workers.%s: autoscaling.minReplicas %d is above maxReplicas %d" $name (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $connections := include "holdfast.connections" $groups | int -}}
{{- $limit := .Values.database.maxConnections | int -}}
{{- if and $limit (gt $connections $limit) -}}
{{- fail (printf "database.maxConnections %d is less than the %d that the workers may open during a rollout (2 * replicas * (database.pool_size + 1)): have fewer workers, a smaller pool, or a pooler" $limit $connections) -}}
{{- end -}}
{{- $monitored := or .Values.podMonitor.enabled (and .Values.exporter.enabled .Values.exporter.serviceMonitor.enabled) -}}
{{- if and $monitored .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
{{- fail "networkPolicy.metricsFrom is empty: nobody may read the metrics that the monitors ask for; name the pods of Prometheus" -}}
{{- end -}}
{{- end -}}
