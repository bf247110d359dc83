"""What the dispatcher knows of itself at one moment, by subject. /status and every gauge are made of it.

On /status all subjects share one object: no two fields have the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Literal, get_args

from dispatcher.core.health import Cause, Health
from dispatcher.settings import Source

CAPACITIES: Mapping[str, str] = {
    "learned": "what ran while requests waited",
    "search": "the search so far",
    "watch": "the Kubernetes watch",
    "picker": "the endpoint picker",
    "server": "the model servers",
    "setting": "budget.max_sys",
    "query": "signals.prometheus.queries.capacity",
}
"""How the capacity is known, as people read it. `learned`: readings showed it, and it is less than what the
others say or nobody else says anything; `search`: nobody says it and readings have not shown it yet; `watch`:
it lowers what the others say; `setting`: also `budget.per_endpoint` × the ready endpoints."""
SOURCES = get_args(Source)
TABLE_MOST = 32
"""Models behind paths that have series of their own; /status has them all."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Which dispatcher this is, and how it is set up."""

    version: str
    python: str
    pool: str
    queue: str
    owner: str
    observe: bool
    started_at: float
    """Unix time."""
    config_generation: int = 1
    config_hash: str = ""
    """The start of the SHA-256 of the file in force."""
    config_problem: str | None = None
    loop_lag_s: float = 0.0
    """The latest that the event loop woke in the last seconds."""


