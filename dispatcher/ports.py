"""What the dispatch loop needs of the world: the smallest Protocols, and the values that cross them.

Every time here is on one clock, the running event loop's (``loop.time()``, seconds). An adapter that
speaks to something with another clock (Redis TIME, Prometheus) translates at its boundary, so that no
decision ever compares two clocks. Deadlines alone are Unix seconds: ``Queue.unix_now`` tells the queue's
idea of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dispatcher.core.outcome import Outcome
from dispatcher.core.request import Request


class QueueUnavailableError(Exception):
    """The queue cannot be reached, or refuses to work for now (loading, read-only, out of memory).

    The message is one sentence for an operator. A call that raised this may or may not have happened:
    every step can be repeated (claims by nonce, the others because the lease's token fences them).
    """


@dataclass(frozen=True, slots=True)
class Overload:
    """The newest refusal for overload that any replica saw."""

    at: float
    """When the answer came."""
    until: float
    """Nothing is sent before this (Retry-After), whatever a reading says."""
    capacity: bool
    """True: refused for lack of capacity, teaches a ceiling. False: shutting down, no endpoints."""
    in_flight: int
    """Our requests in flight, all replicas together, when it came."""


@dataclass(frozen=True, slots=True)
class Permit:
    """What a claim may assume: the limit, and how old the knowledge behind it is."""

    limit: int
    """Live leases over all replicas never pass this because of the claim."""
    read_at: float
    """When the reading behind the limit was taken (the start of its window)."""
    lost: int
    """Leases lost so far, as known when the limit was computed; each further loss lowers it by one."""


@dataclass(frozen=True, slots=True)
class Lease:
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


@dataclass(frozen=True, slots=True)
class Leases:
    """A count of leases at one moment."""

    at: float
    live: int
    """Live leases of all owners."""
    others: int
    """Those among them held by other owners than the caller."""
    young: int
    """Those of `others` claimed or renewed within the last 20 ms: not surely sent yet."""
    lost: int
    """Leases that ever ended without an answer because their time ran out (a counter)."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the replicas of one queue tell each other through it."""

    limit: int | None
    """The newest limit any replica claimed by; None before the first."""
    read_at: float
    """When the reading behind that limit was taken."""
    overload: Overload | None
    prober: str | None
    """The owner that may probe an unreachable gateway now."""
    paused: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    leases: Sequence[Lease]
    count: Leases
    shared: Shared
    waiting: int
    """Requests that could be claimed now, were there room (pending and returned)."""


@dataclass(frozen=True, slots=True)
class Settlement:
    lease: Lease
    result: bytes
    """The result's JSON, ready for the list."""
    results: str
    """The result list; empty: the queue's default."""
    request_id: str = ""
    request_token: str = ""
    """Both given: request-active/request-cancel of the id are deleted afterwards where they hold this token."""


class Settled(StrEnum):
    DONE = "done"
    LOST = "lost"
    """The lease was another's by then: nothing was written."""
    BAD_LIST = "bad-list"
    """The named list has the wrong type, or is one of the queue's own keys: an INVALID_REQUEST result went
    to the default list and the lease ended."""


@dataclass(frozen=True, slots=True)
class Release:
    lease: Lease
    delay_s: float = 0.0
    """0: back to its place at once; else delayed."""
    attempt: bool = False
    """Counts as an attempt (Failed)."""
    refusal: bool = False
    """Counts as a refusal (Overloaded)."""
    undelivered: bool = False
    """The delivery is taken back: it was given back untouched (drain, unreachable), not lost."""


@dataclass(frozen=True, slots=True)
class Burial:
    settlement: Settlement
    """The error result that the consumer sees."""
    reason: str
    """One sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Renewed:
    lost: Sequence[int]
    """Entries whose lease is no longer the caller's."""
    count: Leases
    shared: Shared


@dataclass(frozen=True, slots=True)
class Expired:
    """A request past its deadline, not leased: where it lies, and its bytes."""

    place: str
    """Opaque to all but the queue."""
    member: bytes


@dataclass(frozen=True, slots=True)
class Swept:
    reclaimed: int
    due: int
    next_due_at: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    pending: int
    """Including those returned to their place."""
    leased: int
    delayed: int
    dead: int


class Queue(Protocol):
    """The queue as one owner sees it. Each method is one atomic step, safe to repeat.

    All raise QueueUnavailableError, and nothing else that is expected.
    """

    owner: str

    def unix_now(self) -> float:
        """Unix time by the queue's clock, without asking it."""
        ...

    async def claim(self, most: int, nonce: str, permit: Permit, *, suspects: int = 1) -> Claimed:
        """Lease up to `most` requests, best score first, never past the permit.

        The same nonce again returns the same leases. `suspects`: how many requests whose owners died
        twice or more may be among them.
        """
        ...

    async def probe(self, nonce: str) -> Claimed:
        """Lease one request to probe an unreachable gateway; none while another owner probes."""
        ...

    async def renew(self, leases: Sequence[Lease]) -> Renewed: ...

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        """Tell the others the newest limit and overload, and learn theirs. `lost` is empty."""
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled]: ...

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]: ...

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled]: ...

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """For each (request id, its token): does its cancel marker equal the token?"""
        ...

    async def sweep(self) -> Swept:
        """Return leases that ran out to their old place, and delayed requests that are due to pending."""
        ...

    async def expired(self, most: int) -> Sequence[Expired]:
        """Unleased requests that may be past their deadline (by score; the caller verifies by parsing)."""
        ...

    async def expire(self, items: Sequence[tuple[Expired, Settlement]]) -> int:
        """Write their results and remove them, those that still lie where they lay; how many that were."""
        ...

    async def counts(self) -> Counts: ...

    async def wait_for_work(self) -> None:
        """Return when work may have arrived: a producer woke us, or poll_s has passed and there is some."""
        ...


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What came of one try."""

    outcome: Outcome
    sent_at: float
    ended_at: float


class Gateway(Protocol):
    """The inference gateway: one try of one request."""

    async def forward(self, request: Request, *, deadline: float) -> Forwarded:
        """Try once. `deadline`: loop time at which the try ends, whatever happens.

        Never raises for what a network or a server can do: that is an Outcome. Cancelling it closes the
        connection, which is the gateway's cue to stop.
        """
        ...
