"""State of the dispatcher at one moment, by subject. /status and every gauge are built from it.

/status is one flat object, so that two parts of `Status` must not have a field with the same name. The
command line decodes /status into the same classes. The dispatcher may then be of another version, therefore
every field has a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from dispatcher.features import import_modules
from dispatcher.limit.health import Health

CAPACITY_SOURCES: Mapping[str, str] = {
    "learned": "what ran while requests waited",
    "search": "the search so far",
    "watch": "the Kubernetes watch",
    "picker": "the endpoint picker",
    "server": "the model servers",
    "setting": "budget.max_sys",
    "query": "signals.prometheus.queries.capacity",
}
"""Sources of the capacity with their names for people. `learned`: readings showed the capacity, and it is
less than the other sources say, or there is no other source. `search`: there is no other source and the
readings have not shown it yet. `watch`: the Kubernetes watch lowers what the other sources say. `setting`:
`budget.max_sys`, or `budget.per_endpoint` × ready endpoints."""
MAX_TABLE_ROWS = 32
"""Maximum number of samples of a gauge that has one per model. /status has all models."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Identity and configuration of this dispatcher."""

    version: str = ""
    python: str = ""
    pool: str = ""
    queue: str = ""
    owner: str = ""
    observe: bool = False
    started_at: float = 0.0
    """Unix time of the start."""
    config_generation: int = 1
    config_hash: str = ""
    """Start of the SHA-256 of the configuration file in use."""
    config_problem: str | None = None
    loop_lag_s: float = 0.0
    """Maximum delay with which the event loop ran a due task in the last seconds."""


