"""Health of one dispatcher: whether its work gets done, and if not, why.

    working    requests are answered, or are in flight
    idle       no request waits, is delayed or is in flight
    waiting    requests wait for a reason that is no fault: no room in the pool, an operator, a feature
    degraded   work gets done, but a part of it fails; or a fault would stop the next request
    failing    requests wait, and a fault stops all of them
    unknown    the dispatcher does not know yet, or no longer, whether requests wait

The gate's reason (`Reason`) says what may be sent now. The health also says how sent requests ended: the gate
stays open for a gateway that answers 500 to everything. `assess_health` checks the rules in their order, and
the first that applies decides. The sentences contain no ages of their own, so that they rarely change while
the situation does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.limit.budget import Reason
from dispatcher.requests.outcomes.recent_attempts import MIN_FAILURES, RECENT_S, UnansweredAttempts
from dispatcher.requests.queue_counts import QueueCounts

MAX_COUNTS_AGE_S = 15.0
"""Maximum age of the counts of the queue. They are renewed each second."""
MIN_FAILING_S = 10.0
"""Time for which every attempt must have failed or been refused. In less time, many retries may follow each
other."""
MIN_REFUSING_S = 60.0
"""Time for which a gateway may refuse every attempt before that is a fault and not a busy pool."""
SLOW_ANSWER_S = 60.0
"""Time without an answer after which the answers count as slow, if they usually come within a tenth of it."""


class Health(StrEnum):
    """State of the work of one dispatcher."""

    WORKING = "working"
    IDLE = "idle"
    WAITING = "waiting"
    DEGRADED = "degraded"
    FAILING = "failing"
    UNKNOWN = "unknown"


def describe_pause(by: str, why: str) -> str:
    """Return the clause about a queue that an operator has paused, with the name and the reason if known."""
    return f"{Reason.PAUSED.meaning}{f' by {by}' if by else ''}{f': {why}' if why else ''}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a health."""

    name: str
    hint: str = field(default="", compare=False)
    """Place where an operator looks first. Empty if nothing needs attention."""


class Causes:
    """Causes that do not depend on a feature."""

    NONE = Cause("none")
    STARTING = Cause("starting", "the log of the dispatcher, if this lasts for more than a minute")
    DRAINING = Cause("draining")
    QUEUE = Cause("queue", "the Redis server of queue.url, its memory, its disk and its log")
    SIGNALS = Cause("signals", "`batch-dispatcher check`, and the metrics of the endpoint picker")
    ENDPOINTS = Cause("endpoints", "the pods of the pool: `kubectl get pods`")
    GATEWAY = Cause("gateway", "gateway.url, and the log of the inference gateway")
    FAILURES = Cause(
        "failures",
        "the logs of gateway and model servers, and `batch-dispatcher list --state dead`",
    )
    REFUSALS = Cause(
        "refusals",
        "flow control, rate limits and quotas of the gateway, and the load of the pool",
    )
    REJECTIONS = Cause(
        "rejections",
        "results with a status of 4xx: model names, paths and bodies of requests",
    )
    SLOW = Cause("slow", "the load of the model servers, and the log of the gateway")
    PAUSED = Cause("paused", "`batch-dispatcher resume`, when the requests are to be sent")
    OBSERVING = Cause(
        "observing", "`batch-dispatcher explain`; without observe this dispatcher sends requests"
    )
    ROOM = Cause("room", "`batch-dispatcher explain`, and the traffic that is not batch work")
    RETRIES = Cause("retries", "`batch-dispatcher list`, which shows how the last attempts ended")


