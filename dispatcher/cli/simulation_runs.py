"""Runs of `simulate` in parallel processes: rows of the table, progress, and the result."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from dispatcher.cli.terminal import exit_error, print_warning, wrap_lines
from dispatcher.lab.simulation import plot as picture
from dispatcher.lab.simulation import report
from dispatcher.lab.simulation.experiment import PolicyName, Run
from dispatcher.lab.simulation.parallel import RunFailedError, RunRequest, run_in_parallel
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.sweep import Bound, Sweep, SweepResult, choose_value
from dispatcher.lab.standin.trace import Trace

SHOW_PROGRESS_AFTER_S = 1.0
"""Time after which the progress is shown."""
RELATIVE_COST = {
    PolicyName.NONE: 1.0,
    PolicyName.ALL_KNOWING: 2.0,
    PolicyName.DISPATCHER: 8.0,
    PolicyName.WHOLE: 8.0,
}
"""Approximate duration of a run of each policy, relative to the others. Policies that are not here take 2."""


def compare_policies(
    setting: Scenario,
    traffic: Trace,
    names: Sequence[PolicyName],
    processes: int,
    *,
    as_json: bool,
    plot: Path | None = None,
) -> None:
    """Run all policies and show a row for each, as a table or as JSON. `plot`: file for the timelines."""
    played = [name for name in PolicyName if name in {*names, PolicyName.ALL_KNOWING, PolicyName.NONE}]
    # The baselines first, because every row is measured against them. Then the longest runs first, so that
    # the processes finish at about the same time.
    order = sorted(
        played,
        key=lambda name: (name not in (PolicyName.NONE, PolicyName.ALL_KNOWING), -_estimate_cost(name)),
    )
    planned = [RunRequest(setting, name, report.get_sample_interval_s(setting)) for name in order]
    shown = [name for name in played if name in names]
    sheet = report.Table("policy", [name.value for name in shown], setting, width=_get_terminal_width())
    table = _Table(as_json, sheet)
    runs: dict[PolicyName, Run] = {}
    for number, run in _play_runs(planned, traffic, processes):
        runs[order[number]] = run
        if order[number] is PolicyName.NONE:
            _warn_if_too_small(setting, run)
        # Runs end in any order; the rows are printed in the order of the table.
        if PolicyName.NONE in runs and PolicyName.ALL_KNOWING in runs:
            while table.row_count < len(shown) and (name := shown[table.row_count]) in runs:
                row = report.build_row(runs[name], runs[PolicyName.ALL_KNOWING], runs[PolicyName.NONE])
                table.print_row(name.value, row, is_own_policy=name is PolicyName.DISPATCHER)
    comparison = report.build_comparison(setting, traffic.name, names, runs)
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=2, ensure_ascii=False))
    else:
        table.print_notes(
            report.format_legend(setting, traffic.name, sheet),
            report.describe_closures(
                setting, zip([row.policy.value for row in comparison.rows], comparison.rows, strict=True)
            ),
        )
        for row in comparison.rows:
            if row.policy in (PolicyName.DISPATCHER, PolicyName.WHOLE):
                typer.echo(_wrap_line(report.describe_row(row, setting)))
    _draw_plot(plot, lambda path: picture.draw_timelines(comparison, path))


def run_sweep(
    setting: Scenario,
    traffic: Trace,
    names: Sequence[PolicyName],
    processes: int,
    swept: Sweep,
    bounds: Sequence[Bound],
    *,
    as_json: bool,
    plot: Path | None = None,
) -> bool:
    """Run all values and show a row for each.

    Return true if one value keeps the bounds, or if there are none. `plot`: file for the throughput and the
    impact of each value.
    """
    names = [name for name in names if name is not PolicyName.NONE] or [PolicyName.DISPATCHER]
    cases = [(value, name) for value in swept.values for name in names]
    planned = [RunRequest(setting, PolicyName.NONE, report.get_sample_interval_s(setting))]
    planned += [
        RunRequest(swept.apply_value(setting, value), name, report.get_sample_interval_s(setting))
        for value, name in cases
    ]
    labels = [f"{value:g}" if len(names) == 1 else f"{value:g} {name.value}" for value, name in cases]
    sheet = report.Table(swept.option, labels, setting, width=_get_terminal_width(), has_utilization=False)
    table = _Table(as_json, sheet)
    runs: dict[int, Run] = {}
    rows: list[report.Row] = []
    for number, run in _play_runs(planned, traffic, processes):
        runs[number] = run
        if number == 0:
            _warn_if_too_small(setting, run)
        # Run 0 is the baseline without batch work. Run n + 1 belongs to row n, and rows are printed in order.
        while 0 in runs and len(rows) < len(cases) and len(rows) + 1 in runs:
            rows.append(report.build_row(runs[len(rows) + 1], None, runs[0]))
            table.print_row(labels[len(rows) - 1], rows[-1])
    compared = [(value, row) for (value, name), row in zip(cases, rows, strict=True) if name is names[0]]
    answer = choose_value(swept.option, compared, bounds) if bounds else None
    if as_json:
        summary: dict[str, Any] = {
            "trace": traffic.name,
            "scenario": report.encode_fields(setting),
            "sweep": swept.option,
        }
        summary["rows"] = [
            {swept.option: value, **report.encode_fields(row)}
            for (value, _), row in zip(cases, rows, strict=True)
        ]
        warning = report.describe_shortage(setting, runs[0])
        summary["warnings"] = [warning] if warning else []
        if answer is not None:
            summary["target"] = {
                "asked": list(map(str, bounds)),
                "value": answer.value,
                "sentence": answer.sentence,
            }
        typer.echo(json.dumps(summary, indent=2, ensure_ascii=False))
    else:
        reserve = swept.option != "reserve"
        table.print_notes(
            report.format_legend(setting, traffic.name, sheet, reserve=reserve),
            report.describe_closures(
                setting, zip([f"{swept.option} {label}" for label in labels], rows, strict=True)
            ),
        )
        if answer is not None:
            colour = typer.colors.GREEN if answer.value is not None else typer.colors.YELLOW
            typer.secho(_wrap_line(answer.sentence), fg=colour, bold=True)
    values = [(value, row) for (value, _), row in zip(cases, rows, strict=True)]
    result = SweepResult(swept.option, traffic.name, setting, values)
    _draw_plot(plot, lambda path: picture.draw_sweep(result, path))
    return answer is None or answer.value is not None


def _draw_plot(path: Path | None, draw_into: Callable[[Path], None]) -> None:
    """Draw into the file if one is named. Exits with 1 if it cannot be written."""
    if path is None:
        return
    try:
        draw_into(path)
    except (OSError, ValueError) as error:
        raise exit_error(f"{path}: {error}") from error
    typer.echo(f"drawn into {path}", err=True)


def _play_runs(planned: Sequence[RunRequest], traffic: Trace, processes: int) -> Iterator[tuple[int, Run]]:
    """Yield the runs with their numbers as they end. Shows the progress meanwhile."""
    progress_line = _ProgressLine([_estimate_cost(each.policy) for each in planned])
    try:
        # closing() ends the processes if the loop is left early.
        with closing(run_in_parallel(planned, traffic, processes)) as playing:
            for progress in playing:
                if progress.ended_runs:  # rows are about to be printed: they must not mix with the progress
                    progress_line.clear_line()
                yield from progress.ended_runs
                progress_line.show_progress(progress.done_shares)
    except RunFailedError as error:
        progress_line.clear_line()
        raise exit_error(str(error)) from error
    finally:
        progress_line.clear_line()


def _estimate_cost(name: PolicyName) -> float:
    return RELATIVE_COST.get(name, 2.0)


def _warn_if_too_small(setting: Scenario, alone: Run) -> None:
    warning = report.describe_shortage(setting, alone)
    if warning:
        print_warning(warning)


def _get_terminal_width() -> int | None:
    """Return the width of the terminal. `None` if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _wrap_line(line: str) -> str:
    """Wrap a line at the width of the terminal. Lines for a pipe are not wrapped."""
    width = _get_terminal_width()
    return line if width is None else "\n".join(wrap_lines([line], width))


