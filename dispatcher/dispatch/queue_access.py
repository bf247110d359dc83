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
from dispatcher.core.requests.forecast import Outlook
from dispatcher.core.requests.lease_validity import Tenure
from dispatcher.dispatch.in_flight import HeldLease
from dispatcher.ports import (
    CallRefusedError,
    Claimed,
    Counts,
    LinedUp,
    Overload,
    Permit,
    Queue,
    QueueUnavailableError,
    Renewed,
    Shared,
    Weighed,
)
from dispatcher.telemetry.events import Event, emit

SLOW_FOR_S = 10.0
"""Time for which a slow call to the queue counts."""
PAUSE_S = (0.1, 1.0)
"""Shortest and longest pause between attempts while the queue is unreachable. The pause doubles in between.
"""
RESTS_S = (0.5, 10.0)
"""Shortest and longest time for which a refused call of GATED_CALLS keeps the gate closed. It doubles each
time in a row."""
LOOKS = frozenset(
    {"counts", "line", "expired", "unserved", "work", "awaited"}
    | {"marks", "warming", "warmed", "unwarmed", "pin"}
)
"""Calls that only read, or whose failure does not affect requests. They never keep the gate closed."""
PASSING = frozenset({"claim", "probe", "expire", "line_up"})
"""Calls that are not made while the gate is closed, or not again for the same requests. Their own success
cannot open the gate, so a time limit must."""

T = TypeVar("T")


@dataclass(slots=True)
class QueueView:
    """State of the queue for display."""

    counts: Counts | None = None
    counted_at: float | None = None
    """Time of the counts, by the clock of the loop."""
    shared: Shared | None = None
    outlook: Outlook | None = None
    problem: str | None = None


