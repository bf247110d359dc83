"""Builds the status from the parts of a dispatcher, with one function for each subject."""

from __future__ import annotations

from dataclasses import asdict

from dispatcher.core.gateway.recent_attempts import RecentTries
from dispatcher.core.health import COUNTED_WITHIN_S, Health, HealthRecord
from dispatcher.core.limit.allowance import Allowance, explain
from dispatcher.core.limit.budget import Budget, Reason
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.realtime_impact import Price
from dispatcher.core.limit.reserve_check import little_reserve
from dispatcher.core.models.rollover import ModelFamily
from dispatcher.dispatch.merging.merging import Batching
from dispatcher.dispatch.models.model_requests import Models
from dispatcher.dispatch.queue_access import QueueView
from dispatcher.dispatch.sequences.turns import LineUp
from dispatcher.ports import Counts, ModelMarks
from dispatcher.settings import Settings
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry import status as show
from dispatcher.telemetry.status import Status


def overview(
    now: float,
    *,
    process: show.ProcessStatus,
    settings: Settings,
    limiter: Limiter,
    running: int,
    queue: QueueView,
    poll: SourcePoll | None,
    watched: Endpoints,
    slow: str | None,
    recent: RecentTries | None = None,
    batching: Batching | None = None,
    lineup: LineUp | None = None,
    models: Models | None = None,
    health: HealthRecord | None = None,
) -> Status:
    """Build the status at `now`.

    `running_count` is the number of requests of this process at the gateway, `loop_problem` why its event
    loop is slow, and `recent_attempts` the outcomes of its last attempts.
    """
    allowance = limiter.allowance(now)
    known = limiter.knows_pool(now)
    signals = _signals(limiter, poll, now, known=known)
    little = _little_reserve(allowance, limiter, settings, queue)
    budget = (
        _budget(allowance, limiter, settings, poll, watched, little)
        if known
        else show.BudgetStatus(reserve=settings.budget.reserve)
    )
    failing = None if recent is None else _tries_failing(recent, limiter, now)
    counts = _current_counts(queue, now)
    told = [
        _explained(allowance, limiter.in_flight, observe=process.observe),
        *([f"{failing}."] if failing else []),
        *_failing(allowance, signals),
        *_fitted(budget, settings),
        *(_awaited(models) if models and counts else ()),
        *(f"Kubernetes: {each}." for each in (*watched.problems, *watched.notices)),
        *_in_turn(counts, settings),
        *_counted_as_calls(limiter, now),
        *(f"Beware: {each}." for each in (slow, little) if each),
    ]
    line = _line(queue, counts, now)
    return Status(
        health=_health(health or HealthRecord(), line, now),
        process=process,
        gate=show.GateStatus(
            reason=str(allowance.reason),
            open=not allowance.reason.closed,
            explanation=" ".join(told),
            limit=allowance.limit,
            in_flight=limiter.in_flight,
            running=running,
            free=limiter.free(now),
            gateway_problem=limiter.gateway_problem,
            gateway_prober=queue.shared.prober if queue.shared else None,
            tries_problem=failing,
        ),
        budget=budget,
        signals=signals,
        watch=show.Watch(
            watch_endpoints=watched.ready,
            watch_unsure_s=None if watched.unsure_since is None else round(now - watched.unsure_since, 3),
            watch_problems=[str(problem) for problem in watched.problems],
        ),
        line=line,
        price=_price(poll.price) if poll else show.PriceStatus(),
        batching=_batching(batching) if batching else show.BatchingStatus(),
        sequences=show.SequencesStatus(
            sequences=asdict(counts.sequences) if counts else None,
            sequence_turns=dict(lineup.turns) if lineup else {},
            sequence_servers=dict(lineup.servers) if lineup else {},
        ),
        models=_models(models, now, counted=counts is not None) if models else show.ModelsStatus(),
    )


def _health(record: HealthRecord, line: show.LineStatus, now: float) -> show.HealthStatus:
    newest, rate = record.newest, line.service_rate
    return show.HealthStatus(
        health=newest.health,
        health_cause=newest.cause,
        health_sentence=newest.sentence,
        health_since_s=None if record.since is None else round(now - record.since, 1),
        health_look_at=newest.cause.look_at,
        # When a fault stops all requests, the rate falls slowly and would promise an end that does not come.
        done_in_s=round(line.pending / rate, 1)
        if rate and line.pending and newest.health is not Health.FAILING
        else None,
    )


