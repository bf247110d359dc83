"""Decides for each request whether its model is served: it is sent, waits for its model, or ends with an
error.

    route       Read the model from the body. If the model has versions, choose one.
    check       Claimed requests whose model is served are sent. Those whose model is expected wait in the
                queue, apart from all others. The rest ends with MODEL_NOT_FOUND.
    interpret   A server's answer that it does not have an expected model costs no failed attempt.
    return      Requests return to the queue when their model is served, or is no longer watched.

If models are not watched, bodies are not read, and the answer of the server is final.
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
"""Intervals of the check for requests whose model is served; the second if models are not watched."""
GAP_S = 0.2
"""Shortest time between two checks, however much changes."""
ELSEWHERE_S = 1.0
"""Retry delay if a server without the model answered while others have it, or if the version could not be
chosen."""
SHOWN_MOST = 50
_GOES = GoesToModel()


class Models:
    """Routes the requests of one process by their model. `complete` takes completions."""

    def __init__(self, access: QueueAccess, options: Options, finish: Callable[[Ending], None]) -> None:
        self.requests: dict[str, int] = dict.fromkeys(("goes", "waits", "unknown", "denied"), 0)
        """Number of decisions about requests that name a model; `denied` are those by the server."""
        self.awaited: Mapping[str, int] = {}
        """Number of requests that wait for each model, as of the last count."""
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
        """Apply one round of model lists of the endpoints."""
        if self._pool is None:
            return
        for moved in self._pool.heard(listings, now()):
            seen = moved.seen
            if self.versions.family(seen.name) is not None:
                continue  # the states of its versions are logged instead
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
        """Read the model of each request, and choose a version if the model has some. Return the requests as
        they are sent; those that cannot be sent were completed."""
        if self._pool is None:
            return read
        for held, request in read:
            held.model = model_of(request.payload)
        return await self.versions.direct(read) if self.versions else read

    def left(self, held: HeldLease) -> None:
        """Forget a lease that has ended."""
        self.versions.left(held)

    def put_off(self, held: HeldLease, request: Request) -> Ending | None:
        """Return the completion of a request whose model is not served. `None` if the request may be sent."""
        if self._pool is None:
            return None
        if held.version:
            self.requests["goes"] += 1
            return None
        match self._verdict(self._pool, held.model):
            case GoesToModel() if self.versions.family(held.model) is not None:
                # A version has opened meanwhile, or the queue could not return the pinned version.
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
        """Return the outcome of an answer, with what is known about the model of the request."""
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
        return outcome  # the model is not expected: the answer is final

    def _verdict(self, pool: PoolModels, model: str) -> ModelVerdict:
        """Return what to do with a request for this model."""
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
        """Return requests to the queue whose model is served, until cancelled. An observer only counts."""
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
            # Several changes in a row (a rollout) are handled by one check.
            await asyncio.sleep(GAP_S)

    async def _count_awaited(self) -> bool:
        """Count the requests that wait for models. Return True if the queue answered."""
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
            # A model may have gone during the call; its requests would only come back here.
            there = [model for model in there if not self._holds_back(model)]

    def _holds_back(self, model: str) -> bool:
        return self._pool is not None and isinstance(self._verdict(self._pool, model), AwaitsModel)

    # ── for /status ──────────────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        """Return the names of the models that are known, most waited for first. The name of a version is
        included only if the settings name it or requests wait for it by this name."""
        if self._pool is None:
            return []
        versions = {each.name for family in self.versions for each in family.versions()}
        apart = versions - self._pool.terms.named.keys() - self.awaited.keys()
        known = [name for name in self._pool.known() if name not in apart]
        return sorted(known, key=lambda name: -self.awaited.get(name, 0))

    def seen(self) -> list[tuple[ModelSeen, int]]:
        """Return the first MAX_SHOWN of `list_names`, each with the number of requests that wait for it."""
        if self._pool is None:
            return []
        pool, at, names = self._pool, now(), self.names()[:SHOWN_MOST]
        return [(self._look(pool, name, at), self.awaited.get(name, 0)) for name in names]

    def _look(self, pool: PoolModels, name: str, at: float) -> ModelSeen:
        """Return the state of one model; of a model with versions, the state of its versions together."""
        seen, family = pool.look(name, at), self.versions.family(name)
        if family is None:
            return seen
        versions = family.versions()
        serving = frozenset().union(*(each.serving for each in versions if each.weight > 0))
        state = ModelState.READY if family.opened else ModelState.LOADING if family.listed else seen.state
        since = max((each.since for each in versions), default=seen.since)
        return replace(seen, state=state, serving=len(serving), since=since, denied=False)

    def held_back(self) -> list[tuple[str, int, str]]:
        """Return the models that requests wait for, with their number and the reason, most first. The list is
        bounded."""
        if self._pool is None:
            return []
        waits = [
            (name, count, verdict.why)
            for name, count in self.awaited.items()
            if isinstance(verdict := self._verdict(self._pool, name), AwaitsModel)
        ]
        return sorted(waits, key=lambda each: -each[1])[:SHOWN_MOST]

    def sentence(self, model: str) -> str:
        """Describe the state of a model."""
        if self._pool is None:
            return ""
        family, drained = self.versions.family(model), self.versions.drained(model)
        told = self._pool.sentence(model, now()) if family is None else family.sentence()
        if family is None and (why := self.versions.gives_way(model)):
            told = f"{told}; {why}"
        return f"drained {drained}; {told}" if drained else told

    @property
    def marks_problem(self) -> str:
        """Entries of the model registry that cannot be read, as a sentence. Empty if there are none."""
        marks = self.versions.marks
        return "" if self._pool is None or marks is None else marks.problem

    @property
    def problems(self) -> Mapping[str, str]:
        """Endpoints whose models cannot be read, with the reason."""
        return {} if self._pool is None else self._pool.problems
