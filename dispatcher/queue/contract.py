"""The queue as one dispatcher process uses it.

A request is stored as its *member* (the bytes that the producer wrote) with a *score* (its order). An owner
claims it, which creates a *lease*. The lease ends in one of three ways: it is settled (the result is
written), released (the request returns to the queue), or moved to the dead-letter set. If its owner dies or
is late, `Queue.sweep` takes the lease back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dispatcher.common.value import Value
from dispatcher.requests.forecast import QueueSnapshot
from dispatcher.requests.lanes import ONE_PER_LANE, Lane
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.request import parse_member
from dispatcher.requests.submission import QueueUnavailableError

if TYPE_CHECKING:
    from dispatcher.queue.keys import QueueNames

T = TypeVar("T")

MAX_PROGRESS_BYTES = 16 << 20
"""Longest progress that a queue stores (`Release.progress`)."""


@dataclass(frozen=True, slots=True)
class Overload:
    """The newest overload refusal of the gateway that any replica received."""

    refused_at: float
    """Time at which the refusal arrived."""
    retry_at: float
    """Time before which nothing is sent (Retry-After), whatever a reading says."""
    is_out_of_capacity: bool
    """True if the pool was full, which teaches how much fits. False if it was shutting down or had no
    endpoints."""
    in_flight: int
    """Batch requests of all replicas that were in flight at that time."""

    def bounded_retry_at(self, max_wait_s: float) -> float:
        """Return the time until which to wait, at most `max_wait_s` after the refusal."""
        return min(self.retry_at, self.refused_at + max_wait_s)


class Permit(Value, frozen=True):
    """Conditions of a claim: the limit, and how old the knowledge behind it is."""

    limit: int
    """Maximum units of all live leases of all replicas together with `unleased_units`."""
    read_at: float
    """Time of the reading behind the limit (the start of its window)."""
    lost_units: int
    """Value of `LeaseCounts.lost_units` when the limit was computed. Each unit that was lost since lowers the
    limit by one."""
    retry_after_max_s: float = 60.0
    """Longest time to wait after an overload refusal, whatever Retry-After is stored."""
    unleased_units: int = 0
    """Units that are in use, or about to be, and belong to no lease."""


class Lease(Value, frozen=True):
    """The right to run one request, held by one owner until the lease ends."""

    entry_id: int
    """Number of the request, given with its first claim. The pool never uses a number twice."""
    token: str
    """Random bits that name this lease. A write with another token has no effect."""
    member: bytes
    score: float
    deliveries: int
    """Number of times that the request was claimed, this time included."""
    failed_attempts: int
    """Attempts that count as failed (`Failed`)."""
    refusals: int
    """Overload refusals of this request."""
    deaths_as_suspect: int
    """Owners that died while they held the request, counted since it became a suspect."""
    lane: Lane | None = None
    """Lane in which the request waited. `None` if it waited among all others."""
    units: int = 1
    """Units that the lease counts in the limit, as far as the weight of the request was known."""
    last_attempt: str = ""
    """Outcome of the last counted attempt. Empty if there was none, or an older dispatcher stored none."""
    progress: bytes = b""
    """Output of earlier calls for the request, as its last release with progress stored it. Empty if there
    is none."""


class LeaseCounts(Value, frozen=True):
    """Units of all leases at one moment."""

    counted_at: float
    live_units: int
    """Units of live leases of all owners."""
    other_owners_units: int
    """Part of `live_units` that other owners hold."""
    just_leased_units: int
    """Part of `other_owners_units` that was claimed or renewed in the last 20 ms, and may not have been sent
    yet."""
    lost_units: int
    """Units of all leases ever taken back from owners that were gone, silent or late (a counter). If it
    grows, some may have been leases of the caller: `renew` says which."""
    orphaned_units: int = 0
    """Part of `lost_units` whose owner may still be running the request (a counter)."""


class SharedState(Value, frozen=True):
    """State that the replicas of one queue share through it."""

    limit: int | None
    """Newest limit that a replica claimed with. `None` before the first claim."""
    read_at: float
    """Time of the reading behind that limit."""
    overload: Overload | None
    probing_owner: str | None
    """The owner that may probe an unreachable gateway now."""
    is_paused: bool


class OwnerReply(Protocol):
    """Part that the replies to an owner have in common."""

    @property
    def lease_counts(self) -> LeaseCounts: ...

    @property
    def shared(self) -> SharedState: ...


@dataclass(frozen=True, slots=True)
class LeaseUnitsResult:
    """Reply to `Queue.set_lease_units`."""

    fits: Sequence[bool]
    """True for each lease that counts its new units. False if the lease is no longer the caller's: it was
    given back to its place without counting a delivery, or another owner has it."""
    lease_counts: LeaseCounts
    shared: SharedState


class ClaimResult(Value, frozen=True):
    """Reply to `Queue.claim`."""

    leases: Sequence[Lease]
    lease_counts: LeaseCounts
    shared: SharedState
    claimable_count: int
    """Requests that the next claim could lease if there were room: pending and returned ones. Requests of a
    lane count only if this call was allowed more of them than it took."""
    blocked_entry_id: int | None = None
    """Entry of the first request that needs more units than were free. `None` if the claim came to none, or
    repeats an earlier one."""


class Extra(Protocol):
    """Data that a feature stores in the step that ends a lease."""

    @property
    def size_bytes(self) -> int: ...

    def to_columns(self, names: QueueNames) -> Mapping[str, Any]:
        """Return the columns that the feature declares for the script (queue/lua_files.py)."""
        ...


class Settlement(Value, frozen=True):
    """The final result of a request, which ends its lease."""

    lease: Lease
    result: bytes
    """Result as JSON, ready for the list."""
    result_list: str
    """Name of the result list. Empty for the default list of the queue."""
    request_id: str = ""
    request_token: str = ""
    """Token of the request; its cancel markers are deleted, also those under `request_id` if they hold this
    token. Empty if the request has no token."""
    result_class: str = ""
    """Class in which the result is counted: the class of the gateway's answer (`2xx`) or an error code."""
    extra: Extra | None = None
    """State that the request leaves to a feature. Other requests may be claimable because of it."""
    request_extra: Any = None
    """Part of the member of the request that a feature has read (`Request.extra`)."""
    failure: str = ""
    """Why the request has no answer. Empty if it has one."""


