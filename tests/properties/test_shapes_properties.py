"""Laws of list calls: together or alone, in one call or in several, each gets what it would have got."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from dispatcher.core.merging.shapes import (
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
from dispatcher.core.merging.shapes.shares import apportion_count
from tests.listcalls import Group, anything, groups, model, part, texts, without

NUMBERED = ("embeddings", "rerank", "tei_rerank", "score")
shape_names = st.sampled_from(sorted(SHAPES))


def counts(usage: Any) -> list[int]:
    """Every integer in there, in order."""
    if isinstance(usage, dict):
        return [count for value in usage.values() for count in counts(value)]
    return [usage] if type(usage) is int else []


def usage_of(answer: bytes) -> list[int]:
    found = json.loads(answer)
    return counts(found.get("usage")) if isinstance(found, dict) else []


@given(groups())
def test_each_gets_out_of_a_merged_call_what_it_would_have_got_alone(group: Group) -> None:
    parts = group.parts
    assert len({one.merge_key for one in parts}) == 1
    body = model(group.name, merge_parts(parts))
    answers = split_answer(parts, body)
    assert not isinstance(answers, Unfit)
    alone = [model(group.name, one.payload) for one in parts]
    assert [without(each, "usage") for each in answers] == [without(each, "usage") for each in alone]
    assert [find_difference(*each) for each in zip(parts, answers, alone, strict=True)] == [None] * len(parts)


@given(groups())
def test_usage_of_all_is_that_of_the_call(group: Group) -> None:
    parts = group.parts
    body = model(group.name, merge_parts(parts))
    answers = split_answer(parts, body)
    assert not isinstance(answers, Unfit)
    shares = [usage_of(each) for each in answers]
    assert [sum(each) for each in zip(*shares, strict=True)] == usage_of(body)


@given(groups(), st.integers(1, 4), st.floats(0, 30) | st.just(math.inf))
def test_cut_and_joined_is_as_one_call(group: Group, most: int, most_tokens: float) -> None:
    one = group.parts[0]
    pieces = cut_part(one, most, most_tokens)
    assert sum(piece.size for piece in pieces) == one.size
    assert {piece.merge_key for piece in pieces} == {one.merge_key}
    if len(pieces) > 1:
        assert all(piece.size <= most for piece in pieces)
        assert all(piece.tokens <= most_tokens for piece in pieces if piece.size > 1)
    joined = join_answers(one, pieces, [model(group.name, merge_parts([piece])) for piece in pieces])
    assert not isinstance(joined, Unfit)
    assert json.loads(joined) == json.loads(model(group.name, one.payload))


@given(groups(), st.integers(1, 3))
def test_pieces_travel_with_others(group: Group, most: int) -> None:
    parts = group.parts
    pieces = [piece for one in parts for piece in cut_part(one, most)]
    answers = split_answer(pieces, model(group.name, merge_parts(pieces)))
    assert not isinstance(answers, Unfit)
    left = iter(answers)
    for one in parts:
        own = cut_part(one, most)
        joined = join_answers(one, own, [next(left) for _ in own])
        assert not isinstance(joined, Unfit)
        assert without(joined, "usage") == without(model(group.name, one.payload), "usage")


@given(groups(NUMBERED), st.randoms())
def test_items_are_placed_by_what_they_say_their_index_is(group: Group, chance: Any) -> None:
    parts = group.parts
    assume(len(parts) > 1)
    answer = json.loads(model(group.name, merge_parts(parts)))
    listed = answer if isinstance(answer, list) else answer[group.shape.answer_field]
    if not group.shape.is_ranked:
        chance.shuffle(listed)
    answers = split_answer(parts, json.dumps(answer, indent=2).encode())
    assert not isinstance(answers, Unfit)
    alone = [model(group.name, one.payload) for one in parts]
    assert [without(each, "usage") for each in answers] == [without(each, "usage") for each in alone]


@given(groups(NUMBERED), st.data())
def test_an_answer_that_lacks_an_item_or_has_one_twice_is_not_split(
    group: Group, data: st.DataObject
) -> None:
    parts = group.parts
    assume(len(parts) > 1)
    answer = json.loads(model(group.name, merge_parts(parts)))
    listed = answer if isinstance(answer, list) else answer[group.shape.answer_field]
    at = data.draw(st.integers(0, len(listed) - 1))
    match data.draw(st.sampled_from(["less", "more", "twice", "above", "none", "null"])):
        case "less":
            listed.pop(at)
        case "more":
            listed.append({**listed[at], "index": len(listed)})
        case "twice":
            listed[at]["index"] = listed[at - 1]["index"]
        case "above":
            listed[at]["index"] = len(listed)
        case "none":
            del listed[at]["index"]
        case _:
            listed[at] = {"index": listed[at]["index"], group.shape.item_field: None, "error": "x"}
    assert isinstance(split_answer(parts, json.dumps(answer).encode()), Unfit)


@given(groups(("tensorflow", "embed", "predict")), st.integers(-1, 1).filter(bool))
def test_a_list_of_another_length_is_not_split(group: Group, more: int) -> None:
    parts = group.parts
    assume(len(parts) > 1)
    answer = json.loads(model(group.name, merge_parts(parts)))
    listed = answer if isinstance(answer, list) else answer[group.shape.answer_field]
    listed[:] = listed[:-1] if more < 0 else [*listed, listed[0]]
    assert isinstance(split_answer(parts, json.dumps(answer).encode()), Unfit)


fields_beside = st.dictionaries(
    texts.filter(lambda name: name not in ("input", "late_chunking")), anything, max_size=4
)


def shuffled(value: Any, chance: Any) -> Any:
    """The same with its fields in another order."""
    if isinstance(value, dict):
        names = list(value)
        chance.shuffle(names)
        return {name: shuffled(value[name], chance) for name in names}
    return [shuffled(each, chance) for each in value] if isinstance(value, list) else value


def key_of(text: str) -> bytes | None:
    """None: it goes alone."""
    found = parse_part(SHAPES["embeddings"], text.encode())
    return found.merge_key if isinstance(found, Part) else None


@given(fields_beside, st.randoms(), st.sampled_from([None, 1, "\t"]))
@example({"": ["a", "b"]}, random.Random(1), None)
def test_the_key_ignores_order_and_whitespace(rest: dict[str, Any], chance: Any, indent: Any) -> None:
    body = {"input": "a", **rest}
    plain = key_of(json.dumps(body, ensure_ascii=False, separators=(",", ":")))
    other = {**shuffled(body, chance), "input": ["b", "c"]}
    assert key_of(json.dumps(shuffled(other, chance), ensure_ascii=False, indent=indent)) == plain


@given(fields_beside, fields_beside)
@example({"a": 1}, {"a": 1.0})
@example({"a": 1}, {"a": True})
@example({"a": [1, 2]}, {"a": [2, 1]})
@example({"a": "b c"}, {"a": "bc"})
@example({"a": {"b": 1}}, {"a": {"b": 1, "c": None}})
def test_the_key_ignores_nothing_else(one: dict[str, Any], other: dict[str, Any]) -> None:
    assume(json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True))
    keys = [key_of(json.dumps({"input": "a", **rest}, ensure_ascii=False)) for rest in (one, other)]
    assert keys[0] != keys[1] or keys == [None, None]


@given(fields_beside.filter(bool), st.randoms(), st.data())
def test_a_body_with_a_field_twice_goes_alone(rest: dict[str, Any], chance: Any, data: st.DataObject) -> None:
    pairs = [(json.dumps(name), json.dumps(value)) for name, value in {"input": "a", **rest}.items()]
    name = data.draw(st.sampled_from([name for name, _ in pairs]))
    value = data.draw(st.sampled_from([value for _, value in pairs]))
    pairs.insert(chance.randrange(len(pairs) + 1), (name, value))
    inside = ", ".join(f"{name} :{value}" for name, value in pairs)
    assert key_of(f"{{{inside}}}") is None
    assert key_of(f'{{"input":"a","x":[{{{inside}}}]}}') is None


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(any))
def test_a_count_is_shared_out_whole_and_in_proportion(count: int, weights: list[int]) -> None:
    shares = apportion_count(count, weights)
    assert sum(shares) == count
    exact = [Fraction(count * weight, sum(weights)) for weight in weights]
    assert all(abs(share - each) < 1 for share, each in zip(shares, exact, strict=True))


@given(
    st.binary() | st.text().map(str.encode) | anything.map(lambda value: json.dumps(value).encode()), groups()
)
def test_no_bytes_make_anything_raise(data: bytes, group: Group) -> None:
    for shape in SHAPES.values():
        found = parse_part(shape, data)
        assert isinstance(found, Part) or found.why
    parts = group.parts
    answers = split_answer([*parts, *parts], data)
    assert isinstance(answers, list) or answers.why
    joined = join_answers(parts[0], parts, [data] * len(parts))
    assert isinstance(joined, bytes) or joined.why
    for one in (data, model(group.name, parts[0].payload)):
        assert isinstance(find_difference(parts[0], data, one), str | None)
    for status in (200, 400, 413, 422):
        assert isinstance(parse_item_cap(status, data), int | None)
        assert isinstance(parse_token_cap(status, data), int | None)


@given(groups(), st.data())
def test_bent_bodies_and_answers_are_taken_or_refused_with_a_reason(
    group: Group, data: st.DataObject
) -> None:
    """Bytes that are nearly good."""
    parts = group.parts
    for good in (parts[0].payload, model(group.name, merge_parts([*parts, *parts]))):
        at = data.draw(st.integers(0, len(good) - 1))
        bent = (
            good[:at]
            + data.draw(st.sampled_from([b"", b'"', b"]", b"[", b"}", b"1", b",", b"\\", b"\xff"]))
            + good[at + 1 :]
        )
        found = parse_part(group.shape, bent)
        if isinstance(found, Part):
            again = merge_parts([found, found])
            json.loads(again)
            assert isinstance(parse_part(group.shape, again), Part)
        answers = split_answer([*parts, *parts], bent)
        assert isinstance(answers, Unfit) or len(answers) == 2 * len(parts)
        find_difference(parts[0], bent, good)


def test_one_part_alone_goes_and_comes_as_it_is() -> None:
    payload = b' { "input":"a" ,"model" : "m"} '
    one = part("embeddings", payload)
    assert merge_parts([one]) == payload
    assert split_answer([one], b"anything") == [b"anything"]
    assert join_answers(one, cut_part(one, 1), [b"anything"]) == b"anything"
