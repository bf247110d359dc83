"""Derive readings from the views of one poll: which signals count, of what capacity, and with which load.

docs/contributing/readings.md explains the rules and their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dispatcher.limit.budget import KvUse, Policy, Reading, Reason, Signal
from dispatcher.limit.picker_inference import (
    FLUSH_LATE_FACTOR,
    FLUSH_S,
    ConcurrencyInference,
    KnownPickers,
    PerEndpointSource,
    UntrackedRequests,
    is_same_count,
)
from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.series import Family, PoolView, max_or_nan, min_or_nan, sum_or_nan

UNEVEN_SHARE = 0.1
"""Largest share of the endpoints that may have room while requests wait in the others, and largest standard
deviation of the running requests as a share of their mean. Above these, the requests are distributed
unevenly."""

PerEndpointFrom = Literal["setting", "server"] | PerEndpointSource
"""Source of the number of requests per endpoint. `server` stands for the pages of the model servers."""


class PickerFacts:
    """Facts about the pickers that were learned from the views of a source.

    `count` is shared by the sources of one picker. `previous` has the facts of the previous configuration,
    whose pickers are known already.
    """

    def __init__(
        self, count: ConcurrencyInference | None = None, previous: PickerFacts | None = None
    ) -> None:
        self.count = ConcurrencyInference() if count is None else count
        self.outside = UntrackedRequests()
        self.kv_use: KvUse | None = None
        """Use of the KV memory by the newest poll. `None` if the pages do not show it."""
        self._polled_at = -math.inf
        """Start of the newest poll."""
        self.pickers: KnownPickers = KnownPickers() if previous is None else previous.pickers

    def learn_from_views(self, views: Sequence[PoolView], endpoints: int | None = None) -> None:
        """Learn from the views of one poll. `endpoints` is the number of ready endpoints in Kubernetes."""
        # A picker that restarted may have another configuration, so that nothing learned of it counts.
        if self.pickers.detect_restart({each.address: each.started_at for each in views if each.address}):
            self.count.forget_picker()
        views = select_active(views)
        # No series shows how many endpoints each stage has, so a k that was learned before there were several
        # stages no longer gives a capacity.
        if any(each.has_several_stages for each in views):
            self.count.forget_picker()
        pages = [each.picker_page for each in views]
        known = [page for page in pages if page is not None]
        if len(known) == len(pages):
            # A detector divides by all endpoints. If the page shows fewer of them, the k that fits the page
            # is too large.
            whole = endpoints is None or all(page.ready_endpoints >= endpoints for page in known)
            self.count.learn_from_sample(known, max(each.closed_at for each in views), can_prove=whole)
        else:
            self.count.mark_not_a_count()
        self.kv_use = _measure_kv_use(views, endpoints, self.kv_use, self._polled_at)
        self._polled_at = min([each.opened_at for each in views])
        sent = _list_sent(views)
        averages = [each.requests_at_flush for each in views if each.requests_at_flush is not None]
        if sent:
            at = max(each.closed_at for each in views)
            self.outside.learn_from_sample(at, max_or_nan(averages) if averages else None, sum_or_nan(sent))


@dataclass(frozen=True, slots=True)
class PollReadings:
    """Readings of one poll, and the reasons for missing ones."""

    signals: tuple[Signal, ...]
    """Signals that the limit must follow now. Each has a reading here, or a reason in `unread`."""
    readings: tuple[Reading, ...]
    unread: tuple[ReadFailure, ...]
    detector: str
    """Description of the picker's saturation detector."""
    per_endpoint: float | None = None
    """Requests per endpoint from which the capacity was computed. `None` if it was not computed this way."""
    per_endpoint_source: PerEndpointFrom | None = None


def select_active(views: Sequence[PoolView]) -> Sequence[PoolView]:
    """Return the views of the active replicas.

    A replica that waits to be elected leader keeps no endpoints. It shows zeros or nothing, and its
    saturation is that of an empty pool.
    """
    found = [each for each in views if not each.is_idle]
    return found if any(each.ready for each in found) else views


