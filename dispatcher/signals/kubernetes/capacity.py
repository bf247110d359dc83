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
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from dispatcher.settings import EppSettings, PoolSettings
from dispatcher.signals.kubernetes import api as kubernetes_api
from dispatcher.signals.kubernetes.api import Api, ApiError, ClusterProblem
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.kubernetes.digests import (
    InferencePool,
    addresses,
    digest_old_pool,
    digest_pod,
    digest_pool,
    digest_slice,
    endpoint_addresses,
)
from dispatcher.signals.kubernetes.mirror import HOLD_S, Mirror, Resource, rule
from dispatcher.telemetry.events import Event, diverted, emit

_GROUP = "inference.networking.k8s.io"
_OLD_GROUP = "inference.networking.x-k8s.io"
_CRDS = f"the CRDs of the Gateway API Inference Extension (inferencepools.{_GROUP})"
_NOBODY = "batch-dispatcher,!batch-dispatcher"
"""A selector that nothing can match: what is asked with it tells whether we may ask."""
_NOT_THERE: Final = "not there"

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What the watch sees."""

    ready: int | None = None
    """Ready endpoints (pods × target ports); None: not known, and then no bound on the capacity."""
    epp_addresses: tuple[str, ...] | None = None
    """IP addresses of the endpoint picker's ready replicas; None: not known."""
    addresses: tuple[str, ...] | None = None
    """Host and port of each ready endpoint; None: not known."""
    problems: tuple[ClusterProblem, ...] = ()
    """All that keeps something from being known, or makes it 0."""
    notices: tuple[ClusterProblem, ...] = ()
    """Requests of the API server to wait, while what was seen still counts."""
    unsure_since: float | None = None
    """When the API was last heard of something that `ready` is counted from and cannot be asked now, on the
    loop's clock; None: all of it is followed."""
    whole: bool = False
    """Whether each thing that is watched was seen, or has its problem among `problems`."""
    watched: bool = True
    """False: there is no Kubernetes here."""


