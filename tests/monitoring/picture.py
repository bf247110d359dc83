"""Draw the queries of the dashboard over some minutes of a scripted scenario: `make picture`.

The picture shows the answers of Prometheus to the dashboard's queries, with its layout, titles and legends;
it is not drawn by Grafana. Two dispatchers and a stand-in for gateway, picker and pool run; Redis and
Prometheus are real.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from tests.monitoring.chart_files import Query, load_dashboard
from tests.monitoring.prometheus import Prometheus, TimeSeries
from tests.queue.servers import server
from tests.scenarios.processes import Stage, World
from tests.support import has_passed, wait_until_sync

STEP_S = 1.0
TEXT_COLOUR, MUTED_COLOUR, BACKGROUND_COLOUR, PANEL_COLOUR = "#1f2933", "#7b8794", "#f4f5f7", "#ffffff"
CAPTION = (
    "Drawn from the answers of a real Prometheus to the queries of this dashboard (one scrape per second), "
    "while two dispatchers ran a script with a stand-in for gateway and pool. Not drawn by Grafana."
)
REFUSALS = {"answer": {"kind": "status", "status": 429, "reason": "rejected-saturated"}, "share": 0.3}
ANSWER = json.dumps({"choices": [], "usage": {"prompt_tokens": 24, "completion_tokens": 32}})
PAYLOAD = json.dumps({"prompt": "hi", "max_tokens": 32, "sim": {"body": ANSWER}}).encode()
"""The default answers of the stand-in have no token counts."""
SCRIPT: list[tuple[float, str, Mapping[str, Any]]] = [
    (15, "idle", {}),
    (30, "batch work, quiet pool", {"realtime": 6}),
    (25, "more realtime", {"realtime": 24}),
    (20, "the pool is full", {"realtime": 36}),
    (25, "less realtime", {"realtime": 10}),
    (15, "no metrics page of the picker", {"metrics": "gone"}),
    (20, "the page is back", {"metrics": "ok"}),
    (15, "refusals", {"gateway": REFUSALS}),
    (15, "no gateway", {"gateway": {"listener": "refuse"}}),
    (35, "no faults", {"gateway": None}),
]
"""Duration of each step, its description, and its changes of the simulated pool."""


def run_script(stage: Stage, prometheus: Prometheus) -> tuple[float, float]:
    """Run the script, and return the times of its start and end."""
    world = stage.world(slots=32, seconds=1.0)
    without_cluster: dict[str, Any] = {"KUBECONFIG": "", "HOME": "/nonexistent"}
    dispatchers = [stage.dispatcher(stage.settings(world), **without_cluster) for _ in "ab"]
    prometheus.scrape({name: each.admin_port for name, each in zip("ab", dispatchers, strict=True)})
    prometheus.wait_for("count(batch_dispatcher_build_info) == 2")
    started_at = time.time()
    for number, (seconds, description, changes) in enumerate(SCRIPT):
        print(f"{time.time() - started_at:5.0f} s: {description}", flush=True)
        _apply_changes(world, changes)
        if number:
            created = int(time.time())
            stage.producer.submit(1100 if number == 1 else 450, PAYLOAD, created=created, deadline_s=300)
        until = time.monotonic() + seconds
        wait_until_sync(has_passed(until), seconds + 5, every_s=0.1)
    return started_at, time.time()


def _apply_changes(world: World, changes: Mapping[str, Any]) -> None:
    if changes:
        world.control(**changes)


def draw(prometheus: Prometheus, started_at: float, ended_at: float, path: Path) -> None:
    """Draw the panels that are open when the dashboard is loaded, each at its position."""
    panels = load_dashboard()["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure_width, figure_height = 15.0, rows * 0.215 + 0.5
    figure = Figure(figsize=(figure_width, figure_height), dpi=88, facecolor=BACKGROUND_COLOUR)
    FigureCanvasAgg(figure)
    top = 1 - 0.42 / figure_height
    figure.text(
        0.012,
        1 - 0.17 / figure_height,
        load_dashboard()["title"],
        color=TEXT_COLOUR,
        fontsize=13,
        fontweight="bold",
        va="center",
    )
    figure.text(0.012, 1 - 0.36 / figure_height, CAPTION, color=MUTED_COLOUR, fontsize=7.5, va="center")
    for panel in panels:
        grid = panel["gridPos"]
        left, bottom = grid["x"] / 24, top * (1 - (grid["y"] + grid["h"]) / rows)
        width, height = grid["w"] / 24, top * grid["h"] / rows
        if panel["type"] == "row":
            title = panel["title"]
            if panel["collapsed"]:
                title = f"▸ {title}   ({len(panel['panels'])} panels)"
            figure.text(
                0.012, bottom + height * 0.3, title, color=TEXT_COLOUR, fontsize=10, fontweight="bold"
            )
            continue
        box = (left + 0.002, bottom + 0.03 / figure_height, width - 0.004, height - 0.06 / figure_height)
        figure.add_artist(Rectangle(box[:2], *box[2:], facecolor=PANEL_COLOUR, edgecolor="none", zorder=-1))
        bottom_margin = 0.13 if panel["type"] in ("stat", "table", "state-timeline") else 0.43
        axes = figure.add_axes(
            (
                left + 0.024,
                bottom + bottom_margin / figure_height,
                width - 0.034,
                height - (bottom_margin + 0.33) / figure_height,
            )
        )
        figure.text(
            left + 0.008,
            bottom + height - 0.17 / figure_height,
            panel["title"],
            color=TEXT_COLOUR,
            fontsize=7.5,
            va="center",
        )
        draw_panel = {"timeseries": _draw_graph, "state-timeline": _draw_states}.get(
            panel["type"], _draw_values
        )
        draw_panel(axes, panel, prometheus, started_at, ended_at)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    Image.open(file).convert("RGB").quantize(48).save(path, optimize=True)


def _query_series(
    panel: Mapping[str, Any], prometheus: Prometheus, started_at: float, ended_at: float
) -> Iterator[tuple[str, TimeSeries]]:
    for target in panel["targets"]:
        query = Query("", target["expr"], target["legendFormat"])
        expr = query.fill_variables(__rate_interval="5s", __range=f"{ended_at - started_at:.0f}s")
        for series in prometheus.query_range(expr, started_at, ended_at, STEP_S):
            legend = query.legend.removeprefix("{{namespace}} {{pool}}").strip()
            for label, value in series.labels.items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            yield legend or series.labels.get("pool", ""), series


def _draw_graph(
    axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, started_at: float, ended_at: float
) -> None:
    found = list(_query_series(panel, prometheus, started_at, ended_at))
    defaults = panel["fieldConfig"]["defaults"]
    _prepare_axes(axes, started_at, ended_at)
    if not found:
        axes.text(
            0.5,
            0.5,
            defaults["noValue"],
            transform=axes.transAxes,
            ha="center",
            color=MUTED_COLOUR,
            fontsize=7,
        )
        return
    found.sort(key=lambda each: -max(each[1].values))
    shown = [(legend, series) for legend, series in found if any(series.values)] or found[:2]
    right_axes = None
    if "stacking" in defaults["custom"]:
        moments = sorted({at for _, series in shown for at in series.at})
        layers = [
            [dict(zip(series.at, series.values, strict=True)).get(at, 0.0) for at in moments]
            for _, series in shown
        ]
        colours = {
            legend: override["fixedColor"] for legend, override in _get_overrides(panel, "color").items()
        }
        axes.stackplot(
            [at - started_at for at in moments],
            layers,
            labels=[legend for legend, _ in shown],
            colors=[colours.get(legend, f"C{number % 10}") for number, (legend, _) in enumerate(shown)],
            alpha=0.75,
            linewidth=0,
        )
    else:
        right_legends = _get_overrides(panel, "custom.axisPlacement")
        right_axes = axes.twinx() if right_legends else None
        for number, (legend, series) in enumerate(shown):
            target_axes = right_axes if right_axes is not None and legend in right_legends else axes
            target_axes.plot(
                *_insert_gaps(series, started_at),
                label=legend,
                linewidth=1.0,
                color=f"C{number % 10}",
            )
        if right_axes is not None:
            _prepare_axes(right_axes, started_at, ended_at)
    if "min" in defaults:
        axes.set_ylim(bottom=0, top=defaults["max"] * 1.03 if "max" in defaults else None)
    legends = [each.get_legend_handles_labels() for each in (axes, right_axes) if each is not None]
    axes.legend(
        [handle for handles, _ in legends for handle in handles][:7],
        [label for _, labels in legends for label in labels][:7],
        fontsize=5.2,
        frameon=False,
        ncols=4,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.13),
        handlelength=1.0,
        columnspacing=0.8,
        labelcolor=TEXT_COLOUR,
        borderpad=0,
        labelspacing=0.2,
    )


def _insert_gaps(series: TimeSeries, started_at: float) -> tuple[list[float], list[float]]:
    """Return times and values with a gap wherever data is missing."""
    at, values = [series.at[0] - started_at], [series.values[0]]
    for before, current, value in zip(series.at, series.at[1:], series.values[1:], strict=False):
        if current - before > STEP_S:
            at.append(before - started_at)
            values.append(math.nan)
        at.append(current - started_at)
        values.append(value)
    return at, values


def _get_overrides(panel: Mapping[str, Any], property_name: str) -> dict[str, Any]:
    """Return a property of single series by legend."""
    return {
        override["matcher"]["options"].strip("/ $"): each["value"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == property_name
    }


def _prepare_axes(axes: Any, started_at: float, ended_at: float) -> None:
    axes.set_facecolor(PANEL_COLOUR)
    axes.set_xlim(0, ended_at - started_at)
    axes.tick_params(colors=MUTED_COLOUR, labelsize=5.5, length=0, pad=1)
    axes.grid(visible=True, color="#e4e7eb", linewidth=0.4)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_states(
    axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, started_at: float, ended_at: float
) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    options = mapping["options"]
    _prepare_axes(axes, started_at, ended_at)
    axes.set_yticks([])
    for _, series in _query_series(panel, prometheus, started_at, ended_at):
        since = 0
        for number in range(1, len(series.at) + 1):
            if number < len(series.at) and series.values[number] == series.values[since]:
                continue
            option = options[f"{series.values[since]:g}"]
            start, end = series.at[since] - started_at, series.at[number - 1] - started_at + 1
            axes.axvspan(start, end, color=option["color"], linewidth=0)
            if end - start > 8:
                axes.text(
                    (start + end) / 2,
                    0.5,
                    option["text"],
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white",
                    transform=axes.get_xaxis_transform(),
                    rotation=0 if end - start > 18 else 90,
                )
            since = number


def _draw_values(
    axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, started_at: float, ended_at: float
) -> None:
    """Draw the last values of a stat or table panel."""
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    units = _get_overrides(panel, "unit")
    found = []
    for legend, series in _query_series(panel, prometheus, started_at, ended_at):
        if panel["type"] == "table":
            labels = [v for k, v in series.labels.items() if k not in ("namespace", "pool")]
            found.append((legend, f"{series.values[-1]:g}   {'  '.join(labels)}"))
        elif "mappings" in defaults:
            option = defaults["mappings"][0]["options"][f"{series.values[-1]:g}"]
            found.append((legend, option["text"]))
        else:
            found.append((legend, _format_value(series.values[-1], units.get(legend, defaults["unit"]))))
    if not found:
        axes.text(0.5, 0.6, defaults["noValue"], ha="center", va="center", color=MUTED_COLOUR, fontsize=9)
    size = 7 if panel["type"] == "table" else 11
    for number, (legend, value) in enumerate(found):
        height = 1 - (number + 0.5) / max(len(found), 2)
        axes.text(0.0, height, f"{legend}  ", ha="left", va="center", color=MUTED_COLOUR, fontsize=6.5)
        axes.text(1.0, height, value, ha="right", va="center", color=TEXT_COLOUR, fontsize=size)


def _format_value(value: float, unit: str) -> str:
    return {"percentunit": f"{value:.0%}", "s": f"{value:.3g} s"}.get(unit, f"{value:.4g}")


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in ("queue", "stage", "prometheus"):
            (Path(folder) / name).mkdir()
        stage = Stage(
            Path(folder) / "stage", stack.enter_context(server("redis", Path(folder) / "queue")), stack
        )
        with Prometheus(Path(folder) / "prometheus") as prometheus:
            started_at, ended_at = run_script(stage, prometheus)
            draw(prometheus, started_at, ended_at, path)
            for found in prometheus.check_queries():
                print(f"{found.query.location}: {found.problem} {', '.join(found.missing_series)}")
            print("alerts:", [alert["labels"]["alertname"] for alert in prometheus.read_alerts()])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
