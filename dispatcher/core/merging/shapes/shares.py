"""Divide the `usage` of one call among its parts, and add up the usage of several calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

COUNT_MOST = 1 << 53
"""Numbers above this are not counts, and are copied."""
DEPTH_MOST = 8

_decode = msgspec.json.Decoder().decode


def is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= COUNT_MOST


def apportioned(count: int, weights: Sequence[int]) -> list[int]:
    """Divide a count into shares in proportion to the weights, by the largest remainder (the first of equal
    ones). The shares add up to the count."""
    total = sum(weights)
    shares = [count * weight // total for weight in weights]
    left = count - sum(shares)
    if left:
        # sorted() is stable, so of equal remainders the first comes first.
        by_remainder = sorted(range(len(weights)), key=lambda at: -(count * weights[at] % total))
        for at in by_remainder[:left]:
            # `left` is less than the number of shares, so each gets at most one more.
            shares[at] += 1
    return shares


def shared(usage: msgspec.Raw, weights: Sequence[int]) -> list[Any]:
    """Return the share of each weight, at any depth. Counts are divided, and other values copied."""
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
    """Return the sum of all numbers. Other values, and fields that only some have, are those of the first
    usage that has them."""
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
