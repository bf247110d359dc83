"""Every series of /metrics: its name, its labels with all their values, what it means.

docs/metrics.md is made of this, and dashboards, alerts and runbook are held against it. Names and label
values are promises; they are declared here and nowhere derived from names in the code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.core.gateway.outcome import (
    TEACHES_NOTHING,
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    TooLate,
    Unreachable,
    Unsent,
    WithoutModel,
)
from dispatcher.core.gateway.server_overload import SERVER_FULL
from dispatcher.core.health import Health
from dispatcher.core.limit.budget import Reason, Signal
from dispatcher.core.limit.utilization import Work
from dispatcher.core.requests.result import ErrorCode
from dispatcher.ports import Burial, Release, Settled, Settlement
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.status import CAPACITIES, SOURCES, Status

PREFIX = "batch_dispatcher_"
OTHER = "other"
"""Stands for every value that is not declared, so that no peer can make a series."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Sampled = Callable[[Status], float | Mapping[str, float] | None]
"""A gauge's value; a mapping by its label's values, None or a value that is not there: no sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One family of series. A counter's name on the page ends in `_total`."""

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Beside `pool`. Every value is on the page from the start."""
    buckets: tuple[float, ...] = ()
    sampled: Sampled | None = None
    """How a gauge is read from the status, when it is scraped."""
    free: bool = False
    """Its label values are not declared: an information, of which there is one at a time, or a gauge with few
    values at a time."""

    @property
    def page_name(self) -> str:
        """As queries have it; of a histogram the base name."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")


CATALOGUE: list[Series] = []


def _counter(name: str, meaning: str, **labels: tuple[str, ...]) -> Series:
    return _declare(Series(name, Kind.COUNTER, meaning, labels))


def _histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Series:
    return _declare(Series(name, Kind.HISTOGRAM, meaning, buckets=buckets))


def _gauge(name: str, sampled: Sampled, meaning: str, **labels: tuple[str, ...]) -> Series:
    return _declare(Series(name, Kind.GAUGE, meaning, labels, sampled=sampled))


def _states(
    name: str, value: Callable[[Status], str | None], meaning: str, **label: tuple[str, ...]
) -> Series:
    """A series for each value of the label: 1 for the one that holds, 0 for the others."""
    ((_, values),) = label.items()

    def sampled(status: Status) -> Mapping[str, float]:
        now = value(status)
        return {each: float(each == now) for each in values}

    return _declare(Series(name, Kind.GAUGE, meaning, label, sampled=sampled))


def _info(name: str, values: Callable[[Status], Mapping[str, str]], meaning: str, *labels: str) -> Series:
    """Always 1; what it tells is in its labels."""

    def sampled(status: Status) -> Mapping[str, float]:
        told = values(status)
        return {"\0".join(told[label] for label in labels): 1.0}

    return _declare(Series(name, Kind.GAUGE, meaning, dict.fromkeys(labels, ()), sampled=sampled, free=True))


def _table(name: str, sampled: Callable[[Status], Mapping[str, float]], meaning: str, *labels: str) -> Series:
    """A gauge for each line of a table that is short, and whose labels nobody knows beforehand."""
    return _declare(Series(name, Kind.GAUGE, meaning, dict.fromkeys(labels, ()), sampled=sampled, free=True))


def _declare(series: Series) -> Series:
    CATALOGUE.append(series)
    return series


# ── label values ────────────────────────────────────────────────────────────────────────────────────────────

