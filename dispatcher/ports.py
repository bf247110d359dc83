"""What the dispatch loop needs of the world: the smallest Protocols, and the values that cross them.

Every time here is on one clock, the running event loop's (``loop.time()``, seconds). An adapter that
speaks to something with another clock (Redis TIME, Prometheus) translates at its boundary, so that no
decision ever compares two clocks. Deadlines alone are Unix seconds: ``Queue.unix_now`` tells the queue's
idea of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from dispatcher.core.lanes import ONE_OF_EACH, Lane
from dispatcher.core.located import FoundRequest, Looked, Whereabouts, Words
from dispatcher.core.outcome import Outcome
from dispatcher.core.outlook import LineAhead
from dispatcher.core.request import Request
from dispatcher.core.submission import CallRefusedError as CallRefusedError
from dispatcher.core.submission import QueueUnavailableError as QueueUnavailableError
from dispatcher.core.submission import Submission as Submission


@dataclass(frozen=True, slots=True)
class Overload:
    """The newest refusal for overload that any replica saw."""

    at: float
    """When the answer came."""
    until: float
    """Nothing is sent before this (Retry-After), whatever a reading says."""
    capacity: bool
    """True: refused for lack of capacity, may teach what fits. False: shutting down, no endpoints."""
    in_flight: int
    """Our requests in flight, all replicas together, when it came."""

    def wait_until(self, most_s: float) -> float:
        """Until when it is waited for by whoever waits no longer than so long."""
        return min(self.until, self.at + most_s)


@dataclass(frozen=True, slots=True)
class Permit:
    """What a claim may assume: the limit, and how old the knowledge behind it is."""

    limit: int
    """The units of live leases over all replicas never pass this because of the claim."""
    read_at: float
    """When the reading behind the limit was taken (the start of its window)."""
    lost: int
    """Units lost so far, as known when the limit was computed; each further one lowers it by one."""
    retry_after_max_s: float = 60.0
    """No refusal is waited for longer, whatever is stored of it."""


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
    lane: Lane | None = None
    """Where it waits until it is claimed, apart from others; None: with all others."""
    units: int = 1
    """What it counts of the limit: what its request weighs, as far as that was known when it was leased."""


@dataclass(frozen=True, slots=True)
class Leases:
    """A count of leases at one moment, in units."""

    at: float
    live: int
    """Of the live leases of all owners."""
    others: int
    """Those among them held by other owners than the caller."""
    young: int
    """Those of `others` claimed or renewed within the last 20 ms: not surely sent yet."""
    lost: int
    """Of leases ever taken back from owners that were gone, silent or late (a counter). When it grows, some
    may have been the caller's: `renew` tells."""
    stray: int = 0
    """Those of `lost` whose owners are not proven to have ended: their requests may run on (a counter)."""


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
class Weighed:
    fits: Sequence[bool]
    """For each lease: it counts what it weighs. False: it is no longer the caller's, and was given back to
    its place, undelivered, unless somebody else has it by now."""
    count: Leases
    shared: Shared


@dataclass(frozen=True, slots=True)
class Claimed:
    leases: Sequence[Lease]
    count: Leases
    shared: Shared
    waiting: int
    """Requests that the next claim could lease, were there room (pending and returned; those of a lane only
    where this call was allowed more of them than it took)."""


@dataclass(frozen=True, slots=True)
class Settlement:
    lease: Lease
    result: bytes
    """The result's JSON, ready for the list."""
    results: str
    """The result list; empty: the queue's default."""
    request_id: str = ""
    request_token: str = ""
    """Both given: the markers of the request are deleted, those under its id where they hold this token."""
    code: str = ""
    """What the result is counted as: the class of the gateway's answer (`2xx`) or an error code."""


class Settled(StrEnum):
    DONE = "done"
    LOST = "lost"
    """The lease had ended by then, or is another's: nothing was written. A repetition after a lost reply says
    this too, unless the adapter remembers."""
    BAD_LIST = "bad-list"
    """The named list has the wrong type, or is one that no producer may name: an INVALID_REQUEST result went
    to the default list and the lease ended (a burial is dead all the same)."""
    TOO_LARGE = "too-large"
    """The queue takes no value as large as this result, though it takes others: a TOO_LARGE result went to
    the list instead and the lease ended."""


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
    """The error result that the consumer sees; empty where no id could be read: none is written."""
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
    """Leases that were taken back; their units are of Leases.lost."""
    due: int
    """Delayed requests that went back to their place."""
    next_due_at: float | None
    """When the next delayed request is due."""
    lost: int
    """As in Leases."""


