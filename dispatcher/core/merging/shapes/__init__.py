"""Shapes of list calls: bodies are merged into one call, its answer split; long lists cut, and joined. Pure.

`table.py` has a row for each shape. Nothing here raises for what others wrote: what is not understood is
`Unfit`, with the reason.
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
    """The body of a request, or why it must go alone."""
    try:
        return tensors.read(shape, payload) if shape.items is Items.TENSORS else bodies.read(shape, payload)
    except _AMISS as error:
        return Unfit(_why(error))


def merge(parts: Sequence[Part]) -> bytes:
    """The body of one call for parts of one key; of one part alone the body as it came.

    Raises ValueError for parts of several keys, or for none.
    """
    if len({part.key for part in parts}) != 1:
        raise ValueError("only parts of one key can be merged")
    first = parts[0]
    if len(parts) == 1 and first.payload:
        return first.payload
    return tensors.merge(parts) if first.shape.items is Items.TENSORS else bodies.merge(parts)


def split(parts: Sequence[Part], body: bytes) -> list[bytes] | Unfit:
    """To each part the answer that it would have got alone; to one part the answer as it came."""
    if len(parts) == 1:
        return [body]
    try:
        if parts[0].shape.items is Items.TENSORS:
            return tensors.split(parts, body)
        return answers.split(parts, body)
    except _AMISS as error:
        return Unfit(_why(error))


def cut(part: Part, most: int, most_tokens: float = inf) -> list[Part]:
    """An over-long list in several pieces, in order, each as long as it may be; `[part]` where it is not.

    An item that has more tokens than `most_tokens` makes a piece of its own.
    """
    if part.size <= 1 or (part.size <= most and part.tokens <= most_tokens):
        return [part]
    by = tensors.cut if part.shape.items is Items.TENSORS else bodies.cut
    pieces = by(part, max(1, most), most_tokens)
    return pieces if len(pieces) > 1 else [part]


def join(part: Part, pieces: Sequence[Part], answered: Sequence[bytes]) -> bytes | Unfit:
    """The answers to what a part was cut into, as one call would have had them; usage summed up."""
    if len(pieces) == 1:
        return answered[0]
    try:
        if part.shape.items is Items.TENSORS:
            return tensors.join(part, pieces, answered)
        return answers.join(part, pieces, answered)
    except _AMISS as error:
        return Unfit(_why(error))


def differs(part: Part, merged: bytes, single: bytes) -> str | None:
    """What the answer out of a merged call has otherwise than that to the part alone; None: nothing.

    `parity.py` says what counts.
    """
    try:
        return parity.differs(part, merged, single)
    except _AMISS as error:
        return f"cannot be compared: {_why(error)}"
