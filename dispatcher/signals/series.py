"""From the EPP's series to readings: which names, which labels, and what they add up to.

Both ways to the series (direct scrape, Prometheus) end here, so that one set of rules decides what a value
means. The rules, with their reasons, are written for operators in docs/signals.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from dispatcher.core.budget import Policy, Reading, Reason, Signal
from dispatcher.core.counting import FLUSH_S, Count, Guess, Outside, PickerPage
from dispatcher.core.poll import Unread
from dispatcher.core.price import Histograms
from dispatcher.signals.exposition import Sample

QUEUE_AT_FULL, KV_AT_FULL = 5.0, 0.8
"""The utilization detector's thresholds, as they are where nobody set others."""


class Family(Enum):
    """One quantity under all its names, the newest first."""

    SATURATION = (
        "llm_d_epp_flow_control_pool_saturation",
        "inference_extension_flow_control_pool_saturation",
    )
    QUEUED = ("llm_d_epp_flow_control_queue_size", "inference_extension_flow_control_queue_size")
    RUNNING = ("llm_d_epp_average_running_requests", "inference_pool_average_running_requests")
    WAITING = ("llm_d_epp_average_queue_size", "inference_pool_average_queue_size")
    KV_CACHE = ("llm_d_epp_average_kv_cache_utilization", "inference_pool_average_kv_cache_utilization")
    READY = ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods")
    IN_FLIGHT = ("llm_d_epp_request_running", "inference_objective_running_requests")
    STALE = ("llm_d_epp_flow_control_stale_endpoints",)
    """Written by utilization detectors alone; its label is a name that the operator chose."""

    @property
    def pool_label(self) -> str | None:
        """The label that holds the pool's name; None: the series has none."""
        return _POOL_LABEL.get(self)


_POOL_LABEL = {
    Family.SATURATION: "inference_pool",
    Family.QUEUED: "inference_pool",
    Family.RUNNING: "name",
    Family.WAITING: "name",
    Family.KV_CACHE: "name",
    Family.READY: "name",
}

INFO = ("llm_d_epp_info", "inference_extension_info")
"""Which build it is: on each picker's page from the start, also where there is nothing else."""
NAMES = frozenset(name for family in Family for name in family.value).union(INFO)
"""Every series that is looked at."""


@dataclass(frozen=True, slots=True)
class View:
    """What one EPP replica shows of the pool, in one sample. None: it has no such series."""

    opened_at: float
    closed_at: float
    saturation: float | None = None
    queued: float | None = None
    """Requests that wait in this replica."""
    running: float | None = None
    """Mean per ready endpoint, flushed every FLUSH_S."""
    waiting: float | None = None
    """The same, waiting in the model servers."""
    kv_cache: float | None = None
    """The same, the share of the KV cache in use."""
    ready: float | None = None
    in_flight: float | None = None
    """Requests that this replica sent to a model server and that are unanswered."""
    utilization: frozenset[str] = frozenset()
    """The names of the utilization detectors that it runs."""
    capacity: float | None = None
    """max_SYS in requests, where the operator has an own query for it."""
    own: bool = False
    """The saturation is from the operator's own query."""
    of_now: bool = False
    """The averages are of this sample's moment: nobody flushes them."""
    raw: Mapping[str, float] = field(default_factory=dict)
    histograms: Histograms | None = None
    """Of the requests' latencies; None: not looked at this time."""

    @property
    def idle(self) -> bool:
        """It knows of no endpoint, and has nothing of its own."""
        return not self.ready and not self.in_flight and not self.queued

    @property
    def flow_control(self) -> bool:
        return self.saturation is not None or self.queued is not None or bool(self.utilization)

    @property
    def average(self) -> float | None:
        """Requests in the model servers at the last flush."""
        if self.running is None or self.waiting is None or self.ready is None:
            return None
        return (self.running + self.waiting) * self.ready

    @property
    def page(self) -> PickerPage | None:
        """What may show that the saturation is a count; None where it cannot."""
        if self.own or self.utilization or self.saturation is None or self.ready is None:
            return None
        pressure = None
        if self.waiting is not None and self.kv_cache is not None:
            pressure = max(self.waiting / QUEUE_AT_FULL, self.kv_cache / KV_AT_FULL)
        # The series is made with the picker's first request.
        return PickerPage(self.saturation, self.ready, self.in_flight or 0.0, pressure)