REASONS = tuple(str(reason) for reason in Reason)
SIGNALS = tuple(str(signal) for signal in Signal)
OUTCOMES: Mapping[type[Outcome], str] = {
    Delivered: "delivered",
    Overloaded: "overloaded",
    Evicted: "evicted",
    Failed: "failed",
    Unreachable: "unreachable",
    TooLarge: "toolarge",
    Refused: "refused",
    TooLate: "expired",
    Unsent: "unsent",
    WithoutModel: "nomodel",
}
STATUSES = ("none", "2xx", "3xx", "4xx", "5xx")
"""`none`: no whole answer came."""
DROP_REASONS = (
    "none",
    "rejected-saturated",
    "rejected-ttl-expired",
    *TEACHES_NOTHING,
    SERVER_FULL,
    OTHER,
)
ENDINGS: Mapping[type[Settlement | Release | Burial], str] = {
    Settlement: "settlement",
    Release: "release",
    Burial: "burial",
}
ANSWERS = tuple(str(answer) for answer in Settled)
CODES = ("2xx", "4xx", *(str(code) for code in ErrorCode))
"""Of results: the class of the gateway's answer, or the error code."""
COUNTED = ("attempt", "refusal")
READS = (
    "ok",
    *map(str, (Reason.UNREADABLE, Reason.STALE, Reason.NO_ENDPOINTS, Reason.IMPLAUSIBLE)),
)
WORK = tuple(str(work) for work in Work)
QUANTILES = ("0.5", "0.95")
PARTS = ("queue", "gateway", "signals")
MERGED = ("split", "halved", "unsplittable", "failed")
CHECKS = ("same", "differs", "unsure")

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_WAIT = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
_SETTLE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


def status_class(status: int | None) -> str:
    return "none" if status is None else f"{status // 100}xx"


# ── the gate and its budget ─────────────────────────────────────────────────────────────────────────────────

HEALTH = _states(
    "health",
    lambda s: s.health.health,
    "1 for the health of the dispatcher: whether work gets done; 0 for all others",
    state=tuple(Health),
)
GATE = _states("gate", lambda s: s.gate.reason, "1 for the gate's reason, 0 for all others", reason=REASONS)
GATE_SECONDS = _counter("gate_seconds", "Seconds that the gate's reason was this one", reason=REASONS)
PAUSED = _gauge("paused", lambda s: float(s.line.paused), "1 while an operator has paused the queue")
REACHABLE = _gauge(
    "reachable",
    lambda s: {
        "queue": float(s.line.queue_problem is None),
        "gateway": float(s.gate.gateway_problem is None),
        "signals": float(s.signals.signals_problem is None),
    },
    "1 while this part can be reached and read, whatever the gate's reason is",
    part=PARTS,
)
LIMIT = _gauge("limit", lambda s: s.gate.limit, "Our requests that may be in flight, all replicas together")
IN_FLIGHT = _gauge("in_flight", lambda s: s.gate.in_flight, "Our requests in flight, all replicas together")
RUNNING = _gauge("running", lambda s: s.gate.running, "Requests in flight in this process")
FREE = _gauge(
    "free",
    lambda s: s.gate.free,
    "Requests that batch work may hold by the newest readings, ours included; absent while unknown",
)
SIGNAL = _states(
    "signal", lambda s: s.budget.signal, "1 for the signal whose limit is the smallest", signal=SIGNALS
)
F_SYS = _gauge(
    "f_sys",
    lambda s: s.budget.term("f_sys"),
    "Saturation of the pool: cur_SYS / max_SYS; absent while the signal is not read",
    signal=SIGNALS,
)
F_EPP = _gauge(
    "f_epp",
    lambda s: s.budget.term("f_epp"),
    "What waits in the endpoint picker: cur_EPP / max_SYS; absent while the signal is not read",
    signal=SIGNALS,
)
RESERVE = _gauge("reserve", lambda s: s.budget.reserve, "B, the share that batch work never takes")
BUDGET = _gauge(
    "budget",
    lambda s: s.budget.term("budget"),
    "D = 1 - (F_SYS + F_EPP + B); absent while the signal is not read or not believed",
    signal=SIGNALS,
)
HEADROOM = _gauge(
    "headroom",
    lambda s: s.budget.term("headroom"),
    "floor(max_SYS x D), in requests; absent while the signal is not read or not believed",
    signal=SIGNALS,
)
MAX_SYS = _gauge("max_sys", lambda s: s.budget.max_sys, "Capacity of the pool, in requests")
CONFIGURED_MAX_SYS = _gauge(
    "configured_max_sys",
    lambda s: s.budget.configured_max_sys,
    "The same as the configuration, the endpoint picker or the watch say; more where less was learned to fit",
)
MAX_SYS_BY = _states(
    "max_sys_by", lambda s: s.budget.max_sys_by, "1 for how max_sys is known", by=tuple(CAPACITIES)
)
PER_ENDPOINT = _gauge(
    "per_endpoint",
    lambda s: s.budget.per_endpoint,
    "Requests per endpoint that the capacity is reckoned with; absent where it comes another way",
)
PICKER_MAX_CONCURRENCY = _gauge(
    "picker_max_concurrency",
    lambda s: s.budget.picker_max_concurrency,
    "maxConcurrency of the endpoint picker; absent where its pages do not show it",
)