@dataclass(frozen=True, slots=True)
class GateStatus:
    """What may be in flight, and why not more."""

    reason: str
    open: bool
    explanation: str
    limit: int
    in_flight: int
    """Of all replicas together."""
    running: int
    """Of this process."""
    free: float | None
    """What batch work may hold by the newest readings, ours included; None: unknown."""
    gateway_problem: str | None
    """Why there is no gateway, whatever the reason shown is."""
    gateway_prober: str | None = None
    """The dispatcher whose request tries just now, for all, whether there is a gateway again."""
    tries_problem: str | None = None
    """How many of the last tries of this process failed, and how; None: few, or the gateway is gone."""


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """Whether work gets done, and if not, why (`core/health.py`)."""

    health: Health
    health_cause: Cause = Cause.NONE
    health_sentence: str = ""
    health_since_s: float | None = None
    """Age of this health with this cause."""
    health_look_at: str = ""
    """Place where an operator looks first. Empty if nothing needs a look."""
    done_in_s: float | None = None
    """Time until all that waits is done at the present rate. `None` if it is not known."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The budget by one signal."""

    signal: str
    f_sys: float
    f_epp: float
    budget: float | None
    """D; None, as `headroom`: the reading is not believed."""
    headroom: int | None
    max_sys: float


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """D = 1 − (F_SYS + F_EPP + B), of the signal whose limit is the smallest, and of each."""

    reserve: float
    signal: str | None = None
    f_sys: float | None = None
    f_epp: float | None = None
    budget: float | None = None
    headroom: int | None = None
    max_sys: float | None = None
    max_sys_by: str | None = None
    """Source of `max_sys`: one of CAPACITIES."""
    configured_max_sys: float | None = None
    """The known capacity. It is more than `max_sys` if less than that fitted. `None` if it is not known."""
    per_endpoint: float | None = None
    """Requests per endpoint from which the capacity is computed. `None` if it has another source."""
    per_endpoint_from: Literal["setting", "server", "picker", "suggestion", "search"] | None = None
    picker_max_concurrency: int | None = None
    """maxConcurrency by the picker's pages. `None` if they do not show it."""
    max_sys_confirmed: int = 0
    """Number of times in a row that the learned capacity was measured. 0 if nothing is learned."""
    reserve_problem: str | None = None
    """Reason why the reserve is too small for requests as long as ours. `None` if it is not, or if there are
    no realtime requests that could wait."""
    terms: Sequence[Terms] = ()

    def term(self, name: str) -> Mapping[str, float]:
        """One term by signal, where it is known."""
        values = {terms.signal: getattr(terms, name) for terms in self.terms}
        return {signal: value for signal, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SignalsStatus:
    """State of the signals that are read from the pool."""

    source: str | None
    reading_age_s: float | None
    detector: str | None = None
    """What is known of the picker's saturation detector."""
    signals_problem: str | None = None
    """Reason why the signals cannot be read. `None` while they can."""
    signals_failing_s: float | None = None
    """Seconds for which the signals could not be read. `None` while they can."""
    signals_close_in_s: float | None = None
    """Seconds for which the previous readings are still used. `None` while the signals can be read."""
    readings: Sequence[Mapping[str, Any]] = ()
    """The newest reading of each signal with the raw values it came from."""
    realtime: float | None = None
    """Number of requests in the newest reading that cannot be ours, without those that wait in the picker."""
    realtime_waiting: float | None = None
    """Number of requests that wait in the picker and cannot be ours."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What the Kubernetes watch sees."""

    watch_endpoints: int | None = None
    """Ready endpoints; None: it knows none, and bounds nothing."""
    watch_unsure_s: float | None = None
    """How long ago the API was heard last, while something cannot be asked; None: all of it is followed."""
    watch_problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LineStatus:
    """What is in the queue."""

    pending: int | None = None
    leased: int | None = None
    delayed: int | None = None
    dead: int | None = None
    paused: bool = False
    queue_problem: str | None = None
    oldest_pending_age_s: float | None = None
    earliest_deadline_s: float | None = None
    """How long until the earliest deadline that waits; negative: it has passed."""
    at_risk: int | None = None
    """Waiting requests that miss their deadline if it goes on at `service_rate`."""
    service_rate: float | None = None
    """Requests per second that all replicas ended lately, while some waited."""
    service_s: float | None = None
    """How long a request of ours lasts, on average, while some waited."""
    replica_count: int | None = None
    replicas: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class PriceStatus:
    """What interactive users wait, as the pool shows it, beside what batch work took of the pool."""

    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    price_of: Literal["realtime", "all"] | None = None
    """Whose requests were timed: realtime's alone, or all, ours among them."""
    price_requests: int | None = None
    """How many requests it is based on."""
    price_source: str | None = None
    """Whose series they are."""
    batch_share: float | None = None
    """Our requests in flight as a share of the capacity, on average over the same time."""
    price_why_not: str | None = "not read yet"
    """Why something is not known; None where all of it is."""

    def quantiles(self, what: Literal["ttft", "tpot"]) -> Mapping[str, float]:
        """By the label's values, where known."""
        values = {"0.5": getattr(self, f"{what}_p50_s"), "0.95": getattr(self, f"{what}_p95_s")}
        return {quantile: value for quantile, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BatchingStatus:
    """Requests that travel together, in this process."""

    batching: Sequence[Mapping[str, Any]] = ()
    """Each model behind a path of a rule: `size` of its calls, `takes`, `gain`, `checked`, `why_off`, and the
    `sentence` that says so."""
    batching_waiting: int = 0
    """Requests that wait for company."""
    batching_calls: Mapping[str, int] = field(default_factory=dict)
    """Merged calls by what became of them."""
    batching_requests: int = 0
    """Requests that merged calls answered."""
    batching_checks: Mapping[str, int] = field(default_factory=dict)
    """Single calls that were made to compare their answers, by what they showed."""

    def of_each(self, value: Callable[[Mapping[str, Any]], float | None]) -> Mapping[str, float]:
        """A value by path and model, where it is known."""
        told = {f"{each['path']}\0{each['model']}": value(each) for each in self.batching[:TABLE_MOST]}
        return {name: known for name, known in told.items() if known is not None}


@dataclass(frozen=True, slots=True)
class SequencesStatus:
    """Requests that belong together."""

    sequences: Mapping[str, int] | None = None
    """Of all replicas: `active`, `parked`, `held`, `aborted`; `waiting`: requests. None: not known."""
    sequence_turns: Mapping[str, int] = field(default_factory=dict)
    """In this process: what was said of claimed requests, by `goes`, `waits`, `barred`."""
    sequence_servers: Mapping[str, int] = field(default_factory=dict)
    """In this process: answers to requests with a session token, by `same` server, `other`, `lost` (none
    told)."""

    def number(self, name: str) -> int | None:
        """One of `sequences`."""
        return None if self.sequences is None else self.sequences.get(name)


@dataclass(frozen=True, slots=True)
class ModelsStatus:
    """Which models the pool serves, as this process sees it."""

    models: Sequence[Mapping[str, Any]] = ()
    """Each that the settings name, that is or was served, or that requests wait for, most waited for first:
    `name`, `state`, endpoints `serving` it of all `endpoints`, requests `waiting` for it (null: not known),
    `since_s`, the
    `sentence` that says so, and by whom it is drained, `drained_by`. Of one with versions the `policy`, the
    `labels` with the `version` of each and `by` whom it is set (null: the settings), and its `versions`, the
    newest first: of each `name`, `label`, `state`, `since_s`, endpoints `serving` it and those where it is
    `warm` (null: nothing warms it up), whether it is `wanted` and `drained`, `drained_by`, its `share` of the
    work, the `labels` that mean it. Empty: nobody watches them."""
    model_count: int = 0
    """Number of models that are known. `models` has the first of them."""
    model_requests: Mapping[str, int] = field(default_factory=dict)
    """In this process: what was said of claimed requests that name a model, by `goes`, `waits`, `unknown`,
    `denied` (by the server)."""
    model_problems: Sequence[str] = ()
    """Endpoints that do not tell what they serve, with the reason."""
    model_marks_problem: str | None = None
    """What is said of versions of models in the queue, and cannot be read: it counts for nothing."""

    def of_each(self, field_name: str) -> Mapping[str, float]:
        """Return a number of each model whose number is known."""
        values = {str(each["name"]): each[field_name] for each in self.models[:TABLE_MOST]}
        return {name: float(value) for name, value in values.items() if value is not None}

    def of_versions(self, field_name: str) -> Mapping[str, float]:
        """A number of each version that is there, by model and version, where it is known."""
        told = (
            (f"{model['name']}\0{each['name']}", each[field_name])
            for model in self.models
            for each in model.get("versions", ())
            if each["serving"]
        )
        return {name: float(value) for name, value in islice(told, TABLE_MOST) if value is not None}


@dataclass(frozen=True, slots=True)
class Status:
    """All of it."""

    process: ProcessStatus
    gate: GateStatus
    budget: BudgetStatus
    signals: SignalsStatus
    watch: Watch = field(default_factory=Watch)
    line: LineStatus = field(default_factory=LineStatus)
    price: PriceStatus = field(default_factory=PriceStatus)
    batching: BatchingStatus = field(default_factory=BatchingStatus)
    sequences: SequencesStatus = field(default_factory=SequencesStatus)
    models: ModelsStatus = field(default_factory=ModelsStatus)
    health: HealthStatus = field(default_factory=lambda: HealthStatus(Health.UNKNOWN))

    def json(self) -> dict[str, Any]:
        """One flat object."""
        told: dict[str, Any] = asdict(self.health)
        for part in fields(self):
            told.update(asdict(getattr(self, part.name)))
        return told