def _current_counts(queue: QueueView, now: float) -> Counts | None:
    """Return the counts of the queue. `None` if they are too old or the queue cannot be used."""
    old = queue.counted_at is not None and now - queue.counted_at > COUNTED_WITHIN_S
    return None if old or queue.problem is not None else queue.counts


def _in_turn(counts: Counts | None, settings: Settings) -> list[str]:
    """Explain which requests sequences hold back, whatever the gate says."""
    if counts is None:
        return []
    told, some = counts.sequences, []
    if told.waiting:
        some.append(f"{told.waiting} {'request waits' if told.waiting == 1 else 'requests wait'} for a turn")
    if told.held:
        held = "sequence is held" if told.held == 1 else "sequences are held"
        some.append(f"{told.held} {held} until an operator decides (`sequences list --status held`)")
    if told.parked:
        most = settings.sequences.max_active
        some.append(f"{told.parked} not begun, for sequences.max_active ({most}) are alive")
    return [f"Sequences: {', '.join(some)}."] if some else []


def _counted_as_calls(limiter: Limiter, now: float) -> list[str]:
    """Return advice if readings count calls but a batching rule counts items."""
    counted = limiter.counted_as_calls(now)
    if counted is None:
        return []
    units, calls = counted
    fewer = f"The metrics count calls: {units} units of this process are {calls} there"
    return [f"{fewer}. Set `unit: call` in batching.rules, and as many calls are sent as fit."]


def _explained(allowance: Allowance, in_flight: int, *, observe: bool) -> str:
    told = explain(allowance, in_flight)
    return f"Observing only, nothing is claimed by this process. It would be: {told}" if observe else told


def _tries_failing(recent: RecentTries, limiter: Limiter, now: float) -> str | None:
    """Return the problem of the last attempts. `None` if the gateway is unreachable, which the gate
    explains."""
    return None if limiter.gateway_problem else recent.problem(now)


def _failing(allowance: Allowance, signals: show.SignalsStatus) -> list[str]:
    """Explain how long an open gate stays open while the signals cannot be read."""
    if allowance.reason.closed or not signals.signals_problem:
        return []
    failing = f"The signals cannot be read for {signals.signals_failing_s:.1f} s now"
    standing = f"the readings before stand for another {signals.signals_close_in_s:.1f} s"
    return [f"{failing} ({signals.signals_problem}): {standing}."]


def _little_reserve(
    allowance: Allowance, limiter: Limiter, settings: Settings, queue: QueueView
) -> str | None:
    budget = allowance.budget
    if budget is None or budget.fault is not None or queue.outlook is None:
        return None
    return little_reserve(
        queue.outlook.service_s,
        reserve=settings.budget.reserve,
        ours=limiter.in_flight,
        everybody=(budget.f_sys + budget.f_epp) * budget.max_sys,
        max_sys=budget.max_sys,
    )


def _fitted(budget: show.BudgetStatus, settings: Settings) -> list[str]:
    """Explain a learned capacity below the configured one, and which setting to change."""
    fits, configured = budget.max_sys, budget.configured_max_sys
    if budget.max_sys_by != "learned" or fits is None or configured is None:
        return []
    each = budget.per_endpoint
    if each is None:
        name = "signals.prometheus.queries.capacity" if settings.budget.max_sys is None else "budget.max_sys"
        return [f"{fits:.3g} fitted where {name} says {configured:g}: lower it."]
    fitted = f"{each * fits / configured:.3g} an endpoint fitted where"
    match budget.per_endpoint_from:
        case "setting":
            return [f"{fitted} budget.per_endpoint says {each:g}: lower it."]
        case "picker":
            return [f"{fitted} the endpoint picker counts with {each:g}: lower its maxConcurrency."]
        case "server":
            return [f"{fitted} the model servers' own pages say {each:g}."]
        case _:
            return []


