"""The series that an expression may name, with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from dispatcher.telemetry.catalogue import CATALOGUE
from dispatcher.telemetry.series import SeriesKind
from tests.monitoring.chart_files import load_recorded_expressions
from tests.monitoring.promql import parse_expression

TARGET_LABELS = {"job", "namespace", "pool", "instance"}
"""Labels that the scrape adds to each series."""
OTHER_SERIES = {
    "up": TARGET_LABELS - {"pool"},
    "ALERTS": TARGET_LABELS | {"alertname", "alertstate"},
} | dict.fromkeys(
    ("process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"),
    TARGET_LABELS - {"pool"},
)
"""Series of Prometheus and of its client library."""


@dataclass(frozen=True)
class KnownSeries:
    """A series that an expression may name: its labels, with all values if they are declared."""

    labels: Mapping[str, tuple[str, ...]]


@cache
def find_known_series() -> dict[str, KnownSeries]:
    found = {name: KnownSeries(dict.fromkeys(labels, ())) for name, labels in OTHER_SERIES.items()}
    common_labels = dict.fromkeys(TARGET_LABELS, ())
    for series in CATALOGUE:
        labels = KnownSeries({**common_labels, **series.labels})
        if series.kind is SeriesKind.HISTOGRAM:
            buckets = KnownSeries({**common_labels, "le": ()})
            found |= {f"{series.page_name}_bucket": buckets}
            found |= dict.fromkeys((f"{series.page_name}_sum", f"{series.page_name}_count"), labels)
        else:
            found[series.page_name] = labels
    for name, expression in load_recorded_expressions().items():
        remaining_labels = parse_expression(expression).labels & {"namespace", "pool", "reason"}
        found[name] = KnownSeries({label: _find_values(expression, label) for label in remaining_labels})
    return found


def _find_values(expression: str, label: str) -> tuple[str, ...]:
    names = {selector.name for selector in parse_expression(expression).selectors}
    return next(
        (each.labels[label] for each in CATALOGUE if each.page_name in names and label in each.labels), ()
    )
