"""The utilization that the dispatcher reports agrees with the simulated world."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.standin.trace import BUNDLED, load_trace
from dispatcher.limit.budget import Reason
from dispatcher.limit.utilization import WorkState

SAMPLE_INTERVAL_S = 0.1
SECONDS = 300.0


@dataclass
class Utilization:
    used_s: float
    free_s: float

    @property
    def ratio(self) -> float:
        return self.used_s / self.free_s


def measure_utilization(**scenario: Any) -> tuple[Utilization, Utilization]:
    scenario_in_use = Scenario(seconds=SECONDS, **scenario)
    run = run_scenario(
        scenario_in_use,
        load_trace(BUNDLED, slots=64),
        PolicyName.DISPATCHER,
        sample_interval_s=SAMPLE_INTERVAL_S,
    )
    reported = Utilization(
        sum(meter.used_unit_s[WorkState.WAITING] for meter in run.meters),
        max(meter.free_unit_s[WorkState.WAITING] for meter in run.meters),
    )
    actual = Utilization(0.0, 0.0)
    for sample in run.samples:
        state = sample.state
        realtime = state.realtime_running + state.realtime_waiting
        age_s = scenario_in_use.lag_s + scenario_in_use.scrape_s
        if any(since + age_s < state.at < until for since, until in scenario_in_use.gaps):
            continue  # No reading covers this moment.
        actual.used_s += (state.batch_running + state.batch_waiting) * SAMPLE_INTERVAL_S
        actual.free_s += (
            max(0, math.floor(state.slots * (1 - scenario_in_use.reserve)) - realtime) * SAMPLE_INTERVAL_S
        )
    return reported, actual


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        {},
        {"scrape_s": 5.0, "lag_s": 1.0},
        {"detector": Detector.CONCURRENCY, "flush_s": 0.0},
        {"detector": Detector.NONE, "pods": 4},
        {"replicas": 3},
        {"gaps": [(60.0, 90.0)], "pods": 4, "pods_at": [(150.0, 3), (220.0, 4)]},
    ],
    ids=["fresh", "5 s old", "a count", "no flow control", "three replicas", "a gap, and a pod that went"],
)
def test_reported_utilization_is_within_3_percent_of_the_world(scenario: dict[str, Any]) -> None:
    reported, actual = measure_utilization(**scenario)
    print(f"reported {reported}, {reported.ratio:.3f}; actual {actual}, {actual.ratio:.3f}")
    assert reported.used_s == pytest.approx(actual.used_s, rel=0.03)
    assert reported.free_s == pytest.approx(actual.free_s, rel=0.03)
    assert reported.ratio == pytest.approx(actual.ratio, rel=0.03)


def test_seconds_per_reason_add_up_and_show_a_metrics_gap() -> None:
    scenario_in_use = Scenario(seconds=SECONDS, gaps=[(60.0, 90.0)])
    (meter,) = run_scenario(scenario_in_use, load_trace(BUNDLED, slots=64), PolicyName.DISPATCHER).meters
    assert sum(meter.reason_s.values()) == pytest.approx(SECONDS, abs=0.1)
    # The reading of 59 s is valid until 61.5 s.
    assert meter.reason_s[Reason.UNREADABLE] == pytest.approx(28.5, abs=0.2)
