"""Several policies in the same world: a row for each, and how to show the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dispatcher.sim.experiment import SETTLED_AFTER, Name, Run, play
from dispatcher.sim.setting import Setting
from dispatcher.standin.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table


ITS_OWN = 0.01
"""Where this share of realtime's requests waits without batch work, it lacks slots itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a policy came to. Ratios and percentiles are None where there is nothing to divide or to rank."""

    policy: Name
    harvest: float | None
    """Batch tokens answered, relative to the all-knowing dispatcher's."""
    batch_tokens_per_s: float
    batch_requests_per_s: float
    over_mean: float
    """Requests in the system above (1 − B) × slots: mean over time."""
    over_less_all_knowing: float
    """The same, less what even the all-knowing dispatcher cannot avoid."""
    over_worst: float
    wait_mean_s: float | None
    wait_p50_s: float | None
    wait_p99_s: float | None
    """Realtime requests that were not refused: from arrival until a slot was free."""
    wait_mean_less_none_s: float | None
    wait_p99_less_none_s: float | None
    """The same, less what they wait without batch work."""
    latency_p50_ratio: float | None
    latency_p99_ratio: float | None
    """Realtime requests, from arrival to answer: the percentile over the same without batch work."""
    refused: int
    refused_per_1000: float
    """Batch requests answered with 429, and their share of those sent."""
    refused_per_1000_settled: float
    """The same, without the first SETTLED_AFTER readings."""
    unreachable: int
    """Batch requests that found no gateway."""
    realtime_refused: int
    """Realtime requests answered with 429, because the queue was full."""
    realtime_refused_less_none: int
    """The same, less those that are refused without batch work."""
    closed_s: dict[str, float]
    """How long the policy was closed, by reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows asked for, and the runs behind them."""

    setting: Setting
    trace: str
    rows: Sequence[Row]
    runs: Sequence[Run]
    none: Run
    """What realtime is to itself, without batch work."""

    @property
    def too_small(self) -> str:
        """A sentence where realtime alone needs more slots than there are; empty where it does not."""
        waits, refused = self.none.waits, self.none.realtime_refused
        waited = sum(wait > 0 for wait in waits) + refused
        share = waited / max(1, len(waits) + refused)
        if share < ITS_OWN:
            return ""
        return (
            f"realtime alone needs more than {self.setting.real_slots} slots: without batch work {share:.0%} "
            f"of its requests wait or are refused, and up to {self.none.most} are there at once. Look at "
            "what batch work adds (− none's), or give the slots of the pool that was recorded"
        )

    def as_json(self) -> dict[str, Any]:
        """Figures rounded to what they are good for; the same for the same seed."""
        setting = {key: value for key, value in asdict(self.setting).items() if value is not None}
        return {
            "trace": self.trace,
            "setting": setting,
            "rows": [_rounded(asdict(row)) for row in self.rows],
            "warnings": [self.too_small] if self.too_small else [],
        }


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each row."""

    heading: str
    value: Callable[[Row], float | None]
    spec: str
    unit: str = ""


COLUMNS = (
    Column("harvest", lambda row: row.harvest, ".3f"),
    Column("tokens/s", lambda row: row.batch_tokens_per_s, ",.0f"),
    Column("wait", lambda row: row.wait_mean_s, ".3f", " s"),
    Column("− none's", lambda row: row.wait_mean_less_none_s, "+.3f", " s"),
    Column("p99", lambda row: row.wait_p99_s, ".2f", " s"),
    Column("− none's", lambda row: row.wait_p99_less_none_s, "+.2f", " s"),
    Column("latency p50", lambda row: row.latency_p50_ratio, ".2f", " ×"),
    Column("p99", lambda row: row.latency_p99_ratio, ".2f", " ×"),
    Column("over", lambda row: row.over_mean, ".2f"),
    Column("worst", lambda row: row.over_worst, ".0f"),
)


def _any_refused(row: Row) -> bool:
    return bool(row.refused or row.realtime_refused)


OPTIONAL: Sequence[tuple[Column, Callable[[Row], bool]]] = (
    (Column("realtime 429", lambda row: row.realtime_refused, ",d"), _any_refused),
    (Column("− none's", lambda row: row.realtime_refused_less_none, "+,d"), _any_refused),
    (Column("429", lambda row: row.refused, ",d"), _any_refused),
    (Column("per 1,000", lambda row: row.refused_per_1000, ".1f"), _any_refused),
    (Column("settled", lambda row: row.refused_per_1000_settled, ".1f"), _any_refused),
    (Column("unreachable", lambda row: row.unreachable, ",d"), lambda row: bool(row.unreachable)),
)
"""Shown where any row has one."""


def compare(
    setting: Setting,
    trace: Trace,
    names: Sequence[Name],
    *,
    progress: Callable[[Name, float], None] = lambda name, share: None,
) -> Comparison:
    """Play each policy; the all-knowing and the idle one are played anyway, as what to compare with.

    `progress`: (policy, share of all work that is done), now and then.
    """
    every = [name for name in Name if name in {*names, Name.ALL_KNOWING, Name.NONE}]
    runs: dict[Name, Run] = {}
    for done, name in enumerate(every):

        def report(now: float, done: int = done, name: Name = name) -> None:
            progress(name, (done + now / setting.seconds) / len(every))

        moment_s = max(0.25, setting.seconds / 1800)
        runs[name] = play(setting, trace, name, moment_s=moment_s, progress=report)
    best, idle = runs[Name.ALL_KNOWING], runs[Name.NONE]
    wanted = [runs[name] for name in every if name in names]
    return Comparison(setting, trace.name, [_row(run, best, idle) for run in wanted], wanted, idle)


def _row(run: Run, best: Run, idle: Run) -> Row:
    return Row(
        policy=run.name,
        harvest=_ratio(run.tokens, best.tokens),
        batch_tokens_per_s=run.tokens / run.seconds,
        batch_requests_per_s=run.answered / run.seconds,
        over_mean=run.over_mean,
        over_less_all_knowing=run.over_mean - best.over_mean,
        over_worst=run.over_worst,
        wait_mean_s=_mean(run.waits),
        wait_p50_s=percentile(run.waits, 0.5),
        wait_p99_s=percentile(run.waits, 0.99),
        wait_mean_less_none_s=_less(_mean(run.waits), _mean(idle.waits)),
        wait_p99_less_none_s=_less(percentile(run.waits, 0.99), percentile(idle.waits, 0.99)),
        latency_p50_ratio=_ratio(percentile(run.latencies, 0.5), percentile(idle.latencies, 0.5)),
        latency_p99_ratio=_ratio(percentile(run.latencies, 0.99), percentile(idle.latencies, 0.99)),
        refused=run.refused,
        refused_per_1000=1000 * run.refused / max(1, run.sent),
        refused_per_1000_settled=1000 * run.refused_settled / max(1, run.sent_settled),
        unreachable=run.unreachable,
        realtime_refused=run.realtime_refused,
        realtime_refused_less_none=run.realtime_refused - idle.realtime_refused,
        closed_s=dict(run.closed_s),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None of none."""
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


