"""Recorded pages of real endpoint pickers, each with the readings that are expected of it."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.limit.budget import Policy

POLICY = Policy(per_endpoint=100)


@dataclass(frozen=True)
class Expected:
    """`(f_sys, f_epp)` of each signal in use. `None` if the signal is not read."""

    saturation: tuple[float, float] | None = None
    requests: tuple[float, float] | None = None


F_SYS_OLDER_RELEASES = 128 / 400
F_SYS_NEWEST_RELEASE = 120 / 400
"""Requests that the picker sent and that are not answered, as a fraction of the capacity. The averages show
127, which may include requests that have ended since the last flush."""

EXPECTED_READINGS = {
    "gie-1.0-flow-control-off": Expected(requests=(F_SYS_OLDER_RELEASES, 0)),
    "gie-1.3-flow-control-off": Expected(requests=(F_SYS_OLDER_RELEASES, 0)),
    "gie-1.3-flow-control-on": Expected((0.35, 12 / 400), (F_SYS_OLDER_RELEASES, 12 / 400)),
    "gie-1.5-flow-control-off": Expected(requests=(F_SYS_OLDER_RELEASES, 0)),
    "gie-1.5-flow-control-on": Expected((1.25, 12 / 400), (F_SYS_OLDER_RELEASES, 12 / 400)),
    "gie-1.5-latency-predictor": Expected((1.25, 12 / 400), (F_SYS_OLDER_RELEASES, 12 / 400)),
    "router-0.9-flow-control-off": Expected(requests=(F_SYS_OLDER_RELEASES, 0)),
    # The page has the old and the new names with different values. The new names count.
    "router-0.9-flow-control-on": Expected((0.4, 12 / 400), (F_SYS_NEWEST_RELEASE, 12 / 400)),
    "router-newest-flow-control-off": Expected(requests=(F_SYS_NEWEST_RELEASE, 0)),
    "router-newest-flow-control-on": Expected((0.4, 12 / 400), (F_SYS_NEWEST_RELEASE, 12 / 400)),
    "router-newest-latencies": Expected((0.4, 12 / 400), (F_SYS_NEWEST_RELEASE, 12 / 400)),
    "router-newest-prefill-decode": Expected((0.75, 12 / 400), (F_SYS_NEWEST_RELEASE, 12 / 400)),
    # No request waits, so no flow has a series. The queue is empty, not unknown. A single page does not
    # prove that the detector counts requests.
    "router-newest-concurrency-detector": Expected((0.3175, 0), (127 / 400, 0)),
    # A utilization detector with a misleading name.
    "router-newest-misnamed-detector": Expected((0.4, 12 / 400), (F_SYS_NEWEST_RELEASE, 12 / 400)),
    "router-newest-endpoint-selector": Expected((0.4, 12 / 400), (F_SYS_NEWEST_RELEASE, 12 / 400)),
    "router-newest-negative-queue": Expected((0.4, 4 / 400), (F_SYS_NEWEST_RELEASE, 4 / 400)),
}