class SettleStatus(StrEnum):
    """Status of a lease that the caller ended."""

    DONE = "done"
    LOST = "lost"
    """The lease had ended before, or belongs to another owner: nothing was written. A repetition after a lost
    reply returns this too, unless the adapter remembers."""
    BAD_LIST = "bad-list"
    """The named list has the wrong type, or producers may not name it: an INVALID_REQUEST result went to the
    default list, and the lease ended. (A dead letter is in the dead-letter set in any case.)"""
    TOO_LARGE = "too-large"
    """The queue does not accept a value as large as this result, though it accepts others: a TOO_LARGE result
    went to the list instead, and the lease ended."""


class EndAndClaimResult(Value, frozen=True):
    """Reply to `Queue.settle_and_claim_next` and `Queue.release_and_claim_again`."""

    statuses: Sequence[SettleStatus | None]
    """Statuses as `settle` and `release` return them."""
    claim_result: ClaimResult | None
    """Requests that were leased to the caller. `None` if they are not known, or there can be none: a claim
    with the same nonce returns them."""
    extras: Sequence[Any] = ()
    """Values that a feature returns, one with each lease. Empty if there are none."""


class Release(Value, frozen=True):
    """A lease that ends without a result: the request returns to the queue."""

    lease: Lease
    delay_s: float = 0.0
    """Delay before the request may be claimed again. With 0, it returns to its place at once."""
    is_failed_attempt: bool = False
    """True to count a failed attempt (`Failed`)."""
    is_refusal: bool = False
    """True to count a refusal (`Overloaded`)."""
    is_undelivered: bool = False
    """True to take back the count of the delivery: the request was returned untouched (drain, unreachable).
    """
    last_attempt: str = ""
    """Outcome of the attempt in words. If it is empty, the text of an earlier attempt stays."""
    extra: Extra | None = None
    """Reason of a feature for which the request waits in a lane that no claim takes from, until the feature
    returns it. `delay_s` is ignored then."""
    new_score: float | None = None
    """Score under which the request waits from now on. `None` keeps its score."""
    request_id: str = ""
    request_token: str = ""
    """Token that, with `request_id`, cancels the request while it waits because of `extra`. If empty, both
    are read from the member of the lease, if it is there."""
    progress: bytes | None = None
    """Output of all calls for the request so far, to be stored with it and returned with its next lease. The
    queue does not interpret it.

    `None` keeps what is stored, and `b""` deletes it. Anything else replaces it, and sets the counts of
    failed attempts and refusals to 0 before the flags of this release are added, because attempts count for
    each call. Progress that is longer than MAX_PROGRESS_BYTES, or that the server does not accept, is not
    stored: the release then keeps what is stored.
    """

    @property
    def can_be_claimed_again(self) -> bool:
        """True if the request has new progress, and the caller has its member, so that the next call needs
        nothing else from the queue than a lease."""
        is_kept = bool(self.stored_progress and self.lease.member)
        return is_kept and self.delay_s <= 0 and self.extra is None

    @property
    def stored_progress(self) -> bytes | None:
        """Progress that the queue stores. `None` to keep what is stored."""
        progress = self.progress
        return None if progress is None or len(progress) > MAX_PROGRESS_BYTES else progress

    @property
    def cancel_key(self) -> tuple[str, str]:
        """Id and token by which the request can be cancelled."""
        if self.request_token or not self.lease.member:
            return self.request_id, self.request_token
        parsed = parse_member(self.lease.member)
        return parsed.id or "", parsed.token


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request to be moved to the dead-letter set, for an operator to look at."""

    settlement: Settlement
    """Error result for the consumer. Its `result` is empty, and none is written, if no id could be read."""
    reason: str
    """Sentence for the operator."""
    is_failed_attempt: bool = False
    """True if the last attempt counts as a failed one."""


@dataclass(frozen=True, slots=True)
class RenewResult:
    """Reply to `Queue.renew` and `Queue.share_state`."""

    lost_entry_ids: Sequence[int]
    """Entry ids whose lease is no longer the caller's."""
    lease_counts: LeaseCounts
    shared: SharedState


