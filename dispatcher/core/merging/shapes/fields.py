"""JSON taken apart and left as it is written: the fields of an object, the items of a list, a canonical text.

Nothing is decoded to a value and encoded again: numbers keep their digits, strings their escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from dispatcher.core.merging.shapes.part import NotUnderstoodError

DEPTH_MOST = 16
"""Of objects and lists in each other, in what is made canonical: each level is read once more."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_NAME = re.compile(rb'\s*[{,]\s*"[^"\\]*"\s*:\s*')
_END = re.compile(rb"\s*\}\s*")
PLACE = b"-0e-0"
"""A number that nobody writes."""


def text_of(body: bytes) -> bytes:
    """The body, if it is UTF-8 throughout: what is not read as a string is not checked by the decoder."""
    if not body.isascii():
        body.decode()
    return body


def fields(text: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object in their order, each once and without escapes in its name.

    The decoder keeps the last of two fields of one name and says nothing; so the text is walked along the
    values that were found. Each step is one field of the text, and the last one its last, only where none is
    given twice.
    """
    found = _object(text)
    at = 0
    for value in found.values():
        head = _NAME.match(text, at)
        start = at if head is None else head.end()
        at = start + len(value)
        if head is None or text[start:at] != bytes(value):
            break
    else:
        if not found or _END.fullmatch(text, at) is not None:
            return found
    raise NotUnderstoodError("a field is given twice, or its name is escaped")


def place_of(text: bytes, name: str) -> int:
    """Where the value of a field begins, in a text that `fields` understands."""
    at = 0
    for field, value in fields(text).items():
        head = _NAME.match(text, at)
        at = at if head is None else head.end()
        if field == name:
            return at
        at += len(value)
    raise NotUnderstoodError(f"no {name}")


def loose_fields(text: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object; the last of one name."""
    return _object(text)


def items(text: bytes | memoryview) -> list[msgspec.Raw]:
    """The items of a list."""
    return _list(text)


def inside(text: bytes | memoryview) -> list[msgspec.Raw]:
    """The same of what stands between its brackets."""
    return _list(b"".join((b"[", text, b"]")))


def canonical(text: bytes, depth: int = 0) -> bytes:
    """The same for texts that differ in the order of fields and in whitespace, and in nothing else."""
    if text[:1] not in (b"{", b"["):
        return text
    if depth == DEPTH_MOST:
        raise NotUnderstoodError("nested too deeply")
    if text[:1] == b"{":
        return b"{%b}" % canonical_fields(fields(text).items(), depth + 1)
    return b"[%b]" % b",".join([canonical(bytes(item), depth + 1) for item in _list(text)])


def canonical_fields(found: Iterable[tuple[str, msgspec.Raw]], depth: int = 0) -> bytes:
    """What stands between the braces of an object with these fields."""
    return b",".join(
        [b'"%b":%b' % (name.encode(), canonical(bytes(raw), depth)) for name, raw in sorted(found)]
    )


def opened(body: bytes, name: str) -> tuple[dict[str, msgspec.Raw], list[dict[str, msgspec.Raw]]]:
    """An object's fields, and of the one that is a list of objects those of each; the last of one name.

    The list is most of the body, and to read it with the rest and then alone would take twice as long. So its
    place is guessed: if what is there is a list, and the body with a number in its place an object, then that
    is how it reads.
    """
    start = body.find(b"[", body.find(b'"%b"' % name.encode()))
    end = body.rfind(b"]") + 1
    if 0 < start < end:
        try:
            found = _object(body[:start] + PLACE + body[end:])
            if found.get(name) == msgspec.Raw(PLACE):
                return found, objects(memoryview(body)[start:end])
        except msgspec.DecodeError:
            pass
    found = _object(body)
    if name not in found:
        raise NotUnderstoodError(f"no {name} in the answer")
    return found, objects(found[name])
