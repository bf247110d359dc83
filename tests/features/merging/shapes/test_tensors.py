"""Tensors of the KServe v2 protocol, merged and split along the first axis, flat or nested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatcher.features.merging.shapes import (
    SHAPES,
    Unfit,
    cut_part,
    join_answers,
    merge_parts,
    parse_part,
    split_answer,
)
from tests.list_calls import answer_call, encode_body, parse_valid_part


def body(size: int = 1, data: Any = None, **more: Any) -> dict[str, Any]:
    data = list(range(2 * size)) if data is None else data
    tensor = {"name": "x", "shape": [size, 2], "datatype": "FP32", "data": data}
    return {"inputs": [{**tensor, **more.pop("tensor", {})}], **more}


def explain_unfit(request_body: Any) -> str:
    found = parse_part(
        SHAPES["kserve"], request_body if isinstance(request_body, bytes) else encode_body(request_body)
    )
    assert isinstance(found, Unfit), found
    return found.why


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        ({"inputs": []}, "a tensor without data"),
        ({"outputs": []}, "no inputs in the body"),
        (encode_body(body()) + b"\x00\x01\x02\x03", "not the JSON"),
        (body(tensor={"data": None}), "no list"),
        (body(tensor={"data": []}), "an empty one"),
        (body(tensor={"data": [1]}), "not as many as its shape says"),
        (body(tensor={"data": [1, 2, 3]}), "not as many as its shape says"),
        (body(tensor={"data": [[1, 2], [3, 4]]}), "not as many as its shape says"),
        (body(tensor={"data": [["a", "b"], ["c"]]}), "not as many as its shape says"),
        (body(tensor={"data": ["a,b"]}), "not as many as its shape says"),
        (body(tensor={"shape": []}), "without a shape"),
        (body(tensor={"shape": [0, 2]}), "without a shape, or without rows"),
        (body(tensor={"shape": [-1, 2]}), "without a shape, or without rows"),
        (body(tensor={"shape": [10**9, 10**9]}), "without a shape, or without rows"),
        (body(tensor={"shape": "2"}), "not the JSON"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]}, "without a shape"),
        ({"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}]}, "a tensor without name"),
        ({"inputs": [{"shape": [1], "name": "x", "data": [1]}]}, "a tensor without datatype"),
        ({"inputs": body()["inputs"] + body(2)["inputs"]}, "tensors of different first dimensions"),
        (b'{"inputs":[{"name":"x","name":"x","shape":[1],"datatype":"FP32","data":[1]}]}', "given twice"),
        (body(tensor={"parameters": {"binary_data_size": 8}}), "not in the JSON"),
        (body(parameters={"binary_data_output": True}), "not in the JSON"),
        (body(outputs=[{"name": "y", "parameters": {"binary_data": True}}]), "not in the JSON"),
        (body(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]), "not in the JSON"),
        (body(parameters={"sequence_id": 7}), "a request of a sequence"),
        (body(parameters={"x": "y" * 66_000}), "more than 65536 bytes beside"),
    ],
)
def test_body_that_cannot_be_merged_is_explained(request_body: Any, reason: str) -> None:
    assert reason in explain_unfit(request_body)


def test_disabled_parameters_do_not_prevent_merging() -> None:
    request_body = body(
        outputs=[{"name": "y", "parameters": {"binary_data": False}}],
        parameters={"binary_data_output": False, "sequence_id": 0},
    )
    assert parse_valid_part("kserve", request_body).size == 1


def test_rows_are_concatenated_and_counted_in_the_shape() -> None:
    parts = [parse_valid_part("kserve", body(size, id=str(size), outputs=[{"name": "y"}])) for size in (1, 2)]
    assert merge_parts(parts) == (
        b'{"outputs":[{"name":"y"}],'
        b'"inputs":[{"datatype":"FP32","name":"x","shape":[3,2],"data":[0, 1,0, 1, 2, 3]}]}'
    )


def test_each_answer_has_the_id_of_its_request() -> None:
    parts = [parse_valid_part("kserve", body(size, **({"id": "a"} if size == 1 else {}))) for size in (1, 2)]
    output = {"name": "y", "shape": [3, 1], "datatype": "FP32", "data": [1.0, 2.50, 3]}
    answer = {"model_name": "m", "id": "of the call", "outputs": [output]}
    found = split_answer(parts, encode_body(answer).replace(b"2.5", b"2.50"))
    assert found == [
        b'{"model_name":"m","id":"a","outputs":[{"name":"y","shape":[1,1],"datatype":"FP32","data":[1.0]}]}',
        (
            b'{"model_name":"m","id":"of the call",'
            b'"outputs":[{"name":"y","shape":[2,1],"datatype":"FP32","data":[ 2.50, 3]}]}'
        ),
    ]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (body(), body(tensor={"shape": [1, 2, 1]})),
        (body(), body(tensor={"datatype": "FP16"})),
        (body(), body(tensor={"name": "y"})),
        (body(), body(data=[[0, 1]])),
        (body(), body(tensor={"parameters": {"a": 1}})),
        (body(), body(parameters={"priority": 1})),
        (body(), body(outputs=[{"name": "y"}])),
        (body(), {"inputs": body()["inputs"] * 2}),
    ],
)
def test_requests_that_differ_in_other_fields_are_not_merged(first: Any, other: Any) -> None:
    assert parse_valid_part("kserve", first).merge_key != parse_valid_part("kserve", other).merge_key


def test_requests_with_different_ids_are_merged() -> None:
    assert (
        parse_valid_part("kserve", body(id="a")).merge_key
        == parse_valid_part("kserve", body(3, id="b")).merge_key
        == parse_valid_part("kserve", body()).merge_key
    )


def test_piece_has_the_id_of_the_whole_request() -> None:
    first = parse_valid_part("kserve", body(3, id="a"))
    pieces = cut_part(first, 2)
    assert [piece.size for piece in pieces] == [2, 1]
    assert merge_parts(pieces[1:]) == (
        b'{"id":"a","inputs":[{"datatype":"FP32","name":"x","shape":[1,2],"data":[ 4, 5]}]}'
    )
    bodies = [answer_call("kserve", merge_parts([piece])) for piece in pieces]
    joined = join_answers(first, pieces, bodies)
    assert isinstance(joined, bytes)
    assert json.loads(joined) == json.loads(answer_call("kserve", first.payload))


OUTPUT = {"name": "y", "shape": [3, 1], "datatype": "FP32", "data": [1, 2, 3]}


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([], "no outputs in the answer"),
        ([{**OUTPUT, "shape": [2, 1], "data": [1, 2]}], "an output of 2 rows in the answer to 3"),
        ([OUTPUT, {**OUTPUT, "shape": [1], "data": [1]}], "an output of 1 rows in the answer to 3"),
        ([{**OUTPUT, "data": [1, 2]}], "not as many as its shape says"),
        ([{**OUTPUT, "shape": [3, 2], "data": [[1, 2], [3, 4]]}], "not as many as its shape says"),
        ([{"name": "y", "shape": [3], "datatype": "FP32"}], "an output without data"),
        ([{"name": "y", "datatype": "FP32", "data": [1, 2, 3]}], "without a shape"),
        ({"error": "x"}, "not the JSON"),
    ],
)
def test_unexpected_outputs_are_not_split(outputs: Any, reason: str) -> None:
    parts = [parse_valid_part("kserve", body(size)) for size in (1, 2)]
    found = split_answer(parts, encode_body({"outputs": outputs}))
    assert isinstance(found, Unfit)
    assert reason in found.why


def test_answers_with_different_outputs_are_not_joined() -> None:
    first = parse_valid_part("kserve", body(2))
    bodies = [
        encode_body({"outputs": [{**OUTPUT, "shape": [1, 1], "data": [1], **each}]})
        for each in ({}, {"name": "z"}, {"datatype": "INT8"}, {"shape": [1]}, {"data": [[1]]})
    ]
    assert isinstance(join_answers(first, cut_part(first, 1), [bodies[0], bodies[0]]), bytes)
    assert all(
        isinstance(join_answers(first, cut_part(first, 1), [bodies[0], other]), Unfit) for other in bodies[1:]
    )


def test_commas_and_brackets_in_texts_do_not_separate_items() -> None:
    data = ['a,"b', "]", "[", "{c,d}"]
    tensor = {"name": "x", "shape": [2, 2], "datatype": "BYTES", "data": data}
    first = parse_valid_part("kserve", {"inputs": [tensor]})
    pieces = cut_part(first, 1)
    rows = [json.loads(merge_parts([piece]))["inputs"][0] for piece in pieces]
    assert [row["data"] for row in rows] == [data[:2], data[2:]]
    assert [row["shape"] for row in rows] == [[1, 2], [1, 2]]