def _list_sent(views: Sequence[PoolView]) -> list[float]:
    """Return the number of unanswered requests of each replica. Empty if no replica has the series.

    A replica creates the series with its first request, so one without it has sent nothing yet.
    """
    known = any(each.sent is not None for each in views)
    return [each.sent or 0.0 for each in views] if known else []


def count_batch_requests(views: Sequence[PoolView]) -> tuple[float | None, str]:
    """Return the requests with a negative priority that all replicas hold, in flight and in their queues.

    `None` if that is not known. The text says why the in-flight-load producer is not used, and is empty if it
    is used or there is none.
    """
    queued = [each.batch_queued for each in views]
    problem = _find_load_problem(views)
    if problem or all(each.load is None for each in views):
        parts = [0.0 if each.in_flight is None else each.batch_in_flight for each in views]
        # Without any count, all requests may be unknown.
        parts += [None] if all(each.in_flight is None for each in views) else []
    else:
        parts = [0.0 if each.load is None else each.load.batch for each in views]
    known = [part for part in (*parts, *queued) if part is not None]
    total = sum_or_nan(known)
    return (total if len(known) == len(parts) + len(queued) and math.isfinite(total) else None), problem


def _find_load_problem(views: Sequence[PoolView]) -> str:
    """Return why the counts of the in-flight-load producers cannot be used. Empty if they can, or there are
    none."""
    for view in views:
        if view.load is None:
            continue
        if view.load.problem:
            return view.load.problem
        if view.has_several_stages:
            return "a request counts once for each stage (prefill, decode)"
        if view.load.batch is None:
            return "it shows no priorities; newer routers do"
        # Each replica counts what it sent itself, in both series.
        if view.in_flight is not None and not is_same_count(view.load.requests, view.in_flight):
            return f"it counts {view.load.requests:g} requests, and {view.in_flight:g} are running"
    return ""


def derive_readings(
    views: Sequence[PoolView],
    use: str,
    policy: Policy,
    source: str,
    facts: PickerFacts | None = None,
    endpoints: int | None = None,
) -> PollReadings:
    """Return the readings that `signals.use` asks for, derived from the views of all EPP replicas.

    `facts` has what was learned up to this poll, including this poll. Without it, only this poll is used.
    `endpoints` is the number of ready endpoints in Kubernetes, if it is known.

    If there are several replicas, each one has its own flow control, so the fullest saturation counts and the
    queues are added up. The averages and the ready endpoints are those of the whole pool in each replica's
    view. Adding them up would count the pool twice, so the most loaded view and the smallest capacity count.
    If it is not known whether the saturations are counts of what each replica sent itself, requests are
    counted as well.
    """
    if facts is None:
        facts = PickerFacts()
        facts.learn_from_views(views, endpoints)
    raw = _collect_raw(views)
    views = select_active(views)
    # The maximum of several detectors is no count, even if one of the detectors is one.
    k = None if any(each.is_composite for each in views) else facts.count.k
    is_capacity_known = _is_capacity_known(views, policy, facts.count)
    signals = _choose_signals(views, use, k, is_capacity_known)
    detector = _describe_detector(views, facts.count)
    ready = [each.ready for each in views if each.ready is not None]
    if ready and min_or_nan(ready) <= 0:
        # With no fresh endpoint the averages freeze and the saturation reads 1, so no value means anything.
        gone = ReadFailure(
            Reason.NO_ENDPOINTS,
            "the endpoint picker sees no ready endpoint",
            f"the pool's pods; a picker that has just started shows none for {FLUSH_S:g} s",
        )
        return PollReadings(signals, (), (gone,), detector)
    per_endpoint, per_endpoint_source = _choose_per_endpoint(views, policy, facts.count)
    capacity = _compute_capacity(views, ready, policy.max_sys, per_endpoint)
    # If the capacity is that of the endpoints on the page, endpoints that the page lacks are missing in the
    # capacity already, and must not count as full as well.
    counted = policy.max_sys is None and all(each.capacity is None for each in views)
    missing = None if counted else endpoints
    views = [replace(each, saturation=_count_unseen_as_full(each, missing)) for each in views]
    picker_endpoints = _count_picker_endpoints(views, ready, endpoints)
    readings: list[Reading] = []
    unread: list[ReadFailure] = []
    for signal in signals:
        made = (
            capacity
            if isinstance(capacity, ReadFailure)
            else _compute_load(signal, views, capacity, k, facts.outside)
        )
        if isinstance(made, ReadFailure):
            unread.append(made)
        elif not isinstance(capacity, ReadFailure):
            reading = _build_reading(signal, views, capacity, made, source, raw, facts.outside)
            readings.append(
                replace(
                    reading,
                    is_capacity_known=is_capacity_known,
                    picker_endpoints=picker_endpoints,
                    kv_use=facts.kv_use,
                )
            )
    unique = tuple(dict.fromkeys(unread))  # a capacity that cannot be read is the same reason for each signal
    if not counted:
        return PollReadings(signals, tuple(readings), unique, detector)
    return PollReadings(signals, tuple(readings), unique, detector, per_endpoint, per_endpoint_source)


