"""Properties of list calls: merged or single, in one call or in pieces, each request gets the same answer."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from dispatcher.features.merging.shapes import (
    SHAPES,
    Part,
    Unfit,
    cut_part,
    find_difference,
    join_answers,
    merge_parts,
    parse_item_cap,
    parse_part,
    parse_token_cap,
    split_answer,
)
from dispatcher.features.merging.shapes.shares import apportion_count
from tests.list_calls import (
    BodyGroup,
    answer_call,
    body_groups,
    decode_without,
    json_values,
    parse_valid_part,
    texts,
)

SHAPES_WITH_INDEX = ("embeddings", "rerank", "tei_rerank", "score")
shape_names = st.sampled_from(sorted(SHAPES))


def collect_counts(usage: Any) -> list[int]:
    """Return all integers in the usage, in order."""
    if isinstance(usage, dict):
        return [count for value in usage.values() for count in collect_counts(value)]
    return [usage] if type(usage) is int else []


def get_usage_counts(answer: bytes) -> list[int]:
    parsed = json.loads(answer)
    return collect_counts(parsed.get("usage")) if isinstance(parsed, dict) else []


@given(body_groups())
def test_answer_from_a_merged_call_equals_the_answer_to_the_single_call(group: BodyGroup) -> None:
    parts = group.parts
    assert len({part.merge_key for part in parts}) == 1
    body = answer_call(group.name, merge_parts(parts))
    answers = split_answer(parts, body)
    assert not isinstance(answers, Unfit)
    alone = [answer_call(group.name, part.payload) for part in parts]
    assert [decode_without(each, "usage") for each in answers] == [
        decode_without(each, "usage") for each in alone
    ]
    assert [find_difference(*each) for each in zip(parts, answers, alone, strict=True)] == [None] * len(parts)


@given(body_groups())
def test_usage_of_the_parts_sums_to_that_of_the_call(group: BodyGroup) -> None:
    parts = group.parts
    body = answer_call(group.name, merge_parts(parts))
    answers = split_answer(parts, body)
    assert not isinstance(answers, Unfit)
    shares = [get_usage_counts(each) for each in answers]
    assert [sum(each) for each in zip(*shares, strict=True)] == get_usage_counts(body)


@given(body_groups(), st.integers(1, 4), st.floats(0, 30) | st.just(math.inf))
def test_joined_answers_of_pieces_equal_the_answer_to_one_call(
    group: BodyGroup, max_size: int, max_tokens: float
) -> None:
    part = group.parts[0]
    pieces = cut_part(part, max_size, max_tokens)
    assert sum(piece.size for piece in pieces) == part.size
    assert {piece.merge_key for piece in pieces} == {part.merge_key}
    if len(pieces) > 1:
        assert all(piece.size <= max_size for piece in pieces)
        assert all(piece.tokens <= max_tokens for piece in pieces if piece.size > 1)
    joined = join_answers(part, pieces, [answer_call(group.name, merge_parts([piece])) for piece in pieces])
    assert not isinstance(joined, Unfit)
    assert json.loads(joined) == json.loads(answer_call(group.name, part.payload))


@given(body_groups(), st.integers(1, 3))
def test_pieces_can_be_merged_with_other_parts(group: BodyGroup, max_size: int) -> None:
    parts = group.parts
    pieces = [piece for part in parts for piece in cut_part(part, max_size)]
    answers = split_answer(pieces, answer_call(group.name, merge_parts(pieces)))
    assert not isinstance(answers, Unfit)
    remaining_answers = iter(answers)
    for part in parts:
        own_pieces = cut_part(part, max_size)
        joined = join_answers(part, own_pieces, [next(remaining_answers) for _ in own_pieces])
        assert not isinstance(joined, Unfit)
        assert decode_without(joined, "usage") == decode_without(
            answer_call(group.name, part.payload), "usage"
        )


@given(body_groups(SHAPES_WITH_INDEX), st.randoms())
def test_results_are_assigned_by_their_index(group: BodyGroup, rng: Any) -> None:
    parts = group.parts
    assume(len(parts) > 1)
    answer = json.loads(answer_call(group.name, merge_parts(parts)))
    results = answer if isinstance(answer, list) else answer[group.shape.answer_field]
    if not group.shape.is_ranked:
        rng.shuffle(results)
    answers = split_answer(parts, json.dumps(answer, indent=2).encode())
    assert not isinstance(answers, Unfit)
    alone = [answer_call(group.name, part.payload) for part in parts]
    assert [decode_without(each, "usage") for each in answers] == [
        decode_without(each, "usage") for each in alone
    ]


@given(body_groups(SHAPES_WITH_INDEX), st.data())
def test_answer_with_missing_or_duplicate_items_is_not_split(group: BodyGroup, data: st.DataObject) -> None:
    parts = group.parts
    assume(len(parts) > 1)
    answer = json.loads(answer_call(group.name, merge_parts(parts)))
    results = answer if isinstance(answer, list) else answer[group.shape.answer_field]
    at = data.draw(st.integers(0, len(results) - 1))
    match data.draw(st.sampled_from(["less", "more", "twice", "above", "none", "null"])):
        case "less":
            results.pop(at)
        case "more":
            results.append({**results[at], "index": len(results)})
        case "twice":
            results[at]["index"] = results[at - 1]["index"]
        case "above":
            results[at]["index"] = len(results)
        case "none":
            del results[at]["index"]
        case _:
            results[at] = {"index": results[at]["index"], group.shape.item_field: None, "error": "x"}
    assert isinstance(split_answer(parts, json.dumps(answer).encode()), Unfit)


@given(body_groups(("tensorflow", "embed", "predict")), st.integers(-1, 1).filter(bool))
def test_answer_with_a_list_of_another_length_is_not_split(group: BodyGroup, length_change: int) -> None:
    parts = group.parts
    assume(len(parts) > 1)
    answer = json.loads(answer_call(group.name, merge_parts(parts)))
    results = answer if isinstance(answer, list) else answer[group.shape.answer_field]
    results[:] = results[:-1] if length_change < 0 else [*results, results[0]]
    assert isinstance(split_answer(parts, json.dumps(answer).encode()), Unfit)


other_fields = st.dictionaries(
    texts.filter(lambda name: name not in ("input", "late_chunking")), json_values, max_size=4
)


def shuffle_fields(value: Any, rng: Any) -> Any:
    """Return the same value with its fields in another order."""
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffle_fields(value[name], rng) for name in names}
    return [shuffle_fields(each, rng) for each in value] if isinstance(value, list) else value


def get_merge_key(text: str) -> bytes | None:
    """Return the merge key. `None` if the body is not merged."""
    parsed = parse_part(SHAPES["embeddings"], text.encode())
    return parsed.merge_key if isinstance(parsed, Part) else None


@given(other_fields, st.randoms(), st.sampled_from([None, 1, "\t"]))
@example({"": ["a", "b"]}, random.Random(1), None)
def test_merge_key_ignores_order_and_whitespace(fields: dict[str, Any], rng: Any, indent: Any) -> None:
    body = {"input": "a", **fields}
    expected_key = get_merge_key(json.dumps(body, ensure_ascii=False, separators=(",", ":")))
    other_body = {**shuffle_fields(body, rng), "input": ["b", "c"]}
    assert (
        get_merge_key(json.dumps(shuffle_fields(other_body, rng), ensure_ascii=False, indent=indent))
        == expected_key
    )


@given(other_fields, other_fields)
@example({"a": 1}, {"a": 1.0})
@example({"a": 1}, {"a": True})
@example({"a": [1, 2]}, {"a": [2, 1]})
@example({"a": "b c"}, {"a": "bc"})
@example({"a": {"b": 1}}, {"a": {"b": 1, "c": None}})
def test_merge_key_depends_on_everything_else(one: dict[str, Any], other: dict[str, Any]) -> None:
    assume(json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True))
    keys = [
        get_merge_key(json.dumps({"input": "a", **fields}, ensure_ascii=False)) for fields in (one, other)
    ]
    assert keys[0] != keys[1] or keys == [None, None]


@given(other_fields.filter(bool), st.randoms(), st.data())
def test_body_with_a_duplicate_field_is_not_merged(
    fields: dict[str, Any], rng: Any, data: st.DataObject
) -> None:
    pairs = [(json.dumps(name), json.dumps(value)) for name, value in {"input": "a", **fields}.items()]
    name = data.draw(st.sampled_from([name for name, _ in pairs]))
    value = data.draw(st.sampled_from([value for _, value in pairs]))
    pairs.insert(rng.randrange(len(pairs) + 1), (name, value))
    fields_json = ", ".join(f"{name} :{value}" for name, value in pairs)
    assert get_merge_key(f"{{{fields_json}}}") is None
    assert get_merge_key(f'{{"input":"a","x":[{{{fields_json}}}]}}') is None


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(any))
def test_count_is_apportioned_completely_and_in_proportion(count: int, weights: list[int]) -> None:
    shares = apportion_count(count, weights)
    assert sum(shares) == count
    exact = [Fraction(count * weight, sum(weights)) for weight in weights]
    assert all(abs(share - each) < 1 for share, each in zip(shares, exact, strict=True))


@given(
    st.binary() | st.text().map(str.encode) | json_values.map(lambda value: json.dumps(value).encode()),
    body_groups(),
)
def test_any_bytes_are_handled_without_an_error(data: bytes, group: BodyGroup) -> None:
    for shape in SHAPES.values():
        parsed = parse_part(shape, data)
        assert isinstance(parsed, Part) or parsed.why
    parts = group.parts
    answers = split_answer([*parts, *parts], data)
    assert isinstance(answers, list) or answers.why
    joined = join_answers(parts[0], parts, [data] * len(parts))
    assert isinstance(joined, bytes) or joined.why
    for other_answer in (data, answer_call(group.name, parts[0].payload)):
        assert isinstance(find_difference(parts[0], data, other_answer), str | None)
    for status in (200, 400, 413, 422):
        assert isinstance(parse_item_cap(status, data), int | None)
        assert isinstance(parse_token_cap(status, data), int | None)


@given(body_groups(), st.data())
def test_damaged_bodies_and_answers_are_accepted_or_rejected_with_a_reason(
    group: BodyGroup, data: st.DataObject
) -> None:
    """One byte of a valid text is removed or replaced."""
    parts = group.parts
    for valid in (parts[0].payload, answer_call(group.name, merge_parts([*parts, *parts]))):
        at = data.draw(st.integers(0, len(valid) - 1))
        damaged = (
            valid[:at]
            + data.draw(st.sampled_from([b"", b'"', b"]", b"[", b"}", b"1", b",", b"\\", b"\xff"]))
            + valid[at + 1 :]
        )
        parsed = parse_part(group.shape, damaged)
        if isinstance(parsed, Part):
            merged = merge_parts([parsed, parsed])
            json.loads(merged)
            assert isinstance(parse_part(group.shape, merged), Part)
        answers = split_answer([*parts, *parts], damaged)
        assert isinstance(answers, Unfit) or len(answers) == 2 * len(parts)
        find_difference(parts[0], damaged, valid)


def test_single_part_and_its_answer_are_unchanged() -> None:
    payload = b' { "input":"a" ,"model" : "m"} '
    part = parse_valid_part("embeddings", payload)
    assert merge_parts([part]) == payload
    assert split_answer([part], b"anything") == [b"anything"]
    assert join_answers(part, cut_part(part, 1), [b"anything"]) == b"anything"
