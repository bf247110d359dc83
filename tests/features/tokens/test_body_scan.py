"""A scan of the body finds how long a request is: its text, token ids, images and limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.tokens.body_scan import MAX_COPIES, BodyLength, scan_body
from dispatcher.requests.usage import MAX_TOKENS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def chat(content: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def test_text_counts_with_all_bytes_of_the_body() -> None:
    body = chat("hello", model="m", max_tokens=7)
    assert scan_body(body) == BodyLength(len(body), max_tokens=7, model="m")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"max_tokens": None}, None),
        ({"max_tokens": -5}, 1),
        ({"max_tokens": 10**15}, MAX_TOKENS),
        ({"max_tokens": "5"}, None),
        ({"metadata": {"max_tokens": 5}}, None),
        ({}, None),
    ],
)
def test_limit_of_the_answer_is_that_of_the_field_at_the_top(
    fields: dict[str, Any], max_tokens: int | None
) -> None:
    assert scan_body(chat('{"max_tokens": 3}', **fields)).max_tokens == max_tokens


@pytest.mark.parametrize(("n", "copies"), [(None, 1), (0, 1), (3, 3), (10**6, MAX_COPIES), (-1, 1)])
def test_number_of_answers_is_bounded(n: int | None, copies: int) -> None:
    assert scan_body(chat("x", n=n)).copies == copies


def test_inline_image_counts_as_an_image_and_not_with_its_bytes() -> None:
    images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 9000}"}}] * 2
    body = chat([{"type": "text", "text": "What is this?"}, *images])
    found = scan_body(body)
    assert found.images == 2
    assert found.text_bytes == len(body) - 2 * (9000 + len('"data:image/png;base64,"'))
    linked = scan_body(chat([{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]))
    assert linked.images == 1


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [([1, 2, 3], 3), ([7], 1), ([[1, 2], [3]], 3), ("[1, 2, 3]", 0), (["one", "two"], 0), ([], 0)],
)
@pytest.mark.parametrize("comes_last", [True, False])
def test_token_ids_are_counted(prompt: Any, token_ids: int, comes_last: bool) -> None:
    fields = {"model": "m", "prompt": prompt} if comes_last else {"prompt": prompt, "model": "m"}
    body = json.dumps(fields).encode()
    found = scan_body(body)
    assert (found.token_ids, found.model) == (token_ids, "m")
    assert found.text_bytes == (0 if token_ids else len(body))


def test_prompt_inside_of_a_text_is_no_prompt() -> None:
    assert scan_body(chat('{"prompt": [1, 2]}')).token_ids == 0


@given(st.binary(max_size=300))
def test_any_bytes_have_a_length(payload: bytes) -> None:
    found = scan_body(payload)
    assert 0 <= found.text_bytes <= len(payload)
    assert found.copies >= 1


@given(st.dictionaries(st.sampled_from(["model", "n", "max_tokens", "prompt", "x"]), JSON))
def test_any_body_has_a_length(body: dict[str, Any]) -> None:
    found = scan_body(json.dumps(body).encode())
    assert found.max_tokens is None or 1 <= found.max_tokens <= MAX_TOKENS
    assert 1 <= found.copies <= MAX_COPIES
