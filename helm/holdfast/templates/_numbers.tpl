{{/* A duration such as "1h 30m" in milliseconds. The schema allows no other form. */}}
{{- define "holdfast.ms" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 -}}
{{- $total := 0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h|d)" . -1 -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $total = add $total (mul $number (get $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{/* What follows from a group's times, as JSON. Takes the context of a group. Times that contradict
     each other end the render. */}}
{{- define "holdfast.numbers" -}}
{{- $where := printf "workers.%s" .name -}}
{{- $config := .group.config -}}
{{- $ttl := include "holdfast.ms" $config.lease.ttl | int64 -}}
{{- $killGrace := include "holdfast.ms" $config.lease.kill_grace | int64 -}}
{{- $leaseSlack := include "holdfast.ms" $config.lease.slack | int64 -}}

{{/* What runs must be dead before its lease can be granted again. */}}
{{- if gt (add (mul $killGrace 101) (mul $ttl 2) (mul $leaseSlack 100)) (mul $ttl 25) -}}
{{- fail (printf "%s: lease.kill_grace %s * 1.01 + 0.02 * lease.ttl %s + lease.slack %s is more than lease.ttl/4: lower lease.kill_grace or lease.slack, or raise lease.ttl" $where $config.lease.kill_grace $config.lease.ttl $config.lease.slack) -}}
{{- end -}}

{{/* The service manager waits for the whole drain. */}}
{{- $stop := $killGrace -}}
{{- range list "grace" "release" "slack" -}}
{{- $stop = add $stop (include "holdfast.ms" (get $config.drain .) | int64) -}}
{{- end -}}
{{- $needed := div (add $stop 999) 1000 -}}
{{- $grace := $needed -}}
{{- if not (kindIs "invalid" .group.terminationGracePeriodSeconds) -}}
{{- $grace = .group.terminationGracePeriodSeconds | int64 -}}
{{- if lt $grace $needed -}}
{{- fail (printf "%s: terminationGracePeriodSeconds %d is less than drain.grace + lease.kill_grace + drain.release + drain.slack = %ds: leave it out, or lower those" $where $grace $needed) -}}
{{- end -}}
{{- end -}}

{{/* A worker that hangs, even just before a heartbeat, is gone before its leases can be granted
     again: ttl - ttl/3, less the time after which /livez notices that nothing moves. */}}
{{- $notices := max 3000 (div $ttl 20) -}}
{{- $budget := div (sub (div (mul $ttl 2) 3) $notices) 1000 -}}
{{- if lt $budget 5 -}}
{{- fail (printf "%s: lease.ttl %s is too short for probes of Kubernetes, which would end a worker that hangs after its leases were granted again: 12s is the least" $where $config.lease.ttl) -}}
{{- end -}}
{{- $period := min 30 (div (mul $budget 65) 300) | max 1 -}}
{{- $timeout := min 5 (div $budget 12) | max 1 -}}
{{- $rest := min 30 (sub $budget (add (mul 3 $period) $timeout)) -}}
{{- $computed := dict "periodSeconds" $period "failureThreshold" 3 "timeoutSeconds" $timeout "terminationGracePeriodSeconds" $rest -}}
{{- $probe := dict -}}
{{- range $key, $value := $computed -}}
{{- $given := $.group.livenessProbe -}}
{{- $_ := set $probe $key (hasKey $given $key | ternary (get $given $key) $value | int64) -}}
{{- end -}}
{{- $takes := add (mul $probe.periodSeconds $probe.failureThreshold) $probe.timeoutSeconds $probe.terminationGracePeriodSeconds -}}
{{- if gt $takes $budget -}}
{{- fail (printf "%s: livenessProbe takes periodSeconds * failureThreshold + timeoutSeconds + terminationGracePeriodSeconds = %ds to end a worker that hangs, and lease.ttl %s leaves %ds: make it faster, or raise lease.ttl" $where $takes $config.lease.ttl $budget) -}}
{{- end -}}

{{/* A rollout makes progress at most a drain apart. */}}
{{- dict "grace" $grace "progressDeadline" (max 600 (add $grace 300)) "livenessProbe" $probe | toJson -}}
{{- end -}}
