"""Health of one dispatcher: whether its work gets done, and if not, why.

    working    requests are answered, or are in flight
    idle       no request waits, is delayed or is in flight
    waiting    requests wait for a reason that is no fault: no room in the pool, an operator, a model
    degraded   work gets done, but a part of it fails; or a fault would stop the next request
    failing    requests wait, and a fault stops all of them
    unknown    the dispatcher does not know yet, or no longer, whether requests wait

The gate's reason (`Reason`) says what may be sent now. The health also says how sent requests ended: the gate
stays open for a gateway that answers 500 to everything. `assess_health` checks the rules in their order, and
the first that applies decides. The sentences contain no ages of their own, so that they rarely change while
the situation does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from dispatcher.core.gateway.recent_attempts import LEAST, RECENT_S, UnansweredTries
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.queue_counts import Counts

COUNTED_WITHIN_S = 15.0
"""Maximum age of the counts of the queue. They are renewed each second."""
FAILS_S = 10.0
"""Time for which every attempt must have failed or been refused. In less time, many retries may follow each
other."""
REFUSED_S = 60.0
"""Time for which a gateway may refuse every attempt before that is a fault and not a busy pool."""
SILENT_S = 60.0
"""Time without an answer after which the answers count as slow, if they usually come within a tenth of it."""


class Health(StrEnum):
    """State of the work of one dispatcher."""

    WORKING = "working"
    IDLE = "idle"
    WAITING = "waiting"
    DEGRADED = "degraded"
    FAILING = "failing"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """Cause of a health."""

    look_at: str

    def __new__(cls, value: str, look_at: str = "") -> Cause:
        cause = str.__new__(cls, value)
        cause._value_, cause.look_at = value, look_at
        return cause

    NONE = ("none",)
    STARTING = ("starting", "the log of the dispatcher, if this lasts for more than a minute")
    DRAINING = ("draining",)
    QUEUE = ("queue", "the Redis server of queue.url, its memory, its disk and its log")
    SIGNALS = ("signals", "`batch-dispatcher check`, and the metrics of the endpoint picker")
    ENDPOINTS = ("endpoints", "the pods of the pool: `kubectl get pods`")
    GATEWAY = ("gateway", "gateway.url, and the log of the inference gateway")
    FAILURES = (
        "failures",
        "the logs of gateway and model servers, and `batch-dispatcher dead list`",
    )
    REFUSALS = (
        "refusals",
        "flow control, rate limits and quotas of the gateway, and the load of the pool",
    )
    REJECTIONS = (
        "rejections",
        "results with a status of 4xx: model names, paths and bodies of requests",
    )
    SLOW = ("slow", "the load of the model servers, and the log of the gateway")
    PAUSED = ("paused", "`batch-dispatcher resume`, when the requests are to be sent")
    OBSERVING = ("observing", "`batch-dispatcher explain`; without observe this dispatcher sends requests")
    ROOM = ("room", "`batch-dispatcher explain`, and the traffic that is not batch work")
    MODELS = ("models", "`batch-dispatcher models list`")
    SEQUENCES = ("sequences", "`batch-dispatcher sequences list`")
    RETRIES = ("retries", "`batch-dispatcher list`, which says what the last tries came to")


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """Facts from which the health is computed."""

    now: float
    reason: Reason
    because: str = ""
    """Details of the gate's reason."""
    observing: bool = False
    queue_problem: str | None = None
    signals_problem: str | None = None
    """Reason why the signals cannot be read. `None` while they can."""
    counts: Counts | None = None
    counted_at: float | None = None
    models_why: str = ""
    """Reason why the model that most requests wait for cannot be used."""
    running: int = 0
    """Requests of this process in flight."""
    unanswered: UnansweredTries | None = None
    all_failed: bool = False
    """True if none of the last attempts was answered."""
    failures: str | None = None
    """Sentence about the last attempts that failed. `None` if few did."""
    rejections: str | None = None
    """Sentence about the last answers that rejected their requests. `None` if few did."""
    answered_at: float | None = None
    """Time of the last answer to an attempt."""
    usual_s: float = 0.0
    """Median duration of an answered attempt. 0 if it is not known."""
    mean_s: float = 0.0
    """Mean duration of the attempts, with those in flight. 0 if it is not known."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """A health with its cause."""

    health: Health
    cause: Cause
    sentence: str


Rule = Callable[[HealthFacts, Counts], Assessment | None]


def assess(facts: HealthFacts) -> Assessment:
    """Return the health that follows from the facts."""
    if facts.reason is Reason.DRAINING:
        return Assessment(
            Health.WAITING, Cause.DRAINING, f"The dispatcher is shutting down, {_running(facts.running)}."
        )
    # The rules below need counts of the queue, so a queue that cannot be read decides first.
    if facts.queue_problem is not None:
        sentence = f"The queue cannot be used: {facts.queue_problem}. How many requests wait is not known."
        return Assessment(Health.FAILING, Cause.QUEUE, sentence)
    if facts.counts is None or facts.counted_at is None:
        return Assessment(Health.UNKNOWN, Cause.STARTING, "The requests in the queue are not counted yet.")
    if facts.now - facts.counted_at > COUNTED_WITHIN_S:
        return Assessment(Health.UNKNOWN, Cause.QUEUE, "The queue does not answer: its counts are too old.")
    for rule in RULES:
        if (found := rule(facts, facts.counts)) is not None:
            return found
    return _about_to_send(facts, facts.counts)


# ── the rules, in their order ───────────────────────────────────────────────────────────────────────────────


def _starting(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if facts.reason is not Reason.STARTING or facts.signals_problem is not None:
        return None
    return Assessment(Health.UNKNOWN, Cause.STARTING, f"The dispatcher is starting: {facts.because}.")


_FAULTS = {
    Reason.STARTING: (Cause.SIGNALS, "The signals cannot be read"),
    Reason.UNREADABLE: (Cause.SIGNALS, "The signals cannot be read"),
    Reason.STALE: (Cause.SIGNALS, "The signals are too old"),
    Reason.IMPLAUSIBLE: (Cause.SIGNALS, "The signals cannot be true"),
    Reason.NO_ENDPOINTS: (Cause.ENDPOINTS, "The pool has no ready endpoint"),
    Reason.GATEWAY_UNREACHABLE: (Cause.GATEWAY, "The gateway cannot be reached"),
}
"""Reasons of a closed gate that are faults, with their cause and text."""


def _closed_by_fault(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if facts.reason not in _FAULTS:
        return None
    cause, what = _FAULTS[facts.reason]
    because = facts.signals_problem if facts.reason is Reason.STARTING else facts.because
    what = f"{what}: {because}" if because else what
    if _unfinished(queue):
        return Assessment(Health.FAILING, cause, f"{what}. Nothing more is sent, {_waits(queue)}.")
    # Without waiting requests the fault stops nothing yet.
    return Assessment(Health.DEGRADED, cause, f"{what}. No request waits, and none would be sent.")


def _paused(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if facts.reason is not Reason.PAUSED:
        return None
    return Assessment(Health.WAITING, Cause.PAUSED, f"The queue is paused {facts.because}, {_waits(queue)}.")


def _observing(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if not facts.observing:
        return None
    sentence = f"This dispatcher only observes and sends nothing, {_waits(queue)}."
    return Assessment(Health.WAITING, Cause.OBSERVING, sentence)


def _nothing_answered(facts: HealthFacts, queue: Counts) -> Assessment | None:
    """Return the health if no recent attempt was answered."""
    tries = facts.unanswered
    if tries is None or facts.now - tries.newest > RECENT_S or not _unfinished(queue):
        return None
    if not tries.failed:
        return _all_refused(facts, tries, queue)
    if not facts.all_failed or facts.now - tries.since < FAILS_S:
        return None
    refused = f", and it refused {tries.refused}" if tries.refused else ""
    sentence = f"Every try fails. {facts.failures}{refused}; {_waits(queue)}."
    return Assessment(Health.FAILING, Cause.FAILURES, sentence)


def _all_refused(facts: HealthFacts, tries: UnansweredTries, queue: Counts) -> Assessment | None:
    # A busy pool also refuses all new requests, for as long as those in flight take. The limit is therefore
    # at least twice their mean duration.
    lasts_s, busy_s = facts.now - tries.since, 2 * facts.mean_s
    if tries.count < LEAST or lasts_s < max(FAILS_S, busy_s):
        return None
    health = Health.FAILING if lasts_s >= max(REFUSED_S, busy_s) else Health.WAITING
    sentence = f"The gateway refuses every request as overloaded, {_waits(queue)}."
    return Assessment(health, Cause.REFUSALS, sentence)


def _some_fail(facts: HealthFacts, queue: Counts) -> Assessment | None:
    for cause, what in ((Cause.FAILURES, facts.failures), (Cause.REJECTIONS, facts.rejections)):
        if what is not None:
            dead = f" and {queue.dead:,} in all are dead" if queue.dead else ""
            return Assessment(Health.DEGRADED, cause, f"{what}; {_waits(queue)}{dead}.")
    return None


def _signals_fail(facts: HealthFacts, queue: Counts) -> Assessment | None:
    """Return the health if the signals cannot be read, but the gate is still open on earlier readings."""
    if facts.signals_problem is None:
        return None
    sentence = f"The signals cannot be read: {facts.signals_problem}. The gate closes soon."
    return Assessment(Health.DEGRADED, Cause.SIGNALS, sentence)


def _slow(facts: HealthFacts, queue: Counts) -> Assessment | None:
    """Return the health if requests run and their answers are long overdue."""
    if not facts.running or facts.answered_at is None or not facts.usual_s:
        return None
    if facts.now - facts.answered_at < max(SILENT_S, 10 * facts.usual_s):
        return None
    sentence = (
        f"No answer has come for more than {max(SILENT_S, 10 * facts.usual_s):.0f} s, where requests usually "
        f"take {facts.usual_s:.2g} s: {_running(facts.running)}."
    )
    return Assessment(Health.DEGRADED, Cause.SLOW, sentence)


def _working(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if not queue.leased and not facts.running:
        return None
    held = f"; {facts.models_why}" if queue.awaiting and facts.models_why else ""
    in_flight = max(queue.leased, facts.running)
    return Assessment(Health.WORKING, Cause.NONE, f"{_running(in_flight)}, {_waits(queue)}{held}.")


def _idle(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if _unfinished(queue):
        return None
    return Assessment(Health.IDLE, Cause.NONE, "No request waits, is delayed or is in flight.")


def _held_back(facts: HealthFacts, queue: Counts) -> Assessment | None:
    """Return the health if requests wait, but none of them can be claimed."""
    if queue.claimable > 0:
        return None
    if queue.awaiting:
        why = facts.models_why or f"{_requests(queue.awaiting, 'waits', 'wait')} for a model"
        return Assessment(Health.WAITING, Cause.MODELS, f"{why[0].upper()}{why[1:]}.")
    if queue.sequences.waiting:
        why = f"{_requests(queue.sequences.waiting, 'waits', 'wait')} for a turn in a sequence"
        return Assessment(Health.WAITING, Cause.SEQUENCES, f"{why}.")
    why = f"{_requests(queue.delayed, 'waits', 'wait')} for the next try after a failure or a refusal"
    return Assessment(Health.WAITING, Cause.RETRIES, f"{why}.")


_NO_ROOM = (Reason.NO_ROOM, Reason.SATURATED, Reason.FULL)


def _no_room(facts: HealthFacts, queue: Counts) -> Assessment | None:
    if facts.reason is Reason.BACKPRESSURE:
        sentence = f"The gateway refused a request as overloaded, {_waits(queue)}."
        return Assessment(Health.WAITING, Cause.REFUSALS, sentence)
    if facts.reason in _NO_ROOM:
        return Assessment(
            Health.WAITING, Cause.ROOM, f"The pool has no room for batch work, {_waits(queue)}."
        )
    if facts.because:
        return Assessment(Health.WAITING, Cause.ROOM, f"The queue gives no request: {facts.because}.")
    return None


def _about_to_send(facts: HealthFacts, queue: Counts) -> Assessment:
    return Assessment(Health.WORKING, Cause.NONE, f"Requests are about to be sent, {_waits(queue)}.")


RULES: tuple[Rule, ...] = (
    _starting,
    _closed_by_fault,
    _paused,
    _observing,
    _nothing_answered,
    _some_fail,
    _signals_fail,
    _slow,
    _working,
    _idle,
    _held_back,
    _no_room,
)


def _unfinished(queue: Counts) -> int:
    """Return the number of requests in the queue that have no result yet."""
    return queue.pending + queue.delayed + queue.leased


def _requests(count: int, one: str, more: str) -> str:
    return f"{count:,} {'request' if count == 1 else 'requests'} {one if count == 1 else more}"


def _running(count: int) -> str:
    return _requests(count, "is in flight", "are in flight")


def _waits(queue: Counts) -> str:
    parts = [_requests(queue.pending, "waits", "wait")]
    if queue.delayed:
        parts.append(f"{queue.delayed:,} {'waits' if queue.delayed == 1 else 'wait'} for a retry")
    return " and ".join(parts)


_FAULTY = (Health.DEGRADED, Health.FAILING)


class HealthRecord:
    """Health of one process over time: since when it holds, and which changes are logged."""

    HOLDS_S = 5.0
    """Time for which a health must hold before it is logged, and for which a fault must be absent before it
    ends."""

    def __init__(self) -> None:
        self.newest = Assessment(Health.UNKNOWN, Cause.STARTING, "The dispatcher is starting.")
        self.since: float | None = None
        """Time since which this health and this cause hold."""
        self._faulty_at = float("-inf")
        self._logged: tuple[Health, Cause] = (Health.UNKNOWN, Cause.STARTING)

    def look(self, facts: HealthFacts) -> Assessment:
        """Compute the health and return it. A fault stays until it was absent for HOLD_S, because if half of
        the attempts fail, the last twenty of them may look fine for a moment."""
        newest = assess(facts)
        if newest.health in _FAULTY:
            self._faulty_at = facts.now
        elif self.newest.health in _FAULTY and facts.now - self._faulty_at < self.HOLDS_S:
            return self.newest
        if self.since is None or (newest.health, newest.cause) != (self.newest.health, self.newest.cause):
            self.since = facts.now
        self.newest = newest
        return newest

    def changed(self, now: float) -> bool:
        """Return whether the newest health has to be logged: it differs from the last one logged, and has
        held for HOLD_S."""
        state = (self.newest.health, self.newest.cause)
        if state == self._logged or self.since is None or now - self.since < self.HOLDS_S:
            return False
        self._logged = state
        return True
