"""Parse Kubernetes objects into the few values that the watches need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


@dataclass(frozen=True, slots=True)
class InferencePool:
    """The used parts of an InferencePool, in either version of the API."""

    selector: str
    """Label selector in the form of the API, such as `app=vllm,tier=x`."""
    ports: tuple[int, ...]
    """Target ports. Each pod has one endpoint per port."""
    service: str
    """Name of the endpoint picker's Service."""
    uid: str = ""


class PoolPod(NamedTuple):
    """A pod that the pool selects."""

    is_ready: bool
    """True if the pod accepts requests: it is Ready and not being deleted."""
    address: str = ""
    """IP address. Empty if the pod is not ready or its address is not known."""


class PickerReplica(NamedTuple):
    """A replica of the endpoint picker in one EndpointSlice."""

    pod: str
    """UID or name of the pod. Empty if the slice does not have it."""
    family: str
    """`IPv4` or `IPv6`."""
    address: str


class RewriteRule(NamedTuple):
    """Rule that sends requests for some model names to other models."""

    names: tuple[str, ...]
    """Names that the rule matches. Empty if it matches any name."""
    targets: tuple[str, ...]


class ModelRewrite(NamedTuple):
    """An InferenceModelRewrite."""

    pool: str
    created: str
    """Creation time (RFC 3339). If two objects have rules for a name, the older object counts."""
    rules: tuple[RewriteRule, ...]
    """Rules. The first one that matches counts."""


class _Metadata(msgspec.Struct):
    deleting: str | None = msgspec.field(default=None, name="deletionTimestamp")


class _CreatedObject(msgspec.Struct):
    created: str = msgspec.field(default="", name="creationTimestamp")


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct):
    conditions: list[_Condition] | None = None
    address: str = msgspec.field(default="", name="podIP")


class _PodObject(msgspec.Struct):
    metadata: _Metadata
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _Reference(msgspec.Struct):
    name: str = ""


class _Selector(msgspec.Struct):
    labels: dict[str, str] | None = msgspec.field(default=None, name="matchLabels")


class _TargetPort(msgspec.Struct):
    number: int = 0


class _PoolSpec(msgspec.Struct):
    selector: _Selector = msgspec.field(default_factory=_Selector)
    ports: list[_TargetPort] | None = msgspec.field(default=None, name="targetPorts")
    picker: _Reference = msgspec.field(default_factory=_Reference, name="endpointPickerRef")


class _PoolMetadata(msgspec.Struct):
    uid: str = ""


class _PoolObject(msgspec.Struct):
    spec: _PoolSpec
    metadata: _PoolMetadata = msgspec.field(default_factory=_PoolMetadata)


class _OldPoolSpec(msgspec.Struct):
    selector: dict[str, str] | None = None
    port: int = msgspec.field(default=0, name="targetPortNumber")
    picker: _Reference = msgspec.field(default_factory=_Reference, name="extensionRef")


class _OldPool(msgspec.Struct):
    spec: _OldPoolSpec
    metadata: _PoolMetadata = msgspec.field(default_factory=_PoolMetadata)


class _EndpointConditions(msgspec.Struct):
    ready: bool | None = None


class _TargetReference(msgspec.Struct):
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str] | None = None
    conditions: _EndpointConditions = msgspec.field(default_factory=_EndpointConditions)
    target: _TargetReference | None = msgspec.field(default=None, name="targetRef")


class _Slice(msgspec.Struct):
    family: str = msgspec.field(default="", name="addressType")
    endpoints: list[_Endpoint] | None = None


class _NameMatch(msgspec.Struct):
    value: str = ""


class _ModelMatch(msgspec.Struct):
    model: _NameMatch = msgspec.field(default_factory=_NameMatch)


class _RewriteTarget(msgspec.Struct):
    model: str = msgspec.field(default="", name="modelRewrite")