@dataclass(frozen=True, slots=True)
class WaitingReason:
    """Reason of a feature why requests in the queue cannot be claimed."""

    cause: Cause
    why: str
    is_problem: bool = False
    """True if the reason is shown while other requests are in flight."""


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """Facts from which the health is computed."""

    now: float
    reason: Reason
    reason_detail: str = ""
    """Details of the gate's reason."""
    is_observing: bool = False
    queue_problem: str | None = None
    signals_problem: str | None = None
    """Reason why the signals cannot be read. `None` while they can."""
    counts: QueueCounts | None = None
    counted_at: float | None = None
    waiting_reasons: Sequence[WaitingReason] = ()
    """Reasons of features why requests wait."""
    running_count: int = 0
    """Requests of this process in flight."""
    unanswered_attempts: UnansweredAttempts | None = None
    has_only_failures: bool = False
    """True if none of the last attempts was answered."""
    failure_summary: str | None = None
    """Sentence about the last attempts that failed. `None` if few did."""
    rejection_summary: str | None = None
    """Sentence about the last answers that rejected their requests. `None` if few did."""
    answered_at: float | None = None
    """Time of the last answer to an attempt."""
    median_duration_s: float = 0.0
    """Median duration of an answered attempt. 0 if it is not known."""
    mean_duration_s: float = 0.0
    """Mean duration of the attempts, with those in flight. 0 if it is not known."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """A health with its cause."""

    health: Health
    cause: Cause
    sentence: str


Rule = Callable[[HealthFacts, QueueCounts], Assessment | None]


def assess_health(facts: HealthFacts) -> Assessment:
    """Return the health that follows from the facts."""
    if facts.reason is Reason.DRAINING:
        return Assessment(
            Health.WAITING,
            Causes.DRAINING,
            f"{_capitalize(facts.reason.meaning)}, {_format_in_flight(facts.running_count)}.",
        )
    # The rules below need counts of the queue, so a queue that cannot be read decides first.
    if facts.queue_problem is not None:
        what = _capitalize(Reason.QUEUE_UNREACHABLE.meaning)
        sentence = f"{what}: {facts.queue_problem}. How many requests wait is not known."
        return Assessment(Health.FAILING, Causes.QUEUE, sentence)
    if facts.counts is None or facts.counted_at is None:
        return Assessment(Health.UNKNOWN, Causes.STARTING, "The requests in the queue are not counted yet.")
    if facts.now - facts.counted_at > MAX_COUNTS_AGE_S:
        return Assessment(Health.UNKNOWN, Causes.QUEUE, "The queue does not answer: its counts are too old.")
    for rule in RULES:
        if (assessment := rule(facts, facts.counts)) is not None:
            return assessment
    return _report_about_to_send(facts, facts.counts)


# ── the rules, in their order ───────────────────────────────────────────────────────────────────────────────


def _check_starting(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if facts.reason is not Reason.STARTING or facts.signals_problem is not None:
        return None
    return Assessment(Health.UNKNOWN, Causes.STARTING, f"The dispatcher is starting: {facts.reason_detail}.")


_FAULTS = {
    Reason.STARTING: Causes.SIGNALS,
    Reason.UNREADABLE: Causes.SIGNALS,
    Reason.STALE: Causes.SIGNALS,
    Reason.IMPLAUSIBLE: Causes.SIGNALS,
    Reason.NO_ENDPOINTS: Causes.ENDPOINTS,
    Reason.GATEWAY_UNREACHABLE: Causes.GATEWAY,
    Reason.GATEWAY_FAILING: Causes.GATEWAY,
}
"""Reasons of a closed gate that are faults, with their cause."""


def _check_closed_by_fault(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if facts.reason not in _FAULTS:
        return None
    cause, reason, because = _FAULTS[facts.reason], facts.reason, facts.reason_detail
    if reason is Reason.STARTING:  # a start that takes long because nothing can be read
        reason, because = Reason.UNREADABLE, facts.signals_problem or ""
    what = _capitalize(f"{reason.meaning}: {because}" if because else reason.meaning)
    if _count_unfinished(queue):
        return Assessment(Health.FAILING, cause, f"{what}. Nothing more is sent, {_format_waiting(queue)}.")
    # Without waiting requests the fault stops nothing yet.
    return Assessment(Health.DEGRADED, cause, f"{what}. No request waits, and none would be sent.")


def _check_paused(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if facts.reason is not Reason.PAUSED:
        return None
    what = _capitalize(f"{facts.reason.meaning} {facts.reason_detail}")
    return Assessment(Health.WAITING, Causes.PAUSED, f"{what}, {_format_waiting(queue)}.")


def _check_observing(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if not facts.is_observing:
        return None
    sentence = f"This dispatcher only observes and sends nothing, {_format_waiting(queue)}."
    return Assessment(Health.WAITING, Causes.OBSERVING, sentence)


def _check_unanswered(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    """Return the health if no recent attempt was answered."""
    attempts = facts.unanswered_attempts
    if attempts is None or facts.now - attempts.last_ended_at > RECENT_S or not _count_unfinished(queue):
        return None
    if not attempts.failed_count:
        return _check_all_refused(facts, attempts, queue)
    if not facts.has_only_failures or facts.now - attempts.first_ended_at < MIN_FAILING_S:
        return None
    refused = f", and it refused {attempts.refused_count}" if attempts.refused_count else ""
    sentence = f"Every attempt fails. {facts.failure_summary}{refused}; {_format_waiting(queue)}."
    return Assessment(Health.FAILING, Causes.FAILURES, sentence)


def _check_all_refused(
    facts: HealthFacts, attempts: UnansweredAttempts, queue: QueueCounts
) -> Assessment | None:
    # A busy pool also refuses all new requests, for as long as those in flight take. The limit is therefore
    # at least twice their mean duration.
    lasts_s, busy_s = facts.now - attempts.first_ended_at, 2 * facts.mean_duration_s
    if attempts.total_count < MIN_FAILURES or lasts_s < max(MIN_FAILING_S, busy_s):
        return None
    sentence = f"The gateway refuses every request as overloaded, {_format_waiting(queue)}."
    if lasts_s >= max(MIN_REFUSING_S, busy_s):
        return Assessment(Health.FAILING, Causes.REFUSALS, sentence)
    outlook = (
        "This counts as a busy pool at first, and as a fault if it lasts, "
        "because a rate limit or a quota does not end by itself."
    )
    return Assessment(Health.WAITING, Causes.REFUSALS, f"{sentence} {outlook}")


def _check_failures(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    for cause, what in (
        (Causes.FAILURES, facts.failure_summary),
        (Causes.REJECTIONS, facts.rejection_summary),
    ):
        if what is not None:
            dead = f" and {queue.dead:,} in all are dead" if queue.dead else ""
            return Assessment(Health.DEGRADED, cause, f"{what}; {_format_waiting(queue)}{dead}.")
    return None


def _check_signals(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    """Return the health if the signals cannot be read, but the gate is still open on earlier readings."""
    if facts.signals_problem is None:
        return None
    what = _capitalize(Reason.UNREADABLE.meaning)
    sentence = f"{what}: {facts.signals_problem}. The gate closes soon."
    return Assessment(Health.DEGRADED, Causes.SIGNALS, sentence)


def _check_slow_answers(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    """Return the health if requests run and their answers are long overdue."""
    if not facts.running_count or facts.answered_at is None or not facts.median_duration_s:
        return None
    if facts.now - facts.answered_at < max(SLOW_ANSWER_S, 10 * facts.median_duration_s):
        return None
    sentence = (
        f"No answer has come for more than {max(SLOW_ANSWER_S, 10 * facts.median_duration_s):.0f} s, "
        "where requests usually "
        f"take {facts.median_duration_s:.2g} s: {_format_in_flight(facts.running_count)}."
    )
    return Assessment(Health.DEGRADED, Causes.SLOW, sentence)


def _check_working(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if not queue.leased and not facts.running_count:
        return None
    problem = next((f"; {each.why}" for each in facts.waiting_reasons if each.is_problem), "")
    in_flight = max(queue.leased, facts.running_count)
    return Assessment(
        Health.WORKING,
        Causes.NONE,
        f"{_format_in_flight(in_flight)}, {_format_waiting(queue)}{problem}.",
    )


def _check_idle(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if _count_unfinished(queue):
        return None
    return Assessment(Health.IDLE, Causes.NONE, "No request waits, is delayed or is in flight.")


def _check_not_claimable(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    """Return the health if requests wait, but none of them can be claimed."""
    if queue.claimable_count > 0:
        return None
    if facts.waiting_reasons:
        # A problem is more important than what ends by itself.
        reason = max(facts.waiting_reasons, key=lambda each: each.is_problem)
        return Assessment(Health.WAITING, reason.cause, f"{_capitalize(reason.why)}.")
    why = (
        f"{_format_requests(queue.delayed, 'waits', 'wait')} for the next attempt after a failure or a "
        "refusal"
    )
    return Assessment(Health.WAITING, Causes.RETRIES, f"{why}.")


_NO_ROOM_REASONS = (Reason.NO_ROOM, Reason.SATURATED, Reason.FULL)


def _check_no_room(facts: HealthFacts, queue: QueueCounts) -> Assessment | None:
    if facts.reason is Reason.BACKPRESSURE or facts.reason in _NO_ROOM_REASONS:
        cause = Causes.REFUSALS if facts.reason is Reason.BACKPRESSURE else Causes.ROOM
        sentence = f"{_capitalize(facts.reason.meaning)}, {_format_waiting(queue)}."
        return Assessment(Health.WAITING, cause, sentence)
    if facts.reason_detail:
        return Assessment(Health.WAITING, Causes.ROOM, f"The queue gives no request: {facts.reason_detail}.")
    return None


def _report_about_to_send(facts: HealthFacts, queue: QueueCounts) -> Assessment:
    return Assessment(
        Health.WORKING, Causes.NONE, f"Requests are about to be sent, {_format_waiting(queue)}."
    )


RULES: tuple[Rule, ...] = (
    _check_starting,
    _check_closed_by_fault,
    _check_paused,
    _check_observing,
    _check_unanswered,
    _check_failures,
    _check_signals,
    _check_slow_answers,
    _check_working,
    _check_idle,
    _check_not_claimable,
    _check_no_room,
)


def _capitalize(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}"


def _count_unfinished(queue: QueueCounts) -> int:
    """Return the number of requests in the queue that have no result yet."""
    return queue.pending + queue.delayed + queue.leased


def _format_requests(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {'request' if count == 1 else 'requests'} {singular if count == 1 else plural}"


def _format_in_flight(count: int) -> str:
    return _format_requests(count, "is in flight", "are in flight")


def _format_waiting(queue: QueueCounts) -> str:
    parts = [_format_requests(queue.pending, "waits", "wait")]
    if queue.delayed:
        parts.append(f"{queue.delayed:,} {'waits' if queue.delayed == 1 else 'wait'} for a retry")
    return " and ".join(parts)


_FAULTY = (Health.DEGRADED, Health.FAILING)


class HealthRecord:
    """Health of one process over time: since when it holds, and which changes are logged."""

    HOLD_S = 5.0
    """Time for which a health must hold before it is logged, and for which a fault must be absent before it
    ends."""

    def __init__(self) -> None:
        self.current = Assessment(Health.UNKNOWN, Causes.STARTING, "The dispatcher is starting.")
        self.since: float | None = None
        """Time since which this health and this cause hold."""
        self._faulty_at = float("-inf")
        self._logged: tuple[Health, Cause] = (Health.UNKNOWN, Causes.STARTING)

    def update_health(self, facts: HealthFacts) -> Assessment:
        """Compute the health and return it. A fault stays until it was absent for HOLD_S, because if half of
        the attempts fail, the last twenty of them may look fine for a moment."""
        newest = assess_health(facts)
        if newest.health in _FAULTY:
            self._faulty_at = facts.now
        elif self.current.health in _FAULTY and facts.now - self._faulty_at < self.HOLD_S:
            return self.current
        if self.since is None or (newest.health, newest.cause) != (self.current.health, self.current.cause):
            self.since = facts.now
        self.current = newest
        return newest

    def take_change(self, now: float) -> bool:
        """Return whether the newest health has to be logged: it differs from the last one logged, and has
        held for HOLD_S."""
        state = (self.current.health, self.current.cause)
        if state == self._logged or self.since is None or now - self.since < self.HOLD_S:
            return False
        self._logged = state
        return True
