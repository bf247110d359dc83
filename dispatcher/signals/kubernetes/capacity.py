"""Watch the pool in Kubernetes: the number of ready endpoints, and the addresses of the endpoint picker.

    InferencePool ──selector──────────▶ pods, ready and not being deleted × target ports = ready endpoints
                  ──endpointPickerRef──▶ EndpointSlices of that Service ──▶ the picker's addresses

The number of endpoints can only lower the capacity that the picker's series give. The watch sees within a
second that a pod goes; the series show it some seconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from dispatcher.settings.model import PoolSettings
from dispatcher.settings.signals import EppSettings
from dispatcher.signals.kubernetes import api as kubernetes_api
from dispatcher.signals.kubernetes.api import Api, ApiError, ClusterProblem
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.kubernetes.mirror import HOLD_S, Mirror, Resource, format_role_rule
from dispatcher.signals.kubernetes.objects import (
    InferencePool,
    list_endpoint_addresses,
    parse_old_pool,
    parse_pod,
    parse_pool,
    parse_slice,
    select_picker_addresses,
)
from dispatcher.telemetry.events import Event, divert_events, emit

_GROUP = "inference.networking.k8s.io"
_OLD_GROUP = "inference.networking.x-k8s.io"
_CRDS = f"the CRDs of the Gateway API Inference Extension (inferencepools.{_GROUP})"
_MATCHES_NOTHING = "batch-dispatcher,!batch-dispatcher"
"""Label selector that no object can match. A list with it only shows whether the dispatcher may list."""
_NOT_FOUND: Final = "not there"

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """State of the pool, as the watch sees it."""

    ready: int | None = None
    """Number of ready endpoints (pods × target ports). `None` if it is not known; it then bounds nothing."""
    epp_addresses: tuple[str, ...] | None = None
    """IP addresses of the endpoint picker's ready replicas. `None` if they are not known."""
    addresses: tuple[str, ...] | None = None
    """Host and port of each ready endpoint. `None` if they are not known."""
    problems: tuple[ClusterProblem, ...] = ()
    """Reasons why a value is not known, or is 0."""
    notices: tuple[ClusterProblem, ...] = ()
    """Requests of the API server to wait, while the objects still count."""
    outdated_since: float | None = None
    """Loop time of the last contact with the API about an object that `ready` depends on and that cannot be
    read now. `None` if all of these objects are followed."""
    is_complete: bool = False
    """True if each watched object was seen, or has a problem in `problems`."""
    pool_uid: str = ""
    """UID of the InferencePool. Empty if it is not known."""
    has_cluster: bool = True
    """False if there is no Kubernetes cluster."""


NO_KUBERNETES = Endpoints(is_complete=True, has_cluster=False)


@dataclass(frozen=True, slots=True)
class _PoolLookup:
    """Result of a lookup of the InferencePool."""

    pool: InferencePool | None
    problems: tuple[ClusterProblem, ...] = ()
    ready: int | None = None
    """0 if the pool certainly does not exist. Only used without a pool."""
    is_answered: bool = True
    """True if the API has answered about the pool, so that it can be asked for pods and slices."""


