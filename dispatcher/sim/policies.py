"""Ways to decide how much batch work to send: the control law, and what else one might think of.

A policy hears what a dispatcher would hear, and says how many requests to send now (`room`). Only the
all-knowing one may look at the world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from math import inf

from dispatcher.core.budget import Policy as Budgeting
from dispatcher.core.budget import Reading, Reason, Signal, assess
from dispatcher.core.limiter import Limiter

BACKOFF_S = 2.0
"""The alternatives know nothing of overload: their workers sleep that long after a refusal, as peers' do."""
WORKERS_PER_SLOT = 4
"""How many requests an alternative can have out at most, for each slot of the configured pool."""
POLL_S = 0.2
"""How often the multiplier looks for work; for as many requests as it has workers, times the budget."""
YOUNG_S = 0.02
CONNECTED_S = 2.0
"""A probe that is connected for so long has found a gateway."""


class End(Enum):
    """How a request came back."""

    ANSWERED = "answered"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    CUT = "cut"
    """The connection broke while it ran."""


class Policy:
    """What all have in common: a count of what is out, and a pause after a refusal."""

    all_knowing = False

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        self.budgeting = budgeting
        self.workers = slots * WORKERS_PER_SLOT
        self.out = 0
        """Workers taken: requests sent and not back, and refused ones that rest."""
        self._resting: deque[float] = deque()

    def read(self, readings: Sequence[Reading], now: float) -> None:
        """A scrape has become known."""

    def unread(self, why: str, now: float) -> None:
        """A scrape has failed."""

    def capacity(self, max_requests: float, now: float) -> None:
        """Endpoints came or went, by the Kubernetes watch."""

    def sent(self, key: int, now: float) -> None:
        self.out += 1

    def ended(self, key: int, now: float, how: End) -> None:
        if how in (End.REFUSED, End.UNREACHABLE):
            self._resting.append(now + BACKOFF_S)  # its worker is taken until then
        else:
            self.out -= 1

    def kill(self, now: float) -> Iterable[int]:
        """One of the dispatcher's processes dies: the requests it had out. One process: cannot die here."""
        return ()

    def room(self, now: float) -> int:
        """How many requests to send now."""
        while self._resting and self._resting[0] <= now:
            self._resting.popleft()
            self.out -= 1
        return max(0, min(self._target(now), self.workers) - self.out)

    def check_at(self, now: float) -> float:
        """Ask again then, though nothing happens."""
        return self._resting[0] if self._resting else inf

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        """The limit on what may be out, if the policy has one, and why it is closed, if it is."""
        return None, None

    def _target(self, now: float) -> int:
        """How many may be out."""
        return 0

    def _headroom(self, readings: Sequence[Reading]) -> int:
        budgets = [assess(reading, self.budgeting) for reading in readings]
        return min((b.headroom if b.fault is None else 0 for b in budgets), default=0)


class NoBatch(Policy):
    """Sends nothing: what realtime would see without us."""


class AllKnowing(Policy):
    """Knows the pool at every moment and at once: nothing can harvest more within the reserve."""

    all_knowing = True

    def __init__(self, budgeting: Budgeting, slots: int, fill: Callable[[], int]) -> None:
        super().__init__(budgeting, slots)
        self._fill = fill

    def room(self, now: float) -> int:
        return self._fill()


class Literal(Policy):
    """Sends H requests for each reading, as the formula literally says."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._left = 0

    def read(self, readings: Sequence[Reading], now: float) -> None:
        self._left = max(0, self._headroom(readings))

    def sent(self, key: int, now: float) -> None:
        super().sent(key, now)
        self._left -= 1

    def room(self, now: float) -> int:
        super().room(now)  # wakes the workers that have rested
        return max(0, min(self._left, self.workers - self.out))


class Cap(Policy):
    """Takes H for a cap on its own requests; its own load, which is in the reading, counts against it."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._cap = 0

    def read(self, readings: Sequence[Reading], now: float) -> None:
        self._cap = max(0, self._headroom(readings))

    def _target(self, now: float) -> int:
        return self._cap

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        return self._cap, None


class Multiplier(Policy):
    """Takes budget × batch requests each poll, for whichever of its workers are free; knows nothing of what
    is already out."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._budget = 0.0
        self._polled_at = -inf
        self._left = 0

    def read(self, readings: Sequence[Reading], now: float) -> None:
        self._budget = min(
            (max(0.0, 1.0 - (r.f_sys + r.f_epp + self.budgeting.reserve)) for r in readings), default=0.0
        )

    def sent(self, key: int, now: float) -> None:
        super().sent(key, now)
        self._left -= 1

    def room(self, now: float) -> int:
        super().room(now)  # wakes the workers that have rested
        if now >= self._polled_at + POLL_S - 1e-9:
            self._polled_at = now
            self._left = int(self._budget * self.workers)
        return max(0, min(self._left, self.workers - self.out))

    def check_at(self, now: float) -> float:
        return min(super().check_at(now), self._polled_at + POLL_S)


class Point(Policy):
    """L = I(t_s) + H: adds back what it believes it had out when the sample was taken, without doubts."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._limit = 0
        self._history: deque[tuple[float, int]] = deque([(-inf, 0)])

    def read(self, readings: Sequence[Reading], now: float) -> None:
        at = min(reading.opened_at for reading in readings)
        while len(self._history) > 1 and self._history[1][0] <= at:
            self._history.popleft()
        self._limit = max(0, self._history[0][1] + self._headroom(readings))

    def sent(self, key: int, now: float) -> None:
        super().sent(key, now)
        self._history.append((now, self.out - len(self._resting)))

    def ended(self, key: int, now: float, how: End) -> None:
        super().ended(key, now, how)
        self._history.append((now, self.out - len(self._resting)))

    def _target(self, now: float) -> int:
        return self._limit

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        return self._limit, None


