"""Read the requests in flight from the series of the picker's in-flight-load producer.

The series has one sample for each endpoint, fairness id and priority, as of now. A request counts from the
choice of its endpoint until its answer is complete, so requests in the picker's own queue are not in it. Each
producer counts every request, and only its own replica's. docs/contributing/readings.md explains the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dispatcher.signals.epp.series import InFlightLoad, sum_or_nan, sum_priorities_below_zero
from dispatcher.signals.exposition import OptionalSeries, Sample

NAME = "llm_d_epp_inflight_requests"
SERIES = OptionalSeries(frozenset({NAME}), 1_000, "series of requests in flight")
"""The number of samples is endpoints × fairness ids × priorities. More would cost too much CPU time."""


def sum_in_flight_load(samples: Iterable[Sample], problem: str = "") -> InFlightLoad | None:
    """Return the requests in flight on one page. `None` if the page does not show them.

    `problem` says why the samples are incomplete. Several producers count the same requests, so only the one
    with the largest sum is used.
    """
    if problem:
        return InFlightLoad(problem=problem)
    by_producer: dict[str, list[Sample]] = {}
    for sample in samples:
        by_producer.setdefault(sample.labels.get("producer_name", ""), []).append(sample)
    if not by_producer:
        return None
    loads = [_sum_producer(name, of_one) for name, of_one in sorted(by_producer.items())]
    flawed = [load for load in loads if load.problem]
    return flawed[0] if flawed else max(loads, key=lambda load: load.requests)


def _sum_producer(name: str, samples: Sequence[Sample]) -> InFlightLoad:
    # A request that ends after its endpoint was removed leaves a sample of −1 behind.
    total = sum_or_nan(0.0 if sample.value < 0 else sample.value for sample in samples)
    if not math.isfinite(total):
        return InFlightLoad(producer=name, problem="a value that is not a finite number")
    return InFlightLoad(total, sum_priorities_below_zero(samples), name)
