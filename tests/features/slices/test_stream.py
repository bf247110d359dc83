"""Server-sent events joined to the answer that a call without a stream has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.slices.stream import MAX_EVENT_BYTES, MAX_EVENTS, join_events
from dispatcher.lab.standin.generation_api import GenerationConfig, parse_request

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def encode_events(*events: Any, end: bytes = b"\n\n") -> bytes:
    datas = [event if isinstance(event, bytes) else msgspec.json.encode(event) for event in events]
    return b"".join(b"data: %b%b" % (data, end) for data in datas)


def join(*events: Any) -> tuple[dict[str, Any], bool]:
    joined = join_events(encode_events(*events))
    assert joined is not None
    return msgspec.json.decode(joined[0]), joined[1]


def build_text(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "a", "object": "text_completion", "choices": [{"index": 0, "text": text, **fields}]}


def build_delta(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "a", "object": "chat.completion.chunk", "choices": [choice]}


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
USAGE_EVENT = {"id": "a", "choices": [], "usage": USAGE}


def test_events_of_a_completion_make_up_its_answer() -> None:
    last = build_text("b", finish_reason="stop", stop_reason="c")
    answer, is_complete = join(build_text("a", finish_reason=None), last, USAGE_EVENT, b"[DONE]")
    assert is_complete
    assert answer == {
        "id": "a",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "ab", "finish_reason": "stop", "stop_reason": "c"}],
        "usage": USAGE,
    }


def test_events_of_a_chat_make_up_its_message() -> None:
    events = (build_delta(role="assistant", content=None), build_delta(content="a"), build_delta("stop"))
    answer, is_complete = join(*events, USAGE_EVENT)
    assert is_complete
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a"}
    assert "delta" not in choice


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_apart(name: str) -> None:
    answer, _ = join(
        build_delta(**{name: "th"}), build_delta(**{name: "ink"}), build_delta("stop", content="a")
    )
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "think",
    }


def test_tokens_are_counted_by_their_ids_without_a_statement_of_the_server() -> None:
    first = {**build_text("a", token_ids=[1, 2], prompt_token_ids=[7, 8, 9])}
    answer, _ = join(first, build_text("b", token_ids=[3]))
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["prompt_token_ids"] == [7, 8, 9]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3}


def test_tokens_are_counted_by_events_with_text_if_there_are_no_ids() -> None:
    answer, _ = join(build_text("a"), build_text(""), build_text("bc"))
    assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 2}


def test_token_ids_that_are_missing_in_a_part_of_a_cut_stream_are_not_used() -> None:
    events = [build_text("a", token_ids=[1], prompt_token_ids=[7]), build_text("b", token_ids=[])]
    answer, _ = join(*events)
    assert "token_ids" not in answer["choices"][0]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 2}
    answer, _ = join(*events, USAGE_EVENT)
    assert answer["choices"][0]["token_ids"] == [1], "the number of tokens shows whether some are missing"


def test_prompt_tokens_of_a_chat_are_in_the_event_itself() -> None:
    answer, _ = join({**build_delta(content="a"), "prompt_token_ids": [7, 8]})
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("events", "is_complete"),
    [
        ([build_text("a", finish_reason="length")], False),
        ([build_text("a", finish_reason="length"), b"[DONE]"], True),
        ([build_text("a", finish_reason="length"), USAGE_EVENT], True),
        ([build_text("a"), USAGE_EVENT, b"[DONE]"], False),
        ([build_text("a"), {"error": {"message": "out of memory"}}, build_text("b")], False),
    ],
)
def test_answer_is_complete_if_its_end_and_all_after_it_have_come(
    events: list[Any], is_complete: bool
) -> None:
    answer, found = join(*events)
    assert found is is_complete
    assert answer["choices"][0]["text"] == "a"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("received", [b"", b"\n\n", b": comment\n\n", b"data: [DONE]\n\n", b'{"choices":[]}'])
def test_answer_without_events_is_none(received: bytes) -> None:
    assert join_events(received) is None


def test_other_lines_and_carriage_returns_do_not_matter() -> None:
    received = encode_events(build_text("a"), end=b"\r\n\r\n") + b": ping\r\nevent: message\r\n"
    joined = join_events(received + encode_events(build_text("b"), end=b"\r\n"))
    assert joined is not None
    assert msgspec.json.decode(joined[0])["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    "malformed",
    [
        b"{",
        b"5",
        b"\xff",
        b'{"choices":5}',
        b'{"choices":{"a":1}}',
        b'{"choices":[5]}',
        b'{"choices":[{"text":5}]}',
        b'{"choices":[{"delta":"a"}]}',
        b'{"choices":[{"delta":{"content":[1]}}]}',
        b'{"choices":[{"delta":{"reasoning":5}}]}',
        b'{"choices":[{"text":"a","token_ids":5}]}',
        b'{"choices":[{"text":"a","token_ids":["x"]}]}',
        b'{"choices":[{"text":"a","token_ids":[-1]}]}',
        b'{"choices":[{"text":"a","token_ids":[1e400]}]}',
        b'{"choices":[{"text":"a","token_ids":[18446744073709551616]}]}',
        b'{"choices":[],"prompt_token_ids":5}',
        b'{"choices":%b}' % (b"[" * 100_000),
    ],
)
def test_nothing_after_a_malformed_event_counts(malformed: bytes) -> None:
    answer, is_complete = join(build_text("a"), malformed, build_text("b", finish_reason="stop"), USAGE_EVENT)
    assert answer["choices"][0]["text"] == "a"
    assert not is_complete
    assert join_events(encode_events(malformed)) is None


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("chunk_tokens", [1, 4])
def test_stream_that_is_cut_at_any_byte_has_the_beginning_of_the_text(path: str, chunk_tokens: int) -> None:
    config = GenerationConfig(end_probability=0.0, chunk_tokens=chunk_tokens)
    content = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    fields = {"max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    body = msgspec.json.encode({"return_token_ids": True, **fields, **content})
    generated = parse_request(body, is_chat=path == CHAT, config=config).generate_answer(0)
    received = encode_events(*(event.data for event in generated.build_events("a", 1)))
    whole, lengths, joined = generated.generation.text, list[int](), None
    for end in range(len(received) + 1):
        joined = join_events(received[:end])
        if joined is None:
            assert not lengths
            continue
        answer = msgspec.json.decode(joined[0])
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert whole.startswith(text)
        assert text == whole or not joined[1]
        assert answer["usage"]["completion_tokens"] == len(choice.get("token_ids", ()))
        lengths.append(len(text))
    assert lengths == sorted(lengths)
    assert joined is not None
    assert joined[1]
    assert lengths[-1] == len(whole)


def test_stream_of_too_many_events_ends_as_if_it_had_broken_off() -> None:
    events = [build_text("a"), *[build_text("")] * MAX_EVENTS, build_text("b"), USAGE_EVENT, b"[DONE]"]
    answer, is_complete = join(*events)
    assert answer["choices"][0]["text"] == "a"
    assert not is_complete


def test_stream_ends_before_an_event_that_is_too_long() -> None:
    answer, is_complete = join(build_text("a"), build_text("b" * MAX_EVENT_BYTES), build_text("c"), b"[DONE]")
    assert answer["choices"][0]["text"] == "a"
    assert not is_complete


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "text", "content", "token_ids", "usage", "object", "finish_reason"]
            ),
            children,
            max_size=4,
        )
    ),
)


@given(st.lists(JSON.map(msgspec.json.encode) | st.binary(max_size=20), max_size=5))
def test_any_events_are_joined_without_an_exception(events: list[bytes]) -> None:
    joined = join_events(encode_events(*events))
    if joined is not None:
        assert len(msgspec.json.decode(joined[0])["choices"]) == 1
