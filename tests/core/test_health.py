"""The health of a dispatcher says whether work gets done, and if not, why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.recent_attempts import MIN_FAILURES, RECENT_S, UnansweredAttempts
from dispatcher.core.health import (
    MAX_COUNTS_AGE_S,
    MIN_FAILING_S,
    RULES,
    SLOW_ANSWER_S,
    Assessment,
    Cause,
    Health,
    HealthFacts,
    HealthRecord,
    assess_health,
)
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.queue_counts import QueueCounts
from dispatcher.core.sequences.decisions import SequenceCounts

NOW = 1000.0
EMPTY = QueueCounts(pending=0, delayed=0, leased=0, dead=0)
WORK = QueueCounts(pending=40, delayed=0, leased=0, dead=0)
BUSY = QueueCounts(pending=40, delayed=0, leased=8, dead=0)
LATER = QueueCounts(pending=0, delayed=100, leased=0, dead=0)


def facts(reason: Reason = Reason.OPEN, counts: QueueCounts | None = BUSY, **more: Any) -> HealthFacts:
    return HealthFacts(now=NOW, reason=reason, counts=counts, counted_at=NOW - 1.0, **more)


def attempts(
    *, failed: int = 0, refused: int = 0, for_s: float = 300.0, newest_s: float = 1.0
) -> UnansweredAttempts:
    return UnansweredAttempts(NOW - for_s, NOW - newest_s, failed_count=failed, refused_count=refused)


ALL_REFUSED = attempts(refused=40)
ALL_FAILED = attempts(failed=40)

CASES = [
    (facts(), "working", "none", "8 requests are in flight, 40 requests wait."),
    (facts(Reason.FULL), "working", "none", "8 requests are in flight, 40 requests wait."),
    (facts(Reason.IDLE, EMPTY), "idle", "none", "No request waits, is delayed or is in flight."),
    (
        facts(Reason.IDLE, LATER),
        "waiting",
        "retries",
        "100 requests wait for the next attempt after a failure or a refusal.",
    ),
    (
        facts(Reason.IDLE, LATER, unanswered_attempts=ALL_REFUSED),
        "failing",
        "refusals",
        "The gateway refuses every request as overloaded, 0 requests wait and 100 wait for a retry.",
    ),
    (
        facts(Reason.BACKPRESSURE, LATER, unanswered_attempts=attempts(refused=40, for_s=30.0)),
        "waiting",
        "refusals",
        "The gateway refuses every request as overloaded, 0 requests wait and 100 wait for a retry.",
    ),
    (
        facts(
            Reason.FULL,
            BUSY,
            running_count=8,
            unanswered_attempts=ALL_FAILED,
            has_only_failures=True,
            failure_summary="Of the last 20 attempts 20 failed: 500 (20)",
        ),
        "failing",
        "failures",
        "Every attempt fails. Of the last 20 attempts 20 failed: 500 (20); 40 requests wait.",
    ),
    (
        facts(Reason.FULL, failure_summary="Of the last 20 attempts 10 failed: 500 (10)"),
        "degraded",
        "failures",
        "Of the last 20 attempts 10 failed: 500 (10); 40 requests wait.",
    ),
    (
        facts(rejection_summary="Of the last 20 answers 20 rejected their request: 404 (20)"),
        "degraded",
        "rejections",
        "Of the last 20 answers 20 rejected their request: 404 (20); 40 requests wait.",
    ),
    (
        facts(Reason.QUEUE_UNREACHABLE, None, queue_problem="connection refused"),
        "failing",
        "queue",
        "The queue cannot be used: connection refused. How many requests wait is not known.",
    ),
    (facts(counts=None), "unknown", "starting", "The requests in the queue are not counted yet."),
    (
        facts(Reason.STARTING, WORK, reason_detail="no reading yet of saturation"),
        "unknown",
        "starting",
        "The dispatcher is starting: no reading yet of saturation.",
    ),
    (
        facts(Reason.STARTING, WORK, signals_problem="connection refused"),
        "failing",
        "signals",
        "The signals cannot be read: connection refused. Nothing more is sent, 40 requests wait.",
    ),
    (
        facts(Reason.UNREADABLE, WORK, reason_detail="HTTP 503", signals_problem="HTTP 503"),
        "failing",
        "signals",
        "The signals cannot be read: HTTP 503. Nothing more is sent, 40 requests wait.",
    ),
    (
        facts(Reason.STALE, EMPTY, reason_detail="the newest sample of saturation is 40.0 s old"),
        "degraded",
        "signals",
        (
            "The signals are too old: the newest sample of saturation is 40.0 s old. "
            "No request waits, and none would be sent."
        ),
    ),
    (
        facts(Reason.NO_ENDPOINTS, WORK),
        "failing",
        "endpoints",
        "The pool has no ready endpoint. Nothing more is sent, 40 requests wait.",
    ),
    (
        facts(Reason.GATEWAY_UNREACHABLE, LATER, reason_detail="401: set gateway.token_file"),
        "failing",
        "gateway",
        (
            "The gateway cannot be reached: 401: set gateway.token_file. "
            "Nothing more is sent, 0 requests wait and 100 wait for a retry."
        ),
    ),
    (
        facts(Reason.PAUSED, WORK, reason_detail="by an operator"),
        "waiting",
        "paused",
        "The queue is paused by an operator, 40 requests wait.",
    ),
    (
        facts(Reason.DRAINING, BUSY, running_count=1),
        "waiting",
        "draining",
        "The dispatcher is shutting down, 1 request is in flight.",
    ),
    (
        facts(is_observing=True),
        "waiting",
        "observing",
        "This dispatcher only observes and sends nothing, 40 requests wait.",
    ),
    (
        facts(signals_problem="HTTP 503"),
        "degraded",
        "signals",
        "The signals cannot be read: HTTP 503. The gate closes soon.",
    ),
    (
        facts(running_count=8, answered_at=NOW - SLOW_ANSWER_S - 1, median_duration_s=0.5),
        "degraded",
        "slow",
        "No answer has come for more than 60 s, where requests usually take 0.5 s: 8 requests are in flight.",
    ),
    (
        facts(Reason.NO_ROOM, WORK),
        "waiting",
        "room",
        "The pool has no room for batch work, 40 requests wait.",
    ),
    (
        facts(Reason.BACKPRESSURE, WORK),
        "waiting",
        "refusals",
        "The gateway refused a request as overloaded, 40 requests wait.",
    ),
    (
        facts(Reason.OPEN, WORK, reason_detail="a newer reading leaves a limit of 3"),
        "waiting",
        "room",
        "The queue gives no request: a newer reading leaves a limit of 3.",
    ),
    (
        facts(
            Reason.IDLE,
            QueueCounts(5, 0, 0, 0, waiting_for_model=5),
            model_problem="no endpoint serves llama",
        ),
        "waiting",
        "models",
        "No endpoint serves llama.",
    ),
    (
        facts(Reason.IDLE, QueueCounts(1, 0, 0, 0, sequences=SequenceCounts(waiting=1))),
        "waiting",
        "sequences",
        "1 request waits for a turn in a sequence.",
    ),
    (facts(Reason.OPEN, WORK), "working", "none", "Requests are about to be sent, 40 requests wait."),
]


@pytest.mark.parametrize(("seen", "health", "cause", "sentence"), CASES)
def test_health_of_each_situation(seen: HealthFacts, health: str, cause: str, sentence: str) -> None:
    assert assess_health(seen) == Assessment(Health(health), Cause(cause), sentence)


def test_every_health_cause_and_rule_occurs_in_a_case() -> None:
    found = [assess_health(case[0]) for case in CASES]
    assert {each.health for each in found} == set(Health)
    assert {each.cause for each in found} == set(Cause)
    deciding = {
        next((rule for rule in RULES if rule(seen, seen.counts)), None) for seen, *_ in CASES if seen.counts
    }
    assert deciding == {*RULES, None}, "None: requests are about to be sent"


def test_counts_that_are_too_old_are_not_believed() -> None:
    seen = HealthFacts(NOW, Reason.IDLE, counts=EMPTY, counted_at=NOW - MAX_COUNTS_AGE_S - 1)
    assert (assess_health(seen).health, assess_health(seen).cause) == (Health.UNKNOWN, Cause.QUEUE)


def test_few_refusals_while_requests_run_are_no_fault() -> None:
    for unanswered in (attempts(refused=1), attempts(refused=40, for_s=MIN_FAILING_S - 1)):
        assert assess_health(facts(running_count=8, unanswered_attempts=unanswered)).health is Health.WORKING
    long = facts(running_count=8, unanswered_attempts=ALL_REFUSED, mean_duration_s=600.0)
    assert assess_health(long).health is Health.WORKING, "the requests that fill the pool take as long"


def test_failures_of_long_ago_say_nothing_of_now() -> None:
    old = attempts(refused=MIN_FAILURES, newest_s=RECENT_S + 1)
    assert assess_health(facts(unanswered_attempts=old)).health is Health.WORKING, (
        "other replicas have sent the rest"
    )


def test_some_failures_in_a_row_are_not_all() -> None:
    seen = facts(
        unanswered_attempts=attempts(failed=MIN_FAILURES),
        failure_summary="Of the last 20 attempts 9 failed: 500 (9)",
    )
    assert assess_health(seen).health is Health.DEGRADED
    burst = attempts(failed=40, for_s=MIN_FAILING_S - 1)
    seen = facts(
        unanswered_attempts=burst,
        has_only_failures=True,
        failure_summary="Of the last 20 attempts 20 failed: 500 (20)",
    )
    assert assess_health(seen).health is Health.DEGRADED, "these may all be retries"


def test_slow_answers_are_measured_by_what_is_usual() -> None:
    assert (
        assess_health(facts(running_count=8, answered_at=NOW - 300, median_duration_s=60.0)).health
        is Health.WORKING
    )
    assert (
        assess_health(facts(running_count=8, answered_at=NOW - 601, median_duration_s=60.0)).cause
        is Cause.SLOW
    )


counts = st.none() | st.builds(
    QueueCounts,
    *[st.integers(0, 10)] * 4,
    waiting_for_model=st.integers(0, 3),
    sequences=st.builds(SequenceCounts, waiting=st.integers(0, 3)),
)
situations = st.builds(
    HealthFacts,
    now=st.just(NOW),
    reason=st.sampled_from(Reason),
    reason_detail=st.sampled_from(["", "why"]),
    is_observing=st.booleans(),
    queue_problem=st.sampled_from([None, "away"]),
    signals_problem=st.sampled_from([None, "away"]),
    counts=counts,
    counted_at=st.none() | st.floats(NOW - 30, NOW),
    running_count=st.integers(0, 3),
    unanswered_attempts=st.none() | st.builds(attempts, failed=st.integers(0, 9), refused=st.integers(0, 9)),
    has_only_failures=st.booleans(),
    failure_summary=st.sampled_from([None, "3 failed"]),
    rejection_summary=st.sampled_from([None, "3 rejected"]),
    answered_at=st.none() | st.floats(0, NOW),
    median_duration_s=st.floats(0, 100),
)


@given(situations)
def test_no_situation_is_called_better_than_it_is(seen: HealthFacts) -> None:
    found = assess_health(seen)
    assert found.sentence.endswith(".")
    waiting = seen.counts
    if found.health is Health.IDLE:
        assert waiting is not None
        assert (waiting.pending, waiting.delayed, waiting.leased) == (0, 0, 0)
    if found.health in (Health.IDLE, Health.WORKING):
        assert seen.queue_problem is None
        assert not seen.reason.is_closed or seen.reason in (Reason.BACKPRESSURE, Reason.NO_ROOM)
        assert seen.failure_summary is seen.rejection_summary is seen.signals_problem is None
    if found.health in (Health.DEGRADED, Health.FAILING, Health.UNKNOWN):
        assert found.cause.hint, "an operator is told where to look"


def test_change_is_logged_once_it_holds() -> None:
    record = HealthRecord()
    record.update_health(facts())
    assert record.since == NOW
    assert not record.take_change(NOW + 1), "it may last for a moment only"
    assert record.take_change(NOW + record.HOLD_S)
    assert not record.take_change(NOW + 60), "it is logged already"
    record.update_health(facts(Reason.NO_ROOM, WORK))
    assert record.current.health is Health.WAITING