class Lessons:
    """What a source's views have taught so far. `count`: shared by the sources of one picker."""

    def __init__(self, count: Count | None = None) -> None:
        self.count = Count() if count is None else count
        self.outside = Outside()

    def learn(self, views: Sequence[View]) -> None:
        """Take in the views of one poll."""
        views = active(views)
        pages = [each.page for each in views]
        known = [page for page in pages if page is not None]
        if len(known) == len(pages):
            self.count.learn(known, max(each.closed_at for each in views))
        else:
            self.count.unknowable()
        sent = _sent(views)
        averages = [each.average for each in views if each.average is not None]
        if sent:
            at = max(each.closed_at for each in views)
            self.outside.learn(at, largest(averages) if averages else None, total(sent))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the views of one poll come to."""

    signals: tuple[Signal, ...]
    """The signals that the limit must follow now: each has a reading here, or is named in `unread`."""
    readings: tuple[Reading, ...]
    unread: tuple[Unread, ...]
    detector: str
    """What is known of the picker's saturation detector, in words."""
    per_endpoint: float | None = None
    """Requests per endpoint that the capacity was reckoned with; None: it came another way."""
    per_endpoint_from: Literal["setting"] | Guess | None = None


def view(samples: Iterable[Sample], pool: str, opened_at: float, closed_at: float) -> View | Unread:
    """What one replica's samples say of a pool."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    if not by_name:
        return Unread(
            Reason.UNREADABLE,
            "none of the endpoint picker's series is there",
            "the address must be the EPP's metrics port (9090 by default)",
        )
    chosen: dict[Family, list[Sample]] = {}
    strangers: set[str] = set()
    for family in Family:
        for name in family.value:
            mine, others = _of_pool(by_name.get(name, ()), family.pool_label, pool)
            strangers |= others
            if mine:
                chosen[family] = mine
                break
    # One EPP serves one pool: with only another's series here, nothing on the page is ours.
    if strangers and not any(family.pool_label for family in chosen):
        names = ", ".join(sorted(strangers))
        return Unread(Reason.UNREADABLE, f"the series are those of pool {names}, not of {pool}", "pool.name")
    raw: dict[str, float] = {}

    def value(family: Family) -> float | None:
        found = chosen.get(family)
        if found is None:
            return None
        combined = _combine(family, found)
        raw[found[0].name] = combined
        return combined

    return View(
        opened_at,
        closed_at,
        saturation=value(Family.SATURATION),
        queued=value(Family.QUEUED),
        running=value(Family.RUNNING),
        waiting=value(Family.WAITING),
        kv_cache=value(Family.KV_CACHE),
        ready=value(Family.READY),
        in_flight=value(Family.IN_FLIGHT),
        utilization=frozenset(sample.labels.get("detector", "") for sample in chosen.get(Family.STALE, ())),
        raw=raw,
    )


def _of_pool(samples: Sequence[Sample], label: str | None, pool: str) -> tuple[list[Sample], set[str]]:
    """The samples of the pool, and the names of other pools among the rest."""
    if label is None:
        return list(samples), set()
    mine = [sample for sample in samples if sample.labels.get(label) == pool]
    # Where the EPP runs with an endpoint selector instead of a pool, the label is empty.
    unnamed = [sample for sample in samples if not sample.labels.get(label)]
    return mine or unnamed, {sample.labels[label] for sample in samples if sample.labels.get(label)} - {pool}


def _combine(family: Family, samples: Sequence[Sample]) -> float:
    if family is Family.SATURATION:
        # `effective` is what the EPP gates by; without it, the fuller stage is.
        effective = [sample.value for sample in samples if sample.labels.get("stage") == "effective"]
        return largest(effective or [sample.value for sample in samples])
    if family in (Family.QUEUED, Family.IN_FLIGHT):
        # A flow that was deleted and came back may be counted below zero for a while. Not max(): it would
        # make a zero of a NaN, and NaN must reach the limiter, which refuses it.
        return total(0.0 if sample.value < 0 else sample.value for sample in samples)
    if family is Family.READY:
        return smallest(sample.value for sample in samples)
    return largest(sample.value for sample in samples)


def active(views: Sequence[View]) -> Sequence[View]:
    """The replicas that take part. One that waits to be elected leader keeps no endpoints, and shows zeros or
    nothing; its saturation is that of an empty pool."""
    found = [each for each in views if not each.idle]
    return found if any(each.ready for each in found) else views


def _sent(views: Sequence[View]) -> list[float]:
    """What each replica sent and saw no answer of: the series is made with a replica's first request. Empty:
    none has it."""
    known = any(each.in_flight is not None for each in views)
    return [each.in_flight or 0.0 for each in views] if known else []


def total(values: Iterable[float]) -> float:
    """A sum that is infinite or NaN, and no exception, where the values are beyond all numbers."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def largest(values: Iterable[float]) -> float:
    """max() that answers NaN when one of the values is."""
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def smallest(values: Iterable[float]) -> float:
    """min() that answers NaN when one of the values is."""
    return -largest(-value for value in values)


