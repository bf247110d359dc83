"""Schema rules of values whose defaults in values.yaml do not determine them.

They reject values that the API server would reject, or drop without an error, such as misspelt keys.
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
_NAMED_OBJECTS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "minLength": 1}},
    },
}
_OPTIONAL_BOOLEAN = {"type": ["boolean", "null"]}
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
_RESOURCE_QUANTITIES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": dict.fromkeys(("cpu", "memory", "ephemeral-storage"), _QUANTITY),
    "patternProperties": {"^hugepages-": _QUANTITY, "/": _QUANTITY},
}
_RESOURCES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "requests": _RESOURCE_QUANTITIES,
        "limits": _RESOURCE_QUANTITIES,
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


def _probe(extra_key: str) -> dict[str, Any]:
    """Return the rule of a probe without path and port. `extra_key` is a key that only some probes have."""
    numbers = ("periodSeconds", "timeoutSeconds", "failureThreshold", extra_key)
    properties = {name: {"type": "integer", "minimum": 1} for name in numbers}
    properties["initialDelaySeconds"] = {"type": "integer", "minimum": 0}
    return {"type": "object", "additionalProperties": False, "properties": properties}


OBJECT_PART_RULES: Mapping[str, dict[str, Any]] = {
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
    "strategy": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "type": {"enum": ["RollingUpdate", "Recreate"]},
            "rollingUpdate": {"type": ["object", "null"]},
        },
    },
}
"""Rules of values that templates copy into Kubernetes objects; null removes such a value."""
VALUE_RULES: Mapping[str, dict[str, Any]] = {
    "pool.name": {"type": "string", "pattern": f"^$|{LABEL}"},
    "pool.namespace": {"type": "string", "pattern": f"^$|{LABEL}"},
    "gateway.url": {"type": "string", "pattern": "^$|^https?://"},
    "valkey.enabled": _OPTIONAL_BOOLEAN,
    "rbac.modelRewrites": _OPTIONAL_BOOLEAN,
    "valkey.existingSecret": _SECRET_KEY,
    "test.existingSecret": _SECRET_KEY,
    "imagePullSecrets": {
        "type": "array",
        "items": {**_NAMED_OBJECTS["items"], "additionalProperties": False},
    },
    **dict.fromkeys(
        ("extraEnv", "extraVolumes", "extraVolumeMounts", "extraContainers", "extraInitContainers"),
        _NAMED_OBJECTS,
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
    "podDisruptionBudget.enabled": _OPTIONAL_BOOLEAN,
    "podDisruptionBudget.maxUnavailable": {
        "type": ["integer", "string"],
        "minimum": 1,
        "pattern": "^[0-9]+%$",
    },
    "podDisruptionBudget.minAvailable": {
        "type": ["integer", "string", "null"],
        "minimum": 1,
        "pattern": "^[0-9]+%$",
    },
    "namespaceOverride": {"type": "string", "pattern": f"^$|{LABEL}"},
    "service.ipFamilyPolicy": {"enum": ["", "SingleStack", "PreferDualStack", "RequireDualStack"]},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    **{
        f"monitoring.{monitor}.{name}": rule
        for monitor in ("podMonitor", "serviceMonitor")
        for name, rule in (
            ("interval", _INTERVAL),
            ("scrapeTimeout", _INTERVAL | {"pattern": f"^$|{_INTERVAL['pattern']}"}),
            ("namespace", {"type": "string", "pattern": f"^$|{LABEL}"}),
        )
    },
    "inferenceObjective.priority": {"type": "integer", "maximum": -1},
    "inferenceObjective.apiVersion": {
        "enum": ["", "llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"],
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
"""Rules of values, by path."""
