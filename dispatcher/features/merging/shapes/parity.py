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

from dispatcher.features.merging.shapes.answers import (
    parse_indexed_answer,
    parse_indices,
    parse_ordered_answer,
)
from dispatcher.features.merging.shapes.part import ItemKind, Part, Shape
from dispatcher.requests.json_fields import NotUnderstoodError, parse_object_with_list

MIN_COSINE = 0.999
RELATIVE_TOLERANCE = 0.01
NORM_TOLERANCE = 0.05
"""Relative tolerance for the length of a vector."""
MAX_DEPTH = 32

_decode = msgspec.json.Decoder().decode


def find_difference(part: Part, merged: bytes, single: bytes) -> str | None:
    """Return how the answers differ. `None` if they do not. Raise NotUnderstoodError, or an error of the
    decoder."""
    shape = part.shape
    if shape.item_kind is ItemKind.TENSORS:
        return _compare_outputs(shape, merged, single)
    if shape.item_kind is ItemKind.PAIRS and part.is_single_item:
        return _compare_values("answer", _decode(merged), _decode(single), shape.tolerance)
    merged_items, single_items = _parse_items_by_index(part, merged), _parse_items_by_index(part, single)
    if shape.is_ranked:
        return _compare_ranks(shape, merged_items, single_items)
    for at in range(part.size):
        merged_item, single_item = merged_items[at], single_items[at]
        if shape.has_vectors:
            merged_item, single_item = (
                (merged_item[shape.item_field], single_item[shape.item_field])
                if shape.item_field
                else (merged_item, single_item)
            )
            why = _compare_vectors(merged_item, single_item)
        else:
            why = _compare_values("", merged_item, single_item, shape.tolerance)
        if why is not None:
            return f"item {at}: {why}"
    return None


def _parse_items_by_index(part: Part, body: bytes) -> dict[int, Any]:
    """Return the items of an answer by index."""
    shape = part.shape
    if not shape.has_indexes:
        plain = parse_ordered_answer(shape, body)[1]
        if len(plain) != part.size:
            raise NotUnderstoodError(f"{len(plain)} items in the answer to {part.size}")
        return dict(enumerate(_decode(item) for item in plain))
    _, listed = parse_indexed_answer(shape, body)
    if len(listed) != part.size and not shape.is_ranked:
        raise NotUnderstoodError(f"{len(listed)} items in the answer to {part.size}")
    order = parse_indices(listed, part.size)
    return {
        index: {name: _decode(value) for name, value in item.items() if name not in ("index", "id")}
        for index, item in zip(order, listed, strict=True)
    }


def _compare_vectors(merged: Any, single: Any) -> str | None:
    """Compare vectors: lists of numbers, base64 of 32-bit floats, or lists of these."""
    if isinstance(merged, str) and isinstance(single, str):
        merged, single = _decode_floats(merged), _decode_floats(single)
    if _is_nested(merged) and _is_nested(single):
        if len(merged) != len(single):
            return f"{len(merged)} vectors, {len(single)} alone"
        differences = (_compare_vectors(mine, theirs) for mine, theirs in zip(merged, single, strict=True))
        return next((why for why in differences if why is not None), None)
    if not (_is_numeric(merged) and _is_numeric(single)):
        return None if merged == single else "no vector"
    if len(merged) != len(single):
        return f"a vector of {len(merged)} numbers, {len(single)} alone"
    merged_square, single_square = _dot_product(merged, merged), _dot_product(single, single)
    if merged_square == single_square == 0:
        return None
    # The last condition is also true for NaN.
    if merged_square == 0 or single_square == 0 or not merged_square + single_square < float("inf"):
        return "a vector without a length"
    cosine = _dot_product(merged, single) / sqrt(merged_square) / sqrt(single_square)
    if not cosine >= MIN_COSINE:
        return f"cosine {cosine:.4f}"
    if not isclose(sqrt(merged_square), sqrt(single_square), rel_tol=NORM_TOLERANCE):
        return f"a vector of length {sqrt(merged_square):.4g}, {sqrt(single_square):.4g} alone"
    return None


