"""Catalogue of all series of /metrics: name, labels with all their values, description.

docs/reference/metrics.md is generated from this module. The dashboard, the alerts and the runbook are tested
against it. Names and label values are declared here and are not derived from names in the code, so that a
refactoring cannot rename a series by accident.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.core.gateway.outcome import (
    UNINFORMATIVE_REASONS,
    Delivered,
    Evicted,
    Failed,
    ModelNotServed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    TooLate,
    UncountedError,
    Unreachable,
    Unsent,
)
from dispatcher.core.gateway.server_overload import SERVER_FULL
from dispatcher.core.health import Health
from dispatcher.core.limit.budget import Reason, Signal
from dispatcher.core.limit.utilization import WorkState
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.slices.eligibility import WholeReason
from dispatcher.ports import DeadLetter, Release, Settlement, SettleStatus
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.status import CAPACITY_SOURCES, SOURCES, Status

PREFIX = "batch_dispatcher_"
OTHER_LABEL = "other"
"""Label value that stands for every undeclared value, so that no client or server can create a series."""


class SeriesKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


GaugeSampler = Callable[[Status], float | Mapping[str, float] | None]
"""Function that reads the value of a gauge from the status. It may return one value per label value. No
sample is written for `None` and for label values that are missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One metric with its labels. The name of a counter on the page ends in `_total`."""

    name: str
    kind: SeriesKind
    description: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels besides `pool`, with all their values. Every declared value is on the page from the start."""
    buckets: tuple[float, ...] = ()
    sampler: GaugeSampler | None = None
    """Function that reads the gauge from the status at each scrape."""
    has_open_labels: bool = False
    """True if the label values are not declared in advance. Only for info series, which have one sample at a
    time, and for gauges with few label values."""

    @property
    def page_name(self) -> str:
        """Name of the series in queries; for a histogram the name without its suffix."""
        return PREFIX + self.name + ("_total" if self.kind is SeriesKind.COUNTER else "")


CATALOGUE: list[Series] = []


def _add_counter(name: str, description: str, **labels: tuple[str, ...]) -> Series:
    return _add_series(Series(name, SeriesKind.COUNTER, description, labels))


def _add_histogram(name: str, description: str, buckets: tuple[float, ...]) -> Series:
    return _add_series(Series(name, SeriesKind.HISTOGRAM, description, buckets=buckets))


def _add_gauge(name: str, sampler: GaugeSampler, description: str, **labels: tuple[str, ...]) -> Series:
    return _add_series(Series(name, SeriesKind.GAUGE, description, labels, sampler=sampler))


def _add_state_gauge(
    name: str, current_state: Callable[[Status], str | None], description: str, **label: tuple[str, ...]
) -> Series:
    """Add a gauge with one sample per value of the label: 1 for the current state and 0 for all others."""
    ((_, values),) = label.items()

    def sample_state(status: Status) -> Mapping[str, float]:
        current = current_state(status)
        return {each: float(each == current) for each in values}

    return _add_series(Series(name, SeriesKind.GAUGE, description, label, sampler=sample_state))


def _add_info_gauge(
    name: str, values: Callable[[Status], Mapping[str, str]], description: str, *labels: str
) -> Series:
    """Add a gauge that is always 1 and has its information in its labels."""

    def sample_info(status: Status) -> Mapping[str, float]:
        label_values = values(status)
        # A NUL byte joins the values, since none contains it; `Metrics` splits them again.
        return {"\0".join(label_values[label] for label in labels): 1.0}

    return _add_series(
        Series(
            name,
            SeriesKind.GAUGE,
            description,
            dict.fromkeys(labels, ()),
            sampler=sample_info,
            has_open_labels=True,
        )
    )


def _add_table_gauge(
    name: str, sampler: Callable[[Status], Mapping[str, float]], description: str, *labels: str
) -> Series:
    """Add a gauge with one sample per row of a short table whose label values are not known in advance."""
    return _add_series(
        Series(
            name,
            SeriesKind.GAUGE,
            description,
            dict.fromkeys(labels, ()),
            sampler=sampler,
            has_open_labels=True,
        )
    )


