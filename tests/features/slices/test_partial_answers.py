"""Results of requests that end before their generation does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dispatcher.features.slices.partial_answers import build_partial_answer, end_with_partial_answer
from dispatcher.features.slices.progress import Progress, Stage, encode_progress
from dispatcher.kernel import completions
from dispatcher.queue.contract import Settlement
from dispatcher.requests.request import Request
from dispatcher.requests.result import decode_result, encode_answer, encode_failure
from dispatcher.wire_format import ErrorCode

PROGRESS = Progress(Stage.SLICES, 1, "once upon", tokens=2, prompt_tokens=7, object="text_completion")
LEASE = completions.NO_LEASE.copy_with(progress=encode_progress(PROGRESS))


@pytest.mark.parametrize(
    ("object_", "expected"),
    [
        ("text_completion", {"text": "one"}),
        ("chat.completion", {"message": {"role": "assistant", "content": "one"}}),
    ],
)
def test_text_so_far_is_an_answer_without_an_end(object_: str, expected: dict[str, Any]) -> None:
    progress = Progress(
        Stage.SLICES,
        2,
        "one",
        prompt_tokens=5,
        tokens=10,
        response_id="first",
        created=3,
        object=object_,
        model="m",
    )
    body = build_partial_answer(progress)
    assert body is not None
    assert msgspec.json.decode(body) == {
        "id": "first",
        "object": object_,
        "created": 3,
        "model": "m",
        "choices": [{"index": 0, **expected, "finish_reason": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15},
    }


def test_nothing_so_far_is_no_answer() -> None:
    assert build_partial_answer(Progress(Stage.RESTART)) is None


def test_request_that_ends_early_gets_what_was_generated_so_far() -> None:
    request = Request("late", 10, b"{}", token="secret")
    ended = end_with_partial_answer(completions.build_cancellation(LEASE, request))
    result = decode_result(ended.result)
    assert (result.error_code, result.error_message, result.request_token) == (
        "CANCELLED",
        "cancelled",
        "secret",
    )
    assert result.partial
    assert msgspec.json.decode(result.payload)["choices"][0]["text"] == "once upon"


@pytest.mark.parametrize("progress", [b"", b"no progress", encode_progress(Progress(Stage.RESTART))])
def test_result_stays_as_it_is_without_a_text(progress: bytes) -> None:
    lease = LEASE.copy_with(progress=progress)
    settlement = completions.build_cancellation(lease, Request("late", 10, b"{}"))
    assert end_with_partial_answer(settlement) is settlement


@pytest.mark.parametrize("result_class", ["2xx", "4xx"])
def test_answer_stays_as_it_is(result_class: str) -> None:
    settlement = Settlement(LEASE, encode_answer("long", 200, b"{}"), "", result_class=result_class)
    assert end_with_partial_answer(settlement) is settlement


def test_invalid_request_gets_no_text_that_others_may_read() -> None:
    code = ErrorCode.INVALID_REQUEST
    settlement = Settlement(LEASE, encode_failure("long", code, "why"), "", result_class=code)
    assert end_with_partial_answer(settlement) is settlement