class _RuleSpec(msgspec.Struct):
    matches: list[_ModelMatch] | None = None
    targets: list[_RewriteTarget] | None = None


class _RewriteSpec(msgspec.Struct):
    pool: _Reference = msgspec.field(default_factory=_Reference, name="poolRef")
    rules: list[_RuleSpec] | None = None


class _RewriteObject(msgspec.Struct):
    metadata: _CreatedObject = msgspec.field(default_factory=_CreatedObject)
    spec: _RewriteSpec = msgspec.field(default_factory=_RewriteSpec)


def parse_pod(pod: msgspec.Raw) -> PoolPod:
    pod_object = msgspec.json.decode(pod, type=_PodObject)
    conditions = pod_object.status.conditions or ()
    ready = pod_object.metadata.deleting is None and any(
        condition.type == "Ready" and condition.status == "True" for condition in conditions
    )
    return PoolPod(ready, pod_object.status.address if ready else "")


def parse_pool(pool: msgspec.Raw) -> InferencePool:
    pool_object = msgspec.json.decode(pool, type=_PoolObject)
    spec = pool_object.spec
    ports = tuple(port.number for port in spec.ports or ())
    selector = _format_selector(spec.selector.labels)
    return InferencePool(selector, ports, spec.picker.name, pool_object.metadata.uid)


def parse_old_pool(pool: msgspec.Raw) -> InferencePool:
    """Parse a pool of v1alpha2: its selector is a plain map, and it has one port and an `extensionRef`."""
    pool_object = msgspec.json.decode(pool, type=_OldPool)
    spec, uid = pool_object.spec, pool_object.metadata.uid
    return InferencePool(_format_selector(spec.selector), (spec.port,), spec.picker.name, uid)


def parse_slice(endpoint_slice: msgspec.Raw) -> tuple[PickerReplica, ...]:
    """Return the ready endpoints of a slice. A missing `ready` condition means ready.

    All addresses of an endpoint lead to the same pod, so only the first one is used.
    """
    slice_object = msgspec.json.decode(endpoint_slice, type=_Slice)
    return tuple(
        PickerReplica(
            endpoint.target.uid or endpoint.target.name if endpoint.target is not None else "",
            slice_object.family,
            endpoint.addresses[0],
        )
        for endpoint in slice_object.endpoints or ()
        if endpoint.addresses and endpoint.conditions.ready is not False
    )


def parse_rewrite(rewrite: msgspec.Raw) -> ModelRewrite:
    rewrite_object = msgspec.json.decode(rewrite, type=_RewriteObject)
    rules = tuple(
        RewriteRule(
            tuple(match.model.value for match in rule.matches or ()),
            tuple(target.model for target in rule.targets or () if target.model),
        )
        for rule in rewrite_object.spec.rules or ()
    )
    return ModelRewrite(rewrite_object.spec.pool.name, rewrite_object.metadata.created, rules)


def select_picker_addresses(replicas: Iterable[PickerReplica]) -> tuple[str, ...]:
    """Return one address of each replica, IPv4 if it has several.

    A dual-stack Service has slices of both families. Endpoints without a pod are distinguished by their
    address.
    """
    replica_by_pod: dict[str, PickerReplica] = {}
    for replica in sorted(replicas, key=lambda each: (each.family, each.address)):  # IPv4 comes before IPv6
        replica_by_pod.setdefault(replica.pod or replica.address, replica)
    return tuple(sorted(replica.address for replica in replica_by_pod.values()))


def list_endpoint_addresses(pods: Iterable[PoolPod], ports: Sequence[int]) -> tuple[str, ...]:
    """Return host and port of each endpoint whose address is known, in sorted order."""
    hosts = [f"[{pod.address}]" if ":" in pod.address else pod.address for pod in pods if pod.address]
    return tuple(sorted({f"{host}:{port}" for host in hosts for port in ports if port}))


def _format_selector(labels: dict[str, str] | None) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted((labels or {}).items()))
