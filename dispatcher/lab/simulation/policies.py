"""Policies that decide how many batch requests are sent: alternatives to the limit algorithm of this project.

A policy gets the same information as a dispatcher and returns how many requests to send now
(`count_sendable`). Only the policy `all-knowing` may look at the world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from dispatcher.lab.simulation.transport import JobEnd
from dispatcher.limit.budget import Policy as Budgeting
from dispatcher.limit.budget import Reading, Reason, compute_budget
from dispatcher.limit.utilization import UtilizationMeter
from dispatcher.signals.readings import PollReadings

BACKOFF_S = 2.0
"""Time for which a worker of an alternative policy sleeps after a refusal. The alternatives have no other
reaction to overload."""
WORKERS_PER_SLOT = 4
"""Maximum number of outstanding requests of an alternative policy, per slot of the configured pool."""
POLL_S = 0.2
"""Interval at which the policy `multiplier` takes new requests: number of workers × budget each time."""


class Policy:
    """Base class: counts outstanding requests and pauses after refusals."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        self.budgeting = budgeting
        self.workers = slots * WORKERS_PER_SLOT
        self.outstanding = 0
        """Number of workers in use: for requests without an answer, and for refused ones during their
        pause."""
        self._resting: deque[float] = deque()

    def handle_reading(self, verdict: PollReadings, now: float) -> None:
        """Handle the result of a scrape."""

    def handle_scrape_failure(self, why: str, now: float) -> None:
        """Handle a failed scrape."""

    def handle_capacity(self, max_requests: float, now: float) -> None:
        """Handle a capacity reported by the Kubernetes watch."""

    def record_sent(self, now: float) -> None:
        self.outstanding += 1

    def record_end(self, now: float, end: JobEnd) -> None:
        if end in (JobEnd.REFUSED, JobEnd.UNREACHABLE):
            self._resting.append(now + BACKOFF_S)  # the worker is in use until then
        else:
            self.outstanding -= 1

    def kill_replica(self) -> None:
        """Kill one of the processes of the dispatcher. A policy with a single process ignores this."""

    def stop(self) -> None:
        """Stop at the end of the simulation."""

    def count_sendable(self, now: float) -> int:
        """Return the number of requests to send now."""
        while self._resting and self._resting[0] <= now:
            self._resting.popleft()
            self.outstanding -= 1
        # Negative after the limit has fallen: nothing is sent until enough answers came.
        return max(0, min(self._get_target(now), self.workers) - self.outstanding)

    def next_check_at(self, now: float) -> float:
        """Return the next time at which the answer may change without an event."""
        return self._resting[0] if self._resting else inf

    def get_meters(self) -> Sequence[UtilizationMeter]:
        """Return the utilization that each dispatcher process measured."""
        return ()

    def get_limit_and_reason(self, now: float) -> tuple[int | None, Reason | None]:
        """Return the limit on outstanding requests, if the policy has one, and the reason why it is closed,
        if it is."""
        return None, None

    def get_estimated_capacity(self) -> float | None:
        """Return the capacity of the pool in requests, as the policy estimates it now."""
        return None

    def _get_target(self, now: float) -> int:
        """Return how many requests may be outstanding."""
        return 0

    def _compute_headroom(self, readings: Sequence[Reading]) -> int:
        budgets = [compute_budget(reading, self.budgeting) for reading in readings]
        return min((b.headroom if b.fault is None else 0 for b in budgets), default=0)


class NoBatch(Policy):
    """Sends nothing. Shows the latencies of realtime requests without batch requests."""


class AllKnowing(Policy):
    """Knows the current state of the pool without delay. No policy can use more within the reserve."""

    def __init__(self, budgeting: Budgeting, slots: int, count_free: Callable[[], int]) -> None:
        super().__init__(budgeting, slots)
        self._count_free = count_free

    def count_sendable(self, now: float) -> int:
        return self._count_free()


class Literal(Policy):
    """Sends H new requests for each reading, as the formula literally says."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._remaining = 0

    def handle_reading(self, verdict: PollReadings, now: float) -> None:
        self._remaining = max(0, self._compute_headroom(verdict.readings))

    def record_sent(self, now: float) -> None:
        super().record_sent(now)
        self._remaining -= 1

    def count_sendable(self, now: float) -> int:
        super().count_sendable(now)  # frees workers whose pause is over
        return max(0, min(self._remaining, self.workers - self.outstanding))


class Cap(Policy):
    """Uses H as the limit on its own requests, although H already excludes those that are running."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._cap = 0

    def handle_reading(self, verdict: PollReadings, now: float) -> None:
        self._cap = max(0, self._compute_headroom(verdict.readings))

    def _get_target(self, now: float) -> int:
        return self._cap

    def get_limit_and_reason(self, now: float) -> tuple[int | None, Reason | None]:
        return self._cap, None


class Multiplier(Policy):
    """Takes budget × workers requests at each poll, as far as workers are free. Ignores requests that are
    outstanding."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._budget = 0.0
        self._polled_at = -inf
        self._remaining = 0

    def handle_reading(self, verdict: PollReadings, now: float) -> None:
        self._budget = min(
            (max(0.0, 1.0 - (r.f_sys + r.f_epp + self.budgeting.reserve)) for r in verdict.readings),
            default=0.0,
        )

    def record_sent(self, now: float) -> None:
        super().record_sent(now)
        self._remaining -= 1

    def count_sendable(self, now: float) -> int:
        super().count_sendable(now)  # frees workers whose pause is over
        # The tolerance makes a timer that fires at exactly this time count.
        if now >= self._polled_at + POLL_S - 1e-9:
            self._polled_at = now
            self._remaining = int(self._budget * self.workers)
        return max(0, min(self._remaining, self.workers - self.outstanding))

    def next_check_at(self, now: float) -> float:
        return min(super().next_check_at(now), self._polled_at + POLL_S)


class Point(Policy):
    """Uses L = I(t_s) + H: adds the requests that it had outstanding at the time of the sample, without
    uncertainty."""

    def __init__(self, budgeting: Budgeting, slots: int) -> None:
        super().__init__(budgeting, slots)
        self._limit = 0
        self._history: deque[tuple[float, int]] = deque([(-inf, 0)])

    def handle_reading(self, verdict: PollReadings, now: float) -> None:
        at = min(reading.opened_at for reading in verdict.readings)
        # Keeps the newest entry that is not later than the sample.
        while len(self._history) > 1 and self._history[1][0] <= at:
            self._history.popleft()
        self._limit = max(0, self._history[0][1] + self._compute_headroom(verdict.readings))

    def record_sent(self, now: float) -> None:
        super().record_sent(now)
        self._history.append((now, self.outstanding - len(self._resting)))

    def record_end(self, now: float, end: JobEnd) -> None:
        super().record_end(now, end)
        self._history.append((now, self.outstanding - len(self._resting)))

    def _get_target(self, now: float) -> int:
        return self._limit

    def get_limit_and_reason(self, now: float) -> tuple[int | None, Reason | None]:
        return self._limit, None
