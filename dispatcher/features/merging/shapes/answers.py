"""Answers with one list: split among the parts of a call, and joined again from several calls.

The bytes of an item's fields stay as the server wrote them, except for its index.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from typing import Any

import msgspec

from dispatcher.features.merging.shapes.part import ItemKind, Part, Shape
from dispatcher.features.merging.shapes.shares import share_usage, sum_usages
from dispatcher.requests.json_fields import (
    NotUnderstoodError,
    parse_fields_loosely,
    parse_items,
    parse_object_with_list,
    parse_objects,
)

_encode = msgspec.json.Encoder().encode
_INDEX_DIGITS = 9

Fields = dict[str, Any]
"""Fields of an object. Values are as written (`msgspec.Raw`), or what replaces them."""


def split_answer(parts: Sequence[Part], body: bytes) -> list[bytes]:
    """Return the answers to the parts. Raise NotUnderstoodError, or an error of the decoder."""
    shape = parts[0].shape
    sizes = [part.size for part in parts]
    if shape.has_indexes:
        answer_fields, listed = parse_indexed_answer(shape, body)
        shares: Sequence[Sequence[Any]] = (_share_ranked if shape.is_ranked else _share_rows)(
            parts, listed, sum(sizes)
        )
    else:
        answer_fields, unindexed = parse_ordered_answer(shape, body)
        if len(unindexed) != sum(sizes):
            raise NotUnderstoodError(f"{len(unindexed)} items in the answer to {sum(sizes)}")
        shares = [unindexed[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if answer_fields is None:
        return [
            bytes(share[0]) if part.is_single_item and shape.item_kind is ItemKind.PAIRS else _encode(share)
            for part, share in zip(parts, shares, strict=True)
        ]
    usages = (
        share_usage(answer_fields["usage"], [part.tokens for part in parts])
        if "usage" in answer_fields
        else None
    )
    answers = []
    for number, share in enumerate(shares):
        # The fields are reused: each answer is encoded before the next share replaces the list.
        answer_fields[shape.answer_field] = share
        if usages is not None:
            answer_fields["usage"] = usages[number]
        answers.append(_encode(answer_fields))
    return answers


def parse_indexed_answer(shape: Shape, body: bytes) -> tuple[Fields | None, list[Fields]]:
    """Return the fields of the answer (`None` if it is a list), and the fields of each of its items."""
    answer_fields, listed = (
        parse_object_with_list(body, shape.answer_field)
        if shape.answer_field
        else (None, parse_objects(body))
    )
    for item in listed:
        if item.get(shape.item_field, _NULL) == _NULL:
            raise NotUnderstoodError(f"an item of the answer without {shape.item_field}")
    return answer_fields, listed


_NULL = msgspec.Raw(b"null")


def parse_ordered_answer(shape: Shape, body: bytes) -> tuple[Fields | None, list[msgspec.Raw]]:
    """Return the fields of the answer (`None` if it is a list), and its items."""
    if not shape.answer_field:
        listed = parse_items(body)
        if shape.has_vectors and any(bytes(item)[:1] != b"[" for item in listed):
            raise NotUnderstoodError("an item of the answer is no vector")
        return None, listed
    answer_fields = parse_fields_loosely(body)
    if shape.answer_field not in answer_fields:
        raise NotUnderstoodError(f"no {shape.answer_field} in the answer")
    return answer_fields, parse_items(answer_fields[shape.answer_field])


def parse_indices(listed: Sequence[Fields], size: int) -> list[int]:
    """Return the index that each item states: different numbers below `size`."""
    indexes = []
    for item in listed:
        text = bytes(item.get("index", b""))
        if not text.isdigit() or len(text) > _INDEX_DIGITS or int(text) >= size:
            raise NotUnderstoodError(f"an item of the answer without an index below {size}")
        indexes.append(int(text))
    if len(set(indexes)) != len(indexes):
        raise NotUnderstoodError("two items of the answer of one index")
    return indexes


def _order_by_index(listed: Sequence[Fields], size: int) -> list[Fields]:
    """Return all items in the order of their indexes."""
    if len(listed) != size:
        raise NotUnderstoodError(f"{len(listed)} items in the answer to {size}")
    order = parse_indices(listed, size)
    placed = list(listed)
    for item, at in zip(listed, order, strict=True):
        placed[at] = item
    return placed


def _share_rows(parts: Sequence[Part], listed: Sequence[Fields], size: int) -> list[list[Fields]]:
    placed = _order_by_index(listed, size)
    shares = []
    start = 0
    for part in parts:
        share = placed[start : start + part.size]
        # Each part must see indexes from 0, as in a call of its own.
        for at, item in enumerate(share):
            item["index"] = at
        shares.append(share)
        start += part.size
    return shares


def _share_ranked(parts: Sequence[Part], listed: Sequence[Fields], size: int) -> list[list[Fields]]:
    """Return for each part its own items, in the order of their ranks among all."""
    if len(listed) != size:
        raise NotUnderstoodError(f"{len(listed)} items in the answer to {size}")
    part_and_position = [(number, at) for number, part in enumerate(parts) for at in range(part.size)]
    shares: list[list[Fields]] = [[] for _ in parts]
    for item, index in zip(listed, parse_indices(listed, size), strict=True):
        number, item["index"] = part_and_position[index]
        shares[number].append(item)
    # `top` is 0 if the request wants all items.
    return [share[: part.top_count or None] for part, share in zip(parts, shares, strict=True)]


def join_answers(part: Part, pieces: Sequence[Part], piece_bodies: Sequence[bytes]) -> bytes:
    """Return the joined answer. Raise NotUnderstoodError, or an error of the decoder."""
    shape = part.shape
    answers: list[tuple[Fields | None, Sequence[Any]]] = []
    start = 0
    for piece, body in zip(pieces, piece_bodies, strict=True):
        answers.append(_parse_piece_answer(shape, piece, body, start))
        start += piece.size
    first = answers[0][0]
    joined = [item for _, listed in answers for item in listed]
    if shape.is_ranked:
        joined = _merge_ranked(shape, [listed for _, listed in answers])[: part.top_count or None]
    if first is None:
        return _encode(joined)
    first[shape.answer_field] = joined
    usages = [found["usage"] for found, _ in answers if found is not None and "usage" in found]
    if usages:
        first["usage"] = sum_usages(usages)
    return _encode(first)


def _parse_piece_answer(
    shape: Shape, piece: Part, body: bytes, start: int
) -> tuple[Fields | None, Sequence[Any]]:
    """Return the answer to a piece, with its items numbered from `start` on."""
    if not shape.has_indexes:
        answer_fields, unindexed = parse_ordered_answer(shape, body)
        if len(unindexed) != piece.size:
            raise NotUnderstoodError(f"{len(unindexed)} items in the answer to {piece.size}")
        return answer_fields, unindexed
    answer_fields, listed = parse_indexed_answer(shape, body)
    if not shape.is_ranked:
        listed = _order_by_index(listed, piece.size)
        for at, item in enumerate(listed):
            item["index"] = start + at
        return answer_fields, listed
    expected_count = min(piece.top_count or piece.size, piece.size)
    if len(listed) != expected_count:
        raise NotUnderstoodError(f"{len(listed)} items in the answer, {expected_count} were asked for")
    for item, index in zip(listed, parse_indices(listed, piece.size), strict=True):
        item["index"] = start + index
    return answer_fields, listed


def _merge_ranked(shape: Shape, lists: Sequence[Sequence[Fields]]) -> list[Fields]:
    """Return one list in descending order of rank, and in ascending order of index for equal ranks.

    If the lists are not in such an order, the result is in the order of the index.
    """
    ranks = [[parse_rank(shape, item) for item in listed] for listed in lists]
    if all(listed == sorted(listed, reverse=True) for listed in ranks):
        order = [
            (-rank, item["index"], item)
            for row, listed in zip(ranks, lists, strict=True)
            for rank, item in zip(row, listed, strict=True)
        ]
        order.sort(key=lambda one: one[:2])
        return [item for _, _, item in order]
    return sorted((item for listed in lists for item in listed), key=lambda item: item["index"])


def parse_rank(shape: Shape, item: Fields) -> float:
    """Return the value by which an item of a ranked answer is ranked."""
    try:
        rank = float(bytes(item[shape.item_field]))
    except ValueError:
        rank = float("nan")
    if not isfinite(rank):
        raise NotUnderstoodError(f"{shape.item_field} of an item is no number")
    return rank
