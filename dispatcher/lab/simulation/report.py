"""Results of several policies in the same scenario: a row of figures for each, and the table of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dispatcher.lab.simulation.experiment import SETTLED_AFTER, Name, Run, play
from dispatcher.lab.simulation.scenario import Setting
from dispatcher.lab.standin.trace import Trace

ITS_OWN = 0.01
"""Share of realtime requests that wait without any batch requests, from which on the pool is too small for
them."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one policy. Ratios and percentiles are `None` if there are no values for them."""

    policy: Name
    harvest: float | None
    """Tokens of answered batch requests, relative to those of the policy `all-knowing`."""
    batch_tokens_per_s: float
    batch_requests_per_s: float
    over_mean: float
    """Mean over time of the requests in the pool above (1 − B) × slots."""
    over_less_all_knowing: float | None
    """`overshoot_mean` minus that of the policy `all-knowing`, which cannot avoid it either. `None` if that
    was not run."""
    over_worst: float
    wait_mean_s: float | None
    wait_p50_s: float | None
    wait_p99_s: float | None
    """Time from arrival to a free slot of realtime requests that were not refused."""
    wait_mean_less_none_s: float | None
    wait_p99_less_none_s: float | None
    """Mean and 99th percentile of this time, minus those without batch requests."""
    latency_p50_ratio: float | None
    latency_p99_ratio: float | None
    """Percentile of the time from arrival to answer of realtime requests, divided by that without batch
    requests."""
    latency_p95_less_none_s: float | None
    """95th percentile of this time minus that without batch requests."""
    refused: int
    refused_per_1000: float
    """Batch requests answered with 429, and their number per 1,000 sent."""
    refused_per_1000_settled: float
    """`refused_per_1000` without the first SETTLING_READINGS readings."""
    unreachable: int
    """Batch requests that did not reach the gateway."""
    realtime_refused: int
    """Realtime requests answered with 429 because the queue was full."""
    realtime_refused_less_none: int
    """`realtime_refused` minus those without batch requests."""
    closed_s: dict[str, float]
    """Time for which the policy was closed, by reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requested rows, and the runs that they are computed from."""

    setting: Setting
    trace: str
    rows: Sequence[Row]
    runs: Sequence[Run]
    none: Run
    """Run without batch requests."""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON with rounded figures. The result depends only on scenario and
        seed."""
        return {
            "trace": self.trace,
            "setting": told_of(self.setting),
            "rows": [told_of(row) for row in self.rows],
            "warnings": [warning] if (warning := too_small(self.setting, self.none)) else [],
        }


def told_of(what: Setting | Row) -> dict[str, Any]:
    """Encode a scenario or a row as a JSON object."""
    told: dict[str, Any] = _rounded(asdict(what))
    if isinstance(what, Row):
        return told
    # The step that is used, not the one that was asked for.
    told["step_s"] = _rounded(what.steps_s)
    return {key: value for key, value in told.items() if value is not None}


def too_small(setting: Setting, alone: Run) -> str:
    """Return a sentence if the realtime requests alone need more slots than there are, otherwise an empty
    string."""
    waits, refused = alone.waits, alone.realtime_refused
    # Refused requests have no wait, but lacked a slot as well.
    waited = sum(wait > 0 for wait in waits) + refused
    share = waited / max(1, len(waits) + refused)
    if share < ITS_OWN:
        return ""
    return (
        f"realtime alone needs more than {setting.real_slots} slots: without batch work {share:.0%} "
        f"of its requests wait or are refused, and up to {alone.most} are there at once. Look at "
        "what batch work adds (the columns `added`), or give the slots of the pool that was recorded"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the table."""

    heading: str
    value: Callable[[Row], float | None]
    spec: str
    unit: str = ""
    width: int = 8
    """Minimum width of the cells."""

    def cell(self, row: Row) -> str:
        value = self.value(row)
        return "–" if value is None else format(value, self.spec) + self.unit