def _add_series(series: Series) -> Series:
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
    UncountedError: "uncounted",
    TooLarge: "too-large",
    Refused: "refused",
    TooLate: "expired",
    Unsent: "unsent",
    ModelNotServed: "no-model",
}
STATUS_CLASSES = ("none", "2xx", "3xx", "4xx", "5xx")
"""Classes of HTTP statuses. `none` if no complete answer arrived."""
DROP_REASONS = (
    "none",
    "rejected-saturated",
    "rejected-ttl-expired",
    *UNINFORMATIVE_REASONS,
    SERVER_FULL,
    OTHER_LABEL,
)
COMPLETION_KINDS: Mapping[type[Settlement | Release | DeadLetter], str] = {
    Settlement: "settlement",
    Release: "release",
    DeadLetter: "dead-letter",
}
QUEUE_ANSWERS = tuple(str(answer) for answer in SettleStatus)
RESULT_CODES = ("2xx", "4xx", *(str(code) for code in ErrorCode))
"""Class of the answer that the gateway gave, or the error code of the result."""
RETRY_KINDS = ("failed-attempt", "refusal")
POLL_RESULTS = (
    "ok",
    *map(str, (Reason.UNREADABLE, Reason.STALE, Reason.NO_ENDPOINTS, Reason.IMPLAUSIBLE)),
)
WORK_STATES = tuple(str(work) for work in WorkState)
QUANTILES = ("0.5", "0.95")
DEPENDENCIES = ("queue", "gateway", "signals")
MERGED_CALL_RESULTS = ("split", "halved", "unsplittable", "failed")
MERGE_CHECK_RESULTS = ("same", "differs", "inconclusive")

# Up to half an hour, since long generations take minutes, and up to a day for waiting requests.
_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_WAIT_BUCKETS_S = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
_SETTLE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


def classify_status(status: int | None) -> str:
    return "none" if status is None else f"{status // 100}xx"


# ── the gate and its budget ─────────────────────────────────────────────────────────────────────────────────

