"""Shapes of list calls: bodies are merged into one call and its answer is split; long lists are cut and the
answers joined.

`table.py` has a row for each shape. No function here raises for bytes that producers or servers wrote: if
they are not understood, the result is an `Unfit` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from dispatcher.core.merging.shapes import answers, bodies, parity, tensors
from dispatcher.core.merging.shapes.caps import KNOWN_CAPS, KnownCap, too_many, too_many_tokens
from dispatcher.core.merging.shapes.part import Items, NotUnderstoodError, Part, Shape, Unfit
from dispatcher.core.merging.shapes.table import SHAPES, shape_at

__all__ = [
    "KNOWN_CAPS",
    "SHAPES",
    "KnownCap",
    "Part",
    "Shape",
    "Unfit",
    "cut",
    "differs",
    "join",
    "merge",
    "read",
    "shape_at",
    "split",
    "too_many",
    "too_many_tokens",
]

_AMISS = (NotUnderstoodError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _why(error: Exception) -> str:
    if isinstance(error, NotUnderstoodError):
        return str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"not the JSON that it should be: {error}"[:200]


def read(shape: Shape, payload: bytes) -> Part | Unfit:
    """Return the list call in the body of a request, or why the request must be sent alone."""
    try:
        return tensors.read(shape, payload) if shape.items is Items.TENSORS else bodies.read(shape, payload)
    except _AMISS as error:
        return Unfit(_why(error))


def merge(parts: Sequence[Part]) -> bytes:
    """Return the body of one call for parts with one merge key. The body of a single part is unchanged.

    Raise `ValueError` for parts with several keys, or for none.
    """
    if len({part.key for part in parts}) != 1:
        raise ValueError("only parts of one key can be merged")
    first = parts[0]
    # A piece that was cut has no payload of its own.
    if len(parts) == 1 and first.payload:
        return first.payload
    return tensors.merge(parts) if first.shape.items is Items.TENSORS else bodies.merge(parts)


def split(parts: Sequence[Part], body: bytes) -> list[bytes] | Unfit:
    """Return for each part the answer that it would have got alone. The answer to a single part is
    unchanged."""
    if len(parts) == 1:
        return [body]
    try:
        if parts[0].shape.items is Items.TENSORS:
            return tensors.split(parts, body)
        return answers.split(parts, body)
    except _AMISS as error:
        return Unfit(_why(error))


def cut(part: Part, most: int, most_tokens: float = inf) -> list[Part]:
    """Return a list that is too long as several pieces, in order, each as long as it may be; otherwise
    `[part]`.

    An item with more tokens than `max_tokens` becomes a piece of its own.
    """
    if part.size <= 1 or (part.size <= most and part.tokens <= most_tokens):
        return [part]
    by = tensors.cut if part.shape.items is Items.TENSORS else bodies.cut
    pieces = by(part, max(1, most), most_tokens)
    return pieces if len(pieces) > 1 else [part]


def join(part: Part, pieces: Sequence[Part], answered: Sequence[bytes]) -> bytes | Unfit:
    """Return the joined answers to the pieces of a part, as one call would have had them, with the usage
    added up."""
    if len(pieces) == 1:
        return answered[0]
    try:
        if part.shape.items is Items.TENSORS:
            return tensors.join(part, pieces, answered)
        return answers.join(part, pieces, answered)
    except _AMISS as error:
        return Unfit(_why(error))


def differs(part: Part, merged: bytes, single: bytes) -> str | None:
    """Return how the answer from a merged call differs from the answer to the part alone. `None` if it does
    not.

    `parity.py` says what is compared.
    """
    try:
        return parity.differs(part, merged, single)
    except _AMISS as error:
        return f"cannot be compared: {_why(error)}"
