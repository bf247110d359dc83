"""Read from the body of a request how long it is.

Only a few fields are decoded, so that a scan costs a few microseconds. It may be wrong about an unusual body.
That costs room or memory for one request and nothing else, because the number of tokens is learned from
answers and corrected while a request runs.
"""

from __future__ import annotations

import re

import msgspec

from dispatcher.requests.usage import MAX_TOKENS

MAX_COPIES = 128
"""Largest number of answers to one prompt that is believed."""
_MAX_HEAD_BYTES = 1024
"""Length of the beginning of a body in which a prompt of token ids is looked for."""
_TOKEN_IDS = re.compile(rb'"prompt"\s*:\s*\[[\s\[]*\d')
_INLINE_DATA = re.compile(rb'"data:[^"]*"')


class _Fields(msgspec.Struct):
    """Fields of completions, chats and responses."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None


_decode = msgspec.json.Decoder(_Fields).decode
_NO_FIELDS = _Fields()


class BodyLength(msgspec.Struct, frozen=True, gc=False):
    """Length of a request as its body shows it."""

    text_bytes: int
    """Bytes without those of inline images. 0 if the prompt consists of token ids."""
    token_ids: int = 0
    """Number of token ids, if the prompt consists of them."""
    images: int = 0
    max_tokens: int | None = None
    """Largest number of tokens of one answer. `None` if the body does not limit it."""
    copies: int = 1
    """Number of answers to the prompt."""
    model: str = ""


def scan_body(payload: bytes) -> BodyLength:
    """Return the length that a body shows."""
    try:
        fields = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _NO_FIELDS
    # A server that knows both names uses the newer one.
    limit = fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens
    max_tokens = None if limit is None else 1 if limit < 1 else min(limit, MAX_TOKENS)
    copies = 1 if fields.n is None else max(1, min(fields.n, MAX_COPIES))
    text_bytes, images = len(payload), 0
    if b"_url" in payload:
        # Each image of a chat has the name twice: as the type of the part, and as the field with the address.
        images = (payload.count(b'"image_url"') + 1) // 2
        text_bytes -= sum([len(each[0]) for each in _INLINE_DATA.finditer(payload)])
    elif (found := _TOKEN_IDS.search(payload, 0, _MAX_HEAD_BYTES)) is not None:
        end = payload.find(b'"', found.end())  # the next field
        ids = payload.count(b",", found.end(), end if end >= 0 else len(payload)) + (end < 0)
        return BodyLength(0, max(1, ids), 0, max_tokens, copies, fields.model or "")
    return BodyLength(text_bytes, 0, images, max_tokens, copies, fields.model or "")
