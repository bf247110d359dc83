"""A request that was found in the queue by an operator or a producer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from dispatcher.requests.lanes import Lane, rank_in_queue

if TYPE_CHECKING:
    from collections.abc import Mapping


class RequestLocation(StrEnum):
    """A place in the queue. A closed lane of a feature is one, too, and is named as its set in Redis
    (`queue.admin_contract.WAITING_LOCATIONS`)."""

    PENDING = "pending"
    """The request was never claimed."""
    RETURNED = "returned"
    """The request was returned to its place in the queue."""
    SUSPECT = "suspect"
    """The request was returned because its owners died. Only a few suspects run at once."""
    STARTED = "started"
    """Earlier calls have generated a part of the answer, and the request waits for its next call."""
    DELAYED = "delayed"
    LEASED = "leased"
    DEAD = "dead"


LOCATION_BY_LANE: Mapping[Lane, RequestLocation] = MappingProxyType(
    {
        Lane.SUSPECTS: RequestLocation.SUSPECT,
        Lane.STARTED: RequestLocation.STARTED,
    }
)
"""The location for each lane."""
CLAIMABLE_LOCATIONS = (
    RequestLocation.PENDING,
    RequestLocation.RETURNED,
    *(LOCATION_BY_LANE[lane] for lane in Lane),
)
"""Locations from which claims take requests."""


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A request at one moment, with its location and the state that the queue keeps for it."""

    location: str
    """A `RequestLocation`, or the name of a closed lane."""
    member: bytes
    """The bytes of the request. For a long member, unless the whole was asked for, its first bytes
    (requests/oversize.py)."""
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
    missing_model: str = ""
    """Model for which the request waits."""

    @property
    def rank(self) -> tuple[float, bool]:
        """Rank of a waiting request among those at other locations (`lanes.rank_in_queue`)."""
        return rank_in_queue(self.score, Lane.STARTED if self.location is RequestLocation.STARTED else None)

    def make_copy_id(self, queue: str) -> str:
        """Return the id of the request for the queue it is copied to. The id is unique among all requests of
        this queue."""
        identity = f"{queue}\0{self.entry}\0".encode() + self.member
        return hashlib.sha256(identity).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class LookupPage:
    """One page of a lookup in the queue."""

    requests: Sequence[FoundRequest]
    after: str
    """Cursor of the next page. Empty if this is the last page."""
    examined_count: int
    """Number of requests that were read for this page."""


SearchTerms = Sequence[Sequence[bytes]]
"""Terms that a member must contain: for each term, one of its spellings."""
_GO_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def encode_spellings(text: str) -> tuple[bytes, ...]:
    """Return the ways in which JSON encoders write this text inside a string: unchanged, in ASCII, and like
    Go, which escapes characters that have a meaning in HTML.

    A member with none of these spellings does not contain the text. A member with one of them may contain it.
    """
    spellings = [json.dumps(text, ensure_ascii=only)[1:-1] for only in (False, True)]
    spellings += [each.translate(_GO_ESCAPES) for each in spellings]
    # PHP and some other encoders escape slashes.
    spellings += [each.replace("/", "\\/") for each in spellings]
    return tuple(dict.fromkeys(each.encode(errors="surrogatepass") for each in spellings))