def _dot_product(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _decode_floats(text: str) -> Sequence[float]:
    try:
        data = binascii.a2b_base64(text.encode(), strict_mode=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error):
        raise NotUnderstoodError("a vector that is no base64 of 32-bit floats") from None


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, list | str) for each in value)


def _is_numeric(value: Any) -> bool:
    """Return whether the value is a list of numbers."""
    # isinstance() would accept bool.
    return isinstance(value, list | tuple) and all(type(each) in (int, float) for each in value)


def _compare_values(path: str, merged: Any, single: Any, tolerance: float, depth: int = 0) -> str | None:
    if depth > MAX_DEPTH:
        raise NotUnderstoodError("nested too deeply")
    if isinstance(merged, dict) and isinstance(single, dict):
        if merged.keys() != single.keys():
            return f"{path}: other fields"
        pairs = [(f"{path}.{name}" if path else name, merged[name], single[name]) for name in merged]
        return _find_first_difference(pairs, tolerance, depth)
    if isinstance(merged, list) and isinstance(single, list):
        if len(merged) != len(single):
            return f"{path}: {len(merged)} long, {len(single)} alone"
        if _is_numeric(merged) and _is_numeric(single) and float in map(type, chain(merged, single)):
            return _compare_numbers(path, merged, single, tolerance)
        return _find_first_difference(
            [(f"{path}[{at}]", *pair) for at, pair in enumerate(zip(merged, single, strict=True))],
            tolerance,
            depth,
        )
    if _is_numeric([merged, single]) and float in (type(merged), type(single)):
        return _compare_numbers(path, [merged], [single], tolerance)
    return None if type(merged) is type(single) and merged == single else f"{path}: not the same"


def _find_first_difference(pairs: Sequence[tuple[str, Any, Any]], tolerance: float, depth: int) -> str | None:
    differences = (_compare_values(where, one, other, tolerance, depth + 1) for where, one, other in pairs)
    return next((why for why in differences if why is not None), None)


def _compare_numbers(
    path: str, merged: Sequence[float], single: Sequence[float], tolerance: float
) -> str | None:
    max_difference = tolerance + RELATIVE_TOLERANCE * max(map(abs, chain(merged, single)), default=0.0)
    for merged_number, single_number in zip(merged, single, strict=True):
        # Negated, so that NaN counts as a difference.
        if not abs(merged_number - single_number) <= max_difference:
            return f"{path}: {merged_number:.6g}, {single_number:.6g} alone"
    return None


def _compare_ranks(shape: Shape, merged_items: dict[int, Any], single_items: dict[int, Any]) -> str | None:
    """Compare ranked items by index. If only the first few items were requested, the answers may contain
    different items, as long as their ranks are equal."""
    if len(merged_items) != len(single_items):
        return f"{len(merged_items)} items, {len(single_items)} alone"
    common = merged_items.keys() & single_items.keys()
    rows = [
        [item[shape.item_field] for item in differences.values()]
        for differences in (merged_items, single_items)
    ]
    if not all(map(_is_numeric, rows)):
        raise NotUnderstoodError(f"{shape.item_field} of an item is no number")
    merged_ranks, single_ranks = (sorted(row, reverse=True) for row in rows)
    why = _compare_values("ranks", merged_ranks, single_ranks, shape.tolerance)
    if why is not None:
        return why
    differences = (
        (at, _compare_values("", merged_items[at], single_items[at], shape.tolerance))
        for at in sorted(common)
    )
    return next((f"item {at}: {why}" for at, why in differences if why is not None), None)


def _compare_outputs(shape: Shape, merged: bytes, single: bytes) -> str | None:
    merged_outputs, single_outputs = (
        [
            {name: _decode(value) for name, value in output.items()}
            for output in parse_object_with_list(body, shape.answer_field)[1]
        ]
        for body in (merged, single)
    )
    return _compare_values("outputs", merged_outputs, single_outputs, shape.tolerance)
