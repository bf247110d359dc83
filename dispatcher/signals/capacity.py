"""What Kubernetes knows of the pool: how many endpoints are ready, and where the endpoint picker runs.

    InferencePool ──selector──────────▶ pods, ready and not being deleted × target ports = ready endpoints
                  ──endpointPickerRef──▶ EndpointSlices of that Service ──▶ the picker's addresses

The number only ever lowers the capacity that the picker's own series tell: the watch knows within a second
that a pod goes, the series some seconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from dispatcher.settings import Epp, Pool
from dispatcher.signals.kube import Access, Api, ApiError, Mirror, Resource
from dispatcher.signals.sources import Finding
from dispatcher.telemetry import Event, emit

HOLD_S = 60.0
NOWHERE = "no Kubernetes here: neither a service account nor a kubeconfig"
_GROUP = "inference.networking.k8s.io"
_OLD_GROUP = "inference.networking.x-k8s.io"
_NO_CRD = (
    "the cluster serves no InferencePools: install the CRDs of the Gateway API Inference Extension "
    f"(inferencepools.{_GROUP})"
)

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What the watch sees."""

    ready: int | None
    """Ready endpoints (pods × target ports); None: not known, and then no bound on the capacity."""
    epp_addresses: tuple[str, ...] | None
    """IP addresses of the endpoint picker's ready replicas; None: not known."""
    problem: str | None
    """Why something is not known, or is 0, and what mends it: one sentence."""


@dataclass(frozen=True, slots=True)
class InferencePool:
    """What matters of the object, by whichever version of the API it came."""

    selector: str
    """As the API takes it: `app=vllm,tier=x`."""
    ports: int
    service: str
    """The endpoint picker's."""


_NO_POOL = InferencePool("", 0, "")


