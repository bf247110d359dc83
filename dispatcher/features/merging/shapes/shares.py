"""Divide the `usage` of one call among its parts, and add up the usage of several calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MAX_COUNT = 1 << 53
"""Numbers above this are not counts, and are copied."""
MAX_DEPTH = 8

_decode = msgspec.json.Decoder().decode


def is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= MAX_COUNT


def apportion_count(count: int, weights: Sequence[int]) -> list[int]:
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


def share_usage(usage: msgspec.Raw, weights: Sequence[int]) -> list[Any]:
    """Return the share of each weight, at any depth. Counts are divided, and other values copied."""
    return _share_value(_decode(usage), weights, 0)


def _share_value(value: Any, weights: Sequence[int], depth: int) -> list[Any]:
    if isinstance(value, dict) and depth < MAX_DEPTH:
        shares: list[dict[str, Any]] = [{} for _ in weights]
        for name, inner in value.items():
            for share, part in zip(shares, _share_value(inner, weights, depth + 1), strict=True):
                share[name] = part
        return shares
    if is_count(value):
        return apportion_count(value, weights)
    if isinstance(value, float):
        total = sum(weights)
        return [value * weight / total for weight in weights]
    return [value] * len(weights)


def sum_usages(usages: Sequence[msgspec.Raw]) -> Any:
    """Return the sum of all numbers. Other values, and fields that only some have, are those of the first
    usage that has them."""
    total = _decode(usages[0])
    for usage in usages[1:]:
        total = _sum_values(total, _decode(usage), 0)
    return total


def _sum_values(left: Any, right: Any, depth: int) -> Any:
    if isinstance(left, dict) and isinstance(right, dict) and depth < MAX_DEPTH:
        return {
            name: _sum_values(left[name], right[name], depth + 1) if name in left and name in right else value
            for name, value in {**right, **left}.items()
        }
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if numbers and bool not in (type(left), type(right)):
        return left + right
    return right if left is None else left
