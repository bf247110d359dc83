"""Parse JSON without changing how it is written: fields of an object, items of a list, a canonical text.

No value is decoded and encoded again: numbers keep their digits, and strings their escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

MAX_FIELDS = 10_000
"""Largest number of fields of an object that is understood. Hundreds of thousands of them, which a body of
some megabytes can have, would stop the event loop for seconds."""
MAX_DEPTH = 16
"""Largest nesting of objects and lists that are made canonical. Each level is parsed once more."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
parse_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_NAME = re.compile(rb'\s*[{,]\s*"[^"\\]*"\s*:\s*')
_END = re.compile(rb"\s*\}\s*")
PLACEHOLDER = b"-0e-0"
"""A number that no program writes."""


class NotUnderstoodError(Exception):
    """A body or an answer does not have the expected fields or values."""


def check_utf8(body: bytes) -> bytes:
    """Return the body if all of it is valid UTF-8. The decoder does not check values that it does not
    decode."""
    if not body.isascii():
        body.decode()
    return body


def parse_fields(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of an object in order. Each name occurs once and has no escapes.

    The decoder silently keeps the last of two fields with one name. Therefore the text is compared with the
    values that were found: each step is one field of the text, and the last step reaches the end of the
    object only if no field is given twice.
    """
    values_by_name = _object(text)
    if len(values_by_name) > MAX_FIELDS:
        raise NotUnderstoodError(f"more than {MAX_FIELDS:,} fields")
    at = 0
    for value in values_by_name.values():
        key_match = _NAME.match(text, at)
        start = at if key_match is None else key_match.end()
        at = start + len(value)
        if key_match is None or text[start:at] != bytes(value):
            break
    else:
        if not values_by_name or _END.fullmatch(text, at) is not None:
            return values_by_name
    raise NotUnderstoodError("a field is given twice, or its name is escaped")


def find_value(text: bytes, name: str) -> int:
    """Return the position of a field's value in a text that `parse_fields` accepts."""
    at = 0
    for field, value in parse_fields(text).items():
        key_match = _NAME.match(text, at)
        at = at if key_match is None else key_match.end()
        if field == name:
            return at
        at += len(value)
    raise NotUnderstoodError(f"no {name}")


def parse_fields_loosely(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of an object. Of two fields with one name the last counts."""
    return _object(text)


def parse_items(text: bytes | memoryview) -> list[msgspec.Raw]:
    """Return the items of a list."""
    return _list(text)


def parse_list_content(text: bytes | memoryview) -> list[msgspec.Raw]:
    """Return the items of a list, given the text between its brackets."""
    return _list(b"".join((b"[", text, b"]")))


def make_canonical(text: bytes, depth: int = 0) -> bytes:
    """Return a text that is equal for inputs that differ only in the order of fields and in whitespace."""
    if text[:1] not in (b"{", b"["):
        return text
    if depth == MAX_DEPTH:
        raise NotUnderstoodError("nested too deeply")
    if text[:1] == b"{":
        return b"{%b}" % join_canonical_fields(parse_fields(text).items(), depth + 1)
    return b"[%b]" % b",".join([make_canonical(bytes(item), depth + 1) for item in _list(text)])


def join_canonical_fields(named_values: Iterable[tuple[str, msgspec.Raw]], depth: int = 0) -> bytes:
    """Return the canonical text between the braces of an object with these fields."""
    return b",".join(
        [
            b'"%b":%b' % (name.encode(), make_canonical(bytes(raw), depth))
            for name, raw in sorted(named_values)
        ]
    )


def parse_object_with_list(
    body: bytes, name: str
) -> tuple[dict[str, msgspec.Raw], list[dict[str, msgspec.Raw]]]:
    """Return the fields of an object, and the fields of each item of the one field that is a list of objects.

    Of two fields with one name the last counts. The list is most of the body, and parsing it twice would take
    twice as long. So its position is guessed: if the text there is a list, and the body with a number in its
    place is an object, then the guess is right.
    """
    start = body.find(b"[", body.find(b'"%b"' % name.encode()))
    end = body.rfind(b"]") + 1
    if 0 < start < end:
        try:
            values_by_name = _object(body[:start] + PLACEHOLDER + body[end:])
            if values_by_name.get(name) == msgspec.Raw(PLACEHOLDER):
                return values_by_name, parse_objects(memoryview(body)[start:end])
        # The guess was wrong, so the whole body is parsed.
        except msgspec.DecodeError:
            pass
    values_by_name = _object(body)
    if name not in values_by_name:
        raise NotUnderstoodError(f"no {name} in the answer")
    return values_by_name, parse_objects(values_by_name[name])