class CapacityWatch:
    """Watches the pool and calls `on_change`, in the event loop, with each new state of what is known.

    While the API server cannot be reached, `ready` stays for `hold_s` as it was seen last: most such outages
    are short. After that it is None, not 0. A bound that nobody refreshes is wrong in one direction or the
    other; without it the dispatcher knows as much as one outside Kubernetes does, and the picker's series,
    which fail closed, decide alone. To close the gate instead would make the API server a part of every
    request's path.

    A pool that was deleted, or does not exist, is known: 0.

    The addresses stay as they were. A replica that has gone fails its scrape, and that closes the gate.
    """

    def __init__(
        self,
        pool: Pool,
        epp: Epp,
        on_change: Callable[[Endpoints], None],
        *,
        access: Access | None = None,
        hold_s: float = HOLD_S,
        watch_s: float = 60.0,
    ) -> None:
        self._name = pool.name
        self._namespace = pool.namespace
        self._find_epp = not epp.urls and not epp.service
        self._on_change = on_change
        self._access = Access() if access is None else access
        self._hold_s = hold_s
        self._watch_s = watch_s
        self._known = Endpoints(None, None, None)
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<CapacityWatch of {self._namespace}/{self._name}: {self._known}>"

    async def run(self) -> None:
        """Watch until cancelled; returns at once where there is no Kubernetes."""
        if not self._access:
            emit(Event.KUBERNETES_ABSENT)
            self._known = Endpoints(None, None, NOWHERE)
            self._on_change(self._known)
            return
        api = Api(self._access)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start(api, tasks)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await api.close()

    def _start(self, api: Api, tasks: asyncio.TaskGroup) -> None:
        self._loop = asyncio.get_running_loop()

        def place(digest: Callable[[msgspec.Raw], V]) -> _Place[V]:
            return _Place(
                tasks, lambda resource: Mirror(api, resource, digest, self._look, watch_s=self._watch_s)
            )

        self._pool, self._old_pool = place(digest_pool), place(digest_old_pool)
        self._pods, self._slices = place(digest_pod), place(digest_slice)
        by_name = f"metadata.name={self._name}"
        self._pool.point(Resource(_GROUP, "v1", "inferencepools", self._namespace, "", by_name))
        self._old_pool.point(Resource(_OLD_GROUP, "v1alpha2", "inferencepools", self._namespace, "", by_name))

    def _look(self) -> None:
        """Something changed: point the watches where they belong, and tell what is known now."""
        self._set_timer()
        pool = self._find_pool()
        addresses = self._known.epp_addresses
        if isinstance(pool, str):
            self._tell(Endpoints(None, addresses, pool))
        elif pool is not None and not pool.selector:
            self._pods.point(None)
            nothing = f"InferencePool {self._namespace}/{self._name} does not exist, or selects no pods"
            self._tell(Endpoints(0, addresses, nothing))
        elif pool is not None:
            self._pods.point(Resource("", "v1", "pods", self._namespace, pool.selector))
            self._slices.point(self._slices_of(pool.service))
            ready, why = self._ready(pool.ports)
            addresses, why_not = self._addresses(pool.service)
            self._tell(Endpoints(ready, addresses, why or why_not))

    def _find_pool(self) -> InferencePool | str | None:
        """The pool as it is known, without a selector when it does not exist; a problem; None: wait.

        Both versions of the API may be served, and the pool be in the older. The newer wins where it has it.
        A Role that leaves the older out is no problem.
        """
        newer, older = self._seen(self._pool), self._seen(self._old_pool)
        if newer is None or (isinstance(newer, InferencePool) and newer.selector):
            return newer
        if older is None or (isinstance(older, InferencePool) and older.selector):
            return older
        unserved = isinstance(newer, ApiError) and newer.status == 404
        if isinstance(newer, ApiError) and not unserved:
            return self._why(self._pool, newer)
        if isinstance(older, ApiError) and older.status not in (403, 404):
            return self._why(self._old_pool, older)
        return _NO_CRD if unserved and isinstance(older, ApiError) else _NO_POOL

    def _seen(self, place: _Place[InferencePool]) -> InferencePool | ApiError | None:
        """What one version of the API says of the pool; None: nothing yet."""
        mirror = place.mirror
        if mirror is None:
            return None
        if mirror.synced and mirror.failure is not None and mirror.failure.status == 404:
            return _NO_POOL  # the CRD was removed, and with it the pool
        if mirror.synced and not self._given_up(mirror):
            return mirror.items.get(self._name, _NO_POOL)
        return mirror.failure

    def _ready(self, ports: int) -> tuple[int | None, str | None]:
        mirror = self._pods.mirror
        if mirror is None:
            return None, None
        why = None if mirror.failure is None else self._why(self._pods, mirror.failure)
        if not mirror.synced:
            # Another selector than before: what was known stands until the new pods are counted.
            return (self._known.ready if why is None else None), why
        if self._given_up(mirror):
            return None, why
        pools = self._pool.mirror
        if why is None and pools is not None and pools.synced and pools.failure is not None:
            why = self._why(self._pool, pools.failure)
        return sum(mirror.items.values()) * ports, why

    def _addresses(self, service: str) -> tuple[tuple[str, ...] | None, str | None]:
        mirror = self._slices.mirror
        if mirror is None:
            return None, None
        why = None if mirror.failure is None else self._why(self._slices, mirror.failure)
        if not mirror.synced:
            return self._known.epp_addresses, why
        found = tuple(sorted({address for addresses in mirror.items.values() for address in addresses}))
        if not found and why is None:
            why = f"Service {self._namespace}/{service} has no ready endpoint: no endpoint picker runs"
        return found, why

    def _slices_of(self, service: str) -> Resource | None:
        if not self._find_epp or not service:
            return None
        label = f"kubernetes.io/service-name={service}"
        return Resource("discovery.k8s.io", "v1", "endpointslices", self._namespace, label)

    def _why(self, place: _Place[Any], failure: ApiError) -> str:
        mirror = place.mirror
        if mirror is None:
            return str(failure)
        why = mirror.resource.explain(failure)
        if mirror.synced and self._given_up(mirror):
            why += f"; what was seen {self._hold_s:g} s ago no longer counts"
        return why

    def _given_up(self, mirror: Mirror[Any]) -> bool:
        return mirror.down_since is not None and self._loop.time() - mirror.down_since >= self._hold_s

    def _set_timer(self) -> None:
        """Look again when something that is down has been so for `hold_s`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        mirrors = [place.mirror for place in (self._pool, self._old_pool, self._pods, self._slices)]
        ends = [
            mirror.down_since + self._hold_s
            for mirror in mirrors
            if mirror is not None and mirror.down_since is not None and not self._given_up(mirror)
        ]
        if ends:
            self._timer = self._loop.call_at(min(ends), self._look)

    def _tell(self, endpoints: Endpoints) -> None:
        if endpoints == self._known:
            return
        before, self._known = self._known, endpoints
        if endpoints.problem is not None and endpoints.problem != before.problem:
            emit(Event.KUBERNETES_PROBLEM, problem=endpoints.problem)
        elif endpoints.problem is None and before.problem is not None:
            emit(Event.KUBERNETES_FINE, ready=endpoints.ready)
        self._on_change(endpoints)


class _Place(Generic[V]):
    """A mirror that can be pointed at another collection; only one runs at a time."""

    def __init__(self, tasks: asyncio.TaskGroup, make: Callable[[Resource], Mirror[V]]) -> None:
        self.mirror: Mirror[V] | None = None
        self._tasks = tasks
        self._make = make
        self._task: asyncio.Task[None] | None = None

    def point(self, resource: Resource | None) -> None:
        if (self.mirror.resource if self.mirror is not None else None) == resource:
            return
        if self._task is not None:
            self._task.cancel()
        self.mirror = self._task = None
        if resource is not None:
            self.mirror = self._make(resource)
            self._task = self._tasks.create_task(self.mirror.run(), name=f"watch of {resource.plural}")


async def look(pool: Pool, epp: Epp, *, access: Access | None = None, timeout_s: float = 5.0) -> Endpoints:
    """What the watch knows once it has looked around, or what it complains of; within `timeout_s`."""
    seen = asyncio.Event()
    found = Endpoints(None, None, f"the Kubernetes API did not answer within {timeout_s:g} s")
    find_epp = not epp.urls and not epp.service

    def changed(endpoints: Endpoints) -> None:
        nonlocal found
        whole = endpoints.ready is not None and (endpoints.epp_addresses is not None or not find_epp)
        if (whole or endpoints.problem is not None) and not seen.is_set():
            found = endpoints
            seen.set()

    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(CapacityWatch(pool, epp, changed, access=access).run())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(seen.wait(), timeout_s)
        watch.cancel()
    return found


async def probe(
    pool: Pool, epp: Epp, *, access: Access | None = None, timeout_s: float = 5.0
) -> list[Finding]:
    """What `batch-dispatcher check` says of Kubernetes."""
    return describe(pool, epp, await look(pool, epp, access=access, timeout_s=timeout_s))


def describe(pool: Pool, epp: Epp, endpoints: Endpoints) -> list[Finding]:
    """Findings for people. Without Kubernetes the dispatcher works, if it is told where the picker is."""
    name = f"kubernetes {pool.namespace}/{pool.name}"
    find_epp = not epp.urls and not epp.service
    if endpoints.problem == NOWHERE:
        hint = "signals.epp.urls or signals.prometheus.url: the endpoint picker cannot be found without it"
        return [Finding(name, True, NOWHERE, hint if find_epp else "")]
    findings = []
    if endpoints.ready is not None:
        findings.append(Finding(name, endpoints.ready > 0, f"{endpoints.ready} ready endpoints"))
    if endpoints.epp_addresses is not None:
        there = ", ".join(endpoints.epp_addresses) or "none"
        findings.append(
            Finding(f"{name} endpoint picker", bool(endpoints.epp_addresses), f"replicas: {there}")
        )
    if endpoints.problem is not None:
        what, _, hint = endpoints.problem.partition(": ")
        findings.append(Finding(name, False, what, hint))
    return findings


class _Metadata(msgspec.Struct):
    deleting: str | None = msgspec.field(default=None, name="deletionTimestamp")


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _Reference(msgspec.Struct):
    name: str = ""


class _Selector(msgspec.Struct):
    labels: dict[str, str] | None = msgspec.field(default=None, name="matchLabels")


class _PoolSpec(msgspec.Struct):
    selector: _Selector = msgspec.field(default_factory=_Selector)
    ports: list[msgspec.Raw] | None = msgspec.field(default=None, name="targetPorts")
    picker: _Reference = msgspec.field(default_factory=_Reference, name="endpointPickerRef")


class _Pool(msgspec.Struct):
    spec: _PoolSpec


class _OldPoolSpec(msgspec.Struct):
    selector: dict[str, str] | None = None
    picker: _Reference = msgspec.field(default_factory=_Reference, name="extensionRef")


class _OldPool(msgspec.Struct):
    spec: _OldPoolSpec


class _EndpointConditions(msgspec.Struct):
    ready: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] | None = None
    conditions: _EndpointConditions = msgspec.field(default_factory=_EndpointConditions)


class _Slice(msgspec.Struct):
    endpoints: list[_Endpoint] | None = None


def digest_pod(pod: msgspec.Raw) -> bool:
    """Whether a pod takes requests: Ready, and not on its way out."""
    read = msgspec.json.decode(pod, type=_Pod)
    conditions = read.status.conditions or ()
    return read.metadata.deleting is None and any(
        condition.type == "Ready" and condition.status == "True" for condition in conditions
    )


def digest_pool(pool: msgspec.Raw) -> InferencePool:
    spec = msgspec.json.decode(pool, type=_Pool).spec
    return InferencePool(_selector(spec.selector.labels), len(spec.ports or ()), spec.picker.name)


def digest_old_pool(pool: msgspec.Raw) -> InferencePool:
    """v1alpha2: a plain map as selector, one port, another name for the picker."""
    spec = msgspec.json.decode(pool, type=_OldPool).spec
    return InferencePool(_selector(spec.selector), 1, spec.picker.name)


def digest_slice(endpoint_slice: msgspec.Raw) -> tuple[str, ...]:
    """The addresses in a slice that take traffic; a condition that is not given means ready."""
    endpoints = msgspec.json.decode(endpoint_slice, type=_Slice).endpoints or ()
    return tuple(
        address
        for endpoint in endpoints
        if endpoint.conditions.ready is not False
        for address in endpoint.addresses or ()
    )


def _selector(labels: dict[str, str] | None) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted((labels or {}).items()))
