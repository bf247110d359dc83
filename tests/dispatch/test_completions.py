"""How a lease ends, for each way that a request can go: what consumer, operator and queue are told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    MoveToDeadLetters,
    Outcome,
    Overloaded,
    Refused,
    RetryPolicy,
    TooLarge,
    TooLate,
    Unreachable,
    Unsent,
)
from dispatcher.core.requests.request import Rejection
from dispatcher.core.requests.result import ErrorCode, decode_result
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Completion, get_lease
from dispatcher.ports import DeadLetter, Release, Settlement, UnleasedRequest
from tests.dispatch.scene import lease, request

LEASE = lease(7)
REQUEST = request(7, token="fence", results="jobs:results", deadline=1000)
POLICY = RetryPolicy(base_s=4.0, max_s=60.0, max_attempts=3, max_deliveries=5)


def after_try(outcome: Outcome, now: float = 0.0, **counted: int) -> Completion:
    return completions.build_completion(lease(7, **counted), REQUEST, outcome, now, POLICY, rand=0.5)


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
def test_what_is_over_is_settled_where_its_producer_looks(outcome: Outcome, code: str) -> None:
    ending = after_try(outcome)
    assert isinstance(ending, Settlement)
    assert (ending.lease, ending.result_class, ending.result_list) == (LEASE, code, "jobs:results")
    assert (ending.request_id, ending.request_token) == ("r-7", "fence")
    told = decode_result(ending.result)
    assert (told.id, told.request_token) == ("r-7", "fence")
    assert told.error_code == (None if code.endswith("xx") else code)


@pytest.mark.parametrize(
    ("outcome", "release"),
    [
        (Failed("reset"), Release(LEASE, delay_s=2.0, is_failed_attempt=True, last_attempt="reset")),
        (
            Overloaded(429, "", is_out_of_capacity=True),
            Release(LEASE, is_refusal=True, last_attempt="the gateway refused it for now: 429"),
        ),
        (
            Unreachable("no connection", delay_s=3.0),
            Release(LEASE, delay_s=3.0, is_undelivered=True, last_attempt="no connection"),
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
def test_what_is_not_over_is_given_back_and_counted_as_what_it_was(
    outcome: Outcome, release: Release
) -> None:
    assert after_try(outcome) == release


def test_what_is_counted_so_far_decides_how_long_it_waits() -> None:
    again = after_try(Failed("reset"), failed_attempts=1)
    assert isinstance(again, Release)
    assert again.delay_s == 4.0
    refused = after_try(Overloaded(429, "", is_out_of_capacity=True), refusals=2)
    assert isinstance(refused, Release)
    assert refused.delay_s == 8.0


def test_last_attempt_buries_it_with_the_last_answer() -> None:
    ending = after_try(Failed("the gateway answered 500", 500, b"broken"), failed_attempts=2)
    assert isinstance(ending, DeadLetter)
    assert ending.is_failed_attempt
    assert ending.reason == "no answer after 3 attempts, the last: the gateway answered 500"
    assert ending.settlement.result_class == ErrorCode.RETRIES_EXHAUSTED
    told = decode_result(ending.settlement.result)
    assert (told.error_code, told.status_code, told.payload) == (ErrorCode.RETRIES_EXHAUSTED, 500, "broken")


def test_try_that_ends_past_the_deadline_is_no_retry() -> None:
    ending = after_try(Failed("reset"), now=1000.0)
    assert isinstance(ending, Settlement)
    assert ending.result_class == ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("outcome", "before", "told"),
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
def test_who_is_too_late_is_told_what_the_tries_came_to(
    outcome: Outcome | None, before: dict[str, Any], told: str
) -> None:
    """Of which nobody else would know: it was given back, and its answer with it."""
    held = lease(7, **before)
    if outcome is None:
        ending: Completion = completions.build_deadline_error(held, REQUEST)
    else:
        ending = completions.build_completion(held, REQUEST, outcome, 1000.0, POLICY, rand=0.5)
    assert isinstance(ending, Settlement)
    result = decode_result(ending.result)
    assert result.error_code == ErrorCode.DEADLINE_EXCEEDED
    assert result.error_message == f"deadline exceeded{told}"


def test_what_expires_without_a_lease_says_the_same() -> None:
    over = UnleasedRequest("d:7:3", b"{}", "503", failed_attempts=2, refusals=1)
    told = decode_result(completions.build_overdue_error(over, REQUEST).result)
    assert told.error_code == ErrorCode.DEADLINE_EXCEEDED
    assert told.error_message == "deadline exceeded after 2 attempts and 1 refusal; the last attempt: 503"


def test_member_without_an_id_is_dead_and_nobody_is_told() -> None:
    ending = completions.build_rejection(LEASE, Rejection(ErrorCode.INVALID_REQUEST, "no JSON", None, "", ""))
    assert ending == DeadLetter(Settlement(LEASE, b"", ""), "INVALID_REQUEST: no JSON")


def test_member_with_an_id_is_answered_with_what_is_wrong() -> None:
    wrong = Rejection(ErrorCode.TOO_LARGE, "12 bytes", "r-7", "fence", "jobs:results")
    ending = completions.build_rejection(LEASE, wrong)
    assert isinstance(ending, Settlement)
    assert (ending.result_list, ending.result_class) == ("jobs:results", ErrorCode.TOO_LARGE)
    assert (ending.request_id, ending.request_token) == ("r-7", "fence")
    told = decode_result(ending.result)
    assert (told.error_code, told.error_message) == (ErrorCode.TOO_LARGE, "12 bytes")


def test_result_that_may_not_go_where_it_asks_goes_to_the_default_list() -> None:
    ending = completions.build_invalid_list_error(LEASE, REQUEST, "is a string")
    assert (ending.result_list, ending.result_class) == ("", ErrorCode.INVALID_REQUEST)
    told = decode_result(ending.result)
    assert told.error_message == "internal.result_queue_name: jobs:results is a string"


def test_given_back_untouched_it_counts_nothing() -> None:
    assert completions.build_return(LEASE) == Release(LEASE, is_undelivered=True)
    assert completions.build_return(LEASE, after_s=2.0) == Release(LEASE, delay_s=2.0, is_undelivered=True)


def test_each_ending_names_its_lease() -> None:
    verdict = MoveToDeadLetters(ErrorCode.DELIVERIES_EXHAUSTED, "6 dispatchers died while they ran it alone")
    buried = completions.build_dead_letter_after_deaths(LEASE, REQUEST, verdict)
    assert buried.reason == verdict.message
    for ending in (buried, completions.build_cancellation(LEASE, REQUEST), completions.build_return(LEASE)):
        assert get_lease(ending) is LEASE


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
def test_the_result_of_what_was_sent_says_as_which_version(
    outcome: Outcome, attempts: int, version: str | None
) -> None:
    sent = replace(REQUEST, version="m-v2")
    ending = completions.build_completion(
        lease(7, failed_attempts=attempts), sent, outcome, 0.0, POLICY, rand=0.5
    )
    settlement = ending.settlement if isinstance(ending, DeadLetter) else ending
    assert isinstance(settlement, Settlement)
    assert decode_result(settlement.result).model_version == version


def test_the_result_of_what_was_not_sent_names_no_version() -> None:
    sent = replace(REQUEST, version="m-v2")
    for settlement in (
        completions.build_cancellation(LEASE, sent),
        completions.build_deadline_error(LEASE, sent),
    ):
        assert decode_result(settlement.result).model_version is None
