"""The rules of the chart's own values, where their defaults in values.yaml do not say enough.

What the API server would refuse, or take out without a word (a misspelt key), is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LABEL = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

_PORTS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}}
_EGRESS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"to": {"type": "array", "items": {"type": "object"}}, "ports": _PORTS},
}
_SECRET_KEY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "key": {"type": "string", "minLength": 1}},
}
_NAMED: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "minLength": 1}},
    },
}
_OR_NOTHING = {"type": ["boolean", "null"]}
_INTERVAL = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
_IMAGE: dict[str, dict[str, Any]] = {
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
    "registry": {"type": "string"},
    "repository": {"type": "string", "minLength": 1},
}
_QUANTITY: dict[str, Any] = {
    "type": ["string", "number"],
    "pattern": r"^[0-9]+(\.[0-9]+)?([eE][0-9]+|[KMGTPE]i|[mkMGTPE])?$",
    "minimum": 0,
}
_AMOUNTS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": dict.fromkeys(("cpu", "memory", "ephemeral-storage"), _QUANTITY),
    "patternProperties": {"^hugepages-": _QUANTITY, "/": _QUANTITY},
}
_RESOURCES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "requests": _AMOUNTS,
        "limits": _AMOUNTS,
        "claims": {"type": "array", "items": {"type": "object"}},
    },
}
_LABELS: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"},
    "additionalProperties": {
        "type": "string",
        "pattern": "^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$",
    },
}
_ANNOTATIONS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
_SOURCE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1}, "optional": {"type": "boolean"}},
}
_ENV_FROM: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"secretRef": _SOURCE, "configMapRef": _SOURCE, "prefix": {"type": "string"}},
}
_DNS_CONFIG: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "nameservers": {"type": "array", "items": {"type": "string"}},
        "searches": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "array", "items": {"type": "object"}},
    },
}


def _probe(more: str) -> dict[str, Any]:
    """Return the rule of a probe, whose path and port are the chart's; `more` is a key that not all have."""
    numbers = ("periodSeconds", "timeoutSeconds", "failureThreshold", more)
    properties = {name: {"type": "integer", "minimum": 1} for name in numbers}
    properties["initialDelaySeconds"] = {"type": "integer", "minimum": 0}
    return {"type": "object", "additionalProperties": False, "properties": properties}


PARTS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("resources", "valkey.resources"), _RESOURCES),
    **dict.fromkeys(
        (
            "podLabels",
            "commonLabels",
            "nodeSelector",
            "valkey.nodeSelector",
            "service.labels",
            "sidecar.podLabels",
            "monitoring.podMonitor.labels",
            "monitoring.serviceMonitor.labels",
            "monitoring.rules.labels",
            "monitoring.dashboard.labels",
        ),
        _LABELS,
    ),
    **dict.fromkeys(
        (
            "podAnnotations",
            "commonAnnotations",
            "service.annotations",
            "serviceAccount.annotations",
            "monitoring.dashboard.annotations",
        ),
        _ANNOTATIONS,
    ),
    "dnsConfig": _DNS_CONFIG,
}
"""Value → the rule of a part of a Kubernetes object that templates hand on as it is; null removes it."""
OWN: Mapping[str, dict[str, Any]] = {
    "pool.name": {"type": "string", "pattern": f"^$|{LABEL}"},
    "pool.namespace": {"type": "string", "pattern": f"^$|{LABEL}"},
    "gateway.url": {"type": "string", "pattern": "^$|^https?://"},
    "valkey.enabled": _OR_NOTHING,
    "rbac.modelRewrites": _OR_NOTHING,
    "valkey.existingSecret": _SECRET_KEY,
    "test.existingSecret": _SECRET_KEY,
    "imagePullSecrets": {
        "type": "array",
        "items": {**_NAMED["items"], "additionalProperties": False},
    },
    **dict.fromkeys(
        ("extraEnv", "extraVolumes", "extraVolumeMounts", "extraContainers", "extraInitContainers"), _NAMED
    ),
    "envFrom": {"type": "array", "items": _ENV_FROM},
    "dnsPolicy": {"enum": ["", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]},
    "startupProbe": _probe("terminationGracePeriodSeconds"),
    "readinessProbe": _probe("successThreshold"),
    "livenessProbe": _probe("terminationGracePeriodSeconds"),
    "monitoring.runbookUrl": {"type": "string", "pattern": "^$|^https?://"},
    "valkey.persistence.size": _QUANTITY | {"type": "string"},
    "valkey.maxmemory": {"type": "string", "pattern": "^[0-9]+([kmg]b?)?$"},
    "replicas": {"type": "integer", "minimum": 0},
    "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 0},
    "podDisruptionBudget.enabled": _OR_NOTHING,
    "podDisruptionBudget.maxUnavailable": {
        "type": ["integer", "string"],
        "minimum": 1,
        "pattern": "^[0-9]+%$",
    },
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "monitoring.podMonitor.interval": _INTERVAL,
    "monitoring.serviceMonitor.interval": _INTERVAL,
    "inferenceObjective.priority": {"type": "integer", "maximum": -1},
    "inferenceObjective.apiVersion": {
        "enum": ["llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"],
    },
    "keda.minReplicas": {"type": "integer", "minimum": 0},
    "keda.maxReplicas": {"type": "integer", "minimum": 1},
    "keda.backlog": {"type": "integer", "minimum": 1},
    "keda.pollingInterval": {"type": "integer", "minimum": 1},
    "keda.redis.existingSecret": {
        "type": "object",
        "additionalProperties": False,
        "properties": {**_SECRET_KEY["properties"], "usernameKey": {"type": "string"}},
    },
    "keda.redis.address": {"type": "string", "pattern": "^$|^[^/:@]+:[0-9]+$"},
    "keda.prometheus.url": {"type": "string", "pattern": "^$|^https?://"},
    "keda.prometheus.deadlineSlack": {"type": "integer", "minimum": 1},
    "test.deadline": {"type": "integer", "minimum": 1},
    **{f"image.{name}": rule for name, rule in _IMAGE.items()},
    **{f"valkey.image.{name}": rule for name, rule in _IMAGE.items()},
    **{
        f"networkPolicy.egress.{name}": _EGRESS
        for name in ("dns", "gateway", "queue", "picker", "models", "prometheus", "apiServer", "tracing")
    },
}
"""Value → what its default in values.yaml does not say of it."""
