"""The process's series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatcher.telemetry.status import Status

PREFIX = "batch_dispatcher_"
TRY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CAPACITIES = ("watch", "picker", "setting", "query")
"""The Kubernetes watch where it lowers what the others say; the endpoint picker; `budget.max_sys`; a query of
one's own."""
_GAUGES = (
    ("limit", "Our requests that may be in flight, all replicas together"),
    ("in_flight", "Our requests in flight, all replicas together"),
    ("running", "Requests in flight in this process"),
    ("f_sys", "Saturation of the pool: cur_SYS / max_SYS of the binding signal"),
    ("f_epp", "What waits in the endpoint picker: cur_EPP / max_SYS"),
    ("reserve", "B, the share that batch work never takes"),
    ("budget", "D = 1 - (F_SYS + F_EPP + B)"),
    ("headroom", "floor(max_SYS x D), in requests"),
    ("max_sys", "Capacity of the pool, in requests"),
    ("per_endpoint", "Requests per endpoint that the capacity is reckoned with"),
    (
        "picker_max_concurrency",
        "maxConcurrency of the endpoint picker; absent where its pages do not show it",
    ),
    ("watch_endpoints", "Ready endpoints by the Kubernetes watch; absent while it knows none"),
    ("watch_unsure_seconds", "Since when the Kubernetes API was not heard; absent while it is followed"),
    ("ceiling", "What refusals taught; absent while none is in force"),
    ("reading_age_seconds", "Age of the newest sample"),
    ("pending", "Requests waiting for their first or next delivery"),
    ("leased", "Live leases of all replicas"),
    ("delayed", "Requests waiting for a retry"),
    ("dead", "Requests put aside for an operator"),
    ("loop_lag_seconds", "How late the event loop ran what was due, at most, in the last 10 s"),
    ("config_generation", "Counts the configurations that were in force"),
)
_GAUGE_FIELDS = {
    "reading_age_seconds": "reading_age_s",
    "watch_unsure_seconds": "watch_unsure_s",
    "loop_lag_seconds": "loop_lag_s",
}


class _Gauges(Collector):
    """Reads the status when it is scraped: the hot path sets no gauge."""

    def __init__(self, status: Callable[[], Status], reasons: tuple[str, ...]) -> None:
        self._status = status
        self._reasons = reasons

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, meaning in _GAUGES:
            value = getattr(status, _GAUGE_FIELDS.get(name, name))
            if value is not None:
                yield GaugeMetricFamily(PREFIX + name, meaning, value=float(value))
        yield _one_of(
            "gate", "1 for the gate's reason, 0 for all others", "reason", self._reasons, status.reason
        )
        yield _one_of("max_sys_by", "1 for whose word max_sys is", "by", CAPACITIES, status.max_sys_by)
        for name, meaning, holds in (
            ("config_refused", "1 while the newest configuration file is bad", status.config_problem),
            ("watch_failing", "1 while the Kubernetes watch has a problem", status.watch_problems),
        ):
            yield GaugeMetricFamily(PREFIX + name, meaning, value=float(bool(holds)))


def _one_of(name: str, meaning: str, label: str, values: Iterable[str], now: str | None) -> Metric:
    """A series for each value: 1 for the one that holds."""
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=[label])
    for value in values:
        family.add_metric([value], float(value == now))
    return family


class Metrics:
    """The process's series, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        tries = Counter(PREFIX + "tries", "Tries by outcome", ["outcome"], registry=self.registry)
        ended = Counter(PREFIX + "leases_ended", "Leases ended", ["how", "answer"], registry=self.registry)
        self._tries: dict[str, Counter] = {}
        self._ended: dict[tuple[str, str], Counter] = {}
        self._bind_try, self._bind_end = tries.labels, ended.labels
        self._seconds = Histogram(
            PREFIX + "try_seconds", "From sending to the outcome", buckets=TRY_SECONDS, registry=self.registry
        )
        self._expired = Counter(
            PREFIX + "expired", "Requests that passed their deadline waiting", registry=self.registry
        )

    def tried(self, outcome: str, seconds: float) -> None:
        counter = self._tries.get(outcome)
        if counter is None:
            counter = self._tries[outcome] = self._bind_try(outcome.lower())
        counter.inc()
        self._seconds.observe(seconds)

    def ended(self, how: str, answer: str) -> None:
        counter = self._ended.get((how, answer))
        if counter is None:
            counter = self._ended[how, answer] = self._bind_end(how.lower(), answer)
        counter.inc()

    def expired(self, count: int) -> None:
        self._expired.inc(count)

    def show(self, status: Callable[[], Status], reasons: tuple[str, ...]) -> None:
        """Export the status as gauges."""
        self.registry.register(_Gauges(status, reasons))

    def page(self) -> tuple[bytes, str]:
        """The /metrics page and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
