"""Every metric, log event and span of the dispatcher, in one place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal

import structlog
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


class Event(Enum):
    """Every log event: its name, its level, what it means. The name is a promise to log searches."""

    # Adapters add theirs here, a line each: NAME = ("event-name", logging.LEVEL, "What it means")
    SIGNALS_SOURCE = ("signals-source", logging.INFO, "Another source tells how full the pool is")
    SIGNALS_IN_USE = ("signals-in-use", logging.INFO, "Other signals decide than before")
    SIGNALS_UNREADABLE = ("signals-unreadable", logging.WARNING, "The gate closes: a signal cannot be read")
    SIGNALS_READABLE = ("signals-readable", logging.INFO, "The signals can be read again")
    CAPACITY_LEARNED = ("capacity-learned", logging.INFO, "The picker's pages show its maxConcurrency")
    CAPACITY_DIFFERS = (
        "capacity-differs",
        logging.WARNING,
        "budget.per_endpoint is not what the picker counts with: one of the two is wrong",
    )
    KUBERNETES_ABSENT = ("kubernetes-absent", logging.INFO, "No cluster is known: nothing is watched")
    KUBERNETES_PROBLEM = ("kubernetes-problem", logging.WARNING, "The watch lacks something, and says what")
    KUBERNETES_FINE = ("kubernetes-fine", logging.INFO, "The watch sees all that it needs again")

    DEAD_DROPPED = ("dead-dropped", logging.WARNING, "More dead than queue.dead_max: the oldest went")
    RESULT_LIST_AWAY = ("result-list-away", logging.WARNING, "Its Cluster node is away: results wait")
    WAKE_UPS_GONE = ("wake-ups-gone", logging.WARNING, "No subscription: new work is found by polling")
    WAKE_UPS_BACK = ("wake-ups-back", logging.INFO, "New work wakes the dispatcher again")

    STARTED = ("started", logging.INFO, "The dispatcher is up: version, pool, queue, gateway, owner")
    DRAINING = ("draining", logging.INFO, "A signal asked to stop; nothing more is claimed")
    STOPPED = ("stopped", logging.INFO, "Everything held was handed in or given back")
    LEFT_BEHIND = ("left-behind", logging.ERROR, "Stopped with leases that the queue could not be told of")
    GATE = (
        "gate",
        logging.INFO,
        "The gate's reason changed: reason, limit, and the sentence that explains it",
    )
    QUEUE_UNREACHABLE = ("queue-unreachable", logging.ERROR, "Redis cannot be reached; nothing new is sent")
    QUEUE_BACK = ("queue-back", logging.INFO, "Redis can be reached again")
    LEASE_LOST = (
        "lease-lost",
        logging.WARNING,
        "A lease of ours ran out; its request was cut and is another's",
    )
    SLOW = ("slow", logging.WARNING, "The event loop cannot keep pace: too little CPU; with figures")
    TAKEN_BACK = (
        "taken-back",
        logging.WARNING,
        "Leases of dispatchers that are gone, silent or late were taken back: their requests run again",
    )
    SURPRISE = ("surprise", logging.ERROR, "A defect of ours, caught so that it costs one request an attempt")
    RELOADED = ("config-reloaded", logging.INFO, "The changed configuration is in force")
    RELOAD_REFUSED = ("config-refused", logging.ERROR, "The changed configuration is bad; the old one stays")

    def __init__(self, event: str, level: int, meaning: str) -> None:
        self.event = event
        self.level = level
        self.meaning = meaning


_logger = structlog.get_logger("dispatcher")


_listener: ContextVar[Callable[[Event, dict[str, Any]], None] | None] = ContextVar("listener", default=None)


def emit(event: Event, **fields: Any) -> None:
    """Log an event with its fields. Never a secret among them: settings redact theirs."""
    listener = _listener.get()
    if listener is None:
        _logger.log(event.level, event.event, **fields)
    else:
        listener(event, fields)


@contextmanager
def diverted(to: Callable[[Event, dict[str, Any]], None]) -> Iterator[None]:
    """Within the block, and in tasks started there, events go to `to` instead of the log: what happens in a
    simulation has not happened."""
    token = _listener.set(to)
    try:
        yield
    finally:
        _listener.reset(token)


def configure_logging(level: str, style: Literal["auto", "console", "json"]) -> None:
    """Set up logging for the process: console on a terminal, one JSON object a line otherwise."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


PREFIX = "batch_dispatcher_"
TRY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class Status:
    """What the dispatcher knows of itself at one moment: /status as it stands, and every gauge."""

    version: str
    pool: str
    queue: str
    owner: str
    observe: bool
    reason: str
    open: bool
    explanation: str
    limit: int
    in_flight: int
    """Of all replicas together."""
    running: int
    """Of this process."""
    signal: str | None
    f_sys: float | None
    f_epp: float | None
    reserve: float | None
    budget: float | None
    """D."""
    headroom: int | None
    max_sys: float | None
    max_sys_by: str | None
    """Whose word `max_sys` is: one of CAPACITIES."""
    ceiling: float | None
    reading_age_s: float | None
    source: str | None
    detector: str | None = None
    """What is known of the picker's saturation detector."""
    per_endpoint: float | None = None
    """Requests per endpoint that the capacity is reckoned with; None: it comes another way."""
    per_endpoint_from: Literal["setting", "picker", "suggestion", "unseen", "assumption"] | None = None
    picker_max_concurrency: int | None = None
    """As the picker's pages show it; None: they do not."""
    readings: list[dict[str, Any]] = field(default_factory=list)
    """The newest reading of each signal with the raw values it came from."""
    watch_endpoints: int | None = None
    """Ready endpoints by the Kubernetes watch; None: it knows none, and bounds nothing."""
    watch_unsure_s: float | None = None
    """How long ago the API was heard last, while something cannot be asked; None: all of it is followed."""
    watch_problems: list[str] = field(default_factory=list)
    pending: int | None = None
    leased: int | None = None
    delayed: int | None = None
    dead: int | None = None
    paused: bool = False
    queue_problem: str | None = None
    config_generation: int = 1
    config_problem: str | None = None
    loop_lag_s: float = 0.0
    """The latest that the event loop woke in the last seconds."""

    def json(self) -> dict[str, Any]:
        return asdict(self)


CAPACITIES = ("watch", "picker", "setting", "query")
"""The Kubernetes watch where it lowers what the others say; the endpoint picker; `budget.max_sys`, or
`budget.per_endpoint` × the ready endpoints; a query of one's own."""
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
