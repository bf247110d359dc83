"""Values that the chart rejects, each with a part of the error message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.deploy.cases import CASES, QUEUE

REJECTED_VALUES: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"pool": {"name": ""}}, "pool.name: is required"),
    ({"gateway": {"url": ""}}, "gateway.url: is required"),
    ({"gateway": {"url": "gateway:80"}}, "/gateway/url"),
    ({"pool": {"name": "Qwen_7B"}}, "/pool/name"),
    ({"pool": {"nam": "qwen"}}, "'nam'"),
    ({"config": None}, "missing property 'config'"),
    ({"redis": {"existingSecret": None}}, "missing property 'existingSecret'"),
    ({"replica": 2}, "'replica'"),
    ({"replicas": "2"}, "/replicas"),
    ({"config": {"budget": {"reserve": 1.5}}}, "/config/budget/reserve"),
    ({"config": {"budget": {"reserve": "10%"}}}, "/config/budget/reserve"),
    ({"config": {"budget": {"reserv": 0.1}}}, "'reserv'"),
    ({"config": {"budget": {"per_endpoint": "automatic"}}}, "/config/budget/per_endpoint"),
    ({"config": {"budget": {"max_in_flight": 0}}}, "/config/budget/max_in_flight"),
    ({"config": {"budget": {"upper": 0.5}}}, "config.budget.upper: must not be below"),
    ({"config": {"pool": {"name": "qwen"}}}, "config.pool: pool belongs to the top level"),
    ({"config": {"queues": {}}}, "'queues'"),
    ({"config": {"batching": {"mode": "yes"}}}, "/config/batching/mode"),
    (
        {"config": {"batching": {"rules": [{"paths": ["/a"], "max_delay_s": "long"}]}}},
        "/batching/rules/0/max_delay_s",
    ),
    ({"config": {"batching": {"rules": [{"shape": "embeddings"}]}}}, "missing property 'paths'"),
    ({"config": {"batching": {"rules": [{"paths": []}]}}}, "/config/batching/rules/0/paths"),
    (
        {"config": {"batching": {"rules": [{"paths": ["/a"], "shape": "x"}]}}},
        "/config/batching/rules/0/shape",
    ),
    ({"config": {"batching": {"rules": [{"paths": ["/a"], "max_size": 0}]}}}, "/batching/rules/0/max_size"),
    ({"config": {"batching": {"rules": [{"paths": ["/a"], "preferred_sizes": [0]}]}}}, "/preferred_sizes/0"),
    ({"config": {"queue": {"data_dir": "/data"}}}, "'data_dir'"),
    ({"config": {"queue": {"url": "http://redis"}}}, "/config/queue/url"),
    (
        {"config": {"queue": {"url": "redis://:secret@redis"}}},
        "config.queue.url: contains a user or a password",
    ),
    (
        {**QUEUE, "config": {"queue": {"url": "redis://redis"}}},
        "redis.existingSecret.name, config.queue.url: name",
    ),
    ({**QUEUE, "valkey": {"enabled": True}}, "redis.existingSecret.name, valkey.enabled: name more than one"),
    (
        {"extraEnv": [{"name": "BATCH_DISPATCHER__QUEUE__URL", "value": "redis://redis"}]},
        "extraEnv: BATCH_DISPATCHER__QUEUE__URL names another queue than the chart's own",
    ),
    ({"gateway": {"url": "https://me:secret@a"}}, "gateway.url: contains a user or a password"),
    (
        {"config": {"signals": {"prometheus": {"url": "http://me:secret@prometheus"}}}},
        "(BATCH_DISPATCHER__SIGNALS__PROMETHEUS__URL)",
    ),
    (
        {"config": {"tracing": {"endpoint": "http://me:secret@otel:4318"}}},
        "(BATCH_DISPATCHER__TRACING__ENDPOINT)",
    ),
    ({"test": {"payload": "hi"}}, "test.payload: is not a JSON object"),
    ({"valkey": {"enabled": False}}, "valkey.enabled: is false, and no other queue is configured"),
    ({"config": {"queue": {"lease_s": 10, "owner_timeout_s": 20}}}, "config.queue.owner_timeout_s: must not"),
    ({"config": {"retry": {"base_s": 90}}}, "config.retry.max_s: must not be below"),
    (
        {"config": {"signals": {"interval_s": 10, "max_age_s": 15}}},
        "config.signals.max_age_s: must be at least two",
    ),
    ({"config": {"signals": {"source": "prometheus"}}}, "config.signals.prometheus.url: is required"),
    ({"config": {"signals": {"source": "epps"}}}, "/config/signals/source"),
    (
        {"config": {"signals": {"prometheus": {"queries": {"capacities": "1"}}}}},
        "'capacities'",
    ),
    ({"config": {"log": {"level": "verbose"}}}, "/config/log/level"),
    ({"config": {"admin": {"port": 0}}}, "/config/admin/port"),
    ({"config": {"shutdown": {"drain_s": -1}}}, "/config/shutdown/drain_s"),
    ({"terminationGracePeriodSeconds": 60}, "terminationGracePeriodSeconds: must be above shutdown.drain_s"),
    (
        {"kubernetes": {"enabled": False}},
        "kubernetes.enabled: is false, so the endpoint picker cannot be found",
    ),
    ({"secretFiles": {"gateway.token": {"secret": "a", "key": "b"}}}, "'gateway.token'"),
    ({"secretFiles": {"gateway.token_file": {"secret": "a"}}}, "/secretFiles/gateway.token_file"),
    ({"secretFiles": {"gateway.token_file": {"key": "b"}}}, "secretFiles: gateway.token_file: name either"),
    (
        {"secretFiles": {"gateway.tls.cert_file": {"secret": "a", "key": "b"}}},
        "gateway.tls: cert_file and key_file",
    ),
    (
        {"gateway": {"url": "http://a", "headers": {"Authorization": "Bearer x"}}},
        "set a bearer token by secretFiles (gateway.token_file), else all headers by extraEnv from a Secret",
    ),
    (
        {"gateway": {"url": "http://a", "headers": {"X-Api-Key": "x"}}},
        "gateway.headers: X-Api-Key looks like a secret, which a ConfigMap must not contain: set all headers",
    ),
    (
        {"config": {"signals": {"prometheus": {"url": "http://a", "headers": {"Cookie": "x"}}}}},
        "(BATCH_DISPATCHER__SIGNALS__PROMETHEUS__HEADERS, a JSON object)",
    ),
    ({"imagePullSecrets": ["pull"]}, "/imagePullSecrets/0"),
    ({"image": {"tag": "1"}}, "image.registry: is required, because no image is published: build and push"),
    ({"image": {"registry": "a.example"}}, "image.digest: is required (or image.tag), because no image is"),
    (
        {"networkPolicy": {"enabled": True}, "config": {"models": [{"name": "m"}]}},
        "networkPolicy.egress.models.ports: is required: the targetPorts of the pool",
    ),
    ({"strategy": {"type": "Replace"}}, "/strategy/type"),
    # Values that the API server would reject, or drop without an error.
    ({"resources": {"limit": {"memory": "1Gi"}}}, "at '/resources': additional properties 'limit'"),
    ({"resources": {"limits": {"memroy": "1Gi"}}}, "at '/resources/limits': additional properties 'memroy'"),
    ({"resources": {"limits": {"memory": "1 GB"}}}, "/resources/limits/memory"),
    ({"resources": {"requests": {"memory": "1Gi"}}}, "resources.requests.memory: 1Gi is above"),
    (
        {"resources": {"requests": {"cpu": "1.5"}, "limits": {"cpu": "900m"}}},
        "resources.requests.cpu: 1.5 is",
    ),
    ({"valkey": {"resources": {"limits": {"memory": "64Mi"}}}}, "valkey.resources.requests.memory: 128Mi is"),
    ({"valkey": {"resources": {"request": {}}}}, "at '/valkey/resources': additional properties 'request'"),
    ({"livenessProbe": {"failureTreshold": 3}}, "at '/livenessProbe': additional properties"),
    ({"livenessProbe": {"successThreshold": 2}}, "'successThreshold' not allowed"),
    ({"readinessProbe": {"terminationGracePeriodSeconds": 9}}, "'terminationGracePeriodSeconds' not allowed"),
    ({"startupProbe": {"periodSeconds": 0}}, "/startupProbe/periodSeconds"),
    ({"podLabels": {"app.kubernetes.io/name": "a"}}, "podLabels: app.kubernetes.io/name is a label that the"),
    ({"commonLabels": {"app.kubernetes.io/component": "a"}}, "commonLabels: app.kubernetes.io/component is"),
    (
        {"service": {"labels": {"app.kubernetes.io/instance": "a"}}},
        "service.labels: app.kubernetes.io/instance",
    ),
    ({"podLabels": {"team": 1}}, "/podLabels/team"),
    ({"podLabels": {"team": "batch and more"}}, "/podLabels/team"),
    ({"commonLabels": {"my team": "a"}}, "'my team'"),
    ({"podAnnotations": {"note": True}}, "/podAnnotations/note"),
    (
        {"image": {"repository": "REGISTRY/batch-dispatcher"}},
        'image.repository: "REGISTRY/batch-dispatcher" is not the name of an image',
    ),
    ({"image": {"repository": "batch-dispatcher:1"}}, "a tag or digest into image.tag or image.digest"),
    (
        {"valkey": {"image": {"registry": "https://a"}}},
        'valkey.image.repository: "https://a/valkey/valkey" is',
    ),
    ({"fullnameOverride": "1st"}, 'fullnameOverride: the release\'s objects would be called "1st"'),
    ({"fullnameOverride": "Night"}, "fullnameOverride: the release's objects would be called"),
    ({"valkey": {"persistence": {"size": "2GB"}}}, "/valkey/persistence/size"),
    ({"envFrom": [{"secret": {"name": "a"}}]}, "at '/envFrom/0': additional properties 'secret'"),
    ({"dnsPolicy": "none"}, "/dnsPolicy"),
    ({"dnsPolicy": "None"}, "dnsConfig.nameservers: is required with dnsPolicy None"),
    (
        {"hostNetwork": True, "networkPolicy": {"enabled": True}},
        "networkPolicy.enabled: a NetworkPolicy has no",
    ),
    ({**CASES["sidecar"], "hostNetwork": True}, "hostNetwork: is incompatible with sidecar.enabled"),
    ({"monitoring": {"runbookUrl": "docs/how-to/runbook.md"}}, "/monitoring/runbookUrl"),
    ({"imagePullSecrets": [{"nam": "pull"}]}, "additional properties 'nam'"),
    ({"extraEnv": ["A=b"]}, "/extraEnv/0"),
    ({"inferenceObjective": {"create": True, "priority": 5}}, "/inferenceObjective/priority"),
    (
        {"gateway": {"url": "http://a", "objective": "batch"}, "inferenceObjective": {"create": True}},
        "gateway.objective: is set by inferenceObjective.create",
    ),
    (
        {"monitoring": {"rules": {"alerts": {"BatchDispatcherDwon": {"enabled": False}}}}},
        "'BatchDispatcherDwon'",
    ),
    (
        {"monitoring": {"rules": {"alerts": {"BatchDispatcherDown": {"for": "soon"}}}}},
        "BatchDispatcherDown/for",
    ),
    ({**QUEUE, "keda": {"enabled": True}}, "keda.redis.address: is required"),
    ({"keda": {"enabled": True, "minReplicas": 5}}, "keda.minReplicas: must not be above"),
    ({**QUEUE, "sidecar": {"enabled": True}}, "sidecar.serviceAccount: is required"),
    (
        {**CASES["sidecar"], "networkPolicy": {"enabled": True}},
        "networkPolicy.enabled: is incompatible with sidecar",
    ),
    (
        {**CASES["sidecar"], "extraContainers": [{"name": "a"}]},
        "extraContainers: is incompatible with sidecar",
    ),
    (
        {"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
        "monitoring.serviceMonitor.enabled: each pod would be scraped twice",
    ),
)
"""Values that are added to BASIC, and a part of the message with the key and the problem."""
