"""Requests that are sent in place of others: what a merged call says about the sequences of its items."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dispatcher.features.merging.merged_request import build_piece, check_sequence_fields, merge_requests
from dispatcher.features.merging.shapes import SHAPES, Part, cut_part, parse_part
from dispatcher.requests.affinity import Affinity
from dispatcher.requests.request import Request

TOKEN_HEADER = "x-session-token"


def make_request(number: int, values: list[int], session: Affinity | None, **fields: Any) -> Request:
    tensor = {"name": "x", "datatype": "INT64", "shape": [len(values)], "data": values}
    payload = msgspec.json.encode({"inputs": [tensor], **fields})
    return Request(id=f"r-{number}", deadline=1000 + number, payload=payload, affinity=session)


def make_session(name: str, token: str = "", *, is_first: bool = False, is_last: bool = False) -> Affinity:
    headers = {"x-session-id": name} | ({TOKEN_HEADER: token} if token else {})
    return Affinity(headers, TOKEN_HEADER, name, is_first=is_first, is_last=is_last)


def parse(request: Request, shape: str = "kserve") -> Part:
    part = parse_part(SHAPES[shape], request.payload)
    assert isinstance(part, Part)
    return part


def merge(*requests: Request, shape: str = "kserve") -> tuple[Request, dict[str, Any]]:
    merged = merge_requests(requests, [parse(request, shape) for request in requests])
    return merged, msgspec.json.decode(merged.payload)


def test_merged_call_has_the_latest_deadline_and_the_id_of_the_first_request() -> None:
    merged, body = merge(make_request(1, [5], None), make_request(2, [6, 7], None))
    assert (merged.id, merged.deadline, merged.affinity) == ("r-1", 1002, None)
    assert body["inputs"][0]["data"] == [5, 6, 7]
    assert "parameters" not in body


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"parameters":{}}',
        b'{"parameters":{"sequence_id":0,"sequence_start":false,"sequence_end":null,"top_k":1}}',
        b'{"parameters":[],"sequence_id":"a"}',
    ],
)
def test_body_that_names_no_sequence_may_be_sent(body: bytes) -> None:
    assert check_sequence_fields(SHAPES["kserve"], body) == ""


def test_call_of_several_sequences_has_a_value_for_each_item() -> None:
    first = make_request(1, [5, 6], make_session("a", "pod-1", is_first=True, is_last=True))
    merged, body = merge(first, make_request(2, [7], make_session("b", "pod-1", is_last=True)))
    assert body["parameters"] == {
        "sequence_id": ["a", "a", "b"],
        "sequence_start": [True, False, False],
        "sequence_end": [False, True, True],
    }
    assert merged.affinity is not None
    assert merged.affinity.headers == {TOKEN_HEADER: "pod-1"}
    assert merged.affinity.sticky_token == "pod-1"


def test_call_of_sequences_without_a_server_names_none() -> None:
    merged, _ = merge(make_request(1, [5], make_session("a")), make_request(2, [6], make_session("b")))
    assert merged.affinity is not None
    assert merged.affinity.headers == {}
    assert merged.affinity.sticky_token == ""


def test_single_item_has_single_values_beside_the_parameters_of_the_caller() -> None:
    session = make_session("a", is_first=True)
    merged, body = merge(make_request(1, [5], session, parameters={"priority": 3}))
    assert body["parameters"] == {
        "priority": 3,
        "sequence_id": "a",
        "sequence_start": True,
        "sequence_end": False,
    }
    assert merged.affinity is session


def test_shape_without_a_field_for_sequences_keeps_its_body() -> None:
    payload = b'{"instances":[1]}'
    request = Request(id="r", deadline=1, payload=payload, affinity=make_session("a"))
    merged, _ = merge(request, shape="tensorflow")
    assert merged.payload == payload


@pytest.mark.parametrize(("piece", "expected"), [(0, [5, 6]), (1, [7])])
def test_piece_of_a_list_is_a_request_of_its_own(piece: int, expected: list[int]) -> None:
    request = make_request(1, [5, 6, 7], None)
    pieces = cut_part(parse(request), 2, float("inf"))
    body = msgspec.json.decode(build_piece(request, pieces[piece]).payload)
    assert body["inputs"][0]["data"] == expected
