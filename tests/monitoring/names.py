"""Every series that an expression may name, with its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from dispatcher.telemetry.catalogue import CATALOGUE, SeriesKind
from tests.monitoring.files import recorded
from tests.monitoring.promql import named

TARGET = {"job", "namespace", "pool", "instance"}
"""What the scrape, and every series of ours, has."""
FOREIGN = {"up": TARGET - {"pool"}, "ALERTS": TARGET | {"alertname", "alertstate"}} | dict.fromkeys(
    ("process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"),
    TARGET - {"pool"},
)
"""Series of Prometheus and of the client library."""


@dataclass(frozen=True)
class Known:
    """A series as an expression may name it: its labels, with all values where they are declared."""

    labels: Mapping[str, tuple[str, ...]]


@cache
def known() -> dict[str, Known]:
    found = {name: Known(dict.fromkeys(labels, ())) for name, labels in FOREIGN.items()}
    ours = dict.fromkeys(TARGET, ())
    for series in CATALOGUE:
        labels = Known({**ours, **series.labels})
        if series.kind is SeriesKind.HISTOGRAM:
            buckets = Known({**ours, "le": ()})
            found |= {f"{series.page_name}_bucket": buckets}
            found |= dict.fromkeys((f"{series.page_name}_sum", f"{series.page_name}_count"), labels)
        else:
            found[series.page_name] = labels
    for name, expression in recorded().items():
        kept = named(expression).labels & {"namespace", "pool", "reason"}
        found[name] = Known({label: _values(expression, label) for label in kept})
    return found


def _values(expression: str, label: str) -> tuple[str, ...]:
    names = {selector.name for selector in named(expression).selectors}
    return next(
        (each.labels[label] for each in CATALOGUE if each.page_name in names and label in each.labels), ()
    )
