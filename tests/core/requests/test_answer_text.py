"""The model's words, whatever API the answer is of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.answer_text import extract_answer_text


def chat(said: Any, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": said, **more}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": {}}


def output_text(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": each, "annotations": []} for each in texts]
    return {"type": "message", "role": "assistant", "content": parts}


REASONING: dict[str, Any] = {"type": "reasoning", "summary": [], "content": None}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
REFUSAL = {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}
CALLED = [{"id": "c", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chat("Paris"), "Paris"),
        (chat(""), ""),
        (chat("Paris", reasoning_content="France …"), "Paris"),
        (chat([{"type": "text", "text": "Pa"}, {"type": "image"}, {"type": "text", "text": "ris"}]), "Paris"),
        ({"choices": [{"text": "Paris", "logprobs": None}, {"text": "Lyon"}]}, "Paris"),
        ({"object": "response", "output": [REASONING, output_text("Pa", "ris")]}, "Paris"),
        ({"output": [output_text("Pa"), CALL, output_text("ris")]}, "Paris"),
    ],
)
def test_the_words_of_an_answer(answer: dict[str, Any], words: str) -> None:
    assert extract_answer_text(json.dumps(answer).encode()) == words


@pytest.mark.parametrize(
    "answer",
    [
        chat(None, tool_calls=CALLED),
        chat([]),
        chat([{"type": "text"}]),
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": "Paris"},
        {"object": "list", "data": [{"embedding": [0.1]}]},
        {"output": [CALL]},
        {"output": [REFUSAL]},
        {"output": [{"type": "message", "content": "Paris"}]},
        {"output": "Paris"},
        {"error": {"message": "no"}},
        ["Paris"],
        "Paris",
    ],
)
def test_an_answer_without_words_has_none(answer: Any) -> None:
    assert extract_answer_text(json.dumps(answer).encode()) is None


@pytest.mark.parametrize("body", [b"", b"Paris", b"{", b"\xff", b"[" * 5000])
def test_what_is_no_json_has_no_words(body: bytes) -> None:
    assert extract_answer_text(body) is None


@given(st.text())
def test_words_come_out_as_they_went_in(words: str) -> None:
    for answer in (chat(words), {"choices": [{"text": words}]}, {"output": [output_text(words)]}):
        assert extract_answer_text(json.dumps(answer).encode()) == words


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "text", "output", "type"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(json_values)
def test_whatever_the_answer_it_has_words_or_none(answer: Any) -> None:
    assert isinstance(extract_answer_text(json.dumps(answer).encode()), str | None)