def judge(
    views: Sequence[View], use: str, policy: Policy, source: str, lessons: Lessons | None = None
) -> Verdict:
    """Make the readings that `signals.use` asks for out of the views of all EPP replicas.

    `lessons`: what the polls before taught, this one included; without them only what this one does.

    Several replicas: flow control is a matter of each one, so the fullest counts and the queues add up. The
    averages and the ready endpoints are the whole pool's in each replica's eyes: adding them up would count
    the pool twice, so the most loaded view and the smallest capacity count. Where nobody knows whether their
    saturations are counts, each of what it sent itself, requests are counted beside them.
    """
    if lessons is None:
        lessons = Lessons()
        lessons.learn(views)
    k, raw = lessons.count.k, _raw(views)
    views = active(views)
    wanted = _wanted(views, use, k)
    detector = _detector(views, k)
    ready = [each.ready for each in views if each.ready is not None]
    if ready and smallest(ready) <= 0:
        # With no fresh endpoint the averages freeze and the saturation reads 1: none of it means anything.
        gone = Unread(
            Reason.NO_ENDPOINTS,
            "the endpoint picker sees no ready endpoint",
            f"the pool's pods; a picker that has just started shows none for {FLUSH_S:g} s",
        )
        return Verdict(wanted, (), (gone,), detector)
    per_endpoint = lessons.count.per_endpoint if policy.per_endpoint is None else policy.per_endpoint
    capacity = _capacity(views, ready, policy.max_sys, per_endpoint)
    readings: list[Reading] = []
    unread: list[Unread] = []
    for signal in wanted:
        made = (
            capacity if isinstance(capacity, Unread) else _load(signal, views, capacity, k, lessons.outside)
        )
        if isinstance(made, Unread):
            unread.append(made)
        elif not isinstance(capacity, Unread):
            readings.append(_reading(signal, views, capacity, made, source, raw))
    counted = policy.max_sys is None and all(each.capacity is None for each in views)
    unique = tuple(dict.fromkeys(unread))
    if not counted:
        return Verdict(wanted, tuple(readings), unique, detector)
    source_of_it = lessons.count.guess if policy.per_endpoint is None else "setting"
    return Verdict(wanted, tuple(readings), unique, detector, per_endpoint, source_of_it)


def at_most(use: str) -> tuple[Signal, ...]:
    """The signals that a setting may ask for, before anything is known of the EPP."""
    both = (Signal.SATURATION, Signal.REQUESTS)
    return both if use in ("auto", "both") else (Signal(use),)


def _wanted(views: Sequence[View], use: str, k: int | None) -> tuple[Signal, ...]:
    unknown = k is None and not any(each.own or each.utilization for each in views)
    if use == "saturation" and unknown and len(views) > 1:
        # Of several counts the fullest is but a part. Where requests cannot be counted the setting stands.
        return at_most(use if isinstance(_requests(views, 1.0, Outside()), Unread) else "both")
    if use != "auto":
        return at_most(use)
    if any(each.own for each in views):
        return (Signal.SATURATION,)  # the operator's own measure of how full the pool is
    if all(each.saturation is None for each in views):
        return (Signal.REQUESTS,)
    # A pressure score can read near 0 with every slot taken. A count needs no second.
    return (Signal.SATURATION,) if k is not None else at_most(use)


def _detector(views: Sequence[View], k: int | None) -> str:
    utilization = frozenset[str]().union(*(each.utilization for each in views))
    if utilization:
        return f"utilization ({', '.join(sorted(utilization))})"
    if k is not None:
        return f"counts requests, maxConcurrency {k}"
    return "not known" if any(each.saturation is not None for each in views) else "none"


def _capacity(
    views: Sequence[View], ready: Sequence[float], max_sys: float | None, per_endpoint: float
) -> float | Unread:
    own = [each.capacity for each in views if each.capacity is not None]
    if own and smallest(own) <= 0:
        return Unread(Reason.NO_ENDPOINTS, "the capacity is 0", "signals.prometheus.queries.capacity")
    if own:
        return smallest(own)
    if max_sys is not None:
        return max_sys
    if len(ready) < len(views) or not ready:
        return Unread(
            Reason.UNREADABLE,
            f"the number of ready endpoints ({' or '.join(Family.READY.value)}) is not there",
            "budget.max_sys says the capacity without it",
        )
    capacity = smallest(ready) * per_endpoint
    if capacity == 0:  # both are more, and their product is less than all numbers
        why = f"{smallest(ready):g} ready endpoints of {per_endpoint:g} requests are no capacity"
        return Unread(Reason.IMPLAUSIBLE, why, "budget.per_endpoint")
    return capacity


@dataclass(frozen=True, slots=True)
class _Load:
    """F_SYS, and what may be said of it."""

    f_sys: float
    exact: bool
    flushed: bool = False
    """It is of any moment since the last flush."""