@dataclass(frozen=True, slots=True)
class UnleasedRequest:
    """A request without a lease that is to be answered: usually one past its deadline."""

    location: str
    """Location of the request, opaque to all but the queue."""
    member: bytes
    last_attempt: str = ""
    """Same as in `Lease`, and so are the fields below."""
    failed_attempts: int = 0
    refusals: int = 0
    progress: bytes = b""


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """Summary of one sweep."""

    reclaimed_count: int
    """Number of leases that were taken back. Their units count in `LeaseCounts.lost_units`."""
    due_count: int
    """Number of delayed requests that returned to their place."""
    next_due_at: float | None
    """Time at which the next delayed request is due."""
    lost_units: int
    """Same as in `LeaseCounts`."""
    freed_count: int = 0
    """Number of requests that features have freed, so that they may be claimed now."""


class Queue(Protocol):
    """The queue as one owner uses it.

    Each method is one atomic step that is safe to repeat: claims by their nonce, all others by the tokens of
    the leases. All raise QueueUnavailableError, and nothing else that is expected.
    """

    owner: str
    """Name of this process, never used by another one."""

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        """Return the calls that a feature adds to the queue."""
        ...

    def unix_now(self) -> float:
        """Return the Unix time by the queue's clock, without a call to the queue."""
        ...

    async def find_invalid_result_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the result lists among `names` that cannot take a result, each with the reason as the end of
        a sentence ("is …"): producers may not name it, or it has the wrong type. A settlement with such a
        list returns BAD_LIST.

        Valid lists are cached for a while. A list that cannot be checked now counts as valid and raises
        nothing.
        """
        ...

    async def claim(
        self,
        max_count: int,
        nonce: str,
        permit: Permit,
        *,
        max_per_lane: Mapping[Lane, int] = ONE_PER_LANE,
        assumed_units: int = 1,
        max_blocked: int = 0,
    ) -> ClaimResult:
        """Lease up to `max_count` requests, best score first, never past the permit.

        Repeat a claim whose reply was lost with the same nonce: it returns the same leases.

        Units: a request counts the units of its last lease or of the last `set_lease_units`, at least 1. A
        request that was never leased counts `assumed_units`, which may be 0 if the caller sets its units
        before sending. Nothing more is leased when no unit is free. A request with more units than are free
        ends the claim, so that it does not starve behind lighter ones; but up to `max_blocked` of them that
        were leased before are skipped. A request with more units than the whole limit is skipped until the
        limit has risen.

        Room: a permit with a reading no older than the shared one replaces the shared one (not while paused),
        and its limit applies; with an older permit, the smaller of both limits applies. Each limit is lowered
        by the leases lost since it was computed. A lease counts until it ends or is taken back, however long
        ago its time ran out. There is no room while the queue is paused, before `Overload.retry_at`, and
        while the newest overload is not older than the reading of the permit. If the clock of the queue has
        stepped back, shared times in the future are set to now, and a permit with a reading in the future
        counts as older than any other.

        Order: `max_per_lane` limits the requests of each lane (0 for lanes that are closed or not named). A
        request that may not be claimed keeps its place and is skipped. Members and progress are read in order
        up to 1 MB (2**20 bytes) in total, but at least one request is taken. Of requests with equal score and
        bytes, the one claimed before goes first. Requests in the lane `STARTED` go before all others of their
        priority, by their scores among themselves.

        A claim also says that the caller can reach the gateway, whatever room there is: if the caller is the
        probing owner, its probe has succeeded, and others may probe. The probing owner must not claim before
        that.
        """
        ...

    async def claim_probe(self, nonce: str, permit: Permit) -> ClaimResult:
        """Lease one request to probe an unreachable gateway, under the conditions of a claim. Lease none
        while another probe runs. (If other owners fill the limit, one of them will notice that the gateway is
        back, and nothing could be claimed afterwards.)

        The probe runs until its lease ends in any way, or its owner calls `claim`. Its owner is
        `SharedState.probing_owner` until then. The same nonce returns the same lease.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> RenewResult:
        """Extend the leases to lease_s from now, including leases that ran out but were not yet taken
        back."""
        ...

    async def set_lease_units(
        self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
    ) -> LeaseUnitsResult:
        """Set the units of each lease to the weight of its request, which is known once the request was
        parsed.

        The units are kept for the next lease of the request. A lease that shares the call of another one,
        which counts for both, has 0 units while it is held. The same room applies as for a claim; a
        lease that does not fit is given back at once without counting a delivery. Fewer units always fit, and
        make room for the leases after it.
        """
        ...

    async def share_state(self, permit: Permit, overload: Overload | None) -> RenewResult:
        """Share the newest limit and overload with the other owners, and return theirs. `lost_entry_ids` is
        empty.

        The overload with the newest `refused_at` is kept; `retry_at` never moves back.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        """Write each result and end its lease. `None` for a lease that could not be settled now: it stands,
        call again.

        What a request leaves to a feature may make others claimable, so claim again afterwards. A settlement
        that cannot be written does not delay the others. Raises if nothing could be written.
        """
        ...

    async def settle_and_claim_next(
        self, settlements: Sequence[Settlement], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        """Settle the requests, and in the same step lease those to the caller that a feature frees with it.

        Only requests are leased that a `claim` with this permit would have leased: in order, up to the first
        that has no room, is too large, or has another request before it. The rest, and requests that wait in
        a lane, wait for a claim as usual. `nonce` must not be one of an earlier claim.
        """
        ...

    async def release(self, releases: Sequence[Release]) -> Sequence[SettleStatus]:
        """End each lease without a result, as its `Release` says."""
        ...

    async def release_and_claim_again(
        self, releases: Sequence[Release], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        """Release the requests, and in the same step lease those to the caller whose release says that they
        can be claimed again (`Release.can_be_claimed_again`).

        Only requests are leased that a `claim` with this permit would have leased: in order, up to the first
        that has no room or has another request before it. `nonce` must not be one of an earlier claim.
        """
        ...

    async def move_to_dead_letters(self, dead_letters: Sequence[DeadLetter]) -> Sequence[SettleStatus | None]:
        """Move the requests to the dead-letter set, and write their results as `settle` does."""
        ...

    async def check_cancelled(
        self, requests: Sequence[tuple[str, str]]
    ) -> Sequence[bool | QueueUnavailableError]:
        """Return for each pair of request id and token whether the request was cancelled: by its token, or by
        a marker under its id with an equal token.

        An item is an error if only its marker cannot be read. On a Cluster, the markers of llm-d's producers
        may be on other nodes than the queue, and one of these nodes may be down.
        """
        ...

    async def sweep(self) -> SweepSummary:
        """Return requests to their place: those whose owner is gone or whose lease ran out, delayed ones that
        are due, and those that a feature frees.

        An owner is gone if that is proven, or if it was silent for its owner_timeout_s. Each claim, renew,
        share_state and sweep is a sign of life.

        After an outage of the queue or of all owners, living owners must be able to report first, so that
        only leases of dead owners count as lost. Therefore silence does not count for the longest
        owner_timeout_s of the known owners after a sweep that comes more than 2 s, or half of this owner's
        owner_timeout_s, after the last one. And no lease runs out for lease_s/3 after a sweep that comes more
        than lease_s/3 after the last one. So sweep each second, and at least every sixth of both times.
        """
        ...

    async def find_overdue(self, max_count: int) -> Sequence[UnleasedRequest]:
        """Return requests without a lease that may be past their deadline by their score. The caller verifies
        the deadline by parsing the member.

        Each call continues where the last one ended, and starts over at the end, so that scores that are no
        deadlines never hide other requests.
        """
        ...

    async def settle_unleased(self, items: Sequence[tuple[UnleasedRequest, Settlement]]) -> int:
        """Write the results and remove the requests that are still where they were found. Return how many
        that were.

        The lease of these settlements is ignored.
        """
        ...

    async def count_requests(self) -> QueueCounts:
        """Return the number of requests by where they are."""
        ...

    async def take_snapshot(self, rate: float | None = None, service_s: float = 0.0) -> QueueSnapshot:
        """Return a snapshot of the pending requests, of the owners, and of the number ever settled, without
        writing.

        The spans are narrow around the deadlines that are missed at this rate, so that the forecast of
        requests at risk is off by at most a few hundredths; without a rate they are coarse. At most 50
        replicas are named, and only the first request of each priority is read. Replicas that only observe
        are not included.
        """
        ...

    async def wait_for_work(self) -> None:
        """Return when work may have arrived: a producer woke this owner, or poll_s has passed and there is
        some.

        A wake-up since the last call is not missed: the call then returns at once.
        """
        ...