def _count_picker_endpoints(
    views: Sequence[PoolView], ready: Sequence[float], endpoints: int | None
) -> float | None:
    """Return the number of endpoints among which a picker chooses. `None` if it is not known, or the pages
    are those of model servers, which need no picker."""
    if views and views[0].has_current_averages:
        return None
    if len(ready) > 1:
        return min_or_nan(ready)
    return ready[0] if ready else endpoints


def _measure_kv_use(
    views: Sequence[PoolView], endpoints: int | None, previous: KvUse | None, previous_at: float
) -> KvUse | None:
    """Return the use of the KV memory. `None` if a view does not show it. `previous` is that of the poll
    before, which started at `previous_at`.

    An average is of the time of a flush. If a picker shows another value than at the poll before, the flush
    was between the two. While it shows the same value, the older sample stands until the next flush is due.
    Each picker's average is that of the whole pool, so the largest one counts, with the smallest capacity.
    """
    # Each poll of a simulation calls this function, so it has no generators.
    shares = [each.kv_cache for each in views if each.kv_cache is not None]
    if not shares or len(shares) < len(views):
        return None
    ready = [each.ready for each in views if each.ready is not None]
    sizes = [each.kv_tokens for each in views if each.kv_tokens is not None]
    count = (min_or_nan(ready) if len(ready) > 1 else ready[0]) if ready else endpoints
    opened_at, closed_at = min([each.opened_at for each in views]), max([each.closed_at for each in views])
    use = KvUse(
        max_or_nan(shares) if len(shares) > 1 else shares[0],
        min(sizes) if len(sizes) == len(views) else None,
        count if count is not None and math.isfinite(count) else None,
        opened_at,
        closed_at,
    )
    if all(each.has_current_averages for each in views):
        return use
    flush_s = FLUSH_S * FLUSH_LATE_FACTOR
    # Each replica of a picker flushes at its own time.
    if previous is not None and len(views) == 1:
        if (use.share, use.endpoints) != (previous.share, previous.endpoints):
            return replace(use, opened_at=max(opened_at - flush_s, previous_at))
        if closed_at - previous.closed_at < flush_s:
            return previous
    return replace(use, opened_at=opened_at - flush_s)


def _choose_per_endpoint(
    views: Sequence[PoolView], policy: Policy, count: ConcurrencyInference
) -> tuple[float, PerEndpointFrom]:
    """Return the number of requests that an endpoint runs at once, and the source of this number.

    With the source `search` it is the number at which the search for the capacity starts.
    """
    if policy.per_endpoint is not None:
        return policy.per_endpoint, "setting"
    shown = [each.per_endpoint for each in views if each.per_endpoint is not None]
    if shown and len(shown) == len(views):
        return min_or_nan(shown), "server"
    if count.per_endpoint is not None:
        return count.per_endpoint, count.per_endpoint_source
    return policy.initial_per_endpoint, count.per_endpoint_source


def _is_capacity_known(views: Sequence[PoolView], policy: Policy, count: ConcurrencyInference) -> bool:
    """Return True if the capacity comes from a setting, a query, the model servers or the picker, and is not
    only where the search for it starts."""
    if policy.learns_capacity:
        return False
    if policy.max_sys is not None or all(each.capacity is not None for each in views):
        return True
    return _choose_per_endpoint(views, policy, count)[1] != "search"


