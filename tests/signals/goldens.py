"""Pages of real endpoint pickers, each with what is read of it."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.limit.budget import Policy

POLICY = Policy(per_endpoint=100)


@dataclass(frozen=True)
class Expected:
    """(f_sys, f_epp) of each signal in use."""

    saturation: tuple[float, float] | None = None
    requests: tuple[float, float] | None = None


IN_FLIGHT = 128 / 400
NEWEST = 120 / 400
"""What the picker sent and saw no answer of. That the averages know of 127 may be of who has gone since."""

GOLDEN = {
    "gie-1.0-flow-control-off": Expected(requests=(IN_FLIGHT, 0)),
    "gie-1.3-flow-control-off": Expected(requests=(IN_FLIGHT, 0)),
    "gie-1.3-flow-control-on": Expected((0.35, 12 / 400), (IN_FLIGHT, 12 / 400)),
    "gie-1.5-flow-control-off": Expected(requests=(IN_FLIGHT, 0)),
    "gie-1.5-flow-control-on": Expected((1.25, 12 / 400), (IN_FLIGHT, 12 / 400)),
    "gie-1.5-latency-predictor": Expected((1.25, 12 / 400), (IN_FLIGHT, 12 / 400)),
    "router-0.9-flow-control-off": Expected(requests=(IN_FLIGHT, 0)),
    # Both families of names with different values: the new ones count.
    "router-0.9-flow-control-on": Expected((0.4, 12 / 400), (NEWEST, 12 / 400)),
    "router-newest-flow-control-off": Expected(requests=(NEWEST, 0)),
    "router-newest-flow-control-on": Expected((0.4, 12 / 400), (NEWEST, 12 / 400)),
    "router-newest-latencies": Expected((0.4, 12 / 400), (NEWEST, 12 / 400)),
    "router-newest-prefill-decode": Expected((0.75, 12 / 400), (NEWEST, 12 / 400)),
    # Nothing waits and no flow has a series: the queue is empty, not unknown. One page proves no count.
    "router-newest-concurrency-detector": Expected((0.3175, 0), (127 / 400, 0)),
    # A utilization detector, whatever its operator called it.
    "router-newest-misnamed-detector": Expected((0.4, 12 / 400), (NEWEST, 12 / 400)),
    "router-newest-endpoint-selector": Expected((0.4, 12 / 400), (NEWEST, 12 / 400)),
    "router-newest-negative-queue": Expected((0.4, 4 / 400), (NEWEST, 4 / 400)),
}
