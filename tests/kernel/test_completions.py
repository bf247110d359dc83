"""The completion of a lease for each outcome: result, dead letter or release."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dispatcher.kernel import completions
from dispatcher.kernel.completions import Completion, get_lease
from dispatcher.queue.contract import DeadLetter, Release, Settlement, UnleasedRequest
from dispatcher.requests.outcomes.judge import MoveToDeadLetters
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    RetryPolicy,
    TooLarge,
    TooLate,
    UncountedError,
    Unreachable,
    Unsent,
)
from dispatcher.requests.request import Rejection
from dispatcher.requests.result import decode_result
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import lease, request

LEASE = lease(7)
REQUEST = request(7, token="fence", results="jobs:results", deadline=1000)
POLICY = RetryPolicy(base_s=4.0, max_s=60.0, max_attempts=3, max_deliveries=5)


def complete_after(outcome: Outcome, now: float = 0.0, **fields: int) -> Completion:
    return completions.build_completion(lease(7, **fields), REQUEST, outcome, now, POLICY, rand=0.5)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Delivered(200, b"{}"), "2xx"),
        (Delivered(422, b"no"), "4xx"),
        (TooLarge(200, 10), ErrorCode.TOO_LARGE),
        (Refused("endpoint: not allowed"), ErrorCode.INVALID_REQUEST),
        (TooLate(), ErrorCode.DEADLINE_EXCEEDED),
    ],
)
def test_final_outcome_is_settled_to_the_result_list_of_the_request(outcome: Outcome, code: str) -> None:
    completion = complete_after(outcome)
    assert isinstance(completion, Settlement)
    assert (completion.lease, completion.result_class, completion.result_list) == (
        LEASE,
        code,
        "jobs:results",
    )
    assert (completion.request_id, completion.request_token) == ("r-7", "fence")
    result = decode_result(completion.result)
    assert (result.id, result.request_token) == ("r-7", "fence")
    assert result.error_code == (None if code.endswith("xx") else code)


@pytest.mark.parametrize(
    ("outcome", "release"),
    [
        (Failed("reset"), Release(LEASE, delay_s=2.0, is_failed_attempt=True, last_attempt="reset")),
        (
            Overloaded(429, "", is_out_of_capacity=True),
            Release(LEASE, is_refusal=True, last_attempt="the gateway refused it for now: 429"),
        ),
        (
            Unreachable("no connection"),
            Release(LEASE, is_undelivered=True, last_attempt="no connection"),
        ),
        (
            UncountedError("the gateway answered 503", delay_s=3.0),
            Release(LEASE, delay_s=3.0, is_undelivered=True, last_attempt="the gateway answered 503"),
        ),
        (
            Evicted(429, "evicted", delay_s=3.0),
            Release(
                LEASE,
                delay_s=3.0,
                last_attempt="the gateway stopped it for more important requests: 429, evicted",
            ),
        ),
        (Unsent(), Release(LEASE, is_undelivered=True)),
    ],
)
def test_outcome_that_is_not_final_releases_the_lease_and_counts_its_kind(
    outcome: Outcome, release: Release
) -> None:
    assert complete_after(outcome) == release


def test_delay_grows_with_failed_attempts_and_refusals() -> None:
    retry = complete_after(Failed("reset"), failed_attempts=1)
    assert isinstance(retry, Release)
    assert retry.delay_s == 4.0
    refusal = complete_after(Overloaded(429, "", is_out_of_capacity=True), refusals=2)
    assert isinstance(refusal, Release)
    assert refusal.delay_s == 8.0


def test_last_failed_attempt_moves_the_request_to_dead_letters_with_the_last_answer() -> None:
    completion = complete_after(Failed("the gateway answered 500", 500, b"broken"), failed_attempts=2)
    assert isinstance(completion, DeadLetter)
    assert completion.is_failed_attempt
    assert completion.reason == "no answer after 3 attempts, the last: the gateway answered 500"
    assert completion.settlement.result_class == ErrorCode.RETRIES_EXHAUSTED
    result = decode_result(completion.settlement.result)
    assert (result.error_code, result.status_code, result.payload) == (
        ErrorCode.RETRIES_EXHAUSTED,
        500,
        "broken",
    )


def test_attempt_that_fails_after_the_deadline_is_not_retried() -> None:
    completion = complete_after(Failed("reset"), now=1000.0)
    assert isinstance(completion, Settlement)
    assert completion.result_class == ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("outcome", "earlier", "attempts"),
    [
        (None, {}, ""),
        (None, {"last_attempt": "gone", "failed_attempts": 1}, " after 1 attempt; the last attempt: gone"),
        (None, {"last_attempt": "429", "refusals": 2}, " after 2 refusals; the last attempt: 429"),
        (None, {"last_attempt": "no model"}, "; the last attempt: no model"),
        (Failed("reset"), {}, " after 1 attempt; the last attempt: reset"),
        (
            Failed("reset"),
            {"last_attempt": "429", "failed_attempts": 1, "refusals": 1},
            " after 2 attempts and 1 refusal; the last attempt: reset",
        ),
        (
            Overloaded(429, "", is_out_of_capacity=True),
            {"failed_attempts": 1},
            " after 1 attempt and 1 refusal; the last attempt: the gateway refused it for now: 429",
        ),
        (
            Unreachable("gone"),
            {"last_attempt": "503", "failed_attempts": 2},
            " after 2 attempts; the last attempt: gone",
        ),
        (
            TooLate(),
            {"last_attempt": "503", "failed_attempts": 2},
            " after 2 attempts; the last attempt: 503",
        ),
    ],
)
def test_deadline_error_describes_the_attempts(
    outcome: Outcome | None, earlier: dict[str, Any], attempts: str
) -> None:
    """No other record exists of attempts after which the request was released."""
    leased = lease(7, **earlier)
    if outcome is None:
        completion: Completion = completions.build_deadline_error(leased, REQUEST)
    else:
        completion = completions.build_completion(leased, REQUEST, outcome, 1000.0, POLICY, rand=0.5)
    assert isinstance(completion, Settlement)
    result = decode_result(completion.result)
    assert result.error_code == ErrorCode.DEADLINE_EXCEEDED
    assert result.error_message == f"deadline exceeded{attempts}"


def test_deadline_error_without_a_lease_describes_the_attempts() -> None:
    unleased = UnleasedRequest("d:7:3", b"{}", "503", failed_attempts=2, refusals=1)
    result = decode_result(completions.build_overdue_error(unleased, REQUEST).result)
    assert result.error_code == ErrorCode.DEADLINE_EXCEEDED
    assert result.error_message == "deadline exceeded after 2 attempts and 1 refusal; the last attempt: 503"


def test_invalid_member_without_an_id_becomes_a_dead_letter_without_a_result() -> None:
    completion = completions.build_rejection(
        LEASE, Rejection(ErrorCode.INVALID_REQUEST, "no JSON", None, "", "")
    )
    assert completion == DeadLetter(Settlement(LEASE, b"", ""), "INVALID_REQUEST: no JSON")


def test_invalid_member_with_an_id_gets_an_error_result() -> None:
    rejection = Rejection(ErrorCode.TOO_LARGE, "12 bytes", "r-7", "fence", "jobs:results")
    completion = completions.build_rejection(LEASE, rejection)
    assert isinstance(completion, Settlement)
    assert (completion.result_list, completion.result_class) == ("jobs:results", ErrorCode.TOO_LARGE)
    assert (completion.request_id, completion.request_token) == ("r-7", "fence")
    result = decode_result(completion.result)
    assert (result.error_code, result.error_message) == (ErrorCode.TOO_LARGE, "12 bytes")


def test_error_about_an_invalid_result_list_goes_to_the_default_list() -> None:
    completion = completions.build_invalid_list_error(LEASE, REQUEST, "is a string")
    assert (completion.result_list, completion.result_class) == ("", ErrorCode.INVALID_REQUEST)
    result = decode_result(completion.result)
    assert result.error_message == "internal.result_queue_name: jobs:results is a string"


def test_unexpected_exception_counts_as_a_failed_attempt() -> None:
    error = KeyError("usage")
    first = completions.build_internal_failure(LEASE, REQUEST, error, 0.0, POLICY, 0.5)
    assert isinstance(first, Release)
    assert first.is_failed_attempt
    assert "KeyError('usage')" in first.last_attempt
    last = completions.build_internal_failure(lease(7, failed_attempts=2), REQUEST, error, 0.0, POLICY, 0.5)
    assert isinstance(last, DeadLetter)
    assert decode_result(last.settlement.result).id == "r-7"


def test_message_about_an_unexpected_exception_does_not_contain_the_whole_body() -> None:
    body = b"x" * 1000 + b"\xff"
    with pytest.raises(UnicodeDecodeError) as raised:
        body.decode()
    entry = lease(7, failed_attempts=2)
    last = completions.build_internal_failure(entry, REQUEST, raised.value, 0.0, POLICY, 0.5)
    assert isinstance(last, DeadLetter)
    assert "UnicodeDecodeError" in last.reason
    assert len(last.reason) < 500


def test_unexpected_exception_before_a_request_was_parsed_leaves_a_dead_letter_without_a_result() -> None:
    error = KeyError("id")
    first = completions.build_internal_failure(LEASE, None, error, 0.0, POLICY, 0.5)
    assert isinstance(first, Release)
    assert first.is_failed_attempt
    last = completions.build_internal_failure(lease(7, failed_attempts=2), None, error, 0.0, POLICY, 0.5)
    assert isinstance(last, DeadLetter)
    assert (last.settlement.result, last.is_failed_attempt) == (b"", True)
    assert "KeyError('id')" in last.reason


def test_return_without_an_attempt_counts_nothing() -> None:
    assert completions.build_return(LEASE) == Release(LEASE, is_undelivered=True)
    assert completions.build_return(LEASE, after_s=2.0) == Release(LEASE, delay_s=2.0, is_undelivered=True)


def test_each_completion_names_its_lease() -> None:
    decision = MoveToDeadLetters(ErrorCode.DELIVERIES_EXHAUSTED, "6 dispatchers died while they ran it alone")
    dead_letter = completions.build_dead_letter_after_deaths(LEASE, REQUEST, decision)
    assert dead_letter.reason == decision.message
    for completion in (
        dead_letter,
        completions.build_cancellation(LEASE, REQUEST),
        completions.build_return(LEASE),
    ):
        assert get_lease(completion) is LEASE


@pytest.mark.parametrize(
    ("outcome", "attempts", "version"),
    [
        (Delivered(200, b"{}"), 0, "m-v2"),
        (Delivered(404, b"{}"), 0, "m-v2"),
        (Failed("reset"), 2, "m-v2"),
        (TooLarge(200, 10), 0, "m-v2"),
        (TooLate(), 1, "m-v2"),
        (Refused("endpoint: not allowed"), 0, None),
    ],
)
def test_result_of_a_sent_request_names_the_model_version(
    outcome: Outcome, attempts: int, version: str | None
) -> None:
    sent = replace(REQUEST, chosen_model="m-v2")
    completion = completions.build_completion(
        lease(7, failed_attempts=attempts), sent, outcome, 0.0, POLICY, rand=0.5
    )
    settlement = completion.settlement if isinstance(completion, DeadLetter) else completion
    assert isinstance(settlement, Settlement)
    assert decode_result(settlement.result).model_version == version


def test_result_of_an_unsent_request_names_no_version() -> None:
    sent = replace(REQUEST, chosen_model="m-v2")
    for settlement in (
        completions.build_cancellation(LEASE, sent),
        completions.build_deadline_error(LEASE, sent),
    ):
        assert decode_result(settlement.result).model_version is None
