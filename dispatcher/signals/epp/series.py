"""Turn the EPP's series of one replica into a view: names, labels, and how samples are combined.

The direct scrape and Prometheus both use this module, so that the same rules decide what a value means.
`readings` combines the views of all replicas. docs/contributing/readings.md explains the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dispatcher.limit.budget import Reason
from dispatcher.limit.picker_inference import PickerPage
from dispatcher.limit.poll import ReadFailure
from dispatcher.limit.realtime_impact import ReplicaHistograms
from dispatcher.signals.exposition import Sample

QUEUE_AT_FULL, KV_AT_FULL = 5.0, 0.8
"""Default thresholds of the utilization detector."""


class Family(Enum):
    """A quantity with all names of its series, the newest first."""

    SATURATION = (
        "llm_d_epp_flow_control_pool_saturation",
        "inference_extension_flow_control_pool_saturation",
    )
    QUEUED = ("llm_d_epp_flow_control_queue_size", "inference_extension_flow_control_queue_size")
    RUNNING = ("llm_d_epp_average_running_requests", "inference_pool_average_running_requests")
    WAITING = ("llm_d_epp_average_queue_size", "inference_pool_average_queue_size")
    KV_CACHE = ("llm_d_epp_average_kv_cache_utilization", "inference_pool_average_kv_cache_utilization")
    RUNNING_DEVIATION = ("llm_d_epp_std_dev_running_requests",)
    """Standard deviation of the running requests of an endpoint, flushed together with the averages."""
    SERVER_QUEUES = ("llm_d_epp_per_endpoint_queue_size", "inference_pool_per_pod_queue_size")
    READY = ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods")
    IN_FLIGHT = ("llm_d_epp_request_running", "inference_objective_running_requests")
    STALE = ("llm_d_epp_flow_control_stale_endpoints",)
    """Series that only utilization detectors write. The operator chooses the value of its label."""
    DETECTORS = ("llm_d_epp_flow_control_detector_saturation",)
    """Saturation of each detector, by pipeline stage, if the pool's saturation is the maximum of several."""

    @property
    def pool_label(self) -> str | None:
        """Label with the name of the pool. `None` if the series has no such label."""
        return _POOL_LABEL.get(self)


_POOL_LABEL = {
    Family.SATURATION: "inference_pool",
    Family.QUEUED: "inference_pool",
    Family.RUNNING: "name",
    Family.WAITING: "name",
    Family.KV_CACHE: "name",
    Family.RUNNING_DEVIATION: "name",
    Family.SERVER_QUEUES: "name",
    Family.READY: "name",
}

_ENDPOINT_LABELS = ("model_server_endpoint", "model_server_pod")
"""Labels that name the endpoint of a queue. Through Prometheus, only the sum of the queues is read, which has
none of these labels."""
INFO_NAMES = ("llm_d_epp_info", "inference_extension_info")
"""Series that names the build. Each picker's page has it from the start, even without any other series."""
START_TIME = "process_start_time_seconds"
"""Start time of the process. The page of any program may have it."""
SERIES_NAMES = frozenset(name for family in Family for name in family.value).union(INFO_NAMES, (START_TIME,))
"""Names of all series that are read."""


