"""The simulator and real processes agree: the same traffic is run in virtual time and with real processes.

The rates of batch tokens agree within 5 %, and the mean waits of realtime requests within 20 %. The wait
differs by an eighth between runs, so both sides are means over several runs, each of which reads the pool at
other moments of the traffic. The machine must be idle: late events would change the simulated pool.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import BUNDLED, load_trace
from dispatcher.requests.request import encode_member
from tests.scenarios.processes import Stage
from tests.support import wait_until_sync

SLOTS, TRACE_START_S = 64, 450.0
WARMUP_S, MEASURED_S = 60.0, 360.0
SEEDS = range(8)
LIVE_RUNS = 4
LONG_REQUESTS = BatchProfile(2000)
SCENARIOS: dict[str, dict[str, Any]] = {
    "default settings": {"scrape_s": 5.0},
    "first come, first served": {"scrape_s": 15.0, "detector": Detector.NONE},
    "2,000 tokens": {"batch": LONG_REQUESTS},
    "2,000 tokens, first come, first served": {"batch": LONG_REQUESTS, "detector": Detector.NONE},
}


def run_simulation(setting: dict[str, Any]) -> tuple[float, float]:
    """Return batch tokens per second and the mean wait of realtime requests, both while measured."""
    rates, waits = [], []
    for seed in SEEDS:
        offset_s = seed / len(SEEDS) * setting.get("scrape_s", 1.0)
        trace = made_up_traffic.cut_start(load_trace(BUNDLED, slots=SLOTS), TRACE_START_S - offset_s)
        warmup_s = WARMUP_S + offset_s
        warmup_run, whole_run = (
            run_scenario(
                Scenario(seed=seed, lag_s=0.01, max_age_s=60.0, seconds=seconds, **setting),
                trace,
                PolicyName.DISPATCHER,
            )
            for seconds in (
                warmup_s,
                warmup_s + MEASURED_S,
            )  # the first run equals the beginning of the second
        )
        rates.append((whole_run.tokens - warmup_run.tokens) / MEASURED_S)
        waits.append(statistics.fmean(whole_run.waits[len(warmup_run.waits) :]))
    return statistics.fmean(rates), statistics.fmean(waits)


class LiveRun:
    """World, dispatcher settings and queue of one run of several that run at the same time."""

    def __init__(self, stage: Stage, number: int, setting: dict[str, Any]) -> None:
        pool = f"run-{number}"
        batch = setting.get("batch", BatchProfile())
        flow_control = setting.get("detector", Detector.UTILIZATION) is not Detector.NONE
        random_source = random.Random(f"{number}/batch")
        deadline = int(time.time() + 3600)
        members = {
            encode_member(
                f"batch-{n:08d}", {"max_tokens": batch.draw_size(random_source)[1]}, deadline
            ): float(deadline)
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
            trace_from_s=TRACE_START_S,
        )
        self.world = world
        self.started_at = time.monotonic()
        self.settings = stage.settings(
            world,
            max_sys=None,
            pool={"name": pool},
            budget={"per_endpoint": SLOTS, "reserve": 0.05},
            signals={"interval_s": setting.get("scrape_s", 1.0), "max_age_s": 60.0},
        )

    def get_figures(self) -> tuple[float, float]:
        """Return batch tokens per second and the mean realtime wait since the measurement began."""
        pool = self.world.observed()["pool"]
        return pool["tokens"]["batch"] / MEASURED_S, pool["wait_s"]["realtime"]["mean"]


def run_live(stage: Stage, setting: dict[str, Any]) -> tuple[float, float]:
    """Return the same figures as `run_simulation`, measured with real processes."""
    runs = []
    for number in range(LIVE_RUNS):
        run = LiveRun(stage, number, setting)
        wait_until_time(
            run.started_at + number / LIVE_RUNS * setting.get("scrape_s", 1.0)
        )  # its readings are taken at other moments
        stage.dispatcher(run.settings)
        runs.append(run)
    for run in runs:
        wait_until_time(run.started_at + WARMUP_S)
        run.world.control(restart=True)
    results = []
    for run in runs:
        wait_until_time(run.started_at + WARMUP_S + MEASURED_S)
        results.append(run.get_figures())
    print(f"each: {', '.join(f'{rate:.0f} tokens/s, {wait_s:.3f} s' for rate, wait_s in results)}")
    rates, waits = zip(*results, strict=True)
    return statistics.fmean(rates), statistics.fmean(waits)


def wait_until_time(moment: float) -> None:
    remaining_s = moment - time.monotonic()
    if remaining_s > 0:
        wait_until_sync(lambda: time.monotonic() >= moment, remaining_s + 1.0, every_s=0.02)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_simulator_agrees_with_real_processes(stage: Stage, name: str) -> None:
    rate, wait_s = run_simulation(SCENARIOS[name])
    live_rate, live_wait_s = run_live(stage, SCENARIOS[name])
    print(
        f"{name}: {live_rate:.0f} tokens/s live, {rate:.0f} simulated; "
        f"realtime waits {live_wait_s:.3f} s live, {wait_s:.3f} s simulated"
    )
    assert live_rate == pytest.approx(rate, rel=0.05)
    assert live_wait_s == pytest.approx(wait_s, rel=0.2)