def table(comparison: Comparison, *, boxed: bool) -> Table:
    """The rows for people; `boxed` for a terminal, else columns that cut and awk can read."""
    from rich import box
    from rich.table import Table

    columns = [*COLUMNS]
    for column, where in OPTIONAL:
        if any(where(row) for row in comparison.rows):
            columns.append(column)
    shown = Table(box=box.SIMPLE_HEAD if boxed else None, pad_edge=False, header_style="bold")
    shown.add_column("policy", no_wrap=True)
    for column in columns:
        shown.add_column(column.heading, justify="right", no_wrap=True)
    for row in comparison.rows:
        cells = [_cell(column.value(row), column.spec, column.unit) for column in columns]
        style = "bold green" if boxed and row.policy is Name.LAW else ""
        shown.add_row(row.policy.value, *cells, style=style)
    return shown


def _cell(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else format(value, spec) + unit


def legend(comparison: Comparison) -> str:
    """What the columns mean, in a few lines."""
    setting = comparison.setting
    truly = "" if setting.real_slots == setting.slots else f" (truly {setting.real_slots})"
    lines = [
        (
            f"{comparison.trace}, {setting.seconds:g} s, {setting.slots} slots{truly}, "
            f"reserve {setting.reserve:g}, "
            f"a scrape every {setting.scrape_s:g} s known after {setting.lag_s:g} s"
        ),
        "harvest: batch tokens relative to a dispatcher that knows everything at once",
        (
            "wait: of realtime requests for a slot, mean and 99th percentile; − none's: less what it is "
            "without batch work; latency: of realtime, relative to the pool without batch"
        ),
        "over: requests in the system above (1 − reserve) × slots, mean; worst: the most",
    ]
    if any(_any_refused(row) for row in comparison.rows):
        lines.append(
            "realtime 429: realtime requests that were refused, which have no wait; 429: refused batch "
            f"requests; settled: per 1,000 after the first {SETTLED_AFTER} readings"
        )
    closed = {row.policy: row.closed_s for row in comparison.rows if row.closed_s}
    for policy, seconds in closed.items():
        told = ", ".join(f"{reason} {total:.1f} s" for reason, total in seconds.items())
        lines.append(f"{policy} was closed: {told}")
    return "\n".join(lines)
