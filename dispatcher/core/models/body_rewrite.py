"""Replace the model in a body, and change nothing else."""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from dispatcher.core.merging.shapes.fields import fields, place_of, text_of
from dispatcher.core.merging.shapes.part import NotUnderstoodError
from dispatcher.core.models.names import model_of
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.surrogates import without_surrogates

# JSON can also write the name with escapes, such as \u006d for m (see _ESCAPED).
_TOKEN = b'"model"'
_ESCAPED = b"\\u006"
"""Beginning of the escape of each letter of the name."""
_VALUE = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\\x00-\x1f]*")')


def with_model(payload: bytes, name: str) -> bytes | None:
    """Return the body with this name as the value of its field `model`, and with all other bytes unchanged.

    `None` if the effect of the change is not certain: the body is not an object or not UTF-8, the field is
    missing or occurs twice, its value is not a string, or its position is unclear because a name has escapes.
    """
    try:
        value = msgspec.json.encode(name)
        text_of(payload)
        return _replaced_at_once(payload, name, value) or _replaced(payload, name, value)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _replaced_at_once(payload: bytes, name: str, value: bytes) -> bytes | None:
    """Replace the value if only one field at any depth has this name, and if the result reads as it should.
    Then this field is the one that servers read."""
    at = payload.find(_TOKEN)
    found = _VALUE.match(payload, at) if at >= 0 else None
    if found is None or payload.find(_TOKEN, found.end()) >= 0:
        return None
    if b"\\" in payload and _ESCAPED in payload:
        return None
    start, end = found.span(1)
    replaced = payload[:start] + value + payload[end:]
    return replaced if model_of(replaced) == name else None


def _replaced(payload: bytes, name: str, value: bytes) -> bytes | None:
    clear = without_surrogates(payload)  # the decoder rejects lone surrogates; positions stay the same
    before = fields(clear).get("model", msgspec.Raw())
    if bytes(before)[:1] != b'"':
        return None
    at = place_of(clear, "model")
    end = at + len(before)
    return (
        payload[:at] + value + payload[end:] if model_of(clear[:at] + value + clear[end:]) == name else None
    )


def sent_as(request: Request, asked: str, version: str, endpoints: str) -> Request | None:
    """Return a request for the model `asked_model` as it is sent to a version of it, and only to these
    endpoints. `None` if its body cannot be changed."""
    payload = request.payload if version == asked else with_model(request.payload, version)
    if payload is None:
        return None
    return replace(request, payload=payload, version="" if version == asked else version, endpoints=endpoints)
