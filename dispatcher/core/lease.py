"""A lease as its owner knows it. Pure.

There is one for each delivery of each request, and twice so many where requests wait for their turn: a frozen
dataclass with as many fields takes five times as long to make.
"""

from __future__ import annotations

import msgspec

from dispatcher.core.lanes import Lane


class Lease(msgspec.Struct, frozen=True):
    """One request, held by one owner until it is settled, released, buried, or its time runs out."""

    entry: int
    token: str
    member: bytes
    score: float
    deliveries: int
    """How often it has been claimed, this time included."""
    attempts: int
    """Tries that count (Failed)."""
    refusals: int
    """Overload answers to this request."""
    losses: int
    """Owners that died holding it since it runs apart from other suspects."""
    lane: Lane | None = None
    """Where it waits until it is claimed, apart from others; None: with all others."""
    units: int = 1
    """What it counts of the limit: what its request weighs, as far as that was known when it was leased."""
    last_try: str = ""
    """What the last try that counted came to; empty: there was none, or of a version that does not say."""

    def with_member(self, member: bytes) -> Lease:
        return msgspec.structs.replace(self, member=member)

    def counting(self, units: int) -> Lease:
        return msgspec.structs.replace(self, units=units)

    def after(self, last_try: str) -> Lease:
        return msgspec.structs.replace(self, last_try=last_try)
