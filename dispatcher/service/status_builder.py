"""Builds the status from the parts of a dispatcher, with one function for each subject."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.queue_access import QueueView
from dispatcher.limit.allowance import Allowance, explain_allowance
from dispatcher.limit.budget import Budget, Reason
from dispatcher.limit.health import MAX_COUNTS_AGE_S, Health, HealthRecord
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.realtime_impact import RealtimeImpact
from dispatcher.limit.reserve_check import explain_small_reserve
from dispatcher.requests.outcomes.recent_attempts import RecentAttempts
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.service.status_notes import describe_per_endpoint, list_problems
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry import status as show
from dispatcher.telemetry.status import Status


def build_status(
    now: float,
    context: KernelContext,
    *,
    process: show.ProcessStatus,
    settings: Settings,
    health: HealthRecord,
    poll: SourcePoll | None,
    endpoints: Endpoints,
    loop_problem: str | None = None,
    sharing_problem: str | None = None,
) -> Status:
    """Build the status at `now`.

    `loop_problem` says why the event loop of this process is slow, `sharing_problem` which other pools share
    the queue.
    """
    limiter, queue = context.limiter, context.access.view
    allowance = limiter.get_allowance(now)
    is_pool_known = limiter.knows_pool(now)
    signals = _build_signals(limiter, poll, now, is_pool_known=is_pool_known)
    counts = _get_current_counts(queue, now)
    features = [build(now, counts) for build in context.hooks.status]
    why_long = next(filter(None, (each.long_call_reason for each in features)), "")
    reserve_problem = _check_reserve(allowance, limiter, settings, why_long)
    budget = (
        _build_budget(allowance, limiter, settings, poll, endpoints, reserve_problem)
        if is_pool_known
        else show.BudgetStatus(reserve=settings.budget.reserve)
    )
    attempts_problem = _find_attempts_problem(context.journal.recent_attempts, limiter, now)
    sentences = [
        _explain_allowance(allowance, limiter.in_flight, observe=process.observe),
        *([f"{attempts_problem}."] if attempts_problem else []),
        *_explain_signals_failure(allowance, signals),
        *_explain_learned_capacity(budget, settings),
        *_explain_small_capacity(budget, limiter, allowance.reason, settings),
        *(f"Kubernetes: {each}." for each in (*endpoints.problems, *endpoints.notices)),
        *chain.from_iterable(each.sentences for each in features),
        *(f"Warning: {each}." for each in (loop_problem, reserve_problem) if each),
    ]
    queue_status = _build_queue(queue, counts, now)
    return Status(
        health=_build_health(health, queue_status, now),
        process=process,
        gate=show.GateStatus(
            reason=str(allowance.reason),
            open=not allowance.reason.is_closed,
            explanation=" ".join(sentences),
            limit=allowance.limit,
            in_flight=limiter.in_flight,
            running=context.in_flight.running_count,
            free_share=limiter.estimate_free_units(now),
            gateway_problem=limiter.gateway_problem,
            probing_owner=queue.shared.probing_owner if queue.shared else None,
            attempts_problem=attempts_problem,
            problems=list_problems(
                allowance.reason,
                config=process.config_problem,
                queue=queue.problem,
                gateway=limiter.gateway_problem,
                signals=signals,
                cancel_markers=queue.markers_problem,
                sharing=sharing_problem,
                features=[*chain.from_iterable(each.problems for each in features)],
            ),
        ),
        budget=replace(budget, capacity_note=describe_per_endpoint(budget)),
        signals=signals,
        watch=show.WatchStatus(
            watch_endpoints=endpoints.ready,
            watch_stale_s=None
            if endpoints.outdated_since is None
            else round(now - endpoints.outdated_since, 3),
            watch_problems=[str(problem) for problem in endpoints.problems],
        ),
        queue=queue_status,
        impact=_build_realtime_impact(poll.realtime_impact)
        if poll
        else show.ImpactStatus(impact_problem="not read yet"),
        features=[each.section for each in features],
    )


def _build_health(record: HealthRecord, queue_status: show.QueueStatus, now: float) -> show.HealthStatus:
    newest, rate = record.current, queue_status.service_rate
    return show.HealthStatus(
        health=newest.health,
        health_cause=newest.cause.name,
        health_sentence=newest.sentence,
        health_since_s=None if record.since is None else round(now - record.since, 1),
        health_hint=newest.cause.hint,
        # When a fault stops all requests, the rate falls slowly and would promise an end that does not come.
        done_in_s=round(queue_status.pending / rate, 1)
        if rate and queue_status.pending and newest.health is not Health.FAILING
        else None,
    )


def _get_current_counts(queue: QueueView, now: float) -> QueueCounts | None:
    """Return the counts of the queue. `None` if they are too old or the queue cannot be used."""
    old = queue.counted_at is not None and now - queue.counted_at > MAX_COUNTS_AGE_S
    return None if old or queue.problem is not None else queue.counts


def _explain_allowance(allowance: Allowance, in_flight: int, *, observe: bool) -> str:
    explanation = explain_allowance(allowance, in_flight)
    return (
        f"Observing only, nothing is claimed by this process. It would be: {explanation}"
        if observe
        else explanation
    )


def _find_attempts_problem(recent_attempts: RecentAttempts, limiter: Limiter, now: float) -> str | None:
    """Return the problem of the last attempts. `None` if the gateway is unreachable, which the gate
    explains."""
    return None if limiter.gateway_problem else recent_attempts.describe_problem(now)


def _explain_signals_failure(allowance: Allowance, signals: show.SignalsStatus) -> list[str]:
    """Explain how long an open gate stays open while the signals cannot be read."""
    if allowance.reason.is_closed or not signals.signals_problem:
        return []
    failing = f"The signals cannot be read for {signals.signals_failing_s:.1f} s now"
    standing = f"the readings before stand for another {signals.signals_close_in_s:.1f} s"
    return [f"{failing} ({signals.signals_problem}): {standing}."]


def _check_reserve(
    allowance: Allowance,
    limiter: Limiter,
    settings: Settings,
    why_long: str,
) -> str | None:
    budget = allowance.budget
    if budget is None or budget.fault is not None:
        return None
    return explain_small_reserve(
        limiter.mean_duration_s or None,
        reserve=settings.budget.reserve,
        batch_requests=limiter.in_flight,
        all_requests=(budget.f_sys + budget.f_epp) * budget.max_sys,
        max_sys=budget.max_sys,
        why_long=why_long,
    )


def _explain_learned_capacity(budget: show.BudgetStatus, settings: Settings) -> list[str]:
    """Explain a learned capacity below the configured one, and which setting to change."""
    learned, configured = budget.max_sys, budget.configured_max_sys
    if budget.max_sys_source != "learned" or learned is None or configured is None:
        return []
    each = budget.per_endpoint
    if each is None:
        name = _name_capacity_setting(settings)
        return [f"{learned:.3g} requests fit where {name} says {configured:g}: lower it."]
    fitted = f"{each * learned / configured:.3g} requests per endpoint fit where"
    match budget.per_endpoint_source:
        case "setting":
            return [f"{fitted} budget.per_endpoint says {each:g}: lower it."]
        case "picker":
            return [f"{fitted} the endpoint picker counts with {each:g}: lower its maxConcurrency."]
        case "server":
            return [f"{fitted} the model servers' own pages say {each:g}."]
        case _:
            return []


def _explain_small_capacity(
    budget: show.BudgetStatus, limiter: Limiter, reason: Reason, settings: Settings
) -> list[str]:
    """Explain that the capacity is too small, or may be, and which setting to change."""
    check, configured, each = limiter.small_capacity, budget.configured_max_sys, budget.per_endpoint
    is_full = reason in (Reason.FULL, Reason.SATURATED, Reason.NO_ROOM)
    if configured is None or not (check.proven_capacity or (check.is_larger_suggested and is_full)):
        return []
    source = budget.per_endpoint_source
    if each is None:
        name, number = _name_capacity_setting(settings), configured
        change = "raise it"
    elif source == "server":
        name, number, change = "the model servers' own pages", each, "set budget.per_endpoint"
    elif source in ("picker", "suggestion"):
        name, number, change = "the endpoint picker", each, "raise its maxConcurrency"
    else:
        name, number, change = "budget.per_endpoint", each, "raise it"
    unit = "requests" if each is None else "requests per endpoint"
    change = f"{change}, or set budget.capacity to learn"
    if check.proven_capacity:
        ran = f"{number * check.proven_capacity / configured:.3g} {unit}"
        return [f"{ran} ran while none waited, more than the {number:g} of {name}: {change}."]
    full = f"the pool was as full as {number:g} {unit} allow ({name})"
    quiet = f"No request has waited in {check.quiet_s / 60:.0f} minutes in which {full}"
    return [f"{quiet}. If the model servers can run more, {change}."]


def _name_capacity_setting(settings: Settings) -> str:
    """Return the setting of the capacity of the whole pool."""
    return "signals.prometheus.queries.capacity" if settings.budget.max_sys is None else "budget.max_sys"


def _build_budget(
    allowance: Allowance,
    limiter: Limiter,
    settings: Settings,
    poll: SourcePoll | None,
    endpoints: Endpoints,
    reserve_problem: str | None,
) -> show.BudgetStatus:
    budget = allowance.budget
    max_sys, max_sys_source = _find_max_sys(budget, limiter, settings, poll, endpoints)
    is_usable = budget is not None and budget.fault is None
    per_endpoint, per_endpoint_source = (
        (poll.per_endpoint, poll.per_endpoint_source) if poll else (None, None)
    )
    if per_endpoint is None and max_sys_source in ("setting", "learned") and settings.budget.max_sys is None:
        # The newest poll failed: the capacity and its source are those of the reading before.
        per_endpoint, per_endpoint_source = settings.budget.per_endpoint, "setting"
    return show.BudgetStatus(
        reserve=settings.limit_policy().reserve,
        signal=str(allowance.signal) if allowance.signal else None,
        f_sys=budget.f_sys if budget else None,
        f_epp=budget.f_epp if budget else None,
        budget=budget.d if budget and is_usable else None,
        headroom=budget.headroom if budget and is_usable else None,
        max_sys=max_sys,
        max_sys_source=max_sys_source,
        max_sys_confirmed=limiter.capacity_estimate.confirmations if max_sys_source == "learned" else 0,
        configured_max_sys=budget.configured_max_sys
        if budget and budget.is_capacity_known and max_sys is not None
        else None,
        per_endpoint=per_endpoint,
        per_endpoint_source=per_endpoint_source,
        picker_max_concurrency=poll.picker_k if poll else None,
        reserve_problem=reserve_problem,
        terms=[_build_terms(each) for each in limiter.budgets],
    )


def _build_terms(budget: Budget) -> show.Terms:
    is_usable = budget.fault is None
    return show.Terms(
        signal=str(budget.signal),
        f_sys=budget.f_sys,
        f_epp=budget.f_epp,
        budget=budget.d if is_usable else None,
        headroom=budget.headroom if is_usable else None,
        max_sys=budget.max_sys,
    )


def _find_max_sys(
    budget: Budget | None,
    limiter: Limiter,
    settings: Settings,
    poll: SourcePoll | None,
    endpoints: Endpoints,
) -> tuple[float | None, str | None]:
    """Return the capacity that counts, and its source."""
    if budget is None:
        return None, None
    # The order of the checks matters: each excludes the causes before it.
    if budget.fault is Reason.NO_ENDPOINTS and endpoints.ready == 0:
        return 0.0, "watch"
    if budget.is_capacity_learned:
        return budget.max_sys, "learned"
    if not budget.is_capacity_known:
        return budget.max_sys, "search" if limiter.capacity_estimate.ceiling is None else "learned"
    setting = settings.limit_policy().max_sys
    if setting is not None and budget.max_sys >= setting:
        return budget.max_sys, "setting"
    reading = next(each for each in limiter.newest_readings if each.signal is budget.signal)
    if budget.max_sys < reading.max_sys:
        return budget.max_sys, "watch"
    if "queries.capacity" in reading.raw_values:
        return budget.max_sys, "query"
    if settings.budget.per_endpoint is not None:
        return budget.max_sys, "setting"
    return budget.max_sys, "server" if poll and poll.per_endpoint_source == "server" else "picker"


def _build_signals(
    limiter: Limiter, poll: SourcePoll | None, now: float, *, is_pool_known: bool
) -> show.SignalsStatus:
    readings = limiter.newest_readings
    # A fixed limit reads nothing, so realtime requests are unknown.
    counted = is_pool_known and (poll is None or poll.source != "fixed")
    realtime, waiting = limiter.realtime_requests if counted else (None, None)
    failing = poll if poll and poll.failures else None
    unread = min(failing.failures, key=lambda each: each.reason.rank) if failing else None
    since = failing.failing_since if failing else None
    return show.SignalsStatus(
        source=poll.source if poll else None,
        reading_age_s=now - max(r.closed_at for r in readings) if readings else None,
        detector=poll.detector if poll else None,
        realtime=realtime,
        realtime_waiting=waiting,
        signals_problem=str(unread) if unread else None,
        signals_failing_s=None if since is None else round(now - since, 3),
        signals_close_in_s=round(max(0.0, failing.closes_at - now), 3) if failing else None,
        readings=[
            show.ReadingStatus(
                signal=str(reading.signal),
                age_s=round(now - reading.closed_at, 3),
                window_s=round(reading.closed_at - reading.opened_at, 3),
                f_sys=reading.f_sys,
                f_epp=reading.f_epp,
                max_sys=reading.max_sys,
                source=reading.source,
                raw=dict(reading.raw_values),
            )
            for reading in readings
        ],
    )


def _build_queue(queue: QueueView, counts: QueueCounts | None, now: float) -> show.QueueStatus:
    forecast = queue.forecast if counts else None
    replicas = forecast.replicas if forecast else ()
    return show.QueueStatus(
        pending=counts.pending if counts else None,
        leased=counts.leased if counts else None,
        delayed=counts.delayed if counts else None,
        dead=counts.dead if counts else None,
        paused=queue.shared.is_paused if queue.shared else False,
        queue_problem=queue.problem,
        oldest_pending_age_s=forecast.oldest_pending_age_s if forecast else None,
        earliest_deadline_s=forecast.earliest_deadline_s if forecast else None,
        at_risk=forecast.at_risk if forecast else None,
        service_rate=forecast.service_rate if forecast else None,
        service_s=round(forecast.service_s, 3) if forecast and forecast.service_s else None,
        replica_count=forecast.owner_count if forecast else None,
        replicas=[show.ReplicaStatus(each.owner, each.leases, each.silent_s) for each in replicas],
    )


def _build_realtime_impact(impact: RealtimeImpact) -> show.ImpactStatus:
    return show.ImpactStatus(
        ttft_p50_s=impact.ttft_p50_s,
        ttft_p95_s=impact.ttft_p95_s,
        tpot_p50_s=impact.tpot_p50_s,
        tpot_p95_s=impact.tpot_p95_s,
        impact_scope=impact.scope,
        impact_requests=impact.request_count,
        impact_source=impact.source or None,
        impact_problem=impact.why_not or None,
        batch_share=impact.batch_share,
    )
