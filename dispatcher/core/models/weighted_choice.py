"""Distribute work over names by weight, identically on every replica: weighted rendezvous hashing.

    score(key, name) = −weight / ln(h)      h in (0, 1), from blake2b over both

The name with the greatest score wins. Each name therefore gets its share of all keys. When a name is added,
keys move only to that name, as long as the weights of the others stay in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import isfinite, log

_BITS = 52  # with the half that is added, the sum is an exact float and never 1
_PARTS = float(2**_BITS)


class Spread:
    """Choice of a name for each key, by shares."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = shares
        self._weighed = [(share, name, _bytes(name)) for name, share in shares.items() if share > 0]

    def chosen(self, key: str) -> str | None:
        """Return the name for a key. `None` if there is no name with a share."""
        if len(self._weighed) == 1:
            return self._weighed[0][1]
        begun = _bytes(key) + b"\0"
        return max(
            ((share / -log(_part(begun + tail)), name) for share, name, tail in self._weighed),
            default=(0.0, None),
        )[1]


def shares(words: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each name. `aliases` are the names by which `weights` may refer to it; the first
    match counts.

    Names without a weight divide equally what the others leave of 1. The shares add up to 1; if all weights
    are 0, they are equal. An invalid weight counts as 0.
    """
    if not words:
        return {}
    named = {
        name: _weight(next(weights[word] for word in own if word in weights))
        for name, own in words.items()
        if not weights.keys().isdisjoint(own)
    }
    rest = max(0.0, 1.0 - sum(named.values())) / max(1, len(words) - len(named))
    found = {name: named.get(name, rest) for name in words}
    total = sum(found.values())
    if total <= 0:
        return dict.fromkeys(words, 1 / len(words))
    return {name: share / total for name, share in found.items()}


def _weight(weight: float) -> float:
    # The bound keeps sums of weights finite.
    return min(weight, 1e6) if isfinite(weight) and weight > 0 else 0.0


def _part(text: bytes) -> float:
    digest = blake2b(text, digest_size=8).digest()
    return ((int.from_bytes(digest) >> (64 - _BITS)) + 0.5) / _PARTS


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
