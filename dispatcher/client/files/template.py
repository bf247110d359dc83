"""Requests of plain text: a body in which each line of a text file takes one place. Pure."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec

MARK = "{}"
"""In a string of a template: here the text comes in. Without it the text takes the whole value's place."""


class TemplateError(ValueError):
    """The template, or the field in it, is not usable; the message says why."""


class Template:
    """A body with a place for text. `field`: keys and positions from the outermost on, with dots between
    (`messages.1.content`)."""

    def __init__(self, body: bytes, field: str) -> None:
        try:
            whole = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TemplateError(f"the template is no JSON: {error}") from error
        if not isinstance(whole, dict):
            raise TemplateError("the template is no JSON object")
        encoded = msgspec.json.encode(whole)
        stand_in = next(mark for n in count() if (mark := f"@@{n}@@").encode() not in encoded)
        self._put(whole, field, stand_in)
        self._before, _, self._after = msgspec.json.encode(whole).partition(stand_in.encode())

    def body(self, text: str) -> bytes:
        """The body with this text in its place."""
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
    """A key of an object, or a position in a list."""
    if isinstance(inside, list):
        if key.isdecimal() and len(key) < 9 and int(key) < len(inside):
            return int(key)
        raise TemplateError(
            f"the template has no {path}: the list has {len(inside)} elements, counted from 0"
        )
    if not isinstance(inside, dict) or not key or (there and key not in inside):
        raise TemplateError(f"the template has no {path}")
    return key
