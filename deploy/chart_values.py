"""The rules of the chart's own values, where their defaults in values.yaml do not say enough."""

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
    "repository": {"type": "string", "minLength": 1},
}
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
    **dict.fromkeys(("extraEnv", "extraVolumes", "extraVolumeMounts", "extraContainers"), _NAMED),
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
