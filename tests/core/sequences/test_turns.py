"""What a producer says of a sequence is read as it meant it, or refused with what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.request import Rejection, Request, encode_member, parse_member
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import TurnEnd
from dispatcher.core.sequences.turns import MAX_INDEX, MAX_SEQUENCE_ID_BYTES, OnError, Turn
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.requeue import build_resubmission
from tests.floors import beside, cpu_of

turns = st.builds(
    Turn,
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
    st.none() | st.integers(0, MAX_INDEX),
    st.booleans(),
    st.booleans(),
    st.none() | st.sampled_from(OnError),
)


def read(**data: Any) -> Request | Rejection:
    fields = {"id": "r-1", "deadline": 2_000_000_000, "payload": {}, **data}
    return parse_member(json.dumps({"request_kind": "redis", "data": fields}).encode())


def turn(**data: Any) -> Turn | None:
    found = read(**data)
    assert isinstance(found, Request), found
    return found.sequence


@given(turns)
def test_what_is_encoded_of_a_turn_comes_back(told: Turn) -> None:
    found = parse_member(encode_member("r", b"{}", 2_000_000_000, sequence=told))
    assert isinstance(found, Request)
    assert found.sequence == told


def test_a_turn_is_read_as_it_stands() -> None:
    assert turn() is None
    assert turn(sequence=None) is None
    assert turn(sequence={"id": "chat-7"}) == Turn("chat-7")
    full = {"id": "ü", "index": 3, "last": True, "reset": True, "on_error": "hold", "later": [1]}
    assert turn(sequence=full) == Turn("ü", 3, last=True, reset=True, on_error=OnError.HOLD)
    assert turn(sequence={"id": "x", "index": None, "last": None, "on_error": None}) == Turn("x")
    assert turn(sequence={"id": "x", "index": MAX_INDEX}) == Turn("x", MAX_INDEX)
    assert turn(sequence={"id": "x" * MAX_SEQUENCE_ID_BYTES}) == Turn("x" * MAX_SEQUENCE_ID_BYTES)


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
def test_one_that_can_be_none_is_refused_with_what_is_wrong(sequence: Any, why: str) -> None:
    found = read(sequence=sequence)
    assert isinstance(found, Rejection)
    assert found.code is ErrorCode.INVALID_REQUEST
    assert found.message.startswith(why)
    assert (found.id, found.sequence) == ("r-1", None)


SECRET = "a secret of 128 bits"


def of(*, results: str = "", token: str = "", **data: Any) -> Turn:
    internal = {"result_queue_name": results, "request_token": token}
    fields = {"id": "r-1", "deadline": 2_000_000_000, "payload": {}, **data}
    found = parse_member(json.dumps({"internal": internal, "request_kind": "redis", "data": fields}).encode())
    assert isinstance(found, Request), found
    assert found.sequence is not None
    return found.sequence


def test_the_owner_of_a_sequence_is_told_by_its_secret_else_by_the_result_list() -> None:
    by_secret = of(sequence={"id": "s", "secret": SECRET})
    assert by_secret.owner == of(sequence={"id": "t", "secret": SECRET}, results="alice").owner
    owners = {
        by_secret.owner,
        of(sequence={"id": "s"}, results=SECRET).owner,
        of(sequence={"id": "s", "secret": "another secret of these"}).owner,
        of(sequence={"id": "s"}, results="alice").owner,
        of(sequence={"id": "s"}).owner,
    }
    assert len(owners) == 5, "a list that is called like a secret is another owner"
    assert (
        of(metadata={"sequence_id": "s"}, results="alice").owner
        == of(sequence={"id": "s"}, results="alice").owner
    )
    assert of(sequence={"id": "s"}).owner == ""


def test_the_default_list_is_one_owner_whether_it_is_named_or_not() -> None:
    names = QueueNames("batch:{q}:requests", "batch:{q}:results")
    assert names.get_sequence_owner(of(sequence={"id": "s"}, results="batch:{q}:results")) == ""
    assert names.get_sequence_owner(of(sequence={"id": "s"}, results="batch:{q}:results:x")) != ""


def test_a_secret_is_in_the_member_and_in_nothing_that_is_shown() -> None:
    told = of(sequence={"id": "s", "secret": SECRET})
    assert SECRET.encode() in encode_member("r", b"{}", 2_000_000_000, sequence=told)
    assert b"owner" not in encode_member("r", b"{}", 2_000_000_000, sequence=told)
    shown = repr(TurnEnd(told)) + repr(parse_member(encode_member("r", b"{}", 2_000_000_000, sequence=told)))
    assert SECRET not in shown
    assert SECRET not in told.owner


def test_a_dead_request_that_is_accepted_anew_keeps_its_secret() -> None:
    names = QueueNames("batch:{q}:requests", "batch:{q}:results")
    dead = encode_member(
        "r", b"{}", 9, sequence=Turn("s", 3, secret=SECRET), results="batch-results:0123456789abcdef"
    )
    again = build_resubmission(names, dead, 9.0, 2_000_000_000)
    assert again is not None
    found = parse_member(again.member)
    assert found.sequence is not None
    assert found.sequence.secret == SECRET


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
    ids=["none", "token alone", "created", "both", "apart", "no digits", "short", "milliseconds"],
)
def test_when_a_request_was_submitted_is_told_by_created_and_exactly_by_our_tokens(
    created: int | None, token: str, expected: float
) -> None:
    assert of(created=created, token=token, sequence={"id": "s"}).submitted_at == expected


def test_what_names_its_sequence_twice_is_refused() -> None:
    data = b'{"id":"r","deadline":9,"payload":{},"sequence":{"id":"a"},"sequence":null}'
    found = parse_member(b'{"request_kind":"redis","data":%s}' % data)
    assert isinstance(found, Rejection)
    assert found.message == "data.sequence: given twice"


PLAIN = b'"id":"r","deadline":9,"payload":{}'


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'%b,"sequence":{"id":"a"}' % PLAIN, Turn("a")),
        (b'"sequence" : {"index":1,"id":"a"},%b' % PLAIN, Turn("a", 1)),
        (b'%b,"sequence":{"id":"}"}' % PLAIN, Turn("}")),
        (b'%b,"sequence":{"id":"a","more":{"id":"b"}}' % PLAIN, Turn("a")),
        (b'%b,"sequence":{"id":"a","more":["id"]},"metadata":{"of":"sequence"}' % PLAIN, Turn("a")),
        (b'%b,"sequence":{"id":"a"},"id":"s"' % PLAIN, "data.id: given twice"),
        (b'%b,"sequence":{"id":"a","more":{}},"id":"s"' % PLAIN, "data.id: given twice"),
        (b'%b,"sequence":{"id":"}"},"deadline":8' % PLAIN, "data.deadline: given twice"),
        (b'"sequence":{"id":"a"},"deadline":8,%b' % PLAIN, "data.deadline: given twice"),
        (b'%b,"sequence":{"id":"a"},"\\u0069d":"s"' % PLAIN, "data.id: given twice"),
    ],
)
def test_the_id_of_a_sequence_is_no_second_one_of_the_request(data: bytes, expected: Turn | str) -> None:
    found = parse_member(b'{"request_kind":"redis","data":{%b}}' % data)
    assert expected == (found.message if isinstance(found, Rejection) else found.sequence)


async def test_a_request_of_a_sequence_is_read_about_as_fast_as_another() -> None:
    """Its `id` beside the sequence's once sent it through the slow search for names that stand twice."""
    one, other = (
        encode_member("r" * 20, b'{"prompt":"hi"}', 2_000_000_000, sequence=turn)
        for turn in (Turn("chat-7", 3), None)
    )

    def read_often(member: bytes) -> None:
        for _ in range(200):
            parse_member(member)

    found = await beside(cpu_of(lambda: read_often(one)), cpu_of(lambda: read_often(other)))
    print(f"{found.ratio:.2f} x")
    assert found.ratio <= 3.0


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
def test_foreign_metadata_is_never_a_reason_to_refuse(
    metadata: dict[str, str], expected: Turn | None
) -> None:
    assert turn(metadata=metadata) == expected


def test_the_object_counts_where_both_stand() -> None:
    assert turn(metadata={"sequence_id": "a"}, sequence={"id": "b"}) == Turn("b")


def test_one_that_is_too_large_says_whose_turn_it_was() -> None:
    member = encode_member("r", b'{"x": 1}', 2_000_000_000, sequence=Turn("a", 1))
    found = parse_member(member, max_payload_bytes=2)
    assert isinstance(found, Rejection)
    assert (found.code, found.sequence) == (ErrorCode.TOO_LARGE, Turn("a", 1))


@pytest.mark.parametrize("told", [Turn(""), Turn("x", -1), Turn("x" * 300), Turn("x", MAX_INDEX + 1)])
def test_no_member_is_made_that_would_be_refused(told: Turn) -> None:
    with pytest.raises(ValueError, match=r"data\.sequence"):
        encode_member("r", b"{}", 2_000_000_000, sequence=told)