HEALTH = _add_state_gauge(
    "health",
    lambda s: s.health.health,
    "1 for the current health of the dispatcher, 0 for all other states",
    state=tuple(Health),
)
GATE = _add_state_gauge(
    "gate", lambda s: s.gate.reason, "1 for the current reason of the gate, 0 for all others", reason=REASONS
)
GATE_SECONDS = _add_counter("gate_seconds", "Seconds for which the gate had this reason", reason=REASONS)
PAUSED = _add_gauge("paused", lambda s: float(s.queue.paused), "1 while an operator has paused the queue")
REACHABLE = _add_gauge(
    "reachable",
    lambda s: {
        "queue": float(s.queue.queue_problem is None),
        "gateway": float(s.gate.gateway_problem is None),
        "signals": float(s.signals.signals_problem is None),
    },
    "1 while this dependency can be used, whatever the reason of the gate is",
    part=DEPENDENCIES,
)
LIMIT = _add_gauge(
    "limit", lambda s: s.gate.limit, "Maximum number of batch requests in flight, all replicas together"
)
IN_FLIGHT = _add_gauge(
    "in_flight", lambda s: s.gate.in_flight, "Batch requests in flight, all replicas together"
)
RUNNING = _add_gauge("running", lambda s: s.gate.running, "Batch requests in flight in this process")
FREE = _add_gauge(
    "free",
    lambda s: s.gate.free_share,
    "Batch requests that fit by the newest readings, with those in flight; absent while unknown",
)
SIGNAL = _add_state_gauge(
    "signal",
    lambda s: s.budget.signal,
    "1 for the signal with the smallest limit, 0 for the others",
    signal=SIGNALS,
)
F_SYS = _add_gauge(
    "f_sys",
    lambda s: s.budget.get_by_signal("f_sys"),
    "Saturation of the pool: cur_SYS / max_SYS; absent while the signal is not read",
    signal=SIGNALS,
)
F_EPP = _add_gauge(
    "f_epp",
    lambda s: s.budget.get_by_signal("f_epp"),
    "Queue of the endpoint picker: cur_EPP / max_SYS; absent while the signal is not read",
    signal=SIGNALS,
)
RESERVE = _add_gauge(
    "reserve", lambda s: s.budget.reserve, "B, the share of the capacity that batch requests never use"
)
BUDGET = _add_gauge(
    "budget",
    lambda s: s.budget.get_by_signal("budget"),
    "D = 1 - (F_SYS + F_EPP + B); absent while the signal is not read or not plausible",
    signal=SIGNALS,
)
HEADROOM = _add_gauge(
    "headroom",
    lambda s: s.budget.get_by_signal("headroom"),
    "floor(max_SYS x D), in requests; absent while the signal is not read or not plausible",
    signal=SIGNALS,
)
MAX_SYS = _add_gauge("max_sys", lambda s: s.budget.max_sys, "Capacity of the pool, in requests")
CONFIGURED_MAX_SYS = _add_gauge(
    "configured_max_sys",
    lambda s: s.budget.configured_max_sys,
    "Capacity by configuration, picker or watch; more than max_sys if fewer requests were seen to fit",
)
MAX_SYS_SOURCE = _add_state_gauge(
    "max_sys_source",
    lambda s: s.budget.max_sys_source,
    "1 for the source of max_sys, 0 for the others",
    source=tuple(CAPACITY_SOURCES),
)
PER_ENDPOINT = _add_gauge(
    "per_endpoint",
    lambda s: s.budget.per_endpoint,
    "Requests per endpoint from which the capacity is computed; absent if it has another source",
)
PICKER_MAX_CONCURRENCY = _add_gauge(
    "picker_max_concurrency",
    lambda s: s.budget.picker_max_concurrency,
    "maxConcurrency of the endpoint picker; absent if its metrics do not show it",
)

# ── utilization ────────────────────────────────────────────────────────────────────────────────────────────

USED_SECONDS = _add_counter(
    "used_request_seconds",
    "Request-seconds in flight in this process, by whether other requests waited",
    work=WORK_STATES,
)
FREE_SECONDS = _add_counter(
    "free_request_seconds",
    "Request-seconds that were free for batch requests of all replicas, by whether requests waited",
    work=WORK_STATES,
)
TOKENS = _add_counter(
    "tokens", "Tokens of batch requests, from `usage` in the answers", direction=("in", "out")
)

# ── readings ────────────────────────────────────────────────────────────────────────────────────────────────

READING_AGE = _add_gauge(
    "reading_age_seconds",
    lambda s: s.signals.reading_age_s,
    "Age of the newest sample; absent before the first",
)
SIGNALS_FAILING = _add_gauge(
    "signals_failing_seconds",
    lambda s: s.signals.signals_failing_s,
    "Time for which the signals could not be read, even if the gate is still open; absent while they can",
)
SOURCE = _add_state_gauge(
    "source", lambda s: s.signals.source, "1 for the source of the samples, 0 for the others", source=SOURCES
)
POLLS = _add_counter("polls", "Polls of the signals, by result", source=SOURCES, result=POLL_RESULTS)
WATCH_ENDPOINTS = _add_gauge(
    "watch_endpoints",
    lambda s: s.watch.watch_endpoints,
    "Ready endpoints, from the Kubernetes watch; absent while unknown",
)
WATCH_STALE = _add_gauge(
    "watch_stale_seconds",
    lambda s: s.watch.watch_stale_s,
    "Time since the last answer of the Kubernetes API; absent while the watch is up to date",
)
WATCH_FAILING = _add_gauge(
    "watch_failing",
    lambda s: float(bool(s.watch.watch_problems)),
    "1 while the Kubernetes watch has a problem",
)

