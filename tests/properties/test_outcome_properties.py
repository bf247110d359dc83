"""Laws of what follows from a try: total, bounded, never past the deadline."""

from __future__ import annotations

import math
from typing import assert_never

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import (
    Answered,
    Delivered,
    Errored,
    Evicted,
    Failed,
    MoveToDeadLetters,
    Overloaded,
    Refused,
    Retry,
    RetryPolicy,
    TooLarge,
    TooLate,
    Unreachable,
    classify_answer,
    decide_after_attempt,
)
from dispatcher.core.gateway.retry_after import MAX_RETRY_AFTER_S, parse_retry_after
from dispatcher.core.requests.result import ErrorCode

seconds = st.floats(0, 1e9)
statuses = st.integers(0, 1200)
waits = st.none() | st.floats(0, MAX_RETRY_AFTER_S)
outcomes = st.one_of(
    st.builds(Delivered, statuses, st.binary()),
    st.builds(Overloaded, statuses, st.text(), st.booleans(), waits),
    st.builds(Evicted, statuses, st.text(), waits, st.floats(0, 60)),
    st.builds(Failed, st.text(), st.none() | statuses, st.binary(), st.booleans(), waits),
    st.builds(Unreachable, st.text(), st.floats(0, 60)),
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
rands = st.floats(0, 1, exclude_max=True)


@given(outcomes, counts, counts, st.floats(-1e9, 1e9), seconds, policies, rands)
def test_every_outcome_leads_to_one_decision_within_its_bounds(
    outcome: object, attempts: int, refusals: int, left: float, now: float, policy: RetryPolicy, rand: float
) -> None:
    deadline = now + left
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
            assert isinstance(outcome, Failed | Overloaded | Evicted | Unreachable)
            assert (
                0 <= decision.delay_s <= (60 if isinstance(outcome, Unreachable | Evicted) else policy.max_s)
            )
            assert deadline > now
            assert decision.delay_s <= deadline - now
            assert decision.is_failed_attempt is isinstance(outcome, Failed)
            assert decision.is_refusal is isinstance(outcome, Overloaded)
            assert decision.is_undelivered is isinstance(outcome, Unreachable)
            if decision.is_failed_attempt:
                assert attempts + 1 < policy.max_attempts
        case MoveToDeadLetters():
            assert isinstance(outcome, Failed)
            assert attempts + 1 >= policy.max_attempts
            assert (decision.status, decision.body) == (outcome.status, outcome.body)
        case Answered():
            assert isinstance(outcome, Delivered)
            assert (decision.status, decision.body) == (outcome.status, outcome.body)
        case Errored():
            assert not isinstance(outcome, Delivered)
            late = isinstance(outcome, TooLate | Failed | Overloaded | Evicted | Unreachable)
            assert late == (decision.code is ErrorCode.DEADLINE_EXCEEDED)
        case _:
            assert_never(decision)


@given(policies, counts, rands)
def test_a_further_refusal_or_failure_never_waits_less(policy: RetryPolicy, n: int, rand: float) -> None:
    def delay(outcome: Failed | Overloaded, count: int) -> float:
        patient = RetryPolicy(policy.base_s, policy.max_s, max_attempts=10**7)
        decision = decide_after_attempt(
            outcome,
            failed_attempts=count,
            refusals=count,
            deadline=math.inf,
            now=0,
            policy=patient,
            rand=rand,
        )
        assert isinstance(decision, Retry)
        return decision.delay_s

    for outcome in (Failed("x"), Overloaded(429, "", is_out_of_capacity=True)):
        assert delay(outcome, n) <= delay(outcome, n + 1)


@given(policies, outcomes, rands)
def test_a_request_that_only_fails_ends_after_max_attempts(
    policy: RetryPolicy, outcome: object, rand: float
) -> None:
    attempts = refusals = tries = 0
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
        tries += 1
        if not isinstance(decision, Retry):
            assert isinstance(decision, MoveToDeadLetters)
            assert tries == policy.max_attempts
            break
        attempts += decision.is_failed_attempt
        refusals += decision.is_refusal


header_names = st.sampled_from(["x-llm-d-request-dropped-reason", "retry-after", "date", "location", "x"])
values = st.text() | st.sampled_from(["evicted-priority", "rejected-internal", "rejected-no-endpoints"])


@given(statuses, st.dictionaries(header_names, values), st.binary(), st.floats(0, 4e9))
def test_every_answer_has_one_meaning(status: int, headers: dict[str, str], body: bytes, now: float) -> None:
    outcome = classify_answer(status, headers, body, now)
    assert isinstance(outcome, Delivered | Overloaded | Evicted | Failed)
    if isinstance(outcome, Delivered):
        assert 200 <= status < 300 or 400 <= status < 500
        assert outcome.body == body
    if 200 <= status < 300:
        assert isinstance(outcome, Delivered)
    if status == 429:
        internal = headers.get("x-llm-d-request-dropped-reason") == "rejected-internal"
        assert isinstance(outcome, Failed if internal else Overloaded | Evicted)
    if isinstance(outcome, Evicted):
        assert status in (429, 500, 503)
    if isinstance(outcome, Failed) and outcome.is_intermediary_error:
        assert status in (401, 404, 407, 500, 502, 503, 504)


@given(st.text() | st.from_regex(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT"), seconds)
def test_retry_after_is_none_or_within_a_day(value: str, now: float) -> None:
    wait = parse_retry_after(value, now)
    assert wait is None or 0 <= wait <= MAX_RETRY_AFTER_S


@given(st.integers(0, 10**30))
def test_delta_seconds_are_themselves_up_to_a_day(delta: int) -> None:
    assert parse_retry_after(str(delta), 0.0) == min(float(delta), MAX_RETRY_AFTER_S)
