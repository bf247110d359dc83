"""Results of several policies in the same scenario: a row of figures for each, and the table of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dispatcher.lab.simulation.experiment import SETTLING_READINGS, PolicyName, Run, run_scenario
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.standin.trace import Trace

SHORTAGE_SHARE = 0.01
"""Share of realtime requests that wait without any batch requests, from which on the pool is too small for
them."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one policy. Ratios and percentiles are `None` if there are no values for them."""

    policy: PolicyName
    utilization: float | None
    """Tokens of answered batch requests, relative to those of the policy `all-knowing`."""
    batch_tokens_per_s: float
    batch_requests_per_s: float
    overshoot_mean: float
    """Mean over time of the requests in the pool above (1 − B) × slots."""
    overshoot_less_all_knowing: float | None
    """`overshoot_mean` minus that of the policy `all-knowing`, which cannot avoid it either. `None` if that
    was not run."""
    overshoot_worst: float
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
    preempted: int
    evicted: int
    """Batch requests that were stopped for realtime requests."""
    realtime_refused: int
    """Realtime requests answered with 429 because the queue was full."""
    realtime_refused_less_none: int
    """`realtime_refused` minus those without batch requests."""
    closed_s: dict[str, float]
    """Time for which the policy was closed, by reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requested rows, and the runs that they are computed from."""

    scenario: Scenario
    trace: str
    rows: Sequence[Row]
    runs: Sequence[Run]
    without_batch: Run
    """Run without batch requests."""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON with rounded figures. The result depends only on scenario and
        seed."""
        return {
            "trace": self.trace,
            "scenario": encode_fields(self.scenario),
            "rows": [encode_fields(row) for row in self.rows],
            "warnings": [warning]
            if (warning := describe_shortage(self.scenario, self.without_batch))
            else [],
        }


def encode_fields(source: Scenario | Row) -> dict[str, Any]:
    """Encode a scenario or a row as a JSON object."""
    encoded: dict[str, Any] = _round_values(asdict(source))
    if isinstance(source, Row):
        return encoded
    # The step that is used, not the one that was asked for.
    encoded["time_step_s"] = _round_values(source.effective_time_step_s)
    return {key: value for key, value in encoded.items() if value is not None}


def describe_shortage(scenario: Scenario, without_batch: Run) -> str:
    """Return a sentence if the realtime requests alone need more slots than there are, otherwise an empty
    string."""
    waits, refused = without_batch.waits, without_batch.realtime_refused
    # Refused requests have no wait, but lacked a slot as well.
    waited = sum(wait > 0 for wait in waits) + refused
    share = waited / max(1, len(waits) + refused)
    if share < SHORTAGE_SHARE:
        return ""
    return (
        f"realtime alone needs more than {scenario.real_slots} slots: without batch work {share:.0%} "
        f"of its requests wait or are refused, and up to {without_batch.peak_requests} are there at "
        "once. Look at "
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

    def format_cell(self, row: Row) -> str:
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
DISPATCHER_COLUMNS = (
    Column("utilization", lambda row: row.utilization, ".3f", width=7),
    Column("over", lambda row: row.overshoot_mean, ".2f", width=6),
    Column("worst", lambda row: row.overshoot_worst, ".0f", width=5),
)
"""Columns that show how well the limit algorithm works."""
REFUSED_COLUMNS = (
    Column("realtime 429", lambda row: row.realtime_refused, ",d"),
    Column("added", lambda row: row.realtime_refused_less_none, "+,d"),
    Column("429", lambda row: row.refused, ",d"),
    Column("per 1,000", lambda row: row.refused_per_1000, ".1f"),
    Column("settled", lambda row: row.refused_per_1000_settled, ".1f"),
)
"""Columns for scenarios with a limited queue."""
UNREACHABLE_COLUMN = Column("unreachable", lambda row: row.unreachable, ",d")
PREEMPTED_COLUMN = Column("preempted", lambda row: row.preempted, ",d")
EVICTED_COLUMN = Column("evicted", lambda row: row.evicted, ",d")
COLUMN_GAP = "  "


class Table:
    """Table that is printed row by row as results arrive. Its columns are as wide as any row may need."""

    def __init__(
        self,
        first: str,
        names: Sequence[str],
        scenario: Scenario,
        *,
        width: int | None = None,
        has_utilization: bool = True,
    ) -> None:
        """Choose the columns.

        `first` is the heading of the first column, which has `names` in its rows. `width` is that of the
        terminal, or `None` for a pipe. `has_utilization` is True if the policy `all-knowing` is run, too.
        """
        refused = REFUSED_COLUMNS if scenario.queue_limit is not None else ()
        unreachable = (UNREACHABLE_COLUMN,) if scenario.outages else ()
        preempted = (PREEMPTED_COLUMN,) if scenario.kv_tokens else ()
        evicted = (EVICTED_COLUMN,) if scenario.evicts else ()
        candidates = [
            *COLUMNS,
            *refused,
            *unreachable,
            *preempted,
            *evicted,
            *DISPATCHER_COLUMNS[not has_utilization :],
        ]
        self._first = first.ljust(max(map(len, [first, *names])))
        self.columns = [
            column
            for i, column in enumerate(candidates)
            if width is None or self._compute_width(candidates[: i + 1]) <= width
        ]
        self.left_out = [column.heading for column in candidates[len(self.columns) :]]

    def format_header(self) -> str:
        return self._format_line(self._first, [column.heading for column in self.columns])

    def format_row(self, name: str, row: Row) -> str:
        return self._format_line(
            name.ljust(len(self._first)), [column.format_cell(row) for column in self.columns]
        )

    def _format_line(self, first: str, cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(_get_column_width(column)) for column, cell in zip(self.columns, cells, strict=True)
        ]
        return COLUMN_GAP.join([first, *aligned])

    def _compute_width(self, columns: Sequence[Column]) -> int:
        return len(self._first) + sum(len(COLUMN_GAP) + _get_column_width(column) for column in columns)


def _get_column_width(column: Column) -> int:
    return max(column.width, len(column.heading))


def get_sample_interval_s(scenario: Scenario) -> float:
    """Return the interval between two samples of a run."""
    return max(0.25, scenario.seconds / 1800)


def compare_policies(
    scenario: Scenario,
    trace: Trace,
    names: Sequence[PolicyName],
    *,
    progress: Callable[[PolicyName, float], None] = lambda name, share: None,
) -> Comparison:
    """Run each policy and build the comparison.

    The policies `all-knowing` and `none` are always run, since the others are compared with them. `progress`
    is called with the policy and the completed share of all runs.
    """
    # In the order of the enum, whatever the order of the arguments.
    played = [name for name in PolicyName if name in {*names, PolicyName.ALL_KNOWING, PolicyName.NONE}]
    runs: dict[PolicyName, Run] = {}
    for done, name in enumerate(played):

        def report_progress(now: float, done: int = done, name: PolicyName = name) -> None:
            progress(name, (done + now / scenario.seconds) / len(played))

        runs[name] = run_scenario(
            scenario, trace, name, sample_interval_s=get_sample_interval_s(scenario), progress=report_progress
        )
    return build_comparison(scenario, trace.name, names, runs)


def build_comparison(
    scenario: Scenario, trace: str, names: Sequence[PolicyName], runs: Mapping[PolicyName, Run]
) -> Comparison:
    """Build the comparison from runs, which must include those of `all-knowing` and `none`."""
    best, idle = runs[PolicyName.ALL_KNOWING], runs[PolicyName.NONE]
    selected = [runs[name] for name in PolicyName if name in names]
    return Comparison(scenario, trace, [build_row(run, best, idle) for run in selected], selected, idle)


def build_row(run: Run, best: Run | None, idle: Run) -> Row:
    """Compute the row of a run. `best` is the run of `all-knowing`, if there is one; `idle` is that of
    `none`."""
    return Row(
        policy=run.policy,
        utilization=None if best is None else _divide_by_base(run.tokens, best.tokens),
        batch_tokens_per_s=run.tokens / run.seconds,
        batch_requests_per_s=run.answered / run.seconds,
        overshoot_mean=run.overshoot_mean,
        overshoot_less_all_knowing=None if best is None else run.overshoot_mean - best.overshoot_mean,
        overshoot_worst=run.overshoot_worst,
        wait_mean_s=_compute_mean(run.waits),
        wait_p50_s=percentile(run.waits, 0.5),
        wait_p99_s=percentile(run.waits, 0.99),
        wait_mean_less_none_s=_subtract_base(_compute_mean(run.waits), _compute_mean(idle.waits)),
        wait_p99_less_none_s=_subtract_base(percentile(run.waits, 0.99), percentile(idle.waits, 0.99)),
        latency_p50_ratio=_divide_by_base(percentile(run.latencies, 0.5), percentile(idle.latencies, 0.5)),
        latency_p99_ratio=_divide_by_base(percentile(run.latencies, 0.99), percentile(idle.latencies, 0.99)),
        latency_p95_less_none_s=_subtract_base(
            percentile(run.latencies, 0.95), percentile(idle.latencies, 0.95)
        ),
        refused=run.refused,
        refused_per_1000=1000 * run.refused / max(1, run.sent),
        refused_per_1000_settled=1000 * run.refused_settled / max(1, run.sent_settled),
        unreachable=run.unreachable,
        preempted=run.preempted,
        evicted=run.evicted,
        realtime_refused=run.realtime_refused,
        realtime_refused_less_none=run.realtime_refused - idle.realtime_refused,
        closed_s=dict(run.closed_s),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is not exceeded by at least this share of the values, or `None` without
    values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _compute_mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _subtract_base(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _divide_by_base(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _round_values(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _round_values(item) for key, item in value.items()}
    return value


def describe_row(row: Row, scenario: Scenario) -> str:
    """Describe in one sentence what a policy gains and costs."""
    how = "" if scenario.slice_tokens is None else f"in slices of {scenario.slice_tokens} tokens, "
    how = "without slices, " if row.policy is PolicyName.WHOLE else how
    batch = f"{how}batch gets {row.batch_tokens_per_s:,.0f} tokens/s"
    if row.latency_p99_ratio is None or row.wait_p99_less_none_s is None:
        return f"{batch}; no realtime request was answered"
    return (
        f"{batch}; your users' p99 becomes {row.latency_p99_ratio:.2f} × what it is, and for a slot it waits "
        f"{row.wait_p99_less_none_s:.2f} s longer"
    )


def format_legend(scenario: Scenario, trace: str, table: Table, *, reserve: bool = True) -> str:
    """Return a description of the scenario and of the columns."""
    real_slots = "" if scenario.real_slots == scenario.slots else f" (truly {scenario.real_slots})"
    kept = f"reserve {scenario.reserve:g}, " if reserve else ""
    coarse = f", in steps of {scenario.effective_time_step_s:.3g} s" if scenario.effective_time_step_s else ""
    coarse += f", {scenario.requests_per_job} batch requests as one" if scenario.requests_per_job > 1 else ""
    slices = ""
    if scenario.slice_tokens is not None:
        slices = f"slices of {scenario.slice_tokens} tokens (later ones + {scenario.slice_overhead_s:g} s), "
        slices += "revoked for realtime, " if scenario.revokes_slices else ""
    lines = [
        (
            f"{trace}, {scenario.seconds:g} s{coarse}, {scenario.slots} slots{real_slots}, {slices}{kept}"
            f"a scrape every {scenario.scrape_s:g} s known after {scenario.lag_s:g} s"
        ),
        "tokens/s: batch work's; users': realtime's latency, relative to the pool without batch work",
        "wait: of realtime requests for a slot, mean and 99th percentile; added: what batch work adds to it",
    ]
    shown = {column.heading for column in table.columns}
    if "utilization" in shown:
        lines.append("utilization: batch tokens relative to a dispatcher that knows everything at once")
    if "worst" in shown:
        lines.append("over: requests in the system above (1 − reserve) × slots, mean; worst: the most")
    if "settled" in shown:
        lines.append(
            "realtime 429: realtime requests that were refused, which have no wait; 429: refused batch "
            f"requests; settled: per 1,000 after the first {SETTLING_READINGS} readings"
        )
    if "preempted" in shown:
        lines.append("preempted: requests stopped because the KV memory was full, and computed again later")
    if "evicted" in shown:
        lines.append("evicted: batch requests stopped for a realtime request; their tokens are lost")
    if table.left_out:
        lines.append(f"a wider terminal, a pipe or --json shows {', '.join(table.left_out)} as well")
    return "\n".join(lines)


def describe_closures(scenario: Scenario, rows: Iterable[tuple[str, Row]]) -> list[str]:
    """Return a line for each row that was closed, with reasons and durations. Reasons seen in a single sample
    are left out, since they may have lasted only a moment, as at the start."""
    lines = []
    for name, row in rows:
        longer = {
            reason: total
            for reason, total in row.closed_s.items()
            if total > 1.5 * get_sample_interval_s(scenario)
        }
        reasons = ", ".join(f"{reason} {total:.1f} s" for reason, total in longer.items())
        if reasons:
            lines.append(f"{name} was closed: {reasons}")
    return lines
