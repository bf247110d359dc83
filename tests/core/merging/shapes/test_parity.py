"""Whether an answer out of a merged call is that to the request alone."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest

from dispatcher.core.merging.shapes import find_difference, merge_parts, split_answer
from tests.listcalls import model, part, text_of

TEXTS = ["one", "another", "a third"]


def embedded(*vectors: Any, **more: Any) -> bytes:
    data = [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    return text_of({"data": data, **more})


def base64_of(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def embedding(one: Any, other: Any) -> str | None:
    return find_difference(part("embeddings", {"input": "a"}), embedded(one), embedded(other))


def score(one: Any, other: Any) -> str | None:
    asked = part("score", {"text_1": "a", "text_2": "b"})
    bodies = [text_of({"data": [{"index": 0, "score": value}]}) for value in (one, other)]
    return find_difference(asked, *bodies)


def predicted(one: Any, other: Any) -> str | None:
    return find_difference(
        part("tensorflow", {"instances": [1]}), *(text_of({"predictions": [v]}) for v in (one, other))
    )


@pytest.mark.parametrize("angle", [0.0, 0.01, 0.04, -0.04])
def test_vectors_of_one_direction_are_the_same(angle: float) -> None:
    one, other = [1.0, 0.0], [math.cos(angle), math.sin(angle)]
    assert embedding(one, other) is None
    assert embedding(base64_of(one), base64_of(other)) is None
    assert embedding([one], [other]) is None


@pytest.mark.parametrize("angle", [0.05, 0.5, 3.1])
def test_vectors_of_other_directions_are_not(angle: float) -> None:
    one, other = [1.0, 0.0], [math.cos(angle), math.sin(angle)]
    told = f"item 0: cosine {math.cos(angle):.4f}"
    assert embedding(one, other) == told
    assert embedding(base64_of(one), base64_of(other)) == told
    assert embedding([one, one], [one, other]) == told


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_odd_vectors(one: Any, other: Any, same: bool) -> None:
    assert (embedding(one, other) is None) == same


def test_usage_ids_and_times_are_not_compared() -> None:
    asked = part("embeddings", {"input": ["a", "b"]})
    one = embedded([1.0], [2.0], id="a", created=1, usage={"n": 1}, model="m")
    other = embedded([1.0], [2.0], id="b", created=2, usage={"n": 2}, model="m")
    assert find_difference(asked, one, other) is None


def test_ids_of_items_are_not_compared() -> None:
    asked = part("score", {"text_1": "a", "text_2": "b"})
    one, other = (text_of({"data": [{"index": 0, "id": name, "score": 1.0}]}) for name in "ab")
    assert find_difference(asked, one, other) is None


def test_items_are_compared_by_their_index() -> None:
    asked = part("embeddings", {"input": ["a", "b"]})
    data: list[dict[str, Any]] = [{"index": at, "embedding": [1.0, at]} for at in (0, 1)]
    assert find_difference(asked, text_of({"data": data}), text_of({"data": data[::-1]})) is None
    swapped = [{**item, "index": 1 - item["index"]} for item in data]
    assert (
        find_difference(asked, text_of({"data": data}), text_of({"data": swapped})) == "item 0: cosine 0.7071"
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_scores_are_the_same_to_a_hundredth_of_them(one: Any, other: Any, same: bool) -> None:
    assert (score(one, other) is None) == same


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_predictions_are_the_same_to_a_hundredth_of_the_largest_beside_them(
    one: Any, other: Any, same: bool
) -> None:
    assert (predicted(one, other) is None) == same


def test_depth_is_bounded() -> None:
    deep: Any = 1.0
    for _ in range(40):
        deep = [deep, "x"]
    assert predicted(deep, deep) == "cannot be compared: nested too deeply"


def test_the_place_of_a_difference_is_told() -> None:
    assert predicted({"a": [{"b": 0.5}]}, {"a": [{"b": 0.6}]}) == "item 0: a[0].b: 0.5, 0.6 alone"


def ranked(*pairs: tuple[int, float], **more: Any) -> bytes:
    return text_of({"results": [{"index": at, "relevance_score": value, **more} for at, value in pairs]})


def test_near_ranks_may_change_places() -> None:
    asked = part("rerank", {"query": "q", "documents": TEXTS, "top_n": 2})
    assert find_difference(asked, ranked((0, 0.9), (1, 0.501)), ranked((0, 0.9), (2, 0.5))) is None
    assert find_difference(asked, ranked((0, 0.9), (1, 0.501)), ranked((1, 0.901), (0, 0.5))) is not None
    assert find_difference(asked, ranked((0, 0.9), (1, 0.5)), ranked((0, 0.9), (2, 0.4))) is not None
    assert find_difference(asked, ranked((0, 0.9)), ranked((0, 0.9), (1, 0.5))) == "1 items, 2 alone"
    assert (
        find_difference(asked, ranked((0, 0.9), d="x"), ranked((0, 0.9), d="y")) == "item 0: d: not the same"
    )


def test_answers_of_another_length_differ() -> None:
    asked = part("embeddings", {"input": ["a", "b"]})
    whole, rest = embedded([1.0], [2.0]), text_of({"data": [{"index": 1, "embedding": [2.0]}]})
    for bodies in ((rest, rest), (whole, rest), (rest, whole)):
        assert find_difference(asked, *bodies) == "cannot be compared: 1 items in the answer to 2"
    vectors = part("embed", {"inputs": ["a", "b"]})
    assert find_difference(vectors, b"[[1],[2]]", b"[[1],[2]]") is None
    assert (
        find_difference(vectors, b"[[1],[2]]", b"[[1]]") == "cannot be compared: 1 items in the answer to 2"
    )


def test_an_answer_that_cannot_be_read_differs() -> None:
    asked = part("embeddings", {"input": "a"})
    for odd in (b"", b"{}", b'{"error":"x"}', b"[" * 3000):
        assert (find_difference(asked, odd, embedded([1.0])) or "").startswith("cannot be compared: ")
        assert (find_difference(asked, embedded([1.0]), odd) or "").startswith("cannot be compared: ")


@pytest.mark.parametrize("value", ["x", [[1]], True, {"a": 1}])
def test_ranks_that_are_no_numbers_are_not_compared(value: Any) -> None:
    asked = part("rerank", {"query": "q", "documents": TEXTS})
    body = ranked((0, 0.9), (1, value))
    assert find_difference(asked, body, body) == "cannot be compared: relevance_score of an item is no number"


ASKED: dict[str, dict[str, Any]] = {
    "embeddings": {"model": "m", "input": TEXTS},
    "embed": {"inputs": TEXTS},
    "tensorflow": {"instances": TEXTS},
    "kserve": {"inputs": [{"name": "x", "shape": [3, 1], "datatype": "BYTES", "data": TEXTS}]},
    "rerank": {"model": "m", "query": "q", "documents": TEXTS},
    "tei_rerank": {"query": "q", "texts": TEXTS},
    "score": {"model": "m", "text_1": "q", "text_2": TEXTS},
    "predict": {"inputs": [[text] for text in TEXTS]},
}


@pytest.mark.parametrize("name", ASKED)
def test_a_model_that_gets_merged_calls_wrong_is_found_out(name: str) -> None:
    one = part(name, ASKED[name])
    alone = model(name, one.payload)
    for wrong in (False, True):
        found = split_answer([one, one], model(name, merge_parts([one, one]), wrong=wrong))
        assert isinstance(found, list)
        assert all((find_difference(one, answer, alone) is not None) == wrong for answer in found)


def test_answers_of_lone_texts_are_compared_too() -> None:
    one = part("predict", {"inputs": "a"})
    answers = [json.dumps([{"score": value, "label": "yes"}]).encode() for value in (0.5, 0.6)]
    assert find_difference(one, answers[0], answers[0]) is None
    assert find_difference(one, *answers) == "answer[0].score: 0.5, 0.6 alone"