def _budget(
    allowance: Allowance,
    limiter: Limiter,
    settings: Settings,
    poll: SourcePoll | None,
    watched: Endpoints,
    little: str | None,
) -> show.BudgetStatus:
    budget = allowance.budget
    max_sys, max_sys_by = _max_sys(budget, limiter, settings, poll, watched)
    believed = budget is not None and budget.fault is None
    per_endpoint, per_endpoint_from = (poll.per_endpoint, poll.per_endpoint_from) if poll else (None, None)
    if per_endpoint is None and max_sys_by in ("setting", "learned") and settings.budget.max_sys is None:
        # The newest poll failed: the capacity and its source are those of the reading before.
        per_endpoint, per_endpoint_from = settings.budget.per_endpoint, "setting"
    return show.BudgetStatus(
        reserve=settings.policy().reserve,
        signal=str(allowance.signal) if allowance.signal else None,
        f_sys=budget.f_sys if budget else None,
        f_epp=budget.f_epp if budget else None,
        budget=budget.d if budget and believed else None,
        headroom=budget.headroom if budget and believed else None,
        max_sys=max_sys,
        max_sys_by=max_sys_by,
        max_sys_confirmed=limiter.learned.confirmed if max_sys_by == "learned" else 0,
        configured_max_sys=budget.configured if budget and budget.known and max_sys is not None else None,
        per_endpoint=per_endpoint,
        per_endpoint_from=per_endpoint_from,
        picker_max_concurrency=poll.picker_k if poll else None,
        reserve_problem=little,
        terms=[_terms(each) for each in limiter.budgets],
    )


def _terms(budget: Budget) -> show.Terms:
    believed = budget.fault is None
    return show.Terms(
        signal=str(budget.signal),
        f_sys=budget.f_sys,
        f_epp=budget.f_epp,
        budget=budget.d if believed else None,
        headroom=budget.headroom if believed else None,
        max_sys=budget.max_sys,
    )


def _max_sys(
    budget: Budget | None,
    limiter: Limiter,
    settings: Settings,
    poll: SourcePoll | None,
    watched: Endpoints,
) -> tuple[float | None, str | None]:
    """Return the capacity that counts, and its source."""
    if budget is None:
        return None, None
    # The order of the checks matters: each excludes the causes before it.
    if budget.fault is Reason.NO_ENDPOINTS and watched.ready == 0:
        return 0.0, "watch"
    if budget.learned:
        return budget.max_sys, "learned"
    if not budget.known:
        return budget.max_sys, "search" if limiter.learned.ceiling is None else "learned"
    setting = settings.policy().max_sys
    if setting is not None and budget.max_sys >= setting:
        return budget.max_sys, "setting"
    reading = next(each for each in limiter.readings if each.signal is budget.signal)
    if budget.max_sys < reading.max_sys:
        return budget.max_sys, "watch"
    if "queries.capacity" in reading.raw:
        return budget.max_sys, "query"
    if settings.budget.per_endpoint is not None:
        return budget.max_sys, "setting"
    return budget.max_sys, "server" if poll and poll.per_endpoint_from == "server" else "picker"


def _signals(limiter: Limiter, poll: SourcePoll | None, now: float, *, known: bool) -> show.SignalsStatus:
    readings = limiter.readings
    # A fixed limit reads nothing, so realtime requests are unknown.
    counted = known and (poll is None or poll.source != "fixed")
    realtime, waiting = limiter.not_ours if counted else (None, None)
    failing = poll if poll and poll.unread else None
    unread = min(failing.unread, key=lambda each: each.reason.rank) if failing else None
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
            {
                "signal": str(reading.signal),
                "age_s": round(now - reading.closed_at, 3),
                "window_s": round(reading.closed_at - reading.opened_at, 3),
                "f_sys": reading.f_sys,
                "f_epp": reading.f_epp,
                "max_sys": reading.max_sys,
                "source": reading.source,
                "raw": dict(reading.raw),
            }
            for reading in readings
        ],
    )