# ── the queue ───────────────────────────────────────────────────────────────────────────────────────────────

PENDING = _add_gauge(
    "pending", lambda s: s.queue.pending, "Requests that wait for their first or next delivery"
)
LEASED = _add_gauge("leased", lambda s: s.queue.leased, "Active leases of all replicas")
DELAYED = _add_gauge("delayed", lambda s: s.queue.delayed, "Requests that wait for the time of their retry")
STARTED = _add_gauge(
    "started", lambda s: s.queue.started, "Pending requests of which slices have been generated"
)
DEAD = _add_gauge("dead", lambda s: s.queue.dead, "Requests in the dead-letter set")
OLDEST_PENDING = _add_gauge(
    "oldest_pending_age_seconds",
    lambda s: s.queue.oldest_pending_age_s,
    "Age of the oldest request next in the queue; absent while no request with a creation time waits",
)
DEADLINE_SLACK = _add_gauge(
    "deadline_slack_seconds",
    lambda s: s.queue.earliest_deadline_s,
    "Time until the earliest deadline of a waiting request, negative if past; absent while unknown",
)
AT_RISK = _add_gauge(
    "deadline_at_risk",
    lambda s: s.queue.at_risk,
    "Waiting requests that miss their deadline at the current rate; absent while unknown",
)
SERVICE_RATE = _add_gauge(
    "service_rate",
    lambda s: s.queue.service_rate,
    "Requests per second that all replicas completed recently, while some waited; absent while unknown",
)
REPLICAS = _add_gauge(
    "replicas", lambda s: s.queue.replica_count, "Dispatchers of this queue with a current heartbeat"
)

# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

RESULTS = _add_counter(
    "results", "Results written, by class of the HTTP status or by error code", code=RESULT_CODES
)
ATTEMPTS = _add_counter(
    "attempts",
    "Attempts, by outcome and by class of the HTTP status of the gateway",
    outcome=tuple(OUTCOMES.values()),
    status=STATUS_CLASSES,
)
REFUSALS = _add_counter(
    "refusals", "Answers that reported overload, by drop reason of the gateway", reason=DROP_REASONS
)
RETRIES = _add_counter(
    "retries",
    "Requests returned for another attempt, by what the last attempt counted as",
    counted_as=RETRY_KINDS,
)
LEASES_ENDED = _add_counter(
    "leases_ended",
    "Leases that this process completed, by kind of completion and by answer of the queue",
    completion=tuple(COMPLETION_KINDS.values()),
    answer=QUEUE_ANSWERS,
)
LEASES_RECLAIMED = _add_counter(
    "reclaims", "Leases reclaimed from dispatchers that ended, were silent or renewed too late"
)
LEASES_LOST = _add_counter(
    "leases_lost", "Leases of this process that expired while their request was at the gateway"
)
REQUESTS_EXPIRED = _add_counter("expired", "Requests whose deadline passed while they waited")
WAIT_SECONDS = _add_histogram(
    "wait_seconds",
    "Time from the creation of the request (data.created) to its first attempt",
    _WAIT_BUCKETS_S,
)
ATTEMPT_SECONDS = _add_histogram(
    "attempt_seconds", "Time from sending a request to its outcome", _LATENCY_BUCKETS_S
)
PICKER_WAIT_SECONDS = _add_histogram(
    "picker_wait_seconds",
    "Time for which a request waited in the endpoint picker, if the answer says so",
    _LATENCY_BUCKETS_S,
)
SETTLE_SECONDS = _add_histogram(
    "settle_seconds",
    "Time from the outcome to the confirmation of the queue that the result is written",
    _SETTLE_BUCKETS_S,
)
REQUEST_SECONDS = _add_histogram(
    "request_seconds",
    "Time from the creation of the request (data.created) to its written result",
    _WAIT_BUCKETS_S,
)

# ── merged calls ────────────────────────────────────────────────────────────────────────────────────────────

