"""Meaning of the answers of the gateway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Overloaded,
    classify_answer,
    classify_cut_answer,
    describe_outcome,
)
from dispatcher.requests.outcomes.retry_after import MAX_RETRY_AFTER_S, parse_retry_after
from tests.overload_bodies import OVERLOAD_BODIES, SGLANG_OVERLOADED

NOW = 784111767.0
"""Ten seconds before the date that the RFC uses in its examples."""


@pytest.mark.parametrize("status", [200, 201, 204, 400, 403, 404, 409, 413, 422, 431, 451])
def test_answer_that_no_retry_would_change_is_delivered(status: int) -> None:
    assert classify_answer(status, {}, b"body", NOW) == Delivered(status, b"body")


def test_empty_404_means_no_route_and_404_with_a_body_is_an_answer() -> None:
    no_route = classify_answer(404, {}, b"", NOW)
    assert isinstance(no_route, Failed)
    assert no_route.is_intermediary_error
    assert classify_answer(404, {}, b"no such model", NOW) == Delivered(404, b"no such model")


@pytest.mark.parametrize("status", [401, 407])
def test_rejected_credentials_are_an_intermediary_error(status: int) -> None:
    outcome = classify_answer(status, {}, b"who are you", NOW)
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.body, outcome.is_intermediary_error) == (status, b"who are you", True)
    assert str(status) in outcome.why


@pytest.mark.parametrize(
    ("status", "reason", "capacity"),
    [
        (429, "", True),
        (429, "rejected-saturated", True),
        (429, "rejected-ttl-expired", True),
        (503, "rejected-ttl-expired", True),
        (500, "some-later-reason", True),
        (503, "rejected-no-endpoints", False),
        (503, "rejected-shutting-down", False),
        (503, "rejected-context-cancelled", False),
        (429, "rejected-shutting-down", False),
    ],
)
def test_refusal_says_whether_the_capacity_is_exceeded(status: int, reason: str, capacity: bool) -> None:
    headers = {"x-llm-d-request-dropped-reason": reason} if reason else {}
    assert classify_answer(status, headers, b"full", NOW) == Overloaded(status, reason, capacity)


def test_refusal_by_an_admission_plugin_says_nothing_about_the_capacity() -> None:
    body = b"inference error: Internal - request cannot be admitted"
    assert classify_answer(500, {}, body, NOW) == Overloaded(500, "", is_out_of_capacity=False)
    assert isinstance(classify_answer(502, {}, body, NOW), Failed)


@pytest.mark.parametrize(
    ("status", "body", "bare"),
    [
        (500, b"", True),
        (500, b"Traceback", False),
        (502, b"", True),
        (502, b"upstream connect error", True),
        (503, b"no healthy upstream", True),
        (504, b"", True),
        (501, b"", False),
        (507, b"", False),
        (599, b"", False),
        (408, b"", False),
        (999, b"", False),
        (101, b"", False),
    ],
)
def test_failure_says_whether_it_is_an_intermediary_error(status: int, body: bytes, bare: bool) -> None:
    outcome = classify_answer(status, {}, body, NOW)
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.body, outcome.is_intermediary_error) == (status, body, bare)


def test_drop_reason_on_another_status_is_no_intermediary_error() -> None:
    outcome = classify_answer(504, {"x-llm-d-request-dropped-reason": "rejected-ttl-expired"}, b"", NOW)
    assert isinstance(outcome, Failed)
    assert not outcome.is_intermediary_error


@pytest.mark.parametrize("status", [300, 301, 302, 304, 307, 308])
def test_redirect_is_a_failed_attempt(status: int) -> None:
    outcome = classify_answer(status, {"location": "https://elsewhere/v1"}, b"", NOW)
    assert isinstance(outcome, Failed)
    assert "https://elsewhere/v1" in outcome.why
    assert not outcome.is_intermediary_error


def test_retry_after_is_read_for_overload_and_failure() -> None:
    for status in (429, 503):
        outcome = classify_answer(status, {"retry-after": "7"}, b"", NOW)
        assert isinstance(outcome, Overloaded | Failed)
        assert outcome.retry_after_s == 7.0


def test_retry_after_date_is_measured_by_the_clock_of_the_sender() -> None:
    headers = {"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT", "date": "Sun, 06 Nov 1994 08:49:30 GMT"}
    outcome = classify_answer(429, headers, b"", now_unix=NOW + 4000)
    assert isinstance(outcome, Overloaded)
    assert outcome.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 120\t", 120.0),
        ("00000000000000120", 120.0),
        ("86399", 86399.0),
        ("86401", MAX_RETRY_AFTER_S),
        ("9" * 10_000, MAX_RETRY_AFTER_S),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 10.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 10.0),
        ("Sun Nov  6 08:49:37 1994", 10.0),
        ("Sun, 06 Nov 1994 08:49:17 GMT", 0.0),
        ("Mon, 06 Nov 2034 08:49:37 GMT", MAX_RETRY_AFTER_S),
        ("Sunday, 06-Nov-44 08:49:37 GMT", MAX_RETRY_AFTER_S),
        (
            "Sunday, 06-Nov-45 08:49:37 GMT",
            0.0,
        ),  # a year more than 50 years ahead belongs to the last century
        ("Sun, 06 Nov 1994 08:49:60 GMT", 32.0),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.5", None),
        ("1e3", None),
        ("soon", None),
        ("٣", None),
        ("1, 2", None),
        ("Sun, 31 Feb 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 1994 24:49:37 GMT", None),
        ("Sun, 06 Nov 0000 08:49:37 GMT", None),
        ("Sun, 06 Foo 1994 08:49:37 GMT", None),
        ("Sun, 06-Nov 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 1994 08:49:37 CET", None),
        ("Sun, 6 Nov 1994 08:49:37 GMT", None),
        ("Sun Nov 06 08:49:37 1994 GMT", None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Failed("reset"), "reset"),
        (Failed("the gateway answered 503", 503), "the gateway answered 503"),
        (Failed("answered 503", 503, b"no\n healthy  upstream"), "answered 503: no healthy upstream"),
        (Failed("it", 500, b"\x1b[2J\xff"), "it: \\x1b[2J\ufffd"),
        (Overloaded(429, "", is_out_of_capacity=True), "the gateway refused it for now: 429"),
        (
            Overloaded(503, "saturated", is_out_of_capacity=True),
            "the gateway refused it for now: 503, saturated",
        ),
    ],
)
def test_outcome_is_described_in_one_line(outcome: Failed | Overloaded, words: str) -> None:
    assert describe_outcome(outcome) == words


@given(st.text(), st.binary(max_size=2000))
def test_description_of_an_outcome_is_short_and_printable(why: str, body: bytes) -> None:
    words = describe_outcome(Failed(why, 500, body))
    assert len(words) <= 200
    assert words.isprintable()
    assert len(describe_outcome(Overloaded(503, why, is_out_of_capacity=True))) <= 200


@pytest.mark.parametrize(("status", "body"), [(401, b"who"), (404, b""), (503, b"loading")])
def test_message_names_the_server_that_failed(status: int, body: bytes) -> None:
    for who, more in (("the gateway", {}), ("10.0.0.1:8000", {"answered_by": "10.0.0.1:8000"})):
        outcome = classify_answer(status, {}, body, 0.0, **more)
        assert isinstance(outcome, Failed)
        assert outcome.why.startswith(f"{who} answered {status}")


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("reason", ["evicted", "evicted-priority", "evicted-queue-pressure; by=realtime"])
def test_eviction_is_neither_overload_nor_failure(status: int, reason: str) -> None:
    headers = {"x-llm-d-request-dropped-reason": reason, "retry-after": "3"}
    outcome = classify_answer(status, headers, b"", NOW)
    assert outcome == Evicted(status, reason, retry_after_s=3.0)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_internal_failure_of_the_picker_counts_as_failed_attempt(status: int) -> None:
    headers = {"x-llm-d-request-dropped-reason": "rejected-internal; plugin"}
    outcome = classify_answer(status, headers, b"boom", NOW)
    assert outcome == Failed(f"the gateway answered {status}, rejected-internal", status, b"boom")


@pytest.mark.parametrize(
    "body",
    [
        b"inference error: Internal - request cannot be admitted",
        b'{"error":{"message":"request cannot be admitted","type":"server_error","code":500}}',
    ],
)
@pytest.mark.parametrize("reason", ["", "rejected-internal"])
def test_error_body_is_read_as_text_and_as_json(body: bytes, reason: str) -> None:
    headers = {"x-llm-d-request-dropped-reason": reason} if reason else {}
    assert classify_answer(500, headers, body, NOW) == Overloaded(500, reason, is_out_of_capacity=False)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("body", OVERLOAD_BODIES)
def test_refusal_of_a_model_server_with_a_full_queue_is_overload(status: int, body: bytes) -> None:
    outcome = classify_answer(status, {"retry-after": "2"}, body, NOW)
    assert outcome == Overloaded(status, "server-full", is_out_of_capacity=True, retry_after_s=2.0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no healthy upstream",
        b"upstream connect error or disconnect/reset before headers. reset reason: overflow",
        b"<html>the request queue is full</html>",
        b'{"error":{"message":"cannot answer: the request queue is full","code":503}}',
        b'{"error":{"message":["the request queue is full"]}}',
        b'{"error":"model is loading"}',
        b'{"message":{"error":"the request queue is full"}}',
        b'{"error":{"message":"the request queue is full"',
        b"{" * 100_000,
        b"[" * 16_000,
        b'{"error":' * 1_500,
        b"the request queue is full" + b" " * 20_000,
    ],
)
def test_any_other_503_is_an_intermediary_error(body: bytes) -> None:
    outcome = classify_answer(503, {}, body, NOW)
    assert isinstance(outcome, Failed)
    assert outcome.is_intermediary_error


EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
WORDS = b'data: {"choices":[{"text":"evicted: the request queue is full"}]}\n\n'


@pytest.mark.parametrize("before", [b"", WORDS])
@pytest.mark.parametrize("done", [b"", b"data: [DONE]\r\n\r\n"])
def test_stream_that_ends_with_a_refusal_counts_as_refusal(before: bytes, done: bytes) -> None:
    full = before + b"data: " + SGLANG_OVERLOADED + b"\n\n" + done
    assert classify_answer(200, EVENTS, full, NOW) == Overloaded(200, "server-full", is_out_of_capacity=True)
    evicted = before + b'data: {"error":{"message":"bye","type":"evicted-priority","code":429}}\n\n' + done
    assert classify_answer(200, EVENTS, evicted, NOW) == Evicted(200, "evicted-priority")
    assert classify_cut_answer(200, EVENTS, evicted[: len(evicted) - 1]) == Evicted(200, "evicted-priority")


@pytest.mark.parametrize(
    "body",
    [
        WORDS,
        WORDS + b"data: [DONE]\n\n",
        b'data: {"error":{"message":"the prompt is too long","code":400}}\n\n',
        b'data: {"error":{"message":"evicted"}}\n\n',
        b"data: " + SGLANG_OVERLOADED + b"\n\n" + WORDS,
        b"data: \xff{\n\n",
        b"data",
        b"",
    ],
)
def test_stream_with_another_end_is_delivered(body: bytes) -> None:
    assert classify_answer(200, EVENTS, body, NOW) == Delivered(200, body)
    assert classify_cut_answer(200, EVENTS, body) is None


def test_body_that_is_no_stream_is_not_searched_for_events() -> None:
    body = b"data: " + SGLANG_OVERLOADED + b"\n\n"
    assert classify_answer(200, {"content-type": "application/json"}, body, NOW) == Delivered(200, body)
    assert classify_cut_answer(200, {}, body) is None


def test_cut_answer_with_the_drop_reason_of_an_eviction_counts_as_evicted() -> None:
    assert classify_cut_answer(200, {"x-llm-d-request-dropped-reason": "evicted"}, b"{") == Evicted(
        200, "evicted"
    )
    assert classify_cut_answer(200, {"x-llm-d-request-dropped-reason": "rejected-internal"}, b"{") is None


def test_rejected_credentials_of_the_gateway_name_the_setting() -> None:
    for status in (401, 407):
        outcome = classify_answer(status, {}, b"", NOW)
        assert isinstance(outcome, Failed)
        assert "gateway.token_file" in outcome.why
        direct = classify_answer(status, {}, b"", NOW, answered_by="10.0.0.1:8000")
        assert isinstance(direct, Failed)
        assert "gateway.token_file" not in direct.why
