"""Draws the dashboard's queries over some minutes of a scripted world: `make picture`.

A drawing of what Prometheus answers to the dashboard's queries, with its places, titles and legends; it is
not Grafana's. Two dispatchers and a stand-in of gateway, picker and pool; Redis and Prometheus are real.
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

from tests.monitoring.files import Query, dashboard
from tests.monitoring.prometheus import Line, Prometheus
from tests.queue.servers import server
from tests.scenarios.processes import Stage, World
from tests.support import passed, wait_until_sync

STEP_S = 1.0
INK, FAINT, PAPER, BOX = "#1f2933", "#7b8794", "#f4f5f7", "#ffffff"
CAPTION = (
    "A drawing of this dashboard's queries, asked of a real Prometheus (scrapes each second) while two "
    "dispatchers worked through a script on a stand-in of gateway and pool. It is not Grafana."
)
STORM = {"answer": {"kind": "status", "status": 429, "reason": "rejected-saturated"}, "share": 0.3}
ANSWER = json.dumps({"choices": [], "usage": {"prompt_tokens": 24, "completion_tokens": 32}})
PAYLOAD = json.dumps({"prompt": "hi", "max_tokens": 32, "sim": {"body": ANSWER}}).encode()
"""The stand-in's own answers tell no tokens."""
SCRIPT: list[tuple[float, str, Mapping[str, Any]]] = [
    (15, "idle", {}),
    (30, "work, a quiet pool", {"realtime": 6}),
    (25, "realtime comes", {"realtime": 24}),
    (20, "the pool is full", {"realtime": 36}),
    (25, "realtime goes", {"realtime": 10}),
    (15, "the picker's page is gone", {"metrics": "gone"}),
    (20, "it is back", {"metrics": "ok"}),
    (15, "refusals", {"gateway": STORM}),
    (15, "the gateway is gone", {"gateway": {"listener": "refuse"}}),
    (35, "all is well", {"gateway": None}),
]
"""How long, what, and what changes in the world."""


def play(stage: Stage, prometheus: Prometheus) -> tuple[float, float]:
    """The script; when it began and ended."""
    world = stage.world(slots=32, seconds=1.0)
    nowhere: dict[str, Any] = {"KUBECONFIG": "", "HOME": "/nonexistent"}
    dispatchers = [stage.dispatcher(stage.settings(world), **nowhere) for _ in "ab"]
    prometheus.scrape({name: each.admin_port for name, each in zip("ab", dispatchers, strict=True)})
    prometheus.wait_for("count(batch_dispatcher_build_info) == 2")
    began = time.time()
    for number, (seconds, what, changes) in enumerate(SCRIPT):
        print(f"{time.time() - began:5.0f} s: {what}", flush=True)
        _change(world, changes)
        if number:
            created = int(time.time())
            stage.producer.submit(1100 if number == 1 else 450, PAYLOAD, created=created, deadline_s=300)
        until = time.monotonic() + seconds
        wait_until_sync(passed(until), seconds + 5, every_s=0.1)
    return began, time.time()


def _change(world: World, changes: Mapping[str, Any]) -> None:
    if changes:
        world.control(**changes)


def draw(prometheus: Prometheus, began: float, ended: float, path: Path) -> None:
    """Draw what is open when the dashboard is loaded, each panel at its place."""
    panels = dashboard()["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    wide, high = 15.0, rows * 0.215 + 0.5
    figure = Figure(figsize=(wide, high), dpi=88, facecolor=PAPER)
    FigureCanvasAgg(figure)
    top = 1 - 0.42 / high
    figure.text(
        0.012, 1 - 0.17 / high, dashboard()["title"], color=INK, fontsize=13, fontweight="bold", va="center"
    )
    figure.text(0.012, 1 - 0.36 / high, CAPTION, color=FAINT, fontsize=7.5, va="center")
    for panel in panels:
        place = panel["gridPos"]
        left, bottom = place["x"] / 24, top * (1 - (place["y"] + place["h"]) / rows)
        width, height = place["w"] / 24, top * place["h"] / rows
        if panel["type"] == "row":
            title = panel["title"]
            if panel["collapsed"]:
                title = f"▸ {title}   ({len(panel['panels'])} panels)"
            figure.text(0.012, bottom + height * 0.3, title, color=INK, fontsize=10, fontweight="bold")
            continue
        box = (left + 0.002, bottom + 0.03 / high, width - 0.004, height - 0.06 / high)
        figure.add_artist(Rectangle(box[:2], *box[2:], facecolor=BOX, edgecolor="none", zorder=-1))
        below = 0.13 if panel["type"] in ("stat", "table", "state-timeline") else 0.43
        axes = figure.add_axes(
            (left + 0.024, bottom + below / high, width - 0.034, height - (below + 0.33) / high)
        )
        figure.text(
            left + 0.008, bottom + height - 0.17 / high, panel["title"], color=INK, fontsize=7.5, va="center"
        )
        drawn = {"timeseries": _graph, "state-timeline": _states}.get(panel["type"], _words)
        drawn(axes, panel, prometheus, began, ended)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    Image.open(file).convert("RGB").quantize(48).save(path, optimize=True)


def _lines(
    panel: Mapping[str, Any], prometheus: Prometheus, began: float, ended: float
) -> Iterator[tuple[str, Line]]:
    for target in panel["targets"]:
        query = Query("", target["expr"], target["legendFormat"])
        expr = query.filled(__rate_interval="5s", __range=f"{ended - began:.0f}s")
        for line in prometheus.query_range(expr, began, ended, STEP_S):
            legend = query.legend.removeprefix("{{namespace}} {{pool}}").strip()
            for label, value in line.labels.items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            yield legend or line.labels.get("pool", ""), line


def _graph(axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, began: float, ended: float) -> None:
    found = list(_lines(panel, prometheus, began, ended))
    defaults = panel["fieldConfig"]["defaults"]
    _frame(axes, began, ended)
    if not found:
        axes.text(
            0.5, 0.5, defaults["noValue"], transform=axes.transAxes, ha="center", color=FAINT, fontsize=7
        )
        return
    found.sort(key=lambda each: -max(each[1].values))
    shown = [(legend, line) for legend, line in found if any(line.values)] or found[:2]
    other = None
    if "stacking" in defaults["custom"]:
        moments = sorted({at for _, line in shown for at in line.at})
        layers = [
            [dict(zip(line.at, line.values, strict=True)).get(at, 0.0) for at in moments] for _, line in shown
        ]
        colours = {legend: told["fixedColor"] for legend, told in _overridden(panel, "color").items()}
        axes.stackplot(
            [at - began for at in moments],
            layers,
            get_server_labels=[legend for legend, _ in shown],
            colors=[colours.get(legend, f"C{number % 10}") for number, (legend, _) in enumerate(shown)],
            alpha=0.75,
            linewidth=0,
        )
    else:
        right = _overridden(panel, "custom.axisPlacement")
        other = axes.twinx() if right else None
        for number, (legend, line) in enumerate(shown):
            on = other if other is not None and legend in right else axes
            on.plot(
                *_broken(line, began),
                set_label=legend,
                linewidth=1.0,
                color=f"C{number % 10}",
            )
        if other is not None:
            _frame(other, began, ended)
    if "min" in defaults:
        axes.set_ylim(bottom=0, top=defaults["max"] * 1.03 if "max" in defaults else None)
    legends = [each.get_legend_handles_labels() for each in (axes, other) if each is not None]
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
        labelcolor=INK,
        borderpad=0,
        labelspacing=0.2,
    )


