"""State of the dispatcher at one moment, by subject. /status and every gauge are built from it.

/status is one flat object, so that two parts of `Status` must not have a field with the same name. The
command line decodes /status into the same classes. The dispatcher may then be of another version, therefore
every field has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import islice
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from dispatcher.core.health import Cause, Health
from dispatcher.settings import Source

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
SOURCES = get_args(Source)
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
    """Health of the dispatcher: whether requests are processed, and the reason if not (`core/health.py`)."""

    health: Health = Health.UNKNOWN
    health_cause: Cause = Cause.NONE
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
    started: int | None = None
    """Number of pending requests of which slices have been generated."""
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
class MergeTargetStatus:
    """Merged calls of one path and model of a batching rule."""

    path: str = ""
    model: str = ""
    """Empty if the path has no model in its body."""
    shape: str = ""
    mode: str = ""
    size: int = 0
    """Number of items per call."""
    server_max_items: int | None = None
    gain: float | None = None
    checked_calls: int = 0
    off_reason: str | None = None
    """Reason why requests are not merged any more. `None` while they are."""
    sentence: str = ""
    """Summary of the other fields."""

    @property
    def name(self) -> str:
        """Model and path in words."""
        return f"{self.model} at {self.path}" if self.model else self.path


@dataclass(frozen=True, slots=True)
class BatchingStatus:
    """State of merged calls in this process."""

    batching: Sequence[MergeTargetStatus] = ()
    batching_waiting: int = 0
    """Number of requests that wait for others to share a call."""
    batching_calls: Mapping[str, int] = field(default_factory=dict)
    """Merged calls by result."""
    batching_requests: int = 0
    """Number of requests that were answered by merged calls."""
    batching_checks: Mapping[str, int] = field(default_factory=dict)
    """Single calls that were made to check answers of merged calls, by result."""
    batching_timeouts: Mapping[str, int] = field(default_factory=dict)
    """Number of requests that this process claimed after the default timeout of their rule, by what happened
    to them: `reject`, `delay`."""

    def get_by_path_and_model(
        self, value: Callable[[MergeTargetStatus], float | None]
    ) -> Mapping[str, float]:
        """Return a value for each path and model for which it is known. Keys join both with a NUL byte."""
        values = {f"{each.path}\0{each.model}": value(each) for each in self.batching[:MAX_TABLE_ROWS]}
        return {name: known for name, known in values.items() if known is not None}


SEQUENCE_COUNTS = ("active", "parked", "held", "aborted", "waiting")
"""Names of the counts in `SequencesStatus.sequences`."""


@dataclass(frozen=True, slots=True)
class SequenceModelStatus:
    """Sequences of all replicas to which one entry of `sequences.models` applies."""

    match: str = ""
    """Pattern of the model names."""
    active: int = 0
    parked: int = 0
    """Number of sequences that wait to begin."""


@dataclass(frozen=True, slots=True)
class SequencesStatus:
    """State of the sequences."""

    sequences: Mapping[str, int] | None = None
    """Number of sequences of all replicas by status (`active`, `parked`, `held`, `aborted`), and of requests
    that wait for their turn (`waiting`). `None` if they are not known."""
    sequence_models: Sequence[SequenceModelStatus] = ()
    """Number of sequences for each entry of `sequences.models` that applies to some."""
    sequence_turns: Mapping[str, int] = field(default_factory=dict)
    """Decisions about claimed requests of sequences in this process: `granted`, `waits`, `rejected`."""
    sequence_servers: Mapping[str, int] = field(default_factory=dict)
    """Answers in this process to requests with a session token, by the server that answered: the `same`, an
    `other`, or `none` if the answer had no token."""

    def get_count(self, name: str) -> int | None:
        """Return one number of `sequences`, or `None` if it is not known."""
        return None if self.sequences is None else self.sequences.get(name)

    def get_by_match(self, name: str) -> Mapping[str, float]:
        """Return one number (`active` or `parked`) for each pattern of `sequences.models` that applies."""
        return {each.match: float(getattr(each, name)) for each in self.sequence_models[:MAX_TABLE_ROWS]}


@dataclass(frozen=True, slots=True)
class SlicedModelStatus:
    """Knowledge about slices of one model."""

    path: str = ""
    model: str = ""
    continued_by: str = ""
    """How its generations are continued: by `token ids` or by `text`. Empty if they are not."""
    whole_reason: str = ""
    """Reason why its requests are sent whole. Empty if they are sliced."""
    why: str = ""
    """The reason in a sentence, if there is more to say."""
    slice_tokens: int | None = None
    """Number of tokens of a slice. `None` if it is that of the settings."""
    overhead_s: float | None = None
    """Measured time to the first token of a continued slice."""
    cached_share: float | None = None
    """Share of the prompts of continued slices that is in the prefix cache."""


@dataclass(frozen=True, slots=True)
class SlicingStatus:
    """State of the slices."""

    slices: Mapping[str, int] = field(default_factory=dict)
    """Answers to slices in this process by what followed: `continued`, `finished`, `restarted`."""
    slice_tokens: int = 0
    """Tokens that slices have generated."""
    revoked_slices: int = 0
    """Slices that were ended early, because realtime requests waited."""
    whole_requests: Mapping[str, int] = field(default_factory=dict)
    """Long generations that were sent whole in this process, by the reason."""
    sliced_models: Sequence[SlicedModelStatus] = ()


@dataclass(frozen=True, slots=True)
class LabelStatus:
    """A label of a model."""

    version: str = ""
    by: str | None = None
    """Operator who set it. `None` if it comes from the settings."""


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a model."""

    name: str = ""
    label: str = ""
    """Short name of the version."""
    state: str = ""
    since_s: float = 0.0
    serving: int = 0
    """Number of endpoints that serve it."""
    warm: int | None = None
    """Number of endpoints where it is warm. `None` if the model has no warm-up."""
    desired: bool = False
    drained: bool = False
    drained_by: str | None = None
    share: float = 0.0
    """Share of the requests for the model."""
    labels: Sequence[str] = ()
    """Labels that select it."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model."""

    name: str = ""
    state: str = "unknown"
    serving: int | None = None
    """Number of endpoints that serve it, of all `endpoints`. `None`, like the next fields, if no dispatcher
    watches it."""
    endpoints: int | None = None
    unread_count: int | None = None
    """Number of endpoints whose list of models cannot be read."""
    waiting: int | None = None
    """Number of requests that wait for it. `None` if it is not known."""
    since_s: float | None = None
    named: bool | None = None
    """True if the settings name it."""
    denied: bool | None = None
    """True if a model server rejected it although it is listed."""
    drained_by: str | None = None
    sentence: str = ""
    """Explanation of the state."""
    policy: str | None = None
    """Version policy. `None` if the settings give it no versions."""
    labels: Mapping[str, LabelStatus] = field(default_factory=dict)
    versions: Sequence[VersionStatus] = ()
    """Newest version first."""