ABSENT = Endpoints(whole=True, watched=False)


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of the InferencePool."""

    pool: InferencePool | None
    problems: tuple[ClusterProblem, ...] = ()
    ready: int | None = None
    """Without a pool: 0 where it surely is not there."""
    answered: bool = True
    """Whether the API has said all of it, so that it can be asked for other things."""


class CapacityWatch:
    """Watches the pool and calls `on_change`, in the event loop, with each new state of what is known.

    When it can no longer be asked for something, by whatever cause, `ready` stays as it was seen last until
    `hold_s` after the API was last heard of that: most such outages are short. After that it is None, not 0.
    A bound that nobody refreshes is wrong in one direction or the other; without it the dispatcher knows as
    much as one outside Kubernetes does, and the picker's series, which fail closed, decide alone. To close
    the gate instead would make the API server a part of every request's path.

    A pool that was deleted, or does not exist, is known: 0.

    The addresses stay as they were. What has gone does not answer: a replica of the picker fails its scrape,
    and that closes the gate; an endpoint tells of no model.

    The older version of the API is asked only while the newer does not have the pool.
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
        self._find_epp = finds_epp(epp)
        self._on_change = on_change
        self._access = ClusterAccess() if access is None else access
        self._hold_s = hold_s
        self._running = False
        self._known = Endpoints()
        self._counted = False
        """Whether the number of endpoints was ever known."""
        self._has_older = False
        """Whether the pool is known by the older version of the API."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<CapacityWatch of {self._namespace}/{self._name}: {self._known}>"

    async def run(self) -> None:
        """Watch until cancelled; returns at once where there is no Kubernetes."""
        if not self._access:
            emit(Event.KUBERNETES_ABSENT)
            self._known = ABSENT
            self._on_change(ABSENT)
            return
        api = Api(self._access)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start(api, tasks)
        finally:
            self._running = False
            if self._timer is not None:
                self._timer.cancel()
            await api.close()

    def reconfigure(self, epp: EppSettings) -> None:
        """Find the endpoint picker from now on, or leave it, as the settings say."""
        if finds_epp(epp) != self._find_epp:
            self._find_epp = finds_epp(epp)
            if self._running:
                self._look()

    def _start(self, api: Api, tasks: asyncio.TaskGroup) -> None:
        self._running = True
        self._loop = asyncio.get_running_loop()

        def place(digest: Callable[[msgspec.Raw], V]) -> _MovableMirror[V]:
            return _MovableMirror(
                tasks, lambda resource: Mirror(api, resource, digest, self._look, hold_s=self._hold_s)
            )

        self._pool, self._old_pool = place(digest_pool), place(digest_old_pool)
        self._pods, self._slices = place(digest_pod), place(digest_slice)
        self._pool.point(self._pools_of(_GROUP, "v1"))

    def _look(self) -> None:
        """Something changed: point the watches where they belong, and tell what is known now."""
        found = self._find_pool()
        if found is not None:
            self._point(found)
            self._tell(self._endpoints(found))
        self._set_timer()

    def _point(self, found: _Found) -> None:
        """Point the watches of pods and slices to what the pool says.

        Without a pool they ask for nothing, to learn at once whether they may ask.
        """
        if found.pool is not None and found.pool.selector:
            self._pods.point(self._pods_by(found.pool.selector))
            service = found.pool.service
            self._slices.point(self._slices_by(f"kubernetes.io/service-name={service}") if service else None)
        elif found.answered:
            if self._pods.mirror is None or found.ready == 0:
                self._pods.point(self._pods_by(_NOBODY))
            if self._slices.mirror is None:
                self._slices.point(self._slices_by(_NOBODY))

    def _endpoints(self, found: _Found) -> Endpoints:
        ready, replicas = found.ready, self._known.epp_addresses
        served_at = () if ready == 0 else self._known.addresses
        problems = [*found.problems, *self._problems(self._pods), *self._problems(self._slices)]
        if found.pool is not None:
            ready, served_at = self._ready(found.pool), self._served_at(found.pool)
            replicas = self._replicas()
            if self._find_epp and not found.pool.service:
                what = f"InferencePool {self._namespace}/{self._name} names no endpoint picker"
                where = "signals.epp.urls or signals.epp.service; or the pool's spec.endpointPickerRef"
                problems.append(ClusterProblem(what, where))
            if replicas == () and not self._problems(self._slices):
                where = f"Service {self._namespace}/{found.pool.service}"
                problems.append(
                    ClusterProblem(
                        f"{where} has no ready endpoint: no endpoint picker runs", "the picker's pods"
                    )
                )
        mirrors = self._mirrors
        self._counted = self._counted or ready is not None
        if ready is None and self._counted:
            problems.append(
                ClusterProblem("what it showed before no longer counts: it bounds no capacity now")
            )
        return Endpoints(
            ready=ready,
            epp_addresses=replicas,
            addresses=served_at,
            problems=tuple(dict.fromkeys(problems)),
            notices=tuple(dict.fromkeys(mirror.notice for mirror in mirrors if mirror.notice is not None)),
            unsure_since=self._unsure_since(found),
            whole=all(mirror.settled for mirror in mirrors),
        )

    # The pool.

    def _find_pool(self) -> _Found | None:
        """The pool as it is known, or why it is not; None: wait.

        Both versions of the API may be served, and the pool be in the older. The newer wins where it has it.
        """
        newer = self._seen(self._pool)
        if newer is None:
            return None
        if isinstance(newer, InferencePool):
            self._old_pool.point(None)
            return self._found(self._pool, newer)
        if newer == _NOT_THERE or newer.status in (403, 404):
            self._old_pool.point(self._pools_of(_OLD_GROUP, "v1alpha2"))
        older = self._seen(self._old_pool)
        had_older, self._has_older = self._has_older, isinstance(older, InferencePool)
        if isinstance(older, InferencePool):
            return self._found(self._old_pool, older)
        if had_older and self._pool.mirror is not None and self._pool.mirror.unserved:
            self._pool.mirror.retry()  # the pool may have moved to the newer version
        if isinstance(newer, ApiError) and newer.status not in (403, 404):
            return _Found(None, self._problems(self._pool), answered=False)
        # It was deleted, or its CRD was and it with that.
        unserved = newer != _NOT_THERE and newer.status == 404
        gone = newer == _NOT_THERE or (unserved and self._had(self._pool))
        if older is None:
            return _Found(None, ready=0, answered=False) if gone else None
        if isinstance(older, ApiError) and older.status not in (403, 404):
            return _Found(None, self._problems(self._old_pool), answered=False)
        gone = gone or (unserved and older == _NOT_THERE)
        return _Found(None, (self._missing(newer, older),), ready=0 if gone else None)

    def _found(self, place: _MovableMirror[InferencePool], pool: InferencePool) -> _Found:
        if pool.selector:
            return _Found(pool, self._problems(place))
        what = f"InferencePool {self._namespace}/{self._name} selects no pods"
        return _Found(None, (ClusterProblem(what, "its spec.selector"),), ready=0)

    def _seen(
        self, place: _MovableMirror[InferencePool]
    ) -> InferencePool | ApiError | Literal["not there"] | None:
        """What one version of the API says of the pool; None: nothing yet."""
        mirror = place.mirror
        if mirror is None:
            return None
        if mirror.synced and not mirror.unserved and not mirror.given_up:
            return mirror.items.get(self._name, _NOT_THERE)
        return mirror.failure

    def _missing(
        self, newer: ApiError | Literal["not there"], older: ApiError | Literal["not there"]
    ) -> ClusterProblem:
        """Why neither version of the API shows the pool: each says that it has none, 403 or 404.

        An API server looks at rights before it looks whether it serves what is asked for.
        """
        name = f"InferencePool {self._namespace}/{self._name}"
        answers = {_GROUP: newer, _OLD_GROUP: older}
        refused = [group for group, it in answers.items() if isinstance(it, ApiError) and it.status == 403]
        unserved = [group for group, it in answers.items() if isinstance(it, ApiError) and it.status == 404]
        if len(unserved) == len(answers):
            return ClusterProblem("the cluster serves no InferencePools", f"install {_CRDS}")
        if not refused:
            return ClusterProblem(f"{name} does not exist", "pool.name, pool.namespace")
        needed = f"the Role there: it needs the rule {rule(refused, 'inferencepools')}"
        if newer == _NOT_THERE:
            hint = f"pool.name, pool.namespace; where the cluster serves that, too, {needed}"
            return ClusterProblem(
                f"{name} does not exist, unless in {_OLD_GROUP}, which we may not read", hint
            )
        place = self._pool if _GROUP in refused else self._old_pool
        verb = place.mirror.verb if place.mirror is not None else "list"
        if len(refused) > 1:
            needed += f" ({_OLD_GROUP} only where the cluster serves it)"
        if older != _NOT_THERE:
            needed += f"; or, if the cluster serves no InferencePools, install {_CRDS}"
        return ClusterProblem(f"not allowed to {verb} inferencepools in namespace {self._namespace}", needed)

    # What is seen of the rest.

    @property
    def _mirrors(self) -> list[Mirror[Any]]:
        places = (self._pool, self._old_pool, self._pods, self._slices)
        return [place.mirror for place in places if place.mirror is not None]

    def _ready(self, pool: InferencePool) -> int | None:
        mirror = self._pods.mirror
        if mirror is None:
            return None
        if not mirror.synced:
            # Another selector than before: what was known stands until the new pods are counted.
            return self._known.ready if mirror.failure is None else None
        if mirror.given_up:
            return None
        return sum(pod.ready for pod in mirror.items.values()) * len(pool.ports)

    def _served_at(self, pool: InferencePool) -> tuple[str, ...] | None:
        mirror = self._pods.mirror
        if mirror is None or not mirror.synced:
            return self._known.addresses
        return endpoint_addresses(mirror.items.values(), pool.ports)

    def _replicas(self) -> tuple[str, ...] | None:
        mirror = self._slices.mirror
        if mirror is None:
            return None
        if not mirror.synced:
            return self._known.epp_addresses
        return addresses(each for replicas in mirror.items.values() for each in replicas)

    def _problems(self, place: _MovableMirror[Any]) -> tuple[ClusterProblem, ...]:
        """What is wrong with a watch: nothing or one thing."""
        mirror = place.mirror
        problem = mirror.problem if mirror is not None else None
        return () if problem is None else (problem,)

    def _unsure_since(self, found: _Found) -> float | None:
        """Of the watches that the number of endpoints comes from."""
        if found.pool is None and found.ready == 0:
            return None
        mirrors = [place.mirror for place in (self._pool, self._old_pool, self._pods)]
        if found.pool is not None and self._old_pool.mirror is not None:
            del mirrors[0]  # the older version has it
        return min((each.heard_at for each in mirrors if each is not None and each.failure), default=None)

    def _had(self, place: _MovableMirror[Any]) -> bool:
        """Whether it was seen once."""
        return place.mirror is not None and place.mirror.synced

    def _set_timer(self) -> None:
        """Look again when something that fails ceases to count."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [
            mirror.holds_until
            for mirror in self._mirrors
            if mirror.holds_until is not None and not mirror.given_up
        ]
        if ends:
            self._timer = self._loop.call_at(min(ends), self._look)

    # What is asked for.

    def _pools_of(self, group: str, version: str) -> Resource:
        return Resource(group, version, "inferencepools", self._namespace, "", f"metadata.name={self._name}")

    def _pods_by(self, selector: str) -> Resource:
        return Resource("", "v1", "pods", self._namespace, selector)

    def _slices_by(self, selector: str) -> Resource | None:
        if not self._find_epp:
            return None
        return Resource("discovery.k8s.io", "v1", "endpointslices", self._namespace, selector)

    def _tell(self, endpoints: Endpoints) -> None:
        if endpoints == self._known:
            return
        before, self._known = self._known, endpoints
        for problem in endpoints.problems:
            if problem not in before.problems:
                emit(Event.KUBERNETES_PROBLEM, problem=problem.what, hint=problem.hint, ready=endpoints.ready)
        if endpoints.notices and not before.notices:
            notice = endpoints.notices[0]
            emit(Event.KUBERNETES_THROTTLED, what=notice.what, hint=notice.hint, ready=endpoints.ready)
        wrong_before, wrong = before.problems or before.notices, endpoints.problems or endpoints.notices
        if wrong_before and not wrong:
            emit(Event.KUBERNETES_FINE, ready=endpoints.ready)
        self._on_change(endpoints)


class _MovableMirror(Generic[V]):
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


def finds_epp(epp: EppSettings) -> bool:
    """Whether the settings leave it to the watch to find the endpoint picker."""
    return not epp.urls and not epp.service


def prepare() -> None:
    """Import what the watch needs where there is a cluster: a second that no event loop has to spend."""
    if ClusterAccess():
        kubernetes_api.prepare()


async def look(
    pool: PoolSettings, epp: EppSettings, *, access: ClusterAccess | None = None, timeout_s: float = 5.0
) -> Endpoints:
    """What the watch knows once it has looked around, and all that it complains of; within `timeout_s`.

    Nothing is logged: it is the caller's to tell.
    """
    found = Endpoints()
    whole = asyncio.Event()

    def changed(endpoints: Endpoints) -> None:
        nonlocal found
        found = endpoints
        if endpoints.whole:
            whole.set()

    with diverted(lambda event, fields: None):
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(CapacityWatch(pool, epp, changed, access=access).run())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(whole.wait(), timeout_s)
            watch.cancel()
    if found.whole:
        return found
    late = ClusterProblem(
        f"the Kubernetes API did not answer within {timeout_s:g} s", str(access or ClusterAccess())
    )
    return replace(found, problems=(*found.problems, late))
