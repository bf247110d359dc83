"""The queue as the loop uses it: an outage closes the gate and raises nothing; what it tells is learned."""

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
"""Pauses between tries while the queue cannot be reached: they double from the first to the second."""
RESTS_S = (0.5, 10.0)
"""How long a call that is only made through an open gate keeps it closed: doubling each time in a row."""
LOOKS = frozenset(
    {"counts", "line", "expired", "unserved", "work", "awaited"}
    | {"marks", "warming", "warmed", "unwarmed", "pin"}
)
PASSING = frozenset({"claim", "probe", "expire", "line_up"})
"""These are not made while the gate is closed, or not for the same requests again."""

T = TypeVar("T")


@dataclass(slots=True)
class QueueView:
    """What is known of the queue, for people."""

    counts: Counts | None = None
    counted_at: float | None = None
    """Time at which these were counted, by the clock of the loop."""
    shared: Shared | None = None
    outlook: Outlook | None = None
    problem: str | None = None


class QueueAccess:
    """One owner's access to its queue, shared by all parts of the loop.

    `wake`: set whenever there may be something for the loop to do. `work`: there may be something to claim.
    `robbed`: set when leases were taken back from somebody, which may have been us. `blind`: set while cancel
    markers cannot be read.
    """

    def __init__(self, queue: Queue, limiter: Limiter, tenure: Tenure, clock: Callable[[], float]) -> None:
        self.queue = queue
        self.tenure = tenure
        self.clock = clock
        """The clock of `tenure`, which goes on while the machine sleeps."""
        self.view = QueueView()
        self.wake = asyncio.Event()
        self.robbed = asyncio.Event()
        self.blind = asyncio.Event()
        self.work = True
        self.pause_s = PAUSE_S[0]
        self._limiter = limiter
        self._slowest_s, self._slowest_until = 0.0, float("-inf")
        """Duration of the slowest call lately, and until when it counts."""
        self._lost: int | None = None
        self._away: dict[str, tuple[str, float]] = {}
        """Calls that failed last time: why, and until when nothing but their own success shows otherwise."""
        self._in_a_row: Counter[str] = Counter()
        """How often each call has failed since it last got through."""
        self._unseen: set[tuple[str, str]] = set()
        """Requests and tokens whose cancel markers could not be read: on a Cluster they may be away alone."""
        self._unseen_why: str | None = None

    async def ask(self, what: str, call: Awaitable[T]) -> T | None:
        """The call's answer; None where the queue cannot be reached, and then the gate is closed.

        Where that very call was refused it stays closed until it gets through; or for a while that grows,
        where nobody makes it while the gate is closed. Otherwise any write shows that the queue is back, and
        a look that it can be looked at. Whatever goes wrong here ends nothing.
        """
        try:
            answer = await call
        except Exception as error:
            self._in_a_row[what] += 1
            times = self._in_a_row[what]
            if what in LOOKS and times > 1 and what not in self._away:
                return None  # writes got through since it began to fail
            rest_s = min(RESTS_S[0] * 2.0 ** min(times - 1, 10), RESTS_S[1])
            alone = isinstance(error, CallRefusedError) or not isinstance(error, QueueUnavailableError)
            sticks_s = 0.0 if what in LOOKS or not alone else rest_s if what in PASSING else math.inf
            self._away[what] = self._told(error), now() + sticks_s
            self._failed()
            return None
        if self._away or self._in_a_row:
            self._got_through(what)
        return answer

    def _got_through(self, what: str) -> None:
        del self._in_a_row[what]
        was_away = bool(self._away)
        self._away.pop(what, None)
        at = now()
        self._away = {
            other: (why, until)
            for other, (why, until) in self._away.items()
            if until > at or (what in LOOKS and other not in LOOKS)
        }
        if was_away:
            self._mended()

    def _told(self, error: Exception) -> str:
        """The failure as a sentence. An exception that no queue should raise is in the log as well."""
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
        """Something is better: what is left of it is told, or that nothing is."""
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
        """A call that shows that we live, asked at `asked_at`, has just been answered."""
        at = self.clock()
        self.tenure.heard(asked_at, at)
        took_s = at - asked_at
        if took_s > self._slowest_s or at > self._slowest_until:
            self._slowest_s, self._slowest_until = took_s, at + SLOW_FOR_S
            self._limiter.queue_took(took_s)

    def ours(self, held: HeldLease) -> bool:
        """Whether its lease is surely still ours, so that its request may be sent."""
        return self.tenure.holds(held.confirmed_at, self.clock())

    def found_work(self) -> None:
        self.work = True
        self.wake.set()

    def heard_of_losses(self, lost: int) -> None:
        """How many leases were ever taken back. A counter, so that no lost reply hides it from us."""
        if self._lost is not None and lost != self._lost:
            self.robbed.set()
        self._lost = lost

    def learn(self, told: Claimed | Renewed | Weighed | LinedUp) -> None:
        """Counts, and what other replicas know."""
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
        """A refusal, of ours or `heard` of. Whoever told it may not have known how many of the others' were
        in flight; as long as it keeps the gate closed those that are now were then."""
        self._limiter.overloaded(
            overload.at,
            until=overload.until,
            capacity=overload.capacity,
            in_flight=max(overload.in_flight, self._limiter.in_flight),
            heard=heard,
        )

    async def cancelled(self, several: Sequence[HeldLease]) -> Sequence[bool | None]:
        """Which of them have been cancelled; None for each where that cannot be known.

        Then the gate is closed until `look_again` has read these markers: what is claimed meanwhile would
        only be given back.
        """
        named = [
            (h.request.id, h.request.token) for h in several if h.request is not None and h.request.token
        ]
        if not named:
            return [False] * len(several)
        found = await self._read_markers(named)
        if found is None:
            return [None] * len(several)
        answers = iter(found)
        return [h.request is not None and bool(h.request.token) and next(answers) for h in several]

    async def look_again(self) -> None:
        """Try again to read the markers that could not be read: no other call shows whether they can be."""
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
    """Why a claim by this permit got nothing of what waits: what other dispatchers know, in words.
    Empty: it got some, or there is nothing of which this process does not know by now."""
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
    if free > 1:  # one may be kept for another's probe
        return (
            f"the next in line weighs more than the {free} units that are free, and goes when all it needs is"
        )
    return ""


def now() -> float:
    return get_running_loop().time()