COLUMNS = (
    Column("tokens/s", lambda row: row.batch_tokens_per_s, ",.0f"),
    Column("users' p50", lambda row: row.latency_p50_ratio, ".2f", " ×"),
    Column("p99", lambda row: row.latency_p99_ratio, ".2f", " ×", 6),
    Column("wait", lambda row: row.wait_mean_s, ".3f", " s"),
    Column("added", lambda row: row.wait_mean_less_none_s, "+.3f", " s"),
    Column("wait p99", lambda row: row.wait_p99_s, ".2f", " s"),
    Column("added", lambda row: row.wait_p99_less_none_s, "+.2f", " s"),
)
"""Columns for operators with realtime users. Those that fit the width of the terminal are shown."""
LAW = (
    Column("harvest", lambda row: row.harvest, ".3f", width=7),
    Column("over", lambda row: row.over_mean, ".2f", width=6),
    Column("worst", lambda row: row.over_worst, ".0f", width=5),
)
"""Columns that show how well the limit algorithm works."""
REFUSED = (
    Column("realtime 429", lambda row: row.realtime_refused, ",d"),
    Column("added", lambda row: row.realtime_refused_less_none, "+,d"),
    Column("429", lambda row: row.refused, ",d"),
    Column("per 1,000", lambda row: row.refused_per_1000, ".1f"),
    Column("settled", lambda row: row.refused_per_1000_settled, ".1f"),
)
"""Columns for scenarios with a limited queue."""
UNREACHABLE = Column("unreachable", lambda row: row.unreachable, ",d")
GAP = "  "


class Sheet:
    """Table that is printed row by row as results arrive. Its columns are as wide as any row may need."""

    def __init__(
        self,
        first: str,
        names: Sequence[str],
        setting: Setting,
        *,
        width: int | None = None,
        harvest: bool = True,
    ) -> None:
        """Choose the columns.

        `first` is the heading of the first column, which has `names` in its rows. `width` is that of the
        terminal, or `None` for a pipe. `has_utilization` is True if the policy `all-knowing` is run, too.
        """
        refused = REFUSED if setting.queue_limit is not None else ()
        unreachable = (UNREACHABLE,) if setting.outages else ()
        every = [*COLUMNS, *refused, *unreachable, *LAW[not harvest :]]
        self._first = first.ljust(max(map(len, [first, *names])))
        self.columns = [
            column for i, column in enumerate(every) if width is None or self._wide(every[: i + 1]) <= width
        ]
        self.left_out = [column.heading for column in every[len(self.columns) :]]

    def header(self) -> str:
        return self._line(self._first, [column.heading for column in self.columns])

    def line(self, name: str, row: Row) -> str:
        return self._line(name.ljust(len(self._first)), [column.cell(row) for column in self.columns])

    def _line(self, first: str, cells: Sequence[str]) -> str:
        aligned = [cell.rjust(_width(column)) for column, cell in zip(self.columns, cells, strict=True)]
        return GAP.join([first, *aligned])

    def _wide(self, columns: Sequence[Column]) -> int:
        return len(self._first) + sum(len(GAP) + _width(column) for column in columns)


def _width(column: Column) -> int:
    return max(column.width, len(column.heading))


def moment_s(setting: Setting) -> float:
    """Return the interval between two samples of a run."""
    return max(0.25, setting.seconds / 1800)


def compare(
    setting: Setting,
    trace: Trace,
    names: Sequence[Name],
    *,
    progress: Callable[[Name, float], None] = lambda name, share: None,
) -> Comparison:
    """Run each policy and build the comparison.

    The policies `all-knowing` and `none` are always run, since the others are compared with them. `progress`
    is called with the policy and the completed share of all runs.
    """
    # In the order of the enum, whatever the order of the arguments.
    every = [name for name in Name if name in {*names, Name.ALL_KNOWING, Name.NONE}]
    runs: dict[Name, Run] = {}
    for done, name in enumerate(every):

        def report(now: float, done: int = done, name: Name = name) -> None:
            progress(name, (done + now / setting.seconds) / len(every))

        runs[name] = play(setting, trace, name, moment_s=moment_s(setting), progress=report)
    return comparison(setting, trace.name, names, runs)


def comparison(setting: Setting, trace: str, names: Sequence[Name], runs: Mapping[Name, Run]) -> Comparison:
    """Build the comparison from runs, which must include those of `all-knowing` and `none`."""
    best, idle = runs[Name.ALL_KNOWING], runs[Name.NONE]
    wanted = [runs[name] for name in Name if name in names]
    return Comparison(setting, trace, [row_of(run, best, idle) for run in wanted], wanted, idle)


