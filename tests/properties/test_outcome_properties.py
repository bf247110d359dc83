"""Properties of the decision after an attempt: one for every outcome, bounded, never past the deadline."""

from __future__ import annotations

import math
from typing import assert_never

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.outcomes.judge import (
    Errored,
    MoveToDeadLetters,
    Retry,
    decide_after_attempt,
)
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Overloaded,
    Refused,
    RetryPolicy,
    TooLarge,
    TooLate,
    UncountedError,
    Unreachable,
    classify_answer,
)
from dispatcher.requests.outcomes.retry_after import MAX_RETRY_AFTER_S, parse_retry_after
from dispatcher.wire_format import ErrorCode

seconds = st.floats(0, 1e9)
statuses = st.integers(0, 1200)
waits = st.none() | st.floats(0, MAX_RETRY_AFTER_S)
outcomes = st.one_of(
    st.builds(Delivered, statuses, st.binary()),
    st.builds(Overloaded, statuses, st.text(), st.booleans(), waits),
    st.builds(Evicted, statuses, st.text(), waits, st.floats(0, 60)),
    st.builds(Failed, st.text(), st.none() | statuses, st.binary(), st.booleans(), waits),
    st.builds(Unreachable, st.text()),
    st.builds(UncountedError, st.text(), delay_s=st.floats(0, 60)),
    st.builds(TooLarge, statuses, st.integers(1)),
    st.builds(Refused, st.text()),
    st.just(TooLate()),
)
policies = st.builds(
    RetryPolicy,
    base_s=st.floats(0.001, 1000),
    max_s=st.floats(0.001, 10_000),
    max_attempts=st.integers(1, 100),
    max_deliveries=st.integers(1, 100),
)
counts = st.integers(0, 10**6)
random_numbers = st.floats(0, 1, exclude_max=True)


@given(outcomes, counts, counts, st.floats(-1e9, 1e9), seconds, policies, random_numbers)
def test_every_outcome_leads_to_one_decision_within_its_bounds(
    outcome: object,
    attempts: int,
    refusals: int,
    remaining_s: float,
    now: float,
    policy: RetryPolicy,
    rand: float,
) -> None:
    deadline = now + remaining_s
    decision = decide_after_attempt(
        outcome,  # type: ignore[arg-type]
        failed_attempts=attempts,
        refusals=refusals,
        deadline=deadline,
        now=now,
        policy=policy,
        rand=rand,
    )
    match decision:
        case Retry():
            assert isinstance(outcome, Failed | Overloaded | Evicted | Unreachable | UncountedError)
            assert (
                0
                <= decision.delay_s
                <= (60 if isinstance(outcome, UncountedError | Evicted) else policy.max_s)
            )
            assert deadline > now
            assert decision.delay_s <= deadline - now
            assert decision.is_failed_attempt is isinstance(outcome, Failed)
            assert decision.is_refusal is isinstance(outcome, Overloaded)
            assert decision.is_undelivered is isinstance(outcome, Unreachable | UncountedError)
            if decision.is_failed_attempt:
                assert attempts + 1 < policy.max_attempts
        case MoveToDeadLetters():
            assert isinstance(outcome, Failed)
            assert attempts + 1 >= policy.max_attempts
            assert (decision.status, decision.body) == (outcome.status, outcome.body)
        case Delivered():
            assert decision is outcome
        case Errored():
            assert not isinstance(outcome, Delivered)
            is_expired = isinstance(
                outcome, TooLate | Failed | Overloaded | Evicted | Unreachable | UncountedError
            )
            assert is_expired == (decision.code is ErrorCode.DEADLINE_EXCEEDED)
        case _:
            assert_never(decision)


@given(policies, counts, random_numbers)
def test_delay_never_decreases_with_further_refusals_or_failures(
    policy: RetryPolicy, count: int, rand: float
) -> None:
    def get_delay_s(outcome: Failed | Overloaded, count: int) -> float:
        policy_without_end = RetryPolicy(policy.base_s, policy.max_s, max_attempts=10**7)
        decision = decide_after_attempt(
            outcome,
            failed_attempts=count,
            refusals=count,
            deadline=math.inf,
            now=0,
            policy=policy_without_end,
            rand=rand,
        )
        assert isinstance(decision, Retry)
        return decision.delay_s

    for outcome in (Failed("x"), Overloaded(429, "", is_out_of_capacity=True)):
        assert get_delay_s(outcome, count) <= get_delay_s(outcome, count + 1)


@given(policies, outcomes, random_numbers)
def test_request_that_always_fails_is_dead_lettered_after_max_attempts(
    policy: RetryPolicy, outcome: object, rand: float
) -> None:
    attempts = refusals = attempt_count = 0
    while isinstance(outcome, Failed):
        decision = decide_after_attempt(
            outcome,
            failed_attempts=attempts,
            refusals=refusals,
            deadline=math.inf,
            now=0,
            policy=policy,
            rand=rand,
        )
        attempt_count += 1
        if not isinstance(decision, Retry):
            assert isinstance(decision, MoveToDeadLetters)
            assert attempt_count == policy.max_attempts
            break
        attempts += decision.is_failed_attempt
        refusals += decision.is_refusal


header_names = st.sampled_from(["x-llm-d-request-dropped-reason", "retry-after", "date", "location", "x"])
header_values = st.text() | st.sampled_from(
    ["evicted-priority", "rejected-internal", "rejected-no-endpoints"]
)


@given(statuses, st.dictionaries(header_names, header_values), st.binary(), st.floats(0, 4e9))
def test_every_answer_has_one_outcome(status: int, headers: dict[str, str], body: bytes, now: float) -> None:
    outcome = classify_answer(status, headers, body, now)
    assert isinstance(outcome, Delivered | Overloaded | Evicted | Failed)
    if isinstance(outcome, Delivered):
        assert 200 <= status < 300 or 400 <= status < 500
        assert outcome.body == body
    if 200 <= status < 300:
        assert isinstance(outcome, Delivered)
    if status == 429:
        is_internal = headers.get("x-llm-d-request-dropped-reason") == "rejected-internal"
        assert isinstance(outcome, Failed if is_internal else Overloaded | Evicted)
    if isinstance(outcome, Evicted):
        assert status in (429, 500, 503)
    if isinstance(outcome, Failed) and outcome.is_intermediary_error:
        assert status in (401, 404, 407, 500, 502, 503, 504)


@given(st.text() | st.from_regex(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT"), seconds)
def test_retry_after_is_none_or_at_most_a_day(value: str, now: float) -> None:
    wait_s = parse_retry_after(value, now)
    assert wait_s is None or 0 <= wait_s <= MAX_RETRY_AFTER_S


@given(st.integers(0, 10**30))
def test_retry_after_in_seconds_is_limited_to_a_day(delta: int) -> None:
    assert parse_retry_after(str(delta), 0.0) == min(float(delta), MAX_RETRY_AFTER_S)
