"""Models with versions: chooses the version to which each request is sent.

    update      Endpoint lists, warm markers and decisions of operators change the state of each version.
    choose      A request for a model with versions gets an open one, and its body is changed to name it.
    exchange    Share what is warm and in use with the other owners, and read their state and the operators'
                decisions.
    read        Do the same as an observer, without writing.

rollover.py decides which version is open. If the settings name no versions, nothing is kept and no request is
changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from dispatcher.features.models.availability import GATEWAY
from dispatcher.features.models.body_rewrite import prepare_for_version
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.queue.calls import ModelCalls
from dispatcher.features.models.queue_steps import ModelStep
from dispatcher.features.models.registry import ModelRegistryState, PinRequest
from dispatcher.features.models.rollover import ModelFamily
from dispatcher.features.models.versions import FamilyIndex, PinScope, VersionFacts, VersionState
from dispatcher.kernel.queue_access import loop_time
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.features.models.availability import PoolModels
    from dispatcher.features.models.versions import FamilyTerms
    from dispatcher.kernel.context import KernelContext
    from dispatcher.requests.request import Request

PIN_KEPT_S = 86_400.0
"""Lifetime of a pin after the last request of a job or sequence."""
PIN_CACHE_S = 10.0
"""Time for which a pin that the queue returned is used without asking again."""
MAX_CACHED_PINS = 10_000
"""Maximum number of cached pins."""
MARKERS_EXPIRE_S = 60.0
"""Lifetime of a warm marker without a refresh (features/models/registry.py)."""
MAX_LOGGED_CHANGES = 100
"""Maximum number of state changes of inactive versions that one update logs."""
_INACTIVE_STATES = frozenset((VersionState.ABSENT, VersionState.RETIRING, VersionState.GONE))
JOB_LABELS = ("job", "file")
"""Labels that name the job of a request; the first one that is set counts."""


class VersionRouter:
    """Chooses versions in one process. `changed` is set to share changes soon."""

    def __init__(self, context: KernelContext, changed: asyncio.Event) -> None:
        self.registry: ModelRegistryState | None = None
        """State of the model registry as the queue returned it last. `None` if it was not read yet."""
        self._exchanged_at = loop_time()
        self._context = context
        self._access = context.access
        self._calls = context.access.queue.open_calls(ModelCalls)
        self._changed = changed
        self.cold_version_found = asyncio.Event()
        """Set if some version is cold."""
        self._families: dict[str, ModelFamily] = {}
        self._is_gateway_only = False
        self._served: Mapping[str, frozenset[str]] = {}
        self._served_by_family: dict[str, dict[str, frozenset[str]]] = {}
        """Names and endpoints of the versions of each family."""
        self._families_by_version: dict[str, list[str]] = {}
        """Families of each listed name, so that a name is matched once."""
        self._loading: frozenset[str] = frozenset()
        self._no_longer_warm: set[tuple[str, str]] = set()
        """Pairs of model and endpoint that are no longer warm, until the queue knows."""
        self._warmed_since_exchange: set[tuple[str, str]] = set()
        """Pairs that were warmed here since the last exchange."""
        self._unreported_warm: set[tuple[str, str]] = set()
        """Pairs that were warmed here and that the queue does not know yet."""
        self._observed_warm: set[tuple[str, str]] = set()
        """Warm pairs that this process has seen served. For other pairs it cannot say that they are gone: it
        may know fewer endpoints than other owners, or may not reach all of them."""
        self._in_flight_counts: Counter[str] = Counter()
        """Number of leased requests by the version that they are sent to or name themselves."""
        self._pin_cache: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Cached pins of jobs and sequences: the version, and until when it is used."""
        self.reconfigure()

    def reconfigure(self) -> None:
        self.options = self._context.options.of(ModelOptions)
        before, self._families = self._families, {}
        for terms in self.options.families:
            family = self._families[terms.name] = before.get(terms.name) or ModelFamily(terms)
            family.reconfigure(terms)
        self._pin_cache.clear()
        if not self._families:
            self._served, self._loading = {}, frozenset()
            self._observed_warm.clear()
        self._membership = FamilyIndex(self.options.families)
        self._families_by_version.clear()
        self._assign_versions()
        self.update_families()

    def __bool__(self) -> bool:
        return bool(self._families)

    def __iter__(self) -> Iterator[ModelFamily]:
        return iter(list(self._families.values()))

    def get_family(self, model: str) -> ModelFamily | None:
        return self._families.get(model)

    def is_configured(self, family: ModelFamily) -> bool:
        """Return whether the settings still have this family."""
        return self._families.get(family.terms.name) is family

    @property
    def can_steer(self) -> bool:
        """True if requests can be confined to some endpoints."""
        return self.options.can_steer and not self._is_gateway_only

    def get_drain_note(self, model: str) -> str:
        """Return who drains the model, and why. Empty if it is not drained."""
        return "" if self.registry is None else self.registry.drained_models.get(model, "")

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────

    def update_served(self, pool: PoolModels) -> None:
        """Apply a new round of model lists."""
        if not self._families:
            return
        self._served, self._loading = pool.list_ready(loop_time()), pool.loading_models
        self._assign_versions()
        self._is_gateway_only = pool.endpoints == {GATEWAY}
        registry = self.registry
        if registry is not None:
            # If only the gateway is asked for its models, nothing is known about single endpoints.
            reachable = {
                pair for pair in self._observed_warm if pair[1] == GATEWAY or not self._is_gateway_only
            }
            gone = {pair for pair in reachable if pool.is_gone(*pair)}
            self._no_longer_warm |= gone
            self._unreported_warm -= gone
            self.registry = registry = replace(registry, warm_markers=registry.warm_markers - gone)
            observed = {
                pair for pair in registry.warm_markers if self._is_served(pair) and not pool.is_gone(*pair)
            }
            self._observed_warm = (self._observed_warm & registry.warm_markers) | observed
        self.update_families()

    def _assign_versions(self) -> None:
        """Sort the served names by family, so that an update of a family costs no more than its own
        versions."""
        known = self._families_by_version
        self._families_by_version = {
            name: known[name] if name in known else self._membership.find_families(name)
            for name in self._served
        }
        self._served_by_family = {name: {} for name in self._families}
        for name, families in self._families_by_version.items():
            for family in families:
                self._served_by_family[family][name] = self._served[name]

    def _is_served(self, pair: tuple[str, str]) -> bool:
        return pair[1] in self._served.get(pair[0], ())

    def update_families(self) -> None:
        """Let each family decide anew with all that is known now."""
        registry = self.registry or ModelRegistryState()
        models_in_use = registry.models_in_use | self._in_flight_counts.keys()
        inactive_count = 0
        for name, family in self._families.items():
            labels = {
                label: version
                for (family_name, label), version in registry.labels.items()
                if family_name == name
            }
            label_origins = {
                label: note
                for (family_name, label), note in registry.label_origins.items()
                if family_name == name
            }
            sight = VersionFacts(
                served=self._served_by_family[name],
                loading=self._loading,
                warm=registry.warm_markers,
                used=models_in_use,
                drained=registry.drained_models,
                labels=labels,
                label_origins=label_origins,
                is_steered=self.can_steer,
            )
            for change in family.apply_facts(sight, loop_time()):
                is_inactive = change.state in _INACTIVE_STATES and change.previous_state in _INACTIVE_STATES
                inactive_count += is_inactive
                # Endpoints may list many versions that the policy does not select.
                if is_inactive and inactive_count > MAX_LOGGED_CHANGES:
                    continue
                emit(
                    Event.VERSION,
                    model=change.family,
                    version=change.version,
                    state=str(change.state),
                    before=str(change.previous_state),
                )
            if family.list_cold_endpoints():
                self.cold_version_found.set()

    async def exchange_registry(self) -> None:
        """Share what is warm and in use here, and read the state of all owners."""
        warm = frozenset() if self.registry is None else self.registry.warm_markers
        if loop_time() > self._exchanged_at + MARKERS_EXPIRE_S:
            # The queue was unreachable and the markers have expired, but these are known to be warm still.
            self._unreported_warm |= self._observed_warm
        for pair in list(self._unreported_warm):
            if not await self._report_warm(pair):
                break  # an unreachable queue takes long to fail
        keep_warm = [pair for pair in warm if self._is_served(pair)]
        no_longer_warm = frozenset(self._no_longer_warm)
        self._warmed_since_exchange.clear()
        registry = await self._access.call_queue(
            ModelStep.READ_REGISTRY,
            self._calls.refresh_warm_markers(keep_warm, no_longer_warm, tuple(self._in_flight_counts)),
        )
        if registry is None:
            return
        self._exchanged_at = loop_time()
        self._no_longer_warm -= no_longer_warm
        # During the call, other tasks may have warmed a version or seen one go.
        self.registry = replace(
            registry,
            warm_markers=(registry.warm_markers | self._warmed_since_exchange | self._unreported_warm)
            - self._no_longer_warm,
        )
        self.update_families()

    async def read_registry(self) -> None:
        """Read the state of all owners without sharing. An observer leaves it to others to report what is
        gone."""
        registry = await self._access.call_queue(ModelStep.READ_REGISTRY, self._calls.read_model_registry())
        if registry is None:
            return
        self._no_longer_warm.clear()
        self.registry = registry
        self.update_families()

    async def mark_warm(self, model: str, endpoint: str) -> None:
        """Mark the model as warm at the endpoint here and in the queue, which releases the lock."""
        pair = model, endpoint
        for pairs in self._warmed_since_exchange, self._unreported_warm, self._observed_warm:
            pairs.add(pair)
        self._no_longer_warm.discard(pair)
        if self.registry is not None:
            self.registry = replace(self.registry, warm_markers=self.registry.warm_markers | {pair})
        self.update_families()
        await self._report_warm(pair)

    async def _report_warm(self, pair: tuple[str, str]) -> bool:
        """Report a warm pair to the queue. Return False if that failed: the next exchange repeats it."""

        async def report() -> bool:
            await self._calls.mark_warm(*pair)
            return True

        is_reported = bool(await self._access.call_queue(ModelStep.MARK_WARM, report()))
        if is_reported:
            self._unreported_warm.discard(pair)
        return is_reported

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def choose_version(self, model: str, request: Request, begun_with: str = "") -> str | PinRequest:
        """Return the version, or the pin to ask the queue for. Empty if the model has no versions, or none is
        open.

        A generation continues on the version that it has begun with, as long as that is served.
        """
        family = self._families.get(model)
        if family is None or self.get_drain_note(model):  # operators can drain the whole model
            return ""
        if begun_with and family.can_keep(begun_with):
            return begun_with
        key = build_pin_key(family.terms, request)
        kept, until = self._pin_cache.get(key, ("", 0.0))
        if until > loop_time() and family.can_keep(kept):
            return kept
        # The same key gives the same version on every replica.
        version = family.choose_version(key or request.id) or ""
        return PinRequest(key, version, family.list_keepable(), PIN_KEPT_S) if key and version else version

    async def pin_versions(self, pin_requests: Sequence[PinRequest]) -> Mapping[str, str]:
        """Ask the queue for the pinned versions, by the key of the pin. Empty if it cannot be reached."""
        versions = await self._access.call_queue(
            ModelStep.PIN_VERSIONS, self._calls.pin_versions(pin_requests)
        )
        pinned: dict[str, str] = {}
        if versions is not None:
            until = loop_time() + PIN_CACHE_S
            for pin, version in zip(pin_requests, versions, strict=True):
                pinned[pin.key] = version
                self._pin_cache[pin.key] = version, until
                self._pin_cache.move_to_end(pin.key)
            while len(self._pin_cache) > MAX_CACHED_PINS:
                self._pin_cache.popitem(last=False)
        return pinned

    def name_version(self, request: Request, model: str, version: str) -> Request | None:
        """Return the request with a body that names the version. `None` if the body cannot be changed."""
        family = self._families.get(model)  # settings may have changed meanwhile
        warm = family.list_warm_endpoints(version) if family is not None and self.can_steer else ()
        return prepare_for_version(request, model, version, ",".join(sorted(warm)))

    def count_request(self, version: str) -> None:
        """Count a leased request that is sent to the version, or names it itself."""
        self._in_flight_counts[version] += 1

    def is_version(self, name: str) -> bool:
        return bool(self._find_families(name))

    def explain_giving_way(self, model: str) -> str:
        """Return why requests that name a version wait for another version, as a phrase. Empty if they do not
        wait."""
        return next(filter(None, (family.explain_wait(model) for family in self._find_families(model))), "")

    def _find_families(self, name: str) -> list[ModelFamily]:
        known = self._families_by_version.get(name)
        return [
            self._families[each]
            for each in (self._membership.find_families(name) if known is None else known)
        ]

    def forget_request(self, model: str, version: str, *, is_chosen: bool) -> None:
        """Forget a request that `count_request` has counted. `is_chosen` says that the version was chosen for
        it; else the request named the version itself."""
        if not self._decrement_count(version):
            return
        family = self._families.get(model)
        if not is_chosen:
            self._handle_idle_version(version)
        elif family is None or not family.is_open(version):  # another version may wait for that
            self._update_and_notify()

    @contextlib.contextmanager
    def count_in_flight(self, version: str) -> Iterator[None]:
        """Count a call that is no request (a warm-up) as in flight during the block."""
        self._in_flight_counts[version] += 1
        try:
            yield
        finally:
            if self._decrement_count(version):
                self._handle_idle_version(version)

    def _decrement_count(self, version: str) -> bool:
        """Decrement the count of a version. Return True if none is left."""
        self._in_flight_counts[version] -= 1
        if self._in_flight_counts[version]:
            return False
        del self._in_flight_counts[version]
        return True

    def _handle_idle_version(self, version: str) -> None:
        if any(family.is_blocked_by(version) for family in self._find_families(version)):
            self._update_and_notify()

    def _update_and_notify(self) -> None:
        self.update_families()
        self._changed.set()


def build_pin_key(terms: FamilyTerms, request: Request) -> str:
    """Return the key under which a job or sequence keeps its version of a family. Empty if each request
    chooses for itself."""
    name = ""
    if terms.pin is PinScope.JOB:
        name = next((f"job {job}" for label in JOB_LABELS if (job := request.labels.get(label))), "")
    if not name and terms.pin is not PinScope.REQUEST and request.extra is not None:
        name = request.extra.key
    if not name:
        return ""
    return blake2b(f"{terms.name} {name}".encode(errors="replace"), digest_size=16).hexdigest()