@dataclass(frozen=True, slots=True)
class InFlightLoad:
    """Requests in flight at the endpoints, as one replica of the picker counts them."""

    requests: float = 0.0
    batch: float | None = None
    """Part of `requests` that has a negative priority. `None` if the series does not show priorities."""
    producer: str = ""
    """Name of the producer that is used."""
    problem: str = ""
    """Why the counts cannot be used. Empty if they can."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """One sample of what an EPP replica shows of the pool. A value is `None` if there is no such series."""

    opened_at: float
    closed_at: float
    saturation: float | None = None
    queued: float | None = None
    """Requests that wait in this replica."""
    running: float | None = None
    """Mean number of running requests per ready endpoint, flushed every FLUSH_S."""
    waiting: float | None = None
    """Mean number of requests that wait in a model server, flushed together with `running`."""
    deferred: float = 0.0
    """Part of `waiting` that does not wait for capacity of the model servers."""
    kv_cache: float | None = None
    """Mean share of the KV cache in use, flushed together with `running`."""
    kv_tokens: float | None = None
    """Tokens that the KV caches of all endpoints hold together. Only pages of model servers show it."""
    server_queued: float | None = None
    """Requests that wait in all model servers together, as of when this replica last read their metrics."""
    endpoints_with_room: float | None = None
    """Number of ready endpoints in which no request waits, as of the same time as `server_queued`. `None` if
    the queues of the endpoints are not shown one by one."""
    running_deviation: float | None = None
    """Standard deviation of the running requests of an endpoint, flushed together with `running`."""
    ready: float | None = None
    in_flight: float | None = None
    """Requests that this replica sent to a model server and that are unanswered."""
    batch_in_flight: float | None = None
    """Part of `in_flight` that has a negative priority. `None` if the page does not show priorities."""
    batch_queued: float | None = None
    """Part of `queued` that has a negative priority. `None` if the page does not show priorities."""
    load: InFlightLoad | None = None
    """Requests in flight by the replica's in-flight-load producer. `None` if the page does not show them."""
    utilization_detectors: frozenset[str] = frozenset()
    """Names of the utilization detectors that the replica runs."""
    stale_endpoints: float = 0.0
    """Number of endpoints whose metrics were too old for a utilization detector when it last read them."""
    detector_saturations: Mapping[str, float] = field(default_factory=dict)
    """Saturation of each detector by name, if the pool's is the maximum of several."""
    stages: frozenset[str] = frozenset()
    """Pipeline stages (prefill, decode) that have endpoints. Empty if the page does not tell stages apart."""
    address: str = ""
    """Address that was scraped. Empty if the view is not of one picker."""
    started_at: float | None = None
    """Unix time at which the process began. `None` if its page does not show it."""
    capacity: float | None = None
    """max_SYS in requests from the operator's own query."""
    per_endpoint: float | None = None
    """Requests that a model server runs at once, according to its page."""
    has_own_saturation: bool = False
    """True if the saturation is from the operator's own query."""
    has_current_averages: bool = False
    """True if the averages are of the time of the sample, and not of the last flush."""
    raw: Mapping[str, float] = field(default_factory=dict)
    """Values by series name, for `check` and /status."""
    histograms: ReplicaHistograms | None = None
    """Histograms of the requests' latencies. `None` if they were not read this time."""

    @property
    def is_idle(self) -> bool:
        """True if the replica knows no endpoint and has no requests."""
        return not self.ready and not self.sent and not self.queued

    @property
    def sent(self) -> float | None:
        """Requests that this replica sent and that are unanswered, whichever series shows them. `None` if
        none does."""
        if self.in_flight is not None or self.load is None or self.load.problem:
            return self.in_flight
        # With several stages, a request counts once for each stage until its answer begins.
        return None if self.has_several_stages else self.load.requests

    @property
    def has_flow_control(self) -> bool:
        return self.saturation is not None or self.queued is not None or bool(self.utilization_detectors)

    @property
    def requests_at_flush(self) -> float | None:
        """Requests in the model servers at the last flush. `None` if the page lacks one of the averages."""
        if self.running is None or self.waiting is None or self.ready is None:
            return None
        return (self.running + self.waiting) * self.ready

    @property
    def picker_page(self) -> PickerPage | None:
        """Values that may show that the saturation is a count of requests. `None` if they cannot show it.

        With several detectors, the one that is no utilization detector may be a count, if there is only one
        such detector. Its own saturation is used, because that of the pool may come from another detector at
        any moment.
        """
        if self.has_several_stages:
            return None  # each saturation is of the endpoints of one stage, whose number no series shows
        saturation = self.saturation
        others = [
            value
            for name, value in self.detector_saturations.items()
            if name not in self.utilization_detectors
        ]
        if self.is_composite:
            saturation = others[0] if len(others) == 1 else None
        elif self.utilization_detectors:
            return None
        if self.has_own_saturation or saturation is None or self.ready is None:
            return None
        if self.stale_endpoints:
            return None  # the detectors include endpoints that `ready` may leave out
        pressure = None
        if self.waiting is not None and self.kv_cache is not None:
            pressure = max(self.waiting / QUEUE_AT_FULL, self.kv_cache / KV_AT_FULL)
        # The picker creates this series with its first request, so a missing one means 0.
        return PickerPage(saturation, self.ready, self.sent or 0.0, pressure)

    @property
    def is_composite(self) -> bool:
        """True if the saturation is the maximum of several detectors."""
        return len(self.detector_saturations) > 1

    @property
    def has_several_stages(self) -> bool:
        """True if the endpoints are divided into stages, each with a saturation of its own."""
        return len(self.stages) > 1


