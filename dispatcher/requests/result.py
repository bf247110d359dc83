"""Results that consumers pop from a result list: the answer of the gateway, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dispatcher.common.printable import truncate_text
from dispatcher.wire_format import ErrorCode, PoppedResult

NOT_A_LIST = "is no list that results can go to"

_MAX_LIST_CHARS = 100


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
            None,
            None,
            note,
            token or None,
            chosen_model or None,
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