class QueueAccess:
    """Access of one owner to its queue, shared by all parts of the loop.

    `wake` is set whenever there may be something for the loop to do. `has_work` is True if there may be
    something to claim. `leases_were_lost` is set when leases were taken back from any owner, perhaps from
    this one. `markers_unreadable` is set while cancel markers cannot be read.
    """

    def __init__(self, queue: Queue, limiter: Limiter, tenure: Tenure, clock: Callable[[], float]) -> None:
        self.queue = queue
        self.tenure = tenure
        self.clock = clock
        """Clock of `lease_validity`, which goes on while the machine sleeps."""
        self.view = QueueView()
        self.wake = asyncio.Event()
        self.robbed = asyncio.Event()
        self.blind = asyncio.Event()
        self.work = True
        self.pause_s = PAUSE_S[0]
        self._limiter = limiter
        self._slowest_s, self._slowest_until = 0.0, float("-inf")
        """Duration of the slowest recent call, and until when it counts."""
        self._lost: int | None = None
        self._away: dict[str, tuple[str, float]] = {}
        """Calls that failed last time, with the reason and the time until which only their own success clears
        the failure."""
        self._in_a_row: Counter[str] = Counter()
        """Number of failures of each call since its last success."""
        self._unseen: set[tuple[str, str]] = set()
        """Requests and tokens whose cancel markers could not be read. On a Cluster, only their node may be
        down."""
        self._unseen_why: str | None = None

    async def ask(self, what: str, call: Awaitable[T]) -> T | None:
        """Return the answer of a call, or `None` if it failed. After a failure the gate is closed.

        If only this call is refused, the gate stays closed until it succeeds. For calls that are not made
        while the gate is closed, it stays closed for a time that grows. Otherwise any successful write shows
        that the queue is back, and any successful read that it can be read. An exception of any kind stops
        nothing.
        """
        try:
            answer = await call
        except Exception as error:
            self._in_a_row[what] += 1
            times = self._in_a_row[what]
            if what in LOOKS and times > 1 and what not in self._away:
                return None  # a write has succeeded since it began to fail
            rest_s = min(RESTS_S[0] * 2.0 ** min(times - 1, 10), RESTS_S[1])
            # A refused or misunderstood call says nothing about others; an unreachable queue fails all calls.
            alone = isinstance(error, CallRefusedError) or not isinstance(error, QueueUnavailableError)
            sticks_s = 0.0 if what in LOOKS or not alone else rest_s if what in PASSING else math.inf
            # Any exception, because a defect in an adapter must close the gate rather than stop the loop.
            self._away[what] = self._told(error), now() + sticks_s
            self._failed()
            return None
        if self._away or self._in_a_row:
            self._got_through(what)
        return answer

    def _got_through(self, what: str) -> None:
        # A Counter allows deleting a key that it does not have.
        del self._in_a_row[what]
        was_away = bool(self._away)
        self._away.pop(what, None)
        at = now()
        self._away = {
            other: (why, until)
            for other, (why, until) in self._away.items()
            # A read that works does not prove that writes work (a full or read-only Redis answers reads).
            if until > at or (what in LOOKS and other not in LOOKS)
        }
        if was_away:
            self._mended()

    def _told(self, error: Exception) -> str:
        """Describe the failure as a sentence. An exception that no queue should raise is logged, too."""
        if isinstance(error, QueueUnavailableError):
            return str(error)
        if self.view.problem is None:
            emit(Event.SURPRISE, where="queue", error=repr(error))
        return f"what the queue answered was not understood: {error!r}"

    def _failed(self) -> None:
        if self.view.problem is None:
            emit(Event.QUEUE_UNREACHABLE, why=self._problem)
        self.pause_s = min(self.pause_s * 2, PAUSE_S[1])
        self._tell_problem()

    def _mended(self) -> None:
        """Show the problem that is left after a success, or that there is none."""
        self._tell_problem()
        if self.view.problem is None:
            emit(Event.QUEUE_BACK)
            self.pause_s = PAUSE_S[0]
            self.found_work()

    @property
    def _problem(self) -> str | None:
        return next(reversed(self._away.values()))[0] if self._away else self._unseen_why

    def _tell_problem(self) -> None:
        self.view.problem = self._problem
        self._limiter.queue(self.view.problem, now())

    def heard(self, asked_at: float) -> None:
        """Record a call that proves to the other owners that this one is alive, asked at `asked_at` and just
        answered."""
        at = self.clock()
        self.tenure.heard(asked_at, at)
        took_s = at - asked_at
        if took_s > self._slowest_s or at > self._slowest_until:
            self._slowest_s, self._slowest_until = took_s, at + SLOW_FOR_S
            self._limiter.queue_took(took_s)

    def ours(self, held: HeldLease) -> bool:
        """Return True if the lease is certainly still held, so that its request may be sent."""
        return self.tenure.holds(held.confirmed_at, self.clock())

    def found_work(self) -> None:
        self.work = True
        self.wake.set()

    def heard_of_losses(self, lost: int) -> None:
        """Record the number of units ever taken back. It is a counter, so a lost reply hides no loss."""
        if self._lost is not None and lost != self._lost:
            self.robbed.set()
        self._lost = lost

    def learn(self, told: Claimed | Renewed | Weighed | LinedUp) -> None:
        """Take over counts and shared state from a reply."""
        count, shared = told.count, told.shared
        self.view.shared = shared
        self.heard_of_losses(count.lost)
        self._limiter.leases(
            count.at, others=count.others, young=count.young, lost=count.lost, stray=count.stray
        )
        if shared.limit is not None:
            self._limiter.shared(shared.limit, shared.read_at)
        at = now()
        self._limiter.pause(shared.paused, at)
        if shared.overload is not None:
            self.overloaded(shared.overload, heard=True)
        if isinstance(told, Claimed):
            self._limiter.waiting(told.waiting, at)

    def overloaded(self, overload: Overload, *, heard: bool = False) -> None:
        """Record an overload that was seen here, or by another replica (`is_remote`).

        The replica that reports it may not know how many requests of the others were in flight. While the
        overload keeps the gate closed, the requests that are in flight now were in flight then.
        """
        self._limiter.overloaded(
            overload.at,
            until=overload.until,
            capacity=overload.capacity,
            in_flight=max(overload.in_flight, self._limiter.in_flight),
            heard=heard,
        )

    async def cancelled(self, several: Sequence[HeldLease]) -> Sequence[bool | None]:
        """Return for each lease whether its request was cancelled; `None` for all if that cannot be read.

        In that case the gate stays closed until `retry_unread_markers` has read these markers: requests
        claimed meanwhile could only be returned.
        """
        named = [
            (h.request.id, h.request.token) for h in several if h.request is not None and h.request.token
        ]
        if not named:
            return [False] * len(several)
        found = await self._read_markers(named)
        if found is None:
            return [None] * len(several)
        # Only requests with a token were looked up; the others cannot be cancelled.
        answers = iter(found)
        return [h.request is not None and bool(h.request.token) and next(answers) for h in several]

    async def look_again(self) -> None:
        """Read again the markers that could not be read: no other call shows whether they can be read."""
        asked = list(self._unseen)
        if await self._read_markers(asked) is None:
            return
        self._unseen.difference_update(asked)
        if not self._unseen:
            self.blind.clear()
            self._unseen_why = None
            self._mended()

    async def _read_markers(self, named: Sequence[tuple[str, str]]) -> Sequence[bool] | None:
        try:
            return await self.queue.cancelled(named)
        except Exception as error:
            self._unseen.update(named)
            self._unseen_why = f"{self._told(error)}: cancel markers cannot be read"
            self.blind.set()
            self._failed()
            return None


def withheld(claimed: Claimed, permit: Permit) -> str:
    """Explain why a claim got nothing although requests wait, from what other dispatchers have shared.

    Empty if it got some, or if this process knows the reason itself by now.
    """
    if claimed.leases or not claimed.waiting:
        return ""
    shared, count = claimed.shared, claimed.count
    overload = shared.overload
    if overload is not None and count.at < (until := overload.wait_until(permit.retry_after_max_s)):
        return f"the gateway asked a dispatcher to wait another {until - count.at:.1f} s"
    if overload is not None and permit.read_at <= overload.at:
        return "a dispatcher was refused after the newest reading here"
    if shared.limit is not None and shared.limit < permit.limit and shared.limit <= count.live:
        return f"a newer reading of another dispatcher leaves a limit of {shared.limit}"
    if shared.paused or shared.limit != permit.limit:
        return ""
    free = permit.limit - permit.apart - (count.lost - permit.lost) - count.live
    if free > 1:  # one unit may be reserved for the probe of another owner
        return (
            f"the next in line weighs more than the {free} units that are free, and goes when all it needs is"
        )
    return ""


def now() -> float:
    return get_running_loop().time()
