"""Simulations of pools with unknown capacity, each compared with the same pool with the capacity configured.

python -m tests.lab.simulation.unknown_capacity now.json    run all and write each result to the file
python -m tests.lab.simulation.unknown_capacity now.json --only live    run pools named like this
python -m tests.lab.simulation.unknown_capacity now.json --before then.json    compare with another commit

Pools that are already in the file are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.report import percentile
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin.model import (
    BATCH_CONTEXT,
    BATCH_SPREAD,
    BATCH_TOKENS,
    compute_work_s,
    draw_tokens,
)
from dispatcher.lab.standin.trace import RealtimeRequest, Trace

MEAN_WORK_S = compute_work_s(BATCH_CONTEXT, BATCH_TOKENS)
LONG, SHORT = BatchProfile(1500), BatchProfile()
BURST_INTERVAL_S, BURST_LENGTH_S = 20.0, 1.5
FOUND_SHARE = 0.9
"""Share of the real capacity at which the estimate counts as found."""

Figures = Mapping[str, float]


def make_realtime_trace(slots: int, level: float, seconds: float, seed: int = 0) -> Trace:
    """Return requests that arrive at random and would take `level` of the slots of a full pool.

    The pool starts with the requests that would still be running without batch work, each with its remaining
    work. Long requests are more frequent among them: at a random moment more of them are running.
    """
    random_numbers, at, arrivals = random.Random(f"{seed}/realtime"), 0.0, list[RealtimeRequest]()
    for _ in range(round(slots * (level / 2) / (1 - level / 2))):
        tokens = draw_tokens(random_numbers, BATCH_TOKENS * math.exp(BATCH_SPREAD**2))
        arrivals.append(
            RealtimeRequest(0.0, compute_work_s(BATCH_CONTEXT, tokens) * random_numbers.random(), tokens)
        )
    per_s = level * slots / (2 * MEAN_WORK_S)
    while (at := at + random_numbers.expovariate(per_s)) < seconds:
        tokens = draw_tokens(random_numbers)
        arrivals.append(RealtimeRequest(at, compute_work_s(BATCH_CONTEXT, tokens), tokens))
    return Trace(f"{level:.0%}", arrivals, seconds)


def make_burst_trace(slots: int, seconds: float, seed: int = 0) -> Trace:
    """Return traffic that takes a tenth of the slots, and bursts of half of them every BURST_INTERVAL_S."""
    random_numbers = random.Random(f"{seed}/bursts")
    arrivals = list(make_realtime_trace(slots, 0.1, seconds, seed).arrivals)
    at = 0.0
    while (at := at + random_numbers.expovariate(1 / BURST_INTERVAL_S)) < seconds:
        for _ in range(slots // 2):
            tokens = draw_tokens(random_numbers)
            arrivals.append(
                RealtimeRequest(
                    at + random_numbers.expovariate(1 / BURST_LENGTH_S),
                    compute_work_s(BATCH_CONTEXT, tokens),
                    tokens,
                )
            )
    return Trace("bursts", sorted(arrivals, key=lambda arrival: arrival.arrives_at), seconds)


@dataclass(frozen=True)
class Pool:
    """A pool, its realtime traffic, and how the dispatcher reads its state."""

    name: str
    slots: int
    pods: int
    level: float | None
    """Share of the slots that realtime requests take. `None` for bursts."""
    setting: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 600.0
    seeds: Sequence[int] = (0, 1, 2)

    def run(self, *, has_capacity_setting: bool, seed: int = 0) -> Run:
        setting = Scenario(
            slots=self.slots,
            pods=self.pods,
            seconds=self.seconds,
            seed=seed,
            has_capacity_setting=has_capacity_setting,
            **self.setting,
        )
        trace = (
            make_burst_trace(self.slots, self.seconds, seed)
            if self.level is None
            else make_realtime_trace(self.slots, self.level, self.seconds, seed)
        )
        return run_scenario(setting, trace, PolicyName.DISPATCHER, sample_interval_s=0.5)


PODS_BY_SLOTS = {8: 1, 48: 3, 512: 8, 4000: 50}
LEVELS: Mapping[str, float | None] = {"10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "bursts": None}
PICKER_METRICS: Mapping[str, Mapping[str, Any]] = {
    "live": {},
    "averages": {"shows_server_queues": False},
}
DETECTORS: Mapping[str, Mapping[str, Any]] = {
    "concurrency": {"detector": Detector.CONCURRENCY},
    "concurrency, averages": {"detector": Detector.CONCURRENCY, "shows_server_queues": False},
    "composite": {"detector": Detector.COMPOSITE},
    "tokens": {"detector": Detector.TOKENS},
    "no flow control": {"detector": Detector.NONE},
    "no flow control, averages": {"detector": Detector.NONE, "shows_server_queues": False},
    "two pickers": {"pickers": 2},
    "vLLM pages": {"detector": Detector.SERVERS},
    "Prometheus, 1 s": {"scrape_s": 1.0, "lag_s": 0.5},
    "Prometheus, 5 s": {"scrape_s": 5.0, "lag_s": 1.0},
    "Prometheus, 15 s": {"scrape_s": 15.0, "lag_s": 1.0},
    "Prometheus, 60 s": {"scrape_s": 60.0, "lag_s": 1.0, "max_age_s": 180.0},
}
POOLS = [
    Pool(
        f"{slots} slots, realtime {level}, {batch} batch, {metrics}", slots, PODS_BY_SLOTS[slots], share,
        {**scenario_changes, "batch": LONG if batch == "long" else SHORT},
        seconds=300.0 if slots == 4000 and batch == "short" else 600.0,
        seeds=(0, 1, 2) if slots < 512 else (0,),
    )
    for slots, (level, share), batch, (metrics, scenario_changes) in itertools.product(
        PODS_BY_SLOTS, LEVELS.items(), ("short", "long"), PICKER_METRICS.items()
    )
] + [
    Pool(
        f"{slots} slots, realtime {level}, {batch} batch, {name}", slots, PODS_BY_SLOTS[slots], LEVELS[level],
        {**scenario_changes, "batch": LONG if batch == "long" else SHORT},
        seconds=600.0 if scenario_changes.get("scrape_s", 0.0) > 5.0 else 300.0, seeds=(0,),
    )
    for (name, scenario_changes), slots, level, batch in itertools.product(
        DETECTORS.items(), PODS_BY_SLOTS, LEVELS, ("short", "long")
    )
    if slots < 512 or (slots == 512 and level in ("50 %", "bursts")) or (level, batch) == ("50 %", "long")
]  # fmt: skip

COLUMNS = {
    "p95": ".2f",
    "p95, set": ".2f",
    "p95 ratio": ".3f",
    "most": ".2f",
    "most, set": ".2f",
    "found, s": ".1f",
    "tokens": ".3f",
}


def average_over_seeds(pool: Pool) -> Figures:
    """Return the mean over the seeds, but the longest time until the capacity is found."""
    runs = [compare_with_known_capacity(pool, seed) for seed in pool.seeds]
    return {
        column: (max if column == "found, s" else statistics.fmean)(run[column] for run in runs)
        for column in COLUMNS
    }


def compare_with_known_capacity(pool: Pool, seed: int) -> Figures:
    """Run the pool with the capacity unknown and with the capacity set, and compare both."""
    unknown, known = (pool.run(has_capacity_setting=known, seed=seed) for known in (False, True))
    p95, right = percentile(unknown.latencies, 0.95) or 0.0, percentile(known.latencies, 0.95) or 0.0
    found = [m.state.at for m in unknown.samples if m.capacity and m.capacity >= FOUND_SHARE * pool.slots]
    return {
        "p95": p95,
        "p95, set": right,
        "p95 ratio": p95 / right,
        "most": find_peak_while_sending(unknown) / pool.slots,
        "most, set": find_peak_while_sending(known) / pool.slots,
        "found, s": found[0] if found else float("inf"),
        "tokens": unknown.tokens / known.tokens if known.tokens else 1.0,
    }


def find_peak_while_sending(run: Run) -> int:
    """Return the largest number of requests in the pool among the moments at which batch requests were added.

    Realtime requests that arrive later, while long batch requests hold their slots, do not count.
    """
    states = [moment.state for moment in run.samples]
    return max(
        (
            now.running + now.waiting
            for before, now in itertools.pairwise(states)
            if now.batch_running + now.batch_waiting > before.batch_running + before.batch_waiting
        ),
        default=0,
    )


def format_row(name: str, now: Figures, then: Figures | None = None) -> str:
    cells = (
        format(now[column], spec)
        if then is None
        else f"{format(then[column], spec)} → {format(now[column], spec)}"
        for column, spec in COLUMNS.items()
    )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    found: dict[str, Figures] = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    if arguments.before:
        then = json.loads(arguments.before.read_text())
        print(f"| pool | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
        for name, now in found.items():
            print(format_row(name, now, then.get(name)))
        return
    pools = [pool for pool in POOLS if arguments.only in pool.name and pool.name not in found]
    with ProcessPoolExecutor(arguments.processes) as workers:
        for pool, average in zip(pools, workers.map(average_over_seeds, pools), strict=True):
            found[pool.name] = average
            arguments.file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            print(format_row(pool.name, average), flush=True)


if __name__ == "__main__":
    main()