def _line(queue: QueueView, counts: Counts | None, now: float) -> show.LineStatus:
    ahead = queue.outlook if counts else None
    replicas = ahead.replicas if ahead else ()
    return show.LineStatus(
        pending=counts.pending if counts else None,
        leased=counts.leased if counts else None,
        delayed=counts.delayed if counts else None,
        dead=counts.dead if counts else None,
        paused=queue.shared.paused if queue.shared else False,
        queue_problem=queue.problem,
        oldest_pending_age_s=ahead.oldest_pending_age_s if ahead else None,
        earliest_deadline_s=ahead.earliest_deadline_s if ahead else None,
        at_risk=ahead.at_risk if ahead else None,
        service_rate=ahead.service_rate if ahead else None,
        service_s=round(ahead.service_s, 3) if ahead and ahead.service_s else None,
        replica_count=ahead.owners if ahead else None,
        replicas=[asdict(replica) for replica in replicas],
    )


def _price(price: Price) -> show.PriceStatus:
    return show.PriceStatus(
        ttft_p50_s=price.ttft_p50_s,
        ttft_p95_s=price.ttft_p95_s,
        tpot_p50_s=price.tpot_p50_s,
        tpot_p95_s=price.tpot_p95_s,
        price_of=price.of,
        price_requests=price.requests,
        price_source=price.source or None,
        price_why_not=price.why_not or None,
        batch_share=price.batch_share,
    )


_TOLD_MOST = 3
_VERSIONS_MOST = 20


def _awaited(models: Models) -> list[str]:
    """Explain which models hold requests back."""
    held_back = models.held_back()
    told = [
        f"{count:,} {'request waits' if count == 1 else 'requests wait'}: {why}."
        for _, count, why in held_back[:_TOLD_MOST]
    ]
    more = len(held_back) - _TOLD_MOST
    return [*told, f"And {more} more such models."] if more > 0 else told


def _models(models: Models, now: float, *, counted: bool) -> show.ModelsStatus:
    return show.ModelsStatus(
        models=[
            {
                "name": seen.name,
                "state": str(seen.state),
                "serving": seen.serving,
                "endpoints": seen.endpoints,
                "unread": seen.unread,
                "waiting": waiting if counted else None,
                "since_s": round(now - seen.since, 1),
                "named": seen.named,
                "denied": seen.denied,
                "drained_by": models.versions.drained(seen.name) or None,
                "sentence": models.sentence(seen.name),
                **_family(models, seen.name, now),
            }
            for seen, waiting in models.seen()
        ],
        model_count=len(models.names()),
        model_requests=dict(models.requests),
        model_problems=[f"{endpoint}: {problem}" for endpoint, problem in models.problems.items()],
        model_marks_problem=models.marks_problem or None,
    )


def _family(models: Models, name: str, now: float) -> dict[str, object]:
    """Return the state of a model with versions. Empty values if the settings give it none."""
    family, marks = models.versions.family(name), models.versions.marks or ModelMarks()
    if family is None:
        return {"policy": None, "labels": {}, "versions": []}
    labels = {label: {"version": version, "by": None} for label, version in family.terms.labels.items()}
    labels |= {
        label: {"version": version, "by": marks.labelled.get((of, label))}
        for (of, label), version in marks.labels.items()
        if of == name
    }
    policy = str(family.terms.policy)
    return {"policy": policy, "labels": labels, "versions": _versions(family, marks, now)}


def _versions(family: ModelFamily, marks: ModelMarks, now: float) -> list[dict[str, object]]:
    """Return the newest versions first."""
    return [
        {
            "name": each.name,
            "label": each.label,
            "state": str(each.state),
            "since_s": round(now - each.since, 1),
            "serving": len(each.serving),
            "warm": len(each.warm) if family.terms.warms else None,
            "wanted": each.wanted,
            "drained": each.drained,
            "drained_by": next((marks.drained[word] for word in each.words if word in marks.drained), None),
            "share": round(each.weight, 4),
            "labels": list(each.labels),
        }
        for each in family.versions()[:_VERSIONS_MOST]
    ]


def _batching(batching: Batching) -> show.BatchingStatus:
    return show.BatchingStatus(
        batching=[served.told() for served in batching.models],
        batching_waiting=len(batching.company),
        batching_calls=dict(batching.calls),
        batching_requests=batching.requests,
        batching_checks=dict(batching.checks),
    )
