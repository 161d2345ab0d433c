{{/* A setting as TOML. JSON writes texts, numbers and lists the same way; tables differ. */}}
{{- define "holdfast.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- $separator := " " -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{ $separator }}{{ toRawJson $key }} = {{ include "holdfast.tomlValue" $value }}
{{- $separator = ", " -}}
{{- end -}}
{{- end }} }
{{- else -}}
{{ toRawJson . }}
{{- end -}}
{{- end -}}

{{/* The keys of one table. null stands for the default, and is left out. */}}
{{- define "holdfast.tomlTable" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "holdfast.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The holdfast.toml of a group. Takes its config. */}}
{{- define "holdfast.toml" -}}
# Made by the chart, from `config` and the group's.
{{- range $section, $table := omit . "queues" }}
{{- if $table }}

[{{ $section }}]
{{- include "holdfast.tomlTable" $table }}
{{- end }}
{{- end }}
{{- range $name, $queue := .queues }}

[queues.{{ toRawJson $name }}]
{{- include "holdfast.tomlTable" $queue }}
{{- end }}
{{- end -}}