def _load(
    signal: Signal, views: Sequence[View], max_sys: float, k: int | None, outside: Outside
) -> _Load | Unread:
    if signal is Signal.REQUESTS:
        return _requests(views, max_sys, outside)
    saturations = [each.saturation for each in views if each.saturation is not None]
    if not saturations or len(saturations) < len(views):
        return _no_saturation(views)
    pages = [each.page for each in views]
    if k is None or None in pages:
        return _Load(largest(saturations), exact=False)
    # Each replica counts what it sent itself, in shares of what it takes for the capacity.
    counted = total(page.saturation * page.ready * k for page in pages if page is not None)
    return _Load(counted / max_sys, exact=True)


def _reading(
    signal: Signal, views: Sequence[View], max_sys: float, load: _Load, source: str, raw: Mapping[str, float]
) -> Reading:
    # The EPP makes a flow's series with its first request and deletes it when idle: none means none waits.
    queued = total(each.queued for each in views if each.queued is not None)
    running, waiting, flushed = _apart(views, queued)
    return Reading(
        signal=signal,
        opened_at=min(each.opened_at for each in views) - (FLUSH_S if load.flushed else 0.0),
        closed_at=max(each.closed_at for each in views),
        f_sys=load.f_sys,
        f_epp=queued / max_sys,
        max_sys=max_sys,
        source=source,
        raw=raw,
        exact=load.exact,
        running=running,
        waiting=waiting,
        flushed=flushed,
    )


def _apart(views: Sequence[View], queued: float) -> tuple[float | None, float, bool]:
    """What ran while so many waited, both of one moment: the last flush (whether it is that is told, too), or
    now, by what the picker sent and what waits in it. Where somebody waits by both the smaller counts. None:
    not known apart."""
    if any(each.own for each in views):
        return None, queued, False  # of the operator's own quantities nothing is known
    found: list[tuple[float, float, bool]] = []
    flushed = [
        (each.running * each.ready, each.waiting * each.ready)
        for each in views
        if each.running is not None and each.waiting is not None and each.ready is not None
    ]
    if len(flushed) == len(views):
        found.append((*max(flushed), not all(each.of_now for each in views)))
    sent = [each.in_flight for each in views if each.in_flight is not None]
    if queued > 0 and len(sent) == len(views):
        found.append((total(sent), queued, False))
    crowded = [each for each in found if each[1] > 0]
    return min(crowded or found, default=(None, queued, False))


def _requests(views: Sequence[View], max_sys: float, outside: Outside) -> _Load | Unread:
    """Requests in the model servers: what each replica sent and saw no answer of, which is of now, and what
    else the averages know of, which were of now at the last flush."""
    averages = [each.average for each in views if each.average is not None]
    sent = _sent(views)
    # With no average at all the EPP has just started: its count leaves out what its predecessor sent, and the
    # averages will be there in a moment. Before GIE 1.5 there is none of running requests, though.
    started = [each for each in views if each.waiting is not None and each.ready is not None]
    if sent and len(started) == len(views) and math.isfinite(total(averages)):
        return _Load((total(sent) + outside.requests) / max_sys, exact=True)
    if len(averages) == len(views):
        flushed = not all(each.of_now for each in views)
        return _Load(largest(averages) / max_sys, exact=True, flushed=flushed)
    missing = [
        family.value[0]
        for family, there in (
            (Family.RUNNING, all(each.running is not None for each in views)),
            (Family.WAITING, all(each.waiting is not None for each in views)),
            (Family.READY, all(each.ready is not None for each in views)),
        )
        if not there
    ]
    hint = "an EPP older than GIE 1.5 shows its running requests once the first has passed"
    if any(each.saturation is not None for each in views):
        hint = "signals.use: saturation does without the count (docs/signals.md says at what price); " + hint
    return Unread(Reason.UNREADABLE, f"{', '.join(missing)} not there", hint, Signal.REQUESTS)


def _no_saturation(views: Sequence[View]) -> Unread:
    name = Family.SATURATION.value[0]
    if any(each.flow_control for each in views):
        why, hint = f"{name} is not there, though flow control is on", "signals.use: requests does without it"
    else:
        why = f"{name} is not there: flow control is off in the endpoint picker"
        hint = "flow control is off: turn on the EPP's flowControl feature gate, or set signals.use: requests"
    return Unread(Reason.UNREADABLE, why, hint, Signal.SATURATION)


def _raw(views: Sequence[View]) -> dict[str, float]:
    """The values of all replicas by series, each with the replica's number where there are several."""
    if len(views) == 1:
        return dict(views[0].raw)
    return {
        f"{name}#{number}": value for number, each in enumerate(views) for name, value in each.raw.items()
    }
