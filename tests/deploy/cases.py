"""Value sets with which the tests render the chart, each for one use case of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASIC: Mapping[str, Any] = {
    "pool": {"name": "qwen"},
    "gateway": {"url": "http://gateway"},
    "image": {"registry": "registry.example", "tag": "1.2"},
}
QUEUE: Mapping[str, Any] = {"redis": {"existingSecret": {"name": "queue", "key": "url"}}}
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}

CASES: Mapping[str, Mapping[str, Any]] = {
    "basic": {},
    "queue-by-secret": QUEUE,
    "queue-by-url": {
        "config": {
            "queue": {"url": "rediss://redis.data:6380/2", "name": "jobs", "max_payload_bytes": 33554432}
        }
    },
    "chart-valkey": {
        "valkey": {
            "enabled": True,
            "existingSecret": {"name": "valkey"},
            "persistence": {"enabled": False},
            "image": {"digest": "sha256:" + "0" * 64},
            "nodeSelector": {"disk": "fast"},
        },
        "imagePullSecrets": [{"name": "pull"}],
    },
    "many-replicas": {
        **QUEUE,
        "replicas": 3,
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "batch",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}},
        "config": {"shutdown": {"drain_s": 30.5}},
    },
    "without-kubernetes": {
        **QUEUE,
        "kubernetes": {"enabled": False},
        "config": {"signals": {"epp": {"urls": ["http://picker:9090"]}}},
    },
    "through-prometheus": {
        **QUEUE,
        "config": {"signals": {"source": "prometheus", "prometheus": {"url": "http://prometheus:9090"}}},
    },
    "picker-by-service": {**QUEUE, "config": {"signals": {"epp": {"service": "picker", "port": 9191}}}},
    "pool-in-other-namespace": {
        **QUEUE,
        "pool": {"name": "qwen", "namespace": "models"},
        "rbac": {"v1alpha2": False},
    },
    "files": {
        **QUEUE,
        "gateway": {"url": "https://gateway", "headers": {"Host": "models"}},
        "secretFiles": {
            "gateway.token_file": {"secret": "gateway", "key": "token"},
            "gateway.tls.ca_file": {"configMap": "authorities", "key": "ca.crt"},
            "gateway.tls.cert_file": {"secret": "mtls", "key": "tls.crt"},
            "gateway.tls.key_file": {"secret": "mtls", "key": "tls.key"},
            "signals.epp.token_file": {"secret": "picker", "key": "token"},
            "signals.prometheus.token_file": {"secret": "prometheus", "key": "token"},
        },
        "config": {"signals": {"prometheus": {"url": "https://prometheus"}}},
    },
    "observe": {"observe": True, "config": {"log": {"level": "debug"}}},
    "pod-monitor": {
        "monitoring": {
            "podMonitor": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "interval": "30s",
                "relabelings": [{"targetLabel": "cluster", "replacement": "east"}],
            }
        },
        "secretFiles": {"admin.token_file": {"secret": "admin", "key": "token"}},
        "config": {"admin": {"port": 9000}},
    },
    "service-monitor": {
        "monitoring": {
            "serviceMonitor": {
                "enabled": True,
                "metricRelabelings": [{"action": "labeldrop", "regex": "endpoint"}],
            }
        },
        "service": {
            "type": "LoadBalancer",
            "port": 80,
            "labels": {"team": "ml"},
            "annotations": {"internal": "true"},
        },
    },
    "rules": {
        "monitoring": {
            "runbookUrl": "https://wiki/runbook.md",
            "rules": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "alerts": {
                    "BatchDispatcherStarved": {"enabled": False},
                    "BatchDispatcherRefusals": {"threshold": 0.2, "for": "10m", "severity": "info"},
                    "BatchDispatcherDown": {"threshold": "2d"},
                },
            },
        }
    },
    "dashboard": {"monitoring": {"dashboard": {"enabled": True, "namespace": "monitoring"}}},
    "network-policy": {"networkPolicy": {"enabled": True, "ingress": {"from": [PEER], "producers": [PEER]}}},
    "network-policy-all-rules": {
        "gateway": {"url": "https://gateway:8443"},
        "config": {
            "queue": {"url": "redis+sentinel://s1:26379,s2:26379/main"},
            "tracing": {"endpoint": "http://collector:4318"},
            "signals": {
                "prometheus": {"url": "http://prometheus:9090"},
                "epp": {"urls": ["http://a:9090", "https://b"]},
            },
            "models": [{"name": "m"}],
        },
        "networkPolicy": {
            "enabled": True,
            "egress": {
                "gateway": {"to": [PEER]},
                "models": {"to": [PEER], "ports": [8200]},
                "queue": {"to": [PEER], "ports": [6379, 26379]},
                "extra": [{"ports": [{"port": 8126, "protocol": "TCP"}]}],
            },
        },
    },
    "keda": {"keda": {"enabled": True}, "podDisruptionBudget": {"enabled": False}},
    "keda-with-prometheus": {
        "config": {"queue": {"url": "rediss://redis.data:6380/2", "name": "jobs"}},
        "keda": {
            "enabled": True,
            "minReplicas": 1,
            "redis": {"existingSecret": {"name": "redis"}},
            "prometheus": {"url": "http://prometheus:9090"},
        },
    },
    "objective": {"inferenceObjective": {"create": True, "priority": -100}},
    "objective-of-inference-extension": {
        "pool": {"name": "qwen", "namespace": "models"},
        "inferenceObjective": {
            "create": True,
            "name": "batch",
            "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        },
    },
    "extras": {
        "extraEnv": [{"name": "BATCH_DISPATCHER__LOG__FORMAT", "value": "json"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-more"},
                "data": {"pool": "{{ .Values.pool.name }}"},
            }
        ],
        "extraContainers": [
            {
                "name": "extra",
                "image": "extra:1",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {"requests": {"memory": "16Mi"}},
            }
        ],
        "podAnnotations": {"note": "1"},
        "podLabels": {"team": "ml"},
        "commonLabels": {"cost-center": "a1"},
        "commonAnnotations": {"owner": "ml"},
        "test": {"existingSecret": {"name": "producer"}},
        "terminationGracePeriodSeconds": 600,
        "checkHook": {"enabled": True},
        "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
    },
    "pod-options": {
        "image": {"registry": "registry.example:5000/ml", "tag": "1.2"},
        "valkey": {"image": {"registry": "registry.example:5000"}},
        "envFrom": [{"secretRef": {"name": "proxy"}}, {"configMapRef": {"name": "more"}, "prefix": "MORE_"}],
        "extraInitContainers": [
            {
                "name": "first",
                "image": "first:1",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {"requests": {"memory": "16Mi"}},
            }
        ],
        "runtimeClassName": "gvisor",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["192.0.2.1"], "options": [{"name": "ndots", "value": "1"}]},
        "resources": {"limits": {"memory": None, "hugepages-2Mi": "4Mi", "example.com/device": 1}},
        "readinessProbe": {"successThreshold": 2},
    },
    "shared-platform": {
        "namespaceOverride": "batch",
        "image": {"tag": "1"},
        "global": {"imageRegistry": "mirror.example"},
        "replicas": 3,
        "strategy": {"type": "Recreate"},
        "podDisruptionBudget": {"minAvailable": 2},
        "service": {"ipFamilyPolicy": "PreferDualStack"},
        "monitoring": {
            "podMonitor": {"enabled": True, "namespace": "monitoring", "scrapeTimeout": "5s"},
            "rules": {"enabled": True, "alerts": {}},
        },
    },
    "sidecar": {
        **QUEUE,
        "sidecar": {
            "enabled": True,
            "deployment": "picker",
            "serviceAccount": "picker",
            "podLabels": {"app": "picker"},
        },
        "monitoring": {"podMonitor": {"enabled": True}},
        "secretFiles": {"gateway.token_file": {"secret": "gateway", "key": "token"}},
        "test": {"enabled": False},
    },
    "renamed": {
        "nameOverride": "batch-runner",
        "fullnameOverride": "night-shift",
        "image": {"repository": "images/batch", "digest": "sha256:" + "1" * 64, "pullPolicy": "Always"},
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False},
        "test": {"enabled": False},
    },
}
"""Values that are added to BASIC, by the name of the case."""

PICKER = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: picker, namespace: llm}
spec:
  selector: {matchLabels: {app: picker}}
  template:
    metadata: {labels: {app: picker}}
    spec:
      serviceAccountName: picker
      terminationGracePeriodSeconds: 130
      containers:
        - name: epp
          image: picker
          ports: [{name: metrics, containerPort: 9090}]
          volumeMounts: [{name: config, mountPath: /config}]
      volumes: [{name: config, configMap: {name: picker}}]
"""
"""Deployment of an endpoint picker, as another chart installs it; the sidecar is added to its pod."""
