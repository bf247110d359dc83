"""Pictures of simulations: the timeline of a comparison, and the results of a sweep.

timeline    requests in the pool, and the limit of the policy; all panels have the same scale
sweep       throughput of batch requests and added latency of realtime requests, by swept value
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dispatcher.lab.simulation.experiment import PolicyName, Run, TimelineSample
from dispatcher.lab.simulation.report import Comparison, Row
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.sweep import SweepResult
from dispatcher.limit.budget import Reason

INSTALL = "pip install 'batch-dispatcher[plots]'"
INK, FAINT, PAPER = "#1f2933", "#7b8794", "#ffffff"
BATCH, REALTIME, LIMIT, CLOSED = "#7fc8a9", "#4f7cac", "#d9480f", "#c92a2a"
TITLES = {
    PolicyName.DISPATCHER: "dispatcher: this dispatcher",
    PolicyName.WHOLE: "whole: this dispatcher without slices",
    PolicyName.ALL_KNOWING: "all-knowing: knows the current state",
    PolicyName.POINT: "point: adds H to its requests in flight",
    PolicyName.CAP: "cap: at most H requests in flight",
    PolicyName.LITERAL: "literal: sends H requests per reading",
    PolicyName.MULTIPLIER: "multiplier: budget × batch size per poll",
    PolicyName.NONE: "none: no batch work",
}
"""Titles of the panels. Each starts with the name of the policy in the table."""
COLOURS = ("#2b8a3e", "#4f7cac", "#d9480f", "#7048e8", "#c2255c", "#e67700")
"""Colours of the policies in a sweep. The policy `none` is not drawn."""


def is_available() -> bool:
    """Return whether the library for drawing (extra `plots`) is installed."""
    return find_spec("matplotlib") is not None


def draw_timelines(comparison: Comparison, path: Path) -> None:
    """Draw the timelines into a file. Its suffix is the format: png, svg or pdf.

    Raises OSError, and ValueError for an unknown suffix.
    """
    first = (PolicyName.DISPATCHER, PolicyName.WHOLE, PolicyName.ALL_KNOWING)
    pairs = sorted(
        zip(comparison.runs, comparison.rows, strict=True),
        key=lambda pair: first.index(pair[0].policy) if pair[0].policy in first else len(first),
    )
    figure = _create_figure(1.3 + 2.0 * len(pairs))
    panels = figure.subplots(len(pairs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    top = _get_axis_top(pairs[0][0])
    for panel, (run, row) in zip(panels, pairs, strict=True):
        _draw_panel(panel, run, row, comparison.scenario.reserve, top)
    panels[-1].set_xlabel("seconds", color=FAINT, fontsize=9)
    _save_figure(figure, panels, f"{comparison.trace} on {_describe_scenario(comparison.scenario)}", path)


def draw_sweep(result: SweepResult, path: Path) -> None:
    """Draw the result of a sweep into a file, like `draw_timelines`. The values have equal distances on the
    axis."""
    figure = _create_figure(4.4)
    panels = figure.subplots(1, 2)
    values = list(dict.fromkeys(value for value, _ in result.rows))
    for name, colour in zip(dict.fromkeys(row.policy for _, row in result.rows), COLOURS, strict=False):
        rows = [row for _, row in result.rows if row.policy is name]
        added = [row.latency_p95_less_none_s for row in rows]
        for panel, figures in (
            (panels[0], [row.batch_tokens_per_s for row in rows]),
            (panels[1], [float("nan") if each is None else each for each in added]),
        ):
            panel.plot(range(len(values)), figures, marker="o", color=colour, label=TITLES[name])
    titles = ("batch work, tokens/s", "additional realtime latency, p95, s")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
        panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        panel.set_xlabel(result.option, color=FAINT, fontsize=9)
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
        _style_axes(panel)
    _save_figure(
        figure, panels, f"{result.trace} on {_describe_scenario(result.scenario, result.option)}", path
    )


def _create_figure(height: float) -> Any:
    # Imported late, since matplotlib is an optional dependency and slow to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, height), dpi=110, facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.09, w_pad=0.06)
    return figure


def _describe_scenario(scenario: Scenario, swept: str = "") -> str:
    """Describe the pool and its scrapes, without the option that is swept."""
    configured = "" if scenario.real_slots == scenario.slots else f" (configured as {scenario.slots})"
    scrape = "" if swept == "scrape" else f" every {scenario.scrape_s:g} s"
    lag = "" if swept == "lag" else f" known {scenario.lag_s:g} s later"
    readings = f", a scrape{scrape}{lag}" if scrape or lag else ""
    slices = "" if scenario.slice_tokens is None else f", slices of {scenario.slice_tokens} tokens"
    eviction = ", with eviction" if scenario.evicts else ""
    return f"{scenario.real_slots} slots{configured}{readings}{slices}{eviction}"


def _save_figure(figure: Any, panels: Iterable[Any], title: str, path: Path) -> None:
    """Add title and legend, and write the file."""
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles),
        frameon=False, fontsize=9, labelcolor=INK,
    )  # fmt: skip
    # Without a date in it, the same run gives the same bytes.
    kind = path.suffix.lower().lstrip(".") or "png"
    figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _style_axes(panel: Any) -> None:
    panel.tick_params(colors=FAINT, labelsize=8, length=0)
    panel.grid(visible=True, axis="y", color="#e4e7eb", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#cbd2d9")


def _count_requests(run: Run) -> list[int]:
    return [moment.state.running + moment.state.waiting for moment in run.samples]


def _get_axis_top(run: Run) -> float:
    """Return the upper end of the axis at which this run is readable."""
    slots, most = max(moment.state.slots for moment in run.samples), max(_count_requests(run))
    # A run with a long queue is cut off, so that the slots do not shrink to a line.
    return slots * 1.28 if most <= 1.28 * slots else min(most, 2.2 * slots)


def _draw_panel(panel: Any, run: Run, row: Row, reserve: float, top: float) -> None:
    samples = run.samples
    at = [moment.state.at for moment in samples]
    slots = [moment.state.slots for moment in samples]
    batch = [moment.state.batch_running + moment.state.batch_waiting for moment in samples]
    total = _count_requests(run)
    panel.fill_between(at, 0, batch, step="post", color=BATCH, linewidth=0, label="batch")
    panel.fill_between(at, batch, total, step="post", color=REALTIME, linewidth=0, label="realtime")
    panel.step(at, slots, where="post", color=INK, linewidth=1.3, label="capacity")
    room = [count * (1 - reserve) for count in slots]
    panel.step(
        at,
        room,
        where="post",
        color=INK,
        linewidth=0.9,
        linestyle=(0, (4, 3)),
        label="capacity − reserve",
    )
    if any(moment.limit is not None for moment in samples):
        limits = [float("nan") if m.limit is None else m.limit for m in samples]
        panel.step(at, limits, where="post", color=LIMIT, linewidth=1.1, label="limit on batch")
    _shade_closed_periods(panel, samples, at[-1] - at[0])
    panel.set_xlim(at[0], at[-1])
    panel.set_ylim(0, top)
    if max(total) > top:
        panel.text(
            0.995, 0.9, f"up to {max(total)} requests, cut off here", transform=panel.transAxes,
            ha="right", va="top", fontsize=8, color=PAPER, fontweight="bold",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": INK, "edgecolor": "none", "alpha": 0.75},
        )  # fmt: skip
    panel.set_title(TITLES[run.policy], loc="left", fontsize=10.5, color=INK, fontweight="bold")
    panel.set_title(_format_figures(row), loc="right", fontsize=9, color=FAINT)
    panel.set_ylabel("requests", color=FAINT, fontsize=9)
    _style_axes(panel)


def _format_figures(row: Row) -> str:
    parts = []
    if row.policy is not PolicyName.NONE and row.utilization is not None:
        parts.append(f"utilization {row.utilization:.2f}")
    parts.append(f"over {row.overshoot_mean:.1f}, worst {row.overshoot_worst:.0f}")
    if row.wait_p99_s is not None:
        parts.append(f"realtime wait p99 {row.wait_p99_s:.2f} s")
    if row.latency_p50_ratio is not None:
        parts.append(f"median latency {row.latency_p50_ratio:.2f} ×")
    if row.refused:
        parts.append(f"{row.refused:,} × 429")
    if row.evicted:
        parts.append(f"{row.evicted:,} evicted")
    return "   ·   ".join(parts)


def _shade_closed_periods(panel: Any, samples: Sequence[TimelineSample], width_s: float) -> None:
    """Shade the closed periods. Those that are wide enough get their reason as label."""
    labelled = False
    for reason, start, end in _find_closed_periods(samples):
        panel.axvspan(start, end, color=CLOSED, alpha=0.16, linewidth=0, label=None if labelled else "closed")
        labelled = True
        if end - start > 0.03 * width_s:
            panel.text(
                (start + end) / 2, 0.97, reason.value, transform=panel.get_xaxis_transform(),
                ha="center", va="top", fontsize=8.5, color=CLOSED, fontweight="bold",
            )  # fmt: skip


def _find_closed_periods(samples: Sequence[TimelineSample]) -> Iterator[tuple[Reason, float, float]]:
    since, reason = 0.0, None
    for moment in samples:
        if moment.closed_reason is not reason:
            if reason is not None:
                yield reason, since, moment.state.at
            since, reason = moment.state.at, moment.closed_reason
    if reason is not None:
        yield reason, since, samples[-1].state.at