def row_of(run: Run, best: Run | None, idle: Run) -> Row:
    """Compute the row of a run. `best` is the run of `all-knowing`, if there is one; `idle` is that of
    `none`."""
    return Row(
        policy=run.name,
        harvest=None if best is None else _ratio(run.tokens, best.tokens),
        batch_tokens_per_s=run.tokens / run.seconds,
        batch_requests_per_s=run.answered / run.seconds,
        over_mean=run.over_mean,
        over_less_all_knowing=None if best is None else run.over_mean - best.over_mean,
        over_worst=run.over_worst,
        wait_mean_s=_mean(run.waits),
        wait_p50_s=percentile(run.waits, 0.5),
        wait_p99_s=percentile(run.waits, 0.99),
        wait_mean_less_none_s=_less(_mean(run.waits), _mean(idle.waits)),
        wait_p99_less_none_s=_less(percentile(run.waits, 0.99), percentile(idle.waits, 0.99)),
        latency_p50_ratio=_ratio(percentile(run.latencies, 0.5), percentile(idle.latencies, 0.5)),
        latency_p99_ratio=_ratio(percentile(run.latencies, 0.99), percentile(idle.latencies, 0.99)),
        latency_p95_less_none_s=_less(percentile(run.latencies, 0.95), percentile(idle.latencies, 0.95)),
        refused=run.refused,
        refused_per_1000=1000 * run.refused / max(1, run.sent),
        refused_per_1000_settled=1000 * run.refused_settled / max(1, run.sent_settled),
        unreachable=run.unreachable,
        realtime_refused=run.realtime_refused,
        realtime_refused_less_none=run.realtime_refused - idle.realtime_refused,
        closed_s=dict(run.closed_s),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is not exceeded by at least this share of the values, or `None` without
    values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _less(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def sentence(row: Row) -> str:
    """Describe in one sentence what a policy gains and costs."""
    batch = f"batch gets {row.batch_tokens_per_s:,.0f} tokens/s"
    if row.latency_p99_ratio is None or row.wait_p99_less_none_s is None:
        return f"{batch}; no realtime request was answered"
    return (
        f"{batch}; your users' p99 becomes {row.latency_p99_ratio:.2f} × what it is, and for a slot it waits "
        f"{row.wait_p99_less_none_s:.2f} s longer"
    )


def legend(setting: Setting, trace: str, sheet: Sheet, *, reserve: bool = True) -> str:
    """Return a description of the scenario and of the columns."""
    truly = "" if setting.real_slots == setting.slots else f" (truly {setting.real_slots})"
    kept = f"reserve {setting.reserve:g}, " if reserve else ""
    coarse = f", in steps of {setting.steps_s:.3g} s" if setting.steps_s else ""
    coarse += f", {setting.grain} batch requests as one" if setting.grain > 1 else ""
    lines = [
        (
            f"{trace}, {setting.seconds:g} s{coarse}, {setting.slots} slots{truly}, {kept}"
            f"a scrape every {setting.scrape_s:g} s known after {setting.lag_s:g} s"
        ),
        "tokens/s: batch work's; users': realtime's latency, relative to the pool without batch work",
        "wait: of realtime requests for a slot, mean and 99th percentile; added: what batch work adds to it",
    ]
    shown = {column.heading for column in sheet.columns}
    if "harvest" in shown:
        lines.append("harvest: batch tokens relative to a dispatcher that knows everything at once")
    if "worst" in shown:
        lines.append("over: requests in the system above (1 − reserve) × slots, mean; worst: the most")
    if "settled" in shown:
        lines.append(
            "realtime 429: realtime requests that were refused, which have no wait; 429: refused batch "
            f"requests; settled: per 1,000 after the first {SETTLED_AFTER} readings"
        )
    if sheet.left_out:
        lines.append(f"a wider terminal, a pipe or --json shows {', '.join(sheet.left_out)} as well")
    return "\n".join(lines)


def closures(setting: Setting, rows: Iterable[tuple[str, Row]]) -> list[str]:
    """Return a line for each row that was closed, with reasons and durations. Reasons seen in a single sample
    are left out, since they may have lasted only a moment, as at the start."""
    told = []
    for name, row in rows:
        longer = {reason: total for reason, total in row.closed_s.items() if total > 1.5 * moment_s(setting)}
        reasons = ", ".join(f"{reason} {total:.1f} s" for reason, total in longer.items())
        if reasons:
            told.append(f"{name} was closed: {reasons}")
    return told