class Law(Policy):
    """The dispatcher's own: `core.limiter`, one for each replica, over one count of leases."""

    def __init__(
        self,
        budgeting: Budgeting,
        slots: int,
        uses: Sequence[Signal],
        *,
        replicas: int = 1,
        lease_s: float = 30.0,
    ) -> None:
        super().__init__(budgeting, slots)
        self._uses = uses
        self._lease_s = lease_s
        self._limiters = [Limiter(budgeting, uses) for _ in range(replicas)]
        self._owner: dict[int, int] = {}
        self._sent_at: dict[int, float] = {}
        self._turn = 0
        self._dead: deque[tuple[float, int]] = deque()
        """(when they run out, how many) leases of processes that died."""
        self._lost = 0
        self._prober: int | None = None
        self._probe: int | None = None

    @property
    def _live(self) -> int:
        return len(self._owner) + sum(count for _, count in self._dead)

    def read(self, readings: Sequence[Reading], now: float) -> None:
        for i, limiter in enumerate(self._limiters):
            for reading in readings:
                limiter.reading(reading, now)
            self._count(i, now)

    def unread(self, why: str, now: float) -> None:
        for limiter in self._limiters:
            limiter.reading_failed(Reason.UNREADABLE, why, now)

    def capacity(self, max_requests: float, now: float) -> None:
        for limiter in self._limiters:
            limiter.capacity(max_requests, now)

    def sent(self, key: int, now: float) -> None:
        super().sent(key, now)
        self._owner[key] = self._turn
        self._sent_at[key] = now
        self._limiters[self._turn].sent(key, now)
        if self._prober is not None and self._probe is None:
            self._probe = key
            self._limiters[self._prober].probed(now)
        self._count(self._turn, now)

    def ended(self, key: int, now: float, how: End) -> None:
        owner = self._owner.pop(key, None)
        sent_at = self._sent_at.pop(key, now)
        if owner is None:  # its process has died meanwhile
            return
        self.out -= 1
        limiter = self._limiters[owner]
        out = limiter.in_flight
        limiter.answered(key, now)
        if key == self._probe:
            self._probe = self._prober = None
        for i, told in enumerate(self._limiters):
            if how is End.REFUSED:
                told.overloaded(now, until=now, capacity=True, in_flight=out, heard=i != owner)
            if how is End.UNREACHABLE:
                told.unreachable(now, "connection refused")
            elif how is not End.CUT:
                told.reached(now, sent_at)

    def kill(self, now: float) -> Iterable[int]:
        """The replicas die in turn; a new one takes the place at once, knowing nothing."""
        self._turn = (self._turn + 1) % len(self._limiters)
        keys = [key for key, owner in self._owner.items() if owner == self._turn]
        for key in keys:
            del self._owner[key], self._sent_at[key]
        self.out -= len(keys)
        if keys:
            self._dead.append((now + self._lease_s, len(keys)))
        if self._probe in keys:
            self._probe = self._prober = None
        self._limiters[self._turn] = Limiter(self.budgeting, self._uses)
        self._count(self._turn, now)
        return keys

    def room(self, now: float) -> int:
        while self._dead and self._dead[0][0] <= now:
            self._lost += self._dead.popleft()[1]
            for i in range(len(self._limiters)):
                self._count(i, now)
        if self._probe is not None and now >= self._sent_at[self._probe] + CONNECTED_S:
            for limiter in self._limiters:
                limiter.reached(now, self._sent_at[self._probe])
            self._probe = self._prober = None
        for _ in self._limiters:
            allowance = self._limiters[self._turn].allowance(now)
            if allowance.probe and self._prober is None:
                self._prober = self._turn
                return 1
            free = allowance.limit - max(0, self._lost - allowance.lost) - self._live
            if free > 0:
                return free
            self._turn = (self._turn + 1) % len(self._limiters)
        return 0

    def check_at(self, now: float) -> float:
        at = self._dead[0][0] if self._dead else inf
        if self._probe is not None:
            at = min(at, self._sent_at[self._probe] + CONNECTED_S)
        for limiter in self._limiters:
            check = limiter.allowance(now).next_check_at
            at = at if check is None else min(at, check)
        return at

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        allowance = self._limiters[0].allowance(now)
        return allowance.limit, allowance.reason if allowance.reason.closed else None

    def explain(self, now: float) -> str:
        return self._limiters[0].explain(now)

    def _count(self, owner: int, now: float) -> None:
        """The replica learns of the others' leases, as each claim and renewal tells it."""
        if len(self._limiters) == 1 and not self._lost and not self._dead:
            return
        others = [key for key, of in self._owner.items() if of != owner]
        young = sum(1 for key in others if now - self._sent_at[key] < YOUNG_S)
        dead = self._live - len(self._owner)
        self._limiters[owner].leases(now, others=len(others) + dead, young=young, lost=self._lost)