@dataclass(frozen=True, slots=True)
class GateStatus:
    """Limit on requests in flight, and the reason for it."""

    reason: str = ""
    open: bool = False
    explanation: str = ""
    """Sentences that say what is sent, and why not more. The first one names the reason if the gate is
    closed."""
    limit: int = 0
    in_flight: int = 0
    """Number of requests in flight, of all replicas."""
    running: int = 0
    """Number of requests in flight, of this process."""
    free_share: float | None = None
    """Number of batch requests that fit into the pool by the newest readings, including those in flight.
    `None` if it is not known."""
    gateway_problem: str | None = None
    """Reason why the gateway cannot be used, even if `reason` is another one. `None` if it can be used."""
    probing_owner: str | None = None
    """Dispatcher that is sending the probe that tests for all replicas whether the gateway is reachable
    again."""
    attempts_problem: str | None = None
    """Number and kinds of failures of the last attempts of this process. `None` if few failed, or if
    `gateway_problem` is set."""
    problems: Sequence[str] = ()
    """Sentences about problems of all parts that `explanation` does not mention."""


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """Health of the dispatcher: whether requests are processed, and the reason if not (limit/health.py)."""

    health: Health = Health.UNKNOWN
    health_cause: str = "none"
    health_sentence: str = ""
    health_since_s: float | None = None
    """Time for which the health and its cause have not changed."""
    health_hint: str = ""
    """Place where an operator looks first. Empty if nothing needs attention."""
    done_in_s: float | None = None
    """Estimated time until all waiting requests are processed at the current rate. `None` if it is not
    known."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of the budget for one signal."""

    signal: str = ""
    f_sys: float = 0.0
    f_epp: float = 0.0
    budget: float | None = None
    """D. `None`, like `headroom`, if the reading is not plausible."""
    headroom: int | None = None
    max_sys: float = 0.0


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """Budget D = 1 − (F_SYS + F_EPP + B): for the signal with the smallest limit, and in `terms` for each
    signal."""

    reserve: float = 0.0
    signal: str | None = None
    f_sys: float | None = None
    f_epp: float | None = None
    budget: float | None = None
    headroom: int | None = None
    max_sys: float | None = None
    max_sys_source: str | None = None
    """Source of `max_sys`: one of CAPACITY_SOURCES."""
    configured_max_sys: float | None = None
    """Capacity by configuration, picker or watch. It is larger than `max_sys` if readings showed that fewer
    requests fit. `None` if it is not known."""
    per_endpoint: float | None = None
    """Requests per endpoint from which the capacity is computed. `None` if it has another source."""
    per_endpoint_source: Literal["setting", "server", "picker", "suggestion", "search"] | None = None
    picker_max_concurrency: int | None = None
    """maxConcurrency, as the pages of the picker show it. `None` if they do not show it."""
    max_sys_confirmed: int = 0
    """Number of times in a row that the learned capacity was confirmed. 0 if nothing was learned."""
    reserve_problem: str | None = None
    """Reason why the reserve is too small for batch requests as long as the current ones. `None` if it is
    large enough, or if there are no realtime requests that could wait."""
    capacity_note: str = ""
    """Sentence about the requests per endpoint that the dispatcher assumes. May be empty."""
    terms: Sequence[Terms] = ()

    def get_by_signal(self, name: str) -> Mapping[str, float]:
        """Return one term by signal, for signals that have it."""
        values = {terms.signal: getattr(terms, name) for terms in self.terms}
        return {signal: value for signal, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ReadingStatus:
    """Newest reading of one signal, with the values of the series that it was computed from."""

    signal: str = ""
    age_s: float = 0.0
    window_s: float = 0.0
    """Length of the time window in which the sample was taken."""
    f_sys: float = 0.0
    f_epp: float = 0.0
    max_sys: float = 0.0
    source: str = ""
    raw: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SignalsStatus:
    """State of the signals that are read from the pool."""

    source: str | None = None
    reading_age_s: float | None = None
    detector: str | None = None
    """Saturation detector of the picker, as far as it is known."""
    signals_problem: str | None = None
    """Reason why the signals cannot be read. `None` while they can."""
    signals_failing_s: float | None = None
    """Seconds for which the signals could not be read. `None` while they can."""
    signals_close_in_s: float | None = None
    """Seconds for which the previous readings are still used. `None` while the signals can be read."""
    readings: Sequence[ReadingStatus] = ()
    realtime: float | None = None
    """Number of requests in the newest reading that cannot be batch requests, without those that wait in the
    picker."""
    realtime_waiting: float | None = None
    """Number of requests that wait in the picker and cannot be batch requests."""


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """State of the Kubernetes watch."""

    watch_endpoints: int | None = None
    """Number of ready endpoints. `None` if it is not known; the watch then limits nothing."""
    watch_stale_s: float | None = None
    """Time since the last answer of the Kubernetes API while a part of the watch is not up to date. `None` if
    all of it is."""
    watch_problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One dispatcher of the queue, as the queue knows it."""

    owner: str = ""
    leases: int = 0
    silent_s: float | None = None
    """Time since its last heartbeat. `None` if queue.owner_timeout_s is 0, which turns heartbeats off."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """State of the queue."""

    pending: int | None = None
    leased: int | None = None
    delayed: int | None = None
    dead: int | None = None
    paused: bool = False
    queue_problem: str | None = None
    oldest_pending_age_s: float | None = None
    earliest_deadline_s: float | None = None
    """Time until the earliest deadline of a waiting request. Negative if it has passed."""
    at_risk: int | None = None
    """Number of waiting requests that miss their deadline at the current `service_rate`."""
    service_rate: float | None = None
    """Requests per second that all replicas completed recently, while requests waited."""
    service_s: float | None = None
    """Average duration of a batch request while requests waited."""
    replica_count: int | None = None
    replicas: Sequence[ReplicaStatus] = ()


@dataclass(frozen=True, slots=True)
class ImpactStatus:
    """Impact on realtime: latencies of interactive users, and the share of the pool that batch requests had
    meanwhile."""

    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    impact_scope: Literal["realtime", "all"] | None = None
    """Requests whose latencies were measured: only realtime requests, or all requests including batch."""
    impact_requests: int | None = None
    """Number of requests that the latencies are based on."""
    impact_source: str | None = None
    """Source of the latencies."""
    batch_share: float | None = None
    """Batch requests in flight as a share of the capacity, averaged over the same time."""
    impact_problem: str | None = None
    """Reason why some of the latencies are not known. `None` if all are known."""

    def get_quantiles(self, latency: Literal["ttft", "tpot"]) -> Mapping[str, float]:
        """Return the known quantiles of a latency, by value of the label `quantile`."""
        values = {"0.5": getattr(self, f"{latency}_p50_s"), "0.95": getattr(self, f"{latency}_p95_s")}
        return {quantile: value for quantile, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class FeatureSection:
    """Section of a feature, in `features/<name>/status.py`, where `SECTION` is its class."""

    def format_lines(self) -> Sequence[str]:
        """Return the lines of the verb `status`."""
        return ()

    def explain(self) -> Sequence[str]:
        """Return the sentences of the verb `explain`."""
        return ()


@dataclass(frozen=True, slots=True)
class FeatureStatus:
    """Section of a feature, with what it adds to the sections of the kernel."""

    section: FeatureSection
    sentences: Sequence[str] = ()
    """Sentences that are added to the explanation of the gate."""
    problems: Sequence[str] = ()
    """Sentences about problems, without final punctuation."""
    long_call_reason: str = ""
    """Reason why calls take long, if the feature could make them shorter. Empty if it cannot."""


S = TypeVar("S", bound=FeatureSection)


@dataclass(frozen=True, slots=True)
class Status:
    """Complete status of a dispatcher."""

    process: ProcessStatus = field(default_factory=ProcessStatus)
    gate: GateStatus = field(default_factory=GateStatus)
    budget: BudgetStatus = field(default_factory=BudgetStatus)
    signals: SignalsStatus = field(default_factory=SignalsStatus)
    watch: WatchStatus = field(default_factory=WatchStatus)
    queue: QueueStatus = field(default_factory=QueueStatus)
    impact: ImpactStatus = field(default_factory=ImpactStatus)
    health: HealthStatus = field(default_factory=HealthStatus)
    features: Sequence[FeatureSection] = ()
    """Sections of the features that the dispatcher has."""

    def get_section(self, kind: type[S]) -> S:
        """Return the section of a feature. If the dispatcher does not have it, all fields have defaults."""
        return next((each for each in self.features if isinstance(each, kind)), None) or kind()

    def to_dict(self) -> dict[str, Any]:
        """Return the status as one flat object, as /status shows it."""
        # The health comes first, since people read this object, too.
        result: dict[str, Any] = asdict(self.health)
        for name in _get_kernel_sections():
            result.update(asdict(getattr(self, name)))
        for section in self.features:
            result.update(asdict(section))
        return result


def decode_status(document: Mapping[str, Any]) -> Status:
    """Return the status that a dispatcher, maybe of another version, shows as `document`.

    Unknown fields are ignored. A field that is missing, or whose value cannot be read, has its default.
    """
    sections: dict[str, Any] = {
        name: kind(**_decode(kind, document)) for name, kind in _get_kernel_sections().items()
    }
    # Verbs print the features in this order.
    modules = [module for _, module in sorted(import_modules("status").items())]
    sections["features"] = tuple(
        module.SECTION(**values) for module in modules if (values := _decode(module.SECTION, document))
    )
    return Status(**sections)


def _decode(section: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a section that can be read."""
    values = {}
    for name, kind in _get_field_types(section).items():
        if name in document:
            with suppress(msgspec.ValidationError):
                values[name] = msgspec.convert(document[name], kind)
    return values


@cache
def _get_kernel_sections() -> Mapping[str, type]:
    return {name: kind for name, kind in _get_field_types(Status).items() if name != "features"}


@cache
def _get_field_types(part: type) -> Mapping[str, Any]:
    return get_type_hints(part)
