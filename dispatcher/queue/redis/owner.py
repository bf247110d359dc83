"""The queue in Redis or Valkey, as one dispatcher sees it. docs/queue-contract.md has its keys and scripts.

Each method is one script, or one per megabyte. Times cross this boundary from the loop's clock to Redis TIME
and back (clock.py); what the scripts keep is in Redis time alone, so that the owners' clocks need not agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dispatcher.core.outlook import REPLICAS, Line
from dispatcher.core.oversize import ENVELOPE_BYTES
from dispatcher.core.request import NO_LIST, ErrorCode, decode_result, failed, misdirected
from dispatcher.ports import (
    Burial,
    CallRefusedError,
    Claimed,
    Expired,
    Lease,
    Leases,
    Overload,
    Permit,
    QueueUnavailableError,
    Release,
    Renewed,
    Settled,
    Settlement,
    Shared,
    Swept,
)
from dispatcher.queue.constants import BAD_LIST, CLAIM_BYTES, DONE, REPLY_TTL_S, STUCK, TOO_LARGE
from dispatcher.queue.keys import ACTIVE, CANCEL, MAX_TOKEN_BYTES, Names
from dispatcher.queue.owners import Prover
from dispatcher.queue.redis.desk import RedisDesk
from dispatcher.queue.redis.destinations import Destinations, key_of
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.queue.redis.overdue import Overdue, place_of
from dispatcher.queue.redis.replies import leases_of, line_of, untold_bytes
from dispatcher.queue.redis.scripts import (
    SCRIPT_BYTES,
    SCRIPT_ITEMS,
    Argument,
    BrokenCallError,
    Client,
    Reply,
    in_steps,
)
from dispatcher.queue.redis.wake import WakeUps
from dispatcher.telemetry.events import Event, emit

_CLAIM_MOST = 1000
_MOVES = 3
_SWEEP_MOST = 500
_STATUSES = (Settled.DONE, Settled.LOST, Settled.BAD_LIST, None, Settled.TOO_LARGE)
_WRITTEN = (DONE, BAD_LIST, TOO_LARGE)
_ALONE_BYTES = 65_536
"""A larger result that the server does not take, while it answers, is taken to be too large for it."""
_WRITES_S = 10.0
"""A call begins to write no more large results after so long: claims wait for it."""
_SPLITS = 200
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Write:
    """A result on its way to a list, and what the script needs beside it."""

    settlement: Settlement
    head: tuple[Argument, ...]
    tail: tuple[Argument, ...] = ()
    instead: int = DONE
    """What it comes to where the result stands for another one: INVALID_REQUEST for one whose list was
    refused, TOO_LARGE for one that the server does not take."""

    @property
    def size(self) -> int:
        return len(self.settlement.result) + sum(len(part) for part in self.head if isinstance(part, bytes))


class RedisQueue(RedisDesk):
    """One owner's door to a queue. Implements ports.Queue and ports.Desk.

    `owner`: unique among the dispatchers, those that died included. `lease_s` must be the same for all of
    them. `owner_timeout_s`: after so long without a call it is taken for dead; 0: only its leases run out.
    `prover`: knows which owners have ended, so that nobody waits for their silence.
    `result_ttl_s`: 0 keeps result lists for ever. `max_payload_bytes`: where a member is too long to have a
    smaller payload, its head alone is moved (core/oversize.py). A call takes a few seconds at most, retries
    included, but for large values.
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
        max_payload_bytes: int = 16 << 20,
        try_s: float = 3.0,
    ) -> None:
        super().__init__(client, names, try_s=try_s)
        self.owner = owner
        self._largest = max_payload_bytes + ENVELOPE_BYTES
        self._unmoved: Counter[int] = Counter()
        """How often a large member did not get through, by its entry."""
        self.dead_dropped = 0
        """The dead that went because there were more than dead_max, as far as this owner buried them."""
        self._lease_s = lease_s
        self._timeout_s = owner_timeout_s
        self._prover = prover
        self._ttl_s = result_ttl_s
        self._dead_max = dead_max
        self._outbox = Outbox(self._scripts, names, result_ttl_s)
        self._destinations = Destinations(self._scripts, names, self._outbox)
        self._overdue: Overdue | None = None
        self._wake_ups = WakeUps(self._scripts, names, poll_s)
        self._doubted: set[int] = set()
        """Large results that the server, which is there, has not taken once: by the hash of what they end."""

    def __repr__(self) -> str:
        return f"<RedisQueue {self.names.queue} for {self.owner}>"

    async def aclose(self) -> None:
        """Close the connections. What is leased runs out unless it was released."""
        await self._wake_ups.aclose()
        await super().aclose()

    @property
    def _me(self) -> list[Argument]:
        """What every step of an owner's begins with."""
        return [self.owner, self._timeout_s, self._lease_s]

    def unix_now(self) -> float:
        return self._clock.server(asyncio.get_running_loop().time())

    async def claim(self, most: int, nonce: str, permit: Permit, *, suspects: int = 1) -> Claimed:
        await self._learn_clock()
        return await self._claim(max(0, min(most, _CLAIM_MOST)), nonce, permit, suspects)

    async def probe(self, nonce: str, permit: Permit) -> Claimed:
        await self._learn_clock()
        return await self._claim(1, nonce, permit, 1, probing=True)

    async def _claim(
        self, most: int, nonce: str, permit: Permit, suspects: int, *, probing: bool = False
    ) -> Claimed:
        args: list[Argument] = [*self._me, most, CLAIM_BYTES, max(0, suspects), secrets.token_hex(16)]
        args += [REPLY_TTL_S, int(probing), *self._belief(permit), self._largest]
        reply = await self._run("claim", args, [self.names.reply(f"{self.owner}:{nonce}")])
        facts, waiting, flat = reply.value
        count, shared = self._facts(reply, facts)
        leases = leases_of(flat)
        if size := untold_bytes(flat):
            leases = await self._with_member(leases[0], size)
        return Claimed(leases, count, shared, waiting)

    async def _with_member(self, lease: Lease, size: int) -> list[Lease]:
        """A lease with its large member; none where it is another's by now. One that did not get through
        three times is given up: its head says that it is too large."""
        key = f"{self.names.prefix}:members"
        client = self._scripts.client
        try:
            member = await self._scripts.attempt(lambda: client.hget(key, lease.entry), size=size)
        except BrokenCallError:
            self._unmoved[lease.entry] += 1
            if self._unmoved[lease.entry] < _MOVES:
                raise
            member = (await self._run("shorten", [lease.entry, lease.token])).value
        del self._unmoved[lease.entry]
        return [] if member is None else [replace(lease, member=member)]

    async def renew(self, leases: Sequence[Lease]) -> Renewed:
        lost: list[int] = []
        at = 0
        while True:
            step = leases[at : at + SCRIPT_ITEMS]
            renewed = await self._renew(len(step), [part for lease in step for part in _fence(lease)])
            lost += renewed.lost
            at += SCRIPT_ITEMS
            if at >= len(leases):
                return replace(renewed, lost=lost)

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        await self._learn_clock()
        beliefs = self._belief(permit)
        if overload is not None:
            beliefs += [self._server(overload.at), self._server(overload.until)]
            beliefs += [int(overload.capacity), overload.in_flight]
        return await self._renew(0, beliefs)

    def _belief(self, permit: Permit) -> list[Argument]:
        return [permit.limit, self._server(permit.read_at), permit.lost, permit.retry_after_max_s]

    async def _renew(self, count: int, rest: Sequence[Argument]) -> Renewed:
        reply = await self._run("renew", [*self._me, count, *rest])
        facts, lost = reply.value
        return Renewed(lost, *self._facts(reply, facts))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | None]:
        return await self._end([_Write(each, _fence(each.lease), (0, "")) for each in settlements])

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled | None]:
        return await self._end(
            [_Write(each.settlement, _fence(each.settlement.lease), (1, each.reason)) for each in burials]
        )

    async def _end(self, writes: Sequence[_Write]) -> Sequence[Settled | None]:
        """Write results and end leases, in this order of statuses."""
        return [_STATUSES[status] for status in await self._write("settle", writes)]

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]:
        said: list[Settled] = []
        for batch in in_steps(releases, lambda _: 0):
            args: list[Argument] = [REPLY_TTL_S]
            for each in batch:
                flags = (int(each.attempt), int(each.refusal), int(each.undelivered))
                args += [*_fence(each.lease), f"{each.delay_s:.6f}", *flags]
            reply = await self._run("release", args, [self._new_reply()])
            now, *statuses = reply.value
            self._saw(reply, now)
            said += [Settled.LOST if status else Settled.DONE for status in statuses]
        return said

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        client = self._scripts.client
        keys = [
            key_of(key)
            for request_id, token in requests
            for key in (CANCEL + request_id, self.names.cancel(request_id, token[:MAX_TOKEN_BYTES]))
        ]
        if not keys:
            return []

        async def read() -> Sequence[bytes | None]:
            if self._scripts.is_cluster:
                return list(await client.mget_nonatomic(keys))
            return list(await client.mget(keys))

        markers = await self._scripts.attempt(read)
        return [
            token != "" and token.encode(errors="surrogatepass") in markers[2 * at : 2 * at + 2]
            for at, (_, token) in enumerate(requests)
        ]

    async def sweep(self) -> Swept:
        reclaimed = due = 0
        gone: Sequence[str] = ()
        while True:
            reply = await self._run("sweep", [*self._me, _SWEEP_MOST, *gone])
            now, some_reclaimed, some_due, next_due, more, lost, holders = reply.value
            self._saw(reply, now)
            reclaimed += some_reclaimed
            due += some_due
            gone = self._gone(holders)
            if not (more or gone):
                break
        if self._scripts.is_cluster:
            await self._outbox.carry()
        at = None if next_due is None else self._loop_time(next_due)
        return Swept(reclaimed, due, at, lost)

    def _gone(self, holders: Sequence[bytes]) -> Sequence[str]:
        """Those of the owners that hold leases which are proven to have ended."""
        others = [name for holder in holders if (name := holder.decode(errors="replace")) != self.owner]
        return self._prover.gone(others) if self._prover is not None else ()

    async def expired(self, most: int) -> Sequence[Expired]:
        """Unleased requests that may be past their deadline; at most 1 MB of them (one at least)."""
        await self._learn_clock()
        overdue = self._overdue = self._overdue or Overdue(self.unix_now())
        for _ in range(2):
            walk = overdue.next()
            at: list[Argument] = [walk.after, walk.until, walk.range, walk.offset, most]
            told = (await self._run("overdue", [*at, SCRIPT_BYTES, self._largest])).value
            if told[3:] and isinstance(size := told[3][2], int):
                walk.offset += 1  # should it not get through, it waits for its turn in the line
                told = (await self._run("overdue", [*at, size, self._largest], size=size)).value
            until, next_range, next_offset, *rows = told
            walk.moved(until, next_range, next_offset)
            if rows:
                return overdue.found(walk, rows)
        return []

    async def expire(self, items: Sequence[tuple[Expired, Settlement]]) -> int:
        writes = [_Write(settlement, (place_of(item), item.member)) for item, settlement in items]
        done = 0
        for (item, _), status in zip(items, await self._write("expire", writes), strict=True):
            if status in _WRITTEN:
                done += 1
                if self._overdue is not None:
                    self._overdue.removed(item)
        return done

    async def line(self, rate: float | None = None, service_s: float = 0.0) -> Line:
        args: list[Argument] = [self._timeout_s, repr(rate or 0.0), repr(service_s)]
        reply = await self._run("outlook", [*args, _SPLITS, _HEAD_BYTES, REPLICAS])
        self._saw(reply, reply.value[0])
        return line_of(reply.value)

    async def wait_for_work(self) -> None:
        await self._wake_ups.wait()

    async def _write(self, script: str, writes: Sequence[_Write]) -> list[int]:
        """Run settle or expire for all of them; a status for each, `STUCK` where it stays as it is.

        A refused list is answered on the default list. Raises where nothing could be written.
        """
        checked = [self._checked(write) for write in writes]
        statuses, failure = await self._write_apart(script, checked)
        again = [at for at, status in enumerate(statuses) if status == BAD_LIST and not checked[at].instead]
        if again:
            refused, failure = await self._write_apart(script, [_refused(checked[at]) for at in again])
            for at, status in zip(again, refused, strict=True):
                statuses[at] = status
        if self._scripts.is_cluster:
            with contextlib.suppress(QueueUnavailableError):
                await self._clean_up(checked, statuses)
        if statuses and statuses.count(STUCK) == len(statuses):
            raise failure or CallRefusedError(
                f"{self.names.results} is no list that this user may push to: results have no place to go"
            )
        return statuses

    async def _write_apart(
        self, script: str, writes: Sequence[_Write]
    ) -> tuple[list[int], QueueUnavailableError | None]:
        """In steps of a megabyte, large results last, and so that what cannot be written holds up nothing
        else: a step that fails while the server answers is repeated write by write. And why any failed."""
        clock = asyncio.get_running_loop().time
        enough_at = clock() + _WRITES_S
        statuses = [STUCK] * len(writes)
        order = sorted(range(len(writes)), key=lambda at: writes[at].size > _ALONE_BYTES)
        steps = deque(in_steps(order, lambda at: writes[at].size))
        failure: QueueUnavailableError | None = None
        while steps:
            step = steps.popleft()
            some = [writes[at] for at in step]
            large = some[-1].size > _ALONE_BYTES
            if large and clock() > enough_at:
                break
            try:
                for at, status in zip(step, await self._write_some(script, some), strict=True):
                    statuses[at] = status
                if self._doubted:
                    self._doubted.difference_update(hash(write.head) for write in some)
            except BrokenCallError as error:
                alone, before, failure = len(step) == 1, failure, error
                if alone and not large:
                    if before is not None:
                        break  # it is not this one
                    continue
                if not await self._scripts.answers(self.names.queue):
                    break
                if alone:
                    statuses[step[0]] = await self._write_less(script, some[0], error)
                else:
                    steps.extendleft([at] for at in reversed(step))
                    failure = None
            except QueueUnavailableError as error:
                failure = error
                break
        return statuses, failure

    async def _write_less(self, script: str, write: _Write, why: QueueUnavailableError) -> int:
        """A large result that the server did not take, though it is there: when that happens again, say
        TOO_LARGE instead."""
        known = hash(write.head)
        if known not in self._doubted:
            self._doubted.add(known)
            return STUCK
        settlement = write.settlement
        message = f"the result ({len(settlement.result)} bytes) cannot be written to the queue: {why}"
        told = settlement.request_id or decode_result(settlement.result).id
        short = replace(
            settlement, result=failed(told, ErrorCode.TOO_LARGE, message, token=settlement.request_token)
        )
        try:
            (status,) = await self._write_some(
                script, [replace(write, settlement=short, instead=write.instead or TOO_LARGE)]
            )
        except QueueUnavailableError:
            return STUCK
        self._doubted.discard(known)
        return status

    async def refused_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        return await self._destinations.all_refused(names)

    def _checked(self, write: _Write) -> _Write:
        name = write.settlement.results
        why = self._destinations.refused(name) if name else None
        return write if why is None else _refused(write, why)

    async def _write_some(self, script: str, writes: Sequence[_Write]) -> list[int]:
        default = key_of(self.names.results)
        # A default list in another slot must not be named to the script: the outbox stands in.
        keys = [self._new_reply(), self.names.outbox if self._outbox.needs(default) else default]
        args: list[Argument] = [REPLY_TTL_S, self._ttl_s, int(not self._scripts.is_cluster)]
        if script == "settle":
            args.append(self._dead_max)
        for write in writes:
            settlement = write.settlement
            name = key_of(settlement.results or self.names.results)
            how = 0 if not settlement.result else 2 if self._outbox.needs(name) else 1
            token = key_of(settlement.request_token)
            request = key_of(settlement.request_id) if 0 < len(token) <= MAX_TOKEN_BYTES else b""
            args += [*write.head, how, name, settlement.result, request, token, *write.tail]
        reply = await self._run(script, args, keys, size=sum(write.size for write in writes))
        if script == "expire":
            statuses = reply.value
        else:
            now, dropped, *statuses = reply.value
            self._saw(reply, now)
            if dropped:
                emit(Event.DEAD_DROPPED, count=dropped, dead_max=self._dead_max)
                self.dead_dropped += dropped
        return [
            status or write.instead  # done: what it stands for
            for status, write in zip(statuses, writes, strict=True)
        ]

    async def _clean_up(self, writes: Sequence[_Write], statuses: Sequence[int]) -> None:
        """On a Cluster: what the script could not reach, in other slots.

        Not to be told as a failure, for everything is settled: the sweep carries what stays in the outbox,
        and markers expire.
        """
        if not self._outbox.waits and any(
            self._outbox.needs(key_of(each.settlement.results or self.names.results)) for each in writes
        ):
            await self._outbox.carry()
        done = [
            write.settlement
            for write, status in zip(writes, statuses, strict=True)
            if status in _WRITTEN and write.settlement.request_id and write.settlement.request_token
        ]
        await asyncio.gather(
            *(
                self._scripts.run("forget", [key_of(kind + each.request_id)], [key_of(each.request_token)])
                for each in done
                for kind in (ACTIVE, CANCEL)
            )
        )

    def _new_reply(self) -> str:
        return self.names.reply(secrets.token_hex(8))

    def _loop_time(self, server: bytes) -> float:
        return self._clock.loop(float(server), asyncio.get_running_loop().time())

    def _facts(self, reply: Reply, facts: Sequence[Any]) -> tuple[Leases, Shared]:
        now, live, own, young, lost, stray, limit, read_at, *rest = facts
        overload_at, until, capacity, in_flight, prober, paused = rest
        self._saw(reply, now)
        count = Leases(self._loop_time(now), live, live - own, young, lost, stray)
        overload = None
        if overload_at is not None:
            at, until_at = self._loop_time(overload_at), self._loop_time(until)
            overload = Overload(at, until_at, bool(capacity), in_flight)
        return count, Shared(
            limit,
            0.0 if limit is None else self._loop_time(read_at),
            overload,
            None if prober is None else prober.decode(),
            bool(paused),
        )


def _fence(lease: Lease) -> tuple[int, str]:
    return lease.entry, lease.token


def _refused(write: _Write, why: str = NO_LIST) -> _Write:
    """The same with INVALID_REQUEST to the default list."""
    settlement = write.settlement
    told = settlement.request_id or decode_result(settlement.result).id
    result = misdirected(told, settlement.results, why, token=settlement.request_token)
    return replace(write, settlement=replace(settlement, result=result, results=""), instead=BAD_LIST)
