"""Comparison of an answer from a merged call with the answer to a single call."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest

from dispatcher.features.merging.shapes import find_difference, merge_parts, split_answer
from tests.list_calls import answer_call, encode_body, parse_valid_part

TEXTS = ["one", "another", "a third"]


def encode_embeddings(*vectors: Any, **more: Any) -> bytes:
    data = [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    return encode_body({"data": data, **more})


def encode_base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def compare_embeddings(first: Any, other: Any) -> str | None:
    return find_difference(
        parse_valid_part("embeddings", {"input": "a"}), encode_embeddings(first), encode_embeddings(other)
    )


def compare_scores(first: Any, other: Any) -> str | None:
    part = parse_valid_part("score", {"text_1": "a", "text_2": "b"})
    bodies = [encode_body({"data": [{"index": 0, "score": value}]}) for value in (first, other)]
    return find_difference(part, *bodies)


def compare_predictions(first: Any, other: Any) -> str | None:
    return find_difference(
        parse_valid_part("tensorflow", {"instances": [1]}),
        *(encode_body({"predictions": [v]}) for v in (first, other)),
    )


@pytest.mark.parametrize("angle", [0.0, 0.01, 0.04, -0.04])
def test_vectors_with_nearly_the_same_direction_are_equal(angle: float) -> None:
    first, other = [1.0, 0.0], [math.cos(angle), math.sin(angle)]
    assert compare_embeddings(first, other) is None
    assert compare_embeddings(encode_base64(first), encode_base64(other)) is None
    assert compare_embeddings([first], [other]) is None


@pytest.mark.parametrize("angle", [0.05, 0.5, 3.1])
def test_vectors_with_different_directions_differ(angle: float) -> None:
    first, other = [1.0, 0.0], [math.cos(angle), math.sin(angle)]
    difference = f"item 0: cosine {math.cos(angle):.4f}"
    assert compare_embeddings(first, other) == difference
    assert compare_embeddings(encode_base64(first), encode_base64(other)) == difference
    assert compare_embeddings([first, first], [first, other]) == difference


@pytest.mark.parametrize(
    ("first", "other", "is_equal"),
    [
        ([1.0, 2.0], [1.0, 2.0, 0.0], False),
        ([1.0, 2.0], [1.02, 2.04], True),
        ([1.0, 2.0], [2.0, 4.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 0.0], [1.0, 0.0], False),
        ([1e300, 1e300], [1e300, 1e300], False),
        ([], [], True),
        ([1.0], "AACAPw==", False),
        ("AACAPw==", "AACAPw==", True),
        ("not base64", "AACAPw==", False),
        ("AAA=", "AAA=", False),
        ([[1.0]], [[1.0], [1.0]], False),
        (None, None, False),
        ({"a": 1}, {"a": 1}, True),
        ([1, None], [1, None], True),
        ([1, None], [1, 2], False),
    ],
)
def test_unusual_vectors_are_compared(first: Any, other: Any, is_equal: bool) -> None:
    assert (compare_embeddings(first, other) is None) == is_equal


def test_usage_ids_and_times_are_not_compared() -> None:
    part = parse_valid_part("embeddings", {"input": ["a", "b"]})
    first = encode_embeddings([1.0], [2.0], id="a", created=1, usage={"n": 1}, model="m")
    other = encode_embeddings([1.0], [2.0], id="b", created=2, usage={"n": 2}, model="m")
    assert find_difference(part, first, other) is None


def test_ids_of_items_are_not_compared() -> None:
    part = parse_valid_part("score", {"text_1": "a", "text_2": "b"})
    first, other = (encode_body({"data": [{"index": 0, "id": name, "score": 1.0}]}) for name in "ab")
    assert find_difference(part, first, other) is None


def test_items_are_compared_by_their_index() -> None:
    part = parse_valid_part("embeddings", {"input": ["a", "b"]})
    data: list[dict[str, Any]] = [{"index": at, "embedding": [1.0, at]} for at in (0, 1)]
    assert find_difference(part, encode_body({"data": data}), encode_body({"data": data[::-1]})) is None
    swapped = [{**item, "index": 1 - item["index"]} for item in data]
    assert (
        find_difference(part, encode_body({"data": data}), encode_body({"data": swapped}))
        == "item 0: cosine 0.7071"
    )


@pytest.mark.parametrize(
    ("first", "other", "is_equal"),
    [
        (0.5, 0.5, True),
        (0.5, 0.504, True),
        (0.5, 0.52, False),
        (0.0001, 0.0009, True),
        (0.0, 0.01, False),
        (1, 1.0, True),
        (1, 2, False),
        ("a", "a", True),
        (0.5, "0.5", False),
        (0.5, True, False),
    ],
)
def test_scores_may_differ_by_a_hundredth(first: Any, other: Any, is_equal: bool) -> None:
    assert (compare_scores(first, other) is None) == is_equal


@pytest.mark.parametrize(
    ("first", "other", "is_equal"),
    [
        ([100.0, 0.5], [100.4, 0.9], True),
        ([100.0, 0.5], [100.0, 1.6], False),
        ([3, 1], [3, 2], False),
        ([1000, 1], [1000, 2], False),
        ([1000.0, 1], [1000, 2], True),
        ([3, 1], [3, 1, 1], False),
        ({"a": 1.0, "b": [0.5]}, {"b": [0.504], "a": 1.0}, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        ({"a": [{"b": 0.5}]}, {"a": [{"b": 0.6}]}, False),
        ("cat", "cat", True),
        ("cat", "dog", False),
        (None, None, True),
        (0.00001, 0.00002, False),
        (True, 1, False),
    ],
)
def test_predictions_may_differ_by_a_hundredth_of_the_largest_neighbour(
    first: Any, other: Any, is_equal: bool
) -> None:
    assert (compare_predictions(first, other) is None) == is_equal


def test_depth_of_compared_values_is_limited() -> None:
    deep: Any = 1.0
    for _ in range(40):
        deep = [deep, "x"]
    assert compare_predictions(deep, deep) == "cannot be compared: nested too deeply"


def test_place_of_a_difference_is_reported() -> None:
    assert compare_predictions({"a": [{"b": 0.5}]}, {"a": [{"b": 0.6}]}) == "item 0: a[0].b: 0.5, 0.6 alone"


def encode_ranking(*pairs: tuple[int, float], **more: Any) -> bytes:
    return encode_body({"results": [{"index": at, "relevance_score": value, **more} for at, value in pairs]})


def test_items_with_nearly_equal_ranks_may_change_places() -> None:
    part = parse_valid_part("rerank", {"query": "q", "documents": TEXTS, "top_n": 2})
    assert (
        find_difference(part, encode_ranking((0, 0.9), (1, 0.501)), encode_ranking((0, 0.9), (2, 0.5)))
        is None
    )
    assert (
        find_difference(part, encode_ranking((0, 0.9), (1, 0.501)), encode_ranking((1, 0.901), (0, 0.5)))
        is not None
    )
    assert (
        find_difference(part, encode_ranking((0, 0.9), (1, 0.5)), encode_ranking((0, 0.9), (2, 0.4)))
        is not None
    )
    assert (
        find_difference(part, encode_ranking((0, 0.9)), encode_ranking((0, 0.9), (1, 0.5)))
        == "1 items, 2 alone"
    )
    assert (
        find_difference(part, encode_ranking((0, 0.9), d="x"), encode_ranking((0, 0.9), d="y"))
        == "item 0: d: not the same"
    )


def test_answers_with_different_numbers_of_items_differ() -> None:
    part = parse_valid_part("embeddings", {"input": ["a", "b"]})
    whole, rest = encode_embeddings([1.0], [2.0]), encode_body({"data": [{"index": 1, "embedding": [2.0]}]})
    for bodies in ((rest, rest), (whole, rest), (rest, whole)):
        assert find_difference(part, *bodies) == "cannot be compared: 1 items in the answer to 2"
    vectors = parse_valid_part("embed", {"inputs": ["a", "b"]})
    assert find_difference(vectors, b"[[1],[2]]", b"[[1],[2]]") is None
    assert (
        find_difference(vectors, b"[[1],[2]]", b"[[1]]") == "cannot be compared: 1 items in the answer to 2"
    )


def test_unreadable_answer_differs() -> None:
    part = parse_valid_part("embeddings", {"input": "a"})
    for unreadable in (b"", b"{}", b'{"error":"x"}', b"[" * 3000):
        assert (find_difference(part, unreadable, encode_embeddings([1.0])) or "").startswith(
            "cannot be compared: "
        )
        assert (find_difference(part, encode_embeddings([1.0]), unreadable) or "").startswith(
            "cannot be compared: "
        )


@pytest.mark.parametrize("value", ["x", [[1]], True, {"a": 1}])
def test_ranks_that_are_not_numbers_are_not_compared(value: Any) -> None:
    part = parse_valid_part("rerank", {"query": "q", "documents": TEXTS})
    body = encode_ranking((0, 0.9), (1, value))
    assert find_difference(part, body, body) == "cannot be compared: relevance_score of an item is no number"


REQUEST_BODIES: dict[str, dict[str, Any]] = {
    "embeddings": {"model": "m", "input": TEXTS},
    "embed": {"inputs": TEXTS},
    "tensorflow": {"instances": TEXTS},
    "kserve": {"inputs": [{"name": "x", "shape": [3, 1], "datatype": "BYTES", "data": TEXTS}]},
    "rerank": {"model": "m", "query": "q", "documents": TEXTS},
    "tei_rerank": {"query": "q", "texts": TEXTS},
    "score": {"model": "m", "text_1": "q", "text_2": TEXTS},
    "predict": {"inputs": [[text] for text in TEXTS]},
}


@pytest.mark.parametrize("name", REQUEST_BODIES)
def test_wrong_answers_to_merged_calls_are_detected(name: str) -> None:
    first = parse_valid_part(name, REQUEST_BODIES[name])
    single_answer = answer_call(name, first.payload)
    for wrong in (False, True):
        found = split_answer([first, first], answer_call(name, merge_parts([first, first]), wrong=wrong))
        assert isinstance(found, list)
        assert all((find_difference(first, answer, single_answer) is not None) == wrong for answer in found)


def test_answers_to_single_texts_are_compared_too() -> None:
    first = parse_valid_part("predict", {"inputs": "a"})
    answers = [json.dumps([{"score": value, "label": "yes"}]).encode() for value in (0.5, 0.6)]
    assert find_difference(first, answers[0], answers[0]) is None
    assert find_difference(first, *answers) == "answer[0].score: 0.5, 0.6 alone"
