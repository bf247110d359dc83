"""Access to the queue for the loop: an outage closes the gate and raises nothing; replies update what is
known."""

from __future__ import annotations

import asyncio
import math
from asyncio import get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.forecast import QueueForecast
from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.ports import (
    CallRefusedError,
    ClaimResult,
    ClaimTurnsResult,
    LeaseUnitsResult,
    Overload,
    Permit,
    Queue,
    QueueCounts,
    QueueUnavailableError,
    RenewResult,
    SharedState,
)
from dispatcher.telemetry.events import Event, emit

SLOW_CALL_KEPT_S = 10.0
"""Time for which a slow call to the queue counts."""
RETRY_PAUSE_S = (0.1, 1.0)
"""Shortest and longest pause between attempts while the queue is unreachable. The pause doubles in between.
"""
GATE_REST_S = (0.5, 10.0)
"""Shortest and longest time for which a refused call of GATED_CALLS keeps the gate closed. It doubles each
time in a row."""
READ_CALLS = frozenset(
    {"counts", "snapshot", "find-overdue", "find-remaining", "wait-for-work", "count-waiting"}
    | {"registry", "take-lock", "mark-warm", "release-lock", "pin"}
)
"""Calls that only read, or whose failure does not affect requests. They never keep the gate closed."""
GATED_CALLS = frozenset({"claim", "probe", "settle-unleased", "claim-turns"})
"""Calls that are not made while the gate is closed, or not again for the same requests. Their own success
cannot open the gate, so a time limit must."""

T = TypeVar("T")


@dataclass(slots=True)
class QueueView:
    """State of the queue for display."""

    counts: QueueCounts | None = None
    counted_at: float | None = None
    """Time of the counts, by the clock of the loop."""
    shared: SharedState | None = None
    forecast: QueueForecast | None = None
    problem: str | None = None


