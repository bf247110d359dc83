"""Stage that resolves the model of each request: the request is sent, waits for its model, or ends with an
error.

    look up     Read the model from the body. If the model has versions, choose one.
    apply       Claimed requests whose model is served are sent. Those whose model is expected wait in the
                queue, apart from all others. The rest ends with MODEL_NOT_FOUND.
    interpret   A server's answer that it does not have an expected model costs no failed attempt.
    return      Requests return to the queue when their model is served, or is no longer watched.

If models are not watched, bodies are not read, and the answer of the server is final.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatcher.features.models.availability import (
    MAX_SHOWN,
    Listing,
    ModelDecision,
    ModelState,
    NoSuchModel,
    PoolModels,
    SendToModel,
    WaitForModel,
)
from dispatcher.features.models.counts import ModelCounts
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.queue.calls import ModelCalls
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.models.queue_steps import ModelStep
from dispatcher.features.models.registry import PinRequest
from dispatcher.features.models.version_router import VersionRouter
from dispatcher.kernel import completions
from dispatcher.kernel.hooks import LeasePart
from dispatcher.kernel.queue_access import loop_time
from dispatcher.limit.health import Cause, WaitingReason
from dispatcher.queue.contract import Lease, Release
from dispatcher.requests.model_names import parse_model, quote_model, says_no_model
from dispatcher.requests.outcomes.outcome import Delivered, ModelNotServed, Outcome
from dispatcher.telemetry.events import Event, emit
from dispatcher.wire_format import ErrorCode

if TYPE_CHECKING:
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.in_flight import Attempt
    from dispatcher.requests.queue_counts import QueueCounts
    from dispatcher.requests.request import Request

CHECK_INTERVAL_S, UNWATCHED_INTERVAL_S = 5.0, 60.0
"""Intervals of the check for requests whose model is served; the second if models are not watched."""
MIN_CHECK_GAP_S = 0.2
"""Shortest time between two checks, however much changes."""
OTHER_SERVER_RETRY_S = 1.0
"""Retry delay if a server without the model answered while others have it, or if the version could not be
chosen."""
MODELS = Cause("models", "`batch-dispatcher models show`")


@dataclass(slots=True, eq=False)
class _Route:
    """Where a leased request goes."""

    model: str
    """Model that the body names. Empty if it names none."""
    version: str = ""
    """Version that counts as in use because of the lease: the chosen one, or the one that the body names
    itself. Empty if there is none."""
    choice: str | PinRequest = ""
    """Chosen version, or the pin to ask the queue for. Empty if there are no versions, or none is open."""
    is_chosen: bool = False
    """True if the version was chosen here."""


class ModelRouter(LeasePart):
    """Routes the requests of one process by their model."""

    def __init__(self, context: KernelContext) -> None:
        self.request_counts: dict[str, int] = dict.fromkeys(("served", "waits", "unknown", "denied"), 0)
        """Number of decisions about requests that name a model; `denied` are those by the server."""
        self.waiting_counts: Mapping[str, int] = {}
        """Number of requests that wait for each model, as of the last count."""
        self._context = context
        self._access = context.access
        self._calls = context.access.queue.open_calls(ModelCalls)
        self.leases: dict[str, _Route] = {}
        """Models of the leased requests by the token of the lease. Empty if models are not watched."""
        self.pool: PoolModels | None = None
        """Models that the pool serves. `None` if they are not watched."""
        self._changed = asyncio.Event()
        self.versions = VersionRouter(context, self._changed)
        self.reconfigure()

    def reconfigure(self) -> None:
        terms = self._context.options.of(ModelOptions).terms
        if terms is None:
            self.pool = None
        elif self.pool is None:
            self.pool = PoolModels(terms, loop_time())
            self.pool.expect_models(self.waiting_counts)
        else:
            self.pool.terms = terms
        self.versions.reconfigure()
        self._changed.set()

    def update_listings(self, listings: Sequence[Listing]) -> None:
        """Apply one round of model lists of the endpoints."""
        if self.pool is None:
            return
        for model, previous_state in self.pool.record_listings(listings, loop_time()):
            if self.versions.get_family(model.name) is not None:
                continue  # the states of its versions are logged instead
            if model.is_named or self.waiting_counts.get(model.name):
                emit(
                    Event.MODEL,
                    model=model.name,
                    state=str(model.state),
                    before=str(previous_state),
                    serving=model.serving_count,
                    endpoints=model.endpoint_count,
                    waiting=self.waiting_counts.get(model.name, 0),
                )
            if model.state is ModelState.READY:
                self._changed.set()
        if self.versions:
            self.versions.update_served(self.pool)
            self._changed.set()

    def look_up(self, requests: list[ClaimedRequest]) -> Awaitable[None] | None:
        """Read the model of each request, and choose its version. Return the call to the queue that this
        needs, `None` if it needs none."""
        if self.pool is None:
            return None
        models = [parse_model(claimed.request.payload) for claimed in requests]
        for claimed, model in zip(requests, models, strict=True):
            self.leases[claimed.entry.lease.token] = _Route(model)
        if not self.versions:
            return None
        # Many requests may belong to one job: ask for each key once.
        pin_requests: dict[str, PinRequest] = {}
        for claimed in requests:
            route = self.leases[claimed.entry.lease.token]
            begun_with = self._find_started_model(claimed.entry.lease.progress)
            route.choice = self.versions.choose_version(route.model, claimed.request, begun_with)
            if isinstance(route.choice, PinRequest):
                pin_requests[route.choice.key] = route.choice
        return self._pin_versions(requests, list(pin_requests.values())) if pin_requests else None

    def _find_started_model(self, progress: bytes) -> str:
        """Return the version that a request with this progress has begun with. Empty if there is none."""
        found = (find(progress) for find in self._context.hooks.find_started_model if progress)
        return next(filter(None, found), "")

    async def _pin_versions(self, requests: list[ClaimedRequest], pin_requests: list[PinRequest]) -> None:
        pinned = await self.versions.pin_versions(pin_requests)
        for claimed in requests:
            # After an exception in another stage, the request may have been dropped meanwhile.
            route = self.leases.get(claimed.entry.lease.token)
            if route is not None and isinstance(route.choice, PinRequest):
                route.choice = pinned.get(route.choice.key, "")

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Return the requests whose model is served, each with a body that names its version. All others are
        completed."""
        if self.pool is None:
            return requests
        pool = self.pool
        # During the lookups, a reload may have begun to watch models. Then no model was read.
        return [
            claimed
            for claimed in requests
            if claimed.entry.lease.token not in self.leases or self._resolve_model(claimed, pool)
        ]

    def _resolve_model(self, claimed: ClaimedRequest, pool: PoolModels) -> bool:
        """Resolve the model of one request. Return True if the request continues."""
        lease, request = claimed.entry.lease, claimed.request
        route = self.leases[lease.token]
        version = route.choice
        if isinstance(version, str) and version:
            named = self.versions.name_version(request, route.model, version)
            if named is None:
                why = "data.payload: its field `model` is given twice, or its name is escaped"
                self._context.complete(
                    completions.build_error(lease, request, ErrorCode.INVALID_REQUEST, why)
                )
                return False
            claimed.request = named
            self._context.in_flight.set_request(claimed.entry, named)
            route.version, route.is_chosen = version, True
            self.versions.count_request(version)
            self.request_counts["served"] += 1
            return True
        match self._get_decision(pool, route.model):
            case SendToModel() if self.versions.get_family(route.model) is not None:
                # A version has opened meanwhile, or the queue could not return the pinned version.
                self._context.complete(completions.build_return(lease, after_s=OTHER_SERVER_RETRY_S))
                return False
            case WaitForModel(why):
                self.request_counts["waits"] += 1
                claimed.waits = True
                waits = _build_model_wait(lease, request, route.model, f"its {why}")
                self._context.complete(waits)
                return False
            case NoSuchModel(why):
                self.request_counts["unknown"] += 1
                self._context.complete(
                    completions.build_error(lease, request, ErrorCode.MODEL_NOT_FOUND, why)
                )
                return False
        self.request_counts["served"] += bool(route.model)
        if route.model and self.versions.is_version(route.model):
            route.version = route.model
            self.versions.count_request(route.model)
        return True

    def forget_lease(self, token: str) -> None:
        route = self.leases.pop(token, None)
        if route is not None and route.version:
            self.versions.forget_request(route.model, route.version, is_chosen=route.is_chosen)

    def explain(self, attempt: Attempt, outcome: Outcome, sent_at: float) -> Outcome:
        """Return the outcome of an answer, with what is known about the model of the request."""
        if self.pool is None or not isinstance(outcome, Delivered):
            return outcome
        route = self.leases.get(attempt.leases[0].lease.token) if attempt.leases else None
        model = "" if route is None else route.model
        version = attempt.request.chosen_model or model
        if outcome.status < 300:
            self.pool.record_answer(version, sent_at)
            return outcome
        if not says_no_model(outcome.status, outcome.body, version):
            return outcome
        self.pool.record_denial(version, sent_at, loop_time())
        if version != model:
            self.versions.update_served(self.pool)
        match self._get_decision(self.pool, model):
            case WaitForModel(why):
                self.request_counts["denied"] += len(attempt.leases)
                return ModelNotServed(f"not sent again, because its {why}", wait=ModelWait(model))
            case SendToModel() if version != model or self.pool.is_partly_served(model):
                self.request_counts["denied"] += len(attempt.leases)
                return ModelNotServed(
                    "the request reached a server that does not serve its model", delay_s=OTHER_SERVER_RETRY_S
                )
        return outcome  # the model is not expected: the answer is final

    def _get_decision(self, pool: PoolModels, model: str) -> ModelDecision:
        if drained := self.versions.get_drain_note(model):
            return WaitForModel(f"model {quote_model(model)} is drained {drained}")
        family, decision = self.versions.get_family(model), pool.decide_request(model, loop_time())
        if family is None:
            why = self.versions.explain_giving_way(model) if isinstance(decision, SendToModel) else ""
            return WaitForModel(f"model {quote_model(model)} {why}") if why else decision
        if family.has_open_version:
            return SendToModel()
        if isinstance(decision, NoSuchModel) and not family.has_listed_version:
            return decision
        return WaitForModel(
            f"model {quote_model(model)} has no version that can be used: {family.explain_closed()}"
        )

    async def run_checks(self) -> None:
        """Return requests to the queue whose model is served, until cancelled. An observer only counts."""
        while True:
            if self.pool is not None:
                await (
                    self.versions.read_registry()
                    if self._context.options.observe
                    else self.versions.exchange_registry()
                )
            if await self._count_waiting() and not self._context.options.observe:
                await self._return_requests()
            pause_s = UNWATCHED_INTERVAL_S if self.pool is None else CHECK_INTERVAL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            self._changed.clear()
            # Several changes in a row (a rollout) are handled by one check.
            await asyncio.sleep(MIN_CHECK_GAP_S)

    async def _count_waiting(self) -> bool:
        """Count the requests that wait for models. Return True if the queue answered."""
        waiting_counts = await self._access.call_queue(
            ModelStep.COUNT_BY_MODEL, self._calls.count_waiting_by_model()
        )
        if waiting_counts is None:
            return False
        self.waiting_counts = waiting_counts
        if self.pool is not None:
            self.pool.expect_models(waiting_counts)
        return True

    async def _return_requests(self) -> None:
        access = self._access
        returnable = [model for model in self.waiting_counts if not self._must_wait(model)]
        while returnable:
            reply = await access.call_queue(
                ModelStep.RETURN_WAITING, self._calls.return_waiting_for_models(returnable)
            )
            if reply is None:
                return
            if reply.returned_count:
                access.signal_work()
            if not reply.remaining_count or not reply.returned_count:
                return
            # A model may have gone during the call; its requests would only come back here.
            returnable = [model for model in returnable if not self._must_wait(model)]

    def _must_wait(self, model: str) -> bool:
        return self.pool is not None and isinstance(self._get_decision(self.pool, model), WaitForModel)

    def explain_waiting(self, counts: QueueCounts) -> WaitingReason | None:
        """Return why requests wait for models. `None` if none do."""
        waiting = counts.of(ModelCounts).waiting
        if not waiting:
            return None
        if held_back := self.list_held_back():
            return WaitingReason(MODELS, held_back[0][2], is_problem=True)
        requests = "request waits" if waiting == 1 else "requests wait"
        return WaitingReason(MODELS, f"{waiting:,} {requests} for a model")

    def list_held_back(self) -> list[tuple[str, int, str]]:
        """Return the models that requests wait for, with their number and the reason, most first. The list is
        bounded."""
        if self.pool is None:
            return []
        waiting = [
            (name, count, decision.why)
            for name, count in self.waiting_counts.items()
            if isinstance(decision := self._get_decision(self.pool, name), WaitForModel)
        ]
        return sorted(waiting, key=lambda each: -each[1])[:MAX_SHOWN]


def _build_model_wait(lease: Lease, request: Request, model: str, why: str) -> Release:
    """Release the lease without counting a delivery: the request waits in the queue until its model is
    served."""
    return Release(
        lease,
        is_undelivered=True,
        last_attempt=why,
        extra=ModelWait(model),
        request_id=request.id,
        request_token=request.token,
    )