class CapacityWatch:
    """Watches the pool, and calls `on_change` in the event loop with each new state.

    If an object can no longer be read, for whatever reason, `ready` keeps its last value until `hold_s` after
    the last contact with the API, because most outages are short. After that it is None, and not 0. A bound
    that is not refreshed may be too high or too low. Without it the dispatcher knows as much as one outside
    Kubernetes, and the picker's series, which fail closed, decide alone. Closing the gate instead would make
    every request depend on the API server.

    A pool that was deleted or does not exist has 0 endpoints.

    The addresses keep their last values. An address that is gone does not answer: the scrape of the picker's
    replica fails, which closes the gate, and the endpoint lists no model.

    The older version of the API is asked only while the newer one does not have the pool.
    """

    def __init__(
        self,
        pool: PoolSettings,
        epp: EppSettings,
        on_change: Callable[[Endpoints], None],
        *,
        access: ClusterAccess | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        self._name = pool.name
        self._namespace = pool.namespace
        self._finds_epp = finds_epp(epp)
        self._on_change = on_change
        self._access = ClusterAccess() if access is None else access
        self._hold_s = hold_s
        self._is_running = False
        self._known = Endpoints()
        self._was_counted = False
        """True if the number of endpoints was known at least once."""
        self._is_in_old_api = False
        """True if the pool comes from the older version of the API."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<CapacityWatch of {self._namespace}/{self._name}: {self._known}>"

    async def run(self) -> None:
        """Watch until cancelled. Returns at once if there is no cluster."""
        if not self._access:
            emit(Event.KUBERNETES_ABSENT)
            self._known = NO_KUBERNETES
            self._on_change(NO_KUBERNETES)
            return
        api = Api(self._access)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start_mirrors(api, tasks)
        finally:
            self._is_running = False
            if self._timer is not None:
                self._timer.cancel()
            await api.close()

    def reconfigure(self, epp: EppSettings) -> None:
        """Start or stop looking for the endpoint picker, as the settings say."""
        if finds_epp(epp) != self._finds_epp:
            self._finds_epp = finds_epp(epp)
            if self._is_running:
                self._update_state()

    def _start_mirrors(self, api: Api, tasks: asyncio.TaskGroup) -> None:
        self._is_running = True
        self._loop = asyncio.get_running_loop()

        def create_mirror(digest: Callable[[msgspec.Raw], V]) -> _MovableMirror[V]:
            return _MovableMirror(
                tasks, lambda resource: Mirror(api, resource, digest, self._update_state, hold_s=self._hold_s)
            )

        self._pool, self._old_pool = create_mirror(parse_pool), create_mirror(parse_old_pool)
        self._pods, self._slices = create_mirror(parse_pod), create_mirror(parse_slice)
        self._pool.watch_resource(self._select_pools(_GROUP, "v1"))

    def _update_state(self) -> None:
        """Retarget the watches after a change, and report the new state."""
        lookup = self._find_pool()
        if lookup is not None:
            self._retarget_mirrors(lookup)
            self._report_change(self._build_endpoints(lookup))
        self._set_timer()

    def _retarget_mirrors(self, lookup: _PoolLookup) -> None:
        """Let the watches of pods and slices follow the pool.

        Without a pool they use a selector that matches nothing, so that missing rights are reported at once.
        """
        if lookup.pool is not None and lookup.pool.selector:
            self._pods.watch_resource(self._select_pods(lookup.pool.selector))
            service = lookup.pool.service
            self._slices.watch_resource(
                self._select_slices(f"kubernetes.io/service-name={service}") if service else None
            )
        elif lookup.is_answered:
            if self._pods.mirror is None or lookup.ready == 0:
                self._pods.watch_resource(self._select_pods(_MATCHES_NOTHING))
            if self._slices.mirror is None:
                self._slices.watch_resource(self._select_slices(_MATCHES_NOTHING))

    def _build_endpoints(self, lookup: _PoolLookup) -> Endpoints:
        # Without a pool the picker's addresses stay as they are. Those of the endpoints also stay, unless the
        # pool certainly does not exist.
        ready, replicas = lookup.ready, self._known.epp_addresses
        served_addresses = () if ready == 0 else self._known.addresses
        problems = [*lookup.problems, *self._list_problems(self._pods), *self._list_problems(self._slices)]
        if lookup.pool is not None:
            ready, served_addresses = (
                self._count_ready(lookup.pool),
                self._list_endpoint_addresses(lookup.pool),
            )
            replicas = self._list_picker_addresses()
            if self._finds_epp and not lookup.pool.service:
                what = f"InferencePool {self._namespace}/{self._name} names no endpoint picker"
                where = "signals.epp.urls or signals.epp.service; or the pool's spec.endpointPickerRef"
                problems.append(ClusterProblem(what, where))
            if replicas == () and not self._list_problems(self._slices):
                where = f"Service {self._namespace}/{lookup.pool.service}"
                problems.append(
                    ClusterProblem(
                        f"{where} has no ready endpoint: no endpoint picker runs", "the picker's pods"
                    )
                )
        mirrors = self._active_mirrors
        self._was_counted = self._was_counted or ready is not None
        if ready is None and self._was_counted:
            problems.append(
                ClusterProblem("what it showed before no longer counts: it bounds no capacity now")
            )
        return Endpoints(
            ready=ready,
            epp_addresses=replicas,
            addresses=served_addresses,
            problems=tuple(dict.fromkeys(problems)),
            notices=tuple(dict.fromkeys(mirror.notice for mirror in mirrors if mirror.notice is not None)),
            outdated_since=self._compute_outdated_since(lookup),
            is_complete=all(mirror.is_settled for mirror in mirrors),
            pool_uid="" if lookup.pool is None else lookup.pool.uid,
        )

    # The pool.

    def _find_pool(self) -> _PoolLookup | None:
        """Return the pool, or why it is not known. `None` if an answer is still missing.

        The cluster may serve both versions of the API and have the pool in the older one only. If both have
        the pool, the newer version counts.
        """
        newer = self._read_pool(self._pool)
        if newer is None:
            return None
        if isinstance(newer, InferencePool):
            self._old_pool.watch_resource(None)
            return self._check_selector(self._pool, newer)
        if newer == _NOT_FOUND or newer.status in (403, 404):
            self._old_pool.watch_resource(self._select_pools(_OLD_GROUP, "v1alpha2"))
        older = self._read_pool(self._old_pool)
        had_older, self._is_in_old_api = self._is_in_old_api, isinstance(older, InferencePool)
        if isinstance(older, InferencePool):
            return self._check_selector(self._old_pool, older)
        if had_older and self._pool.mirror is not None and self._pool.mirror.is_unserved:
            self._pool.mirror.retry_now()  # the pool may have moved to the newer version
        if isinstance(newer, ApiError) and newer.status not in (403, 404):
            return _PoolLookup(None, self._list_problems(self._pool), is_answered=False)
        # The pool was deleted, or its CRD was, which deletes all pools.
        unserved = newer != _NOT_FOUND and newer.status == 404
        gone = newer == _NOT_FOUND or (unserved and self._was_synced(self._pool))
        if older is None:
            return _PoolLookup(None, ready=0, is_answered=False) if gone else None
        if isinstance(older, ApiError) and older.status not in (403, 404):
            return _PoolLookup(None, self._list_problems(self._old_pool), is_answered=False)
        gone = gone or (unserved and older == _NOT_FOUND)
        return _PoolLookup(None, (self._explain_missing_pool(newer, older),), ready=0 if gone else None)

    def _check_selector(self, movable: _MovableMirror[InferencePool], pool: InferencePool) -> _PoolLookup:
        if pool.selector:
            return _PoolLookup(pool, self._list_problems(movable))
        what = f"InferencePool {self._namespace}/{self._name} selects no pods"
        return _PoolLookup(None, (ClusterProblem(what, "its spec.selector"),), ready=0)

    def _read_pool(
        self, movable: _MovableMirror[InferencePool]
    ) -> InferencePool | ApiError | Literal["not there"] | None:
        """Return the answer of one version of the API about the pool. `None` if there is none yet."""
        mirror = movable.mirror
        if mirror is None:
            return None
        if mirror.is_synced and not mirror.is_unserved and not mirror.is_expired:
            return mirror.items.get(self._name, _NOT_FOUND)
        return mirror.failure

    def _explain_missing_pool(
        self, newer: ApiError | Literal["not there"], older: ApiError | Literal["not there"]
    ) -> ClusterProblem:
        """Return why neither version of the API shows the pool.

        Each version has no such pool, or answered 403 or 404. An API server checks rights before it checks
        whether it serves a group, so a 403 may mean a missing right or a missing CRD.
        """
        name = f"InferencePool {self._namespace}/{self._name}"
        answers = {_GROUP: newer, _OLD_GROUP: older}
        refused = [group for group, it in answers.items() if isinstance(it, ApiError) and it.status == 403]
        unserved = [group for group, it in answers.items() if isinstance(it, ApiError) and it.status == 404]
        if len(unserved) == len(answers):
            return ClusterProblem("the cluster serves no InferencePools", f"install {_CRDS}")
        if not refused:
            return ClusterProblem(f"{name} does not exist", "pool.name, pool.namespace")
        needed = f"the Role there: it needs the rule {format_role_rule(refused, 'inferencepools')}"
        if newer == _NOT_FOUND:
            hint = f"pool.name, pool.namespace; where the cluster serves that, too, {needed}"
            return ClusterProblem(
                f"{name} does not exist, unless in {_OLD_GROUP}, which we may not read", hint
            )
        movable = self._pool if _GROUP in refused else self._old_pool
        verb = movable.mirror.verb if movable.mirror is not None else "list"
        if len(refused) > 1:
            needed += f" ({_OLD_GROUP} only where the cluster serves it)"
        if older != _NOT_FOUND:
            needed += f"; or, if the cluster serves no InferencePools, install {_CRDS}"
        return ClusterProblem(f"not allowed to {verb} inferencepools in namespace {self._namespace}", needed)

    # Pods and slices.

    @property
    def _active_mirrors(self) -> list[Mirror[Any]]:
        places = (self._pool, self._old_pool, self._pods, self._slices)
        return [place.mirror for place in places if place.mirror is not None]

    def _count_ready(self, pool: InferencePool) -> int | None:
        mirror = self._pods.mirror
        if mirror is None:
            return None
        if not mirror.is_synced:
            # The selector has changed. The last number stays until the new pods are counted.
            return self._known.ready if mirror.failure is None else None
        if mirror.is_expired:
            return None
        return sum(pod.is_ready for pod in mirror.items.values()) * len(pool.ports)

    def _list_endpoint_addresses(self, pool: InferencePool) -> tuple[str, ...] | None:
        mirror = self._pods.mirror
        if mirror is None or not mirror.is_synced:
            return self._known.addresses
        return list_endpoint_addresses(mirror.items.values(), pool.ports)

    def _list_picker_addresses(self) -> tuple[str, ...] | None:
        mirror = self._slices.mirror
        if mirror is None:
            return None
        if not mirror.is_synced:
            return self._known.epp_addresses
        return select_picker_addresses(each for replicas in mirror.items.values() for each in replicas)

    def _list_problems(self, movable: _MovableMirror[Any]) -> tuple[ClusterProblem, ...]:
        """Return the problem of a watch, as a tuple of one or none."""
        mirror = movable.mirror
        problem = mirror.problem if mirror is not None else None
        return () if problem is None else (problem,)

    def _compute_outdated_since(self, lookup: _PoolLookup) -> float | None:
        """Return the oldest last contact of the failing watches that the number of endpoints comes from."""
        if lookup.pool is None and lookup.ready == 0:
            return None
        mirrors = [place.mirror for place in (self._pool, self._old_pool, self._pods)]
        if lookup.pool is not None and self._old_pool.mirror is not None:
            del mirrors[0]  # the pool comes from the older version of the API
        return min(
            (each.last_contact_at for each in mirrors if each is not None and each.failure), default=None
        )

    def _was_synced(self, movable: _MovableMirror[Any]) -> bool:
        """Return True if the collection was listed at least once."""
        return movable.mirror is not None and movable.mirror.is_synced

    def _set_timer(self) -> None:
        """Schedule an update for the time at which the objects of a failing watch cease to count."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [
            mirror.expires_at
            for mirror in self._active_mirrors
            if mirror.expires_at is not None and not mirror.is_expired
        ]
        if ends:
            self._timer = self._loop.call_at(min(ends), self._update_state)

    # Collections.

    def _select_pools(self, group: str, version: str) -> Resource:
        return Resource(group, version, "inferencepools", self._namespace, "", f"metadata.name={self._name}")

    def _select_pods(self, selector: str) -> Resource:
        return Resource("", "v1", "pods", self._namespace, selector)

    def _select_slices(self, selector: str) -> Resource | None:
        if not self._finds_epp:
            return None
        return Resource("discovery.k8s.io", "v1", "endpointslices", self._namespace, selector)

    def _report_change(self, endpoints: Endpoints) -> None:
        if endpoints == self._known:
            return
        before, self._known = self._known, endpoints
        for problem in endpoints.problems:
            if problem not in before.problems:
                emit(Event.KUBERNETES_PROBLEM, problem=problem.what, hint=problem.hint, ready=endpoints.ready)
        if endpoints.notices and not before.notices:
            notice = endpoints.notices[0]
            emit(Event.KUBERNETES_THROTTLED, problem=notice.what, hint=notice.hint, ready=endpoints.ready)
        wrong_before, wrong = before.problems or before.notices, endpoints.problems or endpoints.notices
        if wrong_before and not wrong:
            emit(Event.KUBERNETES_RECOVERED, ready=endpoints.ready)
        self._on_change(endpoints)


