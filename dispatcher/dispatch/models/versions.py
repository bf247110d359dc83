"""Models with versions: to which one a request is sent, as this process sees it and does it.

    look       what endpoints list, what is warm and what operators decided moves the state of each version
    direct     a request for a model with versions gets one of those that are open, and its body says so
    exchange   what is warm and under way is shared with the other owners, and what verbs have set comes back
    listen     the same for who only observes: he hears what the others share, and tells nothing

Which version is open is decided in rollover.py. Where the settings name no versions nothing is kept, and
nothing of a request is touched.
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
"""A job or sequence of which nothing was sent for so long is given a version anew."""
PIN_ASKED_S = 10.0
"""So long what the queue said of a pin is believed."""
PINS_MOST = 10_000
"""Of those that are remembered here."""
LAPSED_S = 60.0
"""Marks that nobody has refreshed for so long have lapsed (ports/model_registry.py)."""
TOLD_MOST = 100
"""Of the steps of one look, of versions that take no part."""
_APART = frozenset((VersionState.ABSENT, VersionState.SPARE, VersionState.GONE))
JOB_LABELS = ("job", "file")
"""The labels that name a request's job; the first that it has counts."""


class Versions:
    """Of one process. `finish`: how a lease ends. `changed`: set where other owners should be told soon."""

    def __init__(
        self,
        access: QueueAccess,
        options: Options,
        finish: Callable[[Ending], None],
        changed: asyncio.Event,
    ) -> None:
        self.marks: ModelMarks | None = None
        """What the owners share, as the queue told it last; None: it was not asked yet."""
        self._exchanged_at = now()
        self._access = access
        self._finish = finish
        self._changed = changed
        self.stirred = asyncio.Event()
        """Set where some version is cold."""
        self._families: dict[str, ModelFamily] = {}
        self._by_gateway = False
        self._served: Mapping[str, frozenset[str]] = {}
        self._mine: dict[str, dict[str, frozenset[str]]] = {}
        """Those that are its versions, by family."""
        self._families_of: dict[str, list[str]] = {}
        """By name: what was listed last, and is to be matched once."""
        self._loading: frozenset[str] = frozenset()
        self._cold: set[tuple[str, str]] = set()
        """Models at endpoints that are not warm any more, until the queue knows."""
        self._warmed: set[tuple[str, str]] = set()
        """Those that were warmed here since the queue was asked."""
        self._untold: set[tuple[str, str]] = set()
        """Those among all that were warmed here of which the queue does not know yet."""
        self._vouched: set[tuple[str, str]] = set()
        """Those that are warm and were seen there by this process. Of others it cannot say that they are
        gone: it may know of fewer endpoints than other owners, or not reach all of them."""
        self._held: Counter[str] = Counter()
        """Requests that are held, by the version that they are sent to, or name themselves."""
        self._pins: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Of jobs and sequences: the version, and until when it is believed."""
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
        """Some model has versions."""
        return bool(self._families)

    def __iter__(self) -> Iterator[ModelFamily]:
        return iter(list(self._families.values()))

    def family(self, model: str) -> ModelFamily | None:
        return self._families.get(model)

    def told(self, family: ModelFamily) -> FamilyOptions | None:
        """What the settings say of it; None: they have it no more."""
        name = family.terms.name
        return self._told.get(name) if self._families.get(name) is family else None

    @property
    def steered(self) -> bool:
        """Requests can be confined to some endpoints."""
        return self.options.steered and not self._by_gateway

    def drained(self, model: str) -> str:
        """Who drains it, and why; empty: nobody."""
        return "" if self.marks is None else self.marks.drained.get(model, "")

    # What is seen.

    def heard(self, pool: PoolModels) -> None:
        """What the endpoints said in a new round."""
        if not self._families:
            return
        self._served, self._loading = pool.ready(now()), pool.loading
        self._share_out()
        self._by_gateway = pool.endpoints == {GATEWAY}
        marks = self.marks
        if marks is not None:
            known = {pair for pair in self._vouched if pair[1] == GATEWAY or not self._by_gateway}
            gone = {pair for pair in known if pool.gone(*pair)}
            self._cold |= gone
            self._untold -= gone
            self.marks = marks = replace(marks, warm=marks.warm - gone)
            there = {pair for pair in marks.warm if self._there(pair) and not pool.gone(*pair)}
            self._vouched = (self._vouched & marks.warm) | there
        self.look()

    def _share_out(self) -> None:
        """Each family is shown its own versions: a look costs by what it has, not by all that is listed."""
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
        """Have each family decide anew, by all that is known now."""
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
        """Tell the other owners what is warm and under way here, and hear what holds for all."""
        warm = frozenset() if self.marks is None else self.marks.warm
        if now() > self._exchanged_at + LAPSED_S:
            # The queue was away, and what this process has seen there all the while is warm still.
            self._untold |= self._vouched
        for pair in list(self._untold):
            if not await self._tell(pair):
                break  # who is away takes long to say so
        keep = [pair for pair in warm if self._there(pair)]
        cold = frozenset(self._cold)
        self._warmed.clear()
        queue = self._access.queue
        marks = await self._access.ask("marks", queue.marks(keep, cold, tuple(self._held)))
        if marks is None:
            return
        self._exchanged_at = now()
        self._cold -= cold
        self.marks = replace(marks, warm=(marks.warm | self._warmed | self._untold) - self._cold)
        self.look()

    async def listen(self) -> None:
        """Hear what holds for all, and tell nothing. What this process has seen go is for others to say."""
        marks = await self._access.ask("marks", self._access.queue.model_marks())
        if marks is None:
            return
        self._cold.clear()
        self.marks = marks
        self.look()

    async def warmed(self, model: str, endpoint: str) -> None:
        """It is warm there from now on; the queue is told, which takes back the right to warm it."""
        pair = model, endpoint
        for known in self._warmed, self._untold, self._vouched:
            known.add(pair)
        self._cold.discard(pair)
        if self.marks is not None:
            self.marks = replace(self.marks, warm=self.marks.warm | {pair})
        self.look()
        await self._tell(pair)

    async def _tell(self, pair: tuple[str, str]) -> bool:
        """Have the queue know that it is warm. False: it cannot be told, and is with the next exchange."""

        async def told() -> bool:
            await self._access.queue.warmed(*pair)
            return True

        known = bool(await self._access.ask("warmed", told()))
        if known:
            self._untold.discard(pair)
        return known

    # Requests.

    async def direct(self, read: Sequence[tuple[HeldLease, Request]]) -> list[tuple[HeldLease, Request]]:
        """Give each that asks for a model with versions one of them, where one is open. All as they are sent
        from here on, in their order; those whose bodies cannot be changed have ended."""
        choices = [self._choice(held.model, request) for held, request in read]
        # Of a job there may be many: it is asked for once.
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
        """The version; or what the queue is to be asked, which knows what its job or sequence has. Empty: it
        has no versions, or none is open."""
        family = self._families.get(model)
        if family is None or self.drained(model):  # an operator may drain them all, by the model's name
            return ""
        key = pin_key(family.terms, request)
        kept, until = self._pins.get(key, ("", 0.0))
        if until > now() and family.keeps(kept):
            return kept
        version = family.choose(key or request.id) or ""
        return PinAsked(key, version, family.kept(), PIN_S) if key and version else version

    async def _pin(self, asked: Sequence[PinAsked]) -> list[str]:
        """The version of each; empty where the queue cannot tell."""
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
        """The request as it goes to this version; None: it has ended."""
        family = self._families.get(held.model)  # while the queue was asked the settings may have changed
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
        """It goes as it is: to a version, where it names one itself."""
        if held.model and self._of(held.model):
            held.uses = held.model
            self._held[held.model] += 1

    def gives_way(self, model: str) -> str:
        """Why work that names a version itself waits for another one, as a sentence goes on; empty: it does
        not, or it names none."""
        return next(filter(None, (family.gives_way(model) for family in self._of(model))), "")

    def _of(self, name: str) -> list[ModelFamily]:
        """The models of which it is a version."""
        known = self._families_of.get(name)
        return [self._families[each] for each in (self._membership.of(name) if known is None else known)]

    def left(self, held: HeldLease) -> None:
        """It is not held any more."""
        if not held.uses or not self._is_last(held.uses):
            return
        family = self._families.get(held.model)
        if held.uses != held.version:
            self._ended(held.uses)
        elif family is None or not family.takes(held.version):  # somebody may wait for that
            self._stirred()

    @contextlib.contextmanager
    def under_way(self, version: str) -> Iterator[None]:
        """A call that is no request is under way to it as long as the block lasts."""
        self._held[version] += 1
        try:
            yield
        finally:
            if self._is_last(version):
                self._ended(version)

    def _is_last(self, version: str) -> bool:
        """One less; whether nothing is left."""
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
    """By what a job or sequence keeps its version of a family; empty: the request chooses for itself."""
    name = ""
    if terms.pin is Pin.JOB:
        name = next((f"job {job}" for label in JOB_LABELS if (job := request.labels.get(label))), "")
    if not name and terms.pin is not Pin.REQUEST and request.sequence is not None:
        # The name includes the owner, so that another producer cannot keep the sequence from its version.
        name = f"sequence {request.sequence.owner} {request.sequence.id}"
    if not name:
        return ""
    return blake2b(f"{terms.name} {name}".encode(errors="replace"), digest_size=16).hexdigest()
