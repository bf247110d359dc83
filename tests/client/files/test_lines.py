"""Lines of batch files: what is taken, what is refused and how, and what answers look like."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.client.files.lines import (
    BadLine,
    BatchLine,
    LineRules,
    build_answer_line,
    build_error_line,
    group_key,
    parse_line,
)
from dispatcher.core.requests.request import Rejection, encode_member, parse_member
from dispatcher.core.requests.result import ErrorCode, PoppedResult
from tests.batchfiles import BAD, CHAT, bent, line

RULES = LineRules()


@pytest.fixture(scope="module")
def openai() -> Any:
    """Its types. Every worker of the tests imports this module, and one of them needs what takes 0.3 s."""
    return importlib.import_module("openai.types")


GOOD = json.loads(bent())
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcd"), inner, max_size=3),
    max_leaves=8,
)


def good(text: bytes) -> BatchLine:
    found = parse_line(text, RULES)
    assert isinstance(found, BatchLine), found
    return found


def faults(text: bytes, rules: LineRules = RULES) -> list[str]:
    found = parse_line(text, rules)
    assert isinstance(found, BadLine), found
    return [fault.message for fault in found.faults]


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_of_bad_line_is_named(kind: str) -> None:
    text, words = BAD[kind]
    assert [message for message in faults(text) if words in message], faults(text)


def test_everything_that_is_wrong_with_a_line_is_told_at_once() -> None:
    text = b'{"custom_id": "a", "method": "GET", "url": "/metrics", "body": {"model": 1, "stream": true}}'
    found = parse_line(text, RULES)
    assert isinstance(found, BadLine)
    assert found.custom_id == "a"
    assert [fault.message.partition(":")[0] for fault in found.faults] == [
        "method",
        "url",
        "body.model",
        "body.stream",
    ]


def test_a_body_is_kept_byte_for_byte() -> None:
    body = b'{ "model":"m" ,"n": 1.00, "x":"\\u00e9\\ud83d\\ude00", "m":1e3}'
    text = b'\t{"url": "/v1/completions","body":' + body + b',"method":"POST", "custom_id":"a"}\r'
    assert good(text) == BatchLine("a", "/v1/completions", body)


def test_unknown_fields_are_no_fault_and_are_named() -> None:
    found = good(bent(priority="low", urll="/v1/x", params={}))
    assert found.unknown_fields == ("priority", "urll", "params")
    assert (found.custom_id, found.url, found.body) == ("bent", CHAT, good(bent()).body)
    assert good(bent()).unknown_fields == ()


@pytest.mark.parametrize(
    ("field", "written"),
    [("url", "urll"), ("url", "uri"), ("url", "URL"), ("custom_id", "customId"), ("body", "bdy")],
)
def test_a_missing_field_is_told_with_the_one_that_may_be_it(field: str, written: str) -> None:
    text = json.dumps({written if name == field else name: value for name, value in GOOD.items()}).encode()
    assert faults(text) == [f"{field}: is missing (is it what stands under '{written}'?)"]


def test_what_is_nothing_like_it_is_not_taken_for_it() -> None:
    assert faults(bent(url=None, endpoint=CHAT, id=7)) == ["url: is missing"]


def test_of_fields_without_end_the_first_ones_are_named() -> None:
    found = good(bent(**{"x" * 1000: 1, **{f"f{n}": n for n in range(1000)}}))
    assert len(found.unknown_fields) == 20
    assert max(map(len, found.unknown_fields)) == 60


def test_sizes_are_held() -> None:
    rules = LineRules(max_body_bytes=200)
    assert faults(line("x", pad="y" * 300), rules) == [
        f"body: {len(parse_line(line('x', pad='y' * 300), RULES).body)} bytes, at most 200 are accepted"  # type: ignore[union-attr]
    ]
    assert faults(b"x" * 100_000, rules) == ["longer than 65736 bytes"]


def test_a_word_of_a_line_may_stand_in_its_body_as_often_as_it_likes() -> None:
    text = line("x", image={"url": "http://a", "body": {"custom_id": 1}, "method": "GET"})
    assert good(text).custom_id == "x"


@given(st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_it_raise(text: bytes) -> None:
    parse_line(text, RULES)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "custom_id": ANY_JSON | st.just("a"),
            "method": ANY_JSON | st.just("POST"),
            "url": ANY_JSON | st.just(CHAT),
            "body": ANY_JSON | st.dictionaries(st.sampled_from(["model", "stream", "messages"]), ANY_JSON),
        },
    )
)
def test_what_is_taken_the_queue_takes_too(fields: dict[str, Any]) -> None:
    text = json.dumps(fields).encode()
    found = parse_line(text, RULES)
    if isinstance(found, BadLine):
        assert found.faults
        assert all(fault.message and fault.code for fault in found.faults)
    else:
        member = encode_member("id", found.body, 2_000_000_000, endpoint=found.url)
        assert not isinstance(parse_member(member), Rejection)
        assert isinstance(group_key(found), bytes)


def test_lines_of_one_model_tools_and_system_prompt_are_a_group() -> None:
    same = [group_key(good(line(str(n), system="You are terse.", temperature=n))) for n in range(3)]
    assert len(set(same)) == 1
    others = [
        line("a"),
        line("a", system="You are not."),
        line("a", system="You are terse.", model="other"),
        line("a", system="You are terse.", tools=[{"type": "function"}]),
        bent(url="/v1/responses", body={"model": "m", "instructions": "You are terse.", "input": "x"}),
        bent(url="/v1/completions", body={"model": "m", "prompt": "x"}),
        bent(url="/v1/embeddings", body={"model": "m", "input": "x"}),
        line("a", messages=[{"role": "developer", "content": "You are terse."}, {"role": "user"}]),
        line("a", messages="You are terse."),
    ]
    groups = [group_key(good(each)) for each in others]
    # The last two prompts without a system prompt: what cannot be read is like one that has none.
    assert len({*groups, same[0]}) == len(groups)


ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi\n"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


def test_answers_parse_with_openais_own_types(openai: Any) -> None:
    out = build_answer_line("f-1", "mine", PoppedResult("f-1", json.dumps(ANSWER, indent=2), 200))
    assert out.is_answer
    assert out.text.count(b"\n") == 1
    told = json.loads(out.text)
    assert list(told) == ["id", "custom_id", "response", "error"]
    assert (told["id"], told["custom_id"], told["error"]) == ("batch_req_f-1", "mine", None)
    assert list(told["response"]) == ["status_code", "request_id", "body"]
    assert told["response"]["body"] == ANSWER
    answer = openai.chat.ChatCompletion.model_validate(told["response"]["body"], strict=True)
    assert answer.choices[0].message.content == "hi\n"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Completion", {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": []}),
        (
            "CreateEmbeddingResponse",
            {
                "object": "list",
                "model": "m",
                "data": [{"object": "embedding", "index": 0, "embedding": [0.1, 2e-7]}],
                "usage": {"prompt_tokens": 1, "total_tokens": 1},
            },
        ),
    ],
)
def test_other_answers_do_too(openai: Any, kind: str, body: dict[str, Any]) -> None:
    told = json.loads(build_answer_line("f-1", "mine", PoppedResult("f-1", json.dumps(body), 200)).text)
    answer = getattr(openai, kind).model_validate(told["response"]["body"])
    assert answer.model_dump(exclude_unset=True) == body


def test_an_answer_other_than_2xx_goes_to_the_errors_with_its_response() -> None:
    body = '{"error": {"message": "no such model", "type": "x", "param": null, "code": "model_not_found"}}'
    out = build_answer_line("f-1", "mine", PoppedResult("f-1", body, 404))
    assert not out.is_answer
    told = json.loads(out.text)
    assert told["response"] == {"status_code": 404, "request_id": "f-1", "body": json.loads(body)}
    assert told["error"] is None


@pytest.mark.parametrize(
    ("code", "theirs"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, "batch_expired"),
        (ErrorCode.CANCELLED, "batch_cancelled"),
        (ErrorCode.RETRIES_EXHAUSTED, "retries_exhausted"),
        ("NEW_ONE", "new_one"),
    ],
)
def test_an_error_has_openais_code_where_there_is_one(openai: Any, code: str, theirs: str) -> None:
    out = build_answer_line("f-1", "mine", PoppedResult("f-1", "{}", None, code, "so it is"))
    assert not out.is_answer
    told = json.loads(out.text)
    assert told["response"] is None
    error = openai.BatchError
    assert error.model_validate(told["error"]) == error(code=theirs, message="so it is")


def test_the_last_answer_of_a_request_that_failed_is_kept() -> None:
    out = build_answer_line(
        "f-1", "m", PoppedResult("f-1", "bad gateway", 502, ErrorCode.RETRIES_EXHAUSTED, "no")
    )
    told = json.loads(out.text)
    assert told["response"] == {"status_code": 502, "request_id": "f-1", "body": "bad gateway"}
    assert told["error"] == {"code": "retries_exhausted", "message": "no"}


@given(st.text(), st.text(), st.sampled_from([None, 200, 500]), st.none() | st.text())
def test_whatever_a_result_holds_is_one_line_of_json(
    custom_id: str, payload: str, status: int | None, code: str | None
) -> None:
    out = build_answer_line(
        "f-1", custom_id.encode(errors="replace").decode(), PoppedResult("f-1", payload, status, code)
    )
    assert out.text.index(b"\n") == len(out.text) - 1
    assert json.loads(out.text)["custom_id"] == custom_id.encode(errors="replace").decode()


def test_a_line_without_a_result_says_where_it_stands(openai: Any) -> None:
    told = json.loads(build_error_line("f-7", None, "invalid_json_line", "no JSON", 7).text)
    assert told["custom_id"] is None
    assert openai.BatchError.model_validate(told["error"]).line == 7
