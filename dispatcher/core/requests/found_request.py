"""A request as somebody finds it who looks into the queue. Pure."""

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
    """Never claimed."""
    RETURNED = "returned"
    """Given back to its place in the line."""
    SUSPECT = "suspect"
    """The same, but its owners died: it runs apart from others like it."""
    SEQUENCED = "sequenced"
    """Waits for its turn in its sequence."""
    AWAITING = "awaiting"
    """Waits for its model, which is not served."""
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
"""Each lane's."""
IN_LINE = (Whereabouts.PENDING, Whereabouts.RETURNED, *(OF_LANE[lane] for lane in Lane))
"""What is in line: a claim takes from these, but for lanes that are closed."""


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """Where a request lies at one moment, and what is kept of it there."""

    state: Whereabouts
    member: bytes
    """Its bytes; of a long one, where the whole was not asked for, its head (core/requests/oversize.py)."""
    score: float
    entry: int = 0
    """0: never claimed."""
    deliveries: int = 0
    attempts: int = 0
    refusals: int = 0
    deaths: int = 0
    """Owners that died holding it."""
    units: int = 1
    owner: str = ""
    """Who holds it."""
    at: float | None = None
    """Unix seconds: when a delayed one is due, a lease runs out, or a dead one died."""
    reason: str = ""
    """Why it is dead; of others, what the last try that counted came to."""
    awaits: str = ""
    """The model that it waits for."""

    def name(self, queue: str) -> str:
        """What it is known by where it was copied to: it alone of all that this queue ever held."""
        told = f"{queue}\0{self.entry}\0".encode() + self.member
        return hashlib.sha256(told).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Looked:
    """One page of a look at the queue."""

    found: Sequence[FoundRequest]
    after: str
    """Where the next page begins; empty: this was the last one."""
    looked_at: int
    """How many requests were read for it."""


Words = Sequence[Sequence[bytes]]
"""What a member must hold: of each one spelling."""
_AS_GO = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def spellings(text: str) -> tuple[bytes, ...]:
    """How encoders write that text inside a JSON string: as it is, in ASCII, and as Go does, which escapes
    what HTML could misread. Whoever holds none of them does not name it; whoever does may."""
    told = [json.dumps(text, ensure_ascii=only)[1:-1] for only in (False, True)]
    told += [each.translate(_AS_GO) for each in told]
    told += [each.replace("/", "\\/") for each in told]
    return tuple(dict.fromkeys(each.encode(errors="surrogatepass") for each in told))
