"""The queue in Redis or Valkey, as one dispatcher uses it. docs/queue-contract.md describes its keys and
scripts.

Each method calls one script (script_calls.py), or one per megabyte. Times are translated here between the
clock of the event loop and Redis TIME (backend.py). The scripts store Redis time only, so the clocks of the
owners need not agree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dispatcher.core.requests.forecast import LineAhead
from dispatcher.core.requests.lanes import ONE_OF_EACH, Lane, awaited_as
from dispatcher.core.requests.oversize import ENVELOPE_BYTES
from dispatcher.core.sequences.decisions import SequenceTerms, Verdict
from dispatcher.core.sequences.turns import Turn
from dispatcher.ports import (
    Burial,
    Claimed,
    Counts,
    Expired,
    HandedOver,
    Lease,
    LinedUp,
    ModelMarks,
    Overload,
    Permit,
    PinAsked,
    Recalled,
    Release,
    Renewed,
    Settled,
    Settlement,
    Swept,
    Unserved,
    Weighed,
)
from dispatcher.queue.constants import BAD_LIST, DONE, LOST, PINS_MOST, RECALL_MOST, STUCK, TOO_LARGE
from dispatcher.queue.keys import Names
from dispatcher.queue.owners import Prover
from dispatcher.queue.redis import cancel_markers, model_registry, script_calls, sequences
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.queue.redis.overdue import UNSERVED, Overdue
from dispatcher.queue.redis.result_lists import Destinations
from dispatcher.queue.redis.result_writer import Step, Writer
from dispatcher.queue.redis.script_calls import OwnerTerms, Write
from dispatcher.queue.redis.scripts import SCRIPT_ITEMS, BrokenCallError, Client, in_steps
from dispatcher.queue.redis.waiting_for_model import awaited, recall
from dispatcher.queue.redis.wake_ups import WakeUps
from dispatcher.telemetry.events import Event, emit

_CLAIM_MOST = 1000
_MOVES = 3
_SWEEP_MOST = 500
_SETTLED = {
    DONE: Settled.DONE,
    LOST: Settled.LOST,
    BAD_LIST: Settled.BAD_LIST,
    STUCK: None,
    TOO_LARGE: Settled.TOO_LARGE,
}


class RedisQueue:
    """One owner's access to a queue. Implements `ports.Queue`.

    `owner` is unique among all dispatchers, including those that died.
    `lease_s` must be the same for all dispatchers.
    `owner_timeout_s` is the time without a call after which the owner counts as dead. With 0, only its leases
    run out.
    `dead_owner_detector` knows which owners have ended, so that their leases are taken back without a
    timeout.
    `result_ttl_s` is the lifetime of result lists. 0 keeps them for ever.
    `max_pending` is the largest number of requests that may wait. 0 is no limit.
    `max_payload_bytes` is the largest payload. A member that is too long for such a payload is cut to its
    beginning (core/requests/oversize.py).

    A call takes a few seconds at most, including retries, except for large values.
    """

    def __init__(
        self,
        client: Client,
        names: Names,
        owner: str,
        *,
        lease_s: float = 30.0,
        owner_timeout_s: float = 5.0,
        prover: Prover | None = None,
        poll_s: float = 0.2,
        result_ttl_s: int = 604_800,
        dead_max: int = 100_000,
        max_pending: int = 0,
        max_payload_bytes: int = 16 << 20,
        try_s: float = 3.0,
    ) -> None:
        self.names = names
        self.owner = owner
        self.backend = Backend(client, names, try_s=try_s)
        self._me = OwnerTerms(owner, owner_timeout_s, lease_s)
        self._largest = max_payload_bytes + ENVELOPE_BYTES
        self._unmoved: Counter[int] = Counter()
        """Number of failed transfers of a large member, by its entry."""
        self._prover = prover
        self._ttl_s = result_ttl_s
        self._dead_max = dead_max
        self._max_pending = max_pending
        self._outbox = Outbox(self.backend, result_ttl_s)
        self._destinations = Destinations(self.backend, self._outbox)
        self._writer = Writer(self.backend, self._destinations, self._outbox)
        self._overdue: Overdue | None = None
        self._wake_ups = WakeUps(self.backend.scripts, names, poll_s)

    def __repr__(self) -> str:
        return f"<RedisQueue {self.names.queue} for {self.owner}>"

    async def aclose(self) -> None:
        """Close the connections. Leases that were not released run out."""
        await self._wake_ups.aclose()
        await self.backend.aclose()

    def unix_now(self) -> float:
        return self.backend.clock.server(asyncio.get_running_loop().time())

    async def counts(self) -> Counts:
        return await script_calls.counts(self.backend)

    async def refused_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        return await self._destinations.all_refused(names)

    async def claim(
        self,
        most: int,
        nonce: str,
        permit: Permit,
        *,
        lanes: Mapping[Lane, int] = ONE_OF_EACH,
        units: int = 1,
    ) -> Claimed:
        return await self._claim(max(0, min(most, _CLAIM_MOST)), nonce, permit, lanes, units)

    async def probe(self, nonce: str, permit: Permit) -> Claimed:
        return await self._claim(1, nonce, permit, ONE_OF_EACH, 1, probing=True)

    async def _claim(
        self,
        most: int,
        nonce: str,
        permit: Permit,
        lanes: Mapping[Lane, int],
        units: int,
        *,
        probing: bool = False,
    ) -> Claimed:
        await self._learn_clock()
        told = await script_calls.claim(
            self.backend,
            self._me,
            nonce,
            permit,
            most=most,
            lanes=lanes,
            units=units,
            largest=self._largest,
            probing=probing,
        )
        if not told.untold_bytes:
            return told.claimed
        (lease,) = told.claimed.leases
        return told.claimed.but(leases=await self._with_member(lease, told.untold_bytes))

    async def _with_member(self, lease: Lease, size: int) -> list[Lease]:
        """Return a lease with its large member, or no lease if it has ended. After three failed transfers,
        the member is cut to its beginning, which says that it is too large."""
        key, scripts = self.names.members, self.backend.scripts
        try:
            member = await scripts.attempt(lambda: scripts.client.hget(key, lease.entry), size=size)
        except BrokenCallError:
            self._unmoved[lease.entry] += 1
            if self._unmoved[lease.entry] < _MOVES:
                raise
            member = await script_calls.shorten(self.backend, lease)
        del self._unmoved[lease.entry]
        return [] if member is None else [lease.but(member=member)]

    async def renew(self, leases: Sequence[Lease]) -> Renewed:
        lost: list[int] = []
        at = 0
        while True:  # at least one call, because it is also the heartbeat of this owner
            renewed = await script_calls.renew(self.backend, self._me, leases[at : at + SCRIPT_ITEMS])
            lost += renewed.lost
            at += SCRIPT_ITEMS
            if at >= len(leases):
                return replace(renewed, lost=lost)

    async def weigh(self, weights: Sequence[tuple[Lease, int]], permit: Permit) -> Weighed:
        await self._learn_clock()
        fits: list[bool] = []
        at = 0
        while True:
            told = await script_calls.weigh(self.backend, self._me, weights[at : at + SCRIPT_ITEMS], permit)
            fits += told.fits
            at += SCRIPT_ITEMS
            if at >= len(weights):
                return replace(told, fits=fits)

    async def line_up(self, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms) -> LinedUp:
        await self._learn_clock()
        verdicts: list[Verdict] = []
        at = 0
        while True:
            some = turns[at : at + SCRIPT_ITEMS]
            told = await sequences.line_up(self.backend, self.owner, self._me.lease_s, some, terms)
            verdicts += told.verdicts
            at += SCRIPT_ITEMS
            if at >= len(turns):
                return replace(told, verdicts=verdicts)

    async def unserved(self, most: int) -> Sequence[Unserved]:
        scripts, found = self.backend.scripts, []
        for row in await sequences.unserved(self.backend, min(most, SCRIPT_ITEMS), self._largest):
            member: bytes | None
            if isinstance(row.member, int):
                read = partial(scripts.client.hget, self.names.members, row.place.split(":")[1])
                member = await scripts.attempt(read, size=row.member)
            else:
                member = row.member
            if member is not None:
                found.append(Unserved(Expired(f"{UNSERVED}|{row.place}", member), row.code, row.why))
        return found

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        await self._learn_clock()
        return await script_calls.renew(self.backend, self._me, permit=permit, overload=overload)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | None]:
        return await self._end([Write(each) for each in settlements])

    async def hand_over(self, settlements: Sequence[Settlement], nonce: str, permit: Permit) -> HandedOver:
        await self._learn_clock()
        # The results may need several calls, and the offer is for one of them only.
        offers = [sequences.TakeOver(self.owner, self._me.lease_s, nonce, permit, self._largest)]
        told: list[script_calls.SettleReply] = []

        async def settle(writes: Sequence[Write]) -> Sequence[int]:
            """Settle some results. The first call makes the offer. If its reply is lost, a claim by the nonce
            returns the leases."""
            offer = offers.pop() if offers else None
            reply = await self._settled(writes, offer)
            if offer is not None:
                told.append(reply)
            return reply.statuses

        answers = await self._end([Write(each) for each in settlements], settle)
        claimed, goes = (told[0].claimed, told[0].goes) if told else (None, ())
        return HandedOver(answers, claimed, goes)

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled | None]:
        return await self._end([Write(each.settlement, bury=each.reason) for each in burials])

    async def _end(self, writes: Sequence[Write], step: Step | None = None) -> Sequence[Settled | None]:
        return [_SETTLED[status] for status in await self._writer.write(step or self._settle, writes)]

    async def _settle(self, writes: Sequence[Write]) -> Sequence[int]:
        return (await self._settled(writes)).statuses

    async def _settled(
        self, writes: Sequence[Write], offer: sequences.TakeOver | None = None
    ) -> script_calls.SettleReply:
        told = await script_calls.settle(
            self.backend, writes, ttl_s=self._ttl_s, dead_max=self._dead_max, offer=offer
        )
        if told.dropped:
            emit(Event.DEAD_DROPPED, count=told.dropped, dead_max=self._dead_max)
        return told

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]:
        said: list[Settled] = []
        for batch in in_steps(releases, lambda _: 0):
            said += await script_calls.release(self.backend, batch)
        return said

    async def recall(self, models: Sequence[str]) -> Recalled:
        moved = left = 0
        # Models whose names are equal after shortening are one model here.
        for some in in_steps(list(dict.fromkeys(map(awaited_as, models))), lambda _: 0):
            told = await recall(self.backend, some, RECALL_MOST - moved)
            moved, left = moved + told.moved, left + told.left
        return Recalled(moved, left)

    async def awaited(self) -> Mapping[str, int]:
        return await awaited(self.backend)

    async def marks(
        self, keep: Collection[tuple[str, str]], cold: Collection[tuple[str, str]], using: Collection[str]
    ) -> ModelMarks:
        return await model_registry.marks(self.backend, self.owner, keep, cold, using)

    async def model_marks(self) -> ModelMarks:
        return await model_registry.look(self.backend)

    async def warming(self, model: str, endpoint: str) -> bool:
        return await model_registry.warm(self.backend, "take", self.owner, model, endpoint)

    async def warmed(self, model: str, endpoint: str) -> None:
        await model_registry.warm(self.backend, "warm", self.owner, model, endpoint)

    async def unwarmed(self, model: str, endpoint: str) -> None:
        await model_registry.warm(self.backend, "back", self.owner, model, endpoint)

    async def pin(self, pins: Sequence[PinAsked]) -> Sequence[str]:
        return await model_registry.pin(self.backend, pins, PINS_MOST)

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        scripts = self.backend.scripts
        own = await cancel_markers.cancelled(
            self.backend, requests, foreign="" if scripts.is_cluster else "must"
        )
        if not scripts.is_cluster:
            return own
        # The markers of llm-d's producers are in other slots, out of reach of the script.
        theirs = await cancel_markers.cancelled_elsewhere(scripts, requests)
        return [by_own or by_theirs for by_own, by_theirs in zip(own, theirs, strict=True)]

    async def sweep(self) -> Swept:
        reclaimed = due = turns = revoked = 0
        gone: Sequence[str] = ()
        while True:
            told = await script_calls.sweep(
                self.backend, self._me, _SWEEP_MOST, gone, max_pending=self._max_pending
            )
            reclaimed += told.reclaimed
            due += told.due
            turns += told.turns
            revoked += told.revoked
            # The first sweep reports the owners that hold leases. A second one names those that have ended.
            before, gone = gone, self._gone(told.holders)
            # Owners that were named before and still hold leases hold those of other queues, unless the sweep
            # was cut short.
            if not told.more and set(gone) <= set(before):
                break
        if self.backend.scripts.is_cluster:
            await self._outbox.carry()
        return Swept(reclaimed, due, told.next_due_at, told.lost, turns, revoked)

    def _gone(self, holders: Sequence[str]) -> Sequence[str]:
        """Return the owners that hold leases and are proven to have ended."""
        others = [holder for holder in holders if holder != self.owner]
        return self._prover.gone(others) if self._prover is not None else ()

    async def expired(self, most: int) -> Sequence[Expired]:
        """Return unleased requests that may be past their deadline: at most 1 MB of them, but at least
        one."""
        await self._learn_clock()
        overdue = self._overdue = self._overdue or Overdue(self.unix_now())
        # Both passes, because one of them may have found nothing.
        for _ in range(2):
            walk = overdue.next()
            position = walk.position
            told = await script_calls.overdue(self.backend, position, most, largest=self._largest)
            if size := told.alone_bytes:
                # Before the call, so that a member whose transfer fails does not stop the search.
                walk.offset += 1
                told = await script_calls.overdue(
                    self.backend, position, most, largest=self._largest, alone_bytes=size
                )
            walk.moved(told.until, told.next_range, told.next_offset)
            if told.rows:
                return overdue.found(walk, told.rows)
        return []

    async def expire(self, items: Sequence[tuple[Expired, Settlement]]) -> int:
        writes = [Write(settlement, lies=item) for item, settlement in items]
        done = 0
        for (item, _), status in zip(items, await self._writer.write(self._expire, writes), strict=True):
            if status in (DONE, BAD_LIST, TOO_LARGE):  # LOST and UNWRITABLE have removed nothing
                done += 1
                if self._overdue is not None:
                    self._overdue.removed(item)
        return done

    async def _expire(self, writes: Sequence[Write]) -> Sequence[int]:
        return await script_calls.expire(self.backend, writes, ttl_s=self._ttl_s)

    async def line(self, rate: float | None = None, service_s: float = 0.0) -> LineAhead:
        return await script_calls.outlook(self.backend, self._me.timeout_s, rate, service_s)

    async def wait_for_work(self) -> None:
        await self._wake_ups.wait()

    async def _learn_clock(self) -> None:
        """Make sure that times can be translated, for which one reply of the server is needed."""
        if not self.backend.clock.known:
            await self.counts()
