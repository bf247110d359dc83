"""Results of requests that end before their generation does: they have what was generated so far."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatcher.features.slices.progress import Progress, decode_progress
from dispatcher.queue.contract import Settlement
from dispatcher.requests.result import add_partial_answer
from dispatcher.wire_format import ErrorCode

_CODES_WITH_PARTIAL_ANSWER = frozenset(ErrorCode) - {ErrorCode.INVALID_REQUEST}
"""Error codes of results that have what was generated so far. The result of an invalid request may go to a
list that others read."""
_encode = msgspec.json.Encoder().encode


def end_with_partial_answer(settlement: Settlement, is_dead_letter: bool = False) -> Settlement:
    """Return the settlement of a request that ends before its generation does, with what was generated so
    far. A dead letter stays as it is."""
    if is_dead_letter or settlement.result_class not in _CODES_WITH_PARTIAL_ANSWER:
        return settlement
    progress = decode_progress(settlement.lease.progress)
    partial = None if progress is None else build_partial_answer(progress)
    if partial is None:
        return settlement
    return settlement.copy_with(result=add_partial_answer(settlement.result, partial))


def build_partial_answer(progress: Progress) -> bytes | None:
    """Return what was generated so far as an answer, for a request that ends before its generation does.
    `None` if nothing was."""
    if not progress.text:
        return None
    is_chat = progress.object.startswith("chat")
    choice: dict[str, Any] = (
        {"message": {"role": "assistant", "content": progress.text}} if is_chat else {"text": progress.text}
    )
    usage = {
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.tokens,
        "total_tokens": progress.prompt_tokens + progress.tokens,
    }
    return _encode(
        {
            "id": progress.response_id,
            "object": progress.object,
            "created": progress.created,
            "model": progress.model,
            "choices": [{"index": 0, **choice, "finish_reason": None}],
            "usage": usage,
        }
    )
