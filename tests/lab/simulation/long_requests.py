"""Impact of long batch requests on realtime by length and reserve: the picture in docs/how-to/simulator.md.

python -m tests.lab.simulation.long_requests results.json

The command runs the simulations that are missing in the file and draws docs/images/long-requests.png.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.plot import FAINT, INK, PAPER
from dispatcher.lab.simulation.report import percentile
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin.trace import BUNDLED, load_trace
from tests.paths import DOCS

PICTURE = DOCS / "images" / "long-requests.png"
LENGTHS = {145: "#7fc8a9", 500: "#4f7cac", 1000: "#5f3dc4", 2000: "#d9480f", 4000: "#c92a2a"}
"""Tokens of a batch request, and the color of its curve."""
RESERVES = (0.05, 0.1, 0.2, 0.35, 0.5)
QUEUE_LIMIT = 8
SEED = 0

Cells = Mapping[str, Mapping[str, float]]


def run_simulations(path: Path) -> Cells:
    """Simulate each length at each reserve, write each result to the file, and return all."""
    cells: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    trace = load_trace(BUNDLED, slots=64)

    def run_cell(name: PolicyName, **scenario: Any) -> dict[str, float]:
        runs = [
            run_scenario(Scenario(seed=SEED, queue_limit=limit, **scenario), trace, name)
            for limit in (None, QUEUE_LIMIT)
        ]
        free, limited = runs
        return {
            "tokens_per_s": free.tokens / free.seconds,
            "wait_s": statistics.fmean(free.waits),
            "p99_s": percentile(free.waits, 0.99) or 0.0,
            "refused_per_1000": 1000 * limited.realtime_refused / len(trace.arrivals),
        }

    cells_to_run: dict[str, tuple[PolicyName, dict[str, Any]]] = {"none": (PolicyName.NONE, {})} | {
        f"{tokens}/{reserve:g}": (PolicyName.DISPATCHER, {"batch": BatchProfile(tokens), "reserve": reserve})
        for tokens in LENGTHS
        for reserve in RESERVES
    }
    for key, (name, scenario) in cells_to_run.items():
        if key not in cells:
            cells[key] = run_cell(name, **scenario)
            path.write_text(json.dumps(cells, indent=1) + "\n")
            print(key, {field: round(value, 3) for field, value in cells[key].items()}, flush=True)
    return cells


def draw_picture(cells: Cells, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.2), dpi=110, facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.08)
    panels = figure.subplots(1, 3)
    for panel, field, title in zip(
        panels,
        ("p99_s", "refused_per_1000", "tokens_per_s"),
        (
            "realtime wait for a slot, p99, s",
            f"refused realtime, per 1,000 (limit {QUEUE_LIMIT})",
            "batch tokens/s",
        ),
        strict=True,
    ):
        for tokens, color in LENGTHS.items():
            values = [cells[f"{tokens}/{reserve:g}"][field] for reserve in RESERVES]
            panel.plot(RESERVES, values, marker="o", color=color, label=f"{tokens:,} tokens")
        panel.axhline(
            cells["none"][field], color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="no batch work"
        )
        panel.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
        panel.set_xlabel("budget.reserve", color=FAINT, fontsize=9)
        panel.set_xticks(RESERVES)
        panel.tick_params(colors=FAINT, labelsize=8, length=0)
        panel.grid(visible=True, color="#e4e7eb", linewidth=0.6)
        panel.set_ylim(bottom=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    draw_picture(run_simulations(Path(sys.argv[1])), PICTURE)
