"""The text that the model wrote is extracted from the answers of several APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.answer_text import extract_answer_text


def make_chat_answer(content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": {}}


def make_output_message(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "content": parts}


REASONING: dict[str, Any] = {"type": "reasoning", "summary": [], "content": None}
FUNCTION_CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
REFUSAL = {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}
TOOL_CALLS = [{"id": "c", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (make_chat_answer("Paris"), "Paris"),
        (make_chat_answer(""), ""),
        (make_chat_answer("Paris", reasoning_content="France …"), "Paris"),
        (
            make_chat_answer(
                [{"type": "text", "text": "Pa"}, {"type": "image"}, {"type": "text", "text": "ris"}]
            ),
            "Paris",
        ),
        ({"choices": [{"text": "Paris", "logprobs": None}, {"text": "Lyon"}]}, "Paris"),
        ({"object": "response", "output": [REASONING, make_output_message("Pa", "ris")]}, "Paris"),
        ({"output": [make_output_message("Pa"), FUNCTION_CALL, make_output_message("ris")]}, "Paris"),
    ],
)
def test_text_is_extracted_from_each_kind_of_answer(answer: dict[str, Any], text: str) -> None:
    assert extract_answer_text(json.dumps(answer).encode()) == text


@pytest.mark.parametrize(
    "answer",
    [
        make_chat_answer(None, tool_calls=TOOL_CALLS),
        make_chat_answer([]),
        make_chat_answer([{"type": "text"}]),
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": "Paris"},
        {"object": "list", "data": [{"embedding": [0.1]}]},
        {"output": [FUNCTION_CALL]},
        {"output": [REFUSAL]},
        {"output": [{"type": "message", "content": "Paris"}]},
        {"output": "Paris"},
        {"error": {"message": "no"}},
        ["Paris"],
        "Paris",
    ],
)
def test_answer_without_text_yields_none(answer: Any) -> None:
    assert extract_answer_text(json.dumps(answer).encode()) is None


@pytest.mark.parametrize("body", [b"", b"Paris", b"{", b"\xff", b"[" * 5000])
def test_body_that_is_not_json_yields_none(body: bytes) -> None:
    assert extract_answer_text(body) is None


@given(st.text())
def test_extracted_text_is_unchanged(text: str) -> None:
    for answer in (
        make_chat_answer(text),
        {"choices": [{"text": text}]},
        {"output": [make_output_message(text)]},
    ):
        assert extract_answer_text(json.dumps(answer).encode()) == text


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
def test_any_json_yields_text_or_none(answer: Any) -> None:
    assert isinstance(extract_answer_text(json.dumps(answer).encode()), str | None)
