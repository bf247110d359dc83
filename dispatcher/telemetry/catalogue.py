"""Catalogue of all series of /metrics: name, labels with all their values, description.

docs/reference/metrics.md is generated from this module. The dashboard, the alerts and the runbook are tested
against it. Names and label values are declared here and are not derived from names in the code, so that a
refactoring cannot rename a series by accident.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import attrgetter
from typing import get_args

from dispatcher.features import import_modules
from dispatcher.limit.budget import Reason, Signal
from dispatcher.limit.health import Health
from dispatcher.limit.utilization import WorkState
from dispatcher.queue.contract import DeadLetter, Release, Settlement, SettleStatus
from dispatcher.requests.outcomes.outcome import (
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
from dispatcher.requests.outcomes.server_overload import SERVER_FULL
from dispatcher.settings.signals import Source
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.series import OTHER_LABEL, SeriesList
from dispatcher.telemetry.status import CAPACITY_SOURCES
from dispatcher.wire_format import ErrorCode

CATALOGUE = SeriesList()

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

# Up to half an hour, since long generations take minutes, and up to a day for waiting requests.
_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_WAIT_BUCKETS_S = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
_SETTLE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


def classify_status(status: int | None) -> str:
    return "none" if status is None else f"{status // 100}xx"


# ── the gate and its budget ─────────────────────────────────────────────────────────────────────────────────

HEALTH = CATALOGUE.add_state_gauge(
    "health",
    lambda s: s.health.health,
    "1 for the current health of the dispatcher, 0 for all other states",
    state=tuple(Health),
)
GATE = CATALOGUE.add_state_gauge(
    "gate", lambda s: s.gate.reason, "1 for the current reason of the gate, 0 for all others", reason=REASONS
)
GATE_SECONDS = CATALOGUE.add_counter(
    "gate_seconds", "Seconds for which the gate had this reason", reason=REASONS
)
PAUSED = CATALOGUE.add_gauge(
    "paused", lambda s: float(s.queue.paused), "1 while an operator has paused the queue"
)
REACHABLE = CATALOGUE.add_gauge(
    "reachable",
    lambda s: {
        "queue": float(s.queue.queue_problem is None),
        "gateway": float(s.gate.gateway_problem is None),
        "signals": float(s.signals.signals_problem is None),
    },
    "1 while this dependency can be used, whatever the reason of the gate is",
    part=DEPENDENCIES,
)
LIMIT = CATALOGUE.add_gauge(
    "limit", lambda s: s.gate.limit, "Maximum number of batch requests in flight, all replicas together"
)
IN_FLIGHT = CATALOGUE.add_gauge(
    "in_flight", lambda s: s.gate.in_flight, "Batch requests in flight, all replicas together"
)
RUNNING = CATALOGUE.add_gauge("running", lambda s: s.gate.running, "Batch requests in flight in this process")
FREE = CATALOGUE.add_gauge(
    "free",
    lambda s: s.gate.free_share,
    "Batch requests that fit by the newest readings, with those in flight; absent while unknown",
)
SIGNAL = CATALOGUE.add_state_gauge(
    "signal",
    lambda s: s.budget.signal,
    "1 for the signal with the smallest limit, 0 for the others",
    signal=SIGNALS,
)
F_SYS = CATALOGUE.add_gauge(
    "f_sys",
    lambda s: s.budget.get_by_signal("f_sys"),
    "Saturation of the pool: cur_SYS / max_SYS; absent while the signal is not read",
    signal=SIGNALS,
)
F_EPP = CATALOGUE.add_gauge(
    "f_epp",
    lambda s: s.budget.get_by_signal("f_epp"),
    "Queue of the endpoint picker: cur_EPP / max_SYS; absent while the signal is not read",
    signal=SIGNALS,
)
RESERVE = CATALOGUE.add_gauge(
    "reserve", lambda s: s.budget.reserve, "B, the share of the capacity that batch requests never use"
)
BUDGET = CATALOGUE.add_gauge(
    "budget",
    lambda s: s.budget.get_by_signal("budget"),
    "D = 1 - (F_SYS + F_EPP + B); absent while the signal is not read or not plausible",
    signal=SIGNALS,
)
HEADROOM = CATALOGUE.add_gauge(
    "headroom",
    lambda s: s.budget.get_by_signal("headroom"),
    "floor(max_SYS x D), in requests; absent while the signal is not read or not plausible",
    signal=SIGNALS,
)
MAX_SYS = CATALOGUE.add_gauge("max_sys", lambda s: s.budget.max_sys, "Capacity of the pool, in requests")
CONFIGURED_MAX_SYS = CATALOGUE.add_gauge(
    "configured_max_sys",
    lambda s: s.budget.configured_max_sys,
    "Capacity by configuration, picker or watch; more than max_sys if fewer requests were seen to fit",
)
MAX_SYS_SOURCE = CATALOGUE.add_state_gauge(
    "max_sys_source",
    lambda s: s.budget.max_sys_source,
    "1 for the source of max_sys, 0 for the others",
    source=tuple(CAPACITY_SOURCES),
)
PER_ENDPOINT = CATALOGUE.add_gauge(
    "per_endpoint",
    lambda s: s.budget.per_endpoint,
    "Requests per endpoint from which the capacity is computed; absent if it has another source",
)
PICKER_MAX_CONCURRENCY = CATALOGUE.add_gauge(
    "picker_max_concurrency",
    lambda s: s.budget.picker_max_concurrency,
    "maxConcurrency of the endpoint picker; absent if its metrics do not show it",
)

# ── utilization ────────────────────────────────────────────────────────────────────────────────────────────

USED_SECONDS = CATALOGUE.add_counter(
    "used_request_seconds",
    "Request-seconds in flight in this process, by whether other requests waited",
    work=WORK_STATES,
)
FREE_SECONDS = CATALOGUE.add_counter(
    "free_request_seconds",
    "Request-seconds that were free for batch requests of all replicas, by whether requests waited",
    work=WORK_STATES,
)
TOKENS = CATALOGUE.add_counter(
    "tokens", "Tokens of batch requests, from `usage` in the answers", direction=("in", "out")
)

# ── readings ────────────────────────────────────────────────────────────────────────────────────────────────

READING_AGE = CATALOGUE.add_gauge(
    "reading_age_seconds",
    lambda s: s.signals.reading_age_s,
    "Age of the newest sample; absent before the first",
)
SIGNALS_FAILING = CATALOGUE.add_gauge(
    "signals_failing_seconds",
    lambda s: s.signals.signals_failing_s,
    "Time for which the signals could not be read, even if the gate is still open; absent while they can",
)
SOURCES = get_args(Source)
SOURCE = CATALOGUE.add_state_gauge(
    "source",
    lambda s: s.signals.source,
    "1 for the source of the samples, 0 for the others",
    source=SOURCES,
)
POLLS = CATALOGUE.add_counter("polls", "Polls of the signals, by result", source=SOURCES, result=POLL_RESULTS)
WATCH_ENDPOINTS = CATALOGUE.add_gauge(
    "watch_endpoints",
    lambda s: s.watch.watch_endpoints,
    "Ready endpoints, from the Kubernetes watch; absent while unknown",
)
WATCH_STALE = CATALOGUE.add_gauge(
    "watch_stale_seconds",
    lambda s: s.watch.watch_stale_s,
    "Time since the last answer of the Kubernetes API; absent while the watch is up to date",
)
WATCH_FAILING = CATALOGUE.add_gauge(
    "watch_failing",
    lambda s: float(bool(s.watch.watch_problems)),
    "1 while the Kubernetes watch has a problem",
)

# ── the queue ───────────────────────────────────────────────────────────────────────────────────────────────

PENDING = CATALOGUE.add_gauge(
    "pending", lambda s: s.queue.pending, "Requests that wait for their first or next delivery"
)
LEASED = CATALOGUE.add_gauge("leased", lambda s: s.queue.leased, "Active leases of all replicas")
DELAYED = CATALOGUE.add_gauge(
    "delayed", lambda s: s.queue.delayed, "Requests that wait for the time of their retry"
)
DEAD = CATALOGUE.add_gauge("dead", lambda s: s.queue.dead, "Requests in the dead-letter set")
OLDEST_PENDING = CATALOGUE.add_gauge(
    "oldest_pending_age_seconds",
    lambda s: s.queue.oldest_pending_age_s,
    "Age of the oldest request next in the queue; absent while no request with a creation time waits",
)
DEADLINE_SLACK = CATALOGUE.add_gauge(
    "deadline_slack_seconds",
    lambda s: s.queue.earliest_deadline_s,
    "Time until the earliest deadline of a waiting request, negative if past; absent while unknown",
)
AT_RISK = CATALOGUE.add_gauge(
    "deadline_at_risk",
    lambda s: s.queue.at_risk,
    "Waiting requests that miss their deadline at the current rate; absent while unknown",
)
SERVICE_RATE = CATALOGUE.add_gauge(
    "service_rate",
    lambda s: s.queue.service_rate,
    "Requests per second that all replicas completed recently, while some waited; absent while unknown",
)
REPLICAS = CATALOGUE.add_gauge(
    "replicas", lambda s: s.queue.replica_count, "Dispatchers of this queue with a current heartbeat"
)

# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

RESULTS = CATALOGUE.add_counter(
    "results", "Results written, by class of the HTTP status or by error code", code=RESULT_CODES
)
ATTEMPTS = CATALOGUE.add_counter(
    "attempts",
    "Attempts, by outcome and by class of the HTTP status of the gateway",
    outcome=tuple(OUTCOMES.values()),
    status=STATUS_CLASSES,
)
REFUSALS = CATALOGUE.add_counter(
    "refusals", "Answers that reported overload, by drop reason of the gateway", reason=DROP_REASONS
)
RETRIES = CATALOGUE.add_counter(
    "retries",
    "Requests returned for another attempt, by what the last attempt counted as",
    counted_as=RETRY_KINDS,
)
LEASES_ENDED = CATALOGUE.add_counter(
    "leases_ended",
    "Leases that this process completed, by kind of completion and by answer of the queue",
    completion=tuple(COMPLETION_KINDS.values()),
    answer=QUEUE_ANSWERS,
)
LEASES_RECLAIMED = CATALOGUE.add_counter(
    "reclaims", "Leases reclaimed from dispatchers that ended, were silent or renewed too late"
)
LEASES_LOST = CATALOGUE.add_counter(
    "leases_lost", "Leases of this process that expired while their request was at the gateway"
)
REQUESTS_EXPIRED = CATALOGUE.add_counter("expired", "Requests whose deadline passed while they waited")
WAIT_SECONDS = CATALOGUE.add_histogram(
    "wait_seconds",
    "Time from the creation of the request (data.created) to its first attempt",
    _WAIT_BUCKETS_S,
)
ATTEMPT_SECONDS = CATALOGUE.add_histogram(
    "attempt_seconds", "Time from sending a request to its outcome", _LATENCY_BUCKETS_S
)
PICKER_WAIT_SECONDS = CATALOGUE.add_histogram(
    "picker_wait_seconds",
    "Time for which a request waited in the endpoint picker, if the answer says so",
    _LATENCY_BUCKETS_S,
)
SETTLE_SECONDS = CATALOGUE.add_histogram(
    "settle_seconds",
    "Time from the outcome to the confirmation of the queue that the result is written",
    _SETTLE_BUCKETS_S,
)
REQUEST_SECONDS = CATALOGUE.add_histogram(
    "request_seconds",
    "Time from the creation of the request (data.created) to its written result",
    _WAIT_BUCKETS_S,
)

# ── features ────────────────────────────────────────────────────────────────────────────────────────────────

for _module in sorted(import_modules("metrics").values(), key=attrgetter("PLACE")):
    CATALOGUE.add_feature(_module.SERIES)

# ── impact on realtime ──────────────────────────────────────────────────────────────────────────────────────

TTFT = CATALOGUE.add_gauge(
    "realtime_ttft_seconds",
    lambda s: s.impact.get_quantiles("ttft"),
    "Time to the first token over the last 5 minutes, from metrics of the pool; absent if it has none",
    quantile=QUANTILES,
)
TPOT = CATALOGUE.add_gauge(
    "realtime_tpot_seconds",
    lambda s: s.impact.get_quantiles("tpot"),
    "Time per further token over the last 5 minutes, from metrics of the pool; absent if it has none",
    quantile=QUANTILES,
)
BATCH_SHARE = CATALOGUE.add_gauge(
    "batch_share",
    lambda s: s.impact.batch_share,
    "Batch requests in flight as a share of the capacity, averaged over the same time; absent if unknown",
)

# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────

BUILD_INFO = CATALOGUE.add_info_gauge(
    "build_info",
    lambda s: {"version": s.process.version, "python": s.process.python},
    "Always 1, with the versions of the dispatcher and of Python",
    "version",
    "python",
)
CONFIG_INFO = CATALOGUE.add_info_gauge(
    "config_info",
    lambda s: {"hash": s.process.config_hash},
    "Always 1, with the start of the SHA-256 of the configuration file in use",
    "hash",
)
CONFIG_GENERATION = CATALOGUE.add_gauge(
    "config_generation",
    lambda s: s.process.config_generation,
    "Number of configurations that were in use since the start",
)
CONFIG_REFUSED = CATALOGUE.add_gauge(
    "config_refused",
    lambda s: float(s.process.config_problem is not None),
    "1 while the newest configuration file is invalid",
)
CONFIG_RELOADS = CATALOGUE.add_counter(
    "config_reloads", "Changed configuration files, by result", result=("applied", "refused")
)
OBSERVING = CATALOGUE.add_gauge(
    "observing", lambda s: float(s.process.observe), "1 if the dispatcher only observes and sends nothing"
)
LOOP_LAG = CATALOGUE.add_gauge(
    "loop_lag_seconds",
    lambda s: s.process.loop_lag_s,
    "Maximum delay with which the event loop ran a due task in the last 10 s",
)
EVENTS = CATALOGUE.add_counter(
    "events",
    "Events, by name; includes those that the log only counted",
    # LIBRARY_WARNING is written to the log directly and never emitted, so that it is not counted here.
    event=tuple(e.event_name for e in Event if e.level > logging.DEBUG and e is not Event.LIBRARY_WARNING),
)
