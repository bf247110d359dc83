"""A conversation that is carried on is the one that a client would have kept, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.sequences.conversation import CannotContinue, build_payload, encode_conversation

MOST = 1 << 20
texts = st.text(max_size=30)
roles = st.sampled_from(["user", "system", "tool"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
messages = st.fixed_dictionaries(
    {"role": roles, "content": texts}, optional={"name": texts, "messages": values}
)
calls = st.lists(st.fixed_dictionaries({"id": texts, "arguments": texts}), max_size=2)
answers = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | texts}, optional={"tool_calls": calls}
)
others = st.dictionaries(
    texts.filter(lambda name: name not in ("messages", "stream", "input")), values, max_size=3
)


def written(value: Any, draw: st.DrawFn) -> str:
    """As some program writes it: with blanks, escapes, in any order."""
    blank = draw(st.sampled_from(["", " ", "\n  "]))
    return json.dumps(
        value, ensure_ascii=draw(st.booleans()), separators=("," + blank, ":" + blank), allow_nan=False
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[str], dict[str, Any], bool, str]]:
    """Of each turn: its messages as they are written, the other fields of its body, whether these come first,
    and the message of its answer."""
    return [
        (
            [written(each, draw) for each in draw(st.lists(messages, max_size=3))],
            draw(others),
            draw(st.booleans()),
            written(draw(answers), draw),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


def plain_name(name: str) -> bool:
    return json.dumps(name) == f'"{name}"'


def body_of(own: list[str], other: dict[str, Any], first: bool) -> bytes:
    fields = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in other.items() if plain_name(name)]
    said = '"messages": [' + ",".join(own) + "]"
    return ("{" + ",".join([*fields, said] if first else [said, *fields]) + "}").encode()


def answer_of(message: str) -> bytes:
    choices = f'{{"index":0,"message":{message},"finish_reason":"stop"}},{{"index":1,"message":{{}}}}'
    return f'{{"id":"x","choices": [{choices}],"usage":{{}}}}'.encode()


@given(conversations())
def test_what_the_server_sees_is_the_conversation_kept_by_hand(
    turns: list[tuple[list[str], dict[str, Any], bool, str]],
) -> None:
    carried, by_hand = b"", list[str]()
    for own, other, first, message in turns:
        body = body_of(own, other, first)
        sent = build_payload(body, carried, MOST)
        assert isinstance(sent, bytes), sent
        by_hand += own
        if carried:
            assert sent == body_of(by_hand, other, first)
        else:
            assert sent == body, "the first goes as it is"
        carried = encode_conversation(sent, answer_of(message), MOST)
        by_hand.append(message)
        assert json.loads(carried) == [json.loads(each) for each in by_hand]
        assert carried == b"[" + ",".join(by_hand).encode() + b"]"


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_nothing_that_others_write_raises(body: bytes, carried: bytes, answer: bytes) -> None:
    for payload in (body, b"{" + body + b"}", b'{"messages":[' + body + b"]}"):
        build_payload(payload, b"", MOST)
        encode_conversation(payload, answer, MOST)
        encode_conversation(b'{"messages":[]}', answer, MOST)


def test_responses_go_on_by_the_id_of_the_answer() -> None:
    carried = encode_conversation(b'{"input":"hi"}', b'{"id": "resp_1", "output": []}', MOST)
    assert (
        build_payload(b'{ "input":"and?"}', carried, MOST)
        == b'{"previous_response_id":"resp_1","input":"and?"}'
    )
    own = b'{"input":"x","previous_response_id":"mine"}'
    assert build_payload(own, carried, MOST) == own, "it names one itself"


@pytest.mark.parametrize(
    ("body", "carried", "why"),
    [
        (b'{"prompt":"x"}', b"", "neither"),
        (b'{"messages":[],"stream":true}', b"", "stream"),
        (b'{"messages":[],"messages":[]}', b"", "twice"),
        (b'{"messages":{}}', b"", "no list"),
        (b'{"messages":[]}', b'"resp_1"', "is the id of a response"),
        (b'{"input":"x"}', b"[]", "consists of messages"),
        (b'{"messages":["%b"]}' % (b"x" * 100), b"", "104 bytes, and sequences.max_carry_bytes is 50"),
    ],
)
def test_what_cannot_be_carried_on_says_why(body: bytes, carried: bytes, why: str) -> None:
    told = build_payload(body, carried, 50)
    assert isinstance(told, CannotContinue)
    assert why in told.why


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"data: {}", "cannot continue with this answer"),
        (b'{"choices":[]}', "no message"),
        (b'{"choices":[{"text":"x"}]}', "no message"),
        (answer_of('{"content":"%s"}' % ("x" * 100)), "sequences.max_carry_bytes is 50"),
    ],
)
def test_answer_that_leaves_nothing_is_told_to_the_next_turn(answer: bytes, why: str) -> None:
    told = build_payload(b'{"messages":[]}', encode_conversation(b'{"messages":[]}', answer, 50), 50)
    assert isinstance(told, CannotContinue)
    assert why in told.why
