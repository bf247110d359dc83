"""What the dispatcher says that it harvested, against what the simulated world knows to be true."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.utilization import WorkState
from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.standin.trace import BUNDLED, load_trace

EACH_S = 0.1
SECONDS = 300.0


@dataclass
class Harvest:
    used_s: float
    free_s: float

    @property
    def ratio(self) -> float:
        return self.used_s / self.free_s


def told_and_true(**given: Any) -> tuple[Harvest, Harvest]:
    setting = Scenario(seconds=SECONDS, **given)
    run = run_scenario(
        setting, load_trace(BUNDLED, slots=64), PolicyName.DISPATCHER, sample_interval_s=EACH_S
    )
    told = Harvest(
        sum(meter.used_unit_s[WorkState.WAITING] for meter in run.meters),
        max(meter.free_unit_s[WorkState.WAITING] for meter in run.meters),
    )
    truth = Harvest(0.0, 0.0)
    for moment in run.samples:
        state = moment.state
        realtime = state.realtime_running + state.realtime_waiting
        age_s = setting.lag_s + setting.scrape_s
        if any(since + age_s < state.at < until for since, until in setting.gaps):
            continue  # nobody could know
        truth.used_s += (state.batch_running + state.batch_waiting) * EACH_S
        truth.free_s += max(0, math.floor(state.slots * (1 - setting.reserve)) - realtime) * EACH_S
    return told, truth


@pytest.mark.parametrize(
    "given",
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
def test_harvest_agrees_with_the_world_within_3_percent(given: dict[str, Any]) -> None:
    told, truth = told_and_true(**given)
    print(f"told {told}, {told.ratio:.3f}; true {truth}, {truth.ratio:.3f}")
    assert told.used_s == pytest.approx(truth.used_s, rel=0.03)
    assert told.free_s == pytest.approx(truth.free_s, rel=0.03)
    assert told.ratio == pytest.approx(truth.ratio, rel=0.03)


def test_seconds_in_each_reason_add_up_and_tell_a_gap() -> None:
    setting = Scenario(seconds=SECONDS, gaps=[(60.0, 90.0)])
    (meter,) = run_scenario(setting, load_trace(BUNDLED, slots=64), PolicyName.DISPATCHER).meters
    assert sum(meter.reason_s.values()) == pytest.approx(SECONDS, abs=0.1)
    # The reading of 59 s stands until 61.5 s.
    assert meter.reason_s[Reason.UNREADABLE] == pytest.approx(28.5, abs=0.2)
