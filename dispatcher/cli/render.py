"""Text about queue and dispatcher: the lines of `status`, the page of `top`, the paragraph of `explain`, and
the state of the gate in all other verbs."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from dispatcher.cli import bar
from dispatcher.cli.admin_client import StatusProblem, StatusProblemKind
from dispatcher.cli.overview import COUNT_NAMES
from dispatcher.common.duration import format_duration, format_time_until
from dispatcher.limit.health import describe_pause
from dispatcher.telemetry.status import CAPACITY_SOURCES, ReplicaStatus, Status

if TYPE_CHECKING:
    from dispatcher.cli.overview import Overview
    from dispatcher.requests.queue_counts import QueueCounts

MIN_BAR_WIDTH = 10


# ── whole views ─────────────────────────────────────────────────────────────────────────────────────────────


def format_status(overview: Overview) -> list[str]:
    """Return all known facts, one per line, with the health of the dispatcher first."""
    status = overview.dispatcher
    lines = format_health(status)
    if overview.counts is not None:
        lines.append(f"{overview.queue}: {_format_counts(overview.counts)}")
    if overview.pause is not None:
        lines.append(f"{_capitalize(describe_pause(*overview.pause))}.")
    if status is None:
        return [*lines, f"{_capitalize(format_no_answer(overview.dispatcher_problem))}."]
    if overview.is_of_other_queue:
        lines.append(f"{format_other_queue(status)}:")
    return [*lines, format_gate(status), *format_details(status)]


def format_details(status: Status) -> list[str]:
    """Return the lines about a dispatcher that follow the explanation of its gate."""
    return [
        *filter(None, [_format_capacity(status)]),
        *status.gate.problems,
        *_format_readings(status),
        *filter(None, [_format_rate(status), _format_deadlines(status), _format_realtime_impact(status)]),
        *chain.from_iterable(each.format_lines() for each in status.features),
        *_format_replicas(status),
    ]


def format_page(overview: Overview, width: int, clock: str) -> list[str]:
    """Return the rows of the page of `top`: frequent changes first, without the readings."""
    status, problems = overview.dispatcher, [*filter(None, [overview.queue_problem])]
    title = f"{f'pool {status.process.pool}' if status else overview.queue}  {clock}"
    quit_hint = "q ends"
    page = [f"{title}{quit_hint:>{max(len(quit_hint) + 2, width - len(title))}}", ""]
    if status is None:
        return [*page, *format_status(overview), *problems]
    page += [*format_health(status), format_gate(status), *problems, "", *_format_pool(status, width), ""]
    if overview.counts is not None:
        page.append(f"{overview.queue}: {_format_counts(overview.counts)}")
    if overview.is_of_other_queue:
        page.append(format_other_queue(status))
    lines = [_format_rate(status), _format_deadlines(status), _format_realtime_impact(status)]
    lines += [*status.gate.problems, *_format_replicas(status), _format_capacity(status)]
    return [*page, *filter(None, lines)]


def format_log_line(overview: Overview) -> str:
    """Return the most important facts in one line, as for a log."""
    parts = [_format_counts(overview.counts)] if overview.counts is not None else []
    parts += [overview.queue_problem] if overview.queue_problem else []
    status = overview.dispatcher
    if status is None:
        return "  ".join([*parts, "no dispatcher answers"])
    parts.append(f"limit {status.gate.limit}  in flight {status.gate.in_flight}")
    if status.queue.service_rate:
        parts.append(f"{status.queue.service_rate:.3g}/s")
    return "  ".join([*parts, f"{status.health.health} ({status.gate.reason})"])


def format_explanation(overview: Overview) -> str:
    """Return a paragraph that explains why the dispatcher sends as much as it does."""
    # A dispatcher of another queue is mentioned after the facts about this queue.
    status, is_foreign, counts = overview.dispatcher, overview.is_of_other_queue, overview.counts
    sentences: list[str] = []
    if status is None:
        no_answer = _capitalize(format_no_answer(overview.dispatcher_problem))
        sentences.append(f"{no_answer}; so nothing is known of its gate.")
    elif not is_foreign:
        sentences += [*format_health(status), status.gate.explanation]
        sentences += [f"{problem}." for problem in status.gate.problems]
        sentences += chain.from_iterable(each.explain() for each in status.features)
    if overview.pause is not None:
        sentences.append(f"{_capitalize(describe_pause(*overview.pause))}.")
    if counts is not None:
        why = " (`batch-dispatcher list --state dead` says why)" if counts.dead else ""
        sentences.append(
            f"{_format_count(counts.pending, 'request waits', 'requests wait')}, "
            f"{_format_count(counts.leased, 'is held', 'are held')}, "
            f"{_format_count(counts.delayed, 'waits for a retry', 'wait for a retry')}, "
            f"{_format_count(counts.dead, 'is dead', 'are dead')}{why}."
        )
    if status is not None:
        if is_foreign:
            sentences += [f"{_capitalize(format_other_queue(status))}:", status.gate.explanation]
        sentences.append(_format_capacity(status))
        if status.signals.reading_age_s is not None:
            source, age_s = status.signals.source, status.signals.reading_age_s
            sentences.append(f"The newest sample, from {source}, is {age_s:.1f} s old.")
    return " ".join(filter(None, sentences))


# ── single facts ────────────────────────────────────────────────────────────────────────────────────────────


def format_gate(status: Status) -> str:
    """Return the reason of the gate and its explanation."""
    gate = status.gate
    # The explanation of a closed gate names the reason.
    return f"{gate.reason}: {gate.explanation}" if gate.open else gate.explanation


def format_other_queue(status: Status) -> str:
    return f"the dispatcher that answers works on another queue, {status.process.queue}"


def format_no_answer(problem: StatusProblem | None) -> str:
    """Return that no dispatcher answers, why, and what to do if none runs."""
    is_not_listening = problem is not None and problem.kind is StatusProblemKind.NOT_LISTENING
    return f"no dispatcher answers: {problem}" + (
        "; start one with `batch-dispatcher run`" if is_not_listening else ""
    )


def format_health(status: Status | None) -> list[str]:
    """Return one line: health of the dispatcher, since when, why, and where to look first.

    The list is empty if no dispatcher answers, or if its version does not report its health.
    """
    if status is None or not status.health.health_sentence:
        return []
    health, since_s, look_at = (
        status.health,
        status.health.health_since_s,
        status.health.health_hint,
    )
    since = "" if since_s is None else f" for {format_duration(since_s)}"
    hint = f" Look at: {look_at}." if look_at else ""
    return [f"{_capitalize(health.health)}{since}: {health.health_sentence}{hint}"]


def _capitalize(sentence: str) -> str:
    return f"{sentence[:1].upper()}{sentence[1:]}"


def _format_count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _format_counts(counts: QueueCounts) -> str:
    return "  ".join(f"{name} {getattr(counts, name)}" for name in COUNT_NAMES)


def _format_pool(status: Status, width: int) -> list[str]:
    """Return the bar that shows who uses the capacity of the pool, with its legend."""
    capacity, realtime = status.budget.max_sys, status.signals.realtime
    # 0 is a value; only a missing one is unknown.
    if capacity is None or realtime is None:
        return ["The pool's capacity is not known."]
    amounts = {
        "realtime": realtime,
        "waiting": status.signals.realtime_waiting or 0.0,
        "batch": float(status.gate.in_flight),
        "reserve": capacity * status.budget.reserve,
        "capacity": capacity,
    }
    return [
        bar.draw_pool(**amounts, width=max(MIN_BAR_WIDTH, width)),
        bar.format_legend(**amounts),
        f"capacity {capacity:.4g}; batch limit {status.gate.limit}",
    ]


def _format_capacity(status: Status) -> str:
    """Return sentences about the source of the capacity and the state of the Kubernetes watch.

    Empty if neither is known.
    """
    budget, ready, unsure_s = status.budget, status.watch.watch_endpoints, status.watch.watch_stale_s
    source, parts = budget.max_sys_source, []
    if source is not None and budget.max_sys is not None:
        capacity = f"the capacity is {budget.max_sys:.5g} by {_format_capacity_source(status)}"
        if source == "learned" and budget.configured_max_sys is not None:
            capacity += f", {budget.configured_max_sys:g} are configured"
        elif source == "learned":
            times = budget.max_sys_confirmed
            capacity += f" (measured {'once' if times <= 1 else f'{times} times'})"
        parts.append(capacity)
    watch = "which" if source == "watch" else "the Kubernetes watch"
    if ready is not None:
        # Without a fresh watch the last count is shown with its age.
        seen = "sees" if unsure_s is None else "saw"
        ago = "" if unsure_s is None else f" {unsure_s:.0f} s ago"
        parts.append(f"{watch} {seen} {ready} ready endpoints{ago}")
    elif unsure_s is not None:
        parts.append(f"{watch} has seen nothing for {unsure_s:.0f} s and bounds nothing")
    whole = _capitalize((", " if source == "watch" else "; ").join(parts))
    return " ".join(filter(None, [f"{whole}." if whole else "", budget.capacity_note]))


def _format_capacity_source(status: Status) -> str:
    source, per_endpoint = str(status.budget.max_sys_source), status.budget.per_endpoint
    if source == "setting" and per_endpoint is not None:
        return f"budget.per_endpoint, {per_endpoint:g}, × ready endpoints"
    return CAPACITY_SOURCES.get(source, source)


def _format_readings(status: Status) -> list[str]:
    """Return a line for each reading, and one with the values of the series behind them."""
    readings = status.signals.readings
    lines = [
        f"Reading {each.signal}, {each.age_s:.1f} s old, from {each.source}: "
        f"F_SYS {each.f_sys:.3f}, F_EPP {each.f_epp:.3f} of {each.max_sys:g} requests"
        for each in readings
    ]
    series = {name: value for each in readings for name, value in each.raw.items()}
    if series:
        lines.append(f"Made of: {', '.join(f'{name} {value:g}' for name, value in series.items())}")
    return lines


def _format_rate(status: Status) -> str:
    """Return the rate, and the time that the pending requests take at this rate. Empty if not known."""
    rate, pending = status.queue.service_rate, status.queue.pending
    if not rate or not pending:
        return ""
    return (
        f"Rate: {rate:.3g} requests per second; what waits takes {format_duration(pending / rate)} at that."
    )


def _format_deadlines(status: Status) -> str:
    queue = status.queue
    if not queue.pending or queue.earliest_deadline_s is None:
        return ""
    # earliest_deadline_s is relative to now, and negative if it has passed.
    earliest = format_time_until(queue.earliest_deadline_s, 0.0)
    risk = "not known how many are at risk" if queue.at_risk is None else f"{queue.at_risk} at risk"
    rate = queue.service_rate
    ended = "" if rate is None else f" while {rate:.3g} requests end per second"
    return f"Deadlines: the earliest {earliest}; {risk}{ended}."


def _format_realtime_impact(status: Status) -> str:
    """Return the latencies of realtime requests, with the share of the capacity that batch work used."""
    impact = status.impact
    latencies = (
        ("first token", impact.ttft_p50_s, impact.ttft_p95_s),
        ("each further token", impact.tpot_p50_s, impact.tpot_p95_s),
    )
    values = [
        f"{name} {median_s * 1000:.0f} ms median, {p95_s * 1000:.0f} ms 95 %"
        for name, median_s, p95_s in latencies
        if median_s is not None and p95_s is not None
    ]
    if not values:
        problem = impact.impact_problem
        return f"Impact on realtime: not known: {problem}" if problem else ""
    scope = "realtime alone" if impact.impact_scope == "realtime" else "all requests, batch requests included"
    share = impact.batch_share
    held = "" if share is None else f", while batch held {share:.0%} of the capacity"
    return f"Impact on realtime, last 5 minutes: {'; '.join(values)}; of {scope}{held}."


def _format_replicas(status: Status) -> list[str]:
    return [
        f"Replica {each.owner}{' (this one)' if each.owner == status.process.owner else ''}: "
        f"{each.leases} in flight{_format_last_contact(status, each)}"
        for each in status.queue.replicas
    ]


def _format_last_contact(status: Status, replica: ReplicaStatus) -> str:
    """Return the time since the last heartbeat of a replica, if it is known.

    Replicas send their heartbeats through the queue.
    """
    if status.queue.queue_problem:
        return " when the queue was last read"
    return "" if replica.silent_s is None else f", last heard of {replica.silent_s:.1f} s ago"
