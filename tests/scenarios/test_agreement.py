"""The simulator and the live world agree: the same traffic, once in virtual time, once with real processes.

Harvest within 5 % and realtime's mean wait within 20 %. One run is one draw, whose wait differs by an eighth
from the next one's, so both are the mean over some, each with readings at other moments of the traffic. The
machine must have time for it: events that come late are another pool.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import pytest

from dispatcher.core.requests.request import encode_member
from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import BUNDLED, load_trace
from tests.scenarios.processes import Stage
from tests.support import wait_until_sync

SLOTS, FROM_S = 64, 450.0
WARM_S, MEASURED_S = 60.0, 360.0
SEEDS = range(8)
LIVES = 4
LONG = BatchProfile(2000)
WORLDS: dict[str, dict[str, Any]] = {
    "as it is by default": {"scrape_s": 5.0},
    "first come": {"scrape_s": 15.0, "detector": Detector.NONE},
    "2,000 tokens": {"batch": LONG},
    "2,000 tokens, first come": {"batch": LONG, "detector": Detector.NONE},
}


def simulated(setting: dict[str, Any]) -> tuple[float, float]:
    """Batch tokens per second and realtime's mean wait, over the seconds that are measured."""
    rates, waits = [], []
    for seed in SEEDS:
        earlier_s = seed / len(SEEDS) * setting.get("scrape_s", 1.0)
        trace = made_up_traffic.cut_start(load_trace(BUNDLED, slots=SLOTS), FROM_S - earlier_s)
        warm_s = WARM_S + earlier_s
        first, whole = (
            run_scenario(
                Scenario(seed=seed, lag_s=0.01, max_age_s=60.0, seconds=seconds, **setting),
                trace,
                PolicyName.DISPATCHER,
            )
            for seconds in (warm_s, warm_s + MEASURED_S)  # the first is the beginning of the second
        )
        rates.append((whole.tokens - first.tokens) / MEASURED_S)
        waits.append(statistics.fmean(whole.waits[len(first.waits) :]))
    return statistics.fmean(rates), statistics.fmean(waits)


class Life:
    """One live world, its dispatcher and its queue, among several at the same time."""

    def __init__(self, stage: Stage, number: int, setting: dict[str, Any]) -> None:
        pool = f"life-{number}"
        batch = setting.get("batch", BatchProfile())
        flow_control = setting.get("detector", Detector.UTILIZATION) is not Detector.NONE
        draws = random.Random(f"{number}/batch")
        deadline = int(time.time() + 3600)
        members = {
            encode_member(f"batch-{n:08d}", {"max_tokens": batch.draw(draws)}, deadline): float(deadline)
            for n in range(6000)
        }
        stage.producer.client.zadd(f"batch:{{{pool}}}:requests", members)
        world = stage.world(
            pool=pool,
            slots=SLOTS,
            seconds="null",
            flow_control=str(flow_control).lower(),
            detector="utilization",
            kv_at_full=0.1,
            trace=BUNDLED,
            trace_from_s=FROM_S,
        )
        self.world = world
        self.begun = time.monotonic()
        self.settings = stage.settings(
            world,
            max_sys=None,
            pool={"name": pool},
            budget={"per_endpoint": SLOTS, "reserve": 0.05},
            signals={"interval_s": setting.get("scrape_s", 1.0), "max_age_s": 60.0},
        )

    def measured(self) -> tuple[float, float]:
        """Batch tokens per second and realtime's mean wait since the measurement began."""
        pool = self.world.observed()["pool"]
        return pool["tokens"]["batch"] / MEASURED_S, pool["wait_s"]["realtime"]["mean"]


def lived(stage: Stage, setting: dict[str, Any]) -> tuple[float, float]:
    """The same as `simulated`, of the processes."""
    lives = []
    for number in range(LIVES):
        life = Life(stage, number, setting)
        at(life.begun + number / LIVES * setting.get("scrape_s", 1.0))  # its readings fall elsewhere
        stage.dispatcher(life.settings)
        lives.append(life)
    for life in lives:
        at(life.begun + WARM_S)
        life.world.control(restart_measurement=True)
    found = []
    for life in lives:
        at(life.begun + WARM_S + MEASURED_S)
        found.append(life.measured())
    print(f"each: {', '.join(f'{rate:.0f} tokens/s, {wait_s:.3f} s' for rate, wait_s in found)}")
    rates, waits = zip(*found, strict=True)
    return statistics.fmean(rates), statistics.fmean(waits)


def at(moment: float) -> None:
    left_s = moment - time.monotonic()
    if left_s > 0:
        wait_until_sync(lambda: time.monotonic() >= moment, left_s + 1.0, every_s=0.02)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WORLDS)
def test_simulator_and_live_world_agree(stage: Stage, name: str) -> None:
    rate, wait_s = simulated(WORLDS[name])
    live_rate, live_wait_s = lived(stage, WORLDS[name])
    print(
        f"{name}: {live_rate:.0f} tokens/s live, {rate:.0f} simulated; "
        f"realtime waits {live_wait_s:.3f} s live, {wait_s:.3f} s simulated"
    )
    assert live_rate == pytest.approx(rate, rel=0.05)
    assert live_wait_s == pytest.approx(wait_s, rel=0.2)
