"""The queue in Redis or Valkey, as one dispatcher uses it. docs/reference/queue-contract.md describes its
keys and scripts.

Each method calls one script (steps/), or one per megabyte. Times are translated here between the
clock of the event loop and Redis TIME (backend.py). The scripts store Redis time only, so the clocks of the
owners need not agree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from dispatcher.queue.constants import (
    BAD_LIST,
    DONE,
    LOST,
    TOO_LARGE,
    UNWRITABLE,
)
from dispatcher.queue.contract import (
    ClaimResult,
    DeadLetter,
    EndAndClaimResult,
    Lease,
    LeaseUnitsResult,
    Overload,
    Permit,
    Release,
    RenewResult,
    Settlement,
    SettleStatus,
    SweepSummary,
    UnleasedRequest,
)
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.owners import DeadOwnerDetector
from dispatcher.queue.redis import cancel_markers
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.queue.redis.overdue import OverdueSearch
from dispatcher.queue.redis.result_lists import ResultListChecker
from dispatcher.queue.redis.result_writer import ResultWriter, WriteStep
from dispatcher.queue.redis.scripts import CallFailedError, Client, split_batches, split_for_owner
from dispatcher.queue.redis.steps.claim import ClaimReply, claim, cut_member
from dispatcher.queue.redis.steps.common import ClaimOffer, OwnerTerms
from dispatcher.queue.redis.steps.count_requests import count_requests
from dispatcher.queue.redis.steps.find_overdue import find_overdue
from dispatcher.queue.redis.steps.release import ReleaseReply, release
from dispatcher.queue.redis.steps.renew import renew
from dispatcher.queue.redis.steps.set_lease_units import set_lease_units
from dispatcher.queue.redis.steps.settle import ResultWrite, SettleReply, settle, settle_unleased
from dispatcher.queue.redis.steps.share_pool_identity import share_pool_identity
from dispatcher.queue.redis.steps.sweep import sweep
from dispatcher.queue.redis.steps.take_snapshot import take_snapshot
from dispatcher.queue.redis.wake_ups import WakeUpListener
from dispatcher.requests.forecast import QueueSnapshot
from dispatcher.requests.lanes import ONE_PER_LANE, Lane
from dispatcher.requests.oversize import MAX_ENVELOPE_BYTES
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.events import Event, emit

T = TypeVar("T")

_MAX_CLAIM = 1000
_MAX_TRANSFERS = 3
_MAX_SWEEP = 500
_SETTLE_STATUS = {
    DONE: SettleStatus.DONE,
    LOST: SettleStatus.LOST,
    BAD_LIST: SettleStatus.BAD_LIST,
    UNWRITABLE: None,
    TOO_LARGE: SettleStatus.TOO_LARGE,
}


async def _return_no_progress() -> bytes:
    return b""


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Settings of an owner of a queue."""

    lease_s: float = 30.0
    """The same for all dispatchers."""
    owner_timeout_s: float = 5.0
    """Seconds without a call after which the owner counts as dead. With 0, only its leases run out."""
    poll_s: float = 0.2
    result_ttl_s: int = 604_800
    """Lifetime of result lists. 0 keeps them for ever."""
    dead_max: int = 100_000
    max_pending: int = 0
    """Largest number of requests that may wait. 0 is no limit."""
    max_payload_bytes: int = 16 << 20
    """Largest payload. A member that is too long for such a payload is cut to its beginning
    (requests/oversize.py)."""
    attempt_timeout_s: float = 3.0


