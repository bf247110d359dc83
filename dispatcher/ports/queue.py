"""The queue as one dispatcher sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dispatcher.core.requests.forecast import LineAhead
from dispatcher.core.requests.lanes import ONE_OF_EACH, Lane
from dispatcher.core.requests.queue_counts import Counts
from dispatcher.core.requests.request import parse
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import Goes, SequenceTerms, TurnEnd, Verdict
from dispatcher.core.sequences.turns import Turn
from dispatcher.core.value import Value
from dispatcher.ports.model_registry import ModelBoard


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


class Permit(Value, frozen=True):
    """What a claim may assume: the limit, and how old the knowledge behind it is."""

    limit: int
    """The units of live leases over all replicas, and those apart, never pass this because of the claim."""
    read_at: float
    """When the reading behind the limit was taken (the start of its window)."""
    lost: int
    """Units lost so far, as known when the limit was computed; each further one lowers it by one."""
    retry_after_max_s: float = 60.0
    """No refusal is waited for longer, whatever is stored of it."""
    apart: int = 0
    """Units of the limit that are under way, or about to be, and are none of any lease."""


class Lease(Value, frozen=True):
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


class Leases(Value, frozen=True):
    """A count of leases at one moment, in units."""

    at: float
    live: int
    """Of the live leases of all owners."""
    others: int
    """Those among them held by other owners than the caller."""
    young: int
    """Units of `others` that were claimed or renewed within the last 20 ms and may not have been sent yet."""
    lost: int
    """Of leases ever taken back from owners that were gone, silent or late (a counter). When it grows, some
    may have been the caller's: `renew` tells."""
    stray: int = 0
    """Those of `lost` whose owners are not proven to have ended: their requests may run on (a counter)."""


class Shared(Value, frozen=True):
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
class LinedUp:
    verdicts: Sequence[Verdict]
    """For each lease."""
    count: Leases
    shared: Shared


class Claimed(Value, frozen=True):
    leases: Sequence[Lease]
    count: Leases
    shared: Shared
    waiting: int
    """Requests that the next claim could lease, were there room (pending and returned; those of a lane only
    where this call was allowed more of them than it took)."""


class Settlement(Value, frozen=True):
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
    turn: TurnEnd | None = None
    """What it leaves to its sequence, whether it was lined up or not. None: it is of none, or was refused by
    it. (A request that was lined up ends its turn all the same, as one that has not failed.)"""


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
class HandedOver:
    answers: Sequence[Settled | None]
    """As `settle` gives them."""
    claimed: Claimed | None
    """What came next of their sequences, and is leased to the caller. None: that is not known, or nothing
    could come; a claim by the same nonce tells it."""
    goes: Sequence[Goes] = ()
    """For each of those leases, as `line_up` would say."""


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
    last_try: str = ""
    """The outcome of the try in words. If it is empty, the text of an earlier try stays."""
    awaits: str = ""
    """The model that it waits for, which is not served: in a lane that no claim takes from, until `recall`,
    and no delay counts. As the head of its sequence it stays that. Empty: it waits for none."""
    request_id: str = ""
    request_token: str = ""
    """What cancels it while it awaits. Empty: as the member of the lease says, if it is there."""

    @property
    def cancelled_by(self) -> tuple[str, str]:
        """Id and token."""
        if self.request_token or not self.lease.member:
            return self.request_id, self.request_token
        read = parse(self.lease.member)
        return read.id or "", read.token


@dataclass(frozen=True, slots=True)
class Recalled:
    moved: int
    """Requests that may be claimed now."""
    left: int
    """Those that wait still for one of these models: call again."""


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
    last_try: str = ""
    """As in Lease, and so are those below."""
    attempts: int = 0
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class Unserved:
    """A request of a sequence that will not go any more: what its result is to say."""

    item: Expired
    code: ErrorCode
    why: str
    """One sentence."""


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
    turns: int = 0
    """Requests of sequences whose turn has come by that, and that may be claimed now."""
    revoked: int = 0
    """Requests that waited for their model and were cancelled: they may be claimed now, to be answered."""


