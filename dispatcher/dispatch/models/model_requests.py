"""Requests and their models: who is sent, who waits for its model, who asks for one that is none.

    direct     each asks for the model that its body names; where that has versions it is sent to one of them
    put off    of what was claimed and may go otherwise, those whose model is served go; those that are
               expected wait in the queue, apart from all others; the rest ends with MODEL_NOT_FOUND
    outcome    a server's answer that it has no such model, where that is expected, costs no attempt
    recall     what waits for a model that is served by now, or that nobody watches any more, comes back

Where no models are watched nothing of a body is read, and what the server answers is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import Delivered, Outcome, WithoutModel
from dispatcher.core.models.availability import (
    AwaitsModel,
    GoesToModel,
    Listing,
    ModelSeen,
    ModelState,
    ModelVerdict,
    NoSuchModel,
    PoolModels,
)
from dispatcher.core.models.names import model_of, quoted, says_no_model
from dispatcher.core.requests.result import ErrorCode
from dispatcher.dispatch import completions
from dispatcher.dispatch.models.versions import Versions
from dispatcher.dispatch.queue_access import now
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.completions import Ending
    from dispatcher.dispatch.in_flight import HeldLease, Try
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.queue_access import QueueAccess

RECALL_EACH_S, UNWATCHED_EACH_S = 5.0, 60.0
"""How often it is looked whether any wait whose model is there; the second: where no models are watched."""
GAP_S = 0.2
"""Between two looks, however much changes."""
ELSEWHERE_S = 1.0
"""Where some servers have the model and another one answered, or its version could not be told: it is tried
again after this."""
SHOWN_MOST = 50
_GOES = GoesToModel()


class Models:
    """Of one process. `finish`: how a lease ends."""

    def __init__(self, access: QueueAccess, options: Options, finish: Callable[[Ending], None]) -> None:
        self.requests: dict[str, int] = dict.fromkeys(("goes", "waits", "unknown", "denied"), 0)
        """What was said of those that name a model, by what it was; `denied`: by the server."""
        self.awaited: Mapping[str, int] = {}
        """How many requests wait for each model, as counted last."""
        self._access = access
        self._pool: PoolModels | None = None
        self._changed = asyncio.Event()
        self.versions = Versions(access, options, finish, self._changed)
        self.reconfigure(options)

    def reconfigure(self, options: Options) -> None:
        self._observes = options.observe
        if options.models is None:
            self._pool = None
        elif self._pool is None:
            self._pool = PoolModels(options.models, now())
            self._pool.expect(self.awaited)
        else:
            self._pool.reconfigure(options.models)
        self.versions.reconfigure(options)
        self._changed.set()

    def heard(self, listings: Sequence[Listing]) -> None:
        """A round of what the endpoints say."""
        if self._pool is None:
            return
        for moved in self._pool.heard(listings, now()):
            seen = moved.seen
            if self.versions.family(seen.name) is not None:
                continue  # its versions tell
            if seen.named or self.awaited.get(seen.name):
                emit(
                    Event.MODEL,
                    model=seen.name,
                    state=str(seen.state),
                    before=str(moved.before),
                    serving=seen.serving,
                    endpoints=seen.endpoints,
                    waiting=self.awaited.get(seen.name, 0),
                )
            if seen.state is ModelState.READY:
                self._changed.set()
        if self.versions:
            self.versions.heard(self._pool)
            self._changed.set()

    async def direct(self, read: list[tuple[HeldLease, Request]]) -> list[tuple[HeldLease, Request]]:
        """See what each asks for, and have it go to a version of that, where it has some. The requests as
        they are sent; those that cannot be have ended."""
        if self._pool is None:
            return read
        for held, request in read:
            held.model = model_of(request.payload)
        return await self.versions.direct(read) if self.versions else read

    def left(self, held: HeldLease) -> None:
        """It is not held any more."""
        self.versions.left(held)

    def put_off(self, held: HeldLease, request: Request) -> Ending | None:
        """How a request ends, or waits, that may go otherwise; None: it goes."""
        if self._pool is None:
            return None
        if held.version:
            self.requests["goes"] += 1
            return None
        match self._verdict(self._pool, held.model):
            case GoesToModel() if self.versions.family(held.model) is not None:
                # It was opened meanwhile, or the queue could not say what its job or sequence has.
                return completions.returned(held.lease, after_s=ELSEWHERE_S)
            case AwaitsModel(why):
                self.requests["waits"] += 1
                return completions.awaiting(held.lease, request, held.model, f"not sent, for its {why}")
            case NoSuchModel(why):
                self.requests["unknown"] += 1
                return completions.error(held.lease, request, ErrorCode.MODEL_NOT_FOUND, why)
        self.requests["goes"] += bool(held.model)
        self.versions.goes(held)
        return None

    def outcome(self, tried: Try, outcome: Outcome, sent_at: float) -> Outcome:
        """What the answer comes to, with what is known of the model that it was asked for."""
        if self._pool is None or not isinstance(outcome, Delivered):
            return outcome
        model = tried.riders[0].model if tried.riders else ""
        version = tried.request.version or model
        if outcome.status < 300:
            self._pool.answered(version, sent_at)
            return outcome
        if not says_no_model(outcome.status, outcome.body, version):
            return outcome
        self._pool.denied(version, sent_at, now())
        if version != model:
            self.versions.heard(self._pool)
        match self._verdict(self._pool, model):
            case AwaitsModel(why):
                self.requests["denied"] += len(tried.riders)
                return WithoutModel(f"not sent again, for its {why}", awaits=model)
            case GoesToModel() if version != model or self._pool.partly(model):
                self.requests["denied"] += len(tried.riders)
                return WithoutModel("it came to a server without its model", rest_s=ELSEWHERE_S)
        return outcome  # nobody expects it: this is the answer

    def _verdict(self, pool: PoolModels, model: str) -> ModelVerdict:
        """What becomes of a request for this model."""
        if drained := self.versions.drained(model):
            return AwaitsModel(f"model {quoted(model)} is drained {drained}")
        family, found = self.versions.family(model), pool.verdict(model, now())
        if family is None:
            why = self.versions.gives_way(model) if isinstance(found, GoesToModel) else ""
            return AwaitsModel(f"model {quoted(model)} {why}") if why else found
        if family.opened:
            return _GOES
        if isinstance(found, NoSuchModel) and not family.listed:
            return found
        return AwaitsModel(f"model {quoted(model)} has no version that can be used: {family.why()}")

    async def recalling(self) -> None:
        """See to it that nothing waits for a model that is there; who only observes looks, and no more."""
        while True:
            if self._pool is not None:
                await (self.versions.listen() if self._observes else self.versions.exchange())
            if await self._count_awaited() and not self._observes:
                await self._recall()
            pause_s = UNWATCHED_EACH_S if self._pool is None else RECALL_EACH_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            self._changed.clear()
            await asyncio.sleep(GAP_S)

    async def _count_awaited(self) -> bool:
        """Whether the queue has told."""
        awaited = await self._access.ask("awaited", self._access.queue.awaited())
        if awaited is None:
            return False
        self.awaited = awaited
        if self._pool is not None:
            self._pool.expect(awaited)
        return True

    async def _recall(self) -> None:
        access = self._access
        there = [model for model in self.awaited if not self._holds_back(model)]
        while there:
            recalled = await access.ask("recall", access.queue.recall(there))
            if recalled is None:
                return
            if recalled.moved:
                access.found_work()
            if not recalled.left or not recalled.moved:
                return
            there = [model for model in there if not self._holds_back(model)]

    def _holds_back(self, model: str) -> bool:
        return self._pool is not None and isinstance(self._verdict(self._pool, model), AwaitsModel)

    # For people.

    def names(self) -> list[str]:
        """Return the names of the models that are known, most waited for first. The name of a version is
        among them only if the settings name it or requests wait for it by its name."""
        if self._pool is None:
            return []
        versions = {each.name for family in self.versions for each in family.versions()}
        apart = versions - self._pool.terms.named.keys() - self.awaited.keys()
        known = [name for name in self._pool.known() if name not in apart]
        return sorted(known, key=lambda name: -self.awaited.get(name, 0))

    def seen(self) -> list[tuple[ModelSeen, int]]:
        """Return the first SHOWN_MOST of `names`, each with the number of requests that wait for it."""
        if self._pool is None:
            return []
        pool, at, names = self._pool, now(), self.names()[:SHOWN_MOST]
        return [(self._look(pool, name, at), self.awaited.get(name, 0)) for name in names]

    def _look(self, pool: PoolModels, name: str, at: float) -> ModelSeen:
        """One model; one with versions as they are."""
        seen, family = pool.look(name, at), self.versions.family(name)
        if family is None:
            return seen
        versions = family.versions()
        serving = frozenset().union(*(each.serving for each in versions if each.weight > 0))
        state = ModelState.READY if family.opened else ModelState.LOADING if family.listed else seen.state
        since = max((each.since for each in versions), default=seen.since)
        return replace(seen, state=state, serving=len(serving), since=since, denied=False)

    def held_back(self) -> list[tuple[str, int, str]]:
        """The models that requests wait for, with how many these are and why, most first; bounded."""
        if self._pool is None:
            return []
        waits = [
            (name, count, verdict.why)
            for name, count in self.awaited.items()
            if isinstance(verdict := self._verdict(self._pool, name), AwaitsModel)
        ]
        return sorted(waits, key=lambda each: -each[1])[:SHOWN_MOST]

    def sentence(self, model: str) -> str:
        """How it is with a model."""
        if self._pool is None:
            return ""
        family, drained = self.versions.family(model), self.versions.drained(model)
        told = self._pool.sentence(model, now()) if family is None else family.sentence()
        if family is None and (why := self.versions.gives_way(model)):
            told = f"{told}; {why}"
        return f"drained {drained}; {told}" if drained else told

    @property
    def marks_problem(self) -> str:
        """What is said of models in the queue, and cannot be read; empty: nothing."""
        marks = self.versions.marks
        return "" if self._pool is None or marks is None else marks.problem

    @property
    def problems(self) -> Mapping[str, str]:
        """Endpoints that cannot be read, with the reason."""
        return {} if self._pool is None else self._pool.problems