class RedisQueue:
    """One owner's access to a queue. Implements `ports.Queue`.

    `owner` is unique among all dispatchers, including those that died.
    `dead_owner_detector` knows which owners have ended, so that their leases are taken back without a
    timeout.
    `features` are those for which the scripts are built.

    A call takes a few seconds at most, including retries, except for large values.
    """

    def __init__(
        self,
        client: Client,
        names: QueueNames,
        owner: str,
        options: QueueOptions = QueueOptions(),
        *,
        dead_owner_detector: DeadOwnerDetector | None = None,
        features: Sequence[str] = ALL_FEATURES,
    ) -> None:
        self.names = names
        self.owner = owner
        self.backend = Backend(client, names, attempt_timeout_s=options.attempt_timeout_s, features=features)
        self.owner_terms = OwnerTerms(owner, options.owner_timeout_s, options.lease_s)
        self.max_member_bytes = options.max_payload_bytes + MAX_ENVELOPE_BYTES
        self._options = options
        self._failed_transfers: Counter[tuple[str, int]] = Counter()
        """Number of failed transfers of a large member, by its entry."""
        self._dead_owner_detector = dead_owner_detector
        self._foreign_markers = cancel_markers.ForeignMarkers(self.backend)
        self._outbox = Outbox(self.backend, options.result_ttl_s)
        self._result_lists = ResultListChecker(self.backend, self._outbox)
        self._result_writer = ResultWriter(
            self.backend, self._result_lists, self._outbox, self._foreign_markers
        )
        self._overdue_search: OverdueSearch | None = None
        self._wake_ups = WakeUpListener(self.backend.scripts, names, options.poll_s)

    def __repr__(self) -> str:
        return f"<RedisQueue {self.names.queue} for {self.owner}>"

    async def aclose(self) -> None:
        """Close the connections. Leases that were not released run out."""
        await self._wake_ups.aclose()
        await self.backend.aclose()

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        return calls(self)

    def unix_now(self) -> float:
        return self.backend.clock.to_server_time(asyncio.get_running_loop().time())

    async def count_requests(self) -> QueueCounts:
        return await count_requests(self.backend)

    async def find_invalid_result_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        return await self._result_lists.find_invalid_lists(names)

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
        return await self._claim_requests(
            max(0, min(max_count, _MAX_CLAIM)), nonce, permit, max_per_lane, assumed_units, max_blocked
        )

    async def claim_probe(self, nonce: str, permit: Permit) -> ClaimResult:
        return await self._claim_requests(1, nonce, permit, ONE_PER_LANE, 1, is_probe=True)

    async def _claim_requests(
        self,
        max_count: int,
        nonce: str,
        permit: Permit,
        max_per_lane: Mapping[Lane, int],
        assumed_units: int,
        max_blocked: int = 0,
        *,
        is_probe: bool = False,
    ) -> ClaimResult:
        await self.ensure_clock_known()
        reply = await claim(
            self.backend,
            self.owner_terms,
            nonce,
            permit,
            max_count=max_count,
            max_per_lane=max_per_lane,
            assumed_units=assumed_units,
            max_blocked=max_blocked,
            max_member_bytes=self.max_member_bytes,
            is_probe=is_probe,
        )
        if not reply.large_member_bytes and not reply.large_progress_bytes:
            return reply.claim_result
        (lease,) = reply.claim_result.leases
        return reply.claim_result.copy_with(leases=await self._load_large_parts(lease, reply))

    async def _load_large_parts(self, lease: Lease, reply: ClaimReply) -> list[Lease]:
        """Return a lease with its large member and its large progress, or no lease if it has ended.

        After three failed transfers of the member, the member is cut to its beginning, which says that it is
        too large. After three failed transfers of the progress, the request starts again without it.
        """
        if reply.large_member_bytes:
            member = await self._load_large_value(
                self.names.members_key,
                lease,
                reply.large_member_bytes,
                lambda: cut_member(self.backend, lease),
            )
            if member is None:
                return []
            lease = lease.copy_with(member=member)
        if reply.large_progress_bytes:
            progress = await self._load_large_value(
                self.names.progress_key, lease, reply.large_progress_bytes, _return_no_progress
            )
            if progress is None:
                return []
            lease = lease.copy_with(progress=progress)
        return [lease]

    async def _load_large_value(
        self, key: str, lease: Lease, size_bytes: int, give_up: Callable[[], Awaitable[bytes | None]]
    ) -> bytes | None:
        """Return the value of a hash for the entry of a lease, or what `give_up` returns after three failed
        transfers. `None` if the lease has ended."""
        scripts, transfer = self.backend.scripts, (key, lease.entry_id)
        value: bytes | None
        try:
            value = await scripts.call_with_retries(
                lambda: scripts.client.hget(*transfer), size_bytes=size_bytes
            )
        except CallFailedError:
            self._failed_transfers[transfer] += 1
            if self._failed_transfers[transfer] < _MAX_TRANSFERS:
                raise
            value = await give_up()
        del self._failed_transfers[transfer]
        return value

    async def renew(self, leases: Sequence[Lease]) -> RenewResult:
        results = [await renew(self.backend, self.owner_terms, batch) for batch in split_for_owner(leases)]
        lost = [entry_id for each in results for entry_id in each.lost_entry_ids]
        return replace(results[-1], lost_entry_ids=lost)

    async def set_lease_units(
        self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
    ) -> LeaseUnitsResult:
        await self.ensure_clock_known()
        results = [
            await set_lease_units(self.backend, self.owner_terms, batch, permit)
            for batch in split_for_owner(lease_units)
        ]
        return replace(results[-1], fits=[fits for each in results for fits in each.fits])

    async def load_if_large(self, key: str, entry: str, value: bytes | int) -> bytes | None:
        """Return a value that a script returned, or load it from its hash if the script returned its size.
        `None` if it is no longer there."""
        if not isinstance(value, int):
            return value
        client = self.backend.scripts.client
        loaded: bytes | None = await self.backend.scripts.call_with_retries(
            partial(client.hget, key, entry), size_bytes=value
        )
        return loaded

    async def share_state(self, permit: Permit, overload: Overload | None) -> RenewResult:
        await self.ensure_clock_known()
        return await renew(self.backend, self.owner_terms, permit=permit, overload=overload)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        return await self._end_leases([ResultWrite(each) for each in settlements])

    async def settle_and_claim_next(
        self, settlements: Sequence[Settlement], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        await self.ensure_clock_known()
        # The results may need several calls, and the offer is for one of them only.
        offers = [self._make_offer(nonce, permit)]
        settle_replies: list[SettleReply] = []

        async def settle_with_offer(writes: Sequence[ResultWrite]) -> Sequence[int]:
            """Settle some results. The first call makes the offer. If its reply is lost, a claim by the nonce
            returns the leases."""
            offer = offers.pop() if offers else None
            reply = await self._run_settle(writes, offer)
            if offer is not None:
                settle_replies.append(reply)
            return reply.statuses

        statuses = await self._end_leases([ResultWrite(each) for each in settlements], settle_with_offer)
        if not settle_replies:
            return EndAndClaimResult(statuses, None, ())
        return EndAndClaimResult(statuses, settle_replies[0].claim_result, settle_replies[0].extras)

    async def move_to_dead_letters(self, dead_letters: Sequence[DeadLetter]) -> Sequence[SettleStatus | None]:
        return await self._end_leases(
            [
                ResultWrite(
                    each.settlement, dead_reason=each.reason, is_failed_attempt=each.is_failed_attempt
                )
                for each in dead_letters
            ]
        )

    async def _end_leases(
        self, writes: Sequence[ResultWrite], step: WriteStep | None = None
    ) -> Sequence[SettleStatus | None]:
        return [
            _SETTLE_STATUS[status]
            for status in await self._result_writer.write(step or self._settle_writes, writes)
        ]

    async def _settle_writes(self, writes: Sequence[ResultWrite]) -> Sequence[int]:
        return (await self._run_settle(writes)).statuses

    async def _run_settle(
        self, writes: Sequence[ResultWrite], offer: ClaimOffer | None = None
    ) -> SettleReply:
        options = self._options
        reply = await settle(
            self.backend,
            writes,
            ttl_s=options.result_ttl_s,
            dead_max=options.dead_max,
            offer=offer,
        )
        if reply.dropped_dead_count:
            emit(Event.DEAD_DROPPED, count=reply.dropped_dead_count, dead_max=options.dead_max)
        return reply

    def _make_offer(self, nonce: str, permit: Permit) -> ClaimOffer:
        return ClaimOffer(self.owner, self.owner_terms.lease_s, nonce, permit, self.max_member_bytes)

    async def release(self, releases: Sequence[Release]) -> Sequence[SettleStatus]:
        return (await self._release_all(releases)).statuses

    async def release_and_claim_again(
        self, releases: Sequence[Release], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        await self.ensure_clock_known()
        reply = await self._release_all(releases, self._make_offer(nonce, permit))
        claimed = reply.claim_result
        if claimed is not None:
            # The caller has the members and the new progress already, so the reply has neither. Of a request
            # that it has lost and claimed again, it may release both leases, and only one of them counts.
            released = {
                each.lease.entry_id: each
                for each, status in zip(releases, reply.statuses, strict=True)
                if status is SettleStatus.DONE
            }
            claimed = claimed.copy_with(
                leases=[
                    lease.copy_with(
                        member=released[lease.entry_id].lease.member,
                        progress=released[lease.entry_id].stored_progress,
                        lane=Lane.STARTED,
                    )
                    for lease in claimed.leases
                ]
            )
        return EndAndClaimResult(reply.statuses, claimed)

    async def _release_all(
        self, releases: Sequence[Release], offer: ClaimOffer | None = None
    ) -> ReleaseReply:
        """Release requests. The first call makes the offer. If its reply is lost, a claim by the nonce
        returns the leases."""
        statuses, claim_result = list[SettleStatus](), None
        for batch in split_batches(releases, lambda each: len(each.stored_progress or b"")):
            reply = await self._release_batch(batch, offer)
            statuses += reply.statuses
            claim_result, offer = claim_result or reply.claim_result, None
        return ReleaseReply(statuses, claim_result)

    async def _release_batch(self, batch: Sequence[Release], offer: ClaimOffer | None) -> ReleaseReply:
        """Release a batch. If a reachable server does not take it because of the progress in it, release its
        requests one by one."""
        try:
            return await release(self.backend, batch, offer)
        except CallFailedError:
            if not any(each.stored_progress for each in batch) or not await self._is_responding():
                raise
        return ReleaseReply([status for each in batch for status in await self._release_one(each)])

    async def _release_one(self, one: Release) -> list[SettleStatus]:
        """Release a request, without its progress if a reachable server does not take it: a lease whose
        release fails again and again would run out and count as a death."""
        try:
            return (await release(self.backend, [one])).statuses
        except CallFailedError:
            if not one.stored_progress or not await self._is_responding():
                raise
        return (await release(self.backend, [one.copy_with(progress=None)])).statuses

    async def _is_responding(self) -> bool:
        return await self.backend.scripts.is_responding(self.names.queue)

    async def check_cancelled(
        self, requests: Sequence[tuple[str, str]]
    ) -> Sequence[bool | QueueUnavailableError]:
        is_cluster = self.backend.scripts.is_cluster
        own = await cancel_markers.check_cancelled(
            self.backend, requests, foreign="" if is_cluster else "must"
        )
        if not is_cluster:
            return own
        # The markers of llm-d's producers are in other slots, out of reach of the script.
        foreign = await self._foreign_markers.check_cancelled(requests)
        return [by_own or by_theirs for by_own, by_theirs in zip(own, foreign, strict=True)]

    async def share_pool_identity(self, identity: bytes, valid_s: float) -> Sequence[bytes]:
        """Record for `valid_s` to which pool this owner sends, unless `identity` is empty. Return the pools
        of all owners."""
        return await share_pool_identity(self.backend, identity, valid_s)

    async def sweep(self) -> SweepSummary:
        reclaimed = due = freed = 0
        max_pending = self._options.max_pending
        ended_owners: Sequence[str] = ()
        while True:
            reply = await sweep(
                self.backend,
                self.owner_terms,
                _MAX_SWEEP,
                ended_owners,
                max_pending=max_pending,
            )
            reclaimed += reply.reclaimed_count
            due += reply.due_count
            freed += reply.freed_count
            # The first sweep reports the owners that hold leases. A second one names those that have ended.
            before, ended_owners = ended_owners, self._find_ended_owners(reply.lease_owners)
            # Owners that were named before and still hold leases hold those of other queues, unless the sweep
            # was cut short.
            if not reply.has_more and set(ended_owners) <= set(before):
                break
        if self.backend.scripts.is_cluster:
            await self._outbox.deliver_pending()
        return SweepSummary(reclaimed, due, reply.next_due_at, reply.lost_units, freed)

    def _find_ended_owners(self, lease_owners: Sequence[str]) -> Sequence[str]:
        """Return the owners that hold leases and are proven to have ended."""
        others = [holder for holder in lease_owners if holder != self.owner]
        return (
            self._dead_owner_detector.find_ended_owners(others)
            if self._dead_owner_detector is not None
            else ()
        )

    async def find_overdue(self, max_count: int) -> Sequence[UnleasedRequest]:
        """Return unleased requests that may be past their deadline: at most 1 MB of them with their progress,
        but at least one."""
        await self.ensure_clock_known()
        overdue = self._overdue_search = self._overdue_search or OverdueSearch(self.unix_now())
        # Both passes, because one of them may have found nothing.
        for _ in range(2):
            walk = overdue.next_walk()
            reply = await find_overdue(self.backend, walk, max_count, max_member_bytes=self.max_member_bytes)
            if size := reply.large_request_bytes:
                same_position = replace(walk)
                # Before the call, so that a request whose transfer fails does not stop the search.
                walk.offset += 1
                reply = await find_overdue(
                    self.backend,
                    same_position,
                    max_count,
                    max_member_bytes=self.max_member_bytes,
                    large_request_bytes=size,
                )
            # There are no rows if an even larger member has taken this place since the first call. The next
            # search begins with that member.
            walk.advance_to(reply.until, reply.next_range, reply.next_offset)
            if reply.rows:
                return overdue.record_found(walk, reply.rows)
        return []

    async def settle_unleased(self, items: Sequence[tuple[UnleasedRequest, Settlement]]) -> int:
        writes = [ResultWrite(settlement, unleased=item) for item, settlement in items]
        done = 0
        for (item, _), status in zip(
            items, await self._result_writer.write(self._settle_unleased_writes, writes), strict=True
        ):
            if status in (DONE, BAD_LIST, TOO_LARGE):  # LOST and UNWRITABLE have removed nothing
                done += 1
                if self._overdue_search is not None:
                    self._overdue_search.record_removed(item)
        return done

    async def _settle_unleased_writes(self, writes: Sequence[ResultWrite]) -> Sequence[int]:
        return await settle_unleased(self.backend, writes, ttl_s=self._options.result_ttl_s)

    async def take_snapshot(self, rate: float | None = None, service_s: float = 0.0) -> QueueSnapshot:
        return await take_snapshot(self.backend, self.owner_terms.timeout_s, rate, service_s)

    async def wait_for_work(self) -> None:
        await self._wake_ups.wait_for_wake_up()

    async def ensure_clock_known(self) -> None:
        """Make sure that times can be translated, for which one reply of the server is needed."""
        if not self.backend.clock.is_known:
            await self.count_requests()
