"""Replace the model in a body, and change nothing else."""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from dispatcher.requests.json_fields import NotUnderstoodError, check_utf8, find_value, parse_fields
from dispatcher.requests.model_names import parse_model
from dispatcher.requests.request import Request
from dispatcher.requests.surrogates import replace_surrogates

# JSON can also write the name with escapes, such as \u006d for m (see _ESCAPED).
_TOKEN = b'"model"'
_ESCAPED = b"\\u006"
"""Beginning of the escape of each letter of the name."""
_VALUE = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\\x00-\x1f]*")')


def replace_model(payload: bytes, name: str) -> bytes | None:
    """Return the body with this name as the value of its field `model`, and with all other bytes unchanged.

    `None` if the effect of the change is not certain: the body is not an object or not UTF-8, the field is
    missing or occurs twice, its value is not a string, or its position is unclear because a name has escapes.
    """
    try:
        value = msgspec.json.encode(name)
        check_utf8(payload)
        return _replace_only_field(payload, name, value) or _replace_parsed_field(payload, name, value)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _replace_only_field(payload: bytes, name: str, value: bytes) -> bytes | None:
    """Replace the value if only one field at any depth has this name, and if the result reads as it should.
    Then this field is the one that servers read."""
    at = payload.find(_TOKEN)
    match = _VALUE.match(payload, at) if at >= 0 else None
    if match is None or payload.find(_TOKEN, match.end()) >= 0:
        return None
    if b"\\" in payload and _ESCAPED in payload:
        return None
    start, end = match.span(1)
    replaced = payload[:start] + value + payload[end:]
    return replaced if parse_model(replaced) == name else None


def _replace_parsed_field(payload: bytes, name: str, value: bytes) -> bytes | None:
    clean_payload = replace_surrogates(
        payload
    )  # the decoder rejects lone surrogates; positions stay the same
    old_value = parse_fields(clean_payload).get("model", msgspec.Raw())
    if bytes(old_value)[:1] != b'"':
        return None
    at = find_value(clean_payload, "model")
    end = at + len(old_value)
    return (
        payload[:at] + value + payload[end:]
        if parse_model(clean_payload[:at] + value + clean_payload[end:]) == name
        else None
    )


def prepare_for_version(request: Request, asked_model: str, version: str, endpoints: str) -> Request | None:
    """Return a request for the model `asked_model` as it is sent to a version of it, and only to these
    endpoints. `None` if its body cannot be changed."""
    payload = request.payload if version == asked_model else replace_model(request.payload, version)
    if payload is None:
        return None
    return replace(
        request, payload=payload, chosen_model="" if version == asked_model else version, endpoints=endpoints
    )
