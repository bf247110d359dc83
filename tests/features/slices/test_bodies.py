"""Bodies of slices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dispatcher.features.slices.bodies import (
    build_length_check,
    build_slice_body,
    can_be_continued,
    compute_slice_tokens,
    replace_body,
)
from dispatcher.features.slices.eligibility import Generation, SliceTerms, check_generation
from dispatcher.features.slices.progress import Progress, Stage
from dispatcher.requests.request import Request, encode_member, parse_member

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "question"}


def make_generation(path: str = COMPLETION, **fields: Any) -> Generation:
    content: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "text "}
    payload = msgspec.json.encode({"model": "m", "max_tokens": 500, **content, **fields})
    generation = check_generation(path, payload, SliceTerms(1, 1, (path,)))
    assert isinstance(generation, Generation)
    return generation


def build(
    generation: Generation, progress: Progress | None = None, *, wants_ids: bool = False, stream: bool = False
) -> dict[str, Any]:
    body = build_slice_body(generation, progress, 50, wants_token_ids=wants_ids, is_streamed=stream)
    return dict(msgspec.json.decode(body))


def make_progress(slices: int = 2, text: str = "and more", **fields: Any) -> Progress:
    return Progress(Stage.SLICES, slices, text, **fields)


class TestTokens:
    @pytest.mark.parametrize(
        ("progress", "expected"),
        [
            (None, 100),
            (Progress(Stage.SLICES, 1, tokens=100), 100),
            (Progress(Stage.SLICES, 4, tokens=450), 50),
            (Progress(Stage.SLICES, 4, tokens=450, uncounted_tokens=20), 30),
            (Progress(Stage.SLICES, 4, tokens=450, uncounted_tokens=60), 1),
            (Progress(Stage.REST, 1, tokens=100), 400),
            (Progress(Stage.REST, 4, tokens=490, uncounted_tokens=60), 1),
        ],
    )
    def test_slice_asks_for_its_size_but_no_more_than_is_left(
        self, progress: Progress | None, expected: int
    ) -> None:
        assert compute_slice_tokens(make_generation(), progress, 100) == expected

    def test_first_slice_of_a_short_generation_asks_for_all(self) -> None:
        assert compute_slice_tokens(make_generation(max_tokens=30), None, 100) == 30


def test_first_slice_differs_from_the_request_only_in_its_length() -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "stop": ["a"], "metadata": {"a": [1]}, "seed": None}
    body = build(make_generation(**fields))
    assert body == {"model": "m", "prompt": "text ", "max_tokens": 50, **fields}


def test_numbers_are_sent_as_they_are_written() -> None:
    payload = b'{"prompt":"a","max_tokens":500,"temperature":0.10000000000000000001,"logit_bias":{"7":1e1}}'
    generation = check_generation(COMPLETION, payload, SliceTerms(1, 1, (COMPLETION,)))
    assert isinstance(generation, Generation)
    body = build_slice_body(generation, None, 50, wants_token_ids=False)
    assert b'"temperature":0.10000000000000000001' in body
    assert b'"logit_bias":{"7":1e1}' in body


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 50}),
        ({"max_completion_tokens": 400}, {"max_completion_tokens": 50}),
        ({"max_completion_tokens": None}, {"max_tokens": 50, "max_completion_tokens": None}),
    ],
)
def test_chat_has_the_number_of_tokens_under_the_name_that_counts(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = build(make_generation(CHAT, **fields))
    assert {name: value for name, value in body.items() if "tokens" in name} == expected


def test_chat_is_continued_as_its_final_message() -> None:
    body = build(make_generation(CHAT, add_generation_prompt=True), make_progress(text='and "more"'))
    assert body["messages"] == [USER, {"role": "assistant", "content": 'and "more"'}]
    assert body["add_generation_prompt"] is False
    assert body["continue_final_message"] is True


def test_white_space_around_messages_does_not_matter() -> None:
    payload = b'{"max_tokens":500, "messages" : [ {"role":"user","content":"]"} \n ] }'
    generation = check_generation(CHAT, payload, SliceTerms(1, 1, (CHAT,)))
    assert isinstance(generation, Generation)
    assert build(generation, make_progress(text="a"))["messages"] == [
        {"role": "user", "content": "]"},
        {"role": "assistant", "content": "a"},
    ]


def test_completion_is_continued_by_its_text() -> None:
    assert build(make_generation(), make_progress())["prompt"] == "text and more"


def test_completion_is_continued_by_its_tokens_if_they_are_known() -> None:
    progress = make_progress(token_ids=b"3,4", prompt_token_ids=b"1,2")
    body = build(make_generation(), progress, wants_ids=True)
    assert body["prompt"] == [1, 2, 3, 4]
    assert body["return_token_ids"] is True


def test_tokens_of_a_chat_are_not_asked_for() -> None:
    assert "return_token_ids" not in build(make_generation(CHAT), wants_ids=True)


def test_prompt_of_tokens_can_be_continued_only_by_tokens() -> None:
    by_text, by_tokens = make_progress(), make_progress(token_ids=b"3", prompt_token_ids=b"1")
    generation = make_generation(prompt=[1])
    assert not can_be_continued(generation, by_text)
    assert can_be_continued(generation, by_tokens)
    assert can_be_continued(make_generation(), by_text)
    assert can_be_continued(make_generation(CHAT), by_text)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_check_of_the_length_differs_from_the_request_only_in_its_stop_strings(path: str) -> None:
    generation = make_generation(path, stop=["a"], temperature=0.5, max_tokens=10**12)
    body = msgspec.json.decode(build_length_check(generation))
    request = {name: msgspec.json.decode(value) for name, value in generation.fields.items()}
    assert body == {**request, "stop": [" ", "\n", "，", "。"]}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_streamed_slice_asks_for_its_number_of_tokens(path: str) -> None:
    body = build(make_generation(path, stream=False, stream_options=None), stream=True)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert build(make_generation(path, stream=False))["stream"] is False


def test_request_of_a_slice_has_another_body_and_receives_its_stream() -> None:
    member = encode_member("r-1", b"{}", 100, token="t", endpoint=COMPLETION)
    request = parse_member(member)
    assert isinstance(request, Request)
    received: list[bytes] = []
    sliced = replace_body(request, b'{"a":1}', None, received)
    assert (sliced.payload, sliced.received, sliced.affinity) == (b'{"a":1}', received, None)
    assert (sliced.id, sliced.endpoint, request.payload) == ("r-1", COMPLETION, b"{}")
