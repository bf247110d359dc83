"""A continued conversation equals the one that a client would have kept, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.sequences.conversation import CannotContinue, build_payload, encode_conversation

MAX_BYTES = 1 << 20
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
other_fields = st.dictionaries(
    texts.filter(lambda name: name not in ("messages", "stream", "input")), values, max_size=3
)


def write_json(value: Any, draw: st.DrawFn) -> str:
    """Return the value as JSON, with arbitrary whitespace and escapes."""
    blank = draw(st.sampled_from(["", " ", "\n  "]))
    return json.dumps(
        value, ensure_ascii=draw(st.booleans()), separators=("," + blank, ":" + blank), allow_nan=False
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[str], dict[str, Any], bool, str]]:
    """Return for each turn its messages as JSON, the other fields of its body, whether these come first, and
    the message of its answer."""
    return [
        (
            [write_json(each, draw) for each in draw(st.lists(messages, max_size=3))],
            draw(other_fields),
            draw(st.booleans()),
            write_json(draw(answers), draw),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


def is_plain_name(name: str) -> bool:
    return json.dumps(name) == f'"{name}"'


def build_body(new_messages: list[str], other_fields: dict[str, Any], fields_first: bool) -> bytes:
    fields = [
        f"{json.dumps(name)}:{json.dumps(value)}"
        for name, value in other_fields.items()
        if is_plain_name(name)
    ]
    messages_field = '"messages": [' + ",".join(new_messages) + "]"
    return (
        "{" + ",".join([*fields, messages_field] if fields_first else [messages_field, *fields]) + "}"
    ).encode()


def build_answer(message: str) -> bytes:
    choices = f'{{"index":0,"message":{message},"finish_reason":"stop"}},{{"index":1,"message":{{}}}}'
    return f'{{"id":"x","choices": [{choices}],"usage":{{}}}}'.encode()


@given(conversations())
def test_sent_payload_contains_the_conversation_so_far(
    turns: list[tuple[list[str], dict[str, Any], bool, str]],
) -> None:
    conversation, expected_messages = b"", list[str]()
    for new_messages, fields, fields_first, message in turns:
        body = build_body(new_messages, fields, fields_first)
        sent = build_payload(body, conversation, MAX_BYTES)
        assert isinstance(sent, bytes), sent
        expected_messages += new_messages
        if conversation:
            assert sent == build_body(expected_messages, fields, fields_first)
        else:
            assert sent == body, "the first payload is sent unchanged"
        conversation = encode_conversation(sent, build_answer(message), MAX_BYTES)
        expected_messages.append(message)
        assert json.loads(conversation) == [json.loads(each) for each in expected_messages]
        assert conversation == b"[" + ",".join(expected_messages).encode() + b"]"


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_are_accepted_without_an_error(body: bytes, conversation: bytes, answer: bytes) -> None:
    for payload in (body, b"{" + body + b"}", b'{"messages":[' + body + b"]}"):
        build_payload(payload, b"", MAX_BYTES)
        encode_conversation(payload, answer, MAX_BYTES)
        encode_conversation(b'{"messages":[]}', answer, MAX_BYTES)


def test_conversation_of_the_responses_api_continues_by_the_id_of_the_answer() -> None:
    conversation = encode_conversation(b'{"input":"hi"}', b'{"id": "resp_1", "output": []}', MAX_BYTES)
    assert (
        build_payload(b'{ "input":"and?"}', conversation, MAX_BYTES)
        == b'{"previous_response_id":"resp_1","input":"and?"}'
    )
    own_id = b'{"input":"x","previous_response_id":"mine"}'
    assert build_payload(own_id, conversation, MAX_BYTES) == own_id, (
        "the request names a previous response itself"
    )


@pytest.mark.parametrize(
    ("body", "conversation", "why"),
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
def test_conversation_that_cannot_continue_is_rejected_with_the_reason(
    body: bytes, conversation: bytes, why: str
) -> None:
    decision = build_payload(body, conversation, 50)
    assert isinstance(decision, CannotContinue)
    assert why in decision.why


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"data: {}", "cannot continue with this answer"),
        (b'{"choices":[]}', "no message"),
        (b'{"choices":[{"text":"x"}]}', "no message"),
        (build_answer('{"content":"%s"}' % ("x" * 100)), "sequences.max_carry_bytes is 50"),
    ],
)
def test_next_turn_is_rejected_if_the_answer_has_no_message(answer: bytes, why: str) -> None:
    decision = build_payload(b'{"messages":[]}', encode_conversation(b'{"messages":[]}', answer, 50), 50)
    assert isinstance(decision, CannotContinue)
    assert why in decision.why
