"""Slices compared with whole requests, a larger reserve, and eviction: the table in
docs/contributing/simulation.md, and its first rows in docs/how-to/slices.md.

python -m tests.lab.simulation.slices_comparison results.json

The command runs the simulations that are missing in the file and writes the table into the pages. All of them
play batch requests of 2,000 tokens on 64 slots with a reading each second.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.report import Row, build_row
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.sweep import choose_value, parse_target
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import BUNDLED, Trace, load_trace
from tests.paths import DOCS

PAGE, SUMMARY_PAGE = DOCS / "contributing" / "simulation.md", DOCS / "how-to" / "slices.md"
TABLE = re.compile(r"(?<=<!-- slices -->\n\n).*?(?=\n<!-- end of slices -->)", re.DOTALL)
SUMMARY = re.compile(r"(?<=<!-- figures -->\n\n).*?(?=\n<!-- end of figures -->)", re.DOTALL)
SLOTS, SLICE_TOKENS, PROCESSES = 64, 250, 2
STEPS = "0:10,100:45,200:10,300:45,400:10,500:45,600:10,700:45,800:10"
TRAFFIC = {"chat": "", "bursts": "--trace bursts", "steps": f"--set steps={STEPS}"}
"""Options of `simulate` for each kind of realtime traffic."""
SLICES: dict[str, Any] = {"slice_tokens": SLICE_TOKENS}
WAYS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "whole": ("", {}),
    "slices": (f"--slice {SLICE_TOKENS}", SLICES),
    "revoked slices": (
        f"--slice {SLICE_TOKENS} --set revokes_slices=true",
        {**SLICES, "revokes_slices": True},
    ),
    "evicted": ("--set evicts=true", {"evicts": True}),
    "evicted slices": (f"--slice {SLICE_TOKENS} --set evicts=true", {**SLICES, "evicts": True}),
    "revoked and evicted slices": (
        f"--slice {SLICE_TOKENS} --set revokes_slices=true --set evicts=true",
        {**SLICES, "revokes_slices": True, "evicts": True},
    ),
}
"""Ways to send batch requests, with the options of `simulate` and the fields of the scenario."""
HOLDBACKS = {
    "reserve for the p99 of slices": "slices",
    "reserve for the p99 of revoked slices": "revoked slices",
}
"""Whole requests with the reserve at which the p99 of the added wait is that of the other way."""
COARSE_RESERVES = [*(step / 10 for step in range(1, 10)), 0.99]
"""With the last one, no batch request fits on the slots."""
FINE_STEP = 0.02

Figures = dict[str, float]


def load_traffic(name: str, seed: int = 0) -> Trace:
    match name:
        case "chat":
            return load_trace(BUNDLED, slots=SLOTS)
        case "bursts":
            return made_up_traffic.make_burst_trace(seed)
        case _:
            levels = made_up_traffic.parse_steps(STEPS)
            return made_up_traffic.make_step_trace(levels, slots=SLOTS, seed=seed)


def run_way(traffic: str, policy: PolicyName = PolicyName.DISPATCHER, **changes: Any) -> Run:
    scenario = Scenario(slots=SLOTS, batch=BatchProfile(2000.0), **changes)
    return run_scenario(scenario, load_traffic(traffic), policy)


def list_figures(row: Row, reserve: float = 0.05) -> Figures:
    return {
        "tokens_per_s": row.batch_tokens_per_s,
        "wait_s": row.wait_mean_less_none_s or 0.0,
        "p99_s": row.wait_p99_less_none_s or 0.0,
        "reserve": reserve,
    }


def compare_ways(traffic: str, pool: ProcessPoolExecutor) -> dict[str, Figures]:
    """Return the figures of all ways with this traffic."""
    idle = pool.submit(run_way, traffic, PolicyName.NONE)
    running = {way: pool.submit(run_way, traffic, **fields) for way, (_, fields) in WAYS.items()}
    rows = {way: build_row(future.result(), None, idle.result()) for way, future in running.items()}
    figures = {way: list_figures(row) for way, row in rows.items()}
    coarse = list(run_reserves(traffic, COARSE_RESERVES, idle.result(), pool))
    for holdback, way in HOLDBACKS.items():
        figures[holdback] = find_reserve(traffic, figures[way]["p99_s"], coarse, idle.result(), pool)
    return figures


def run_reserves(
    traffic: str, reserves: Sequence[float], idle: Run, pool: ProcessPoolExecutor
) -> Iterator[tuple[float, Row]]:
    running = [pool.submit(run_way, traffic, reserve=reserve) for reserve in reserves]
    for reserve, future in zip(reserves, running, strict=True):
        yield reserve, build_row(future.result(), None, idle)


def find_reserve(
    traffic: str, p99_s: float, coarse: Sequence[tuple[float, Row]], idle: Run, pool: ProcessPoolExecutor
) -> Figures:
    """Return the figures of whole requests with the reserve that brings most tokens at this p99 at most."""
    target = parse_target(f"wait p99 <= {p99_s:.3f}")
    chosen = choose_value("reserve", coarse, target).value
    assert chosen is not None, "without batch requests, nothing is added to the wait"
    fine = [round(chosen - FINE_STEP * step, 2) for step in range(1, 5)]
    rows = [*coarse, *run_reserves(traffic, fine, idle, pool)]
    best = choose_value("reserve", rows, target).value
    assert best is not None
    return list_figures(dict(rows)[best], best)


def write_command(traffic: str, way: str, figures: Figures) -> str:
    options = f"--reserve {figures['reserve']:g}" if way in HOLDBACKS else WAYS[way][0]
    parts = ["--batch-tokens 2000", TRAFFIC[traffic], options, "--policy dispatcher"]
    return " ".join(["batch-dispatcher simulate", *filter(None, parts)])


def render_table(results: Mapping[str, Mapping[str, Figures]]) -> str:
    lines = [
        "| realtime | batch requests | reserve | tokens/s | of whole | wait added | ÷ | wait p99 added | ÷ |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for traffic, ways in results.items():
        whole = ways["whole"]
        for way, figures in ways.items():
            cells = [
                f"{figures['reserve']:g}",
                f"{figures['tokens_per_s']:,.0f}",
                f"{figures['tokens_per_s'] / whole['tokens_per_s']:.2f}",
                f"{figures['wait_s']:.3f} s",
                format_ratio(whole["wait_s"], figures["wait_s"]),
                f"{figures['p99_s']:.2f} s",
                format_ratio(whole["p99_s"], figures["p99_s"]),
            ]
            lines.append(f"| {traffic} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_summary(ways: Mapping[str, Figures]) -> str:
    """Return a table of the ways with one kind of traffic, without those that both slice and evict."""
    shown = ("whole", "slices", "revoked slices", "reserve for the p99 of slices", "evicted")
    lines = ["| batch requests | batch tokens/s | mean wait added | p99 added |", "|---|---:|---:|---:|"]
    for way in shown:
        tokens, wait, p99 = (ways[way][figure] for figure in ("tokens_per_s", "wait_s", "p99_s"))
        lines.append(f"| {way} | {tokens:,.0f} | {wait:.3f} s | {p99:.2f} s |")
    return "\n".join(lines) + "\n"


def write_tables(results: Mapping[str, Mapping[str, Figures]]) -> None:
    table, summary = render_table(results), render_summary(results["chat"])
    PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    SUMMARY_PAGE.write_text(SUMMARY.sub(lambda _: summary, SUMMARY_PAGE.read_text()))


def format_ratio(whole: float, other: float) -> str:
    if other < 0.0005:
        return "–"
    ratio = whole / other
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def main() -> None:
    path = Path(sys.argv[1])
    results: dict[str, dict[str, Figures]] = json.loads(path.read_text()) if path.exists() else {}
    with ProcessPoolExecutor(PROCESSES) as pool:
        for traffic in TRAFFIC:
            if traffic not in results:
                results[traffic] = compare_ways(traffic, pool)
                path.write_text(json.dumps(results, indent=1) + "\n")
    for traffic, ways in results.items():
        for way, figures in ways.items():
            print(write_command(traffic, way, figures))
    write_tables(results)


if __name__ == "__main__":
    main()
