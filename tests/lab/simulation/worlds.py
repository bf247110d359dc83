"""The simulated worlds that judge the limit algorithm: each is one command, and together they fill a table.

python -m tests.lab.simulation.worlds now.json    run all and write each result to the file
python -m tests.lab.simulation.worlds now.json --write  write docs/contributing/worlds.md from the file
python -m tests.lab.simulation.worlds now.json --before then.json  compare with another commit
python -m tests.lab.simulation.worlds now.json --only bursts --seeds 0,1   run these worlds

Worlds that are already in the file are not run again.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dispatcher.cli import app
from tests.paths import DOCS

DOCUMENT = DOCS / "contributing" / "worlds.md"
SEEDS = (0, 1, 2)
AGES = {
    "1 s": "--set scrape_s=1 --set lag_s=0.05",
    "5 s": "--set scrape_s=5 --set lag_s=1",
    "15 s": "--set scrape_s=15 --set lag_s=5",
}
"""Options for each age of the readings."""

Figures = Mapping[str, float]


@dataclass(frozen=True)
class World:
    """A world, and the command that simulates it."""

    name: str
    options: str

    @property
    def command(self) -> str:
        return f"batch-dispatcher simulate --policy dispatcher {self.options}".rstrip()


def vary_age(name: str, options: str = "") -> list[World]:
    return [World(f"{name}, {age}", f"{age_options} {options}".rstrip()) for age, age_options in AGES.items()]


CONCURRENCY = "--set detector=concurrency"
CHAPTERS: Mapping[str, Sequence[World]] = {
    "A pool with the configured capacity": [
        *vary_age("chat"),
        *vary_age("chat, no flow control", "--set detector=none"),
        *vary_age("bursts", "--trace bursts"),
        World("chat, 8 pods without flow control", "--set detector=none --set pods=8"),
        World(
            "chat, 8 pods known by a scrape of every 50 ms",
            "--set detector=none --set pods=8 --set scorer_scrape_s=0.05",
        ),
    ],
    "The same with a queue limit of eight requests": [
        *vary_age("chat, limit 8", f"--set queue_limit=8 {CONCURRENCY}"),
        *vary_age("bursts, limit 8", f"--trace bursts --set queue_limit=8 {CONCURRENCY}"),
        World(
            "chat on 512 slots, limit 8, 15 s",
            f"--slots 512 --set copies=8 --set scrape_s=15 --set lag_s=5 --set queue_limit=8 {CONCURRENCY}",
        ),
    ],
    "A pool smaller than configured": [
        *vary_age(
            "chat, 64 of 192, limit 8", f"--slots 192 --set true_slots=64 --set queue_limit=8 {CONCURRENCY}"
        ),
        *vary_age(
            "bursts, 64 of 192, limit 8",
            f"--trace bursts --slots 192 --set true_slots=64 --set queue_limit=8 {CONCURRENCY}",
        ),
        World("chat, 64 become 48, no flow control", "--set slots_at=0:48 --set detector=none"),
        World(
            "chat, 64 become 48, realtime first",
            "--set slots_at=0:48 --set detector=none --set order=realtime-first",
        ),
        World("chat, 64 become 48 halfway", "--set slots_at=450:48"),
        World("chat, 64 become 48, request count", f"--set slots_at=0:48 {CONCURRENCY}"),
    ],
    "A pool with unknown capacity": [
        *vary_age("chat, 3 pods", "--set has_capacity_setting=false --slots 63 --set pods=3"),
        *vary_age(
            "bursts, 3 pods", "--set has_capacity_setting=false --trace bursts --slots 63 --set pods=3"
        ),
        World(
            "chat, 3 pods, no flow control",
            "--set has_capacity_setting=false --slots 63 --set pods=3 --set detector=none",
        ),
        World(
            "chat, 3 pods, request count",
            f"--set has_capacity_setting=false --slots 63 --set pods=3 {CONCURRENCY}",
        ),
        World(
            "chat, 3 pods, only model servers",
            "--set has_capacity_setting=false --slots 63 --set pods=3 --set detector=servers",
        ),
        World(
            "2,000 tokens, 3 pods",
            "--set has_capacity_setting=false --slots 63 --set pods=3 --batch-tokens 2000",
        ),
    ],
    "Long requests": [
        *vary_age("2,000 tokens", "--batch-tokens 2000"),
        World(
            "2,000 tokens, no flow control, 15 s", f"{AGES['15 s']} --batch-tokens 2000 --set detector=none"
        ),
        World("2,000 tokens, a reserve of 0.2", "--batch-tokens 2000 --reserve 0.2"),
        World("2,000 tokens, a reserve of 0.35", "--batch-tokens 2000 --reserve 0.35"),
    ],
    "Short requests": [
        World("20 ms", "--set batch_seconds=0.02 --seconds 300"),
        World("100 ms", "--set batch_seconds=0.1 --seconds 300"),
        World(
            "20 ms, realtime 0, 40, then 20",
            "--set batch_seconds=0.02 --set steps=0:0,10:40,30:20 --seconds 90",
        ),
    ],
    "Transit times": [
        World(
            f"an idle pool of {slots} slots, {travel * 1000:.0f} ms",
            f"--trace idle --seconds 300 --slots {slots} --set transit_s={travel} {CONCURRENCY} "
            "--set flush_s=0",
        )
        for slots in (64, 512)
        for travel in (0.02, 0.03, 0.05)
    ]
    + [World(f"chat, {travel * 1000:.0f} ms", f"--set transit_s={travel}") for travel in (0.05, 0.2)],
    "Clocks, scrapes and pickers": [
        World(
            "the queue's clock steps back 600 s",
            f"--set queue_limit=8 {CONCURRENCY} --set clock_steps=300:-600",
        ),
        World(
            "the queue's clock steps ahead 600 s",
            f"--set queue_limit=8 {CONCURRENCY} --set clock_steps=300:600",
        ),
        World(
            "the same step back, after refusals",
            f"--trace bursts --set queue_limit=8 {CONCURRENCY} --set clock_steps=300:-600 --seconds 600",
        ),
        World("5 % of scrapes are lost, 1 s", f"{AGES['1 s']} --set lost=0.05"),
        World("5 % of scrapes are lost, 5 s", f"{AGES['5 s']} --set lost=0.05"),
        World("20 % of scrapes are lost, 5 s", f"{AGES['5 s']} --set lost=0.2"),
        World("two active pickers", f"--set pickers=2 {CONCURRENCY} --set queue_limit=8"),
        World(
            "two active pickers, only saturation",
            f"--set pickers=2 {CONCURRENCY} --set signals=saturation --set queue_limit=8",
        ),
        World("a picker that counts tokens", "--set detector=tokens --set queue_limit=8"),
        World(
            "a picker that counts tokens, only saturation",
            "--set detector=tokens --set signals=saturation --set queue_limit=8",
        ),
        World(
            "only averages", "--set detector=none --set shows_running=false --set scrape_s=5 --set lag_s=1"
        ),
        World(
            "only averages, flushed just before each scrape",
            f"--set detector=none --set shows_running=false {AGES['5 s']} --set flush_phase_s=0",
        ),
        World("readings known 5 s after the sample", "--set scrape_s=5 --set lag_s=5"),
        World("the same, timestamps 50 ms late", "--set scrape_s=5 --set lag_s=5 --set stamp_s=0.05"),
        World("the same, timestamps 200 ms early", "--set scrape_s=5 --set lag_s=5 --set stamp_s=-0.2"),
    ],
}
WORLDS = [world for worlds in CHAPTERS.values() for world in worlds]

INTRODUCTION = """\
Each world is one command of the [simulator](../how-to/simulator.md) and runs for 900 s unless it says
otherwise. The figures are means over `--seed` {seeds}. `wait`, `p99` and `realtime 429` are those of
realtime requests, minus their values without batch work. `closed` is the time that the gate was closed.
A figure that changes from one commit to the next shows the effect of the change.
"""

COLUMNS = {
    "utilization": ("utilization", ".3f"),
    "over": ("overshoot_mean", ".2f"),
    "wait, s": ("wait_mean_less_none_s", "+.3f"),
    "p99, s": ("wait_p99_less_none_s", "+.2f"),
    "realtime 429": ("realtime_refused_less_none", "+,.0f"),
    "429 per 1,000": ("refused_per_1000", ".1f"),
    "closed, s": ("closed", ".0f"),
}


def run_world(world: World, seed: int) -> Figures:
    """Run a world once and return its figures."""
    printed = io.StringIO()
    arguments = [*shlex.split(world.command)[1:], "--seed", str(seed), "--set", "processes=1", "--json"]
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        app(arguments, prog_name="batch-dispatcher", standalone_mode=False)
    (row,) = json.loads(printed.getvalue())["rows"]
    row["closed"] = sum(row["closed_s"].values())
    return {field: float(row[field] or 0.0) for field, _ in COLUMNS.values()}


def average_runs(runs: Sequence[Figures]) -> Figures:
    return {field: round(statistics.fmean(run[field] for run in runs), 4) for field, _ in COLUMNS.values()}


def run_worlds(worlds: Sequence[World], seeds: Sequence[int], path: Path, processes: int) -> None:
    """Run each world with all seeds and write the means to the file after each world, since all take long."""
    results = load_results(path)
    with ProcessPoolExecutor(processes) as pool:
        for world in worlds:
            if world.name in results["worlds"] and results["seeds"] == list(seeds):
                continue
            figures = results["worlds"][world.name] = average_runs(
                list(pool.map(partial(run_world, world), seeds))
            )
            results["seeds"] = list(seeds)
            path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            print(f"{world.name:45} {format_cells(figures, None)}", flush=True)


def load_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"seeds": [], "worlds": {}}


def format_cells(now: Figures, then: Figures | None) -> str:
    def format_cell(field: str, spec: str) -> str:
        shown = format(now[field], spec)
        return shown if then is None else f"{format(then[field], spec)} → {shown}"

    return " | ".join(format_cell(field, spec) for field, spec in COLUMNS.values())


def render_page(
    results: Mapping[str, Figures], seeds: Sequence[int], before: Mapping[str, Figures] | None = None
) -> str:
    """Return the page: one table per chapter."""
    seed_list = ", ".join(map(str, seeds))
    parts = [
        "# Simulated worlds that judge the limit algorithm\n",
        "<!-- written by python -m tests.lab.simulation.worlds -->\n",
        INTRODUCTION.format(seeds=seed_list),
    ]
    for chapter, worlds in CHAPTERS.items():
        rows = [world for world in worlds if world.name in results]
        if not rows:
            continue
        parts.append(f"## {chapter}\n\n| world | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
        parts += [
            f"| {world.name} | {format_cells(results[world.name], (before or {}).get(world.name))} |"
            for world in rows
        ]
        parts.append("\n```sh")
        parts += [f"{world.command}  # {world.name}" for world in rows]
        parts.append("```\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.write or arguments.before:
        results = load_results(arguments.file)
        shown = render_page(
            results["worlds"],
            results["seeds"],
            load_results(arguments.before)["worlds"] if arguments.before else None,
        )
        DOCUMENT.write_text(shown) if arguments.write else print(shown)
    else:
        worlds = [world for world in WORLDS if arguments.only in world.name]
        run_worlds(
            worlds, [int(seed) for seed in arguments.seeds.split(",")], arguments.file, arguments.processes
        )


if __name__ == "__main__":
    main()
