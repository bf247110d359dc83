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

from dispatcher.cli.terminal import fail, fold, warn
from dispatcher.lab.simulation import plot as picture
from dispatcher.lab.simulation import report
from dispatcher.lab.simulation.experiment import Name, Run
from dispatcher.lab.simulation.parallel import RunFailedError, Wanted, play_all
from dispatcher.lab.simulation.scenario import Setting
from dispatcher.lab.simulation.sweep import Bound, Sweep, SweepResult, choose
from dispatcher.lab.standin.trace import Trace

PATIENCE_S = 1.0
"""Time after which the progress is shown."""
COST = {Name.NONE: 1.0, Name.ALL_KNOWING: 2.0, Name.LAW: 8.0}
"""Approximate duration of a run of each policy, relative to the others. Policies that are not here take 2."""


def compare(
    setting: Setting,
    traffic: Trace,
    names: Sequence[Name],
    processes: int,
    *,
    as_json: bool,
    plot: Path | None = None,
) -> None:
    """Run all policies and show a row for each, as a table or as JSON. `plot`: file for the timelines."""
    played = [name for name in Name if name in {*names, Name.ALL_KNOWING, Name.NONE}]
    # The baselines first, because every row is measured against them. Then the longest runs first, so that
    # the processes finish at about the same time.
    order = sorted(played, key=lambda name: (name not in (Name.NONE, Name.ALL_KNOWING), -_cost(name)))
    wanted = [Wanted(setting, name, report.moment_s(setting)) for name in order]
    shown = [name for name in played if name in names]
    sheet = report.Sheet("policy", [name.value for name in shown], setting, width=_width())
    lines = _Lines(as_json, sheet)
    runs: dict[Name, Run] = {}
    for number, run in _ended(wanted, traffic, processes):
        runs[order[number]] = run
        if order[number] is Name.NONE:
            _warn_of_small(setting, run)
        # Runs end in any order; the rows are printed in the order of the table.
        if Name.NONE in runs and Name.ALL_KNOWING in runs:
            while lines.told < len(shown) and (name := shown[lines.told]) in runs:
                row = report.row_of(runs[name], runs[Name.ALL_KNOWING], runs[Name.NONE])
                lines.tell(name.value, row, ours=name is Name.LAW)
    found = report.comparison(setting, traffic.name, names, runs)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        lines.explain(
            report.legend(setting, traffic.name, sheet),
            report.closures(setting, zip([row.policy.value for row in found.rows], found.rows, strict=True)),
        )
        for row in found.rows:
            if row.policy is Name.LAW:
                typer.echo(_folded(report.sentence(row)))
    _draw(plot, lambda path: picture.draw(found, path))