# ── harvest ─────────────────────────────────────────────────────────────────────────────────────────────────

USED_SECONDS = _counter(
    "used_request_seconds",
    "Request-seconds that this process had at the gateway, by whether work waited beside them",
    work=WORK,
)
FREE_SECONDS = _counter(
    "free_request_seconds",
    "Request-seconds that were free for batch work of all replicas, by whether work waited",
    work=WORK,
)
TOKENS = _counter("tokens", "Tokens of batch work as answers' `usage` tells them", direction=("in", "out"))

# ── readings ────────────────────────────────────────────────────────────────────────────────────────────────

READING_AGE = _gauge(
    "reading_age_seconds",
    lambda s: s.signals.reading_age_s,
    "Age of the newest sample; absent before the first",
)
SIGNALS_FAILING = _gauge(
    "signals_failing_seconds",
    lambda s: s.signals.signals_failing_s,
    "Since when the signals cannot be read, though the gate may still be open; absent while they can",
)
SOURCE = _states("source", lambda s: s.signals.source, "1 for where the samples come from", source=SOURCES)
READ = _counter("reads", "Polls of the signals by what they told", source=SOURCES, result=READS)
WATCH_ENDPOINTS = _gauge(
    "watch_endpoints",
    lambda s: s.watch.watch_endpoints,
    "Ready endpoints by the Kubernetes watch; absent while it knows none",
)
WATCH_UNSURE = _gauge(
    "watch_unsure_seconds",
    lambda s: s.watch.watch_unsure_s,
    "Since when the Kubernetes API was not heard; absent while it is followed",
)
WATCH_FAILING = _gauge(
    "watch_failing",
    lambda s: float(bool(s.watch.watch_problems)),
    "1 while the Kubernetes watch has a problem",
)

# ── the queue ───────────────────────────────────────────────────────────────────────────────────────────────

PENDING = _gauge("pending", lambda s: s.line.pending, "Requests waiting for their first or next delivery")
LEASED = _gauge("leased", lambda s: s.line.leased, "Live leases of all replicas")
DELAYED = _gauge("delayed", lambda s: s.line.delayed, "Requests waiting for a retry")
DEAD = _gauge("dead", lambda s: s.line.dead, "Requests put aside for an operator")
OLDEST_PENDING = _gauge(
    "oldest_pending_age_seconds",
    lambda s: s.line.oldest_pending_age_s,
    "Age of the oldest request at the head of the line; absent while nothing with a time of birth waits",
)
DEADLINE_SLACK = _gauge(
    "deadline_slack_seconds",
    lambda s: s.line.earliest_deadline_s,
    "Until the earliest deadline that waits, negative when past; absent while none is known",
)
AT_RISK = _gauge(
    "deadline_at_risk",
    lambda s: s.line.at_risk,
    "Waiting requests that miss their deadline if it goes on at this rate; absent while it is unknown",
)
SERVICE_RATE = _gauge(
    "service_rate",
    lambda s: s.line.service_rate,
    "Requests per second that all replicas ended lately, while some waited; absent while unknown",
)
REPLICAS = _gauge("replicas", lambda s: s.line.replica_count, "Dispatchers of this queue that live")

# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

RESULTS = _counter("results", "Results written, by the answer's class or the error code", code=CODES)
TRIES = _counter(
    "tries",
    "Tries by outcome and by the class of the gateway's status",
    outcome=tuple(OUTCOMES.values()),
    status=STATUSES,
)
REFUSALS = _counter("refusals", "Refusals for overload by the gateway's drop reason", reason=DROP_REASONS)
RETRIES = _counter(
    "retries", "Requests sent back for another try, by what the try counted as", counted=COUNTED
)
ENDED = _counter(
    "leases_ended",
    "Leases that ended here, by how and by what the queue said",
    how=tuple(ENDINGS.values()),
    answer=ANSWERS,
)
RECLAIMED = _counter("reclaims", "Leases taken back from dispatchers that were gone, silent or late")
LOST = _counter("leases_lost", "Leases of ours that ran out while their request was at the gateway")
EXPIRED = _counter("expired", "Requests that passed their deadline waiting")
WAIT = _histogram("wait_seconds", "From the request's birth (data.created) to its first try", _WAIT)
TRY = _histogram("try_seconds", "From sending to the outcome", _LATENCY)
PICKER_WAIT = _histogram(
    "picker_wait_seconds",
    "Time that a request waited in the endpoint picker, where its answer says so",
    _LATENCY,
)
SETTLE = _histogram("settle_seconds", "From the outcome to the queue's word that it is written", _SETTLE)
WHOLE = _histogram("request_seconds", "From the request's birth (data.created) to its written result", _WAIT)

# ── requests that travel together ───────────────────────────────────────────────────────────────────────────

MERGED_CALLS = _counter(
    "merged_calls", "Calls that several requests shared, by what became of them", result=MERGED
)
MERGED_REQUESTS = _counter("merged_requests", "Requests that such calls answered")
MERGE_CHECKS = _counter(
    "merge_checks", "Single calls that were made to compare the answers of merged ones", result=CHECKS
)
MERGE_WAITING = _gauge(
    "merge_waiting", lambda s: s.batching.batching_waiting, "Requests that wait for company in this process"
)
MERGE_SIZE = _table(
    "merge_size",
    lambda s: s.batching.of_each(lambda each: float(each["size"])),
    "Items that a call may have, as far as it pays; 1: nothing is merged",
    "path",
    "model",
)
MERGE_GAIN = _table(
    "merge_gain",
    lambda s: s.batching.of_each(lambda each: each["gain"]),
    "How many times the items per unit-second of single calls that makes; absent where not measured",
    "path",
    "model",
)
MERGE_OFF = _table(
    "merge_off",
    lambda s: s.batching.of_each(lambda each: float(each["why_off"] is not None)),
    "1 where merged calls were not answered as single ones are, and nothing is merged any more",
    "path",
    "model",
)

# ── sequences ───────────────────────────────────────────────────────────────────────────────────────────────

SEQUENCES_ACTIVE = _gauge(
    "sequences_active", lambda s: s.sequences.number("active"), "Sequences that are alive, the held included"
)
SEQUENCES_PARKED = _gauge(
    "sequences_parked",
    lambda s: s.sequences.number("parked"),
    "Sequences that wait to begin, for sequences.max_active are alive",
)
SEQUENCES_HELD = _gauge(
    "sequences_held",
    lambda s: s.sequences.number("held"),
    "Sequences that wait for an operator, for a request of them has failed",
)
SEQUENCES_ABORTED = _gauge(
    "sequences_aborted", lambda s: s.sequences.number("aborted"), "Sequences that were aborted lately"
)
SEQUENCES_WAITING = _gauge(
    "sequences_waiting", lambda s: s.sequences.number("waiting"), "Requests that wait for their turn"
)
SEQUENCE_TURNS = _counter(
    "sequence_turns", "What was said of claimed requests of sequences", verdict=("goes", "waits", "barred")
)
SEQUENCE_SERVERS = _counter(
    "sequence_servers",
    "Answers to requests with a session token, by the server that gave them",
    server=("same", "other", "lost"),
)

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────

