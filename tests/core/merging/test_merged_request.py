"""Requests that are sent in place of others: one for several requests, or for a piece of one."""

from __future__ import annotations

import msgspec

from dispatcher.core.merging.merged_request import build_piece, merge_requests
from dispatcher.core.merging.shapes import SHAPES, Part, cut_part, parse_part
from dispatcher.core.requests.request import Request


def make_request(name: str, texts: list[str], deadline: int) -> tuple[Request, Part]:
    payload = msgspec.json.encode({"model": "m", "input": texts})
    part = parse_part(SHAPES["embeddings"], payload)
    assert isinstance(part, Part)
    return Request(name, deadline, payload, headers={"x-of": name}), part


def test_merged_request_is_the_first_one_with_the_latest_deadline() -> None:
    first, second = make_request("a", ["one"], 100), make_request("b", ["two", "three"], 300)
    call = merge_requests([first[0], second[0]], [first[1], second[1]])
    assert msgspec.json.decode(call.payload)["input"] == ["one", "two", "three"]
    assert (call.id, call.headers, call.deadline) == ("a", {"x-of": "a"}, 300)


def test_merged_request_and_piece_keep_version_and_endpoints() -> None:
    first, part = make_request("a", ["one", "two"], 100)
    directed = msgspec.structs.replace(first, version="m-v2", endpoints="10.0.0.1:8000")
    for call in (
        merge_requests([directed, directed], [part, part]),
        build_piece(directed, cut_part(part, 1)[0]),
    ):
        assert (call.version, call.endpoints) == ("m-v2", "10.0.0.1:8000")


def test_piece_is_the_same_request_with_fewer_items() -> None:
    request, part = make_request("a", ["one", "two", "three"], 100)
    pieces = [build_piece(request, each) for each in cut_part(part, 2)]
    assert [msgspec.json.decode(each.payload)["input"] for each in pieces] == [["one", "two"], ["three"]]
    assert {(each.id, each.deadline) for each in pieces} == {("a", 100)}
