"""Lines of batch files: which are accepted, how errors are reported, and the format of answers."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.batch_files.lines import (
    BadLine,
    BatchLine,
    LineRules,
    build_answer_line,
    build_error_line,
    group_key,
    parse_line,
)
from dispatcher.requests.request import Rejection, encode_member, parse_member
from dispatcher.wire_format import ErrorCode, PoppedResult
from tests.features.batch_files.files import CHAT_PATH, INVALID_LINES, make_changed_line, make_line

RULES = LineRules()


@pytest.fixture(scope="module")
def openai() -> Any:
    """Return the types of the `openai` package. Imported only here, because every worker of the tests
    imports this module and the import takes 0.3 s."""
    return importlib.import_module("openai.types")


VALID_FIELDS = json.loads(make_changed_line())
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcd"), inner, max_size=3),
    max_leaves=8,
)


def parse_valid_line(text: bytes) -> BatchLine:
    found = parse_line(text, RULES)
    assert isinstance(found, BatchLine), found
    return found


def find_faults(text: bytes, rules: LineRules = RULES) -> list[str]:
    found = parse_line(text, rules)
    assert isinstance(found, BadLine), found
    return [fault.message for fault in found.faults]


@pytest.mark.parametrize("kind", INVALID_LINES)
def test_each_kind_of_invalid_line_is_reported(kind: str) -> None:
    text, expected = INVALID_LINES[kind]
    assert [message for message in find_faults(text) if expected in message], find_faults(text)


def test_all_faults_of_a_line_are_reported_together() -> None:
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


def test_body_is_kept_byte_for_byte() -> None:
    body = b'{ "model":"m" ,"n": 1.00, "x":"\\u00e9\\ud83d\\ude00", "m":1e3}'
    text = b'\t{"url": "/v1/completions","body":' + body + b',"method":"POST", "custom_id":"a"}\r'
    assert parse_valid_line(text) == BatchLine("a", "/v1/completions", body)


@pytest.mark.parametrize(
    ("written", "slicing"), [({}, True), ({"slicing": True}, True), ({"slicing": False}, False)]
)
@pytest.mark.parametrize("unknown", [{}, {"note": 1}])
def test_line_can_decline_slicing(written: dict[str, bool], slicing: bool, unknown: dict[str, int]) -> None:
    assert parse_valid_line(make_changed_line(**written, **unknown)).slicing is slicing


def test_unknown_fields_are_reported_and_not_a_fault() -> None:
    found = parse_valid_line(make_changed_line(priority="low", urll="/v1/x", params={}))
    assert found.unknown_fields == ("priority", "urll", "params")
    assert (found.custom_id, found.url, found.body) == (
        "changed",
        CHAT_PATH,
        parse_valid_line(make_changed_line()).body,
    )
    assert parse_valid_line(make_changed_line()).unknown_fields == ()


@pytest.mark.parametrize(
    ("field", "written"),
    [("url", "urll"), ("url", "uri"), ("url", "URL"), ("custom_id", "customId"), ("body", "bdy")],
)
def test_missing_field_is_reported_with_a_similar_name(field: str, written: str) -> None:
    text = json.dumps(
        {written if name == field else name: value for name, value in VALID_FIELDS.items()}
    ).encode()
    assert find_faults(text) == [f"{field}: is missing (is it what stands under '{written}'?)"]


def test_missing_field_is_reported_without_dissimilar_names() -> None:
    assert find_faults(make_changed_line(url=None, endpoint=CHAT_PATH, id=7)) == ["url: is missing"]


def test_number_and_length_of_reported_unknown_fields_are_limited() -> None:
    found = parse_valid_line(make_changed_line(**{"x" * 1000: 1, **{f"f{n}": n for n in range(1000)}}))
    assert len(found.unknown_fields) == 20
    assert max(map(len, found.unknown_fields)) == 60


def test_size_limits_apply() -> None:
    rules = LineRules(max_body_bytes=200)
    assert find_faults(make_line("x", pad="y" * 300), rules) == [
        f"body: {len(parse_line(make_line('x', pad='y' * 300), RULES).body)} bytes, at most 200 are accepted"  # type: ignore[union-attr]
    ]
    assert find_faults(b"x" * 100_000, rules) == ["longer than 65736 bytes"]


def test_body_may_contain_the_field_names_of_a_line() -> None:
    text = make_line("x", image={"url": "http://a", "body": {"custom_id": 1}, "method": "GET"})
    assert parse_valid_line(text).custom_id == "x"


@given(st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_the_parser_raise(text: bytes) -> None:
    parse_line(text, RULES)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "custom_id": ANY_JSON | st.just("a"),
            "method": ANY_JSON | st.just("POST"),
            "url": ANY_JSON | st.just(CHAT_PATH),
            "body": ANY_JSON | st.dictionaries(st.sampled_from(["model", "stream", "messages"]), ANY_JSON),
        },
    )
)
def test_accepted_line_is_a_valid_queue_member(fields: dict[str, Any]) -> None:
    text = json.dumps(fields).encode()
    found = parse_line(text, RULES)
    if isinstance(found, BadLine):
        assert found.faults
        assert all(fault.message and fault.code for fault in found.faults)
    else:
        member = encode_member("id", found.body, 2_000_000_000, endpoint=found.url)
        assert not isinstance(parse_member(member), Rejection)
        assert isinstance(group_key(found), bytes)


def test_lines_with_equal_model_tools_and_system_prompt_form_a_group() -> None:
    same = [
        group_key(parse_valid_line(make_line(str(n), system="You are terse.", temperature=n)))
        for n in range(3)
    ]
    assert len(set(same)) == 1
    others = [
        make_line("a"),
        make_line("a", system="You are not."),
        make_line("a", system="You are terse.", model="other"),
        make_line("a", system="You are terse.", tools=[{"type": "function"}]),
        make_changed_line(
            url="/v1/responses", body={"model": "m", "instructions": "You are terse.", "input": "x"}
        ),
        make_changed_line(url="/v1/completions", body={"model": "m", "prompt": "x"}),
        make_changed_line(url="/v1/embeddings", body={"model": "m", "input": "x"}),
        make_line("a", messages=[{"role": "developer", "content": "You are terse."}, {"role": "user"}]),
        make_line("a", messages="You are terse."),
    ]
    groups = [group_key(parse_valid_line(each)) for each in others]
    # The last lines have no system prompt: an unreadable prompt counts as none.
    assert len({*groups, same[0]}) == len(groups)


CHAT_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi\n"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


def test_chat_answers_parse_with_the_types_of_openai(openai: Any) -> None:
    out = build_answer_line("f-1", "mine", PoppedResult("f-1", json.dumps(CHAT_ANSWER, indent=2), 200))
    assert out.is_answer
    assert out.text.count(b"\n") == 1
    record = json.loads(out.text)
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert (record["id"], record["custom_id"], record["error"]) == ("batch_req_f-1", "mine", None)
    assert list(record["response"]) == ["status_code", "request_id", "body"]
    assert record["response"]["body"] == CHAT_ANSWER
    answer = openai.chat.ChatCompletion.model_validate(record["response"]["body"], strict=True)
    assert answer.choices[0].message.content == "hi\n"


@pytest.mark.parametrize(
    ("type_name", "body"),
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
def test_other_answers_parse_with_the_types_of_openai(
    openai: Any, type_name: str, body: dict[str, Any]
) -> None:
    record = json.loads(build_answer_line("f-1", "mine", PoppedResult("f-1", json.dumps(body), 200)).text)
    answer = getattr(openai, type_name).model_validate(record["response"]["body"])
    assert answer.model_dump(exclude_unset=True) == body


def test_answer_other_than_2xx_is_an_error_line_with_its_response() -> None:
    body = '{"error": {"message": "no such model", "type": "x", "param": null, "code": "model_not_found"}}'
    out = build_answer_line("f-1", "mine", PoppedResult("f-1", body, 404))
    assert not out.is_answer
    record = json.loads(out.text)
    assert record["response"] == {"status_code": 404, "request_id": "f-1", "body": json.loads(body)}
    assert record["error"] is None


@pytest.mark.parametrize(
    ("code", "openai_code"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, "batch_expired"),
        (ErrorCode.CANCELLED, "batch_cancelled"),
        (ErrorCode.RETRIES_EXHAUSTED, "retries_exhausted"),
        ("NEW_ONE", "new_one"),
    ],
)
def test_error_has_the_code_of_openai_if_one_exists(openai: Any, code: str, openai_code: str) -> None:
    out = build_answer_line("f-1", "mine", PoppedResult("f-1", "{}", None, code, "a reason"))
    assert not out.is_answer
    record = json.loads(out.text)
    assert record["response"] is None
    error = openai.BatchError
    assert error.model_validate(record["error"]) == error(code=openai_code, message="a reason")


def test_error_line_has_the_last_answer_of_the_request() -> None:
    out = build_answer_line(
        "f-1", "m", PoppedResult("f-1", "bad gateway", 502, ErrorCode.RETRIES_EXHAUSTED, "no")
    )
    record = json.loads(out.text)
    assert record["response"] == {"status_code": 502, "request_id": "f-1", "body": "bad gateway"}
    assert record["error"] == {"code": "retries_exhausted", "message": "no"}


def test_answer_in_slices_has_the_line_of_an_answer_from_one_call() -> None:
    text = json.dumps(CHAT_ANSWER)
    sliced = PoppedResult("f-1", text, 200, slices=5, cached_tokens=700)
    assert build_answer_line("f-1", "m", sliced) == build_answer_line(
        "f-1", "m", PoppedResult("f-1", text, 200)
    )


def test_error_line_has_the_partial_answer_of_the_request() -> None:
    failed = PoppedResult(
        "f-1", json.dumps(CHAT_ANSWER), None, ErrorCode.DEADLINE_EXCEEDED, "late", partial=True
    )
    out = build_answer_line("f-1", "m", failed)
    record = json.loads(out.text)
    assert (out.is_answer, record["response"], record["partial"]) == (False, None, CHAT_ANSWER)
    assert record["error"] == {"code": "batch_expired", "message": "late"}


@given(
    st.text(), st.text(), st.sampled_from([None, 200, 500]), st.none() | st.text(), st.none() | st.booleans()
)
def test_every_result_is_one_line_of_json(
    custom_id: str, payload: str, status: int | None, code: str | None, partial: bool | None
) -> None:
    out = build_answer_line(
        "f-1",
        custom_id.encode(errors="replace").decode(),
        PoppedResult("f-1", payload, status, code, partial=partial),
    )
    assert out.text.index(b"\n") == len(out.text) - 1
    assert json.loads(out.text)["custom_id"] == custom_id.encode(errors="replace").decode()


def test_error_line_of_an_invalid_line_has_its_number(openai: Any) -> None:
    record = json.loads(build_error_line("f-7", None, "invalid_json_line", "no JSON", 7).text)
    assert record["custom_id"] is None
    assert openai.BatchError.model_validate(record["error"]).line == 7
