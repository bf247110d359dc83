"""The queue in memory: what the Redis scripts do, without Redis, on a clock that is passed in.

For simulation in virtual time and for fast tests. `MemoryStore` is what would be in Redis, and the side of
producers and operators (`ports.Desk`); each dispatcher attaches to it with a `MemoryQueue` of its own
(`ports.Queue`). Both pass the conformance suite that the Redis queue passes, so the promises stand in
`ports.py` and only what is peculiar to this form is said here. No step awaits, so each is atomic.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from dispatcher.core.outlook import REPLICAS, Line, Replica, lying
from dispatcher.ports import (
    Burial,
    Claimed,
    Counts,
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
from dispatcher.queue.constants import AHEAD_S, CLAIM_BYTES, GAP_S, REPLY_TTL_S, SAME_READING_S, YOUNG_S
from dispatcher.queue.memory.desk import NEVER_CLAIMED, Held, MemoryStore, Place
from dispatcher.queue.owners import Prover


class MemoryQueue:
    """One owner's door to a MemoryStore.

    `clock`: the owner's own, where it stands apart from the store's. The rest is as RedisQueue's.
    """

    def __init__(
        self,
        store: MemoryStore,
        owner: str,
        *,
        clock: Callable[[], float] | None = None,
        poll_s: float = 0.2,
        owner_timeout_s: float = 5.0,
        prover: Prover | None = None,
    ) -> None:
        self.store = store
        self.owner = owner
        self._clock = clock
        self._poll_s = poll_s
        self._timeout_s = owner_timeout_s
        self._prover = prover
        self._woken = asyncio.Event()
        store._wakers.append(self._woken)

    def __repr__(self) -> str:
        return f"<MemoryQueue {self.owner} of {self.store!r}>"

    def close(self) -> None:
        """Leave: it falls silent, as if the process were gone."""
        if self._woken in self.store._wakers:
            self.store._wakers.remove(self._woken)

    def unix_now(self) -> float:
        return self.store.unix_now()

    async def refused_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        found = ((name, self.store._refused_list(name)) for name in names)
        return {name: why for name, why in found if why is not None}

    async def claim(self, most: int, nonce: str, permit: Permit, *, suspects: int = 1) -> Claimed:
        now = self._begin()
        held = self._claimed_before(nonce)
        if held is None:
            self._beat(now)
            if self._prober() == self.owner:
                self.store._probe = None
            room = self._room(permit, now)
            held = self._take(min(most, room), suspects, now)
            self._remember(nonce, held, now)
        return self._claimed(held, suspects, now)

    async def probe(self, nonce: str, permit: Permit) -> Claimed:
        now = self._begin()
        store = self.store
        held = self._claimed_before(nonce)
        if held is None:
            self._beat(now)
            room = self._room(permit, now, probing=True) if store._probe is None else 0
            held = self._take(min(1, room), 1, now)
            self._remember(nonce, held, now)
            if held:
                store._probe, store._probe_waits = held[0].entry.id, float("-inf")
        return self._claimed(held, 1, now)

    async def renew(self, leases: Sequence[Lease]) -> Renewed:
        now = self._begin()
        self._beat(now)
        lost = []
        for lease in leases:
            held = self.store._held_as(lease)
            if held is None:
                lost.append(lease.entry)
                continue
            held.touched_at = now
            held.expires_at = now + self.store.lease_s
            self.store._touched.append((now, lease.entry))
        return Renewed(lost, self._leases(now), self._shared())

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        now = self._begin()
        self._beat(now)
        self._believe(permit, now)
        known = self.store._overload
        if overload is not None:
            mine = replace(overload, at=self._theirs(overload.at), until=self._theirs(overload.until))
            mine = _by(mine, now)
            if known is not None:
                newest = mine if mine.at >= known.at else known
                mine = replace(newest, until=max(mine.until, known.until))
            self.store._overload = replace(mine, until=mine.wait_until(permit.retry_after_max_s))
        return Renewed((), self._leases(now), self._shared())

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | None]:
        self._begin()
        return self._settle_each([(each, None) for each in settlements])

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]:
        now = self._begin()
        said = []
        for release in releases:
            held = self.store._held_as(release.lease)
            if held is None:
                said.append(Settled.LOST)
                continue
            entry = held.entry
            entry.attempts += release.attempt
            entry.refusals += release.refusal
            entry.deliveries -= release.undelivered
            self.store._end(held)
            if release.delay_s > 0:
                self.store._move(entry, Place.DELAYED, now + release.delay_s)
            else:
                self.store._move(entry, Place.RETURNED)
            said.append(Settled.DONE)
        return said

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled | None]:
        self._begin()
        return self._settle_each([(each.settlement, each.reason) for each in burials])

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self._begin()
        store = self.store
        return [store._is_cancelled(name, token) for name, token in requests]

    async def sweep(self) -> Swept:
        now = self._begin()
        store = self.store
        if store._tick is not None:
            gap_s = now - store._tick
            if gap_s < -AHEAD_S:
                self._stepped_back(now, gap_s)
            if gap_s > store.lease_s / 3:
                store._quiet_until = now + store.lease_s / 3
            if gap_s > (min(self._timeout_s / 2, GAP_S) if self._timeout_s > 0 else GAP_S):
                longest_s = min(max(store._beats.values(), default=0.0) - store._tick, store.lease_s)
                calm_s = max(longest_s, self._timeout_s)
                store._beats_quiet_until = max(store._beats_quiet_until, now + calm_s)
        store._tick = now
        self._beat(now)
        stray = store._reclaim_of(store._silent(now)) if now >= store._beats_quiet_until else 0
        stray += store._reclaim_late(now) if now >= store._quiet_until else 0
        store._stray += stray
        reclaimed = stray + store._reclaim_of(self._gone())
        due = 0
        while (due_at := store._delayed.key()) is not None and due_at <= now:
            store._move(store._delayed.pop(), Place.RETURNED)
            due += 1
        store._deadlines.tidy(sum(store._count.values()))
        return Swept(reclaimed, due, None if due_at is None else self._mine(due_at), store._lost)

    def _stepped_back(self, now: float, by: float) -> None:
        """The store's clock did: the times kept there follow it, but for what was written since."""
        store = self.store
        for held in store._held.values():
            if held.expires_at > now + store.lease_s:
                held.expires_at += by
                held.touched_at += by
                heapq.heappush(store._expiries, (held.expires_at, held.entry.id))
        store._touched = deque(each for each in store._touched if each[0] <= now)
        store._delayed.shift(by)
        store._beats = {owner: until + by for owner, until in store._beats.items()}
        store._quiet_until += by
        store._beats_quiet_until = max(store._beats_quiet_until + by, now + self._timeout_s)

    def _gone(self) -> Sequence[str]:
        others = [owner for owner in self.store._held_by if owner != self.owner]
        return self._prover.gone(others) if self._prover is not None else ()

    def _prober(self) -> str | None:
        store = self.store
        return None if store._probe is None else store._held[store._probe].owner

    def _beat(self, now: float) -> None:
        if self._timeout_s > 0:
            self.store._beats[self.owner] = now + self._timeout_s

    async def expired(self, most: int) -> Sequence[Expired]:
        self._begin()
        store = self.store
        now = store.unix_now()
        while (deadline := store._deadlines.key()) is not None and deadline <= now:
            entry = store._deadlines.pop()
            store._overdue.append((entry.moves, entry))
        found: list[Expired] = []
        for _ in range(len(store._overdue)):
            if len(found) == most:
                break
            moves, entry = store._overdue.popleft()
            if entry.moves == moves:
                store._overdue.append((moves, entry))
                if len(entry.member) > store.largest:
                    continue
                found.append(Expired(entry.where, entry.member))
        return found

    async def expire(self, items: Sequence[tuple[Expired, Settlement]]) -> int:
        self._begin()
        store = self.store
        done = 0
        for item, settlement in items:
            entry_id = int(item.place.partition(":")[0])
            never_claimed = entry_id == NEVER_CLAIMED
            entry = store._pending.get(item.member) if never_claimed else store._entries.get(entry_id)
            if entry is not None and entry.where == item.place:
                store._write(settlement)
                store._forget(entry)
                done += 1
        return done

    async def counts(self) -> Counts:
        return await self.store.counts()

    async def line(self, rate: float | None = None, service_s: float = 0.0) -> Line:
        """Each score is a span of its own, whatever the rate."""
        now = self._begin()
        store = self.store
        owners = {owner for owner, until in store._beats.items() if now < until} | set(store._held_by)
        replicas = [
            Replica(
                owner,
                store._held_by.get(owner, 0),
                None
                if (until := store._beats.get(owner)) is None
                else round(max(0.0, now - until + self._timeout_s), 3),
            )
            for owner in owners
        ]
        spans, heads = lying(store._in_line())
        return Line(
            store.unix_now(), spans, heads, store._settled, len(store._held), replicas[:REPLICAS], len(owners)
        )

    async def wait_for_work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._woken.wait()
            except TimeoutError:
                self._begin()
                if self.store._counts().pending:
                    return
            else:
                self._woken.clear()
                return

    def _claimed(self, held: Sequence[Held], suspects: int, now: float) -> Claimed:
        store = self.store
        more = suspects > sum(each.entry.suspect for each in held)
        waiting = store._counts().pending - (0 if more else store._suspects)
        return Claimed([_lease(each) for each in held], self._leases(now), self._shared(), waiting)

    def _begin(self) -> float:
        """The store's time of this step, if there is a store to reach. What it holds of later than that is
        of now: its clock has stepped back. A refusal teaches no ceiling again by that."""
        store = self.store
        store._check_up()
        now = store.clock()
        if store._permit is not None and store._permit.read_at > now + AHEAD_S:
            store._permit = replace(store._permit, read_at=now)
        known = store._overload
        if known is not None and (overload := _by(known, now)) is not known:
            store._overload = replace(overload, capacity=False)
        return now

    def _apart_by(self) -> float:
        return 0.0 if self._clock is None else self._clock() - self.store.clock()

    def _mine(self, at: float) -> float:
        return at + self._apart_by()

    def _theirs(self, at: float) -> float:
        return at - self._apart_by()

    def _read_time(self, permit: Permit, now: float) -> float:
        """When its reading was taken, by the store's clock. By a clock of before that stepped back nobody
        knows: it is older than any."""
        at = self._theirs(permit.read_at)
        return at if at <= now + AHEAD_S else float("-inf")

    def _believe(self, permit: Permit, now: float) -> Permit:
        """Take a permit for the shared one if its reading is no older; the shared one by then."""
        mine = replace(permit, read_at=self._read_time(permit, now))
        known = self.store._permit
        if known is None or mine.read_at >= known.read_at - SAME_READING_S:
            newest = mine.read_at if known is None else max(mine.read_at, known.read_at)
            self.store._permit = known = replace(mine, read_at=newest)
        return known

    def _room(self, permit: Permit, now: float, *, probing: bool = False) -> int:
        store = self.store
        if store._pause is not None:
            return 0
        shared = self._believe(permit, now)
        overload = store._overload
        if overload is not None and (
            now < overload.wait_until(permit.retry_after_max_s) or self._read_time(permit, now) <= overload.at
        ):
            return 0
        limit = min(each.limit - (store._lost - each.lost) for each in (permit, shared))
        free = limit - len(store._held)
        if not probing:
            return free - (now < store._probe_waits <= now + store.lease_s)
        if free < 1:
            store._probe_waits = now + min(self._timeout_s or store.lease_s, store.lease_s)
        return free

    def _take(self, most: int, suspects: int, now: float) -> list[Held]:
        store = self.store
        taken: list[Held] = []
        size = 0
        while len(taken) < most:
            line = store._next(suspects)
            entry = None if line is None else line.first()
            if line is None or entry is None:
                break
            size += len(entry.member)
            if taken and size > CLAIM_BYTES:
                break
            suspects -= entry.suspect
            taken.append(store._lease(line.pop(), self.owner, now))
        return taken

    def _claimed_before(self, nonce: str) -> list[Held] | None:
        known = self.store._nonces.get((self.owner, nonce))
        if known is None:
            return None
        held = (self.store._held.get(entry) for entry in known[2])
        return [each for each in held if each is not None and each.token in known[1]]

    def _remember(self, nonce: str, held: list[Held], now: float) -> None:
        nonces = self.store._nonces
        nonces[self.owner, nonce] = (
            now,
            tuple(each.token for each in held),
            tuple(each.entry.id for each in held),
        )
        while nonces[oldest := next(iter(nonces))][0] < now - REPLY_TTL_S:
            del nonces[oldest]

    def _settle_each(self, ends: Sequence[tuple[Settlement, str | None]]) -> Sequence[Settled | None]:
        """One whose result has no place keeps its lease, and its neighbours go on."""
        said: list[Settled | None] = []
        stuck = None
        for settlement, reason in ends:
            try:
                said.append(self._settle(settlement, reason))
            except QueueUnavailableError as error:
                stuck = error
                said.append(None)
        if stuck is not None and not any(said):
            raise stuck
        return said

    def _settle(self, settlement: Settlement, bury: str | None) -> Settled:
        store = self.store
        held = store._held_as(settlement.lease)
        if held is None:
            return Settled.LOST
        said = store._write(settlement)
        store._end(held)
        store._settled += 1
        if bury is None:
            store._forget(held.entry)
        else:
            store._bury(held.entry, bury)
        return said

    def _leases(self, now: float) -> Leases:
        store = self.store
        touched = store._touched
        while touched and touched[0][0] < now - YOUNG_S:
            touched.popleft()
        young = set()
        for at, entry in touched:
            held = store._held.get(entry)
            if held is not None and held.touched_at == at and held.owner != self.owner:
                young.add(entry)
        live = len(store._held)
        others = live - store._held_by[self.owner]
        return Leases(self._mine(now), live, others, len(young), store._lost, store._stray)

    def _shared(self) -> Shared:
        store = self.store
        overload = store._overload
        if overload is not None and self._clock is not None:
            overload = replace(overload, at=self._mine(overload.at), until=self._mine(overload.until))
        permit = store._permit
        return Shared(
            limit=None if permit is None else permit.limit,
            read_at=0.0 if permit is None else self._mine(permit.read_at),
            overload=overload,
            prober=self._prober(),
            paused=store._pause is not None,
        )


def _by(overload: Overload, now: float) -> Overload:
    """The same, of now where it is said to be of later."""
    if overload.at <= now + AHEAD_S:
        return overload
    return replace(overload, at=now, until=now + max(0.0, overload.until - overload.at))


def _lease(held: Held) -> Lease:
    entry = held.entry
    return Lease(
        entry.id,
        held.token,
        entry.member,
        entry.score,
        entry.deliveries,
        entry.attempts,
        entry.refusals,
        entry.losses,
        entry.suspect,
    )
