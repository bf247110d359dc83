"""Pools whose capacity nobody tells the dispatcher, each beside the same pool with the capacity set right.

python -m tests.lab.simulation.unknown now.json    run all, write figures as they come
python -m tests.lab.simulation.unknown now.json --only live    run those whose name has this in it
python -m tests.lab.simulation.unknown now.json --before then.json compare with another commit

What is in the file already is not run again.
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
BURST_EVERY_S, BURST_S = 20.0, 1.5
FOUND = 0.9
"""The capacity counts as found when the estimate reaches this share of it."""

Figures = Mapping[str, float]


def realtime(slots: int, level: float, seconds: float, seed: int = 0) -> Trace:
    """Requests that arrive at random and would take `level` of the slots of a full pool.

    Those that would have come before and would still run in the pool without batch work are there at the
    start, with what is left of their work: whoever looks at random finds a long request more often than a
    short one.
    """
    draws, at, arrivals = random.Random(f"{seed}/realtime"), 0.0, list[RealtimeRequest]()
    for _ in range(round(slots * (level / 2) / (1 - level / 2))):
        tokens = draw_tokens(draws, BATCH_TOKENS * math.exp(BATCH_SPREAD**2))
        arrivals.append(RealtimeRequest(0.0, compute_work_s(BATCH_CONTEXT, tokens) * draws.random(), tokens))
    per_s = level * slots / (2 * MEAN_WORK_S)
    while (at := at + draws.expovariate(per_s)) < seconds:
        tokens = draw_tokens(draws)
        arrivals.append(RealtimeRequest(at, compute_work_s(BATCH_CONTEXT, tokens), tokens))
    return Trace(f"{level:.0%}", arrivals, seconds)


def bursts(slots: int, seconds: float, seed: int = 0) -> Trace:
    """A tenth of the slots all the time, and every BURST_EVERY_S half of them within BURST_S."""
    draws = random.Random(f"{seed}/bursts")
    arrivals = list(realtime(slots, 0.1, seconds, seed).arrivals)
    at = 0.0
    while (at := at + draws.expovariate(1 / BURST_EVERY_S)) < seconds:
        for _ in range(slots // 2):
            tokens = draw_tokens(draws)
            arrivals.append(
                RealtimeRequest(
                    at + draws.expovariate(1 / BURST_S), compute_work_s(BATCH_CONTEXT, tokens), tokens
                )
            )
    return Trace("bursts", sorted(arrivals, key=lambda each: each.arrives_at), seconds)


@dataclass(frozen=True)
class Pool:
    """A pool, its realtime traffic, and how its state is seen."""

    name: str
    slots: int
    pods: int
    level: float | None
    """Share of the slots that realtime takes. `None`: bursts."""
    setting: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 600.0
    seeds: Sequence[int] = (0, 1, 2)

    def play(self, *, capacity_set: bool, seed: int = 0) -> Run:
        setting = Scenario(
            slots=self.slots,
            pods=self.pods,
            seconds=self.seconds,
            seed=seed,
            has_capacity_setting=capacity_set,
            **self.setting,
        )
        trace = (
            bursts(self.slots, self.seconds, seed)
            if self.level is None
            else realtime(self.slots, self.level, self.seconds, seed)
        )
        return run_scenario(setting, trace, PolicyName.DISPATCHER, sample_interval_s=0.5)


PODS = {8: 1, 48: 3, 512: 8, 4000: 50}
LEVELS: Mapping[str, float | None] = {"10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "bursts": None}
SEEN: Mapping[str, Mapping[str, Any]] = {
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
        f"{slots} slots, realtime {level}, {batch} batch, {seen}", slots, PODS[slots], share,
        {**how, "batch": LONG if batch == "long" else SHORT},
        seconds=300.0 if slots == 4000 and batch == "short" else 600.0,
        seeds=(0, 1, 2) if slots < 512 else (0,),
    )
    for slots, (level, share), batch, (seen, how) in itertools.product(
        PODS, LEVELS.items(), ("short", "long"), SEEN.items()
    )
] + [
    Pool(
        f"{slots} slots, realtime {level}, {batch} batch, {name}", slots, PODS[slots], LEVELS[level],
        {**how, "batch": LONG if batch == "long" else SHORT},
        seconds=600.0 if how.get("scrape_s", 0.0) > 5.0 else 300.0, seeds=(0,),
    )
    for (name, how), slots, level, batch in itertools.product(
        DETECTORS.items(), PODS, LEVELS, ("short", "long")
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


def figures(pool: Pool) -> Figures:
    """The mean over the seeds; the time until the capacity is found is the longest."""
    runs = [compared(pool, seed) for seed in pool.seeds]
    return {
        column: (max if column == "found, s" else statistics.fmean)(run[column] for run in runs)
        for column in COLUMNS
    }


def compared(pool: Pool, seed: int) -> Figures:
    """The pool with the capacity unknown, beside the same pool with the capacity set."""
    unknown, known = (pool.play(capacity_set=known, seed=seed) for known in (False, True))
    p95, right = percentile(unknown.latencies, 0.95) or 0.0, percentile(known.latencies, 0.95) or 0.0
    found = [m.state.at for m in unknown.samples if m.capacity and m.capacity >= FOUND * pool.slots]
    return {
        "p95": p95,
        "p95, set": right,
        "p95 ratio": p95 / right,
        "most": most_while_sending(unknown) / pool.slots,
        "most, set": most_while_sending(known) / pool.slots,
        "found, s": found[0] if found else float("inf"),
        "tokens": unknown.tokens / known.tokens if known.tokens else 1.0,
    }


def most_while_sending(run: Run) -> int:
    """The most requests in the pool at any moment at which batch work had become more. What realtime adds
    later, while long batch requests hold their slots, is not counted."""
    states = [moment.state for moment in run.samples]
    return max(
        (
            now.running + now.waiting
            for before, now in itertools.pairwise(states)
            if now.batch_running + now.batch_waiting > before.batch_running + before.batch_waiting
        ),
        default=0,
    )


def show(name: str, now: Figures, then: Figures | None = None) -> str:
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
    given = parser.parse_args()
    found: dict[str, Figures] = json.loads(given.file.read_text()) if given.file.exists() else {}
    if given.before:
        then = json.loads(given.before.read_text())
        print(f"| pool | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
        for name, now in found.items():
            print(show(name, now, then.get(name)))
        return
    pools = [pool for pool in POOLS if given.only in pool.name and pool.name not in found]
    with ProcessPoolExecutor(given.processes) as workers:
        for pool, made in zip(pools, workers.map(figures, pools), strict=True):
            found[pool.name] = made
            given.file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            print(show(pool.name, made), flush=True)


if __name__ == "__main__":
    main()
