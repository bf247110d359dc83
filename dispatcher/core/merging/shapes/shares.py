"""`usage` of one call shared out among those who were in it, and that of several calls summed up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

COUNT_MOST = 1 << 53
"""A number above is no count, and is copied."""
DEPTH_MOST = 8

_decode = msgspec.json.Decoder().decode


def is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= COUNT_MOST


def apportioned(count: int, weights: Sequence[int]) -> list[int]:
    """A count in as many parts as there are weights, in proportion to them, by the largest remainder (the
    first of equal ones): they sum up to it."""
    total = sum(weights)
    shares = [count * weight // total for weight in weights]
    left = count - sum(shares)
    if left:
        by_remainder = sorted(range(len(weights)), key=lambda at: -(count * weights[at] % total))
        for at in by_remainder[:left]:
            shares[at] += 1
    return shares


def shared(usage: msgspec.Raw, weights: Sequence[int]) -> list[Any]:
    """For each weight its share of every count in there, however deep; what is no count is copied."""
    return _shared(_decode(usage), weights, 0)


def _shared(value: Any, weights: Sequence[int], depth: int) -> list[Any]:
    if isinstance(value, dict) and depth < DEPTH_MOST:
        shares: list[dict[str, Any]] = [{} for _ in weights]
        for name, inner in value.items():
            for share, part in zip(shares, _shared(inner, weights, depth + 1), strict=True):
                share[name] = part
        return shares
    if is_count(value):
        return apportioned(value, weights)
    if isinstance(value, float):
        total = sum(weights)
        return [value * weight / total for weight in weights]
    return [value] * len(weights)


def summed(usages: Sequence[msgspec.Raw]) -> Any:
    """Every number that is in there, added up; what is none, and what only some have, as the first has it."""
    total = _decode(usages[0])
    for usage in usages[1:]:
        total = _sum(total, _decode(usage), 0)
    return total


def _sum(one: Any, other: Any, depth: int) -> Any:
    if isinstance(one, dict) and isinstance(other, dict) and depth < DEPTH_MOST:
        return {
            name: _sum(one[name], other[name], depth + 1) if name in one and name in other else value
            for name, value in {**other, **one}.items()
        }
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if numbers and bool not in (type(one), type(other)):
        return one + other
    return other if one is None else one
