"""A gateway that fails a good part of what it gets is named, with how; a failure now and then is not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import (
    Delivered,
    Failed,
    ModelNotServed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    TooLate,
    Unreachable,
    Unsent,
    classify_answer,
)
from dispatcher.core.gateway.recent_attempts import (
    CONNECTION_RESET,
    FAILURE_KINDS,
    KEPT_ATTEMPTS,
    MAX_KINDS,
    MIN_FAILURE_SHARE,
    MIN_FAILURES,
    RECENT_S,
    RecentAttempts,
)

FINE = Delivered(200, b"{}")
BROKEN = classify_answer(500, {}, b"Traceback", 0.0)
AWAY = Failed("no answer: 10.0.0.7:80: connection reset by peer")
LONGEST = 250
"""Characters that the sentence may have, whatever the gateway does."""

failures = st.one_of(
    st.builds(Failed, st.text(max_size=400), st.integers(100, 999), st.binary(max_size=30)),
    st.builds(Failed, st.text(max_size=400)),
    st.builds(
        Failed, st.sampled_from([*FAILURE_KINDS, "no answer: "]).flatmap(lambda w: st.text().map(w.__add__))
    ),
    st.builds(Unreachable, st.text(max_size=400)),
)
answers = st.builds(classify_answer, st.integers(200, 599), st.just({}), st.binary(max_size=30), st.just(0.0))
outcomes = st.one_of(st.just(FINE), answers, failures)


def after(outcomes: Iterable[Outcome], at: float = 100.0) -> RecentAttempts:
    recent = RecentAttempts()
    for outcome in outcomes:
        recent.record_attempt(at, outcome, getattr(outcome, "status", None))
    return recent


def failed(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed | Unreachable)


def test_gateway_that_fails_everything_is_named_with_how() -> None:
    recent = after([*[BROKEN] * 18, *[AWAY] * 2])
    told = "Of the last 20 attempts 20 failed: 500 (18), connection reset (2), the newest 4 s ago"
    assert recent.describe_problem(104.0) == told


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Failed("the gateway answered 503", 503, b"no healthy upstream", is_intermediary_error=True), "503"),
        (Failed("no answer within 300 s"), "no answer in time"),
        (Failed("the answer (200) broke off: connection reset by peer"), "answer broken off"),
        (Failed("no answer: the connection was closed"), "no answer"),
        (Failed("no answer: connection reset by peer"), "connection reset"),
        (Failed("the dispatcher failed: KeyError('x')"), "a defect of the dispatcher"),
        (Unreachable("no connection: gw:80: connection refused"), "no connection"),
    ],
)
def test_each_way_to_fail_has_a_name(outcome: Outcome, kind: str) -> None:
    assert f"3 failed: {kind} (3), the" in str(after([outcome] * 3).describe_problem(100.0))


def test_status_of_an_answer_counts_though_the_outcome_counts_as_another() -> None:
    recent = RecentAttempts()
    for _ in range(MIN_FAILURES):
        recent.record_attempt(100.0, Unreachable("the gateway answered 502"), 502)
    assert "502 (3)" in str(recent.describe_problem(100.0))


@pytest.mark.parametrize("status", [200, 400, 404, 422])
def test_answers_are_no_failures(status: int) -> None:
    answers: list[Outcome] = [Delivered(status, b""), TooLarge(status, 9)]
    assert after(answers * KEPT_ATTEMPTS).describe_problem(100.0) is None


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
def test_what_says_nothing_of_the_gateway_hides_no_failure_and_is_none(other: Outcome) -> None:
    assert after([other] * KEPT_ATTEMPTS).describe_problem(100.0) is None
    recent = after([*[BROKEN] * MIN_FAILURES, *[other] * KEPT_ATTEMPTS])
    assert "Of the last 3 attempts 3 failed" in str(recent.describe_problem(100.0))


@pytest.mark.parametrize("one_in", [5, 10, 100, 1000])
def test_failure_now_and_then_is_not_told(one_in: int) -> None:
    """Of the first few tries three are a good part, whatever comes later."""
    recent = RecentAttempts()
    for number in range(3 * one_in + KEPT_ATTEMPTS):
        outcome = BROKEN if number % one_in == 0 else FINE
        recent.record_attempt(
            float(number), outcome, outcome.status if isinstance(outcome, Delivered) else 500
        )
        assert number < KEPT_ATTEMPTS or recent.describe_problem(float(number)) is None


@given(st.lists(outcomes, max_size=3 * KEPT_ATTEMPTS))
def test_told_is_where_a_good_part_of_the_last_failed(tries: list[Outcome]) -> None:
    counted = [failed(each) for each in tries if not isinstance(each, Overloaded)][-KEPT_ATTEMPTS:]
    told = after(tries).describe_problem(100.0)
    assert (told is not None) == (
        sum(counted) >= MIN_FAILURES and sum(counted) >= MIN_FAILURE_SHARE * len(counted)
    )
    if told is not None:
        assert told.startswith(f"Of the last {len(counted)} attempts {sum(counted)} failed: ")


@given(st.lists(failures, min_size=MIN_FAILURES, max_size=2 * KEPT_ATTEMPTS))
def test_sentence_is_bounded_and_has_no_words_of_the_gateway(tries: list[Outcome]) -> None:
    """Whatever it answers: status codes, and names of ours."""
    told = after(tries).describe_problem(100.0)
    assert told is not None
    assert len(told) <= LONGEST
    kinds = told.partition("failed: ")[2].rpartition(", the newest")[0].split("), ")
    names = {kind.partition(" (")[0] for kind in kinds}
    assert len(names) <= MAX_KINDS + 1
    assert not {each for each in names if not each.isdigit()} - {
        *FAILURE_KINDS.values(),
        CONNECTION_RESET,
        "no answer",
        "others",
    }


@given(st.lists(outcomes, max_size=2 * KEPT_ATTEMPTS))
def test_it_lapses_when_tries_succeed_again(tries: list[Outcome]) -> None:
    assert after([*tries, *[FINE] * KEPT_ATTEMPTS]).describe_problem(100.0) is None


@given(st.lists(outcomes, max_size=2 * KEPT_ATTEMPTS), st.floats(0.0, 1e6))
def test_it_lapses_when_none_was_made_for_some_minutes(tries: list[Outcome], later_s: float) -> None:
    assert after(tries).describe_problem(100.0 + RECENT_S + later_s) is None


def test_more_kinds_than_are_named_are_counted_together() -> None:
    statuses = [500, 500, 500, 502, 502, 503, 504, 501]
    told = after(Failed("no", status) for status in statuses).describe_problem(100.0)
    assert told == (
        "Of the last 8 attempts 8 failed: 500 (3), 502 (2), 503 (1), others (2), the newest 0 s ago"
    )
