"""Derive readings from the views of one poll: which signals count, of what capacity, and with which load.

docs/signals.md explains the rules and their reasons for operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.picker_inference import FLUSH_S, Count, Guess, KnownPickers, Outside
from dispatcher.core.limit.poll import Unread
from dispatcher.signals.epp.series import Family, View, largest, smallest, total

PerEndpointFrom = Literal["setting", "server"] | Guess
"""Source of the number of requests per endpoint. `server` stands for the pages of the model servers."""


class Lessons:
    """Facts about the pickers that were learned from the views of a source.

    `count` is shared by the sources of one picker. `previous` has the facts of the previous configuration,
    whose pickers are known already.
    """

    def __init__(self, count: Count | None = None, before: Lessons | None = None) -> None:
        self.count = Count() if count is None else count
        self.outside = Outside()
        self.pickers: KnownPickers = KnownPickers() if before is None else before.pickers

    def learn(self, views: Sequence[View], endpoints: int | None = None) -> None:
        """Learn from the views of one poll. `endpoints` is the number of ready endpoints in Kubernetes."""
        # A picker that restarted may have another configuration, so that nothing learned of it counts.
        if self.pickers.began({each.address: each.started for each in views if each.address}):
            self.count.forget()
        views = active(views)
        pages = [each.page for each in views]
        known = [page for page in pages if page is not None]
        if len(known) == len(pages):
            # A detector divides by all endpoints. If the page shows fewer of them, the k that fits the page
            # is too large.
            whole = endpoints is None or all(page.ready >= endpoints for page in known)
            self.count.learn(known, max(each.closed_at for each in views), proves=whole)
        else:
            self.count.unknowable()
        sent = _sent(views)
        averages = [each.average for each in views if each.average is not None]
        if sent:
            at = max(each.closed_at for each in views)
            self.outside.learn(at, largest(averages) if averages else None, total(sent))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Readings of one poll, and the reasons for missing ones."""

    signals: tuple[Signal, ...]
    """Signals that the limit must follow now. Each has a reading here, or a reason in `unread`."""
    readings: tuple[Reading, ...]
    unread: tuple[Unread, ...]
    detector: str
    """Description of the picker's saturation detector."""
    per_endpoint: float | None = None
    """Requests per endpoint from which the capacity was computed. `None` if it was not computed this way."""
    per_endpoint_from: PerEndpointFrom | None = None


def active(views: Sequence[View]) -> Sequence[View]:
    """Return the views of the active replicas.

    A replica that waits to be elected leader keeps no endpoints. It shows zeros or nothing, and its
    saturation is that of an empty pool.
    """
    found = [each for each in views if not each.idle]
    return found if any(each.ready for each in found) else views


def _sent(views: Sequence[View]) -> list[float]:
    """Return the number of unanswered requests of each replica. Empty if no replica has the series.

    A replica creates the series with its first request, so one without it has sent nothing yet.
    """
    known = any(each.in_flight is not None for each in views)
    return [each.in_flight or 0.0 for each in views] if known else []


def judge(
    views: Sequence[View],
    use: str,
    policy: Policy,
    source: str,
    lessons: Lessons | None = None,
    endpoints: int | None = None,
) -> Verdict:
    """Return the readings that `signals.use` asks for, derived from the views of all EPP replicas.

    `facts` has what was learned up to this poll, including this poll. Without it, only this poll is used.
    `endpoints` is the number of ready endpoints in Kubernetes, if it is known.

    If there are several replicas, each one has its own flow control, so the fullest saturation counts and the
    queues are added up. The averages and the ready endpoints are those of the whole pool in each replica's
    view. Adding them up would count the pool twice, so the most loaded view and the smallest capacity count.
    If it is not known whether the saturations are counts of what each replica sent itself, requests are
    counted as well.
    """
    if lessons is None:
        lessons = Lessons()
        lessons.learn(views, endpoints)
    raw = _raw(views)
    views = active(views)
    # The maximum of several detectors is no count, even if one of the detectors is one.
    k = None if any(each.composite for each in views) else lessons.count.k
    capacity_known = _capacity_known(views, policy, lessons.count)
    wanted = _wanted(views, use, k, capacity_known)
    detector = _detector(views, lessons.count)
    ready = [each.ready for each in views if each.ready is not None]
    if ready and smallest(ready) <= 0:
        # With no fresh endpoint the averages freeze and the saturation reads 1, so no value means anything.
        gone = Unread(
            Reason.NO_ENDPOINTS,
            "the endpoint picker sees no ready endpoint",
            f"the pool's pods; a picker that has just started shows none for {FLUSH_S:g} s",
        )
        return Verdict(wanted, (), (gone,), detector)
    per_endpoint, per_endpoint_from = _per_endpoint(views, policy, lessons.count)
    capacity = _capacity(views, ready, policy.max_sys, per_endpoint)
    # If the capacity is that of the endpoints on the page, endpoints that the page lacks are missing in the
    # capacity already, and must not count as full as well.
    counted = policy.max_sys is None and all(each.capacity is None for each in views)
    missing = None if counted else endpoints
    views = [replace(each, saturation=_with_unseen(each, missing)) for each in views]
    readings: list[Reading] = []
    unread: list[Unread] = []
    for signal in wanted:
        made = (
            capacity if isinstance(capacity, Unread) else _load(signal, views, capacity, k, lessons.outside)
        )
        if isinstance(made, Unread):
            unread.append(made)
        elif not isinstance(capacity, Unread):
            reading = _reading(signal, views, capacity, made, source, raw, lessons.outside)
            readings.append(replace(reading, capacity_known=capacity_known))
    unique = tuple(dict.fromkeys(unread))  # a capacity that cannot be read is the same reason for each signal
    if not counted:
        return Verdict(wanted, tuple(readings), unique, detector)
    return Verdict(wanted, tuple(readings), unique, detector, per_endpoint, per_endpoint_from)