class _MovableMirror(Generic[V]):
    """A mirror that can switch to another collection. Only one mirror runs at a time."""

    def __init__(self, tasks: asyncio.TaskGroup, make: Callable[[Resource], Mirror[V]]) -> None:
        self.mirror: Mirror[V] | None = None
        self._tasks = tasks
        self._make = make
        self._task: asyncio.Task[None] | None = None

    def watch_resource(self, resource: Resource | None) -> None:
        if (self.mirror.resource if self.mirror is not None else None) == resource:
            return
        if self._task is not None:
            self._task.cancel()
        self.mirror = self._task = None
        if resource is not None:
            self.mirror = self._make(resource)
            self._task = self._tasks.create_task(self.mirror.run(), name=f"watch of {resource.plural}")


def finds_epp(epp: EppSettings) -> bool:
    """Return True if the settings do not name the endpoint picker, so that the watch has to find it."""
    return not epp.urls and not epp.service


def import_cluster_client() -> None:
    """Import the client library if there is a cluster. The import takes a second and blocks an event loop."""
    if ClusterAccess():
        kubernetes_api.import_client()


async def read_endpoints_once(
    pool: PoolSettings, epp: EppSettings, *, access: ClusterAccess | None = None, timeout_s: float = 5.0
) -> Endpoints:
    """Run the watch until its state is complete, for at most `timeout_s`, and return the state.

    Nothing is logged, because the caller reports the problems.
    """
    found = Endpoints()
    completed = asyncio.Event()

    def keep_newest(endpoints: Endpoints) -> None:
        nonlocal found
        found = endpoints
        if endpoints.is_complete:
            completed.set()

    with divert_events(lambda event, fields: None):
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(CapacityWatch(pool, epp, keep_newest, access=access).run())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await completed.wait()
            watch.cancel()
    if found.is_complete:
        return found
    late = ClusterProblem(
        f"the Kubernetes API did not answer within {timeout_s:g} s", str(access or ClusterAccess())
    )
    return replace(found, problems=(*found.problems, late))