class QueueAccess:
    """Access of one owner to its queue, shared by all parts of the loop.

    `wake` is set whenever there may be something for the loop to do. `has_work` is True if there may be
    something to claim. `leases_were_lost` is set when leases were taken back from any owner, perhaps from
    this one. `markers_unreadable` is set while cancel markers cannot be read.
    """

    def __init__(
        self, queue: Queue, limiter: Limiter, lease_validity: LeaseValidity, clock: Callable[[], float]
    ) -> None:
        self.queue = queue
        self.lease_validity = lease_validity
        self.clock = clock
        """Clock of `lease_validity`, which goes on while the machine sleeps."""
        self.view = QueueView()
        self.wake = asyncio.Event()
        self.leases_were_lost = asyncio.Event()
        self.markers_unreadable = asyncio.Event()
        self.has_work = True
        self.has_claimable_requests = False
        """True if the newest claim or probe left requests that can be claimed."""
        self.retry_pause_s = RETRY_PAUSE_S[0]
        self._limiter = limiter
        self._slowest_call_s, self._slowest_call_until = 0.0, float("-inf")
        """Duration of the slowest recent call, and until when it counts."""
        self._lost_units: int | None = None
        self._failed_calls: dict[str, tuple[str, float]] = {}
        """Calls that failed last time, with the reason and the time until which only their own success clears
        the failure."""
        self._failure_streaks: Counter[str] = Counter()
        """Number of failures of each call since its last success."""
        self._unread_markers: set[tuple[str, str]] = set()
        """Requests and tokens whose cancel markers could not be read. On a Cluster, only their node may be
        down."""
        self._markers_problem: str | None = None

    async def call_queue(self, call_name: str, call: Awaitable[T]) -> T | None:
        """Return the answer of a call, or `None` if it failed. After a failure the gate is closed.

        If only this call is refused, the gate stays closed until it succeeds. For calls that are not made
        while the gate is closed, it stays closed for a time that grows. Otherwise any successful write shows
        that the queue is back, and any successful read that it can be read. An exception of any kind stops
        nothing.
        """
        try:
            answer = await call
        except Exception as error:
            self._failure_streaks[call_name] += 1
            streak = self._failure_streaks[call_name]
            if call_name in READ_CALLS and streak > 1 and call_name not in self._failed_calls:
                return None  # a write has succeeded since it began to fail
            rest_s = min(GATE_REST_S[0] * 2.0 ** min(streak - 1, 10), GATE_REST_S[1])
            # A refused or misunderstood call says nothing about others; an unreachable queue fails all calls.
            is_only_this_call = isinstance(error, CallRefusedError) or not isinstance(
                error, QueueUnavailableError
            )
            closed_for_s = (
                0.0
                if call_name in READ_CALLS or not is_only_this_call
                else rest_s
                if call_name in GATED_CALLS
                else math.inf
            )
            # Any exception, because a defect in an adapter must close the gate rather than stop the loop.
            self._failed_calls[call_name] = self._describe_failure(error), loop_time() + closed_for_s
            self._report_failure()
            return None
        if self._failed_calls or self._failure_streaks:
            self._record_success(call_name)
        return answer

    def _record_success(self, call_name: str) -> None:
        # A Counter allows deleting a key that it does not have.
        del self._failure_streaks[call_name]
        had_failures = bool(self._failed_calls)
        self._failed_calls.pop(call_name, None)
        at = loop_time()
        self._failed_calls = {
            other: (why, until)
            for other, (why, until) in self._failed_calls.items()
            # A read that works does not prove that writes work (a full or read-only Redis answers reads).
            if until > at or (call_name in READ_CALLS and other not in READ_CALLS)
        }
        if had_failures:
            self._report_recovery()

    def _describe_failure(self, error: Exception) -> str:
        """Describe the failure as a sentence. An exception that no queue should raise is logged, too."""
        if isinstance(error, QueueUnavailableError):
            return str(error)
        if self.view.problem is None:
            emit(Event.INTERNAL_ERROR, where="queue", error=repr(error))
        return f"the reply of the queue could not be understood: {error!r}"

    def _report_failure(self) -> None:
        if self.view.problem is None:
            emit(Event.QUEUE_UNREACHABLE, why=self._problem)
        self.retry_pause_s = min(self.retry_pause_s * 2, RETRY_PAUSE_S[1])
        self._publish_problem()

    def _report_recovery(self) -> None:
        """Show the problem that is left after a success, or that there is none."""
        self._publish_problem()
        if self.view.problem is None:
            emit(Event.QUEUE_REACHABLE)
            self.retry_pause_s = RETRY_PAUSE_S[0]
            self.signal_work()

    @property
    def _problem(self) -> str | None:
        return next(reversed(self._failed_calls.values()))[0] if self._failed_calls else self._markers_problem

    def _publish_problem(self) -> None:
        self.view.problem = self._problem
        self._limiter.set_queue_problem(self.view.problem, loop_time())

    def record_sign_of_life(self, asked_at: float) -> None:
        """Record a call that proves to the other owners that this one is alive, asked at `asked_at` and just
        answered."""
        at = self.clock()
        self.lease_validity.record_contact(asked_at, at)
        duration_s = at - asked_at
        if duration_s > self._slowest_call_s or at > self._slowest_call_until:
            self._slowest_call_s, self._slowest_call_until = duration_s, at + SLOW_CALL_KEPT_S
            self._limiter.set_queue_call_time(duration_s)

    def is_lease_valid(self, entry: InFlightLease) -> bool:
        """Return True if the lease is certainly still held, so that its request may be sent."""
        return self.lease_validity.is_certainly_held(entry.confirmed_at, self.clock())

    def signal_work(self) -> None:
        self.has_work = True
        self.wake.set()

    def record_lost_units(self, lost_units: int) -> None:
        """Record the number of units ever taken back. It is a counter, so a lost reply hides no loss."""
        if self._lost_units is not None and lost_units != self._lost_units:
            self.leases_were_lost.set()
        self._lost_units = lost_units

    def update_from_reply(
        self, reply: ClaimResult | RenewResult | LeaseUnitsResult | ClaimTurnsResult
    ) -> None:
        """Take over counts and shared state from a reply."""
        lease_counts, shared = reply.lease_counts, reply.shared
        self.view.shared = shared
        self.record_lost_units(lease_counts.lost_units)
        self._limiter.record_lease_counts(
            lease_counts.counted_at,
            other_owners_units=lease_counts.other_owners_units,
            just_leased_units=lease_counts.just_leased_units,
            lost_units=lease_counts.lost_units,
            orphaned_units=lease_counts.orphaned_units,
        )
        if shared.limit is not None:
            self._limiter.set_shared_limit(shared.limit, shared.read_at)
        at = loop_time()
        self._limiter.set_paused(shared.is_paused, at)
        if shared.overload is not None:
            self.record_overload(shared.overload, is_remote=True)
        if isinstance(reply, ClaimResult):
            self.has_claimable_requests = reply.claimable_count > 0
            self._limiter.set_waiting_count(reply.claimable_count, at)

    def record_overload(self, overload: Overload, *, is_remote: bool = False) -> None:
        """Record an overload that was seen here, or by another replica (`is_remote`).

        The replica that reports it may not know how many requests of the others were in flight. While the
        overload keeps the gate closed, the requests that are in flight now were in flight then.
        """
        self._limiter.record_refusal(
            overload.refused_at,
            retry_at=overload.retry_at,
            is_out_of_capacity=overload.is_out_of_capacity,
            in_flight=max(overload.in_flight, self._limiter.in_flight),
            is_remote=is_remote,
        )

    async def check_cancelled(self, entries: Sequence[InFlightLease]) -> Sequence[bool | None]:
        """Return for each lease whether its request was cancelled; `None` for all if that cannot be read.

        In that case the gate stays closed until `retry_unread_markers` has read these markers: requests
        claimed meanwhile could only be returned.
        """
        named = [
            (entry.request.id, entry.request.token)
            for entry in entries
            if entry.request is not None and entry.request.token
        ]
        if not named:
            return [False] * len(entries)
        found = await self._read_markers(named)
        if found is None:
            return [None] * len(entries)
        # Only requests with a token were looked up; the others cannot be cancelled.
        answers = iter(found)
        return [
            entry.request is not None and bool(entry.request.token) and next(answers) for entry in entries
        ]

    async def retry_unread_markers(self) -> None:
        """Read again the markers that could not be read: no other call shows whether they can be read."""
        asked = list(self._unread_markers)
        if await self._read_markers(asked) is None:
            return
        self._unread_markers.difference_update(asked)
        if not self._unread_markers:
            self.markers_unreadable.clear()
            self._markers_problem = None
            self._report_recovery()

    async def _read_markers(self, named: Sequence[tuple[str, str]]) -> Sequence[bool] | None:
        try:
            return await self.queue.check_cancelled(named)
        except Exception as error:
            self._unread_markers.update(named)
            self._markers_problem = f"{self._describe_failure(error)}: cancel markers cannot be read"
            self.markers_unreadable.set()
            self._report_failure()
            return None


