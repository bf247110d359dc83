"""Limits that servers state when they refuse a call that is too large, in their real messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatcher.features.merging.shapes import KNOWN_CAPS, parse_item_cap, parse_token_cap

OPENAI_ARRAY = (
    "Invalid 'input': array too long. Expected an array with maximum length 2048, but got an array with "
    "length 3000 instead."
)
ITEM_REFUSALS: list[tuple[int, Any, int]] = [
    (413, {"error": "batch size 64 > maximum allowed batch size 32", "error_type": "Validation"}, 32),
    (422, {"message": "batch size 64 > maximum allowed batch size 32", "type": "Validation"}, 32),
    (
        413,
        {"code": 20042, "message": "input batch size 136 > maximum allowed batch size 64", "data": None},
        64,
    ),
    (400, {"error": {"message": OPENAI_ARRAY, "param": "input", "code": "array_above_max_length"}}, 2048),
    (400, {"error": "[request id: 0] inference request batch-size must be <= 8 for 'x'"}, 8),
    (400, {"error": "inference request batch-size must be <= 1 for 'x'"}, 1),
    (400, {"error": "Task size 65 is larger than maximum input batch size 64"}, 64),
    (400, {"message": "invalid request: total number of texts must be at most 96 - received 131"}, 96),
    (
        422,
        {
            "detail": [
                {
                    "type": "too_long",
                    "loc": ["body", "input"],
                    "msg": "List should have at most 2048 items after validation, not 3000",
                    "input": ["x"] * 3000,
                }
            ]
        },
        2048,
    ),
    (422, {"detail": [{"loc": ["body", "input"], "msg": "ensure this value has at most 128 items"}]}, 128),
    (400, {"error": {"message": "Too many inputs. The max number of inputs is 16.  We hope to …"}}, 16),
    (400, {"error": {"message": "Too many inputs for model None. The max number of inputs is 1."}}, 1),
    (
        400,
        {
            "error": {
                "message": "<400> InternalError.Algo.InvalidParameter: Value error, batch size is invalid, "
                "it should not be larger than 10.: input.contents",
                "code": "InvalidParameter",
            }
        },
        10,
    ),
    (400, {"error": {"code": 400, "message": "* Batch…: at most 100 requests can be in one batch\n"}}, 100),
    (400, {"detail": "Each input list can contain at most 512 items.. Field errors: : Invalid value"}, 512),
    (400, {"object": "error", "message": "Too many inputs in request, split into more batches."}, 0),
    (400, {"error": {"message": "array too long", "code": "x"}}, 0),
    (413, "Failed to buffer the request body: length limit exceeded", 0),
    (413, "<html><head><title>413 Request Entity Too Large</title></head></html>", 0),
    (413, "", 0),
    (413, "{}", 0),
    (413, "http: request body too large", 0),
    (400, {"error": {"message": "Request payload size exceeds the limit: 4194304 bytes."}}, 0),
]
OTHER_ANSWERS: list[tuple[int, Any]] = [
    (400, ""),
    (422, ""),
    (400, {"error": {"message": "This model's maximum context length is 8192 tokens, you requested 51435"}}),
    (413, {"error": "Input validation error: `inputs` must have less than 512 tokens. Given: 534"}),
    (400, {"error": {"message": "Invalid 'input[3]': maximum context length is 8192 tokens."}}),
    (400, {"error": {"message": "input is too large to process. increase the physical batch size"}}),
    (422, {"detail": [{"msg": "String should have at most 122880 characters", "loc": ["body", "input", 0]}]}),
    (400, {"error": {"message": "'$.input' is invalid. Please check the API reference"}}),
    (400, {"error": "input batch size does not match other inputs for 'x'"}),
    (400, {"error": "inference request batch-size must be >= 1 for 'x'"}),
    (422, {"error": "`inputs` cannot be empty", "error_type": "Empty"}),
    (400, {"error": {"message": "no such model"}, "input": OPENAI_ARRAY}),
    (400, {"error": {"message": "no", "input": ["batch size 64 > maximum allowed batch size 1"]}}),
    (429, {"error": "batch size 64 > maximum allowed batch size 32"}),
    (200, {"error": "batch size 64 > maximum allowed batch size 32"}),
    (500, {"error": "batch size 64 > maximum allowed batch size 32"}),
]
TOKEN_REFUSALS: list[tuple[int, Any, int]] = [
    (
        400,
        {
            "error": {
                "message": "Requested 450000 tokens, max 300000 tokens per request",
                "type": "max_tokens_per_request",
                "code": "max_tokens_per_request",
            }
        },
        300_000,
    ),
    (
        400,
        {"detail": "The max allowed tokens per submitted batch is 120000. Your batch has 121138 tokens"},
        120_000,
    ),
    (400, {"message": "Too many tokens in batch. Max is 16384 got 20000"}, 16_384),
    (400, {"message": "Too many tokens overall, split into more batches."}, 0),
    (400, {"error": {"message": "no", "code": "max_tokens_per_request"}}, 0),
]


def encode_answer(message: Any) -> bytes:
    return message.encode() if isinstance(message, str) else json.dumps(message).encode()


@pytest.mark.parametrize(("status", "message", "cap"), ITEM_REFUSALS)
def test_item_limit_is_read_from_a_refusal(status: int, message: Any, cap: int) -> None:
    assert parse_item_cap(status, encode_answer(message)) == cap
    assert parse_token_cap(status, encode_answer(message)) is None


@pytest.mark.parametrize(("status", "message", "cap"), TOKEN_REFUSALS)
def test_token_limit_is_read_from_a_refusal(status: int, message: Any, cap: int) -> None:
    assert parse_token_cap(status, encode_answer(message)) == cap
    assert parse_item_cap(status, encode_answer(message)) is None


@pytest.mark.parametrize(("status", "message"), OTHER_ANSWERS)
def test_other_answers_state_no_limit(status: int, message: Any) -> None:
    assert parse_item_cap(status, encode_answer(message)) is None
    assert parse_token_cap(status, encode_answer(message)) is None


def test_text_of_the_request_in_an_answer_is_not_read_as_a_limit() -> None:
    """Servers repeat it behind their own text."""
    echo = "no such thing: " + "x" * 600 + " batch size 9 > maximum allowed batch size 1"
    assert parse_item_cap(400, encode_answer({"error": echo})) is None
    assert parse_item_cap(400, encode_answer(echo)) is None


def test_absurd_limit_is_capped() -> None:
    message = "batch size 64 > maximum allowed batch size " + "9" * 300
    assert parse_item_cap(413, encode_answer({"error": message})) == 10_000_000


def test_known_limits_of_servers() -> None:
    assert (KNOWN_CAPS["openai"].items, KNOWN_CAPS["openai"].tokens) == (2048, 300_000)
    assert KNOWN_CAPS["tei"].items == 32
    assert KNOWN_CAPS["cohere"].items == 96
