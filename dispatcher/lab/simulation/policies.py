"""Ways to decide how much batch work to send: what else one might think of than the control law.

A policy hears what a dispatcher would hear, and says how many requests to send now (`room`). Only the
all-knowing one may look at the world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from dispatcher.core.limit.budget import Policy as Budgeting
from dispatcher.core.limit.budget import Reading, Reason, assess
from dispatcher.core.limit.utilization import Meter
from dispatcher.lab.simulation.transport import End
from dispatcher.signals.readings import Verdict

BACKOFF_S = 2.0
"""The alternatives know nothing of overload: their workers sleep that long after a refusal, as peers' do."""
WORKERS_PER_SLOT = 4
"""How many requests an alternative can have out at most, for each slot of the configured pool."""
POLL_S = 0.2
"""How often the multiplier looks for work; for as many requests as it has workers, times the budget."""


class Policy:
    """What all have in common: a count of what is out, and a pause after a refusal."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        self.budgeting = budgeting
        self.workers = slots * WORKERS_PER_SLOT
        self.out = 0
        """Workers taken: requests sent and not back, and refused ones that rest."""
        self._resting: deque[float] = deque()

    def read(self, found: Verdict, now: float) -> None:
        """A scrape has become known."""

    def unread(self, why: str, now: float) -> None:
        """A scrape has failed."""

    def capacity(self, max_requests: float, now: float) -> None:
        """Endpoints came or went, by the Kubernetes watch."""

    def sent(self, now: float) -> None:
        self.out += 1

    def ended(self, now: float, how: End) -> None:
        if how in (End.REFUSED, End.UNREACHABLE):
            self._resting.append(now + BACKOFF_S)  # its worker is taken until then
        else:
            self.out -= 1

    def kill(self) -> None:
        """One of the dispatcher's processes dies. One process: cannot die here."""

    def stop(self) -> None:
        """The simulation is over."""

    def room(self, now: float) -> int:
        """How many requests to send now."""
        while self._resting and self._resting[0] <= now:
            self._resting.popleft()
            self.out -= 1
        return max(0, min(self._target(now), self.workers) - self.out)

    def check_at(self, now: float) -> float:
        """Ask again then, though nothing happens."""
        return self._resting[0] if self._resting else inf

    def meters(self) -> Sequence[Meter]:
        """What each dispatcher process measured of its own harvest."""
        return ()

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        """The limit on what may be out, if the policy has one, and why it is closed, if it is."""
        return None, None

    def capacity_seen(self) -> float | None:
        """Return the capacity of the pool in requests, as the policy estimates it now."""
        return None

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

    def read(self, found: Verdict, now: float) -> None:
        self._left = max(0, self._headroom(found.readings))

    def sent(self, now: float) -> None:
        super().sent(now)
        self._left -= 1

    def room(self, now: float) -> int:
        super().room(now)  # wakes the workers that have rested
        return max(0, min(self._left, self.workers - self.out))


class Cap(Policy):
    """Takes H for a cap on its own requests; its own load, which is in the reading, counts against it."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._cap = 0

    def read(self, found: Verdict, now: float) -> None:
        self._cap = max(0, self._headroom(found.readings))

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

    def read(self, found: Verdict, now: float) -> None:
        self._budget = min(
            (max(0.0, 1.0 - (r.f_sys + r.f_epp + self.budgeting.reserve)) for r in found.readings),
            default=0.0,
        )

    def sent(self, now: float) -> None:
        super().sent(now)
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

    def read(self, found: Verdict, now: float) -> None:
        at = min(reading.opened_at for reading in found.readings)
        while len(self._history) > 1 and self._history[1][0] <= at:
            self._history.popleft()
        self._limit = max(0, self._history[0][1] + self._headroom(found.readings))

    def sent(self, now: float) -> None:
        super().sent(now)
        self._history.append((now, self.out - len(self._resting)))

    def ended(self, now: float, how: End) -> None:
        super().ended(now, how)
        self._history.append((now, self.out - len(self._resting)))

    def _target(self, now: float) -> int:
        return self._limit

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        return self._limit, None