def _per_endpoint(views: Sequence[View], policy: Policy, count: Count) -> tuple[float, PerEndpointFrom]:
    """Return the number of requests that an endpoint runs at once, and the source of this number.

    With the source `search` it is the number at which the search for the capacity starts.
    """
    if policy.per_endpoint is not None:
        return policy.per_endpoint, "setting"
    shown = [each.per_endpoint for each in views if each.per_endpoint is not None]
    if shown and len(shown) == len(views):
        return smallest(shown), "server"
    if count.per_endpoint is not None:
        return count.per_endpoint, count.guess
    return policy.initial_per_endpoint, count.guess


def _capacity_known(views: Sequence[View], policy: Policy, count: Count) -> bool:
    """Return True if the capacity comes from a setting, a query, the model servers or the picker."""
    if policy.max_sys is not None or all(each.capacity is not None for each in views):
        return True
    return _per_endpoint(views, policy, count)[1] != "search"


def at_most(use: str) -> tuple[Signal, ...]:
    """Return all signals that `signals.use` may ask for, whatever the endpoint picker shows."""
    both = (Signal.SATURATION, Signal.REQUESTS)
    return both if use in ("auto", "both") else (Signal(use),)


def _wanted(views: Sequence[View], use: str, k: int | None, capacity_known: bool) -> tuple[Signal, ...]:
    unknown = k is None and not any(each.own or each.utilization for each in views)
    own = any(each.own for each in views)
    if use == "saturation" and ((unknown and len(views) > 1) or not (capacity_known or own)):
        # The fullest of several counts is only a part of what runs, and without a known capacity only a count
        # of requests bounds what is sent. If requests cannot be counted, the setting stands.
        return at_most(use if isinstance(_requests(views, 1.0, Outside()), Unread) else "both")
    if use != "auto":
        return at_most(use)
    if any(each.own for each in views):
        return (Signal.SATURATION,)  # the operator's own measure of how full the pool is
    if all(each.saturation is None for each in views):
        return (Signal.REQUESTS,)
    # A pressure score can read near 0 while every slot is taken. A count is reliable on its own.
    return (Signal.SATURATION,) if k is not None else at_most(use)


def _with_unseen(view: View, endpoints: int | None) -> float | None:
    """Return the saturation with each endpoint that it may leave out counted as full.

    A utilization detector may leave out stale endpoints (`stalenessPolicy: ignore`), so that its saturation
    is 0 when all endpoints are stale. Its page does not show whether it does. `endpoints` is the number of
    endpoints in Kubernetes if the capacity is that of all of them, and not of those on the page.
    """
    if view.saturation is None or view.own or not view.utilization:
        return view.saturation
    ready = 0.0 if view.ready is None else view.ready
    unseen, everything = view.stale, ready
    if endpoints is not None:
        unseen, everything = largest((view.stale, endpoints - ready)), max(ready, endpoints)
    if unseen == 0:
        return view.saturation
    share = unseen / everything if unseen < everything else 1.0
    # NaN must stay NaN, so that the limiter rejects it.
    full = math.nan if math.isnan(unseen) else share + (1.0 - share) * view.saturation
    return largest((view.saturation, full))