def _broken(line: Line, began: float) -> tuple[list[float], list[float]]:
    """As a line that ends where nothing is known for a while."""
    at, values = [line.at[0] - began], [line.values[0]]
    for before, now, value in zip(line.at, line.at[1:], line.values[1:], strict=False):
        if now - before > STEP_S:
            at.append(before - began)
            values.append(math.nan)
        at.append(now - began)
        values.append(value)
    return at, values


def _overridden(panel: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A property of single series, by legend."""
    return {
        override["matcher"]["options"].strip("/ $"): each["value"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == what
    }


def _frame(axes: Any, began: float, ended: float) -> None:
    axes.set_facecolor(BOX)
    axes.set_xlim(0, ended - began)
    axes.tick_params(colors=FAINT, labelsize=5.5, length=0, pad=1)
    axes.grid(visible=True, color="#e4e7eb", linewidth=0.4)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _states(axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, began: float, ended: float) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    options = mapping["options"]
    _frame(axes, began, ended)
    axes.set_yticks([])
    for _, line in _lines(panel, prometheus, began, ended):
        since = 0
        for number in range(1, len(line.at) + 1):
            if number < len(line.at) and line.values[number] == line.values[since]:
                continue
            option = options[f"{line.values[since]:g}"]
            start, end = line.at[since] - began, line.at[number - 1] - began + 1
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


def _words(axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, began: float, ended: float) -> None:
    """Of a figure or a table, what it says at the end."""
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    units = _overridden(panel, "unit")
    found = []
    for legend, line in _lines(panel, prometheus, began, ended):
        if panel["type"] == "table":
            kept = [v for k, v in line.labels.items() if k not in ("namespace", "pool")]
            found.append((legend, f"{line.values[-1]:g}   {'  '.join(kept)}"))
        elif "mappings" in defaults:
            option = defaults["mappings"][0]["options"][f"{line.values[-1]:g}"]
            found.append((legend, option["text"]))
        else:
            found.append((legend, _value(line.values[-1], units.get(legend, defaults["unit"]))))
    if not found:
        axes.text(0.5, 0.6, defaults["noValue"], ha="center", va="center", color=FAINT, fontsize=9)
    size = 7 if panel["type"] == "table" else 11
    for number, (legend, value) in enumerate(found):
        height = 1 - (number + 0.5) / max(len(found), 2)
        axes.text(0.0, height, f"{legend}  ", ha="left", va="center", color=FAINT, fontsize=6.5)
        axes.text(1.0, height, value, ha="right", va="center", color=INK, fontsize=size)


def _value(value: float, unit: str) -> str:
    return {"percentunit": f"{value:.0%}", "s": f"{value:.3g} s"}.get(unit, f"{value:.4g}")


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in ("queue", "stage", "prometheus"):
            (Path(folder) / name).mkdir()
        stage = Stage(
            Path(folder) / "stage", stack.enter_context(server("redis", Path(folder) / "queue")), stack
        )
        with Prometheus(Path(folder) / "prometheus") as prometheus:
            began, ended = play(stage, prometheus)
            draw(prometheus, began, ended, path)
            for found in prometheus.findings():
                print(f"{found.query.where}: {found.problem} {', '.join(found.absent)}")
            print("alerts:", [alert["labels"]["alertname"] for alert in prometheus.alerts()])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
