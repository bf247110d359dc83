"""Several policies in the same world: a row for each, and how to show the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dispatcher.sim.experiment import SETTLED_AFTER, Name, Run, Setting, play
from dispatcher.sim.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table


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
    wait_p50_s: float | None
    wait_p99_s: float | None
    """Realtime requests: from arrival until a slot was free."""
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
    closed_s: dict[str, float]
    """How long the policy was closed, by reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows asked for, and the runs behind them."""

    setting: Setting
    trace: str
    rows: Sequence[Row]
    runs: Sequence[Run]

    def as_json(self) -> dict[str, Any]:
        """Figures rounded to what they are good for; the same for the same seed."""
        setting = {key: value for key, value in asdict(self.setting).items() if value is not None}
        setting["signals"] = self.setting.uses
        return {
            "trace": self.trace,
            "setting": setting,
            "rows": [_rounded(asdict(row)) for row in self.rows],
        }


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
    return Comparison(setting, trace.name, [_row(run, best, idle) for run in wanted], wanted)


def _row(run: Run, best: Run, idle: Run) -> Row:
    return Row(
        policy=run.name,
        harvest=_ratio(run.tokens, best.tokens),
        batch_tokens_per_s=run.tokens / run.seconds,
        batch_requests_per_s=run.answered / run.seconds,
        over_mean=run.over_mean,
        over_less_all_knowing=run.over_mean - best.over_mean,
        over_worst=run.over_worst,
        wait_p50_s=percentile(run.waits, 0.5),
        wait_p99_s=percentile(run.waits, 0.99),
        latency_p50_ratio=_ratio(percentile(run.latencies, 0.5), percentile(idle.latencies, 0.5)),
        latency_p99_ratio=_ratio(percentile(run.latencies, 0.99), percentile(idle.latencies, 0.99)),
        refused=run.refused,
        refused_per_1000=1000 * run.refused / max(1, run.sent),
        refused_per_1000_settled=1000 * run.refused_settled / max(1, run.sent_settled),
        unreachable=run.unreachable,
        realtime_refused=run.realtime_refused,
        closed_s=dict(run.closed_s),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


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

    rows = comparison.rows
    shown = Table(box=box.SIMPLE_HEAD if boxed else None, pad_edge=False, header_style="bold")
    refusals = any(row.refused or row.realtime_refused for row in rows)
    lost = any(row.unreachable for row in rows)
    shown.add_column("policy", no_wrap=True)
    for heading in ("harvest", "tokens/s", "over", "− own", "worst", "wait p50", "p99", "latency p50", "p99"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for heading in ("429", "per 1,000", "settled", "realtime 429") if refusals else ():
        shown.add_column(heading, justify="right", no_wrap=True)
    if lost:
        shown.add_column("unreachable", justify="right", no_wrap=True)
    for row in rows:
        cells = [
            row.policy.value,
            _cell(row.harvest, ".3f"),
            _cell(row.batch_tokens_per_s, ",.0f"),
            _cell(row.over_mean, ".2f"),
            _cell(row.over_less_all_knowing, "+.2f"),
            _cell(row.over_worst, ".0f"),
            _cell(row.wait_p50_s, ".3f", " s"),
            _cell(row.wait_p99_s, ".3f", " s"),
            _cell(row.latency_p50_ratio, ".2f", " ×"),
            _cell(row.latency_p99_ratio, ".2f", " ×"),
        ]
        if refusals:
            cells += [
                _cell(row.refused, ",d"),
                _cell(row.refused_per_1000, ".1f"),
                _cell(row.refused_per_1000_settled, ".1f"),
                _cell(row.realtime_refused, ",d"),
            ]
        if lost:
            cells.append(_cell(row.unreachable, ",d"))
        shown.add_row(*cells, style="bold green" if boxed and row.policy is Name.LAW else "")
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
            "over: requests in the system above (1 − reserve) × slots, mean; − own: less the all-knowing "
            "one's; worst: the most"
        ),
        "wait: of realtime requests for a slot; latency: of realtime, relative to the pool without batch",
    ]
    if any(row.refused or row.realtime_refused for row in comparison.rows):
        lines.append(
            f"429: refused batch requests; settled: per 1,000 after the first {SETTLED_AFTER} readings; "
            "realtime 429: realtime requests refused beside them"
        )
    closed = {row.policy: row.closed_s for row in comparison.rows if row.closed_s}
    for policy, seconds in closed.items():
        told = ", ".join(f"{reason} {total:.1f} s" for reason, total in seconds.items())
        lines.append(f"{policy} was closed: {told}")
    return "\n".join(lines)