def build_view(
    samples: Iterable[Sample], pool: str, opened_at: float, closed_at: float, address: str = ""
) -> PoolView | ReadFailure:
    """Return the view of a pool that the samples of one replica show."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    # Any program's page may have this series, so it must not make a foreign page look like a picker's.
    started = by_name.pop(START_TIME, [])
    if not by_name:
        return ReadFailure(
            Reason.UNREADABLE,
            "none of the endpoint picker's series is there",
            "the address must be the EPP's metrics port (9090 by default)",
        )
    chosen: dict[Family, list[Sample]] = {}
    other_pools: set[str] = set()
    for family in Family:
        for name in family.value:
            mine, others = _select_pool(by_name.get(name, ()), family.pool_label, pool)
            other_pools |= others
            if mine:
                chosen[family] = mine
                break
    # One EPP serves one pool. If the page has only series of another pool, the address or `pool.name` is
    # wrong.
    if other_pools and not any(family.pool_label for family in chosen):
        names = ", ".join(sorted(other_pools))
        return ReadFailure(
            Reason.UNREADABLE, f"the series are those of pool {names}, not of {pool}", "pool.name"
        )
    raw: dict[str, float] = {}

    def combine_family(family: Family) -> float | None:
        found = chosen.get(family)
        if found is None:
            return None
        combined = _combine_samples(family, found)
        raw[found[0].name] = combined
        return combined

    # A stage without endpoints has no saturation of the pool, but may keep the last one of each detector.
    stages = _collect_stages(chosen.get(Family.SATURATION, ())) or _collect_stages(
        chosen.get(Family.DETECTORS, ())
    )
    ready = combine_family(Family.READY)
    stale = _find_largest_count(chosen.get(Family.STALE, ()))
    if stale:
        raw[Family.STALE.value[0]] = stale
    return PoolView(
        opened_at,
        closed_at,
        saturation=combine_family(Family.SATURATION),
        queued=combine_family(Family.QUEUED),
        running=combine_family(Family.RUNNING),
        waiting=combine_family(Family.WAITING),
        kv_cache=combine_family(Family.KV_CACHE),
        server_queued=combine_family(Family.SERVER_QUEUES),
        endpoints_with_room=_count_endpoints_with_room(chosen.get(Family.SERVER_QUEUES, ()), ready),
        running_deviation=combine_family(Family.RUNNING_DEVIATION),
        ready=ready,
        in_flight=combine_family(Family.IN_FLIGHT),
        batch_in_flight=sum_priorities_below_zero(chosen.get(Family.IN_FLIGHT, ())),
        batch_queued=sum_priorities_below_zero(chosen.get(Family.QUEUED, ())),
        utilization_detectors=frozenset(
            sample.labels.get("detector", "") for sample in chosen.get(Family.STALE, ())
        ),
        stale_endpoints=stale,
        detector_saturations=_collect_detectors(chosen.get(Family.DETECTORS, ()), stages, raw),
        stages=stages,
        address=address,
        started_at=started[0].value if len(started) == 1 and math.isfinite(started[0].value) else None,
        raw=raw,
    )


def _select_pool(samples: Sequence[Sample], label: str | None, pool: str) -> tuple[list[Sample], set[str]]:
    """Return the samples of the pool, and the names of other pools among the samples."""
    if label is None:
        return list(samples), set()
    mine = [sample for sample in samples if sample.labels.get(label) == pool]
    # The label is empty if the EPP runs with an endpoint selector instead of a pool.
    unnamed = [sample for sample in samples if not sample.labels.get(label)]
    return mine or unnamed, {sample.labels[label] for sample in samples if sample.labels.get(label)} - {pool}


def _combine_samples(family: Family, samples: Sequence[Sample]) -> float:
    if family is Family.SATURATION:
        # The EPP admits requests by the stage `effective`. Without this stage, the fullest one counts.
        effective = [sample.value for sample in samples if sample.labels.get("stage") == "effective"]
        return max_or_nan(effective or [sample.value for sample in samples])
    if family in (Family.QUEUED, Family.IN_FLIGHT, Family.SERVER_QUEUES):
        # A flow that was deleted and came back may be counted below zero for a while. max(0, value) would
        # turn NaN into 0, but NaN must reach the limiter, which rejects it.
        return sum_or_nan(0.0 if sample.value < 0 else sample.value for sample in samples)
    if family is Family.READY:
        return min_or_nan(sample.value for sample in samples)
    return max_or_nan(sample.value for sample in samples)


def sum_priorities_below_zero(samples: Sequence[Sample]) -> float | None:
    """Return the sum of the samples with a negative priority. `None` if a sample has no priority."""
    if not all(sample.labels.get("priority") for sample in samples):
        return None
    return sum_or_nan(
        sample.value
        for sample in samples
        if sample.labels["priority"].startswith("-") and not sample.value < 0
    )


def _count_endpoints_with_room(samples: Sequence[Sample], ready: float | None) -> float | None:
    """Return the number of ready endpoints in which no request waits.

    An endpoint whose scrape fails keeps its last queue on the page, but is not ready any more. The empty
    queues may be those of such endpoints.
    """
    if (
        ready is None
        or not samples
        or not all(set(_ENDPOINT_LABELS) & each.labels.keys() for each in samples)
    ):
        return None
    empty = sum(each.value <= 0 for each in samples)
    return max_or_nan((0.0, empty - max_or_nan((0.0, len(samples) - ready))))


def _find_largest_count(samples: Sequence[Sample]) -> float:
    """Return the largest of the samples. NaN if it is negative or NaN, so that the limiter rejects it."""
    most = max_or_nan([sample.value for sample in samples] or [0.0])
    return most if most >= 0 else math.nan


def _collect_stages(samples: Sequence[Sample]) -> frozenset[str]:
    """Return the pipeline stages of the samples. The stage `effective` stands for all of them."""
    return frozenset(sample.labels.get("stage", "") for sample in samples) - {"", "effective"}


def _collect_detectors(
    samples: Sequence[Sample], stages: frozenset[str], raw: dict[str, float]
) -> Mapping[str, float]:
    """Return the saturation of each detector, that of its fullest stage. Empty unless there are several.

    A detector may be restricted to some stages, and is not evaluated while these have no endpoints. Older
    routers have detectors without a stage.
    """
    found: dict[str, dict[str, float]] = {}
    for sample in samples:
        by_stage = found.setdefault(sample.labels.get("detector", ""), {})
        stage = sample.labels.get("stage", "")
        by_stage[stage] = max_or_nan((sample.value, by_stage.get(stage, sample.value)))
    saturations: dict[str, float] = {}
    for name, by_stage in found.items():
        shown = stages & by_stage.keys() or by_stage.keys() & {""}
        if shown:
            saturations[name] = max_or_nan(by_stage[stage] for stage in shown)
    if len(saturations) < 2:
        return {}
    raw |= {f'{samples[0].name}{{detector="{name}"}}': value for name, value in saturations.items()}
    return saturations


def sum_or_nan(values: Iterable[float]) -> float:
    """Return the sum. Values that are too large give infinity or NaN, and no exception."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if one of the values is NaN."""
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def min_or_nan(values: Iterable[float]) -> float:
    """Return the smallest value, or NaN if one of the values is NaN."""
    return -max_or_nan(-value for value in values)
