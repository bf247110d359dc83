"""Warm-up files: how they are parsed, which calls are planned, and how real requests are recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.features.models import warmup
from dispatcher.features.models.warmup import (
    MAX_CALLS,
    MAX_FAULTS_SHOWN,
    MAX_LINES,
    MAX_MERGED_CALLS,
    MAX_RECORDED_REPEAT,
    WarmupCall,
    WarmupRequest,
    WarmupRules,
    WarmupSample,
    encode_line,
    parse_warmup,
    plan_calls,
)
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.options import Options, index_options
from dispatcher.requests.outcomes.outcome import RetryPolicy

CHAT = "/v1/chat/completions"
RULES = WarmupRules(CHAT)


def parse_requests(*lines: str) -> tuple[WarmupRequest, ...]:
    parsed = parse_warmup("\n".join(lines).encode(), RULES)
    return require_requests(parsed)


def require_requests(parsed: tuple[WarmupRequest, ...] | list[str]) -> tuple[WarmupRequest, ...]:
    assert isinstance(parsed, tuple), parsed
    return parsed


def parse_faults(text: str | bytes, rules: WarmupRules = RULES) -> list[str]:
    parsed = parse_warmup(text.encode() if isinstance(text, str) else text, rules)
    assert isinstance(parsed, list), parsed
    return parsed


def test_line_is_parsed_to_path_body_and_repeat() -> None:
    body = '{"model": "qwen",  "max_tokens": 1.0}'
    assert parse_requests(f'{{"url": "/v1/embeddings", "body": {body}, "repeat": 3}}') == (
        WarmupRequest("/v1/embeddings", body.encode(), 3),
    )


def test_path_defaults_to_that_of_the_gateway_and_repeat_to_one() -> None:
    for url in ("", '"url": null, ', f'"url": "{CHAT}", '):
        assert parse_requests(f'{{{url}"body": {{"model": "q"}}}}') == (
            WarmupRequest(CHAT, b'{"model": "q"}'),
        )


def test_lines_of_batch_files_are_accepted() -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "q"}, "sequence": {"id": "s"}}
    assert parse_requests("", json.dumps(line), "  ", json.dumps(line) + "\r") == (
        (WarmupRequest(CHAT, b'{"model": "q"}'),) * 2
    )


def test_default_path_of_the_gateway_is_always_allowed() -> None:
    text = b'{"url": "/infer", "body": {"model": "q"}}'
    assert parse_warmup(text, WarmupRules("/infer")) == (WarmupRequest("/infer", b'{"model": "q"}'),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{", "is no JSON: "),
        ("7 8", "must be a JSON object"),
        ("{}", "body: is missing"),
        ('{"body": "{}"}', "body: must be a JSON object"),
        ('{"body": {}}', "body.model: is missing: the version's name is put in its place"),
        ('{"body": {"model": 7}}', "body.model: must be the name of a model"),
        ('{"body": {"model": ""}}', "body.model: must be the name of a model"),
        ('{"body": {"model": "q", "model": "q"}}', "body: cannot be understood: a field is given twice"),
        ('{"body": {"mod\\u0065l": "q"}}', "body: cannot be understood: a field is given twice, or its name"),
        ('{"body": {"model": "q", "stream": true}}', "body.stream: cannot be had in a warm-up"),
        ('{"body": {"model": "q"}, "body": {}}', "cannot be understood: a field is given twice"),
        ('{"body": {"model": "q"}, "repeats": 2}', "repeats: unknown field; known are url, body, repeat"),
        *(
            (
                f'{{"body": {{"model": "q"}}, "repeat": {each}}}',
                "repeat: must be a whole number between 1 and",
            )
            for each in ("0", "-1", "1001", '"3"', "null", "true", "1e99", "2.5")
        ),
        ('{"body": {"model": "q"}, "url": 7}', "url: must be a text"),
        ('{"body": {"model": "q"}, "url": "\\ud800"}', "holds a lone surrogate (\\ud800"),
        ('{"body": {"model": "q", "\\ud800": 1}}', "holds a lone surrogate"),
        ('{"body": {"model": "q"}, "url": "http://x/v1"}', "is no plain path, such as /v1/chat/completions"),
        ('{"body": {"model": "q"}, "url": "/v2/a"}', "url: '/v2/a' is not allowed; allowed are /v1/*"),
        ('{"body": ' + "[" * 100_000 + "]" * 100_000 + "}", "is nested too deeply"),
    ],
)
def test_fault_of_a_line_is_reported_with_the_line_number(line: str, message: str) -> None:
    (fault,) = parse_faults('{"body": {"model": "q"}}\n\n' + line)
    assert fault.startswith("line 3: ")
    assert message in fault


def test_all_faults_are_reported_at_once() -> None:
    faults = parse_faults('{"url": "x", "repeat": 0, "extra": 1}\n{"body": {"model": "q", "stream": 1}}')
    assert [each.partition(": ")[2].partition(":")[0] for each in faults] == [
        "extra",
        "url",
        "repeat",
        "body",
        "body.stream",
    ]
    assert [each.partition(":")[0] for each in faults] == ["line 1"] * 4 + ["line 2"]


def test_invalid_utf8_and_empty_files_are_reported() -> None:
    assert parse_faults(b'{"body": {"model": "\xff"}}') == ["line 1: is not UTF-8 at byte 20"]
    assert parse_faults(" \n\n") == ["holds no request"]
    assert parse_faults("") == ["holds no request"]


def test_further_faults_are_only_counted() -> None:
    faults = parse_faults("\n".join(["{}"] * 50))
    assert len(faults) == MAX_FAULTS_SHOWN + 1
    assert faults[-1] == "and 30 more"


def test_size_of_a_file_is_limited() -> None:
    line = '{"body": {"model": "q"}}'
    assert len(parse_requests(*[line] * MAX_LINES)) == MAX_LINES
    assert parse_faults("\n".join([line] * (MAX_LINES + 1))) == ["has 1,001 requests, 1,000 at most"]
    repeated_line = '{"body": {"model": "q"}, "repeat": 1000}'
    assert len(parse_requests(*[repeated_line] * 10)) == 10
    assert parse_faults("\n".join([repeated_line] * 11)) == [
        "asks for 11,000 calls with all repeats, 10,000 at most"
    ]
    assert parse_faults(b" " * (warmup.MAX_FILE_BYTES + 1)) == ["is larger than 10 MB"]
    (message,) = parse_faults(line, WarmupRules(CHAT, max_body_bytes=5))
    assert message == "line 1: body: 14 bytes, at most 5 are accepted"


@given(st.binary(max_size=200) | st.text(st.sampled_from('{}[]":,\n\\u urlbodyrepeatmodel01'), max_size=80))
def test_any_file_yields_requests_or_faults(text: bytes | str) -> None:
    parsed = parse_warmup(text if isinstance(text, bytes) else text.encode(), RULES)
    assert parsed
    assert len({type(each) for each in parsed}) == 1


# Planning of calls.


def make_rule(**grouping: Any) -> BatchRule:
    return BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(**{"max_size": 32, **grouping})
    )


def make_embedding(text: str = "a", items: int = 0, repeat: int = 1) -> WarmupRequest:
    input_value: Any = [text] * items if items else text
    return WarmupRequest("/v1/embeddings", json.dumps({"model": "m", "input": input_value}).encode(), repeat)


def list_calls(*requests: WarmupRequest, rules: Any = (), **more: Any) -> list[WarmupCall]:
    nothing: Any = None
    options = Options(RetryPolicy(), of_features=index_options(MergeOptions(rules)))
    merger = RequestMerger(KernelContext(nothing, nothing, nothing, nothing, options))
    return list(plan_calls(requests, (merger.join_copies,), "qwen-v2", **more))


def test_each_request_is_repeated_with_the_name_of_the_version() -> None:
    first, second = WarmupRequest(CHAT, b'{"model": "qwen"}', 2), make_embedding()
    calls = list_calls(first, second)
    assert [(call.path, call.items) for call in calls] == [(CHAT, 1), (CHAT, 1), ("/v1/embeddings", 1)]
    assert {json.loads(call.body)["model"] for call in calls} == {"qwen-v2"}


def test_request_of_a_merge_rule_is_also_merged_to_the_preferred_sizes() -> None:
    calls = list_calls(make_embedding(repeat=2), rules=[make_rule(preferred_sizes=(8, 16))])
    assert [call.items for call in calls] == [1, 1, 8, 16]
    assert [len(json.loads(call.body)["input"]) for call in calls[2:]] == [8, 16]
    assert json.loads(calls[2].body)["model"] == "qwen-v2"


@pytest.mark.parametrize(
    ("warmup_request", "rule", "sizes"),
    [
        (make_embedding(), make_rule(), [1, 32]),
        (make_embedding(items=5), make_rule(), [1, 6]),
        (make_embedding(items=20), make_rule(), [1]),
        (make_embedding(items=4), make_rule(preferred_sizes=(4, 8)), [1, 2]),
        (make_embedding(), make_rule(max_size=1), [1]),
        (make_embedding("word " * 100), make_rule(max_weight=1000.0), [1]),
        (WarmupRequest("/v1/embeddings", b'{"model": "m", "input": []}'), make_rule(), [1]),
        (WarmupRequest(CHAT, b'{"model": "m"}'), make_rule(), [1]),
    ],
)
def test_merged_call_is_not_larger_than_its_rule_allows(
    warmup_request: WarmupRequest, rule: BatchRule, sizes: list[int]
) -> None:
    assert [call.items for call in list_calls(warmup_request, rules=[rule])] == sizes


def test_merged_call_is_not_longer_than_the_list_that_a_server_accepts() -> None:
    rule = BatchRule(("/v1/*",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(32, (4, 16)), max_items=8)
    assert [call.items for call in list_calls(make_embedding(), rules=[rule])] == [1, 4]


def test_first_rule_with_the_path_applies() -> None:
    assert [
        call.items for call in list_calls(make_embedding(), rules=[make_rule(max_size=2), make_rule()])
    ] == [
        1,
        2,
    ]


def test_number_and_size_of_merged_calls_are_limited() -> None:
    sizes = tuple(range(2, 33))
    calls = list_calls(
        *[make_embedding(str(number)) for number in range(100)], rules=[make_rule(preferred_sizes=sizes)]
    )
    assert sum(call.items > 1 for call in calls) == MAX_MERGED_CALLS
    assert sum(call.items == 1 for call in calls) == 100
    assert [
        call.items for call in list_calls(make_embedding("x" * 100), rules=[make_rule()], max_bytes=1000)
    ] == [1]


def test_body_whose_model_cannot_be_replaced_is_skipped() -> None:
    ambiguous = WarmupRequest(CHAT, b'{"model": "a", "model": "b"}')
    assert [call.path for call in list_calls(ambiguous, make_embedding())] == ["/v1/embeddings"]


# Recording of real requests.


def build_body(text: str, model: str = "q") -> bytes:
    return json.dumps({"model": model, "prompt": text}).encode()


def read_back(sample: WarmupSample) -> tuple[WarmupRequest, ...]:
    text = b"".join(map(encode_line, sample.list_requests()))
    assert len(text) <= warmup.MAX_FILE_BYTES
    return require_requests(parse_warmup(text, WarmupRules("/none", ("/*",))))


def test_equal_requests_are_recorded_as_one_line_with_a_count() -> None:
    sample = WarmupSample(10)
    for text in ("a", "b", "a", "a"):
        sample.add_request(CHAT, build_body(text))
    for _ in range(50):
        sample.add_request(CHAT, build_body("often"))
    assert sample.offered_count == 54
    counts = {json.loads(each.body)["prompt"]: each.repeat for each in read_back(sample)}
    assert counts == {"a": 3, "b": 1, "often": MAX_RECORDED_REPEAT}


def test_rare_sizes_and_paths_are_in_the_sample() -> None:
    sample = WarmupSample(8)
    for number in range(1000):
        sample.add_request(CHAT, build_body(f"{number:03}"))
    for size in (200, 2000, 20_000):
        sample.add_request(CHAT, build_body("x" * size))
    sample.add_request("/v1/embeddings", build_body("rare"))
    requests = read_back(sample)
    assert len(requests) == 8
    assert {each.url for each in requests} == {CHAT, "/v1/embeddings"}
    assert {len(each.body).bit_length() for each in requests} >= {8, 11, 15}


def test_frequent_request_stays_in_the_sample() -> None:
    sample = WarmupSample(2)
    sample.add_request(CHAT, build_body("a"))
    sample.add_request(CHAT, build_body("b"))
    sample.add_request(CHAT, build_body("a"))
    sample.add_request(CHAT, build_body("x" * 500))
    assert [(len(each.body) > 100, each.repeat) for each in read_back(sample)] == [(False, 2), (True, 1)]


def test_size_of_the_sample_is_limited_in_bytes() -> None:
    sample = WarmupSample(1000, max_bytes=10_000)
    for number in range(500):
        sample.add_request(CHAT, build_body(f"{number} " + "x" * (number % 300)))
    sample.add_request(CHAT, build_body("x" * 20_000))
    assert sum(len(encode_line(each)) for each in read_back(sample)) <= 10_000
    assert len(sample.list_requests()) > 20


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("http://x/", build_body("a")),
        (CHAT, b"no json"),
        (CHAT, b'{"model": "q", "a": "\xff"}'),
        (CHAT, b'{"model": "q", "a": "\\ud800"}'),
        (CHAT, b'{"prompt": "a"}'),
        (CHAT, b'{"model": "q", "stream": true}'),
        (CHAT, b"[]"),
        (CHAT, b"[" * 5000 + b"]" * 5000),
    ],
)
def test_request_that_is_invalid_in_a_warm_up_is_not_recorded(url: str, body: bytes) -> None:
    sample = WarmupSample(10)
    sample.add_request(url, body)
    assert (sample.offered_count, sample.list_requests()) == (0, [])


def test_body_of_several_lines_is_recorded_in_one_line() -> None:
    sample = WarmupSample(10)
    sample.add_request(CHAT, b' {\n "model": "q",\r\n "prompt": "\\ud83d\\ude00 a\\nb", "n": 1.50\n}\n')
    (request,) = read_back(sample)
    assert json.loads(request.body) == {"model": "q", "prompt": "\U0001f600 a\nb", "n": 1.5}
    assert b"1.50" in request.body


@given(st.lists(st.tuples(st.sampled_from([CHAT, "/v1/embeddings"]), st.text(max_size=40)), max_size=60))
def test_each_recorded_request_was_offered(offered: list[tuple[str, str]]) -> None:
    sample = WarmupSample(7)
    for url, text in offered:
        sample.add_request(url, build_body(text))
    requests = read_back(sample) if offered else ()
    assert len(requests) == min(7, len(set(offered)))
    for each in requests:
        assert (each.url, json.loads(each.body)["prompt"]) in offered
    assert sum(each.repeat for each in requests) <= MAX_CALLS