class Queue(ModelBoard, Protocol):
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

        Each counts what it did when it was leased last, or what `weigh` has said since, and 1 at least; one
        that never was leased is taken to weigh `units`, which may be 0: it is weighed before it is sent.
        Where no unit is free, nothing more is leased. One that is heavier than the room there is now ends the
        claim, so that it does not starve behind lighter ones; one heavier than the limit itself is passed
        over until that has risen.

        Room: a permit whose reading is no older than the shared one becomes the shared one (not while
        paused), and its limit holds; by an older permit the smaller of both limits holds. Each is lowered
        by the leases lost since it was computed. A lease counts its units until it is settled, released,
        buried or reclaimed, however long its time has run out. No room at all while paused, before
        Overload.until, or when the newest overload is no older than the permit's reading. What is shared of
        later than now (the queue's clock has stepped back) is of now from then on; a permit's reading that is
        said to be of later is older than any.

        `lanes`: how many requests of each lane may be among them (none of one that is closed or not named).
        Such a request keeps its place in the order, and is passed over where it may not be claimed.
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
        """Have each lease count what its request weighs, which is known once it was read, and is remembered
        for its next lease. One that travels with another, which counts for both, weighs 0 while it is held.
        By the room that a claim would have; what does not fit is given back at once, undelivered. A lighter
        one always fits, and makes room for those after it.
        """
        ...

    async def line_up(self, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms) -> LinedUp:
        """Whose turn it is of leased requests that are of sequences, once they were read. `terms` hold from
        now on, also where there is no request. Ask it of each such
        lease, before anything else may end it, and again for each new lease of a request.

        `Goes`: nothing of its sequence but this request goes until that has ended for good (`settle`,
        `bury`, `expire`); while it is released, reclaimed or delayed it stays the one. `Waits`: it was given
        back, undelivered, and lies in a lane that no claim takes from, until its turn. `Barred`: its lease
        stays the caller's, who settles it. In the order given; the same call again says the same of those
        that go and wait, and judges anew what was barred.
        """
        ...

    async def unserved(self, most: int) -> Sequence[Unserved]:
        """Requests of sequences that will not go any more, about 1 MB of them (one at least): hand them to
        `expire` with their results. One whose member cannot be read has none (`Settlement.result` empty)."""
        ...

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        """Tell the others the newest limit and overload, and learn theirs. `lost` is empty.

        The overload with the newest `at` is kept; `until` never moves back.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | None]:
        """Write each result and end its lease. None: not now, the lease stands; hand it in again. By the
        same step the next of a sequence may be claimed: whoever settled one claims again.

        One that cannot be written holds up no other. Raises where nothing could be written.
        """
        ...

    async def hand_over(self, settlements: Sequence[Settlement], nonce: str, permit: Permit) -> HandedOver:
        """`settle`, and in the same step lease to the caller those whose turn comes by that, as far as a
        `claim` by this permit would have leased just them: in their order, from the first for which there is
        no room, or before which something else is to go, they wait for a claim as ever (and so do those that
        wait in a lane, or are too large). `nonce`: one that no claim has had."""
        ...

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]: ...

    async def recall(self, models: Sequence[str]) -> Recalled:
        """Bring back requests that wait for one of these models, which is served now or is asked for no
        longer: some hundreds a call, the best first, each to its old place. Any owner may, at any time, and
        several at once. What waits for others is not looked at. After a lost reply `moved` is of the
        repetition alone."""
        ...

    async def awaited(self) -> Mapping[str, int]:
        """How many requests wait for which model (by `lanes.awaited_as`); of 1,000 models at the most, and
        then of others with each call."""
        ...

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled | None]:
        """Set the requests aside as dead, with their results as `settle` writes them."""
        ...

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """For each (request id, its token): was it cancelled, by its token or by a marker under its id that
        equals the token?"""
        ...

    async def sweep(self) -> Swept:
        """Return leases whose owners are gone, or that ran out, to their old place, and delayed requests that
        are due to pending; end what time ends of sequences; bring back what was cancelled of the requests
        that wait for their model (a page of them a call).

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
