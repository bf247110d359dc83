"""Results that consumers pop from a result list: the answer of the gateway, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from dispatcher.common.printable import truncate_text

NOT_A_LIST = "is no list that results can go to"

_MAX_LIST_CHARS = 100


class ErrorCode(StrEnum):
    """Reason why a request has no answer of the gateway: `error_code` of its result."""

    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    GATE_DROPPED = "GATE_DROPPED"
    GATE_ERROR = "GATE_ERROR"
    INFERENCE_ERROR = "INFERENCE_ERROR"
    INVALID_REQUEST = "INVALID_REQUEST"
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    DELIVERIES_EXHAUSTED = "DELIVERIES_EXHAUSTED"
    TOO_LARGE = "TOO_LARGE"
    SEQUENCE_ABORTED = "SEQUENCE_ABORTED"
    """An earlier request of the sequence has failed, or an operator aborted the sequence."""
    SEQUENCE_DENIED = "SEQUENCE_DENIED"
    """The sequence belongs to another producer."""
    SEQUENCE_ENDED = "SEQUENCE_ENDED"
    """The sequence has ended, and takes no more requests."""
    SEQUENCE_FULL = "SEQUENCE_FULL"
    """Too many requests of the sequence wait."""
    SEQUENCE_INDEX = "SEQUENCE_INDEX"
    """Another request of the sequence has the index, or the turn of the index has passed."""
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    """The model of the request is not served by the pool."""


class PoppedResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result. It has a `status_code` if the gateway answered, else an `error_code`."""

    id: str
    payload: str
    """The response body as a string, or `{"error": …}`."""
    status_code: int | None = None
    error_code: str | None = None
    """An `ErrorCode`, as a string because other dispatchers may use further codes."""
    error_message: str | None = None
    payload_note: str | None = None
    """Note if `payload` is not exactly what the gateway sent, because bytes that are not UTF-8 were
    replaced."""
    request_token: str | None = None
    """Token of the request, if it has one. Other writers of the list cannot know it."""
    model_version: str | None = None
    """Model version that the last attempt was sent to, if the dispatcher chose it."""
    partial: bool | None = None
    """True if `payload` is what was generated before the request ended with the error."""
    slices: int | None = None
    """Number of calls in which the answer was generated, if it was more than one."""
    cached_tokens: int | None = None
    """Tokens that later calls found in the prefix cache of the model server."""


_decode_result = msgspec.json.Decoder(PoppedResult).decode
_encode = msgspec.json.Encoder().encode


def encode_answer(
    request_id: str,
    status: int,
    body: bytes,
    more_fields: Mapping[str, Any] | None = None,
    *,
    token: str = "",
    chosen_model: str = "",
) -> bytes:
    """Return the result of a request that the gateway answered: the body as a string, the request's token,
    and the values of further fields of the result.

    `chosen_model` is the model that the request was sent to, if the dispatcher chose it. A body that is
    UTF-8 is returned unchanged. Bytes that are not UTF-8 are replaced by U+FFFD, and `payload_note`, a field
    that other consumers ignore, says so.
    """
    text, note = _decode_body(body)
    return _encode(
        PoppedResult(
            request_id,
            text,
            status,
            payload_note=note,
            request_token=token or None,
            model_version=chosen_model or None,
            **(more_fields or {}),
        )
    )


def encode_failure(
    request_id: str,
    code: ErrorCode,
    message: str,
    status: int | None = None,
    body: bytes | None = None,
    *,
    token: str = "",
    chosen_model: str = "",
) -> bytes:
    """Return the result of a request without a final answer, with the last status and body if there were any,
    and the model that the last attempt was sent to, if the dispatcher chose it."""
    if body:
        text, note = _decode_body(body)
    else:
        text, note = _encode({"error": message}).decode(), None
    return _encode(
        PoppedResult(request_id, text, status, code, message, note, token or None, chosen_model or None)
    )


def add_partial_answer(result: bytes, body: bytes) -> bytes:
    """Return the result of a failed request with what was generated before it failed as its body."""
    text, note = _decode_body(body)
    return _encode(replace(_decode_result(result), payload=text, payload_note=note, partial=True))


def encode_bad_list(request_id: str, results: str, why: str = NOT_A_LIST, *, token: str = "") -> bytes:
    """Return the result of a request whose result list, `results`, cannot be used."""
    # Lone surrogates cannot be encoded as JSON.
    shown_list = truncate_text(results, _MAX_LIST_CHARS).encode(errors="replace").decode()
    return encode_failure(
        request_id, ErrorCode.INVALID_REQUEST, f"internal.result_queue_name: {shown_list} {why}", token=token
    )


def _decode_body(body: bytes) -> tuple[str, str | None]:
    try:
        return body.decode(), None
    except UnicodeDecodeError as error:
        return body.decode(errors="replace"), f"not UTF-8 from byte {error.start} on: invalid bytes replaced"


def decode_result(result: bytes) -> PoppedResult:
    """Decode a result that was popped from its list. Raise `ValueError` if it is not a result."""
    try:
        return _decode_result(result)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no result: {error}") from error