@dataclass(frozen=True, slots=True)
class ModelsStatus:
    """Models that the pool serves, as this process sees them."""

    models: Sequence[ModelStatus] = ()
    """Models that are configured, were served, or have waiting requests; those with most waiting requests
    first. Empty if models are not watched."""
    model_count: int = 0
    """Number of known models. `models` has only the first ones."""
    model_requests: Mapping[str, int] = field(default_factory=dict)
    """Decisions about claimed requests that name a model in this process: `served`, `waits`, `unknown`, and
    `denied` if the model server rejected the model."""
    model_problems: Sequence[str] = ()
    """Endpoints whose list of models cannot be read, with the reason."""
    model_registry_problem: str | None = None
    """Reason why the model registry in the queue cannot be read. Its contents are ignored meanwhile."""

    def get_by_model(self, field_name: str) -> Mapping[str, float]:
        """Return a numeric field of each model for which it is known."""
        values = {each.name: getattr(each, field_name) for each in self.models[:MAX_TABLE_ROWS]}
        return {name: float(value) for name, value in values.items() if value is not None}

    def get_by_version(self, field_name: str) -> Mapping[str, float]:
        """Return a numeric field of each served version for which it is known. Keys join model and version
        with a NUL byte."""
        pairs = (
            (f"{model.name}\0{each.name}", getattr(each, field_name))
            for model in self.models
            for each in model.versions
            if each.serving
        )
        return {name: float(value) for name, value in islice(pairs, MAX_TABLE_ROWS) if value is not None}


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
    batching: BatchingStatus = field(default_factory=BatchingStatus)
    sequences: SequencesStatus = field(default_factory=SequencesStatus)
    slicing: SlicingStatus = field(default_factory=SlicingStatus)
    models: ModelsStatus = field(default_factory=ModelsStatus)
    health: HealthStatus = field(default_factory=HealthStatus)

    def to_dict(self) -> dict[str, Any]:
        """Return the status as one flat object, as /status shows it."""
        # The health comes first, since people read this object, too.
        result: dict[str, Any] = asdict(self.health)
        for part in fields(self):
            result.update(asdict(getattr(self, part.name)))
        return result


def decode_status(document: Mapping[str, Any]) -> Status:
    """Return the status that a dispatcher, maybe of another version, shows as `document`.

    Unknown fields are ignored. A field that is missing, or whose value cannot be read, has its default.
    """
    parts: dict[str, Any] = {}
    for name, part in _get_field_types(Status).items():
        values = {}
        for field_name, kind in _get_field_types(part).items():
            if field_name in document:
                with suppress(msgspec.ValidationError):
                    values[field_name] = msgspec.convert(document[field_name], kind)
        parts[name] = part(**values)
    return Status(**parts)


@cache
def _get_field_types(part: type) -> Mapping[str, Any]:
    return get_type_hints(part)
