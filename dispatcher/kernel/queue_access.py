"""Access to the queue for the loop: an outage closes the gate and raises nothing; replies update what is
known."""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.queue_steps import FailureCause, Step, StepFailures
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import (
    ClaimResult,
    Overload,
    OwnerReply,
    Permit,
    Queue,
    SharedState,
)
from dispatcher.requests.forecast import QueueForecast
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError
from dispatcher.telemetry.events import Event, emit

SLOW_CALL_KEPT_S = 10.0
"""Time for which a slow call to the queue counts."""
RETRY_PAUSE_S = (0.1, 1.0)
"""Shortest and longest pause between attempts while the queue is unreachable. The pause doubles in between.
"""
MARKER_DELAY_S = (1.0, 30.0)
"""Shortest and longest delay of a request whose cancel marker cannot be read."""
MAX_UNREAD_MARKERS = 100
"""Largest number of unread cancel markers that are looked up again."""

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
    markers_problem: str | None = None
    """Reason why the requests whose cancel markers cannot be read wait. `None` if there are none."""


class QueueAccess:
    """Access of one owner to its queue, shared by all parts of the loop.

    `wake` is set whenever there may be something for the loop to do. `has_work` is True if there may be
    something to claim. `leases_were_lost` is set when leases were taken back from any owner, perhaps from
    this one. `markers_unreadable` is set while any cancel marker cannot be read.
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
        self._failures = StepFailures()
        self._unread_markers: set[tuple[str, str]] = set()
        """Ids and tokens of some requests whose cancel markers could not be read. They are looked up again
        until they can be read."""
        self._markers_unread_since = 0.0
        """Time since which there are unread markers."""
        self._markers_problem: str | None = None
        """Reason why no cancel markers at all can be read."""

    async def call_queue(self, step: Step, call: Awaitable[T]) -> T | None:
        """Return the answer of a call, or `None` if it failed. After a failure, the gate is closed until the
        queue serves such calls again (queue_steps.py). No exception is passed on."""
        try:
            answer = await call
        except BaseException as error:
            # Any exception, because a defect in an adapter must close the gate rather than stop the loop.
            if not is_unexpected(error):
                raise
            if self._failures.count_failure(step):
                why = self._describe_failure(error)
                self._failures.record_failure(step, _find_cause(error), why, loop_time())
                self._report_failure()
            return None
        if self._failures.streaks and self._failures.record_success(step, loop_time()):
            self._report_recovery()
        return answer

    def get_failure_cause(self, step: Step) -> FailureCause | None:
        """Return why the last call of a step failed. `None` if its failure does not keep the gate closed."""
        return self._failures.get_cause(step)

    def _describe_failure(self, error: BaseException) -> str:
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
        return self._failures.problem or self._markers_problem

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

    def update_from_reply(self, reply: OwnerReply) -> None:
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
        """Return for each lease whether its request was cancelled; `None` if that cannot be read.

        On a Cluster a marker may be on a node that is down, and then only the requests on this node are held
        back. If no markers can be read, the gate stays closed until `retry_unread_markers` has read some:
        requests claimed meanwhile could only be returned.
        """
        named = [
            (entry.request.id, entry.request.token)
            for entry in entries
            if entry.request is not None and entry.request.token
        ]
        if not named:
            return [False] * len(entries)
        # Only requests with a token were looked up; the others cannot be cancelled.
        answers = iter(await self._read_markers(named))
        return [
            next(answers) if entry.request is not None and entry.request.token else False for entry in entries
        ]

    def get_marker_retry_delay(self) -> float:
        """Return the time after which a request is claimed again whose marker cannot be read.

        It is the time for which the outage has lasted, within bounds. At the longest delay, even tens of
        thousands of such requests do not keep claims from reaching the requests behind them.
        """
        return min(max(loop_time() - self._markers_unread_since, MARKER_DELAY_S[0]), MARKER_DELAY_S[1])

    async def retry_unread_markers(self) -> None:
        """Look up unread markers again: no other call shows whether they can be read."""
        asked = list(self._unread_markers)
        flags = await self._read_markers(asked)
        self._unread_markers.difference_update(
            pair for pair, flag in zip(asked, flags, strict=True) if flag is not None
        )
        if not self._unread_markers:
            self.markers_unreadable.clear()
            if self.view.markers_problem is not None:
                self.view.markers_problem = None
                emit(Event.CANCEL_MARKERS_READABLE)

    async def _read_markers(self, named: Sequence[tuple[str, str]]) -> Sequence[bool | None]:
        try:
            found = await self.queue.check_cancelled(named)
        except BaseException as error:
            if not is_unexpected(error):
                raise
            self._record_unread_markers(named)
            self._markers_problem = f"{self._describe_failure(error)}: cancel markers cannot be read"
            self._report_failure()
            return [None] * len(named)
        if self._markers_problem is not None:
            self._markers_problem = None
            self._report_recovery()
        unread = [(pair, flag) for pair, flag in zip(named, found, strict=True) if not isinstance(flag, bool)]
        if unread:
            self._record_unread_markers([pair for pair, _ in unread])
            if self.view.markers_problem is None:
                emit(Event.CANCEL_MARKERS_UNREADABLE, why=str(unread[0][1]))
            self.view.markers_problem = str(unread[0][1])
        return [flag if isinstance(flag, bool) else None for flag in found]

    def _record_unread_markers(self, named: Sequence[tuple[str, str]]) -> None:
        if not self.markers_unreadable.is_set():
            self._markers_unread_since = loop_time()
            self.markers_unreadable.set()
        # A few markers are enough to notice that their nodes are back.
        self._unread_markers.update(named[: MAX_UNREAD_MARKERS - len(self._unread_markers)])


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


def is_unexpected(error: BaseException) -> bool:
    """Return True for an exception that must end no task: all but the cancellation of the running task, and
    what ends the process. A library may raise CancelledError by itself, when it gives up a call."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, Exception)


def _find_cause(error: BaseException) -> FailureCause:
    match error:
        case CallRefusedError():
            return FailureCause.REFUSED
        case QueueUnavailableError():
            return FailureCause.UNREACHABLE
        case _:
            return FailureCause.NOT_UNDERSTOOD


def loop_time() -> float:
    return get_running_loop().time()