def _detector(views: Sequence[View], count: Count) -> str:
    stale = largest(each.stale for each in views)
    left_out = f"; {stale:g} stale endpoints count as full" if stale else ""
    detectors = frozenset[str]().union(*(each.detectors for each in views))
    if detectors:
        return f"the maximum of {', '.join(sorted(detectors))}{left_out}"
    utilization = frozenset[str]().union(*(each.utilization for each in views))
    if utilization:
        return f"utilization ({', '.join(sorted(utilization))}){left_out}"
    if count.k is not None:
        return f"counts requests, maxConcurrency {count.k}"
    if count.mixed:
        return "the maximum of several"
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
    if capacity == 0:  # both factors are above 0, and their product underflows
        why = f"{smallest(ready):g} ready endpoints of {per_endpoint:g} requests are no capacity"
        return Unread(Reason.IMPLAUSIBLE, why, "budget.per_endpoint")
    return capacity


@dataclass(frozen=True, slots=True)
class _Load:
    """F_SYS, with the properties that `Reading` needs."""

    f_sys: float
    exact: bool
    flushed: bool = False
    """True if the value may be of any moment since the last flush."""
    beyond_calls: float = math.inf
    """`Reading.beyond_calls` of the samples. The picker counts calls, however many items they hold."""


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
    # Each replica counts the requests that it sent itself, as a share of the capacity that it assumes.
    counted = total(page.saturation * page.ready * k for page in pages if page is not None)
    return _Load(counted / max_sys, exact=True, beyond_calls=0.0)


def _reading(
    signal: Signal,
    views: Sequence[View],
    max_sys: float,
    load: _Load,
    source: str,
    raw: Mapping[str, float],
    outside: Outside,
) -> Reading:
    # The EPP creates the series of a flow with its first request and deletes it when the flow is idle. A
    # missing series therefore means that no request waits.
    queued = total(each.queued for each in views if each.queued is not None)
    apart = _apart(views, queued, outside)
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
        beyond_calls=load.beyond_calls,
        running=apart.running,
        waiting=apart.waiting,
        exact_counts=apart.exact,
        averages=apart.averages,
    )


@dataclass(frozen=True, slots=True)
class _Apart:
    """Numbers of running and waiting requests, as `Reading` needs them."""

    running: float | None
    waiting: float
    exact: bool = True
    averages: tuple[float, float] | None = None


def _apart(views: Sequence[View], queued: float, outside: Outside) -> _Apart:
    """Return the numbers of running and of waiting requests.

    Requests that wait in a model server were sent by the picker as well. The picker's count of sent requests
    therefore gives the running ones only if the queues of the servers are known. The averages separate both,
    but are up to FLUSH_S old.
    """
    if any(each.own for each in views):
        return _Apart(None, queued)  # the definition of an own query is not known
    flushed = [
        (each.running * each.ready, (each.waiting - each.deferred) * each.ready)
        for each in views
        if each.running is not None and each.waiting is not None and each.ready is not None
    ]
    averages = max(flushed) if len(flushed) == len(views) else None
    if averages is not None and all(each.of_now for each in views):
        return _Apart(*averages)
    sent = _sent(views)
    server_queues = [each.server_queued for each in views if each.server_queued is not None]
    if sent and len(server_queues) == len(views):
        in_queues = largest(server_queues)
        running = max(0.0, total(sent) + outside.requests - in_queues)
        return _Apart(running, in_queues + queued, exact=False, averages=averages)
    return _Apart(None, queued, averages=averages)


def _requests(views: Sequence[View], max_sys: float, outside: Outside) -> _Load | Unread:
    """Return the load by the number of requests in the model servers.

    The number of unanswered requests that each replica sent is current. Requests that came another way show
    in the averages only, which are as old as the last flush.
    """
    averages = [each.average for each in views if each.average is not None]
    sent = _sent(views)
    # An EPP without any average has just started. Its count lacks the requests that its predecessor sent, and
    # the averages will be there in a moment. Versions before GIE 1.5 have no average of running requests, so
    # only that of the waiting ones is required.
    started = [each for each in views if each.waiting is not None and each.ready is not None]
    if sent and len(started) == len(views) and math.isfinite(total(averages)):
        f_sys = (total(sent) + outside.requests) / max_sys
        return _Load(f_sys, exact=True, beyond_calls=outside.requests)
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
    """Return the values of all replicas by series name. With several replicas, names have their number."""
    if len(views) == 1:
        return dict(views[0].raw)
    return {
        f"{name}#{number}": value for number, each in enumerate(views) for name, value in each.raw.items()
    }
