"""Names of models in bodies and paths, and answers that say that a model does not exist."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatcher.requests.model_names import find_model, parse_model, says_no_model

VLLM = {"message": "The model `m` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
OPENAI = {"message": "The model 'm' does not exist.", "type": "x", "param": None, "code": "model_not_found"}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, {"object": "error", **VLLM}, True),
        (404, {"error": VLLM | {"param": None}}, True),
        (404, {"error": OPENAI}, True),
        (400, {"error": OPENAI}, True),
        (404, {"error": "The model `m` does not exist."}, False),
        (404, {"message": "model m not found"}, True),
        (404, {"message": "Model m not found", "type": "not_found_error"}, True),
        (404, {"message": "m not found"}, False),
        (404, {"message": "gone", "param": "model"}, True),
        (404, {"detail": "Not Found"}, False),
        (404, {"message": "no response 'r' of model 'other'", "type": "NotFoundError"}, False),
        (404, {"message": "The file of model m is gone", "type": "FileError"}, False),
        (400, VLLM, False),
        (200, {"error": OPENAI}, False),
        (404, [], False),
        (404, None, False),
    ],
)
def test_answer_that_there_is_no_such_model_is_recognized(status: int, body: Any, expected: bool) -> None:
    assert says_no_model(status, json.dumps(body).encode(), "m") is expected


def test_malformed_answer_does_not_count_as_a_denial() -> None:
    for body in (b"", b"<html>", b"\xff", b'{"message":' + b"[" * 100_000):
        assert not says_no_model(404, body, "m")
    assert not says_no_model(404, b'{"code": "model_not_found"}', "")


@pytest.mark.parametrize(
    ("payload", "model"),
    [
        (b'{"model": "m", "prompt": "half \\ud800 a pair"}', "m"),
        (b'{"model": "m", "prompt": "x"}', "m"),
        (b'{"model": "a", "model": "m"}', "m"),
        (b'{"model": "m\\u00e9"}', "mé"),
        (b'{"prompt": {"model": "m"}}', ""),
        (b'{"model": null}', ""),
        (b'{"model": 7}', ""),
        (b"{", ""),
        (b'{"model": "\xff"}', ""),
        (b'{"a": ' + b"[" * 100_000, ""),
    ],
)
def test_model_is_parsed_from_the_body(payload: bytes, model: str) -> None:
    assert parse_model(payload) == model


@pytest.mark.parametrize(
    ("payload", "path", "model"),
    [
        (b'{"model": "m"}', "/v2/models/other/infer", "m"),
        (b"{}", "/v2/models/m/infer", "m"),
        (b"{}", "/v1/models/m%2Fn:predict", "m/n"),
        (b"{}", "/v1/chat/completions", ""),
    ],
)
def test_model_in_the_body_takes_precedence_over_the_one_in_the_path(
    payload: bytes, path: str, model: str
) -> None:
    assert find_model(payload, path) == model
