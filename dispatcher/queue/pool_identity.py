"""Identity of the pool to which a dispatcher sends, so that dispatchers of one queue notice that they serve
different pools.

All dispatchers of a queue share one limit, which is right only if all of them send to the same pool: the
limit of the newest reading counts, not the sum of the limits of several pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from dispatcher.common.printable import escape_unprintable, truncate_text

MAX_SHOWN_CHARS = 200


class PoolIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a pool. Only identities of the same kind can be compared."""

    kind: str
    """Source of the identity: the API server (`inferencepool`), or the settings (`gateway`)."""
    id: str
    """UID of the InferencePool, or the URL of the gateway."""
    name: str

    def __str__(self) -> str:
        return truncate_text(escape_unprintable(f"{self.name} ({self.kind} {self.id})"), MAX_SHOWN_CHARS)


def encode_identity(identity: PoolIdentity) -> bytes:
    return msgspec.json.encode(identity)


def decode_identities(shared: Iterable[bytes]) -> list[PoolIdentity]:
    """Return the identities that the dispatchers of a queue have shared. Malformed ones are left out."""
    return list(filter(None, map(_decode_identity, shared)))


def _decode_identity(data: bytes) -> PoolIdentity | None:
    try:
        return msgspec.json.decode(data, type=PoolIdentity)
    except ValueError:  # the base class of the errors of msgspec
        return None


def find_different_pools(pools: Iterable[PoolIdentity]) -> list[PoolIdentity]:
    """Return the pools that certainly differ: the ones of each kind that has several."""
    pools = sorted(set(pools), key=str)
    kinds = Counter(pool.kind for pool in pools)
    return [pool for pool in pools if kinds[pool.kind] > 1]


def describe_different_pools(pools: Iterable[PoolIdentity]) -> str:
    """Return a clause that says which pools share the queue, and why this is a problem. Empty if they do not
    differ."""
    names = ", ".join(map(str, find_different_pools(pools)))
    if not names:
        return ""
    return (
        "dispatchers of different pools work on one queue and share one limit, the one of the newest "
        f"reading, so that pools stay idle: {names}"
    )
