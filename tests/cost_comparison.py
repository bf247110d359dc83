"""Comparison of a cost with a baseline measured at the same time, so that other load cannot distort it.

CPU time alone is not a reliable measure: on an otherwise idle virtual machine the same loop took 1.7 times as
much CPU time from one second to the next, because other machines use the same cores of the host. The ratio to
other work of the same milliseconds is stable. So both functions run alternately, often and for a short time,
and the median over the pairs is used. Other load would have to coincide with the same one of the two in most
pairs to distort it.
"""

from __future__ import annotations

import inspect
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MeasureCost = Callable[[], float | Awaitable[float]]
"""Runs once and returns its cost, in any unit that both functions share."""


@dataclass(frozen=True, slots=True)
class CostComparison:
    """Median costs over all pairs."""

    ours: float
    baseline: float
    ratio: float


async def compare_costs(ours: MeasureCost, baseline: MeasureCost, pairs: int = 21) -> CostComparison:
    """Run both functions alternately and compare their costs.

    The first pair is a warm-up and is discarded. Each function runs first in every other pair.
    """
    costs = []
    for number in range(pairs + 1):
        first, second = (ours, baseline) if number % 2 else (baseline, ours)
        our_cost, baseline_cost = await _run_once(first), await _run_once(second)
        costs.append((our_cost, baseline_cost) if number % 2 else (baseline_cost, our_cost))
    del costs[0]
    return CostComparison(
        statistics.median(our_cost for our_cost, _ in costs),
        statistics.median(baseline_cost for _, baseline_cost in costs),
        statistics.median(our_cost / baseline_cost for our_cost, baseline_cost in costs),
    )


async def _run_once(measure: MeasureCost) -> float:
    result = measure()
    return await result if inspect.isawaitable(result) else result


def get_children_cpu_s() -> float:
    """Return the CPU seconds of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_cpu_s(action: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls `action` once and returns the CPU seconds it took."""

    def cost() -> float:
        started_at = time.process_time()
        action()
        return time.process_time() - started_at

    return cost