MERGED_CALLS = _add_counter("merged_calls", "Merged calls, by result", result=MERGED_CALL_RESULTS)
MERGED_REQUESTS = _add_counter("merged_requests", "Requests that were answered by merged calls")
MERGE_CHECKS = _add_counter(
    "merge_checks", "Single calls that checked answers of merged calls, by result", result=MERGE_CHECK_RESULTS
)
MERGE_WAITING = _add_gauge(
    "merge_waiting",
    lambda s: s.batching.batching_waiting,
    "Requests of this process that wait for others to share a call",
)
MERGE_SIZE = _add_table_gauge(
    "merge_size",
    lambda s: s.batching.get_by_path_and_model(lambda each: float(each.size)),
    "Maximum number of items per call in use; 1 if nothing is merged",
    "path",
    "model",
)
MERGE_GAIN = _add_table_gauge(
    "merge_gain",
    lambda s: s.batching.get_by_path_and_model(lambda each: each.gain),
    "Items per unit-second at that size, relative to single calls; absent if not measured",
    "path",
    "model",
)
MERGE_OFF = _add_table_gauge(
    "merge_off",
    lambda s: s.batching.get_by_path_and_model(lambda each: float(each.off_reason is not None)),
    "1 if merging was turned off because answers differed from those of single calls",
    "path",
    "model",
)
RULE_TIMEOUTS = _add_counter(
    "rule_timeouts",
    "Requests that were claimed after the default timeout of their rule, by what happened to them",
    action=("reject", "delay"),
)

# ── sequences ───────────────────────────────────────────────────────────────────────────────────────────────

SEQUENCES_ACTIVE = _add_gauge(
    "sequences_active", lambda s: s.sequences.get_count("active"), "Active sequences, including held ones"
)
SEQUENCES_PARKED = _add_gauge(
    "sequences_parked",
    lambda s: s.sequences.get_count("parked"),
    "Sequences that wait to start because sequences.max_active are active, or max_active of their model",
)
SEQUENCES_ACTIVE_BY_MODEL = _add_table_gauge(
    "sequences_active_by_model",
    lambda s: s.sequences.get_by_match("active"),
    "Active sequences to which an entry of sequences.models applies",
    "match",
)
SEQUENCES_PARKED_BY_MODEL = _add_table_gauge(
    "sequences_parked_by_model",
    lambda s: s.sequences.get_by_match("parked"),
    "Sequences that wait to start, and to which an entry of sequences.models applies",
    "match",
)
SEQUENCES_HELD = _add_gauge(
    "sequences_held",
    lambda s: s.sequences.get_count("held"),
    "Sequences that wait for an operator because one of their requests failed",
)
SEQUENCES_ABORTED = _add_gauge(
    "sequences_aborted", lambda s: s.sequences.get_count("aborted"), "Sequences that were aborted recently"
)
SEQUENCES_WAITING = _add_gauge(
    "sequences_waiting",
    lambda s: s.sequences.get_count("waiting"),
    "Requests that wait for their turn in a sequence",
)
SEQUENCE_TURNS = _add_counter(
    "sequence_turns",
    "Decisions about claimed requests of sequences",
    decision=("granted", "waits", "rejected"),
)
SEQUENCE_SERVERS = _add_counter(
    "sequence_servers",
    "Answers to requests with a session token, by the server that answered",
    server=("same", "other", "none"),
)

# ── slices ──────────────────────────────────────────────────────────────────────────────────────────────────

SLICES = _add_counter(
    "slices",
    "Answers to slices of long generations, by what followed; `restarted`: the request is sent again, whole",
    result=("continued", "finished", "restarted"),
)
REVOKED_SLICES = _add_counter(
    "revoked_slices", "Slices that were ended early, because realtime requests waited"
)
SLICE_TOKENS = _add_counter("slice_tokens", "Tokens that slices have generated")
WHOLE_REQUESTS = _add_counter(
    "whole_requests",
    "Requests that were sent whole while slicing is on, by the reason (docs/how-to/slices.md)",
    reason=tuple(WholeReason),
)

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────

