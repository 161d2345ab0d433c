{{- define "holdfast.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 35 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 35 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 35 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a release: never changes. Takes the root. */}}
{{- define "holdfast.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. Takes the root. */}}
{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: no versions, which would start them anew without need. Takes the root. */}}
{{- define "holdfast.podLabels" -}}
{{ include "holdfast.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What selects the pods of one group of workers. Takes the context of a group. */}}
{{- define "holdfast.groupSelector" -}}
{{ include "holdfast.selector" .root }}
app.kubernetes.io/component: worker
holdfast/group: {{ .name }}
{{- end -}}

{{- define "holdfast.groupLabels" -}}
{{ include "holdfast.labels" .root }}
app.kubernetes.io/component: worker
holdfast/group: {{ .name }}
{{- end -}}

{{- define "holdfast.groupName" -}}
{{ include "holdfast.fullname" .root }}-worker-{{ .name }}
{{- end -}}

{{- define "holdfast.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is not set: no image is published; build deploy/image/Dockerfile and name yours" $image.repository -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "holdfast.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "holdfast.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* Pod and container as Pod Security "restricted" wants them. Take runAsUser and its like. */}}
{{- define "holdfast.podSecurity" -}}
runAsNonRoot: true
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- if hasKey $ $key }}
{{- if not (kindIs "invalid" (get $ $key)) }}
{{ $key }}: {{ get $ $key | int64 }}
{{- end }}
{{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "holdfast.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{/* A pod that runs one command on the database and ends, with nothing that the chart makes: it
     also runs before the first install. Takes root, component and args. */}}
{{- define "holdfast.commandPod" -}}
{{- $settings := .root.Values.migrations -}}
metadata:
  labels:
    {{- include "holdfast.podLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $settings.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $settings.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "holdfast.podSecurity" (pick .root.Values.worker "runAsUser" "runAsGroup") | nindent 4 }}
  {{- with $settings.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "holdfast.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [holdfast]
      args: {{ toJson .args }}
      env:
        - name: HOLDFAST__DATABASE__URL
          valueFrom:
            secretKeyRef:
              {{- if $settings.existingSecret }}
              name: {{ $settings.existingSecret }}
              key: {{ $settings.urlKey }}
              {{- else }}
              name: {{ .root.Values.database.existingSecret }}
              key: {{ .root.Values.database.urlKey }}
              {{- end }}
      {{- with $settings.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "holdfast.containerSecurity" . | nindent 8 }}
{{- end -}}
