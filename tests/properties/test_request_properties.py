"""Properties of the request format: parsing never raises, and encoded values are parsed unchanged."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.request import Rejection, Request, encode_member, parse_member
from dispatcher.requests.result import decode_result, encode_answer, encode_failure
from dispatcher.requests.score import PRIORITY_STEP, compute_score, decode_deadline
from dispatcher.wire_format import ErrorCode

text = st.text(st.characters(codec="utf-8"))
ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
header_values = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")))
maps = st.dictionaries(text, text, max_size=4)
FIELDS = [
    *("internal", "request_kind", "data", "id", "deadline", "payload", "created", "headers", "metadata"),
    *("endpoint", "request_token", "result_queue_name", "labels", "retry_count", "sequence", "other"),
]
member_like = st.fixed_dictionaries(
    {},
    optional={
        "request_kind": st.sampled_from(["plain", "redis", "pubsub", "", "x", None, 1]) | json_values,
        "internal": st.dictionaries(st.sampled_from(FIELDS), json_values) | json_values,
        "data": st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, json_values | maps | ids))
        | json_values,
    },
)


def assert_valid(parsed: Request | Rejection) -> None:
    if isinstance(parsed, Rejection):
        assert parsed.code in (ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE)
        assert parsed.message
        assert parsed.id is None or parsed.id
        return
    assert parsed.id
    assert 0 < parsed.deadline < PRIORITY_STEP
    assert parsed.payload[:1] == b"{"
    for values in (parsed.headers, parsed.metadata, parsed.labels):
        assert all(isinstance(value, str) for value in values.values())


@given(st.binary())
def test_any_bytes_are_parsed_or_rejected(member: bytes) -> None:
    assert_valid(parse_member(member, max_payload_bytes=100))


@given(member_like)
def test_any_json_is_parsed_or_rejected(member: Any) -> None:
    assert_valid(parse_member(json.dumps(member).encode(), max_payload_bytes=100))
    assert_valid(parse_member(json.dumps(member, ensure_ascii=False).encode("utf-8", "surrogatepass")))


VALID = encode_member(
    "r-1", b'{"prompt": "hi \\ud800"}', 9, headers={"x-a": "b"}, metadata={"k": "v"}, token="t", results="l"
)


@given(st.data())
def test_damaged_member_is_parsed_or_rejected(data: st.DataObject) -> None:
    damaged = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        end = data.draw(st.integers(at, min(at + 8, len(damaged))))
        damaged[at:end] = data.draw(st.binary(max_size=4))
    assert_valid(parse_member(bytes(damaged)))


@given(st.integers(0, len(VALID) - 1))
def test_rejection_of_a_truncated_member_contains_only_its_own_fields(length: int) -> None:
    parsed = parse_member(VALID[:length])
    assert isinstance(parsed, Rejection)
    assert parsed.id in (None, "r-1")
    assert parsed.token in ("", "t")
    assert parsed.results in ("", "l")


@given(
    ids,
    st.dictionaries(text, json_values, max_size=4),
    st.integers(1, PRIORITY_STEP - 1),
    st.dictionaries(st.from_regex(r"[A-Za-z0-9-]+", fullmatch=True), header_values, max_size=3),
    maps,
    maps,
    text,
)
def test_encoded_member_is_parsed_to_the_same_request(
    request_id: str,
    payload: dict[str, Any],
    deadline: int,
    headers: dict[str, str],
    metadata: dict[str, str],
    labels: dict[str, str],
    other: str,
) -> None:
    # The payload may contain escaped lone surrogates. Numbers that JSON does not have would be rejected.
    raw = json.dumps(payload).replace("NaN", "0").replace("Infinity", "0").encode()
    member = encode_member(
        request_id,
        raw,
        deadline,
        headers=headers,
        metadata=metadata,
        labels=labels,
        endpoint=other,
        token=other,
        results=other,
    )
    assert parse_member(member) == Request(
        id=request_id,
        deadline=deadline,
        payload=raw,
        headers=headers,
        metadata=metadata,
        labels=labels,
        endpoint=other,
        token=other,
        results=other,
    )


@given(ids, st.integers(100, 599), st.binary())
def test_result_contains_the_body_or_a_note_that_it_was_changed(
    request_id: str, status: int, body: bytes
) -> None:
    result = decode_result(encode_answer(request_id, status, body))
    assert (result.id, result.status_code, result.error_code) == (request_id, status, None)
    if result.payload_note is None:
        assert result.payload.encode() == body
    else:
        assert result.payload == body.decode(errors="replace") != ""


@given(ids, st.sampled_from(ErrorCode), text)
def test_failure_contains_code_and_message_also_in_its_payload(
    request_id: str, code: ErrorCode, why: str
) -> None:
    result = decode_result(encode_failure(request_id, code, why))
    assert (result.id, result.status_code, result.error_code) == (request_id, None, code.value)
    assert json.loads(result.payload) == {"error": why}
    assert result.error_message == why


@given(st.integers(1, PRIORITY_STEP - 1), st.integers(0, 9), st.integers(1, PRIORITY_STEP - 1))
def test_score_orders_by_priority_and_contains_the_deadline(deadline: int, priority: int, other: int) -> None:
    assert decode_deadline(compute_score(deadline, priority)) == deadline
    if priority:
        assert compute_score(other, priority - 1) < compute_score(deadline, priority)


@given(st.floats())
def test_any_score_is_decoded_to_a_valid_deadline(score: float) -> None:
    assert 0 <= decode_deadline(score) < PRIORITY_STEP
