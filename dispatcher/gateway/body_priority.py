"""Put the priority of batch requests into the body of a request, as the field `priority` of its JSON object.

vLLM and SGLang order their requests by this field if their priority scheduling is on. The priority is the
operator's: a `priority` that the producer has put into the body is replaced, so that a batch request cannot
get ahead of realtime requests.
"""

from __future__ import annotations

import re

import msgspec

_NAME = "priority"
_QUOTED_NAME = b'"priority"'
_ESCAPES = (b"\\u006", b"\\u007")
"""Beginnings of the escapes of the letters in the name. JSON can write the name with escapes as well, for
example `\\u0070` for the p."""
_START = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*(\})?")

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def set_priority(payload: bytes, priority: int) -> bytes:
    """Return the body with this priority. A body that is no JSON object is returned unchanged.

    All other bytes stay the same, except in a body with a `priority` of its own: that one is encoded anew,
    with the text of each other value unchanged. Of two fields with one name, it keeps only the last.
    """
    start = _START.match(payload)
    if start is None:
        return payload
    value = b"%d" % priority
    # Nearly all bodies contain neither, and are not decoded.
    if _QUOTED_NAME in payload or any(escape in payload for escape in _ESCAPES):
        try:
            fields = _decode_fields(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Model servers accept some texts that this decoder rejects: lone surrogates, for example.
            return _append_field(payload, value)
        if _NAME in fields:
            fields[_NAME] = msgspec.Raw(value)
            return msgspec.json.encode(fields)
    after_brace = payload.index(b"{") + 1
    comma = b"" if start[1] else b","
    return b"".join(
        (payload[:after_brace], _QUOTED_NAME, b":", value, comma, memoryview(payload)[after_brace:])
    )


def _append_field(payload: bytes, value: bytes) -> bytes:
    """Return a body that may have a `priority` already, with this one as its last field.

    Of two fields with one name, the JSON parsers of model servers take the last or reject the body. Therefore
    this priority applies, or none.
    """
    text = payload.rstrip(b" \t\r\n")
    if not text.endswith(b"}"):
        return payload
    return b"".join((text[:-1], b",", _QUOTED_NAME, b":", value, payload[len(text) - 1 :]))