MODEL_SERVING = _table(
    "model_endpoints",
    lambda s: s.models.of_each("serving"),
    "Endpoints of the pool that serve a model, where models are watched",
    "model",
)
MODEL_WAITING = _table(
    "model_waiting",
    lambda s: s.models.of_each("waiting"),
    "Requests that wait for their model, which is not served",
    "model",
)
MODEL_REQUESTS = _counter(
    "model_requests",
    "What was said of claimed requests that name a model; `denied`: by the server",
    verdict=("goes", "waits", "unknown", "denied"),
)
VERSION_SERVING = _table(
    "model_version_endpoints",
    lambda s: s.models.of_versions("serving"),
    "Endpoints of the pool that serve a version of a model, as long as any does",
    "model",
    "version",
)
VERSION_WARM = _table(
    "model_version_warm_endpoints",
    lambda s: s.models.of_versions("warm"),
    "Those of them where it is warm; absent where nothing warms it up",
    "model",
    "version",
)
VERSION_SHARE = _table(
    "model_version_share",
    lambda s: s.models.of_versions("share"),
    "Its share of the requests for the model that are sent now; 0: it takes nothing new",
    "model",
    "version",
)
WARM_UPS = _counter(
    "warm_ups",
    "Warm-ups of a version at an endpoint, by what became of them; `again`: it is to be tried again",
    result=("warm", "errors", "again"),
)

# ── the price that realtime pays ────────────────────────────────────────────────────────────────────────────

TTFT = _gauge(
    "realtime_ttft_seconds",
    lambda s: s.price.quantiles("ttft"),
    "Time to the first token over the last 5 minutes, as the pool shows it; absent where it does not",
    quantile=QUANTILES,
)
TPOT = _gauge(
    "realtime_tpot_seconds",
    lambda s: s.price.quantiles("tpot"),
    "Time per further token over the last 5 minutes, as the pool shows it; absent where it does not",
    quantile=QUANTILES,
)
BATCH_SHARE = _gauge(
    "batch_share",
    lambda s: s.price.batch_share,
    "Batch requests in flight as a share of the capacity, averaged over the same time; absent where unknown",
)

# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────

BUILD = _info(
    "build_info",
    lambda s: {"version": s.process.version, "python": s.process.python},
    "1, with the versions",
    "version",
    "python",
)
CONFIG = _info(
    "config_info",
    lambda s: {"hash": s.process.config_hash},
    "1, with the start of the SHA-256 of the configuration file in force",
    "hash",
)
GENERATION = _gauge(
    "config_generation",
    lambda s: s.process.config_generation,
    "Counts the configurations that were in force",
)
CONFIG_REFUSED = _gauge(
    "config_refused",
    lambda s: float(s.process.config_problem is not None),
    "1 while the newest configuration file is bad",
)
RELOADS = _counter(
    "config_reloads", "Changed configurations by what became of them", result=("applied", "refused")
)
OBSERVING = _gauge(
    "observing", lambda s: float(s.process.observe), "1 where the dispatcher only watches, and sends nothing"
)
LOOP_LAG = _gauge(
    "loop_lag_seconds",
    lambda s: s.process.loop_lag_s,
    "How late the event loop ran what was due, at most, in the last 10 s",
)
EVENTS = _counter(
    "events",
    "Events by name, those too that the log has only counted",
    event=tuple(e.event for e in Event if e.level > logging.DEBUG and e is not Event.LIBRARY),
)