def sweep(
    setting: Setting,
    traffic: Trace,
    names: Sequence[Name],
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
    names = [name for name in names if name is not Name.NONE] or [Name.LAW]
    cases = [(value, name) for value in swept.values for name in names]
    wanted = [Wanted(setting, Name.NONE, report.moment_s(setting))]
    wanted += [Wanted(swept.setting(setting, value), name, report.moment_s(setting)) for value, name in cases]
    labels = [f"{value:g}" if len(names) == 1 else f"{value:g} {name.value}" for value, name in cases]
    sheet = report.Sheet(swept.option, labels, setting, width=_width(), harvest=False)
    lines = _Lines(as_json, sheet)
    runs: dict[int, Run] = {}
    rows: list[report.Row] = []
    for number, run in _ended(wanted, traffic, processes):
        runs[number] = run
        if number == 0:
            _warn_of_small(setting, run)
        # Run 0 is the baseline without batch work. Run n + 1 belongs to row n, and rows are printed in order.
        while 0 in runs and len(rows) < len(cases) and len(rows) + 1 in runs:
            rows.append(report.row_of(runs[len(rows) + 1], None, runs[0]))
            lines.tell(labels[len(rows) - 1], rows[-1])
    law = [(value, row) for (value, name), row in zip(cases, rows, strict=True) if name is names[0]]
    answer = choose(swept.option, law, bounds) if bounds else None
    if as_json:
        told: dict[str, Any] = {
            "trace": traffic.name,
            "setting": report.told_of(setting),
            "sweep": swept.option,
        }
        told["rows"] = [
            {swept.option: value, **report.told_of(row)} for (value, _), row in zip(cases, rows, strict=True)
        ]
        warning = report.too_small(setting, runs[0])
        told["warnings"] = [warning] if warning else []
        if answer is not None:
            told["target"] = {
                "asked": list(map(str, bounds)),
                "value": answer.value,
                "sentence": answer.sentence,
            }
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        reserve = swept.option != "reserve"
        lines.explain(
            report.legend(setting, traffic.name, sheet, reserve=reserve),
            report.closures(setting, zip([f"{swept.option} {label}" for label in labels], rows, strict=True)),
        )
        if answer is not None:
            colour = typer.colors.GREEN if answer.value is not None else typer.colors.YELLOW
            typer.secho(_folded(answer.sentence), fg=colour, bold=True)
    values = [(value, row) for (value, _), row in zip(cases, rows, strict=True)]
    result = SweepResult(swept.option, traffic.name, setting, values)
    _draw(plot, lambda path: picture.draw_sweep(result, path))
    return answer is None or answer.value is not None


def _draw(path: Path | None, draw: Callable[[Path], None]) -> None:
    """Draw into the file if one is named. Exits with 1 if it cannot be written."""
    if path is None:
        return
    try:
        draw(path)
    except (OSError, ValueError) as error:
        raise fail(f"{path}: {error}") from error
    typer.echo(f"drawn into {path}", err=True)


def _ended(wanted: Sequence[Wanted], traffic: Trace, processes: int) -> Iterator[tuple[int, Run]]:
    """Yield the runs with their numbers as they end. Shows the progress meanwhile."""
    line = _ProgressLine([_cost(each.policy) for each in wanted])
    try:
        # closing() ends the processes if the loop is left early.
        with closing(play_all(wanted, traffic, processes)) as playing:
            for progress in playing:
                if progress.ended:  # rows are about to be printed: they must not mix with the progress
                    line.clear()
                yield from progress.ended
                line.show(progress.done)
    except RunFailedError as error:
        line.clear()
        raise fail(str(error)) from error
    finally:
        line.clear()


def _cost(name: Name) -> float:
    return COST.get(name, 2.0)


def _warn_of_small(setting: Setting, alone: Run) -> None:
    warning = report.too_small(setting, alone)
    if warning:
        warn(warning)


def _width() -> int | None:
    """Return the width of the terminal. `None` if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _folded(line: str) -> str:
    """Wrap a line at the width of the terminal. Lines for a pipe are not wrapped."""
    width = _width()
    return line if width is None else "\n".join(fold([line], width))


@dataclass(slots=True)
class _Lines:
    """Printer of the table, line by line. It prints nothing if the output is JSON."""

    silent: bool
    sheet: report.Sheet
    told: int = 0

    def tell(self, label: str, row: report.Row, *, ours: bool = False) -> None:
        if self.told == 0:
            self._say(self.sheet.header(), bold=True)
        self.told += 1
        self._say(self.sheet.line(label, row), **({"fg": typer.colors.GREEN, "bold": True} if ours else {}))

    def explain(self, *parts: str | Sequence[str]) -> None:
        for part in parts:
            for line in part.splitlines() if isinstance(part, str) else part:
                self._say(_folded(line), dim=True)

    def _say(self, text: str, **style: Any) -> None:
        if not self.silent:
            typer.secho(text, **style)


@dataclass(slots=True)
class _ProgressLine:
    """Progress on standard error: one line of a terminal that is overwritten each time."""

    costs: Sequence[float]
    clock: Callable[[], float] = time.monotonic
    _begun: float = field(default=0.0, init=False)
    _shown: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def show(self, done: Sequence[float]) -> None:
        passed_s = self.clock() - self._begun
        if not sys.stderr.isatty() or passed_s < PATIENCE_S or all(each >= 1 for each in done):
            return
        share = sum(cost * each for cost, each in zip(self.costs, done, strict=True)) / sum(self.costs)
        text = f"simulating: {sum(each >= 1 for each in done)} of {len(done)} runs done, {share:.0%}"
        if share > 0.02:  # before that, the estimate of the remaining time is too rough
            minutes, seconds = divmod(round(passed_s * (1 - share) / share), 60)
            text += f", about {minutes}:{seconds:02} left"
        self._write(text[: shutil.get_terminal_size().columns - 1])
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._write("")
            self._shown = False

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")  # to the first column, and clear the line
        sys.stderr.flush()
