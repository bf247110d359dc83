"""A queue member is parsed to the request that its producer meant, or to a rejection that names the fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatcher.requests.oversize import MAX_ENVELOPE_BYTES, cut_member
from dispatcher.requests.request import MAX_HEADERS_CHARS, Rejection, Request, encode_member, parse_member
from dispatcher.requests.result import decode_result, encode_answer, encode_bad_list, encode_failure
from dispatcher.requests.score import compute_score, decode_deadline
from dispatcher.wire_format import ErrorCode

INTERNAL = b'"internal":{"request_token":"tok","result_queue_name":"list"}'


def build_member(data: str | bytes, *, internal: bytes = INTERNAL, kind: str = '"redis"') -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return b'{%b,"request_kind":%b,"data":%b}' % (internal, kind.encode(), data)


def parse_rejected(text: bytes) -> Rejection:
    parsed = parse_member(text)
    assert isinstance(parsed, Rejection), parsed
    return parsed


def parse_accepted(text: bytes) -> Request:
    parsed = parse_member(text)
    assert isinstance(parsed, Request), parsed
    return parsed


def test_every_field_of_the_contract_is_parsed() -> None:
    text = b"""{"internal": {"retry_count": 2, "request_token": "tok", "request_queue_name": "q",
      "result_queue_name": "list", "queue_id": "qid", "transport_correlation_id": "c",
      "labels": {"tier": "batch"}, "later": 1}, "request_kind": "pubsub",
     "data": {"id": "r-1", "created": 1764044000, "deadline": 1764047600, "payload": {"model": "m" },
      "metadata": {"userid": "t1"}, "headers": {"x-a": "b"}, "endpoint": "/v1/chat/completions", "new": []},
     "else": null}"""
    assert parse_member(text) == Request(
        id="r-1",
        deadline=1764047600,
        payload=b'{"model": "m" }',
        created=1764044000,
        endpoint="/v1/chat/completions",
        headers={"x-a": "b"},
        metadata={"userid": "t1"},
        token="tok",
        results="list",
        labels={"tier": "batch"},
        kind="pubsub",
        queue="q",
        queue_id="qid",
        correlation_id="c",
        retry_count=2,
    )


@pytest.mark.parametrize(
    "text",
    [
        b'{"request_kind":"plain","data":{"id":"r","deadline":1,"payload":{}}}',
        (
            b'{"request_kind":"plain","internal":null,"data":{"id":"r","deadline":1,"payload":{},"created":null,'
            b'"endpoint":null,"headers":null,"metadata":null}}'
        ),
        (
            b'{"request_kind":"plain","internal":{"request_token":null,"result_queue_name":null,"labels":null,'
            b'"retry_count":null},"data":{"id":"r","deadline":1,"payload":{}}}'
        ),
    ],
    ids=["absent", "null", "null-inside-internal"],
)
def test_optional_fields_may_be_absent_or_null(text: bytes) -> None:
    assert parse_member(text) == Request(id="r", deadline=1, payload=b"{}", kind="plain")


PAYLOADS = {
    "empty": b"{}",
    "spaces": b'{ "a" :\t1 ,\r\n "b":[ ] }',
    "order": b'{"z":1,"a":2,"m":{"y":1,"b":2}}',
    "duplicates": b'{"a":1,"a":2}',
    "envelope names": b'{"id":"x","id":"y","payload":{},"data":{"deadline":1.5},"internal":0}',
    "64 bit": b'{"seed":9223372036854775807,"big":123456789012345678901234567890,"neg":-9223372036854775808}',
    "floats": b'{"t":1.0,"u":1e400,"v":-0,"w":0.1000000000000000055511151231257827}',
    "escapes": b'{"a":"\\u0041\\/\\n\\u00e9\\ud83d\\ude00","\\u0062":1}',
    "lone surrogates": b'{"a":"\\ud800","b":"\\udfff\\ud800 \\\\ud800","c":"\\ud83d\\ude00\\ude00"}',
    "utf-8": '{"ключ":"значение 🙂","é":"\u2028\u2029\ufeff\u0085"}'.encode(),
    "nul escape": b'{"a":"\\u0000"}',
    "deep": b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
    "text of a payload": b'{"prompt":"{\\"payload\\":{}} \\"id\\":"}',
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_payload_bytes_are_unchanged(payload: bytes) -> None:
    for data in (
        b'{"id":"r","deadline":1,"payload":%b}',
        b'{"payload": %b , "deadline":1,"id":"r"}',
        b'{"id":"r","deadline":1,"p\\u0061yload":%b}',
        b'{"metadata":{"k":"payload","j":"{}"},"id":"r","deadline":1,"payload":%b,"x":{}}',
    ):
        assert parse_accepted(build_member(data % payload)).payload == payload


REJECTED = {
    "no kind": (b'{"data":{"id":"r","deadline":1,"payload":{}},%b}' % INTERNAL, "request_kind"),
    "unknown kind": (
        build_member('{"id":"r","deadline":1,"payload":{}}', kind='"kafka"'),
        "request_kind: Invalid",
    ),
    "kind null": (
        build_member('{"id":"r","deadline":1,"payload":{}}', kind="null"),
        "request_kind: Expected str",
    ),
    "float deadline": (build_member('{"id":"r","deadline":1.5,"payload":{}}'), "data.deadline: Expected int"),
    "whole float deadline": (
        build_member('{"id":"r","deadline":2.0,"payload":{}}'),
        "data.deadline: Expected int",
    ),
    "exponent deadline": (
        build_member('{"id":"r","deadline":1e9,"payload":{}}'),
        "data.deadline: Expected int",
    ),
    "text deadline": (build_member('{"id":"r","deadline":"9","payload":{}}'), "data.deadline: Expected int"),
    "true deadline": (build_member('{"id":"r","deadline":true,"payload":{}}'), "data.deadline: Expected int"),
    "null deadline": (build_member('{"id":"r","deadline":null,"payload":{}}'), "data.deadline: Expected int"),
    "no deadline": (build_member('{"id":"r","payload":{}}'), "deadline"),
    "zero deadline": (build_member('{"id":"r","deadline":0,"payload":{}}'), "data.deadline: must be"),
    "minus zero deadline": (build_member('{"id":"r","deadline":-0,"payload":{}}'), "data.deadline: must be"),
    "negative deadline": (build_member('{"id":"r","deadline":-5,"payload":{}}'), "data.deadline: must be"),
    "deadline in ms": (
        build_member('{"id":"r","deadline":1764047600000,"payload":{}}'),
        "data.deadline: must be",
    ),
    "huge deadline": (build_member('{"id":"r","deadline":1%s,"payload":{}}' % ("0" * 500)), "data.deadline"),
    "no payload": (build_member('{"id":"r","deadline":1}'), "payload"),
    "payload null": (build_member('{"id":"r","deadline":1,"payload":null}'), "data.payload: must be"),
    "payload list": (build_member('{"id":"r","deadline":1,"payload":[{}]}'), "data.payload: must be"),
    "payload text": (build_member('{"id":"r","deadline":1,"payload":"{}"}'), "data.payload: must be"),
    "payload number": (build_member('{"id":"r","deadline":1,"payload":1}'), "data.payload: must be"),
    "header number": (build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a":1}}'), "data.headers"),
    "header null": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a":null}}'),
        "data.headers",
    ),
    "header list": (build_member('{"id":"r","deadline":1,"payload":{},"headers":["a"]}'), "data.headers"),
    "header name": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a b":"c"}}'),
        "header name",
    ),
    "header name empty": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"":"c"}}'),
        "header name",
    ),
    "header name crlf": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a\\r\\nb":"c"}}'),
        "header name",
    ),
    "header name non-ascii": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"é":"c"}}'),
        "name",
    ),
    "header value crlf": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a":"b\\r\\nx: y"}}'),
        "control",
    ),
    "header value nul": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a":"\\u0000"}}'),
        "control",
    ),
    "header value nel": (
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a":"\\u0085"}}'),
        "control",
    ),
    "metadata number": (
        build_member('{"id":"r","deadline":1,"payload":{},"metadata":{"a":1}}'),
        "data.metadata",
    ),
    "endpoint number": (build_member('{"id":"r","deadline":1,"payload":{},"endpoint":1}'), "data.endpoint"),
    "created text": (build_member('{"id":"r","deadline":1,"payload":{},"created":"now"}'), "data.created"),
    "deadline twice": (
        build_member('{"id":"r","deadline":1,"deadline":2,"payload":{}}'),
        "data.deadline: given",
    ),
    "payload twice": (
        build_member('{"id":"r","deadline":1,"payload":{},"payload":{}}'),
        "data.payload: given",
    ),
    "payload twice, the first of another type": (
        build_member('{"id":"r","payload":[1,{"id":"no"}],"deadline":1,"payload":{"a":1}}'),
        "data.payload: given",
    ),
    "deadline twice, once escaped": (
        build_member('{"id":"r","deadline":1,"dea\\u0064line":2,"payload":{}}'),
        "deadline: given",
    ),
    "same id twice": (build_member('{"id":"r","id":"r","deadline":1,"payload":{}}'), "data.id: given"),
    "broken payload": (build_member('{"id":"r","deadline":1,"payload":{"a":}}'), "not JSON"),
    "NaN": (build_member('{"id":"r","deadline":1,"payload":{"a":NaN}}'), "not JSON"),
    "Infinity": (build_member('{"id":"r","deadline":1,"payload":{"a":-Infinity}}'), "not JSON"),
    "comment": (build_member('{"id":"r","deadline":1,"payload":{}/* */}'), "not JSON"),
    "trailing comma": (build_member('{"id":"r","deadline":1,"payload":{},}'), "not JSON"),
    "raw newline in text": (build_member('{"id":"r","deadline":1,"payload":{"a":"\n"}}'), "not JSON"),
    "invalid utf-8": (build_member(b'{"id":"r","deadline":1,"payload":{"a":"\xff"}}'), "not UTF-8"),
    "utf-8 surrogate": (build_member(b'{"id":"r","deadline":1,"payload":{"a":"\xed\xa0\x80"}}'), "not UTF-8"),
    "overlong utf-8": (build_member(b'{"id":"r","deadline":1,"payload":{"a":"\xc0\xaf"}}'), "not UTF-8"),
    "truncated": (build_member('{"id":"r","deadline":1,"payload":{"a":"b"}}')[:-5], "not JSON"),
    "open string": (build_member('{"id":"r","deadline":1,"payload":{"a":"b')[:-1], "not JSON"),
    "trailing bytes": (build_member('{"id":"r","deadline":1,"payload":{}}') + b" x", "not JSON"),
    "trailing nul": (build_member('{"id":"r","deadline":1,"payload":{}}') + b"\0", "not JSON"),
    "two objects": (build_member('{"id":"r","deadline":1,"payload":{}}') * 2, "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + build_member('{"id":"r","deadline":1,"payload":{}}'), "not JSON"),
    "nesting bomb": (
        build_member('{"id":"r","deadline":1,"payload":{"a":%s}}' % ("[" * 100_000)),
        "nested too deeply",
    ),
    "closed nesting bomb": (
        build_member(
            '{{"id":"r","deadline":1,"payload":{{"a":{}{}}}}}'.format('{"a":' * 50_000 + "1", "}" * 50_000)
        ),
        "nested too deeply",
    ),
    "internal is a list": (
        b'{"internal":[],"request_kind":"redis","data":{"id":"r","deadline":1,"payload":{}}}',
        "internal: Expected object",
    ),
}


@pytest.mark.parametrize(("text", "why"), REJECTED.values(), ids=REJECTED)
def test_rejection_of_a_malformed_member_contains_its_id_and_reply_address(text: bytes, why: str) -> None:
    parsed = parse_rejected(text)
    assert parsed.code is ErrorCode.INVALID_REQUEST
    assert why in parsed.message
    assert parsed.id == "r"
    if b'"internal":[]' not in text:
        assert (parsed.token, parsed.results) == ("tok", "list")


UNREADABLE_IDS = {
    "empty": b"",
    "spaces": b" \n",
    "null": b"null",
    "number": b"17",
    "text": b'"data"',
    "list": b"[]",
    "list around": b'[{"data":{"id":"r"}}]',
    "empty object": b"{}",
    "data is text": b'{"request_kind":"redis","data":"id"}',
    "data is a list": b'{"request_kind":"redis","data":["id","r"]}',
    "no id": build_member('{"deadline":1,"payload":{}}'),
    "id null": build_member('{"id":null,"deadline":1,"payload":{}}'),
    "id number": build_member('{"id":7,"deadline":1,"payload":{}}'),
    "id list": build_member('{"id":["r"],"deadline":1,"payload":{}}'),
    "id empty": build_member('{"id":"","deadline":1,"payload":{}}'),
    "id a lone surrogate": build_member('{"id":"\\ud800","deadline":1,"payload":{}}'),
    "id not utf-8": build_member(b'{"id":"\xff","deadline":1,"payload":{}}'),
    "two ids": build_member('{"id":"a","id":"b","deadline":1,"payload":{}}'),
    "two datas": b'{"request_kind":"redis","data":{"id":"a"},"data":{"id":"b","deadline":1,"payload":{}}}',
    "id elsewhere": b'{"id":"r","request_kind":"redis","data":{"deadline":1,"payload":{"id":"r"}}}',
    "id inside metadata": build_member('{"metadata":{"id":"r"},"deadline":1,"payload":{}}'),
    "colon first": b'{:"x"',
    "text after data": b'{"data":{"id":1} "x"',
    "brackets": b"[" * 60_000,
    "braces": b'{"a":' * 12_000,
    "quotes": b'{"data":{"id":"r' + b'"' * 1_000,
    "binary": bytes(range(256)) * 16,
}


@pytest.mark.parametrize("text", UNREADABLE_IDS.values(), ids=UNREADABLE_IDS)
def test_rejection_of_a_member_without_a_readable_id_has_no_id(text: bytes) -> None:
    parsed = parse_rejected(text)
    assert parsed.code is ErrorCode.INVALID_REQUEST
    if text != UNREADABLE_IDS["quotes"]:  # its id can be read, only the rest is malformed
        assert parsed.id is None
    assert 0 < len(parsed.message) <= 200


def test_id_after_a_large_payload_is_found_in_a_malformed_member() -> None:
    payload = json.dumps({"messages": [{"role": "user", "content": str(n)} for n in range(40_000)]})
    assert parse_rejected(build_member(f'{{"payload":{payload},"deadline":1.5,"id":"late"}}')).id == "late"


def test_an_id_may_look_like_json() -> None:
    parsed = parse_rejected(
        build_member('{"metadata":{"k":"payload"},"id":"a{}","payload":{},"deadline":1.5}')
    )
    assert parsed.id == "a{}"


def test_too_long_id_is_rejected_and_contained_in_the_rejection() -> None:
    assert (
        parse_accepted(build_member('{"id":"%s","deadline":1,"payload":{}}' % ("x" * 1024))).id == "x" * 1024
    )
    for huge in ("x" * 1025, "é" * 513):
        parsed = parse_rejected(build_member(f'{{"id":"{huge}","deadline":1,"payload":{{}}}}'))
        assert "longer than 1024 bytes" in parsed.message
        assert parsed.id == huge


def test_last_of_several_equal_header_names_applies() -> None:
    assert parse_accepted(
        build_member('{"id":"r","deadline":1,"payload":{},"headers":{"a":"1","a":"2"}}')
    ).headers == {"a": "2"}


def test_value_equal_to_a_field_name_is_not_a_duplicate_field() -> None:
    parsed = parse_accepted(
        build_member('{"id":"deadline","deadline":1,"payload":{},"metadata":{"id":"id","payload":"data"}}')
    )
    assert parsed.id == "deadline"
    assert parsed.metadata == {"id": "id", "payload": "data"}


@pytest.mark.parametrize(
    "created", [-1, 10**11, 1_764_044_000_000, 10**30, 10**400, -(10**400)], ids=lambda at: str(at)[:13]
)
def test_created_that_is_not_a_unix_time_is_ignored(created: int) -> None:
    assert (
        parse_accepted(build_member(f'{{"id":"r","deadline":1,"created":{created},"payload":{{}}}}')).created
        == 0
    )


@pytest.mark.parametrize(
    ("deadline", "is_accepted"), [(0, False), (1, True), (10**11 - 1, True), (10**11, False)]
)
def test_deadline_is_above_zero_and_fits_beside_the_priority_in_a_score(
    deadline: int, is_accepted: bool
) -> None:
    parsed = parse_member(build_member(f'{{"id":"r","deadline":{deadline},"payload":{{}}}}'))
    assert isinstance(parsed, Request) is is_accepted


@pytest.mark.parametrize(
    ("chars", "is_accepted"), [(MAX_HEADERS_CHARS, True), (MAX_HEADERS_CHARS + 1, False)]
)
def test_names_and_values_of_headers_are_limited_together(chars: int, is_accepted: bool) -> None:
    headers = '{"x-a":"b","x-c":"%s"}' % ("d" * (chars - 7))
    parsed = parse_member(build_member(f'{{"id":"r","deadline":1,"headers":{headers},"payload":{{}}}}'))
    assert isinstance(parsed, Request) is is_accepted


def test_encoded_member_has_a_retry_count_and_no_empty_fields() -> None:
    assert json.loads(encode_member("r", b"{}", 1)) == {
        "internal": {"retry_count": 0},
        "request_kind": "redis",
        "data": {"id": "r", "deadline": 1, "payload": {}},
    }


def test_too_large_payload_is_rejected_by_the_size_of_the_payload_alone() -> None:
    text = build_member('{"id":"r","deadline":1,"payload":{"a":"%s"}}' % ("x" * 92))
    assert isinstance(parse_member(text, max_payload_bytes=100), Request)
    parsed = parse_member(text, max_payload_bytes=99)
    assert isinstance(parsed, Rejection)
    assert (parsed.code, parsed.id, parsed.token, parsed.results) == (ErrorCode.TOO_LARGE, "r", "tok", "list")
    assert "100 bytes, at most 99" in parsed.message


def test_encoded_member_is_parsed_to_the_same_request() -> None:
    fields: dict[str, Any] = {
        "created": 5,
        "endpoint": "/v1/embeddings",
        "headers": {"x-a": "b"},
        "metadata": {"userid": "t"},
        "token": "tok",
        "results": "list",
        "labels": {"tier": "batch"},
        "queue": "q",
        "queue_id": "qid",
        "correlation_id": "c",
    }
    parsed = parse_accepted(encode_member("r", b'{"seed": 9223372036854775807}', 17, **fields))
    assert parsed == Request(id="r", deadline=17, payload=b'{"seed": 9223372036854775807}', **fields)
    assert parse_accepted(encode_member("r", {"a": "é"}, 17)).payload == '{"a":"é"}'.encode()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("", {}, 1), "data.id"),
        (("r", {}, 0), "data.deadline"),
        (("r", b"[]", 1), "data.payload"),
        (("r", b"{", 1), "not JSON"),
        (("r", b'{},"id":"s"', 1), "data.id: given twice"),
    ],
)
def test_member_that_would_be_rejected_is_not_encoded(arguments: tuple[str, Any, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode_member(*arguments)


def test_result_contains_the_body_of_the_answer_as_a_string() -> None:
    body = '{"text":"é 🙂 \\u0000 \u2028"}'.encode()
    assert json.loads(encode_answer("r", 200, body)) == {
        "id": "r",
        "status_code": 200,
        "payload": body.decode(),
    }
    assert json.loads(encode_answer("r", 404, b"")) == {"id": "r", "status_code": 404, "payload": ""}


def test_bytes_that_are_not_utf8_are_replaced_with_a_note() -> None:
    result = json.loads(encode_answer("r", 200, b"ab\xff\xed\xa0\x80c"))
    assert result["payload"] == "ab\ufffd\ufffd\ufffd\ufffdc"
    assert result["payload_note"] == "not UTF-8 from byte 2 on: invalid bytes replaced"


def test_failure_is_encoded_as_the_contract_says() -> None:
    assert json.loads(encode_failure("r-1", ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded")) == {
        "id": "r-1",
        "payload": '{"error":"deadline exceeded"}',
        "error_code": "DEADLINE_EXCEEDED",
        "error_message": "deadline exceeded",
    }


def test_result_names_the_model_version_only_if_there_is_one() -> None:
    assert json.loads(encode_answer("r", 200, b"{}", chosen_model="m-v2"))["model_version"] == "m-v2"
    failure = encode_failure("r", ErrorCode.RETRIES_EXHAUSTED, "no", chosen_model="m-v2")
    assert json.loads(failure)["model_version"] == "m-v2"
    assert "model_version" not in json.loads(encode_failure("r", ErrorCode.RETRIES_EXHAUSTED, "no"))


@pytest.mark.parametrize("field", ["version", "endpoints"])
def test_member_cannot_set_its_version_or_endpoints(field: str) -> None:
    member = json.loads(encode_member("r", {}, 1))
    for section in (member, member["data"], member["internal"]):
        section[field] = "mine"
    request = parse_accepted(json.dumps(member).encode())
    assert (request.chosen_model, request.endpoints) == ("", "")


def test_failure_after_an_answer_contains_status_and_body() -> None:
    assert json.loads(
        encode_failure("r", ErrorCode.RETRIES_EXHAUSTED, "no", status=502, body=b"bad gateway")
    ) == {
        "id": "r",
        "status_code": 502,
        "payload": "bad gateway",
        "error_code": "RETRIES_EXHAUSTED",
        "error_message": "no",
    }
    empty = json.loads(encode_failure("r", ErrorCode.RETRIES_EXHAUSTED, "no", status=500, body=b""))
    assert (empty["status_code"], empty["payload"]) == (500, '{"error":"no"}')


def test_result_with_unknown_fields_and_error_code_is_decoded() -> None:
    result = decode_result(b'{"id":"r","payload":"x","status_code":200,"error_code":"NEW","more":[1]}')
    assert (result.id, result.payload, result.status_code, result.error_code) == ("r", "x", 200, "NEW")
    for invalid in (b"", b"[]", b'{"id":1,"payload":""}', b"\xff"):
        with pytest.raises(ValueError):
            decode_result(invalid)


def test_score_contains_the_deadline_and_orders_by_priority() -> None:
    assert compute_score(1764047600) == 1764047600.0
    assert compute_score(1764047600, 0) == 1764047600.0
    assert compute_score(1764047600, 9) == 901764047600.0
    assert decode_deadline(compute_score(1764047600, 9)) == 1764047600
    for foreign in (-1.0, float("inf"), float("-inf"), float("nan")):
        assert decode_deadline(foreign) == 0
    for priority in (-1, 10):
        with pytest.raises(ValueError, match="must be 0"):
            compute_score(1, priority)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(b',"labels":{' + b",".join(b'"k%d":""' % at for at in range(9000)) + b"}", id="labels"),
        pytest.param(b',"labels":{"a":"' + b"x" * MAX_ENVELOPE_BYTES + b'"}', id="one label"),
        pytest.param(b',"made-up":[' + b"1," * MAX_ENVELOPE_BYTES + b"1]", id="an unknown field"),
    ],
)
@pytest.mark.parametrize("payload", [b'{"a":1}', b'{"a":"\\ud800"}'], ids=["payload", "lone surrogate"])
def test_envelope_beside_the_payload_is_limited_in_size(extra: bytes, payload: bytes) -> None:
    text = b'{"internal":{"request_token":"t"' + extra + b'},"request_kind":"redis",'
    text += b'"data":{"id":"r","deadline":1,"payload":' + payload + b"}}"
    parsed = parse_member(text)
    assert isinstance(parsed, Rejection)
    assert parsed.code is ErrorCode.TOO_LARGE
    assert "beside its payload" in parsed.message


def test_envelope_of_the_largest_size_is_accepted() -> None:
    start, end = b'{"id":"r","deadline":1,"payload":{"a":1},"made-up":"', b'"}'
    left = MAX_ENVELOPE_BYTES - len(build_member(start + end)) + len(b'{"a":1}')
    assert isinstance(parse_member(build_member(start + b"x" * left + end)), Request)
    assert isinstance(parse_member(build_member(start + b"x" * (left + 1) + end)), Rejection)


def test_large_payload_may_contain_any_json() -> None:
    items = b'"\\n\\\\ud800 \\ud83d\\ude00 \\ud800",' * 5000
    payload = b'{"a":[' + items + b'""]}'
    parsed = parse_member(build_member(b'{"id":"r","deadline":1,"payload":' + payload + b"}"))
    assert isinstance(parsed, Request)
    assert parsed.payload == payload


def test_rejection_of_a_cut_member_contains_the_fields_before_the_payload() -> None:
    internal = b'{"internal":{"request_token":"t","result_queue_name":"mine"},"request_kind":"redis",'
    whole = internal + b'"data":{"id":"r","deadline":1,"payload":{"a":"' + b"x" * 10**5 + b'"}}}'
    parsed = parse_member(cut_member(whole))
    assert parsed == Rejection(
        ErrorCode.TOO_LARGE, f"member: {len(whole)} bytes are too many to be moved", "r", "t", "mine"
    )
    id_after_payload = (
        internal + b'"data":{"payload":{"a":"' + b"x" * 10**5 + b'","id":"no"},"id":"r","deadline":1}}'
    )
    parsed = parse_member(cut_member(id_after_payload))
    assert isinstance(parsed, Rejection)
    assert (parsed.code, parsed.id, parsed.token) == (ErrorCode.TOO_LARGE, None, "t")


def test_result_for_a_list_that_is_not_allowed_has_a_short_message() -> None:
    result = decode_result(encode_bad_list("r-1", "x" * 5000 + "\ud800", token="t"))
    assert (result.id, result.error_code, result.request_token) == ("r-1", ErrorCode.INVALID_REQUEST, "t")
    assert result.error_message is not None
    assert result.error_message.startswith("internal.result_queue_name: xxx")
    assert len(result.error_message) < 300
    assert "?" in (decode_result(encode_bad_list("r-1", "\ud800")).error_message or "")
