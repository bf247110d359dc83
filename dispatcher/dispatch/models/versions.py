"""Models with versions: chooses the version to which each request is sent.

    update      Endpoint lists, warm markers and decisions of operators change the state of each version.
    route       A request for a model with versions gets an open one, and its body is changed to name it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from dispatcher.core.models.availability import GATEWAY
from dispatcher.core.models.body_rewrite import sent_as
from dispatcher.core.models.rollover import ModelFamily
from dispatcher.core.models.versions import Membership, Pin, VersionSight, VersionState
from dispatcher.core.requests.result import ErrorCode
from dispatcher.dispatch import completions
from dispatcher.dispatch.queue_access import now
from dispatcher.ports import ModelMarks, PinAsked
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.core.models.availability import PoolModels
    from dispatcher.core.models.versions import FamilyTerms
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.completions import Ending
    from dispatcher.dispatch.in_flight import HeldLease
    from dispatcher.dispatch.options import FamilyOptions, Options
    from dispatcher.dispatch.queue_access import QueueAccess

PIN_S = 86_400.0
"""Lifetime of a pin after the last request of a job or sequence."""
PIN_ASKED_S = 10.0
"""Time for which a pin that the queue returned is used without asking again."""
PINS_MOST = 10_000
"""Maximum number of cached pins."""
LAPSED_S = 60.0
"""Lifetime of a warm marker without a refresh (ports/model_registry.py)."""
TOLD_MOST = 100
"""Maximum number of state changes of inactive versions that one update logs."""
_APART = frozenset((VersionState.ABSENT, VersionState.SPARE, VersionState.GONE))
JOB_LABELS = ("job", "file")
"""Labels that name the job of a request; the first one that is set counts."""


class Versions:
    """Chooses versions in one process. `complete` takes completions; `changed` is set to share changes
    soon."""

    def __init__(
        self,
        access: QueueAccess,
        options: Options,
        finish: Callable[[Ending], None],
        changed: asyncio.Event,
    ) -> None:
        self.marks: ModelMarks | None = None
        """State of the model registry as the queue returned it last. `None` if it was not read yet."""
        self._exchanged_at = now()
        self._access = access
        self._finish = finish
        self._changed = changed
        self.stirred = asyncio.Event()
        """Set if some version is cold."""
        self._families: dict[str, ModelFamily] = {}
        self._by_gateway = False
        self._served: Mapping[str, frozenset[str]] = {}
        self._mine: dict[str, dict[str, frozenset[str]]] = {}
        """Names and endpoints of the versions of each family."""
        self._families_of: dict[str, list[str]] = {}
        """Families of each listed name, so that a name is matched once."""
        self._loading: frozenset[str] = frozenset()
        self._cold: set[tuple[str, str]] = set()
        """Pairs of model and endpoint that are no longer warm, until the queue knows."""
        self._warmed: set[tuple[str, str]] = set()
        """Pairs that were warmed here since the last exchange."""
        self._untold: set[tuple[str, str]] = set()
        """Pairs that were warmed here and that the queue does not know yet."""
        self._vouched: set[tuple[str, str]] = set()
        """Warm pairs that this process has seen served. For other pairs it cannot say that they are gone: it
        may know fewer endpoints than other owners, or may not reach all of them."""
        self._held: Counter[str] = Counter()
        """Number of leased requests by the version that they are sent to or name themselves."""
        self._pins: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Cached pins of jobs and sequences: the version, and until when it is used."""
        self.reconfigure(options)

    def reconfigure(self, options: Options) -> None:
        self.options = options.versions
        self._told: dict[str, FamilyOptions] = {each.terms.name: each for each in options.versions.families}
        before, self._families = self._families, {}
        for name, told in self._told.items():
            family = self._families[name] = before.get(name) or ModelFamily(told.terms)
            family.reconfigure(told.terms)
        self._pins.clear()
        if not self._families:
            self._served, self._loading = {}, frozenset()
            self._vouched.clear()
        self._membership = Membership(each.terms for each in options.versions.families)
        self._families_of.clear()
        self._share_out()
        self.look()

    def __bool__(self) -> bool:
        """Return True if some model has versions."""
        return bool(self._families)

    def __iter__(self) -> Iterator[ModelFamily]:
        return iter(list(self._families.values()))

    def family(self, model: str) -> ModelFamily | None:
        return self._families.get(model)

    def told(self, family: ModelFamily) -> FamilyOptions | None:
        """Return the settings of a family. `None` if the settings no longer have it."""
        name = family.terms.name
        return self._told.get(name) if self._families.get(name) is family else None

    @property
    def steered(self) -> bool:
        """True if requests can be confined to some endpoints."""
        return self.options.steered and not self._by_gateway

    def drained(self, model: str) -> str:
        """Return who drains the model, and why. Empty if it is not drained."""
        return "" if self.marks is None else self.marks.drained.get(model, "")

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, pool: PoolModels) -> None:
        """Apply a new round of model lists."""
        if not self._families:
            return
        self._served, self._loading = pool.ready(now()), pool.loading
        self._share_out()
        self._by_gateway = pool.endpoints == {GATEWAY}
        marks = self.marks
        if marks is not None:
            # If only the gateway is asked for its models, nothing is known about single endpoints.
            known = {pair for pair in self._vouched if pair[1] == GATEWAY or not self._by_gateway}
            gone = {pair for pair in known if pool.gone(*pair)}
            self._cold |= gone
            self._untold -= gone
            self.marks = marks = replace(marks, warm=marks.warm - gone)
            there = {pair for pair in marks.warm if self._there(pair) and not pool.gone(*pair)}
            self._vouched = (self._vouched & marks.warm) | there
        self.look()

    def _share_out(self) -> None:
        """Sort the served names by family, so that an update of a family costs no more than its own
        versions."""
        known = self._families_of
        self._families_of = {
            name: known[name] if name in known else self._membership.of(name) for name in self._served
        }
        self._mine = {name: {} for name in self._families}
        for name, families in self._families_of.items():
            for family in families:
                self._mine[family][name] = self._served[name]

    def _there(self, pair: tuple[str, str]) -> bool:
        return pair[1] in self._served.get(pair[0], ())

    def look(self) -> None:
        """Let each family decide anew with all that is known now."""
        marks = self.marks or ModelMarks()
        used = marks.used | self._held.keys()
        apart = 0
        for name, family in self._families.items():
            labels = {label: version for (of, label), version in marks.labels.items() if of == name}
            labelled = {label: by for (of, label), by in marks.labelled.items() if of == name}
            sight = VersionSight(
                served=self._mine[name],
                loading=self._loading,
                warm=marks.warm,
                used=used,
                drained=marks.drained,
                labels=labels,
                labelled=labelled,
                steered=self.steered,
            )
            for moved in family.look(sight, now()):
                idle = moved.state in _APART and moved.before in _APART
                apart += idle
                # Endpoints may list many versions that the policy does not select.
                if idle and apart > TOLD_MOST:
                    continue
                emit(
                    Event.VERSION,
                    model=moved.family,
                    version=moved.version,
                    state=str(moved.state),
                    before=str(moved.before),
                )
            if family.cold():
                self.stirred.set()

    async def exchange(self) -> None:
        """Share what is warm and in use here, and read the state of all owners."""
        warm = frozenset() if self.marks is None else self.marks.warm
        if now() > self._exchanged_at + LAPSED_S:
            # The queue was unreachable and the markers have expired, but these are known to be warm still.
            self._untold |= self._vouched
        for pair in list(self._untold):
            if not await self._tell(pair):
                break  # an unreachable queue takes long to fail
        keep = [pair for pair in warm if self._there(pair)]
        cold = frozenset(self._cold)
        self._warmed.clear()
        queue = self._access.queue
        marks = await self._access.ask("marks", queue.marks(keep, cold, tuple(self._held)))
        if marks is None:
            return
        self._exchanged_at = now()
        self._cold -= cold
        # During the call, other tasks may have warmed a version or seen one go.
        self.marks = replace(marks, warm=(marks.warm | self._warmed | self._untold) - self._cold)
        self.look()

    async def listen(self) -> None:
        """Read the state of all owners without sharing. An observer leaves it to others to report what is
        gone."""
        marks = await self._access.ask("marks", self._access.queue.model_marks())
        if marks is None:
            return
        self._cold.clear()
        self.marks = marks
        self.look()

    async def warmed(self, model: str, endpoint: str) -> None:
        """Mark the model as warm at the endpoint here and in the queue, which releases the lock."""
        pair = model, endpoint
        for known in self._warmed, self._untold, self._vouched:
            known.add(pair)
        self._cold.discard(pair)
        if self.marks is not None:
            self.marks = replace(self.marks, warm=self.marks.warm | {pair})
        self.look()
        await self._tell(pair)

    async def _tell(self, pair: tuple[str, str]) -> bool:
        """Report a warm pair to the queue. Return False if that failed: the next exchange repeats it."""

        async def told() -> bool:
            await self._access.queue.warmed(*pair)
            return True

        known = bool(await self._access.ask("warmed", told()))
        if known:
            self._untold.discard(pair)
        return known

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    async def direct(self, read: Sequence[tuple[HeldLease, Request]]) -> list[tuple[HeldLease, Request]]:
        """Choose a version for each request whose model has versions. Return the requests as they are sent,
        in order; those whose body cannot be changed were completed."""
        choices = [self._choice(held.model, request) for held, request in read]
        # Many requests may belong to one job: ask for each key once.
        asked = {choice.key: choice for choice in choices if isinstance(choice, PinAsked)}
        pinned = dict(zip(asked, await self._pin(list(asked.values())), strict=True)) if asked else {}
        directed = []
        for (held, request), choice in zip(read, choices, strict=True):
            version = pinned[choice.key] if isinstance(choice, PinAsked) else choice
            sent = self._sent_to(held, request, version) if version else request
            if sent is not None:
                directed.append((held, sent))
        return directed

    def _choice(self, model: str, request: Request) -> str | PinAsked:
        """Return the version, or the pin to ask the queue for. Empty if the model has no versions, or none is
        open."""
        family = self._families.get(model)
        if family is None or self.drained(model):  # operators can drain the whole model
            return ""
        key = pin_key(family.terms, request)
        kept, until = self._pins.get(key, ("", 0.0))
        if until > now() and family.keeps(kept):
            return kept
        # The same key gives the same version on every replica.
        version = family.choose(key or request.id) or ""
        return PinAsked(key, version, family.kept(), PIN_S) if key and version else version

    async def _pin(self, asked: Sequence[PinAsked]) -> list[str]:
        """Return the pinned versions; empty if the queue cannot be reached."""
        versions = await self._access.ask("pin", self._access.queue.pin(asked))
        if versions is None:
            return [""] * len(asked)
        until = now() + PIN_ASKED_S
        for pin, version in zip(asked, versions, strict=True):
            self._pins[pin.key] = version, until
            self._pins.move_to_end(pin.key)
        while len(self._pins) > PINS_MOST:
            self._pins.popitem(last=False)
        return list(versions)

    def _sent_to(self, held: HeldLease, request: Request, version: str) -> Request | None:
        """Return the request as it is sent to this version. `None` if it was completed."""
        family = self._families.get(held.model)  # settings may have changed meanwhile
        warm = family.endpoints(version) if family is not None and self.steered else ()
        sent = sent_as(request, held.model, version, ",".join(sorted(warm)))
        if sent is None:
            why = "data.payload: its field `model` is given twice, or its name is escaped"
            self._finish(completions.error(held.lease, request, ErrorCode.INVALID_REQUEST, why))
            return None
        held.version = held.uses = version
        self._held[version] += 1
        return sent

    def goes(self, held: HeldLease) -> None:
        """Count a request that is sent unchanged and names a version itself."""
        if held.model and self._of(held.model):
            held.uses = held.model
            self._held[held.model] += 1

    def gives_way(self, model: str) -> str:
        """Return why requests that name a version wait for another version, as a phrase. Empty if they do not
        wait."""
        return next(filter(None, (family.gives_way(model) for family in self._of(model))), "")

    def _of(self, name: str) -> list[ModelFamily]:
        """Return the families of which the name is a version."""
        known = self._families_of.get(name)
        return [self._families[each] for each in (self._membership.of(name) if known is None else known)]

    def left(self, held: HeldLease) -> None:
        """Forget a lease that has ended."""
        if not held.uses or not self._is_last(held.uses):
            return
        family = self._families.get(held.model)
        if held.uses != held.version:
            self._ended(held.uses)
        elif family is None or not family.takes(held.version):  # another version may wait for that
            self._stirred()

    @contextlib.contextmanager
    def under_way(self, version: str) -> Iterator[None]:
        """Count a call that is no request (a warm-up) as in flight during the block."""
        self._held[version] += 1
        try:
            yield
        finally:
            if self._is_last(version):
                self._ended(version)

    def _is_last(self, version: str) -> bool:
        """Decrement the count of a version. Return True if none is left."""
        self._held[version] -= 1
        if self._held[version]:
            return False
        del self._held[version]
        return True

    def _ended(self, version: str) -> None:
        if any(family.waits_for(version) for family in self._of(version)):
            self._stirred()

    def _stirred(self) -> None:
        self.look()
        self._changed.set()


def pin_key(terms: FamilyTerms, request: Request) -> str:
    """Return the key by which a job or sequence keeps its version of a family. Empty if each request chooses
    for itself."""
    name = ""
    if terms.pin is Pin.JOB:
        name = next((f"job {job}" for label in JOB_LABELS if (job := request.labels.get(label))), "")
    if not name and terms.pin is not Pin.REQUEST and request.sequence is not None:
        # The name includes the owner, so that another producer cannot keep the sequence from its version.
        name = f"sequence {request.sequence.owner} {request.sequence.id}"
    if not name:
        return ""
    return blake2b(f"{terms.name} {name}".encode(errors="replace"), digest_size=16).hexdigest()
