"""Templates: a request body with a place into which a line of text is inserted. Does no I/O."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec

TEXT_MARK = "{}"
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
        self._insert_stand_in(whole, field, stand_in)
        self._before, _, self._after = msgspec.json.encode(whole).partition(stand_in.encode())

    def fill_body(self, text: str) -> bytes:
        """Return the body with this text inserted."""
        return self._before + msgspec.json.encode(text)[1:-1] + self._after

    def _insert_stand_in(self, whole: Any, field: str, stand_in: str) -> None:
        *parents, last = field.split(".")
        container: Any = whole
        for number, key in enumerate(parents):
            container = container[
                _resolve_key(container, key, ".".join(parents[: number + 1]), must_exist=True)
            ]
        key_ = _resolve_key(container, last, field, must_exist=isinstance(container, list))
        value = container.get(key_) if isinstance(container, dict) else container[key_]
        if isinstance(value, str) and TEXT_MARK in value:
            before, _, after = value.partition(TEXT_MARK)
            container[key_] = before + stand_in + after
        else:
            container[key_] = stand_in


def _resolve_key(container: Any, key: str, path: str, *, must_exist: bool) -> Any:
    """Return a key of an object, or a position in a list. Raises TemplateError if the template lacks it."""
    if isinstance(container, list):
        if key.isdecimal() and len(key) < 9 and int(key) < len(container):
            return int(key)
        raise TemplateError(
            f"the template has no {path}: the list has {len(container)} elements, counted from 0"
        )
    if not isinstance(container, dict) or not key or (must_exist and key not in container):
        raise TemplateError(f"the template has no {path}")
    return key
