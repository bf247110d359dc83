"""Compare the answer to a part from a merged call with the answer that it gets alone.

A model need not return identical bits twice, because the other items of a call change the order in which sums
are computed. Therefore vectors are equal if they have the same direction (MIN_COSINE). Other numbers are
equal if they differ by less than RELATIVE_TOLERANCE of the largest number in their list (a single number: of
itself), because half precision has eight or eleven bits. Scores, which are between 0 and 1, may differ by a
further 0.001. Whole numbers, texts, labels and lengths must be equal. Usage, ids, times and the order of
nearly equal ranks are not compared.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence
from itertools import chain
from math import isclose, sqrt
from typing import Any

import msgspec

from dispatcher.core.merging.shapes.answers import in_order, indices, numbered
from dispatcher.core.merging.shapes.fields import opened
from dispatcher.core.merging.shapes.part import Items, NotUnderstoodError, Part, Shape

COSINE = 0.999
NEAR = 0.01
NORM_NEAR = 0.05
"""Relative tolerance for the length of a vector."""
DEPTH_MOST = 32

_decode = msgspec.json.Decoder().decode


def differs(part: Part, merged: bytes, single: bytes) -> str | None:
    """Return how the answers differ. `None` if they do not. Raise NotUnderstoodError, or an error of the
    decoder."""
    shape = part.shape
    if shape.items is Items.TENSORS:
        return _outputs(shape, merged, single)
    if shape.items is Items.PAIRS and part.alone:
        return _values("answer", _decode(merged), _decode(single), shape.near)
    ones, others = _listed(part, merged), _listed(part, single)
    if shape.ranked:
        return _ranks(shape, ones, others)
    for at in range(part.size):
        one, other = ones[at], others[at]
        if shape.vectors:
            one, other = (one[shape.needs], other[shape.needs]) if shape.needs else (one, other)
            why = _vectors(one, other)
        else:
            why = _values("", one, other, shape.near)
        if why is not None:
            return f"item {at}: {why}"
    return None


def _listed(part: Part, body: bytes) -> dict[int, Any]:
    """Return the items of an answer by index."""
    shape = part.shape
    if not shape.numbered:
        plain = in_order(shape, body)[1]
        if len(plain) != part.size:
            raise NotUnderstoodError(f"{len(plain)} items in the answer to {part.size}")
        return dict(enumerate(_decode(item) for item in plain))
    _, listed = numbered(shape, body)
    if len(listed) != part.size and not shape.ranked:
        raise NotUnderstoodError(f"{len(listed)} items in the answer to {part.size}")
    order = indices(listed, part.size)
    return {
        index: {name: _decode(value) for name, value in item.items() if name not in ("index", "id")}
        for index, item in zip(order, listed, strict=True)
    }


def _vectors(one: Any, other: Any) -> str | None:
    """Compare vectors: lists of numbers, base64 of 32-bit floats, or lists of these."""
    if isinstance(one, str) and isinstance(other, str):
        one, other = _floats(one), _floats(other)
    if _nested(one) and _nested(other):
        if len(one) != len(other):
            return f"{len(one)} vectors, {len(other)} alone"
        found = (_vectors(mine, theirs) for mine, theirs in zip(one, other, strict=True))
        return next((why for why in found if why is not None), None)
    if not (_numeric(one) and _numeric(other)):
        return None if one == other else "no vector"
    if len(one) != len(other):
        return f"a vector of {len(one)} numbers, {len(other)} alone"
    square, other_square = _dot(one, one), _dot(other, other)
    if square == other_square == 0:
        return None
    # The last condition is also true for NaN.
    if square == 0 or other_square == 0 or not square + other_square < float("inf"):
        return "a vector without a length"
    cosine = _dot(one, other) / sqrt(square) / sqrt(other_square)
    if not cosine >= COSINE:
        return f"cosine {cosine:.4f}"
    if not isclose(sqrt(square), sqrt(other_square), rel_tol=NORM_NEAR):
        return f"a vector of length {sqrt(square):.4g}, {sqrt(other_square):.4g} alone"
    return None


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _floats(text: str) -> Sequence[float]:
    try:
        data = binascii.a2b_base64(text.encode(), strict_mode=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error):
        raise NotUnderstoodError("a vector that is no base64 of 32-bit floats") from None


def _nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, list | str) for each in value)


def _numeric(value: Any) -> bool:
    """Return whether the value is a list of numbers."""
    # isinstance() would accept bool.
    return isinstance(value, list | tuple) and all(type(each) in (int, float) for each in value)


def _values(where: str, one: Any, other: Any, near: float, depth: int = 0) -> str | None:
    if depth > DEPTH_MOST:
        raise NotUnderstoodError("nested too deeply")
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: other fields"
        pairs = [(f"{where}.{name}" if where else name, one[name], other[name]) for name in one]
        return _first(pairs, near, depth)
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{where}: {len(one)} long, {len(other)} alone"
        if _numeric(one) and _numeric(other) and float in map(type, chain(one, other)):
            return _numbers(where, one, other, near)
        return _first(
            [(f"{where}[{at}]", *pair) for at, pair in enumerate(zip(one, other, strict=True))], near, depth
        )
    if _numeric([one, other]) and float in (type(one), type(other)):
        return _numbers(where, [one], [other], near)
    return None if type(one) is type(other) and one == other else f"{where}: not the same"


def _first(pairs: Sequence[tuple[str, Any, Any]], near: float, depth: int) -> str | None:
    found = (_values(where, one, other, near, depth + 1) for where, one, other in pairs)
    return next((why for why in found if why is not None), None)


def _numbers(where: str, one: Sequence[float], other: Sequence[float], near: float) -> str | None:
    most = near + NEAR * max(map(abs, chain(one, other)), default=0.0)
    for mine, theirs in zip(one, other, strict=True):
        # Negated, so that NaN counts as a difference.
        if not abs(mine - theirs) <= most:
            return f"{where}: {mine:.6g}, {theirs:.6g} alone"
    return None


def _ranks(shape: Shape, ones: dict[int, Any], others: dict[int, Any]) -> str | None:
    """Compare ranked items by index. If only the first few items were requested, the answers may contain
    different items, as long as their ranks are equal."""
    if len(ones) != len(others):
        return f"{len(ones)} items, {len(others)} alone"
    both = ones.keys() & others.keys()
    rows = [[item[shape.needs] for item in found.values()] for found in (ones, others)]
    if not all(map(_numeric, rows)):
        raise NotUnderstoodError(f"{shape.needs} of an item is no number")
    one, other = (sorted(row, reverse=True) for row in rows)
    why = _values("ranks", one, other, shape.near)
    if why is not None:
        return why
    found = ((at, _values("", ones[at], others[at], shape.near)) for at in sorted(both))
    return next((f"item {at}: {why}" for at, why in found if why is not None), None)


def _outputs(shape: Shape, merged: bytes, single: bytes) -> str | None:
    ones, others = (
        [{name: _decode(value) for name, value in output.items()} for output in opened(body, shape.answer)[1]]
        for body in (merged, single)
    )
    return _values("outputs", ones, others, shape.near)
