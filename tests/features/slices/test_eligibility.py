"""Which requests may be sliced, and the reasons of the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.slices.eligibility import Generation, SliceTerms, WholeReason, check_generation

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TERMS = SliceTerms(slice_tokens=100, min_tokens=200, paths=(CHAT, COMPLETION))
COMPLETION_BODY = {"model": "m", "prompt": "text", "max_tokens": 500}
CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "question"}], "max_tokens": 500}
ASSISTANT = {"role": "assistant", "content": "beginning"}


def check(path: str, body: Any, terms: SliceTerms = TERMS, **options: bool) -> Generation | WholeReason:
    payload = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return check_generation(path, payload, terms, **options)


def check_sliced(path: str, body: Any, terms: SliceTerms = TERMS) -> Generation:
    generation = check(path, body, terms)
    assert isinstance(generation, Generation), generation
    return generation


COMMON_CASES: list[tuple[dict[str, Any], WholeReason]] = [
    ({"max_tokens": None}, WholeReason.NO_MAX_TOKENS),
    ({"max_tokens": 199}, WholeReason.SHORT),
    ({"max_tokens": 1}, WholeReason.SHORT),
    ({"max_tokens": 0}, WholeReason.BODY),
    ({"max_tokens": -500}, WholeReason.BODY),
    ({"max_tokens": 500.0}, WholeReason.BODY),
    ({"max_tokens": True}, WholeReason.BODY),
    ({"max_tokens": "500"}, WholeReason.BODY),
    ({"model": 5}, WholeReason.BODY),
    ({"stop": 5}, WholeReason.BODY),
    ({"stop": ["a", 5]}, WholeReason.BODY),
    ({"seed": "7"}, WholeReason.BODY),
    ({"seed": True}, WholeReason.BODY),
    ({"invented_field": None}, WholeReason.FIELD),
    ({"bad_words": ["a b"]}, WholeReason.FIELD),
    ({"include_stop_str_in_output": True}, WholeReason.FIELD),
    ({"n": 2}, WholeReason.SEVERAL_ANSWERS),
    ({"best_of": 3}, WholeReason.SEVERAL_ANSWERS),
    ({"use_beam_search": True}, WholeReason.SEVERAL_ANSWERS),
    ({"echo": True}, WholeReason.ECHO),
    ({"stream": True}, WholeReason.STREAM),
    ({"stream_options": {"include_usage": True}}, WholeReason.STREAM),
    ({"logprobs": True}, WholeReason.LOGPROBS),
    ({"logprobs": 0}, WholeReason.LOGPROBS),
    ({"top_logprobs": 1}, WholeReason.LOGPROBS),
    ({"prompt_logprobs": 1}, WholeReason.LOGPROBS),
    ({"return_token_ids": True}, WholeReason.LOGPROBS),
    ({"presence_penalty": 0.1}, WholeReason.PENALTY),
    ({"frequency_penalty": -1}, WholeReason.PENALTY),
    ({"repetition_penalty": 1.1}, WholeReason.PENALTY),
    ({"length_penalty": 2}, WholeReason.PENALTY),
    ({"min_tokens": 5}, WholeReason.PENALTY),
    ({"response_format": {"type": "json_object"}}, WholeReason.STRUCTURED_OUTPUT),
    ({"guided_json": {"type": "object"}}, WholeReason.STRUCTURED_OUTPUT),
    ({"guided_regex": "a*"}, WholeReason.STRUCTURED_OUTPUT),
    ({"guided_choice": ["a"]}, WholeReason.STRUCTURED_OUTPUT),
    ({"structured_outputs": {"regex": "a"}}, WholeReason.STRUCTURED_OUTPUT),
    ({"seed": 7}, WholeReason.SEED),
    ({"seed": 7, "temperature": 0.5}, WholeReason.SEED),
]
COMPLETION_CASES: list[tuple[dict[str, Any], WholeReason]] = [
    ({"prompt": None}, WholeReason.PROMPT),
    ({"prompt": []}, WholeReason.PROMPT),
    ({"prompt": ["one"]}, WholeReason.PROMPT),
    ({"prompt": ["one", "two"]}, WholeReason.PROMPT),
    ({"prompt": [[1, 2]]}, WholeReason.PROMPT),
    ({"prompt": [1, True]}, WholeReason.PROMPT),
    ({"suffix": "end"}, WholeReason.FIELD),
    ({"messages": []}, WholeReason.FIELD),
    ({"max_completion_tokens": 500}, WholeReason.FIELD),
]
CHAT_CASES: list[tuple[dict[str, Any], WholeReason]] = [
    ({"messages": None}, WholeReason.BODY),
    ({"messages": []}, WholeReason.BODY),
    ({"messages": "hello"}, WholeReason.BODY),
    ({"messages": ["hello"]}, WholeReason.BODY),
    ({"messages": [{"content": "no role"}]}, WholeReason.BODY),
    ({"messages": [*CHAT_BODY["messages"], ASSISTANT]}, WholeReason.PREFILL),  # type: ignore[misc]
    ({"add_generation_prompt": False}, WholeReason.PREFILL),
    ({"continue_final_message": True}, WholeReason.PREFILL),
    ({"max_completion_tokens": 100}, WholeReason.SHORT),
    ({"tools": [{"type": "function"}]}, WholeReason.TOOLS),
    ({"tool_choice": "required"}, WholeReason.TOOLS),
    ({"functions": [{"name": "f"}]}, WholeReason.TOOLS),
    ({"function_call": "auto"}, WholeReason.TOOLS),
    ({"modalities": ["audio"]}, WholeReason.FIELD),
    ({"audio": {"voice": "a"}}, WholeReason.FIELD),
    ({"prediction": {"content": "a"}}, WholeReason.FIELD),
    ({"reasoning_effort": "high"}, WholeReason.REASONING),
    ({"prompt": "text"}, WholeReason.FIELD),
]


@pytest.mark.parametrize(("fields", "reason"), COMMON_CASES + COMPLETION_CASES)
def test_completion_is_sent_whole(fields: dict[str, Any], reason: WholeReason) -> None:
    assert check(COMPLETION, COMPLETION_BODY | fields) is reason


@pytest.mark.parametrize(("fields", "reason"), COMMON_CASES + CHAT_CASES)
def test_chat_is_sent_whole(fields: dict[str, Any], reason: WholeReason) -> None:
    assert check(CHAT, CHAT_BODY | fields) is reason


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"null", b'{"max_tokens":"\xff"}', b"[" * 100_000])
def test_body_that_cannot_be_read_is_sent_whole(payload: bytes) -> None:
    assert check(COMPLETION, payload) is WholeReason.BODY


def test_deeply_nested_field_is_sent_whole() -> None:
    payload = b'{"max_tokens":500,"prompt":"a","metadata":%b%b}' % (b"[" * 100_000, b"]" * 100_000)
    assert check(COMPLETION, payload) is WholeReason.BODY


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/other/completions", "/v1/completions/", ""])
def test_path_that_is_not_in_the_settings_is_sent_whole(path: str) -> None:
    assert check(path, COMPLETION_BODY) is WholeReason.PATH


def test_every_reason_of_the_body_is_in_the_tables() -> None:
    shown = {reason for _, reason in COMMON_CASES + COMPLETION_CASES + CHAT_CASES} | {WholeReason.PATH}
    others = {
        WholeReason.DECLINED,
        WholeReason.MERGED,
        WholeReason.UNCHECKED,
        WholeReason.UNEQUAL,
        WholeReason.NOT_WORTH_IT,
        WholeReason.TOO_MANY_STARTED,
        WholeReason.TOO_LARGE,
    }
    assert shown | others == set(WholeReason)
    assert not shown & others


NEUTRAL_FIELDS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "logit_bias": {"5": -100},
    "stop_token_ids": [5],
    "ignore_eos": True,
    "user": "u",
    "n": 1,
    "best_of": None,
    "echo": False,
    "stream": False,
    "stream_options": None,
    "logprobs": None,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "bad_words": [],
    "response_format": {"type": "text"},
    "guided_json": None,
    "seed": None,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, COMPLETION_BODY | NEUTRAL_FIELDS | {"suffix": ""}),
        (
            CHAT,
            CHAT_BODY
            | NEUTRAL_FIELDS
            | {
                "tools": [],
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "function_call": "none",
                "modalities": ["text"],
                "reasoning_effort": "none",
                "add_generation_prompt": True,
                "continue_final_message": False,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        ),
    ],
)
def test_fields_without_effect_on_slices_do_not_matter(path: str, body: dict[str, Any]) -> None:
    generation = check_sliced(path, body)
    assert generation.max_tokens == 500
    assert generation.model == "m"
    assert {name: msgspec.json.decode(raw) for name, raw in generation.fields.items()} == body


def test_prompt_may_be_text_or_tokens() -> None:
    assert check_sliced(COMPLETION, COMPLETION_BODY).prompt == "text"
    assert check_sliced(COMPLETION, COMPLETION_BODY | {"prompt": ""}).prompt == ""
    assert check_sliced(COMPLETION, COMPLETION_BODY | {"prompt": [1, 2]}).prompt == (1, 2)


def test_model_may_be_absent() -> None:
    assert check_sliced(COMPLETION, {"prompt": "a", "max_tokens": 500}).model == ""


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("a", ("a",)), ("", ()), (["a", "", "bc"], ("a", "bc")), ([], ())]
)
def test_stop_strings_are_read_from_a_string_or_a_list(stop: Any, strings: tuple[str, ...]) -> None:
    assert check_sliced(COMPLETION, COMPLETION_BODY | {"stop": stop}).stop == strings


def test_chat_has_its_number_of_tokens_in_the_newer_field_if_it_is_set() -> None:
    newer = check_sliced(CHAT, CHAT_BODY | {"max_completion_tokens": 300})
    assert (newer.max_tokens, newer.max_tokens_field) == (300, "max_completion_tokens")
    older = check_sliced(CHAT, CHAT_BODY | {"max_completion_tokens": None})
    assert (older.max_tokens, older.max_tokens_field) == (500, "max_tokens")


def test_request_that_fits_one_slice_is_short() -> None:
    terms = SliceTerms(slice_tokens=500, min_tokens=1, paths=(COMPLETION,))
    assert check(COMPLETION, COMPLETION_BODY, terms) is WholeReason.SHORT
    assert check_sliced(COMPLETION, COMPLETION_BODY | {"max_tokens": 501}, terms).max_tokens == 501


def test_seed_without_randomness_does_not_prevent_slices() -> None:
    body = COMPLETION_BODY | {"seed": 7, "temperature": 0}
    assert isinstance(check(COMPLETION, body), Generation)


def test_generation_that_has_begun_does_not_depend_on_the_settings() -> None:
    body = COMPLETION_BODY | {"max_tokens": 5, "seed": 7}
    assert isinstance(check(COMPLETION, body, SliceTerms(), has_begun=True), Generation)
    assert check("/v1/embeddings", body, SliceTerms(), has_begun=True) is WholeReason.PATH


NAMES = sorted(
    {
        *NEUTRAL_FIELDS,
        "max_tokens",
        "max_completion_tokens",
        "prompt",
        "messages",
        "model",
        "stop",
        "tools",
        "x",
    }
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children),
    max_leaves=6,
)


@given(
    st.sampled_from([CHAT, COMPLETION]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    st.booleans(),
)
def test_any_body_is_sliced_or_has_a_reason(path: str, fields: dict[str, Any], has_begun: bool) -> None:
    body = (CHAT_BODY if path == CHAT else COMPLETION_BODY) | fields
    found = check(path, body, has_begun=has_begun)
    if isinstance(found, Generation):
        assert found.max_tokens >= 1
        assert dict(found.fields).keys() == body.keys()
    else:
        assert found in WholeReason


@given(st.binary(max_size=60))
def test_any_bytes_are_sent_whole(payload: bytes) -> None:
    assert isinstance(check(COMPLETION, payload), WholeReason)