@dataclass(frozen=True, slots=True)
class Counts:
    pending: int
    """Including those returned to their place, in a lane or not."""
    leased: int
    """Of all lines of the pool."""
    delayed: int
    dead: int
    units: int = field(default=0, repr=False, compare=False)
    """Of all leases: what they count of the limit."""


class Queue(Protocol):
    """The queue as one owner sees it. Each method is one atomic step, safe to repeat.

    All raise QueueUnavailableError, and nothing else that is expected.
    """

    owner: str

    def unix_now(self) -> float:
        """Unix time by the queue's clock, without asking it."""
        ...

    async def refused_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        """Those of these lists that no producer may have its result put into, or that take none, each with
        why, as the end of a sentence ("is …"). Whoever settles with such a list is told BAD_LIST.

        What is fit is remembered for a while; what cannot be learned now counts as fit, and raises nothing.
        """
        ...

    async def claim(
        self,
        most: int,
        nonce: str,
        permit: Permit,
        *,
        lanes: Mapping[Lane, int] = ONE_OF_EACH,
        units: int = 1,
    ) -> Claimed:
        """Lease up to `most` requests, best score first, never past the permit.

        Each counts what it did when it was leased last, or what `weigh` has said since; one that never was
        leased is taken to weigh `units`. One that is heavier than the room there is now ends the claim, so
        that it does not starve behind lighter ones; one heavier than the limit itself is passed over until
        that has risen.

        Room: a permit whose reading is no older than the shared one becomes the shared one (not while
        paused), and its limit holds; by an older permit the smaller of both limits holds. Each is lowered
        by the leases lost since it was computed. A lease counts its units until it is settled, released,
        buried or reclaimed, however long its time has run out. No room at all while paused, before
        Overload.until, or when the newest overload is no older than the permit's reading. What is shared of
        later than now (the queue's clock has stepped back) is of now from then on; a permit's reading that is
        said to be of later is older than any.

        `lanes`: how many requests of each lane may be among them (none of one that is not named). Such a
        request keeps its place in the order, and is passed over where it may not be claimed.
        Members are read in order until they sum to 1 MB (2**20 bytes); the one that passes it is left, but
        a first one is always taken. Equal score and bytes: the one claimed before goes first.

        Who claims has a gateway, whatever room there is: if the caller is the prober its probe has got
        through, and others may probe. So it must not claim before.
        """
        ...

    async def probe(self, nonce: str, permit: Permit) -> Claimed:
        """Lease one request to probe an unreachable gateway, where a claim would have room for it; none while
        a probe runs. (Where others fill the limit one of them will tell, and nothing could be claimed after.)

        The probe runs until its lease ends, however it ends, or its owner claims (`claim`); its owner is
        Shared.prober until then. The same nonce again returns the same lease.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> Renewed:
        """Give the leases lease_s from now, those too that ran out but were not reclaimed yet."""
        ...

    async def weigh(self, weights: Sequence[tuple[Lease, int]], permit: Permit) -> Weighed:
        """Have each lease count what its request weighs (at least 1), which is known once it was read; it is
        remembered for its next lease. By the room that a claim would have; what does not fit is given back
        at once, undelivered. A lighter one always fits, and makes room for those after it.
        """
        ...

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        """Tell the others the newest limit and overload, and learn theirs. `lost` is empty.

        The overload with the newest `at` is kept; `until` never moves back.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | None]:
        """Write each result and end its lease. None: not now, the lease stands; hand it in again.

        One that cannot be written holds up no other. Raises where nothing could be written.
        """
        ...

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]: ...

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled | None]:
        """Set the requests aside as dead, with their results as `settle` writes them."""
        ...

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """For each (request id, its token): was it cancelled, by its token or by a marker under its id that
        equals the token?"""
        ...

    async def sweep(self) -> Swept:
        """Return leases whose owners are gone, or that ran out, to their old place, and delayed requests that
        are due to pending.

        An owner is gone when that is proven, or when it was silent for its owner_timeout_s: each claim,
        renew, share and sweep shows that it lives. After a sweep that comes more than 2 s, or half of this
        owner's owner_timeout_s, after the last one (the queue was away, or all owners were) no silence
        counts for the longest owner_timeout_s of those who were heard of, and after one that comes more
        than lease_s/3 after it no lease runs out for lease_s/3: living owners speak first, so that only
        what dead ones held counts as lost. So sweep each second, and at least every sixth of either,
        however short.
        """
        ...

    async def expired(self, most: int) -> Sequence[Expired]:
        """Unleased requests that may be past their deadline (by score; the caller verifies by parsing).

        Each call goes on where the last one ended, and starts over at the end, so that scores which are no
        deadlines hide no other request for ever.
        """
        ...

    async def expire(self, items: Sequence[tuple[Expired, Settlement]]) -> int:
        """Write their results and remove them, those that still lie where they lay; how many that were.

        The lease of such a settlement is not looked at.
        """
        ...

    async def counts(self) -> Counts: ...

    async def line(self, rate: float | None = None, service_s: float = 0.0) -> LineAhead:
        """How what is pending lies, who works on it, and how much was ever settled; reads only.

        Spans are narrow where it decides who misses its deadline at this rate, so that `outlook.at_risk` is
        off by no more than a few hundredths; without a rate they are coarse. At most 50 replicas are named,
        and only the first request of each priority is read. Replicas that only observe are not seen.
        """
        ...

    async def wait_for_work(self) -> None:
        """Return when work may have arrived: a producer woke us, or poll_s has passed and there is some.

        A wake-up since the last call is not missed: then it returns at once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Dead:
    """A request that was put aside."""

    entry: int
    member: bytes
    score: float
    reason: str
    died_at: float
    """Unix seconds."""
    deliveries: int
    attempts: int
    refusals: int
    losses: int


class Desk(Protocol):
    """The queue as producers and operators see it. Raises QueueUnavailableError like Queue."""

    async def submit(self, submissions: Sequence[Submission]) -> int:
        """Put them into the queue and wake the dispatchers; how many were not pending already."""
        ...

    async def cancel(self, request_id: str, request_token: str = "", *, found: bool = False) -> bool:
        """Have those cancelled that are active under the id, or the one with that token; False where there is
        none. `found`: it was seen in the queue with that token, whoever submitted it."""
        ...

    async def pause(self, by: str, why: str) -> None: ...

    async def resume(self) -> None: ...

    async def paused(self) -> tuple[str, str] | None:
        """Who paused it and why; None when nobody did."""
        ...

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        """Score and member of the first that a claim would take, those of all lanes included, in order."""
        ...

    async def lying(self, state: Whereabouts, most: int, after: str = "", *, whole: bool = False) -> Looked:
        """A page in order, by rank: what leaves meanwhile shifts it. `whole`: members with all bytes."""
        ...

    async def near(self, request_id: str, after: str = "") -> Looked:
        """A page of those that hold this id and are found at little cost: of our client, or leased."""
        ...

    async def search(
        self, words: Words, after: str = "", *, entries_only: bool = False, whole: bool = False
    ) -> Looked:
        """A page of a walk over all, or over those claimed at least once: those that hold of each word one
        spelling. What is in the queue all the while is found; some are met twice. `whole`: as in `lying`."""
        ...

    async def ahead(self, found: FoundRequest) -> int | None:
        """How many lie before it in line; None where it does not wait there (any more)."""
        ...

    async def restore(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        """Take over requests found in that other queue, none of them leased, each to the place where it lay;
        how many are new. Each is taken over once in a week, however often it is handed in."""
        ...

    async def read_results(self, name: str, most: int, after: int = 0) -> Sequence[bytes]:
        """What lies in a result list behind so many, the oldest first, about 1 MB; nothing is taken."""
        ...

    async def take_result(self, name: str, result: bytes) -> bool:
        """Remove the oldest that equals it; False where it is gone."""
        ...

    async def counts(self) -> Counts: ...

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        """The dead with an entry above `after`, by entry."""
        ...

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        """Those with the highest entries, the highest first."""
        ...

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        """Accept them anew with this deadline (in the member and in the score, the priority kept)."""
        ...

    async def dead_purge(self, entries: Sequence[int] | None = None) -> int:
        """Forget them; None: all."""
        ...


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What came of one try."""

    outcome: Outcome
    sent_at: float
    """When the connection it went over was there; `ended_at` where none ever was."""
    ended_at: float
    opened_s: float | None = None
    """How long opening that connection took; None: it was there before, or none ever was."""


class Gateway(Protocol):
    """The inference gateway: one try of one request."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> Forwarded:
        """Try once. `token`: names this try, and no other one. `deadline`: loop time at which it ends,
        whatever happens. `may_send`: asked right before the first byte of each sending leaves, for it may be
        long until then; else it is Unsent.

        Never raises for what a network or a server can do: that is an Outcome. Cancelling it closes the
        connection, which is the gateway's cue to stop.
        """
        ...

    def connected(self, token: str) -> float | None:
        """Since when a running try holds a connection; None: it holds none (yet)."""
        ...

    def resize(self, limit: int) -> None:
        """Keep no more connections than `limit` requests can use at once; 0: only those in use."""
        ...
