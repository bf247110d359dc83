"""A request that was found in the queue by an operator or a producer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from dispatcher.core.requests.lanes import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping


class Whereabouts(StrEnum):
    PENDING = "pending"
    """The request was never claimed."""
    RETURNED = "returned"
    """The request was returned to its place in the queue."""
    SUSPECT = "suspect"
    """The request was returned because its owners died. Only a few suspects run at once."""
    SEQUENCED = "sequenced"
    """The request waits for its turn in its sequence."""
    AWAITING = "awaiting"
    """The request waits for its model, which is not served."""
    DELAYED = "delayed"
    LEASED = "leased"
    DEAD = "dead"


OF_LANE: Mapping[Lane, Whereabouts] = MappingProxyType(
    {
        Lane.SUSPECTS: Whereabouts.SUSPECT,
        Lane.SEQUENCED: Whereabouts.SEQUENCED,
        Lane.ABSENT: Whereabouts.AWAITING,
    }
)
"""The location for each lane."""
IN_LINE = (Whereabouts.PENDING, Whereabouts.RETURNED, *(OF_LANE[lane] for lane in Lane))
"""Locations of requests that wait in the queue. Claims take from these, except from closed lanes."""


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A request at one moment, with its location and the state that the queue keeps for it."""

    state: Whereabouts
    member: bytes
    """The bytes of the request. For a long member, unless the whole was asked for, its first bytes
    (core/requests/oversize.py)."""
    score: float
    entry: int = 0
    """Entry number. 0 if the request was never claimed."""
    deliveries: int = 0
    attempts: int = 0
    refusals: int = 0
    deaths: int = 0
    """Number of owners that died while they held the request."""
    units: int = 1
    owner: str = ""
    """Owner that holds the lease."""
    at: float | None = None
    """Unix time at which a delayed request is due, a lease runs out, or a dead request died."""
    reason: str = ""
    """Reason why the request is dead. For other requests, the result of the last failed attempt."""
    awaits: str = ""
    """Model for which the request waits."""

    def name(self, queue: str) -> str:
        """Return the id of the request for the queue it is copied to. The id is unique among all requests of
        this queue."""
        told = f"{queue}\0{self.entry}\0".encode() + self.member
        return hashlib.sha256(told).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Looked:
    """One page of a lookup in the queue."""

    found: Sequence[FoundRequest]
    after: str
    """Cursor of the next page. Empty if this is the last page."""
    looked_at: int
    """Number of requests that were read for this page."""


Words = Sequence[Sequence[bytes]]
"""Terms that a member must contain: for each term, one of its spellings."""
_AS_GO = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def spellings(text: str) -> tuple[bytes, ...]:
    """Return the ways in which JSON encoders write this text inside a string: unchanged, in ASCII, and like
    Go, which escapes characters that have a meaning in HTML.

    A member with none of these spellings does not contain the text. A member with one of them may contain it.
    """
    told = [json.dumps(text, ensure_ascii=only)[1:-1] for only in (False, True)]
    told += [each.translate(_AS_GO) for each in told]
    # PHP and some other encoders escape slashes.
    told += [each.replace("/", "\\/") for each in told]
    return tuple(dict.fromkeys(each.encode(errors="surrogatepass") for each in told))
