"""Warm-up files: what is read of them, which calls they come to, and how they are cut from real work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.core.merging.shapes import SHAPES
from dispatcher.core.models import warmup
from dispatcher.core.models.warmup import (
    MAX_CALLS,
    MAX_FAULTS_SHOWN,
    MAX_LINES,
    MAX_MERGED_CALLS,
    MAX_RECORDED_REPEAT,
    WarmupCall,
    WarmupFault,
    WarmupRequest,
    WarmupRules,
    WarmupSample,
    encode_line,
    parse_warmup,
    plan_calls,
)

CHAT = "/v1/chat/completions"
RULES = WarmupRules(CHAT)


def requests(*lines: str) -> tuple[WarmupRequest, ...]:
    found = parse_warmup("\n".join(lines).encode(), RULES)
    return right(found)


def right(found: tuple[WarmupRequest, ...] | tuple[WarmupFault, ...]) -> tuple[WarmupRequest, ...]:
    read = tuple(each for each in found if isinstance(each, WarmupRequest))
    assert read == found
    return read


def faults(text: str | bytes, rules: WarmupRules = RULES) -> list[str]:
    found = parse_warmup(text.encode() if isinstance(text, str) else text, rules)
    assert all(isinstance(each, WarmupFault) for each in found), found
    return [str(each) for each in found]


def test_a_line_is_a_path_a_body_and_how_often() -> None:
    body = '{"model": "qwen",  "max_tokens": 1.0}'
    assert requests(f'{{"url": "/v1/embeddings", "body": {body}, "repeat": 3}}') == (
        WarmupRequest("/v1/embeddings", body.encode(), 3),
    )


def test_without_a_path_the_gateways_is_meant_and_once() -> None:
    for url in ("", '"url": null, ', f'"url": "{CHAT}", '):
        assert requests(f'{{{url}"body": {{"model": "q"}}}}') == (WarmupRequest(CHAT, b'{"model": "q"}'),)


def test_lines_of_batch_files_are_such_lines() -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "q"}, "sequence": {"id": "s"}}
    assert requests("", json.dumps(line), "  ", json.dumps(line) + "\r") == (
        (WarmupRequest(CHAT, b'{"model": "q"}'),) * 2
    )


def test_the_gateways_own_path_needs_no_leave() -> None:
    text = b'{"url": "/infer", "body": {"model": "q"}}'
    assert parse_warmup(text, WarmupRules("/infer")) == (WarmupRequest("/infer", b'{"model": "q"}'),)


@pytest.mark.parametrize(
    ("line", "said"),
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
        ('{"body": ' + "[" * 2000 + "]" * 2000 + "}", "is nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_number(line: str, said: str) -> None:
    (told,) = faults('{"body": {"model": "q"}}\n\n' + line)
    assert told.startswith("line 3: ")
    assert said in told


def test_everything_that_is_wrong_is_told_at_once() -> None:
    told = faults('{"url": "x", "repeat": 0, "extra": 1}\n{"body": {"model": "q", "stream": 1}}')
    assert [each.partition(": ")[2].partition(":")[0] for each in told] == [
        "extra",
        "url",
        "repeat",
        "body",
        "body.stream",
    ]
    assert [each.partition(":")[0] for each in told] == ["line 1"] * 4 + ["line 2"]


def test_what_is_no_text_is_told() -> None:
    assert faults(b'{"body": {"model": "\xff"}}') == ["line 1: is not UTF-8 at byte 20"]
    assert faults(" \n\n") == ["holds no request"]
    assert faults("") == ["holds no request"]


def test_many_faults_are_counted() -> None:
    told = faults("\n".join(["{}"] * 50))
    assert len(told) == MAX_FAULTS_SHOWN + 1
    assert told[-1] == "and 30 more"


def test_a_file_is_bounded() -> None:
    line = '{"body": {"model": "q"}}'
    assert len(requests(*[line] * MAX_LINES)) == MAX_LINES
    assert faults("\n".join([line] * (MAX_LINES + 1))) == ["has 1,001 requests, 1,000 at most"]
    often = '{"body": {"model": "q"}, "repeat": 1000}'
    assert len(requests(*[often] * 10)) == 10
    assert faults("\n".join([often] * 11)) == ["asks for 11,000 calls with all repeats, 10,000 at most"]
    assert faults(b" " * (warmup.MAX_FILE_BYTES + 1)) == ["is larger than 10 MB"]
    (said,) = faults(line, WarmupRules(CHAT, max_body_bytes=5))
    assert said == "line 1: body: 14 bytes, at most 5 are accepted"


@given(st.binary(max_size=200) | st.text(st.sampled_from('{}[]":,\n\\u urlbodyrepeatmodel01'), max_size=80))
def test_whatever_is_in_a_file_is_judged(text: bytes | str) -> None:
    found = parse_warmup(text if isinstance(text, bytes) else text.encode(), RULES)
    assert found
    assert len({type(each) for each in found}) == 1


# What it comes to.


def rule(**forming: Any) -> BatchRule:
    return BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(**{"max_size": 32, **forming})
    )


def embedding(text: str = "a", items: int = 0, repeat: int = 1) -> WarmupRequest:
    given: Any = [text] * items if items else text
    return WarmupRequest("/v1/embeddings", json.dumps({"model": "m", "input": given}).encode(), repeat)


def calls(*given: WarmupRequest, rules: Any = (), **more: Any) -> list[WarmupCall]:
    return list(plan_calls(given, rules, "qwen-v2", **more))


def test_each_request_goes_as_often_as_it_says_to_the_version() -> None:
    first, second = WarmupRequest(CHAT, b'{"model": "qwen"}', 2), embedding()
    found = calls(first, second)
    assert [(call.path, call.items) for call in found] == [(CHAT, 1), (CHAT, 1), ("/v1/embeddings", 1)]
    assert {json.loads(call.body)["model"] for call in found} == {"qwen-v2"}


def test_where_its_path_is_merged_it_goes_merged_to_the_preferred_sizes_as_well() -> None:
    found = calls(embedding(repeat=2), rules=[rule(preferred_sizes=(8, 16))])
    assert [call.items for call in found] == [1, 1, 8, 16]
    assert [len(json.loads(call.body)["input"]) for call in found[2:]] == [8, 16]
    assert json.loads(found[2].body)["model"] == "qwen-v2"


@pytest.mark.parametrize(
    ("given", "by", "sizes"),
    [
        (embedding(), rule(), [1, 32]),
        (embedding(items=5), rule(), [1, 6]),
        (embedding(items=20), rule(), [1]),
        (embedding(items=4), rule(preferred_sizes=(4, 8)), [1, 2]),
        (embedding(), rule(max_size=1), [1]),
        (embedding("word " * 100), rule(max_weight=1000.0), [1]),
        (WarmupRequest("/v1/embeddings", b'{"model": "m", "input": []}'), rule(), [1]),
        (WarmupRequest(CHAT, b'{"model": "m"}'), rule(), [1]),
    ],
)
def test_no_call_is_larger_than_its_rule_allows(
    given: WarmupRequest, by: BatchRule, sizes: list[int]
) -> None:
    assert [call.items for call in calls(given, rules=[by])] == sizes


def test_the_longest_list_that_a_server_takes_counts_too() -> None:
    few = BatchRule(("/v1/*",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(32, (4, 16)), max_items=8)
    assert [call.items for call in calls(embedding(), rules=[few])] == [1, 4]


def test_the_first_rule_that_has_the_path_counts() -> None:
    assert [call.items for call in calls(embedding(), rules=[rule(max_size=2), rule()])] == [1, 2]


def test_the_plan_is_bounded() -> None:
    sizes = tuple(range(2, 33))
    found = calls(*[embedding(str(number)) for number in range(100)], rules=[rule(preferred_sizes=sizes)])
    assert sum(call.items > 1 for call in found) == MAX_MERGED_CALLS
    assert sum(call.items == 1 for call in found) == 100
    assert [call.items for call in calls(embedding("x" * 100), rules=[rule()], max_bytes=1000)] == [1]


def test_what_cannot_name_the_version_is_left_out() -> None:
    bad = WarmupRequest(CHAT, b'{"model": "a", "model": "b"}')
    assert [call.path for call in calls(bad, embedding())] == ["/v1/embeddings"]


# How it is cut from real work.


def body(text: str, model: str = "q") -> bytes:
    return json.dumps({"model": model, "prompt": text}).encode()


def read_back(sample: WarmupSample) -> tuple[WarmupRequest, ...]:
    written = b"".join(map(encode_line, sample.list_requests()))
    assert len(written) <= warmup.MAX_FILE_BYTES
    return right(parse_warmup(written, WarmupRules("/none", ("/*",))))


def test_equal_bodies_are_one_line_with_a_count() -> None:
    sample = WarmupSample(10)
    for text in ("a", "b", "a", "a"):
        sample.add_request(CHAT, body(text))
    for _ in range(50):
        sample.add_request(CHAT, body("often"))
    assert sample.offered_count == 54
    counts = {json.loads(each.body)["prompt"]: each.repeat for each in read_back(sample)}
    assert counts == {"a": 3, "b": 1, "often": MAX_RECORDED_REPEAT}


def test_all_sizes_and_paths_are_there_however_rare() -> None:
    sample = WarmupSample(8)
    for number in range(1000):
        sample.add_request(CHAT, body(f"{number:03}"))
    for size in (200, 2000, 20_000):
        sample.add_request(CHAT, body("x" * size))
    sample.add_request("/v1/embeddings", body("rare"))
    found = read_back(sample)
    assert len(found) == 8
    assert {each.url for each in found} == {CHAT, "/v1/embeddings"}
    assert {len(each.body).bit_length() for each in found} >= {8, 11, 15}


def test_what_is_met_often_stays() -> None:
    sample = WarmupSample(2)
    sample.add_request(CHAT, body("a"))
    sample.add_request(CHAT, body("b"))
    sample.add_request(CHAT, body("a"))
    sample.add_request(CHAT, body("x" * 500))
    assert [(len(each.body) > 100, each.repeat) for each in read_back(sample)] == [(False, 2), (True, 1)]


def test_the_sample_is_bounded_in_bytes_too() -> None:
    sample = WarmupSample(1000, max_bytes=10_000)
    for number in range(500):
        sample.add_request(CHAT, body(f"{number} " + "x" * (number % 300)))
    sample.add_request(CHAT, body("x" * 20_000))
    assert sum(len(encode_line(each)) for each in read_back(sample)) <= 10_000
    assert len(sample.list_requests()) > 20


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("http://x/", body("a")),
        (CHAT, b"no json"),
        (CHAT, b'{"model": "q", "a": "\xff"}'),
        (CHAT, b'{"model": "q", "a": "\\ud800"}'),
        (CHAT, b'{"prompt": "a"}'),
        (CHAT, b'{"model": "q", "stream": true}'),
        (CHAT, b"[]"),
        (CHAT, b"[" * 5000 + b"]" * 5000),
    ],
)
def test_what_would_be_none_of_a_warmup_is_passed_over(url: str, given: bytes) -> None:
    sample = WarmupSample(10)
    sample.add_request(url, given)
    assert (sample.offered_count, sample.list_requests()) == (0, [])


def test_a_body_of_several_lines_becomes_one() -> None:
    sample = WarmupSample(10)
    sample.add_request(CHAT, b' {\n "model": "q",\r\n "prompt": "\\ud83d\\ude00 a\\nb", "n": 1.50\n}\n')
    (found,) = read_back(sample)
    assert json.loads(found.body) == {"model": "q", "prompt": "\U0001f600 a\nb", "n": 1.5}
    assert b"1.50" in found.body


@given(st.lists(st.tuples(st.sampled_from([CHAT, "/v1/embeddings"]), st.text(max_size=40)), max_size=60))
def test_each_line_that_is_recorded_was_shown(shown: list[tuple[str, str]]) -> None:
    sample = WarmupSample(7)
    for url, text in shown:
        sample.add_request(url, body(text))
    found = read_back(sample) if shown else ()
    assert len(found) == min(7, len(set(shown)))
    for each in found:
        assert (each.url, json.loads(each.body)["prompt"]) in shown
    assert sum(each.repeat for each in found) <= MAX_CALLS