MODEL_ENDPOINTS = _add_table_gauge(
    "model_endpoints",
    lambda s: s.models.get_by_model("serving"),
    "Endpoints of the pool that serve the model; absent if models are not watched",
    "model",
)
MODEL_WAITING = _add_table_gauge(
    "model_waiting",
    lambda s: s.models.get_by_model("waiting"),
    "Requests that wait because their model is not served",
    "model",
)
MODEL_REQUESTS = _add_counter(
    "model_requests",
    "Decisions about claimed requests that name a model; `denied`: the model server rejected the model",
    decision=("served", "waits", "unknown", "denied"),
)
VERSION_ENDPOINTS = _add_table_gauge(
    "model_version_endpoints",
    lambda s: s.models.get_by_version("serving"),
    "Endpoints of the pool that serve the version; absent if none does",
    "model",
    "version",
)
VERSION_WARM_ENDPOINTS = _add_table_gauge(
    "model_version_warm_endpoints",
    lambda s: s.models.get_by_version("warm"),
    "Endpoints on which the version is warm; absent if it has no warm-up",
    "model",
    "version",
)
VERSION_SHARE = _add_table_gauge(
    "model_version_share",
    lambda s: s.models.get_by_version("share"),
    "Share of the requests for the model that are sent to the version; 0 if it gets no new ones",
    "model",
    "version",
)
WARM_UPS = _add_counter(
    "warm_ups",
    "Warm-ups of a version on an endpoint, by result; `retry`: the warm-up will be repeated",
    result=("warm", "errors", "retry"),
)

# ── impact on realtime ──────────────────────────────────────────────────────────────────────────────────────

TTFT = _add_gauge(
    "realtime_ttft_seconds",
    lambda s: s.impact.get_quantiles("ttft"),
    "Time to the first token over the last 5 minutes, from metrics of the pool; absent if it has none",
    quantile=QUANTILES,
)
TPOT = _add_gauge(
    "realtime_tpot_seconds",
    lambda s: s.impact.get_quantiles("tpot"),
    "Time per further token over the last 5 minutes, from metrics of the pool; absent if it has none",
    quantile=QUANTILES,
)
BATCH_SHARE = _add_gauge(
    "batch_share",
    lambda s: s.impact.batch_share,
    "Batch requests in flight as a share of the capacity, averaged over the same time; absent if unknown",
)

# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────

BUILD_INFO = _add_info_gauge(
    "build_info",
    lambda s: {"version": s.process.version, "python": s.process.python},
    "Always 1, with the versions of the dispatcher and of Python",
    "version",
    "python",
)
CONFIG_INFO = _add_info_gauge(
    "config_info",
    lambda s: {"hash": s.process.config_hash},
    "Always 1, with the start of the SHA-256 of the configuration file in use",
    "hash",
)
CONFIG_GENERATION = _add_gauge(
    "config_generation",
    lambda s: s.process.config_generation,
    "Number of configurations that were in use since the start",
)
CONFIG_REFUSED = _add_gauge(
    "config_refused",
    lambda s: float(s.process.config_problem is not None),
    "1 while the newest configuration file is invalid",
)
CONFIG_RELOADS = _add_counter(
    "config_reloads", "Changed configuration files, by result", result=("applied", "refused")
)
OBSERVING = _add_gauge(
    "observing", lambda s: float(s.process.observe), "1 if the dispatcher only observes and sends nothing"
)
LOOP_LAG = _add_gauge(
    "loop_lag_seconds",
    lambda s: s.process.loop_lag_s,
    "Maximum delay with which the event loop ran a due task in the last 10 s",
)
EVENTS = _add_counter(
    "events",
    "Events, by name; includes those that the log only counted",
    # LIBRARY_WARNING is written to the log directly and never emitted, so that it is not counted here.
    event=tuple(e.event_name for e in Event if e.level > logging.DEBUG and e is not Event.LIBRARY_WARNING),
)
