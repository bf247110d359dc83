"""Answers with one list: split among the parts of a call, and joined again from several calls.

The bytes of an item's fields stay as the server wrote them, except for its index.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from typing import Any

import msgspec

from dispatcher.core.merging.shapes.fields import items, loose_fields, objects, opened
from dispatcher.core.merging.shapes.part import Items, NotUnderstoodError, Part, Shape
from dispatcher.core.merging.shapes.shares import shared, summed

_encode = msgspec.json.Encoder().encode
_INDEX_DIGITS = 9

Fields = dict[str, Any]
"""Fields of an object. Values are as written (`msgspec.Raw`), or what replaces them."""


def split(parts: Sequence[Part], body: bytes) -> list[bytes]:
    """Return the answers to the parts. Raise NotUnderstoodError, or an error of the decoder."""
    shape = parts[0].shape
    sizes = [part.size for part in parts]
    if shape.numbered:
        found, listed = numbered(shape, body)
        shares: Sequence[Sequence[Any]] = (_ranks if shape.ranked else _rows)(parts, listed, sum(sizes))
    else:
        found, plain = in_order(shape, body)
        if len(plain) != sum(sizes):
            raise NotUnderstoodError(f"{len(plain)} items in the answer to {sum(sizes)}")
        shares = [plain[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if found is None:
        return [
            bytes(share[0]) if part.alone and shape.items is Items.PAIRS else _encode(share)
            for part, share in zip(parts, shares, strict=True)
        ]
    usages = shared(found["usage"], [part.tokens for part in parts]) if "usage" in found else None
    answers = []
    for number, share in enumerate(shares):
        # The fields are reused: each answer is encoded before the next share replaces the list.
        found[shape.answer] = share
        if usages is not None:
            found["usage"] = usages[number]
        answers.append(_encode(found))
    return answers


def numbered(shape: Shape, body: bytes) -> tuple[Fields | None, list[Fields]]:
    """Return the fields of the answer (`None` if it is a list), and the fields of each of its items."""
    found, listed = opened(body, shape.answer) if shape.answer else (None, objects(body))
    for item in listed:
        if item.get(shape.needs, _NULL) == _NULL:
            raise NotUnderstoodError(f"an item of the answer without {shape.needs}")
    return found, listed


_NULL = msgspec.Raw(b"null")


def in_order(shape: Shape, body: bytes) -> tuple[Fields | None, list[msgspec.Raw]]:
    """Return the fields of the answer (`None` if it is a list), and its items."""
    if not shape.answer:
        listed = items(body)
        if shape.vectors and any(bytes(item)[:1] != b"[" for item in listed):
            raise NotUnderstoodError("an item of the answer is no vector")
        return None, listed
    found = loose_fields(body)
    if shape.answer not in found:
        raise NotUnderstoodError(f"no {shape.answer} in the answer")
    return found, items(found[shape.answer])


def indices(listed: Sequence[Fields], size: int) -> list[int]:
    """Return the index that each item states: different numbers below `size`."""
    found = []
    for item in listed:
        text = bytes(item.get("index", b""))
        if not text.isdigit() or len(text) > _INDEX_DIGITS or int(text) >= size:
            raise NotUnderstoodError(f"an item of the answer without an index below {size}")
        found.append(int(text))
    if len(set(found)) != len(found):
        raise NotUnderstoodError("two items of the answer of one index")
    return found


def _placed(listed: Sequence[Fields], size: int) -> list[Fields]:
    """Return all items in the order of their indexes."""
    if len(listed) != size:
        raise NotUnderstoodError(f"{len(listed)} items in the answer to {size}")
    order = indices(listed, size)
    placed = list(listed)
    for item, at in zip(listed, order, strict=True):
        placed[at] = item
    return placed


def _rows(parts: Sequence[Part], listed: Sequence[Fields], size: int) -> list[list[Fields]]:
    placed = _placed(listed, size)
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


def _ranks(parts: Sequence[Part], listed: Sequence[Fields], size: int) -> list[list[Fields]]:
    """Return for each part its own items, in the order of their ranks among all."""
    if len(listed) != size:
        raise NotUnderstoodError(f"{len(listed)} items in the answer to {size}")
    owner = [(number, at) for number, part in enumerate(parts) for at in range(part.size)]
    shares: list[list[Fields]] = [[] for _ in parts]
    for item, index in zip(listed, indices(listed, size), strict=True):
        number, item["index"] = owner[index]
        shares[number].append(item)
    # `top` is 0 if the request wants all items.
    return [share[: part.top or None] for part, share in zip(parts, shares, strict=True)]


def join(part: Part, pieces: Sequence[Part], bodies: Sequence[bytes]) -> bytes:
    """Return the joined answer. Raise NotUnderstoodError, or an error of the decoder."""
    shape = part.shape
    answers: list[tuple[Fields | None, Sequence[Any]]] = []
    start = 0
    for piece, body in zip(pieces, bodies, strict=True):
        answers.append(_answer_of(shape, piece, body, start))
        start += piece.size
    first = answers[0][0]
    joined = [item for _, listed in answers for item in listed]
    if shape.ranked:
        joined = _ranked(shape, [listed for _, listed in answers])[: part.top or None]
    if first is None:
        return _encode(joined)
    first[shape.answer] = joined
    usages = [found["usage"] for found, _ in answers if found is not None and "usage" in found]
    if usages:
        first["usage"] = summed(usages)
    return _encode(first)


def _answer_of(shape: Shape, piece: Part, body: bytes, start: int) -> tuple[Fields | None, Sequence[Any]]:
    """Return the answer to a piece, with its items numbered from `start` on."""
    if not shape.numbered:
        found, plain = in_order(shape, body)
        if len(plain) != piece.size:
            raise NotUnderstoodError(f"{len(plain)} items in the answer to {piece.size}")
        return found, plain
    found, listed = numbered(shape, body)
    if not shape.ranked:
        listed = _placed(listed, piece.size)
        for at, item in enumerate(listed):
            item["index"] = start + at
        return found, listed
    wanted = min(piece.top or piece.size, piece.size)
    if len(listed) != wanted:
        raise NotUnderstoodError(f"{len(listed)} items in the answer, {wanted} were asked for")
    for item, index in zip(listed, indices(listed, piece.size), strict=True):
        item["index"] = start + index
    return found, listed


def _ranked(shape: Shape, lists: Sequence[Sequence[Fields]]) -> list[Fields]:
    """Return one list in descending order of rank, and in ascending order of index for equal ranks.

    If the lists are not in such an order, the result is in the order of the index.
    """
    ranks = [[rank_of(shape, item) for item in listed] for listed in lists]
    if all(listed == sorted(listed, reverse=True) for listed in ranks):
        order = [
            (-rank, item["index"], item)
            for row, listed in zip(ranks, lists, strict=True)
            for rank, item in zip(row, listed, strict=True)
        ]
        order.sort(key=lambda one: one[:2])
        return [item for _, _, item in order]
    return sorted((item for listed in lists for item in listed), key=lambda item: item["index"])


def rank_of(shape: Shape, item: Fields) -> float:
    """Return the value by which an item of a ranked answer is ranked."""
    try:
        rank = float(bytes(item[shape.needs]))
    except ValueError:
        rank = float("nan")
    if not isfinite(rank):
        raise NotUnderstoodError(f"{shape.needs} of an item is no number")
    return rank
