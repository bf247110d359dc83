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
_FRACTION_STEPS = float(2**_BITS)


class WeightedChoice:
    """Choice of a name for each key, by shares."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = shares
        self._weighted_names = [
            (share, name, _encode_text(name)) for name, share in shares.items() if share > 0
        ]

    def choose_name(self, key: str) -> str | None:
        """Return the name for a key. `None` if there is no name with a share."""
        if len(self._weighted_names) == 1:
            return self._weighted_names[0][1]
        key_prefix = _encode_text(key) + b"\0"
        return max(
            (
                (share / -log(_hash_to_fraction(key_prefix + tail)), name)
                for share, name, tail in self._weighted_names
            ),
            default=(0.0, None),
        )[1]


def compute_shares(aliases: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each name. `aliases` are the names by which `weights` may refer to it; the first
    match counts.

    Names without a weight divide equally what the others leave of 1. The shares add up to 1; if all weights
    are 0, they are equal. An invalid weight counts as 0.
    """
    if not aliases:
        return {}
    named = {
        name: _clean_weight(next(weights[word] for word in own if word in weights))
        for name, own in aliases.items()
        if not weights.keys().isdisjoint(own)
    }
    rest = max(0.0, 1.0 - sum(named.values())) / max(1, len(aliases) - len(named))
    unscaled = {name: named.get(name, rest) for name in aliases}
    total = sum(unscaled.values())
    if total <= 0:
        return dict.fromkeys(aliases, 1 / len(aliases))
    return {name: share / total for name, share in unscaled.items()}


def _clean_weight(weight: float) -> float:
    # The bound keeps sums of weights finite.
    return min(weight, 1e6) if isfinite(weight) and weight > 0 else 0.0


def _hash_to_fraction(text: bytes) -> float:
    digest = blake2b(text, digest_size=8).digest()
    return ((int.from_bytes(digest) >> (64 - _BITS)) + 0.5) / _FRACTION_STEPS


def _encode_text(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
