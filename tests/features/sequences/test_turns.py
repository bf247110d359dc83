"""The sequence of a request is parsed as its producer meant it, or rejected with the fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.sequences.queue.turn_end import TurnEnd, get_sequence_owner
from dispatcher.features.sequences.turns import MAX_INDEX, MAX_SEQUENCE_ID_BYTES, OnError, Turn
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.requeue import build_resubmission
from dispatcher.requests.request import Rejection, Request, encode_member, parse_member
from dispatcher.wire_format import ErrorCode
from tests.cost_comparison import compare_costs, measure_cpu_s

turns = st.builds(
    Turn,
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
    st.none() | st.integers(0, MAX_INDEX),
    st.booleans(),
    st.booleans(),
    st.none() | st.sampled_from(OnError),
)


def parse_with(**data: Any) -> Request | Rejection:
    fields = {"id": "r-1", "deadline": 2_000_000_000, "payload": {}, **data}
    return parse_member(json.dumps({"request_kind": "redis", "data": fields}).encode())


def parse_turn(**data: Any) -> Turn | None:
    parsed = parse_with(**data)
    assert isinstance(parsed, Request), parsed
    assert parsed.extra is None or isinstance(parsed.extra, Turn)
    return parsed.extra


@given(turns)
def test_encoded_turn_is_parsed_to_the_same_turn(turn: Turn) -> None:
    parsed = parse_member(encode_member("r", b"{}", 2_000_000_000, extra=turn))
    assert isinstance(parsed, Request)
    assert parsed.extra == turn


def test_turn_is_parsed_with_all_its_fields() -> None:
    assert parse_turn() is None
    assert parse_turn(sequence=None) is None
    assert parse_turn(sequence={"id": "chat-7"}) == Turn("chat-7")
    full = {"id": "ü", "index": 3, "last": True, "reset": True, "on_error": "hold", "later": [1]}
    assert parse_turn(sequence=full) == Turn("ü", 3, last=True, reset=True, on_error=OnError.HOLD)
    assert parse_turn(sequence={"id": "x", "index": None, "last": None, "on_error": None}) == Turn("x")
    assert parse_turn(sequence={"id": "x", "index": MAX_INDEX}) == Turn("x", MAX_INDEX)
    assert parse_turn(sequence={"id": "x" * MAX_SEQUENCE_ID_BYTES}) == Turn("x" * MAX_SEQUENCE_ID_BYTES)


@pytest.mark.parametrize(
    ("sequence", "why"),
    [
        ({}, "data.sequence"),
        ([], "data.sequence"),
        ("chat-7", "data.sequence"),
        ({"id": ""}, "data.sequence.id"),
        ({"id": 7}, "data.sequence.id"),
        ({"id": "x" * (MAX_SEQUENCE_ID_BYTES + 1)}, "data.sequence.id"),
        ({"id": "ü" * 200}, "data.sequence.id: longer than 256 bytes"),
        ({"id": "x", "index": -1}, "data.sequence.index"),
        ({"id": "x", "index": 1.5}, "data.sequence.index"),
        ({"id": "x", "index": "1"}, "data.sequence.index"),
        ({"id": "x", "index": True}, "data.sequence.index"),
        ({"id": "x", "index": MAX_INDEX + 1}, "data.sequence.index"),
        ({"id": "x", "last": 1}, "data.sequence.last"),
        ({"id": "x", "reset": "no"}, "data.sequence.reset"),
        ({"id": "x", "on_error": "stop"}, "data.sequence.on_error"),
        ({"id": "x", "secret": "too short"}, "data.sequence.secret"),
        ({"id": "x", "secret": "x" * 257}, "data.sequence.secret"),
        ({"id": "x", "secret": 1e16}, "data.sequence.secret"),
    ],
)
def test_invalid_sequence_is_rejected_with_the_faulty_field(sequence: Any, why: str) -> None:
    parsed = parse_with(sequence=sequence)
    assert isinstance(parsed, Rejection)
    assert parsed.code is ErrorCode.INVALID_REQUEST
    assert parsed.message.startswith(why)
    assert (parsed.id, parsed.extra) == ("r-1", None)


SECRET = "a secret of 128 bits"


def parse_owned_turn(*, results: str = "", token: str = "", **data: Any) -> Turn:
    internal = {"result_queue_name": results, "request_token": token}
    fields = {"id": "r-1", "deadline": 2_000_000_000, "payload": {}, **data}
    parsed = parse_member(
        json.dumps({"internal": internal, "request_kind": "redis", "data": fields}).encode()
    )
    assert isinstance(parsed, Request), parsed
    assert isinstance(parsed.extra, Turn)
    return parsed.extra


def test_owner_of_a_sequence_is_its_secret_or_else_the_result_list() -> None:
    turn_with_secret = parse_owned_turn(sequence={"id": "s", "secret": SECRET})
    assert (
        turn_with_secret.owner
        == parse_owned_turn(sequence={"id": "t", "secret": SECRET}, results="alice").owner
    )
    owners = {
        turn_with_secret.owner,
        parse_owned_turn(sequence={"id": "s"}, results=SECRET).owner,
        parse_owned_turn(sequence={"id": "s", "secret": "another secret of these"}).owner,
        parse_owned_turn(sequence={"id": "s"}, results="alice").owner,
        parse_owned_turn(sequence={"id": "s"}).owner,
    }
    assert len(owners) == 5, "a result list with the same text as a secret is another owner"
    assert (
        parse_owned_turn(metadata={"sequence_id": "s"}, results="alice").owner
        == parse_owned_turn(sequence={"id": "s"}, results="alice").owner
    )
    assert parse_owned_turn(sequence={"id": "s"}).owner == ""


def test_default_result_list_is_the_same_owner_whether_named_or_not() -> None:
    names = QueueNames("batch:{q}:requests", "batch:{q}:results")
    assert (
        get_sequence_owner(names, parse_owned_turn(sequence={"id": "s"}, results="batch:{q}:results")) == ""
    )
    assert (
        get_sequence_owner(names, parse_owned_turn(sequence={"id": "s"}, results="batch:{q}:results:x")) != ""
    )


def test_secret_is_in_the_member_but_not_in_any_representation() -> None:
    turn = parse_owned_turn(sequence={"id": "s", "secret": SECRET})
    assert SECRET.encode() in encode_member("r", b"{}", 2_000_000_000, extra=turn)
    assert b"owner" not in encode_member("r", b"{}", 2_000_000_000, extra=turn)
    shown = repr(TurnEnd(turn)) + repr(parse_member(encode_member("r", b"{}", 2_000_000_000, extra=turn)))
    assert SECRET not in shown
    assert SECRET not in turn.owner


def test_requeued_dead_request_keeps_its_secret() -> None:
    names = QueueNames("batch:{q}:requests", "batch:{q}:results")
    dead_member = encode_member(
        "r", b"{}", 9, extra=Turn("s", 3, secret=SECRET), results="batch-results:0123456789abcdef"
    )
    resubmission = build_resubmission(names, dead_member, 9.0, 2_000_000_000)
    assert resubmission is not None
    parsed = parse_member(resubmission.member)
    assert parsed.extra is not None
    assert parsed.extra.secret == SECRET


@pytest.mark.parametrize(
    ("created", "token", "expected"),
    [
        (None, "", 0.0),
        (None, f"{1_700_000_000_500_000_000:016x}rest", 0.0),
        (1_700_000_000, "", 1_700_000_000.0),
        (1_700_000_000, f"{1_700_000_000_500_000_000:016x}rest", 1_700_000_000.5),
        (1_700_000_000, f"{1_600_000_000_500_000_000:016x}rest", 1_700_000_000.0),
        (1_700_000_000, "no hexadecimal digits", 1_700_000_000.0),
        (1_700_000_000, "17", 1_700_000_000.0),
        (1_700_000_000_000, "", 0.0),
    ],
    ids=[
        "none",
        "only token",
        "only created",
        "both",
        "different times",
        "no digits",
        "short",
        "milliseconds",
    ],
)
def test_submission_time_is_created_or_more_precisely_the_time_in_our_tokens(
    created: int | None, token: str, expected: float
) -> None:
    assert parse_owned_turn(created=created, token=token, sequence={"id": "s"}).submitted_at == expected


def test_request_with_two_sequences_is_rejected() -> None:
    data = b'{"id":"r","deadline":9,"payload":{},"sequence":{"id":"a"},"sequence":null}'
    parsed = parse_member(b'{"request_kind":"redis","data":%s}' % data)
    assert isinstance(parsed, Rejection)
    assert parsed.message == "data.sequence: given twice"


PLAIN_FIELDS = b'"id":"r","deadline":9,"payload":{}'


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'%b,"sequence":{"id":"a"}' % PLAIN_FIELDS, Turn("a")),
        (b'"sequence" : {"index":1,"id":"a"},%b' % PLAIN_FIELDS, Turn("a", 1)),
        (b'%b,"sequence":{"id":"}"}' % PLAIN_FIELDS, Turn("}")),
        (b'%b,"sequence":{"id":"a","more":{"id":"b"}}' % PLAIN_FIELDS, Turn("a")),
        (b'%b,"sequence":{"id":"a","more":["id"]},"metadata":{"of":"sequence"}' % PLAIN_FIELDS, Turn("a")),
        (b'%b,"sequence":{"id":"a"},"id":"s"' % PLAIN_FIELDS, "data.id: given twice"),
        (b'%b,"sequence":{"id":"a","more":{}},"id":"s"' % PLAIN_FIELDS, "data.id: given twice"),
        (b'%b,"sequence":{"id":"}"},"deadline":8' % PLAIN_FIELDS, "data.deadline: given twice"),
        (b'"sequence":{"id":"a"},"deadline":8,%b' % PLAIN_FIELDS, "data.deadline: given twice"),
        (b'%b,"sequence":{"id":"a"},"\\u0069d":"s"' % PLAIN_FIELDS, "data.id: given twice"),
    ],
)
def test_id_of_a_sequence_does_not_count_as_a_second_id_of_the_request(
    data: bytes, expected: Turn | str
) -> None:
    parsed = parse_member(b'{"request_kind":"redis","data":{%b}}' % data)
    assert expected == (parsed.message if isinstance(parsed, Rejection) else parsed.extra)


async def test_request_with_a_sequence_is_parsed_about_as_fast_as_one_without() -> None:
    """In an earlier version, the second `id` in the sequence caused a slow search for duplicate fields."""
    with_sequence, without_sequence = (
        encode_member("r" * 20, b'{"prompt":"hi"}', 2_000_000_000, extra=turn)
        for turn in (Turn("chat-7", 3), None)
    )

    def parse_repeatedly(member: bytes) -> None:
        for _ in range(200):
            parse_member(member)

    comparison = await compare_costs(
        measure_cpu_s(lambda: parse_repeatedly(with_sequence)),
        measure_cpu_s(lambda: parse_repeatedly(without_sequence)),
    )
    print(f"{comparison.ratio:.2f} x")
    assert comparison.ratio <= 3.0


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"sequence_id": "a"}, Turn("a")),
        ({"sequence_id": "a", "sequence_index": "12"}, Turn("a", 12)),
        ({"sequence_id": "a", "sequence_index": "-1"}, Turn("a")),
        ({"sequence_id": "a", "sequence_index": "1.0"}, Turn("a")),
        ({"sequence_id": "a", "sequence_index": "٣"}, Turn("a")),
        ({"sequence_id": "a", "sequence_index": "9" * 16}, Turn("a")),
        ({"sequence_id": "a", "sequence_index": "9" * 15}, Turn("a", MAX_INDEX)),
        ({"sequence_id": ""}, None),
        ({"sequence_id": "x" * (MAX_SEQUENCE_ID_BYTES + 1)}, None),
        ({"sequence_index": "1"}, None),
    ],
)
def test_sequence_in_metadata_is_parsed_or_ignored_but_never_rejected(
    metadata: dict[str, str], expected: Turn | None
) -> None:
    assert parse_turn(metadata=metadata) == expected


def test_sequence_object_takes_precedence_over_metadata() -> None:
    assert parse_turn(metadata={"sequence_id": "a"}, sequence={"id": "b"}) == Turn("b")


def test_rejection_of_a_too_large_request_contains_its_turn() -> None:
    member = encode_member("r", b'{"x": 1}', 2_000_000_000, extra=Turn("a", 1))
    parsed = parse_member(member, max_payload_bytes=2)
    assert isinstance(parsed, Rejection)
    assert (parsed.code, parsed.extra) == (ErrorCode.TOO_LARGE, Turn("a", 1))


@pytest.mark.parametrize("turn", [Turn(""), Turn("x", -1), Turn("x" * 300), Turn("x", MAX_INDEX + 1)])
def test_turn_that_would_be_rejected_is_not_encoded(turn: Turn) -> None:
    with pytest.raises(ValueError, match=r"data\.sequence"):
        encode_member("r", b"{}", 2_000_000_000, extra=turn)