def list_possible_signals(use: str) -> tuple[Signal, ...]:
    """Return all signals that `signals.use` may ask for, whatever the endpoint picker shows."""
    both = (Signal.SATURATION, Signal.REQUESTS)
    return both if use in ("auto", "both") else (Signal(use),)


def _choose_signals(
    views: Sequence[PoolView], use: str, k: int | None, is_capacity_known: bool
) -> tuple[Signal, ...]:
    unknown = k is None and not any(each.has_own_saturation or each.utilization_detectors for each in views)
    own = any(each.has_own_saturation for each in views)
    if use == "saturation" and ((unknown and len(views) > 1) or not (is_capacity_known or own)):
        # The fullest of several counts is only a part of what runs, and without a known capacity only a count
        # of requests bounds what is sent. If requests cannot be counted, the setting stands.
        return list_possible_signals(
            use if isinstance(_compute_requests(views, 1.0, UntrackedRequests()), ReadFailure) else "both"
        )
    if use != "auto":
        return list_possible_signals(use)
    if any(each.has_own_saturation for each in views):
        return (Signal.SATURATION,)  # the operator's own measure of how full the pool is
    if all(each.saturation is None for each in views):
        return (Signal.REQUESTS,)
    # A pressure score can read near 0 while every slot is taken. A count is reliable on its own.
    return (Signal.SATURATION,) if k is not None else list_possible_signals(use)


def _count_unseen_as_full(view: PoolView, endpoints: int | None) -> float | None:
    """Return the saturation with each endpoint that it may leave out counted as full.

    A utilization detector may leave out stale endpoints (`stalenessPolicy: ignore`), so that its saturation
    is 0 when all endpoints are stale. Its page does not show whether it does. `endpoints` is the number of
    endpoints in Kubernetes if the capacity is that of all of them, and not of those on the page.
    """
    if view.saturation is None or view.has_own_saturation or not view.utilization_detectors:
        return view.saturation
    ready = 0.0 if view.ready is None else view.ready
    unseen, everything = view.stale_endpoints, ready
    if endpoints is not None:
        unseen, everything = max_or_nan((view.stale_endpoints, endpoints - ready)), max(ready, endpoints)
    if unseen == 0:
        return view.saturation
    share = unseen / everything if unseen < everything else 1.0
    # NaN must stay NaN, so that the limiter rejects it.
    full = math.nan if math.isnan(unseen) else share + (1.0 - share) * view.saturation
    return max_or_nan((view.saturation, full))


def _describe_detector(views: Sequence[PoolView], count: ConcurrencyInference) -> str:
    stale = max_or_nan(each.stale_endpoints for each in views)
    details = f"; {stale:g} stale endpoints count as full" if stale else ""
    stages = sorted(frozenset[str]().union(*(each.stages for each in views)))
    if len(stages) > 1:
        details = f", the larger of {' and '.join(stages)}{details}"
    detectors = frozenset[str]().union(*(each.detector_saturations for each in views))
    if detectors:
        return f"the maximum of {', '.join(sorted(detectors))}{details}"
    utilization = frozenset[str]().union(*(each.utilization_detectors for each in views))
    if utilization:
        return f"utilization ({', '.join(sorted(utilization))}){details}"
    if count.k is not None:
        return f"counts requests, maxConcurrency {count.k}"
    if count.is_mixed:
        return "the maximum of several"
    return f"not known{details}" if any(each.saturation is not None for each in views) else "none"


def _compute_capacity(
    views: Sequence[PoolView], ready: Sequence[float], max_sys: float | None, per_endpoint: float
) -> float | ReadFailure:
    own = [each.capacity for each in views if each.capacity is not None]
    if own and min_or_nan(own) <= 0:
        return ReadFailure(Reason.NO_ENDPOINTS, "the capacity is 0", "signals.prometheus.queries.capacity")
    if own:
        return min_or_nan(own)
    if max_sys is not None:
        return max_sys
    if len(ready) < len(views) or not ready:
        return ReadFailure(
            Reason.UNREADABLE,
            f"the number of ready endpoints ({' or '.join(Family.READY.value)}) is not there",
            "budget.max_sys says the capacity without it",
        )
    capacity = min_or_nan(ready) * per_endpoint
    if capacity == 0:  # both factors are above 0, and their product underflows
        why = f"{min_or_nan(ready):g} ready endpoints of {per_endpoint:g} requests are no capacity"
        return ReadFailure(Reason.IMPLAUSIBLE, why, "budget.per_endpoint")
    return capacity


