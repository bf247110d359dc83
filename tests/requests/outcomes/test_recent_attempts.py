"""Frequent failures of the last attempts are described; rare ones are not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Failed,
    FailureKind,
    ModelNotServed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    TooLate,
    UncountedError,
    Unreachable,
    Unsent,
    classify_answer,
)
from dispatcher.requests.outcomes.recent_attempts import (
    KEPT_ATTEMPTS,
    MAX_KINDS,
    MIN_FAILURE_SHARE,
    MIN_FAILURES,
    RECENT_S,
    RecentAttempts,
    UnansweredAttempts,
)

ANSWERED = Delivered(200, b"{}")
ERROR_500 = classify_answer(500, {}, b"Traceback", 0.0)
RESET = Failed("no answer: 10.0.0.7:80: connection reset by peer", kind=FailureKind.CONNECTION_RESET)
MAX_SENTENCE_CHARS = 250
"""Maximum length of the sentence, whatever the gateway does."""

failures = st.one_of(
    st.builds(Failed, st.text(max_size=400), st.integers(100, 999), st.binary(max_size=30)),
    st.builds(Failed, st.text(max_size=400), kind=st.sampled_from(FailureKind)),
    st.builds(Unreachable, st.text(max_size=400), st.sampled_from(FailureKind)),
    st.builds(UncountedError, st.text(max_size=400), st.sampled_from(FailureKind)),
)
answers = st.builds(classify_answer, st.integers(200, 599), st.just({}), st.binary(max_size=30), st.just(0.0))
outcomes = st.one_of(st.just(ANSWERED), answers, failures)


def record_all(outcomes: Iterable[Outcome], at: float = 100.0) -> RecentAttempts:
    recent = RecentAttempts()
    for outcome in outcomes:
        recent.record_attempt(at, outcome, getattr(outcome, "status", None))
    return recent


def is_failure(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed | Unreachable | UncountedError)


def test_gateway_that_fails_every_attempt_is_described_with_kinds_and_counts() -> None:
    recent = record_all([*[ERROR_500] * 18, *[RESET] * 2])
    problem = "Of the last 20 attempts 20 failed: 500 (18), connection reset (2), the newest 4 s ago"
    assert recent.describe_problem(104.0) == problem


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Failed("the gateway answered 503", 503, b"no healthy upstream", is_intermediary_error=True), "503"),
        (Failed("no answer within 300 s", kind=FailureKind.NO_ANSWER_IN_TIME), "no answer in time"),
        (Failed("the answer (200) broke off: reset", kind=FailureKind.BROKEN_OFF), "answer broken off"),
        (Unreachable("no connection: gw:80: connection refused"), "no connection"),
        (UncountedError("the gateway answered 404", FailureKind.NO_ROUTE), "no route"),
    ],
)
def test_each_kind_of_failure_has_a_name(outcome: Outcome, kind: str) -> None:
    assert f"3 failed: {kind} (3), the" in str(record_all([outcome] * 3).describe_problem(100.0))


def test_failure_with_an_answer_is_named_by_its_status() -> None:
    recent = RecentAttempts()
    for _ in range(MIN_FAILURES):
        recent.record_attempt(100.0, UncountedError("the gateway answered 502"), 502)
    assert "502 (3)" in str(recent.describe_problem(100.0))


@pytest.mark.parametrize("status", [200, 400, 404, 422])
def test_answers_are_not_counted_as_failures(status: int) -> None:
    answers: list[Outcome] = [Delivered(status, b""), TooLarge(status, 9)]
    assert record_all(answers * KEPT_ATTEMPTS).describe_problem(100.0) is None


@pytest.mark.parametrize(
    "other",
    [
        Overloaded(429, "", is_out_of_capacity=True),
        Refused("a header"),
        TooLate(),
        Unsent(),
        ModelNotServed("none"),
    ],
)
def test_outcome_that_says_nothing_about_the_gateway_is_not_counted(other: Outcome) -> None:
    assert record_all([other] * KEPT_ATTEMPTS).describe_problem(100.0) is None
    recent = record_all([*[ERROR_500] * MIN_FAILURES, *[other] * KEPT_ATTEMPTS])
    assert "Of the last 3 attempts 3 failed" in str(recent.describe_problem(100.0))


@pytest.mark.parametrize("failure_interval", [5, 10, 100, 1000])
def test_rare_failures_are_not_reported(failure_interval: int) -> None:
    """The first few attempts are not checked, because three failures among them are enough to be reported."""
    recent = RecentAttempts()
    for number in range(3 * failure_interval + KEPT_ATTEMPTS):
        outcome = ERROR_500 if number % failure_interval == 0 else ANSWERED
        recent.record_attempt(
            float(number), outcome, outcome.status if isinstance(outcome, Delivered) else 500
        )
        assert number < KEPT_ATTEMPTS or recent.describe_problem(float(number)) is None


@given(st.lists(outcomes, max_size=3 * KEPT_ATTEMPTS))
def test_problem_is_reported_exactly_if_enough_of_the_last_attempts_failed(attempts: list[Outcome]) -> None:
    counted = [is_failure(each) for each in attempts if not isinstance(each, Overloaded)][-KEPT_ATTEMPTS:]
    problem = record_all(attempts).describe_problem(100.0)
    assert (problem is not None) == (
        sum(counted) >= MIN_FAILURES and sum(counted) >= MIN_FAILURE_SHARE * len(counted)
    )
    if problem is not None:
        assert problem.startswith(f"Of the last {len(counted)} attempts {sum(counted)} failed: ")


@given(st.lists(failures, min_size=MIN_FAILURES, max_size=2 * KEPT_ATTEMPTS))
def test_sentence_is_bounded_and_contains_no_text_of_the_gateway(attempts: list[Outcome]) -> None:
    """It contains only status codes and names of the dispatcher."""
    problem = record_all(attempts).describe_problem(100.0)
    assert problem is not None
    assert len(problem) <= MAX_SENTENCE_CHARS
    kinds = problem.partition("failed: ")[2].rpartition(", the newest")[0].split("), ")
    names = {kind.partition(" (")[0] for kind in kinds}
    assert len(names) <= MAX_KINDS + 1
    assert not {each for each in names if not each.isdigit()} - {*FailureKind, "others"}


@given(st.lists(outcomes, max_size=2 * KEPT_ATTEMPTS))
def test_problem_ends_when_attempts_succeed_again(attempts: list[Outcome]) -> None:
    assert record_all([*attempts, *[ANSWERED] * KEPT_ATTEMPTS]).describe_problem(100.0) is None


@given(st.lists(outcomes, max_size=2 * KEPT_ATTEMPTS), st.floats(0.0, 1e6))
def test_problem_ends_when_no_attempt_was_made_for_some_minutes(
    attempts: list[Outcome], later_s: float
) -> None:
    assert record_all(attempts).describe_problem(100.0 + RECENT_S + later_s) is None


def test_more_kinds_than_are_named_are_counted_together() -> None:
    statuses = [500, 500, 500, 502, 502, 503, 504, 501]
    problem = record_all(Failed("no", status) for status in statuses).describe_problem(100.0)
    assert problem == (
        "Of the last 8 attempts 8 failed: 500 (3), 502 (2), 503 (1), others (2), the newest 0 s ago"
    )


NOW = 10_000.0
REJECTED = Delivered(404, b"")


def record_at(*rows: tuple[float, Outcome]) -> RecentAttempts:
    """Return the record after outcomes so many seconds before NOW."""
    recent = RecentAttempts()
    for age_s, outcome in rows:
        recent.record_attempt(NOW - age_s, outcome, getattr(outcome, "status", None))
    return recent


def test_age_is_that_of_the_newest_failure() -> None:
    recent = record_at((9, ERROR_500), (7, ERROR_500), (5, RESET), (1, ANSWERED))
    assert str(recent.describe_problem(NOW)).endswith(", the newest 5 s ago")


def test_only_failures_within_some_minutes_are_recent() -> None:
    assert record_at(*[(RECENT_S - 1, ERROR_500)] * 3).describe_failures(NOW) is not None
    assert record_at(*[(RECENT_S, ERROR_500)] * 3).describe_failures(NOW) is None


def test_failures_are_the_only_attempts_until_one_is_answered() -> None:
    assert not record_at(*[(5, ERROR_500)] * (MIN_FAILURES - 1)).has_only_failures(NOW)
    assert record_at(*[(5, ERROR_500)] * MIN_FAILURES).has_only_failures(NOW)
    assert not record_at(*[(5, ERROR_500)] * MIN_FAILURES, (1, ANSWERED)).has_only_failures(NOW)
    assert record_at((RECENT_S, ANSWERED), *[(5, ERROR_500)] * MIN_FAILURES).has_only_failures(NOW)
    assert not record_at(*[(RECENT_S, ERROR_500)] * MIN_FAILURES).has_only_failures(NOW)


@pytest.mark.parametrize(
    ("rejected", "answered", "is_described"),
    [(3, 0, True), (2, 0, False), (3, 3, True), (5, 15, True), (4, 16, False)],
)
def test_frequent_rejections_are_described(rejected: int, answered: int, is_described: bool) -> None:
    recent = record_at(*[(5, ANSWERED)] * answered, *[(5, REJECTED)] * rejected)
    expected = (
        f"Of the last {answered + rejected} answers {rejected} rejected their request: 404 ({rejected})"
    )
    assert recent.describe_rejections(NOW) == (expected if is_described else None)


def test_rejections_are_counted_among_recent_answers_and_not_among_failures() -> None:
    recent = record_at(*[(RECENT_S, ANSWERED)] * 9, *[(5, ERROR_500)] * 9, *[(5, REJECTED)] * 2)
    assert recent.describe_rejections(NOW) is None
    recent.record_attempt(NOW, REJECTED, 404)
    assert recent.describe_rejections(NOW) == "Of the last 3 answers 3 rejected their request: 404 (3)"
    assert record_at(*[(RECENT_S, REJECTED)] * 9).describe_rejections(NOW) is None


def test_unanswered_attempts_count_from_the_last_answer_on() -> None:
    refused = Overloaded(429, "", is_out_of_capacity=True)
    recent = record_at((9, ERROR_500), (8, ANSWERED), (7, RESET), (6, refused), (5, refused), (4, ERROR_500))
    assert recent.answered_at == NOW - 8
    assert recent.unanswered == UnansweredAttempts(NOW - 7, NOW - 4, failed_count=2, refused_count=2)
    assert recent.unanswered.total_count == 4
    answered = record_at((9, ERROR_500), (8, REJECTED))
    assert (answered.unanswered, answered.answered_at) == (None, NOW - 8)