def explain_empty_claim(claim_result: ClaimResult, permit: Permit) -> str:
    """Explain why a claim got nothing although requests wait, from what other dispatchers have shared.

    Empty if it got some, or if this process knows the reason itself by now.
    """
    if claim_result.leases or not claim_result.claimable_count:
        return ""
    shared, lease_counts = claim_result.shared, claim_result.lease_counts
    overload = shared.overload
    if overload is not None and lease_counts.counted_at < (
        until := overload.bounded_retry_at(permit.retry_after_max_s)
    ):
        return f"the gateway asked a dispatcher to wait another {until - lease_counts.counted_at:.1f} s"
    if overload is not None and permit.read_at <= overload.refused_at:
        return "a dispatcher was refused after the newest reading here"
    if shared.limit is not None and shared.limit < permit.limit and shared.limit <= lease_counts.live_units:
        return f"a newer reading of another dispatcher leaves a limit of {shared.limit}"
    if shared.is_paused or shared.limit != permit.limit:
        return ""
    free_units = (
        permit.limit
        - permit.unleased_units
        - (lease_counts.lost_units - permit.lost_units)
        - lease_counts.live_units
    )
    if free_units > 1:  # one unit may be reserved for the probe of another owner
        return (
            f"the next request needs more than the {free_units} units that are free, "
            "and is sent when there is room for it"
        )
    return ""


def loop_time() -> float:
    return get_running_loop().time()
