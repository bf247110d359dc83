"""What servers say when a call is too large, in their own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatcher.core.merging.shapes import KNOWN_CAPS, parse_item_cap, parse_token_cap

OPENAI_ARRAY = (
    "Invalid 'input': array too long. Expected an array with maximum length 2048, but got an array with "
    "length 3000 instead."
)
SAID: list[tuple[int, Any, int]] = [
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
ORDINARY: list[tuple[int, Any]] = [
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
TOKENS: list[tuple[int, Any, int]] = [
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


def body_of(said: Any) -> bytes:
    return said.encode() if isinstance(said, str) else json.dumps(said).encode()


@pytest.mark.parametrize(("status", "said", "most"), SAID)
def test_too_many_items_are_heard_with_their_number(status: int, said: Any, most: int) -> None:
    assert parse_item_cap(status, body_of(said)) == most
    assert parse_token_cap(status, body_of(said)) is None


@pytest.mark.parametrize(("status", "said", "most"), TOKENS)
def test_too_many_tokens_are_heard_and_are_no_items(status: int, said: Any, most: int) -> None:
    assert parse_token_cap(status, body_of(said)) == most
    assert parse_item_cap(status, body_of(said)) is None


@pytest.mark.parametrize(("status", "said"), ORDINARY)
def test_an_ordinary_refusal_is_not_taken_for_it(status: int, said: Any) -> None:
    assert parse_item_cap(status, body_of(said)) is None
    assert parse_token_cap(status, body_of(said)) is None


def test_what_a_request_said_is_not_heard_as_the_servers_word() -> None:
    """It stands behind the server's own."""
    echo = "no such thing: " + "x" * 600 + " batch size 9 > maximum allowed batch size 1"
    assert parse_item_cap(400, body_of({"error": echo})) is None
    assert parse_item_cap(400, body_of(echo)) is None


def test_a_number_that_nobody_means_is_bounded() -> None:
    said = "batch size 64 > maximum allowed batch size " + "9" * 300
    assert parse_item_cap(413, body_of({"error": said})) == 10_000_000


def test_caps_that_are_known() -> None:
    assert (KNOWN_CAPS["openai"].items, KNOWN_CAPS["openai"].tokens) == (2048, 300_000)
    assert KNOWN_CAPS["tei"].items == 32
    assert KNOWN_CAPS["cohere"].items == 96