@dataclass(frozen=True, slots=True)
class _Load:
    """F_SYS, with the properties that `Reading` needs."""

    f_sys: float
    is_exact: bool
    is_flushed: bool = False
    """True if the value may be of any moment since the last flush."""
    beyond_calls: float = math.inf
    """`Reading.beyond_calls` of the samples. The picker counts calls, however many items they hold."""


def _compute_load(
    signal: Signal, views: Sequence[PoolView], max_sys: float, k: int | None, outside: UntrackedRequests
) -> _Load | ReadFailure:
    if signal is Signal.REQUESTS:
        return _compute_requests(views, max_sys, outside)
    saturations = [each.saturation for each in views if each.saturation is not None]
    if not saturations or len(saturations) < len(views):
        return _explain_missing_saturation(views)
    pages = [each.picker_page for each in views]
    if k is None or None in pages:
        return _Load(max_or_nan(saturations), is_exact=False)
    # Each replica counts the requests that it sent itself, as a share of the capacity that it assumes.
    counted = sum_or_nan(page.saturation * page.ready_endpoints * k for page in pages if page is not None)
    return _Load(counted / max_sys, is_exact=True, beyond_calls=0.0)


def _build_reading(
    signal: Signal,
    views: Sequence[PoolView],
    max_sys: float,
    load: _Load,
    source: str,
    raw: Mapping[str, float],
    outside: UntrackedRequests,
) -> Reading:
    # The EPP creates the series of a flow with its first request and deletes it when the flow is idle. A
    # missing series therefore means that no request waits.
    queued = sum_or_nan(each.queued for each in views if each.queued is not None)
    counts = _count_running_and_waiting(views, queued, outside)
    batch, _ = count_batch_requests(views)
    # Requests that came another way may be batch requests, too. A reading that may count the items of a call
    # cannot be compared with the calls that the picker counts.
    if batch is not None:
        batch = batch + outside.request_count if math.isfinite(load.beyond_calls) else None
    return Reading(
        signal=signal,
        opened_at=min(each.opened_at for each in views) - (FLUSH_S if load.is_flushed else 0.0),
        closed_at=max(each.closed_at for each in views),
        f_sys=load.f_sys,
        f_epp=queued / max_sys,
        max_sys=max_sys,
        source=source,
        raw_values=raw,
        is_request_count=load.is_exact,
        items_beyond_calls=load.beyond_calls,
        max_batch_requests=batch,
        running=counts.running,
        waiting=counts.waiting,
        has_exact_counts=counts.is_exact,
        averages=counts.averages,
        is_uneven=counts.is_uneven,
        are_averages_uneven=counts.are_averages_uneven,
    )


@dataclass(frozen=True, slots=True)
class _RequestCounts:
    """Numbers of running and waiting requests, as `Reading` needs them."""

    running: float | None
    waiting: float
    is_exact: bool = True
    averages: tuple[float, float] | None = None
    is_uneven: bool = False
    are_averages_uneven: bool = False