@dataclass(slots=True)
class _Table:
    """Printer of the table, line by line. It prints nothing if the output is JSON."""

    is_silent: bool
    sheet: report.Table
    row_count: int = 0

    def print_row(self, label: str, row: report.Row, *, is_own_policy: bool = False) -> None:
        if self.row_count == 0:
            self._print_text(self.sheet.format_header(), bold=True)
        self.row_count += 1
        self._print_text(
            self.sheet.format_row(label, row),
            **({"fg": typer.colors.GREEN, "bold": True} if is_own_policy else {}),
        )

    def print_notes(self, *parts: str | Sequence[str]) -> None:
        for part in parts:
            for line in part.splitlines() if isinstance(part, str) else part:
                self._print_text(_wrap_line(line), dim=True)

    def _print_text(self, text: str, **style: Any) -> None:
        if not self.is_silent:
            typer.secho(text, **style)


@dataclass(slots=True)
class _ProgressLine:
    """Progress on standard error: one line of a terminal that is overwritten each time."""

    costs: Sequence[float]
    clock: Callable[[], float] = time.monotonic
    _started_at: float = field(default=0.0, init=False)
    _is_shown: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._started_at = self.clock()

    def show_progress(self, done_shares: Sequence[float]) -> None:
        elapsed_s = self.clock() - self._started_at
        if (
            not sys.stderr.isatty()
            or elapsed_s < SHOW_PROGRESS_AFTER_S
            or all(each >= 1 for each in done_shares)
        ):
            return
        share = sum(cost * each for cost, each in zip(self.costs, done_shares, strict=True)) / sum(self.costs)
        text = (
            f"simulating: {sum(each >= 1 for each in done_shares)} of {len(done_shares)} runs done, "
            f"{share:.0%}"
        )
        if share > 0.02:  # before that, the estimate of the remaining time is too rough
            minutes, seconds = divmod(round(elapsed_s * (1 - share) / share), 60)
            text += f", about {minutes}:{seconds:02} left"
        self._write_text(text[: shutil.get_terminal_size().columns - 1])
        self._is_shown = True

    def clear_line(self) -> None:
        if self._is_shown:
            self._write_text("")
            self._is_shown = False

    def _write_text(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")  # to the first column, and clear the line
        sys.stderr.flush()
