{{- define "lmpool.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a part is found by, which never changes: (list . "worker"). */}}
{{- define "lmpool.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "lmpool.labels" -}}
{{- $root := index . 0 -}}
{{ include "lmpool.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* Those of a pod. */}}
{{- define "lmpool.podLabels" -}}
{{ include "lmpool.labels" . }}
{{- with (index . 0).Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (list . .Values.gateway.image "0.1.0") */}}
{{- define "lmpool.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest | quote -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default (index . 2) $image.tag) | quote -}}
{{- end -}}
{{- end -}}

{{- define "lmpool.secret" -}}
{{- required "existingSecret is empty: make a Secret of the server's URLs and passwords, and name it (see values.yaml)" .Values.existingSecret -}}
{{- end -}}

{{- define "lmpool.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "lmpool.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What all pods have. No service links: Kubernetes' LMPOOL_..._PORT variables would be settings. */}}
{{- define "lmpool.pod" -}}
serviceAccountName: {{ include "lmpool.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lmpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "lmpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* (dict "root" . "component" "worker") */}}
{{- define "lmpool.podMetadata" -}}
labels:
  {{- include "lmpool.podLabels" (list .root .component) | nindent 2 }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lmpool.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lmpool.url" -}}
- name: LMPOOL_URL
  valueFrom: { secretKeyRef: { name: {{ include "lmpool.secret" (index . 0) }}, key: {{ index . 1 }} } }
- name: LMPOOL_POOL
  value: {{ (index . 0).Values.pool | quote }}
{{- end -}}

{{/* Of a cluster: the service that gives each node a name, and how many nodes there are. */}}
{{- define "lmpool.nodes" -}}
{{- include "lmpool.fullname" . }}-nodes
{{- end -}}

{{- define "lmpool.nodeCount" -}}
{{- mul .Values.server.cluster.primaries (add1 .Values.server.cluster.replicas) -}}
{{- end -}}
