"""Templates: a request body with a place into which a line of text is inserted. Does no I/O."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec

MARK = "{}"
"""Mark in a string of a template that the text replaces. Without it, the text replaces the whole value."""


class TemplateError(ValueError):
    """The template, or the field in it, cannot be used. The message says why."""


class Template:
    """Request body with a place for text.

    `field` is the path of that place: keys and list positions, separated by dots (`messages.1.content`).
    """

    def __init__(self, body: bytes, field: str) -> None:
        try:
            whole = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TemplateError(f"the template is no JSON: {error}") from error
        if not isinstance(whole, dict):
            raise TemplateError("the template is no JSON object")
        encoded = msgspec.json.encode(whole)
        # Encode the template once, with a unique stand-in for the text, and split it there. A line then costs
        # only the encoding of its text.
        stand_in = next(mark for n in count() if (mark := f"@@{n}@@").encode() not in encoded)
        self._put(whole, field, stand_in)
        self._before, _, self._after = msgspec.json.encode(whole).partition(stand_in.encode())

    def body(self, text: str) -> bytes:
        """Return the body with this text inserted."""
        return self._before + msgspec.json.encode(text)[1:-1] + self._after

    def _put(self, whole: Any, field: str, stand_in: str) -> None:
        *way, last = field.split(".")
        inside: Any = whole
        for number, key in enumerate(way):
            inside = inside[_key(inside, key, ".".join(way[: number + 1]), there=True)]
        key_ = _key(inside, last, field, there=isinstance(inside, list))
        value = inside.get(key_) if isinstance(inside, dict) else inside[key_]
        if isinstance(value, str) and MARK in value:
            before, _, after = value.partition(MARK)
            inside[key_] = before + stand_in + after
        else:
            inside[key_] = stand_in


def _key(inside: Any, key: str, path: str, *, there: bool) -> Any:
    """Return a key of an object, or a position in a list. Raises TemplateError if the template lacks it."""
    if isinstance(inside, list):
        if key.isdecimal() and len(key) < 9 and int(key) < len(inside):
            return int(key)
        raise TemplateError(
            f"the template has no {path}: the list has {len(inside)} elements, counted from 0"
        )
    if not isinstance(inside, dict) or not key or (there and key not in inside):
        raise TemplateError(f"the template has no {path}")
    return key