def _count_running_and_waiting(
    views: Sequence[PoolView], queued: float, outside: UntrackedRequests
) -> _RequestCounts:
    """Return the numbers of running and of waiting requests.

    Requests that wait in a model server were sent by the picker as well. The picker's count of sent requests
    therefore gives the running ones only if the queues of the servers are known. The averages separate both,
    but are up to FLUSH_S old.
    """
    if any(each.has_own_saturation for each in views):
        return _RequestCounts(None, queued)  # the definition of an own query is not known
    flushed = [
        (each.running * each.ready, (each.waiting - each.deferred) * each.ready)
        for each in views
        if each.running is not None and each.waiting is not None and each.ready is not None
    ]
    averages = max(flushed) if len(flushed) == len(views) else None
    uneven_queues, uneven_load = _has_uneven_queues(views), _had_uneven_load(views)
    # An endpoint in which no request waits may be just full: then it runs as many as the others.
    is_uneven = uneven_queues is True and uneven_load is not False
    uneven_before = is_uneven if uneven_load is None else uneven_load and uneven_queues is not False
    if averages is not None and all(each.has_current_averages for each in views):
        return _RequestCounts(*averages, is_uneven=is_uneven, are_averages_uneven=uneven_before)
    sent = _list_sent(views)
    server_queues = [each.server_queued for each in views if each.server_queued is not None]
    if sent and len(server_queues) == len(views):
        in_queues = max_or_nan(server_queues)
        running = max(0.0, sum_or_nan(sent) + outside.request_count - in_queues)
        return _RequestCounts(
            running,
            in_queues + queued,
            is_exact=False,
            averages=averages,
            is_uneven=is_uneven,
            are_averages_uneven=uneven_before,
        )
    return _RequestCounts(None, queued, averages=averages, are_averages_uneven=uneven_before)


def _has_uneven_queues(views: Sequence[PoolView]) -> bool | None:
    """Return whether requests wait in some endpoints while others have room. `None` if no request waits in an
    endpoint, or the queues of the endpoints are not shown one by one."""
    # Each replica of a picker shows the same endpoints; the one that sees most requests wait has the newest.
    view = views[0] if len(views) == 1 else max(views, key=lambda each: each.server_queued or 0.0)
    if not view.server_queued or view.endpoints_with_room is None or view.ready is None:
        return None
    return view.endpoints_with_room > UNEVEN_SHARE * view.ready


def _had_uneven_load(views: Sequence[PoolView]) -> bool | None:
    """Return whether some endpoints ran clearly more requests than others at the last flush, so that requests
    may have waited in one while another had room. `None` if no replica shows it."""
    result = None
    for each in views:
        if each.running_deviation is not None:
            result = result or each.running_deviation > UNEVEN_SHARE * (each.running or 0.0)
    return result


def _compute_requests(
    views: Sequence[PoolView], max_sys: float, outside: UntrackedRequests
) -> _Load | ReadFailure:
    """Return the load by the number of requests in the model servers.

    The number of unanswered requests that each replica sent is current. Requests that came another way show
    in the averages only, which are as old as the last flush.
    """
    averages = [each.requests_at_flush for each in views if each.requests_at_flush is not None]
    sent = _list_sent(views)
    # An EPP without any average has just started. Its count lacks the requests that its predecessor sent, and
    # the averages will be there in a moment. Versions before GIE 1.5 have no average of running requests, so
    # only that of the waiting ones is required.
    started = [each for each in views if each.waiting is not None and each.ready is not None]
    if sent and len(started) == len(views) and math.isfinite(sum_or_nan(averages)):
        f_sys = (sum_or_nan(sent) + outside.request_count) / max_sys
        return _Load(f_sys, is_exact=True, beyond_calls=outside.request_count)
    if len(averages) == len(views):
        flushed = not all(each.has_current_averages for each in views)
        return _Load(max_or_nan(averages) / max_sys, is_exact=True, is_flushed=flushed)
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
        cost = "docs/explanation/concepts.md says what that costs"
        hint = f"signals.use: saturation does without the count ({cost}); {hint}"
    return ReadFailure(Reason.UNREADABLE, f"{', '.join(missing)} not there", hint, Signal.REQUESTS)


def _explain_missing_saturation(views: Sequence[PoolView]) -> ReadFailure:
    name = Family.SATURATION.value[0]
    if any(each.has_flow_control for each in views):
        why, hint = f"{name} is not there, though flow control is on", "signals.use: requests does without it"
    else:
        why = f"{name} is not there: flow control is off in the endpoint picker"
        hint = "flow control is off: turn on the EPP's flowControl feature gate, or set signals.use: requests"
    return ReadFailure(Reason.UNREADABLE, why, hint, Signal.SATURATION)


def _collect_raw(views: Sequence[PoolView]) -> dict[str, float]:
    """Return the values of all replicas by series name. With several replicas, names have their number."""
    if len(views) == 1:
        return dict(views[0].raw)
    return {
        f"{name}#{number}": value for number, each in enumerate(views) for name, value in each.raw.items()
    }
