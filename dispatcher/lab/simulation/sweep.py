"""Sweep over several values of one option, and the choice of the value that reaches a target. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dispatcher.lab.simulation.report import Row
from dispatcher.lab.simulation.scenario import Scenario

DEFAULT_RESERVES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Reserves that are tried if a target is given without a sweep."""
MAX_VALUES = 100


class SweepError(ValueError):
    """Error for a sweep or a target that cannot be parsed. The message shows a valid one."""


@dataclass(frozen=True, slots=True)
class _Sweepable:
    change: Callable[[Scenario, float], Scenario]
    minimum: float
    maximum: float


SWEEPABLE: Mapping[str, _Sweepable] = {
    "reserve": _Sweepable(lambda setting, value: replace(setting, reserve=value), 0.0, 0.99),
    "scrape_s": _Sweepable(lambda setting, value: replace(setting, scrape_s=value), 0.01, 3600.0),
    "lag_s": _Sweepable(lambda setting, value: replace(setting, lag_s=value), 0.0, 3600.0),
    "batch_tokens": _Sweepable(
        lambda setting, value: replace(setting, batch=replace(setting.batch, tokens=value)), 1.0, 1e6
    ),
}
"""Keys of a scenario file that can be swept. None of them changes the realtime requests."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Option and the values to try."""

    option: str
    values: Sequence[float]

    def apply_value(self, base: Scenario, value: float) -> Scenario:
        return SWEEPABLE[self.option].change(base, value)


def parse_sweep(text: str) -> Sweep:
    """Parse a sweep such as `reserve=0,.05,.1`. Values are sorted and deduplicated. Raises SweepError."""
    option, _, listed = text.partition("=")
    option = option.strip().removeprefix("--")
    swept = SWEEPABLE.get(option)
    if swept is None:
        raise SweepError(f"{option!r} cannot be swept; {', '.join(SWEEPABLE)} can: reserve=0,.05,.1")
    values = set()
    for part in filter(None, (part.strip() for part in listed.split(","))):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not swept.minimum <= value <= swept.maximum:
            raise SweepError(
                f"{option}: {part!r} is not a number from {swept.minimum:g} to {swept.maximum:g}"
            )
        values.add(value)
    if not 1 <= len(values) <= MAX_VALUES:
        raise SweepError(f"{option}: give 1 to {MAX_VALUES} values, such as {option}=0.1,0.2")
    return Sweep(option, sorted(values))


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep."""

    option: str
    trace: str
    scenario: Scenario
    """Scenario, which is the same for all values except for the option."""
    rows: Sequence[tuple[float, Row]]
    """Rows of all policies with the value that each belongs to."""


@dataclass(frozen=True, slots=True)
class _Figure:
    value: Callable[[Row], float | None]
    describe: Callable[[float], str]


_FIGURES: Mapping[str, _Figure] = {
    "p50": _Figure(lambda row: row.latency_p50_ratio, lambda x: f"your users' p50 becomes {x:.3g} ×"),
    "p99": _Figure(lambda row: row.latency_p99_ratio, lambda x: f"your users' p99 becomes {x:.3g} ×"),
    "wait": _Figure(
        lambda row: row.wait_mean_less_none_s, lambda x: f"they wait {x:.3g} s longer on average"
    ),
    "wait p99": _Figure(lambda row: row.wait_p99_less_none_s, lambda x: f"their p99 waits {x:.3g} s longer"),
}
"""Figures that a target can bound: latency relative to that without batch requests, or added wait for a
slot."""
_RELATIVE = ("p50", "p99")
_BOUND = re.compile(r"(?:latency )?(p50|p99|wait p99|wait)\s*(?:<=|<|≤)\s*(\d*\.?\d+)\s*[x×s]?")


@dataclass(frozen=True, slots=True)
class Bound:
    """Upper bound of a figure."""

    figure: str
    maximum: float

    def compute_excess(self, row: Row) -> float:
        """Return by how much the row exceeds the bound: 0 if it does not, infinity if the row has no such
        figure."""
        value = _FIGURES[self.figure].value(row)
        return math.inf if value is None else max(0.0, value - self.maximum)

    def __str__(self) -> str:
        return f"{self.figure} <= {self.maximum:g}"


def parse_target(text: str) -> Sequence[Bound]:
    """Parse a target such as `p99 <= 1.2`, or several bounds joined by `and`. Raises SweepError."""
    bounds = []
    for part in re.split(r"\s+and\s+|,", " ".join(text.lower().split())):
        match = _BOUND.fullmatch(part.strip())
        if match is None:
            raise SweepError(
                f"{part!r} is no target; one is p99 <= 1.2 (users' latency relative to what it is without "
                f"batch work), or wait p99 <= 0.5 (seconds longer). Figures: {', '.join(_FIGURES)}"
            )
        bound = Bound(match[1], float(match[2]))
        if bound.figure in _RELATIVE and bound.maximum < 1:
            raise SweepError(
                f"{bound} cannot be kept: that is users' latency beside what it is without batch work, where "
                f"it is 1. Of seconds longer: wait p99 <= {bound.maximum:g}"
            )
        bounds.append(bound)
    return bounds


@dataclass(frozen=True, slots=True)
class Choice:
    """Value that was chosen for a target."""

    value: float | None
    """Value of the option, or `None` if no value reaches the target."""
    sentence: str


def choose_value(option: str, rows: Sequence[tuple[float, Row]], bounds: Sequence[Bound]) -> Choice:
    """Choose the value that satisfies all bounds with most batch tokens, or report which value comes
    closest."""
    target = " and ".join(map(str, bounds))
    keeping = [(value, row) for value, row in rows if not any(bound.compute_excess(row) for bound in bounds)]
    if keeping:
        value, row = max(keeping, key=lambda each: each[1].batch_tokens_per_s)
        return Choice(value, f"choose {option} {value:g}: {_describe_row(row, bounds)}")
    value, row = min(rows, key=lambda each: max(bound.compute_excess(each[1]) for bound in bounds))
    if any(math.isinf(bound.compute_excess(row)) for bound in bounds):
        return Choice(None, f"{target} cannot be judged: no realtime request was answered")
    return Choice(
        None,
        f"no {option} of these keeps {target}: {value:g} comes nearest, where {_describe_row(row, bounds)}",
    )


def _describe_row(row: Row, bounds: Sequence[Bound]) -> str:
    figures = [_FIGURES[figure] for figure in dict.fromkeys(bound.figure for bound in bounds)]
    users = ", ".join(each.describe(value) for each in figures if (value := each.value(row)) is not None)
    return f"batch gets {row.batch_tokens_per_s:,.0f} tokens/s; {users}"
