"""Work spread over names by weight, the same on every replica: weighted rendezvous hashing. Pure.

    score(key, name) = −weight / ln(h)      h in (0, 1), out of blake2b over both

The greatest score wins. So a name wins its weight's share of all keys, and when one is added keys move to it
and between no others, as long as the weights of the others stay in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import isfinite, log

_BITS = 52  # with the half that is added it is a float without rounding, and so never 1
_PARTS = float(2**_BITS)


class Spread:
    """Names with their shares, and which of them each key goes to."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = shares
        self._weighed = [(share, name, _bytes(name)) for name, share in shares.items() if share > 0]

    def chosen(self, key: str) -> str | None:
        """None: there is nothing to choose from."""
        if len(self._weighed) == 1:
            return self._weighed[0][1]
        begun = _bytes(key) + b"\0"
        return max(
            ((share / -log(_part(begun + tail)), name) for share, name, tail in self._weighed),
            default=(0.0, None),
        )[1]


def shares(words: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, float]:
    """The share of each name. `words`: by which `weights` may mean it, the first that is there counts.

    Who is not named gets an equal part of what the others leave of 1. All together are 1; where all would be
    0 they are equal. A weight that is no share counts as none.
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
    return min(weight, 1e6) if isfinite(weight) and weight > 0 else 0.0


def _part(text: bytes) -> float:
    digest = blake2b(text, digest_size=8).digest()
    return ((int.from_bytes(digest) >> (64 - _BITS)) + 0.5) / _PARTS


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
