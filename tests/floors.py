"""What something costs beside a floor of the same moments, so that no neighbour spoils the figure.

CPU time alone is no measure: on a virtual machine with nothing else on it the same loop took 1.7 times as
much of it from one second to the next, because others work on the same cores of the host. What holds still
is its ratio to other work of the same milliseconds. So both run in turn, often and shortly, and the median
of the pairs counts: to spoil that, a neighbour would have to come with one of the two, over and over.
"""

from __future__ import annotations

import inspect
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Cost = Callable[[], float | Awaitable[float]]
"""Does it once and says what that took, in any unit: the same for both."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Medians over the pairs."""

    ours: float
    floor: float
    ratio: float


async def beside(ours: Cost, floor: Cost, pairs: int = 21) -> Beside:
    """Both in turn; one pair before the first that counts, and each is first in every other pair."""
    costs = []
    for number in range(pairs + 1):
        first, second = (ours, floor) if number % 2 else (floor, ours)
        one, other = await _cost(first), await _cost(second)
        costs.append((one, other) if number % 2 else (other, one))
    del costs[0]
    return Beside(
        statistics.median(one for one, _ in costs),
        statistics.median(other for _, other in costs),
        statistics.median(one / other for one, other in costs),
    )


async def _cost(of: Cost) -> float:
    found = of()
    return await found if inspect.isawaitable(found) else found


def of_children() -> float:
    """The CPU seconds of processes that were started and have ended: a clock for `cpu_of`."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of(act: Callable[[], object], clock: Callable[[], float] = time.process_time) -> Callable[[], float]:
    """The CPU seconds of this process that doing it once takes."""

    def cost() -> float:
        began = clock()
        act()
        return clock() - began

    return cost
