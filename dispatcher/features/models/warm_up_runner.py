"""Warm-up: sends recorded requests to a version that is cold at an endpoint, before it gets work.

    cold ──▶ lock ──▶ one call after the other ──▶ warm
              │ another owner has it                 after errors: if the warm-up is required, cold again for
              ▼                                      a while, else warm all the same
            later

Warm-ups run only while the gate is open. Each call counts one unit of the limit. Requests make room for the
calls of all owners, because all know the locks. An endpoint that is unreachable, or that does not know the
model yet, is tried again soon and is not marked as warm. An owner that cannot continue (its gate is closed,
the limit is full of others' requests, it stops) releases the lock, so that another owner can continue. An
owner that hung until its lock expired sends nothing more unless it gets the lock again.

While the gateway is unreachable, one request at a time probes it. If all queued requests wait for a cold
version, none could probe it and nothing would ever be warm. In that case a call of a warm-up is the probe.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from dispatcher.common.printable import escape_unprintable, truncate_text
from dispatcher.features.models.availability import GATEWAY
from dispatcher.features.models.queue.calls import ModelCalls
from dispatcher.features.models.queue_steps import ModelStep
from dispatcher.features.models.warmup import plan_calls
from dispatcher.kernel.queue_access import loop_time
from dispatcher.limit.budget import GATEWAY_OUTAGES, Reason
from dispatcher.requests.model_names import says_no_model
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    TooLate,
    Unreachable,
)
from dispatcher.requests.request import Request
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.features.models.rollover import ModelFamily
    from dispatcher.features.models.version_router import VersionRouter
    from dispatcher.features.models.warmup import WarmupCall
    from dispatcher.gateway.contract import AttemptResult
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.options import Options
    from dispatcher.queue.contract import ClaimResult

MAX_PARALLEL_WARM_UPS = 4
"""Maximum number of endpoints that are warmed at the same time."""
CHECK_INTERVAL_S = 1.0
RETRY_SOON_S = 5.0
"""Time until a warm-up that could not begin is tried again."""
ERROR_RETRY_S = (30.0, 300.0)
"""Shortest and longest time until a warm-up with errors is tried again. It doubles in between."""
LOCK_RENEW_S = 10.0
LOCK_TTL_S = 30.0
"""Lifetime of a lock that is not renewed (features/models/registry.py)."""
MAX_ROOM_WAIT_S = 10.0
"""Time that an owner keeps the lock while there is no room. Calls that were answered are not sent again
later."""
LOCK_RELEASE_TIMEOUT_S = 1.0
"""Time that a stopping process tries to release the lock. Otherwise the lock expires."""
ROOM_CHECK_S = 0.05
"""Interval of the check for room."""
MAX_ERRORS = 10
"""Number of errors after which the remaining calls are not sent."""
_MAX_WHY_CHARS = 200
_START_REASONS = frozenset(reason for reason in Reason if not reason.is_closed).union(GATEWAY_OUTAGES)


@dataclass(slots=True)
class WarmUp:
    """One warm-up in progress."""

    version: str
    endpoint: str
    sent_count: int = 0
    errors: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    """Time spent waiting for answers."""
    lock_held_until: float = 0.0
    """Time at which another owner may get the lock, by a clock that goes on while the machine sleeps."""
    staleness_note: str = ""
    """Reason why the warm-up requests may be out of date."""

    @property
    def pair(self) -> tuple[str, str]:
        return self.version, self.endpoint


class ModelServers(Protocol):
    """Direct calls to single model servers, past the gateway: `dispatcher.gateway.direct.DirectServers`."""

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome: ...

    async def aclose(self) -> None: ...


class WarmUpRunner:
    """Runs the warm-ups of one process."""

    def __init__(self, context: KernelContext, versions: VersionRouter) -> None:
        self.servers: ModelServers | None = None
        """Calls model servers directly. If `None`, warm-ups go through the gateway."""
        self._units = 0
        """Number of calls of this process that run or wait for room."""
        self.result_counts: dict[str, int] = dict.fromkeys(("warm", "errors", "retry"), 0)
        """Number of warm-ups by result: all calls answered; some with errors; to be tried again."""
        self._context = context
        self._access = context.access
        self._calls = context.access.queue.open_calls(ModelCalls)
        self._limiter = context.limiter
        self._in_flight = context.in_flight
        self._gateway = context.gateway
        self._versions = versions
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._retry_after: dict[tuple[str, str], tuple[float, int]] = {}
        """Time of the next try, and number of failures in a row."""
        self._interrupted: dict[tuple[str, str], WarmUp] = {}
        """Warm-ups that the gate has interrupted, to be continued."""
        self._call_number = 0
        self._calls_in_flight = 0
        self._probe_limit = 0
        """Limit within which one call may be sent to probe the gateway. 0 if none may."""

    async def run(self) -> None:
        """Warm cold versions until cancelled. An observer warms nothing."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    if self._start_warm_ups(tasks):
                        await asyncio.sleep(CHECK_INTERVAL_S)
                        if not self.options.observe:
                            await self._versions.exchange_registry()  # learn what others have warmed
                    else:
                        self._versions.cold_version_found.clear()
                        await self._versions.cold_version_found.wait()
        finally:
            if self.servers is not None:
                await self.servers.aclose()

    @property
    def units(self) -> int:
        """Units of the limit used by warm-ups of all owners, beside the leases."""
        return self._units + len(self._foreign_warm_ups)

    @property
    def _foreign_warm_ups(self) -> list[tuple[str, str]]:
        """Pairs that other owners have locked: each of these sends one call at a time."""
        registry, own_name = self._versions.registry, self._access.queue.owner
        return (
            [(model, endpoint) for model, endpoint, owner in registry.warm_up_locks if owner != own_name]
            if registry
            else []
        )

    @property
    def options(self) -> Options:
        return self._context.options

    def reconfigure(self) -> None:
        """Use new options. Running warm-ups continue as they began."""
        self._retry_after.clear()
        self._interrupted.clear()  # the recorded requests may have changed

    def allow_probe(self, claim_result: ClaimResult, limit: int) -> None:
        """Allow a waiting call to probe the gateway, if no request was left to be claimed for that."""
        if (
            not claim_result.leases
            and not claim_result.claimable_count
            and self._units > self._calls_in_flight
        ):
            self._probe_limit = limit

    # ── one warm-up ──────────────────────────────────────────────────────────────────────────────────────

    def _start_warm_ups(self, tasks: asyncio.TaskGroup) -> bool:
        """Start warm-ups. Return True if any version is cold."""
        at = loop_time()
        cold = [(family, *each) for family in self._versions for each in family.list_cold_endpoints()]
        cold_pairs = {(version, endpoint) for _, version, endpoint in cold}
        self._retry_after = {pair: rest for pair, rest in self._retry_after.items() if pair in cold_pairs}
        self._interrupted = {
            pair: interrupted for pair, interrupted in self._interrupted.items() if pair in cold_pairs
        }
        if self._versions.registry is None or self.options.observe:  # unknown what is warm already
            return bool(cold)
        if self._limiter.get_allowance(at).reason not in _START_REASONS:
            return bool(cold)
        for family, version, endpoint in cold:
            pair = version, endpoint
            if (
                len(self._running) < MAX_PARALLEL_WARM_UPS
                and pair not in self._running
                and self._get_retry_time(pair)[0] <= at
            ):
                warm_up = self._interrupted.pop(pair, None) or WarmUp(version, endpoint)
                self._running[pair] = tasks.create_task(self._run_warm_up(family, warm_up))
        return bool(cold)

    def _get_retry_time(self, pair: tuple[str, str]) -> tuple[float, int]:
        return self._retry_after.get(pair, (0.0, 0))

    async def _run_warm_up(self, family: ModelFamily, warm_up: WarmUp) -> None:
        pair = warm_up.pair
        failure_count = self._get_retry_time(pair)[1]
        try:
            if not await self._take_lock(warm_up):
                self._retry_after[pair] = loop_time() + RETRY_SOON_S, failure_count
                return
            await self._versions.exchange_registry()  # the previous owner of the lock may have warmed it
            renewing = asyncio.create_task(self._renew_lock(warm_up))
            try:
                is_finished = await self._send_calls(family, warm_up)
            except Exception as error:  # a bad file or answer must not stop other warm-ups
                emit(Event.INTERNAL_ERROR, where="warm-up", error=repr(error))
                warm_up.errors.append(f"the dispatcher failed: {truncate_text(repr(error), _MAX_WHY_CHARS)}")
                is_finished = True
            finally:
                renewing.cancel()
            await self._finish_warm_up(family, warm_up, is_finished=is_finished, failure_count=failure_count)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOCK_RELEASE_TIMEOUT_S):
                    await self._release_lock(warm_up)
            raise
        finally:
            del self._running[pair]

    async def _take_lock(self, warm_up: WarmUp) -> bool:
        asked_at = self._access.clock()
        lock_call = self._calls.take_warm_up_lock(*warm_up.pair)
        is_taken = await self._access.call_queue(ModelStep.TAKE_LOCK, lock_call)
        if is_taken is not None:
            warm_up.lock_held_until = asked_at + LOCK_TTL_S if is_taken else asked_at
        return bool(is_taken)

    async def _release_lock(self, warm_up: WarmUp) -> None:
        await self._access.call_queue(ModelStep.RELEASE_LOCK, self._calls.release_warm_up_lock(*warm_up.pair))

    async def _renew_lock(self, warm_up: WarmUp) -> None:
        while True:
            await asyncio.sleep(LOCK_RENEW_S)
            await self._take_lock(warm_up)

    async def _finish_warm_up(
        self, family: ModelFamily, warm_up: WarmUp, *, is_finished: bool, failure_count: int
    ) -> None:
        """Record the result of a warm-up. `is_finished` says that all calls were answered, with errors or
        without."""
        errors = warm_up.errors
        must_retry = (
            not is_finished
            or not self._versions.is_configured(family)
            or (errors and family.terms.is_warmup_required)
        )
        if must_retry:
            await self._release_lock(warm_up)
            rest_s = (
                min(ERROR_RETRY_S[1], ERROR_RETRY_S[0] * 2.0 ** min(failure_count, 10))
                if is_finished
                else RETRY_SOON_S
            )
            self._retry_after[warm_up.pair] = loop_time() + rest_s, failure_count + bool(is_finished)
        else:
            await self._versions.mark_warm(*warm_up.pair)
        self.result_counts["retry" if must_retry else "errors" if errors else "warm"] += 1
        if is_finished:
            emit(
                Event.WARM_UP_FAILED if errors else Event.WARM_UP,
                model=warm_up.version,
                endpoint=warm_up.endpoint,
                calls=warm_up.sent_count,
                spent_s=round(warm_up.spent_s, 3),
                errors=len(errors),
                why=errors[0] if errors else warm_up.staleness_note,
                is_used=not must_retry,
            )

    async def _send_calls(self, family: ModelFamily, warm_up: WarmUp) -> bool:
        """Send all calls. Return False if that was interrupted: nothing can be said about an endpoint that is
        unreachable."""
        load_warmup = family.terms.load_warmup
        if load_warmup is None or not self._versions.is_configured(family):
            return False
        requests, warm_up.staleness_note = await load_warmup()
        timeout_s = self._versions.options.warmup_timeout_s
        calls = plan_calls(requests, self._context.hooks.join_copies, warm_up.version)
        for call in islice(calls, warm_up.sent_count, None):
            while True:
                if warm_up.spent_s >= timeout_s:
                    warm_up.errors.append(f"not done within {timeout_s:g} s")
                    return True
                self._units += 1
                try:
                    if not await self._ensure_lock(warm_up) or not await self._wait_for_room(warm_up):
                        self._interrupted[warm_up.pair] = warm_up
                        return False
                    if self._has_lock_expired(warm_up):
                        continue
                    if not self._is_desired(family, warm_up):
                        return False
                    began_at = loop_time()
                    with self._versions.count_in_flight(warm_up.version):
                        outcome = await self._send_call(warm_up, call, began_at + timeout_s - warm_up.spent_s)
                finally:
                    self._units -= 1
                warm_up.spent_s += loop_time() - began_at
                if not isinstance(outcome, Overloaded | Evicted):
                    break
                # Refused or evicted: send the same call again. Waiting does not count as spent time.
                await asyncio.sleep(min(max(outcome.retry_after_s or 0.0, 1.0), self.options.retry.max_s))
            warm_up.sent_count += 1
            if (why := _describe_error(outcome, warm_up.version)) is None:
                return False
            if why:
                warm_up.errors.append(why)
                if len(warm_up.errors) == MAX_ERRORS:
                    break
        return True

    async def _ensure_lock(self, warm_up: WarmUp) -> bool:
        """Return True if this owner has the lock. An expired lock is taken again, and the state of others is
        read."""
        if self._has_lock_expired(warm_up):
            if not await self._take_lock(warm_up):
                return False
            await self._versions.exchange_registry()
        return True

    def _has_lock_expired(self, warm_up: WarmUp) -> bool:
        return self._access.clock() >= warm_up.lock_held_until

    def _is_desired(self, family: ModelFamily, warm_up: WarmUp) -> bool:
        """Return True if the version is still cold there and in the settings."""
        return self._versions.is_configured(family) and warm_up.pair in family.list_cold_endpoints()

    async def _wait_for_room(self, warm_up: WarmUp) -> bool:
        """Wait until a unit of the limit is free. Return False if the gate stays closed, or requests of other
        owners fill the limit, which may last long."""
        pair = warm_up.pair
        ends_at = loop_time() + MAX_ROOM_WAIT_S
        while True:
            allowance = self._limiter.get_allowance(loop_time())
            # With more warm-ups than units, the owners agree on the order by sorting the pairs.
            own_units = max(self._calls_in_flight, sum(each < pair for each in self._running))
            earlier_units = sum(each < pair for each in self._foreign_warm_ups)
            taken_units = self._in_flight.units + self._limiter.other_owners_units + own_units + earlier_units
            # A probe is allowed for one call only.
            if allowance.limit > taken_units or self._probe_limit > taken_units:
                self._probe_limit = 0
                return True
            if not allowance.reason.is_closed and self._in_flight.units:
                ends_at = (
                    loop_time() + MAX_ROOM_WAIT_S
                )  # no new requests are claimed in place of those that end
            elif loop_time() >= ends_at or allowance.reason is Reason.DRAINING:
                return False
            # Polling is simple and cheap here: at most MAX_PARALLEL_WARM_UPS tasks wait.
            await asyncio.sleep(ROOM_CHECK_S)

    async def _send_call(self, warm_up: WarmUp, call: WarmupCall, ends_at: float) -> Outcome:
        self._call_number += 1
        token = f"warm-up-{self._call_number}"
        warm_directly = self._versions.options.warm_directly
        if warm_directly is None:
            warm_directly = not self._versions.can_steer
        self._calls_in_flight += 1
        # Counts in the limit like a request of this process.
        self._limiter.record_send(token, loop_time())
        try:
            if warm_directly and self.servers is not None and warm_up.endpoint != GATEWAY:
                return await self.servers.post(warm_up.endpoint, call.path, call.body, deadline=ends_at)
            request = Request(
                f"{self._access.queue.owner}-{token}",
                # Deadlines are whole Unix seconds: round up, since `ends_at` is the real limit.
                int(self._access.queue.unix_now() + ends_at - loop_time()) + 1,
                call.body,
                endpoint=call.path,
                chosen_model=warm_up.version,
                endpoints=warm_up.endpoint if self._versions.can_steer else "",
            )
            result = await self._gateway.forward(
                request, token=token, deadline=ends_at, may_send=_always_send
            )
            if result.memory is not None:
                result.memory.free_share()  # only the start of the answer is used
            self._report_gateway_state(result)
            return result.outcome
        finally:
            self._calls_in_flight -= 1
            self._limiter.record_answer(token, loop_time())

    def _report_gateway_state(self, result: AttemptResult) -> None:
        """Tell the limiter whether the gateway is reachable."""
        match result.outcome:
            case Unreachable(why):
                self._limiter.record_connection_failure(result.ended_at, why)
            case Delivered() | TooLarge() | Overloaded() | Evicted():
                self._limiter.record_gateway_answer(result.ended_at, result.sent_at)
            case _:
                pass


def _always_send() -> bool:
    return True


def _describe_error(outcome: Outcome, version: str) -> str | None:
    """Return the error of an answer, empty if there is none. `None` if the model did not answer at all."""
    match outcome:
        case Delivered(status, body) if says_no_model(status, body, version):
            return None
        case Delivered(status, body) if status >= 300:
            text = escape_unprintable(body.decode(errors="replace"))
            return f"{status}: {truncate_text(text, _MAX_WHY_CHARS)}"
        case Delivered() | TooLarge():
            return ""
        case Failed(why, status):
            return truncate_text(why if status is None else f"{status}: {why}", _MAX_WHY_CHARS)
        case TooLate():
            return "no answer in time"
        case _:
            return None
