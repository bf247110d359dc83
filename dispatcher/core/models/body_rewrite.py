"""A body's model replaced, and nothing else of it. Pure."""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from dispatcher.core.merging.shapes.fields import fields, place_of, text_of
from dispatcher.core.merging.shapes.part import NotUnderstoodError
from dispatcher.core.models.names import model_of
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.surrogates import without_surrogates

_TOKEN = b'"model"'
_ESCAPED = b"\\u006"
"""Begins each escape of a letter of the token."""
_VALUE = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\\x00-\x1f]*")')


def with_model(payload: bytes, name: str) -> bytes | None:
    """The body with this name as the value of its field `model`, byte for byte the same else.

    None: it is not certain what that would change. It is no object or not UTF-8, it has no such field or two,
    the field's value is no string, or where the field stands cannot be told for a name that is escaped.
    """
    try:
        value = msgspec.json.encode(name)
        text_of(payload)
        return _replaced_at_once(payload, name, value) or _replaced(payload, name, value)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _replaced_at_once(payload: bytes, name: str, value: bytes) -> bytes | None:
    """Where one field of all, at any depth, has this name, and the body then reads as it should, it is the
    one: no other could be what is read."""
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
    clear = without_surrogates(payload)  # with them it would not be read, and each byte stays in its place
    before = fields(clear).get("model", msgspec.Raw())
    if bytes(before)[:1] != b'"':
        return None
    at = place_of(clear, "model")
    end = at + len(before)
    return (
        payload[:at] + value + payload[end:] if model_of(clear[:at] + value + clear[end:]) == name else None
    )


def sent_as(request: Request, asked: str, version: str, endpoints: str) -> Request | None:
    """A request for the model `asked` as it is sent to a version of that, and to these endpoints alone. None:
    its body cannot be changed."""
    payload = request.payload if version == asked else with_model(request.payload, version)
    if payload is None:
        return None
    return replace(request, payload=payload, version="" if version == asked else version, endpoints=endpoints)
