"""Shapes of list calls: bodies are merged into one call and its answer is split; long lists are cut and the
answers joined.

`table.py` has a row for each shape. No function here raises for bytes that producers or servers wrote: if
they are not understood, the result is an `Unfit` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from dispatcher.features.merging.shapes import answers, bodies, parity, tensors
from dispatcher.features.merging.shapes.caps import KNOWN_CAPS, KnownCap, parse_item_cap, parse_token_cap
from dispatcher.features.merging.shapes.part import ItemKind, Part, Shape, Unfit
from dispatcher.features.merging.shapes.table import SHAPES, find_shape
from dispatcher.requests.json_fields import NotUnderstoodError

__all__ = [
    "KNOWN_CAPS",
    "SHAPES",
    "KnownCap",
    "Part",
    "Shape",
    "Unfit",
    "cut_part",
    "find_difference",
    "find_shape",
    "join_answers",
    "merge_parts",
    "parse_item_cap",
    "parse_part",
    "parse_token_cap",
    "split_answer",
]

BODY_ERRORS = (NotUnderstoodError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a body that is not understood."""


def _describe_error(error: Exception) -> str:
    if isinstance(error, NotUnderstoodError):
        return str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"not the JSON that it should be: {error}"[:200]


def parse_part(shape: Shape, payload: bytes) -> Part | Unfit:
    """Return the list call in the body of a request, or why the request must be sent alone."""
    try:
        return (
            tensors.parse_part(shape, payload)
            if shape.item_kind is ItemKind.TENSORS
            else bodies.parse_part(shape, payload)
        )
    except BODY_ERRORS as error:
        return Unfit(_describe_error(error))


def merge_parts(parts: Sequence[Part]) -> bytes:
    """Return the body of one call for parts with one merge key. The body of a single part is unchanged.

    Raise `ValueError` for parts with several keys, or for none.
    """
    if len({part.merge_key for part in parts}) != 1:
        raise ValueError("only parts of one key can be merged")
    first = parts[0]
    # A piece that was cut has no payload of its own.
    if len(parts) == 1 and first.payload:
        return first.payload
    return (
        tensors.merge_parts(parts) if first.shape.item_kind is ItemKind.TENSORS else bodies.merge_parts(parts)
    )


def split_answer(parts: Sequence[Part], body: bytes) -> list[bytes] | Unfit:
    """Return for each part the answer that it would have got alone. The answer to a single part is
    unchanged."""
    if len(parts) == 1:
        return [body]
    try:
        if parts[0].shape.item_kind is ItemKind.TENSORS:
            return tensors.split_answer(parts, body)
        return answers.split_answer(parts, body)
    except BODY_ERRORS as error:
        return Unfit(_describe_error(error))


def cut_part(part: Part, max_items: int, max_tokens: float = inf) -> list[Part]:
    """Return a list that is too long as several pieces, in order, each as long as it may be; otherwise
    `[part]`.

    An item with more tokens than `max_tokens` becomes a piece of its own.
    """
    if part.size <= 1 or (part.size <= max_items and part.tokens <= max_tokens):
        return [part]
    cut_by_kind = tensors.cut_part if part.shape.item_kind is ItemKind.TENSORS else bodies.cut_part
    pieces = cut_by_kind(part, max(1, max_items), max_tokens)
    return pieces if len(pieces) > 1 else [part]


def join_answers(part: Part, pieces: Sequence[Part], piece_answers: Sequence[bytes]) -> bytes | Unfit:
    """Return the joined answers to the pieces of a part, as one call would have had them, with the usage
    added up."""
    if len(pieces) == 1:
        return piece_answers[0]
    try:
        if part.shape.item_kind is ItemKind.TENSORS:
            return tensors.join_answers(part, pieces, piece_answers)
        return answers.join_answers(part, pieces, piece_answers)
    except BODY_ERRORS as error:
        return Unfit(_describe_error(error))


def find_difference(part: Part, merged: bytes, single: bytes) -> str | None:
    """Return how the answer from a merged call differs from the answer to the part alone. `None` if it does
    not.

    `parity.py` says what is compared.
    """
    try:
        return parity.find_difference(part, merged, single)
    except BODY_ERRORS as error:
        return f"cannot be compared: {_describe_error(error)}"
