"""The health of a dispatcher says whether work gets done, and if not, why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.budget import Reason
from dispatcher.limit.health import (
    MAX_COUNTS_AGE_S,
    MIN_FAILING_S,
    MIN_REFUSING_S,
    RULES,
    SLOW_ANSWER_S,
    Assessment,
    Cause,
    Causes,
    Health,
    HealthFacts,
    HealthRecord,
    WaitingReason,
    assess_health,
)
from dispatcher.requests.outcomes.recent_attempts import MIN_FAILURES, RECENT_S, UnansweredAttempts
from dispatcher.requests.queue_counts import QueueCounts
from tests.markdown_pages import read_table_rows
from tests.paths import DOCS

NOW = 1000.0
EMPTY = QueueCounts(pending=0, delayed=0, leased=0, dead=0)
WAITING = QueueCounts(pending=40, delayed=0, leased=0, dead=0)
RUNNING = QueueCounts(pending=40, delayed=0, leased=8, dead=0)
DELAYED = QueueCounts(pending=0, delayed=100, leased=0, dead=0)


def make_facts(
    reason: Reason = Reason.OPEN, counts: QueueCounts | None = RUNNING, **more: Any
) -> HealthFacts:
    return HealthFacts(now=NOW, reason=reason, counts=counts, counted_at=NOW - 1.0, **more)


def make_attempts(
    *, failed: int = 0, refused: int = 0, for_s: float = 300.0, newest_s: float = 1.0
) -> UnansweredAttempts:
    return UnansweredAttempts(NOW - for_s, NOW - newest_s, failed_count=failed, refused_count=refused)


MODELS = Cause("models")
ALL_REFUSED = make_attempts(refused=40)
ALL_FAILED = make_attempts(failed=40)

CASES = [
    (make_facts(), "working", "none", "8 requests are in flight, 40 requests wait."),
    (make_facts(Reason.FULL), "working", "none", "8 requests are in flight, 40 requests wait."),
    (make_facts(Reason.IDLE, EMPTY), "idle", "none", "No request waits, is delayed or is in flight."),
    (
        make_facts(Reason.IDLE, DELAYED),
        "waiting",
        "retries",
        "100 requests wait for the next attempt after a failure or a refusal.",
    ),
    (
        make_facts(Reason.IDLE, DELAYED, unanswered_attempts=ALL_REFUSED),
        "failing",
        "refusals",
        "The gateway refuses every request as overloaded, 0 requests wait and 100 wait for a retry.",
    ),
    (
        make_facts(Reason.BACKPRESSURE, DELAYED, unanswered_attempts=make_attempts(refused=40, for_s=30.0)),
        "waiting",
        "refusals",
        (
            "The gateway refuses every request as overloaded, 0 requests wait and 100 wait for a retry. This "
            "counts as a busy pool at first, and as a fault if it lasts, "
            "because a rate limit or a quota does not end by itself."
        ),
    ),
    (
        make_facts(
            Reason.FULL,
            RUNNING,
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
        make_facts(Reason.FULL, failure_summary="Of the last 20 attempts 10 failed: 500 (10)"),
        "degraded",
        "failures",
        "Of the last 20 attempts 10 failed: 500 (10); 40 requests wait.",
    ),
    (
        make_facts(rejection_summary="Of the last 20 answers 20 rejected their request: 404 (20)"),
        "degraded",
        "rejections",
        "Of the last 20 answers 20 rejected their request: 404 (20); 40 requests wait.",
    ),
    (
        make_facts(Reason.QUEUE_UNREACHABLE, None, queue_problem="connection refused"),
        "failing",
        "queue",
        "The queue cannot be used: connection refused. How many requests wait is not known.",
    ),
    (make_facts(counts=None), "unknown", "starting", "The requests in the queue are not counted yet."),
    (
        make_facts(Reason.STARTING, WAITING, reason_detail="no reading yet of saturation"),
        "unknown",
        "starting",
        "The dispatcher is starting: no reading yet of saturation.",
    ),
    (
        make_facts(Reason.STARTING, WAITING, signals_problem="connection refused"),
        "failing",
        "signals",
        "The signals cannot be read: connection refused. Nothing more is sent, 40 requests wait.",
    ),
    (
        make_facts(Reason.UNREADABLE, WAITING, reason_detail="HTTP 503", signals_problem="HTTP 503"),
        "failing",
        "signals",
        "The signals cannot be read: HTTP 503. Nothing more is sent, 40 requests wait.",
    ),
    (
        make_facts(Reason.STALE, EMPTY, reason_detail="the newest sample of saturation is 40.0 s old"),
        "degraded",
        "signals",
        (
            "The signals are too old: the newest sample of saturation is 40.0 s old. "
            "No request waits, and none would be sent."
        ),
    ),
    (
        make_facts(Reason.NO_ENDPOINTS, WAITING),
        "failing",
        "endpoints",
        "The pool has no ready endpoint. Nothing more is sent, 40 requests wait.",
    ),
    (
        make_facts(Reason.GATEWAY_UNREACHABLE, DELAYED, reason_detail="connection refused"),
        "failing",
        "gateway",
        (
            "The gateway cannot be reached: connection refused. "
            "Nothing more is sent, 0 requests wait and 100 wait for a retry."
        ),
    ),
    (
        make_facts(Reason.GATEWAY_FAILING, DELAYED, reason_detail="401: set gateway.token_file"),
        "failing",
        "gateway",
        (
            "The gateway answers every request with an error: 401: set gateway.token_file. "
            "Nothing more is sent, 0 requests wait and 100 wait for a retry."
        ),
    ),
    (
        make_facts(Reason.PAUSED, WAITING, reason_detail="by an operator"),
        "waiting",
        "paused",
        "The queue is paused by an operator, 40 requests wait.",
    ),
    (
        make_facts(Reason.DRAINING, RUNNING, running_count=1),
        "waiting",
        "draining",
        "The dispatcher is shutting down, 1 request is in flight.",
    ),
    (
        make_facts(is_observing=True),
        "waiting",
        "observing",
        "This dispatcher only observes and sends nothing, 40 requests wait.",
    ),
    (
        make_facts(signals_problem="HTTP 503"),
        "degraded",
        "signals",
        "The signals cannot be read: HTTP 503. The gate closes soon.",
    ),
    (
        make_facts(running_count=8, answered_at=NOW - SLOW_ANSWER_S - 1, median_duration_s=0.5),
        "degraded",
        "slow",
        "No answer has come for more than 60 s, where requests usually take 0.5 s: 8 requests are in flight.",
    ),
    (
        make_facts(Reason.NO_ROOM, WAITING),
        "waiting",
        "room",
        "Realtime requests take everything but the reserve, 40 requests wait.",
    ),
    (
        make_facts(Reason.BACKPRESSURE, WAITING),
        "waiting",
        "refusals",
        "The gateway refused a request as overloaded, 40 requests wait.",
    ),
    (
        make_facts(Reason.OPEN, WAITING, reason_detail="a newer reading leaves a limit of 3"),
        "waiting",
        "room",
        "The queue gives no request: a newer reading leaves a limit of 3.",
    ),
    (
        make_facts(
            Reason.IDLE,
            QueueCounts(5, 0, 0, 0, closed=5),
            waiting_reasons=[
                WaitingReason(Cause("turns"), "5 requests wait for a turn"),
                WaitingReason(MODELS, "no endpoint serves llama", is_problem=True),
            ],
        ),
        "waiting",
        "models",
        "No endpoint serves llama.",
    ),
    (make_facts(Reason.OPEN, WAITING), "working", "none", "Requests are about to be sent, 40 requests wait."),
]


@pytest.mark.parametrize(("facts", "health", "cause", "sentence"), CASES)
def test_health_of_each_situation(facts: HealthFacts, health: str, cause: str, sentence: str) -> None:
    assert assess_health(facts) == Assessment(Health(health), Cause(cause), sentence)


def test_every_health_cause_and_rule_occurs_in_a_case() -> None:
    assessments = [assess_health(case[0]) for case in CASES]
    assert {assessment.health for assessment in assessments} == set(Health)
    known = {each for each in vars(Causes).values() if isinstance(each, Cause)}
    assert {assessment.cause for assessment in assessments} == known | {MODELS}
    deciding = {
        next((rule for rule in RULES if rule(facts, facts.counts)), None)
        for facts, *_ in CASES
        if facts.counts
    }
    assert deciding == {*RULES, None}, "the case that no rule decides: requests are about to be sent"


def test_health_is_unknown_if_the_counts_are_too_old() -> None:
    facts = HealthFacts(NOW, Reason.IDLE, counts=EMPTY, counted_at=NOW - MAX_COUNTS_AGE_S - 1)
    assert (assess_health(facts).health, assess_health(facts).cause) == (Health.UNKNOWN, Causes.QUEUE)


def test_few_refusals_while_requests_run_leave_the_health_at_working() -> None:
    for unanswered in (make_attempts(refused=1), make_attempts(refused=40, for_s=MIN_FAILING_S - 1)):
        assert (
            assess_health(make_facts(running_count=8, unanswered_attempts=unanswered)).health
            is Health.WORKING
        )
    long_requests = make_facts(running_count=8, unanswered_attempts=ALL_REFUSED, mean_duration_s=600.0)
    assert assess_health(long_requests).health is Health.WORKING, (
        "refusals are normal until the requests that fill the pool have ended"
    )


def test_old_failures_do_not_change_the_health() -> None:
    old_attempts = make_attempts(refused=MIN_FAILURES, newest_s=RECENT_S + 1)
    assert assess_health(make_facts(unanswered_attempts=old_attempts)).health is Health.WORKING, (
        "other replicas may have sent all requests since then"
    )


def test_some_failures_in_a_row_degrade_the_health_but_do_not_make_it_failing() -> None:
    facts = make_facts(
        unanswered_attempts=make_attempts(failed=MIN_FAILURES),
        failure_summary="Of the last 20 attempts 9 failed: 500 (9)",
    )
    assert assess_health(facts).health is Health.DEGRADED
    burst = make_attempts(failed=40, for_s=MIN_FAILING_S - 1)
    facts = make_facts(
        unanswered_attempts=burst,
        has_only_failures=True,
        failure_summary="Of the last 20 attempts 20 failed: 500 (20)",
    )
    assert assess_health(facts).health is Health.DEGRADED, "all of these attempts may be retries"


def test_answers_count_as_slow_relative_to_the_usual_duration() -> None:
    assert (
        assess_health(make_facts(running_count=8, answered_at=NOW - 300, median_duration_s=60.0)).health
        is Health.WORKING
    )
    assert (
        assess_health(make_facts(running_count=8, answered_at=NOW - 601, median_duration_s=60.0)).cause
        is Causes.SLOW
    )


@pytest.mark.parametrize(
    ("facts", "health"),
    [
        (HealthFacts(NOW, Reason.IDLE, counts=EMPTY, counted_at=NOW - MAX_COUNTS_AGE_S), Health.IDLE),
        (
            make_facts(
                unanswered_attempts=make_attempts(failed=40, newest_s=RECENT_S), has_only_failures=True
            ),
            Health.FAILING,
        ),
        (
            make_facts(
                unanswered_attempts=make_attempts(failed=40, for_s=MIN_FAILING_S), has_only_failures=True
            ),
            Health.FAILING,
        ),
        (
            make_facts(unanswered_attempts=make_attempts(refused=MIN_FAILURES, for_s=MIN_FAILING_S)),
            Health.WAITING,
        ),
        (
            make_facts(unanswered_attempts=make_attempts(refused=MIN_FAILURES, for_s=MIN_REFUSING_S)),
            Health.FAILING,
        ),
        (
            make_facts(running_count=8, answered_at=NOW - SLOW_ANSWER_S, median_duration_s=1.0),
            Health.DEGRADED,
        ),
    ],
    ids=["old counts", "last failure", "failures", "refusals", "long refusals", "slow answers"],
)
def test_each_limit_belongs_to_the_range_that_it_ends(facts: HealthFacts, health: Health) -> None:
    assert assess_health(facts).health is health


def test_problem_of_a_feature_is_named_while_other_requests_are_in_flight() -> None:
    problem = WaitingReason(MODELS, "model 'm' is not served", is_problem=True)
    assert problem.why in assess_health(make_facts(waiting_reasons=[problem])).sentence
    harmless = replace(problem, is_problem=False)
    assert assess_health(make_facts(waiting_reasons=[harmless])).sentence.endswith("40 requests wait.")


counts = st.none() | st.builds(
    QueueCounts,
    *[st.integers(0, 10)] * 4,
    closed=st.integers(0, 6),
)
any_facts = st.builds(
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
    unanswered_attempts=st.none()
    | st.builds(make_attempts, failed=st.integers(0, 9), refused=st.integers(0, 9)),
    has_only_failures=st.booleans(),
    failure_summary=st.sampled_from([None, "3 failed"]),
    rejection_summary=st.sampled_from([None, "3 rejected"]),
    answered_at=st.none() | st.floats(0, NOW),
    median_duration_s=st.floats(0, 100),
)


@given(any_facts)
def test_health_is_never_better_than_the_facts(facts: HealthFacts) -> None:
    assessment = assess_health(facts)
    assert assessment.sentence.endswith(".")
    queue_counts = facts.counts
    if assessment.health is Health.IDLE:
        assert queue_counts is not None
        assert (queue_counts.pending, queue_counts.delayed, queue_counts.leased) == (0, 0, 0)
    if assessment.health in (Health.IDLE, Health.WORKING):
        assert facts.queue_problem is None
        assert not facts.reason.is_closed or facts.reason in (Reason.BACKPRESSURE, Reason.NO_ROOM)
        assert facts.failure_summary is facts.rejection_summary is facts.signals_problem is None
    if assessment.health in (Health.DEGRADED, Health.FAILING, Health.UNKNOWN):
        assert assessment.cause.hint, "a hint says where to look"


def test_fault_stays_until_it_was_absent_for_five_seconds() -> None:
    record = HealthRecord()

    def update(at: float, *, is_faulty: bool) -> tuple[Health, float | None]:
        facts = make_facts(failure_summary="9 failed" if is_faulty else None)
        record.update_health(replace(facts, now=at, counted_at=at))
        return record.current.health, record.since

    assert update(NOW, is_faulty=True) == (Health.DEGRADED, NOW)
    assert update(NOW + 3, is_faulty=False) == (Health.DEGRADED, NOW)
    assert update(NOW + 4, is_faulty=True) == (Health.DEGRADED, NOW), "the fault has not changed"
    assert update(NOW + 8, is_faulty=False) == (Health.DEGRADED, NOW)
    assert update(NOW + 9, is_faulty=False) == (Health.WORKING, NOW + 9)
    assert update(NOW + 10, is_faulty=False) == (Health.WORKING, NOW + 9)
    assert update(NOW + 11, is_faulty=True) == (Health.DEGRADED, NOW + 11), "a new fault shows at once"


def test_change_of_health_is_logged_once_it_has_lasted() -> None:
    record = HealthRecord()
    record.update_health(make_facts())
    assert record.since == NOW
    assert not record.take_change(NOW + 1), "the change may last for a moment only"
    assert record.take_change(NOW + record.HOLD_S)
    assert not record.take_change(NOW + 60), "the change is logged already"
    record.update_health(make_facts(Reason.NO_ROOM, WAITING))
    assert record.current.health is Health.WAITING


def test_documented_reasons_begin_with_the_wording_that_all_surfaces_use() -> None:
    rows = list(read_table_rows(DOCS / "explanation" / "concepts.md", "Reason"))
    assert [name for name, *_ in rows] == [str(reason) for reason in Reason]
    clauses = [reason.meaning for reason in Reason]
    assert [row for row, clause in zip(rows, clauses, strict=True) if not row[1].startswith(clause)] == []
