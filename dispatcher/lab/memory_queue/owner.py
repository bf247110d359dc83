"""Queue in memory as one dispatcher uses it: translates between the owner's clock and the pool's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dispatcher.core.requests.forecast import LineAhead
from dispatcher.core.requests.lanes import ONE_OF_EACH, Lane
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.core.sequences.turns import Turn
from dispatcher.lab.memory_queue import results, sequences, steps
from dispatcher.lab.memory_queue.entries import Entry
from dispatcher.lab.memory_queue.queue_admin import MemoryStore
from dispatcher.lab.memory_queue.state import Grant
from dispatcher.lab.memory_queue.steps import Caller
from dispatcher.lab.memory_queue.sweep import sweep
from dispatcher.ports import (
    Burial,
    Claimed,
    Counts,
    Expired,
    HandedOver,
    Lease,
    Leases,
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
    Shared,
    Swept,
    Unserved,
    Weighed,
)
from dispatcher.queue.owners import Prover


class MemoryQueue:
    """One owner's access to a MemoryStore. Implements `ports.Queue`.

    `clock` is the clock of the owner if it is not that of the pool. All else is as in RedisQueue.
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
        max_pending: int = 0,
    ) -> None:
        self.store = store
        self.owner = owner
        self._line = store.line
        self._pool = store.pool
        self._clock = clock
        self._poll_s = poll_s
        self._timeout_s = owner_timeout_s
        self._prover = prover
        self._max_pending = max_pending
        self._woken = asyncio.Event()
        self._pool.wakers.append(self._woken)

    def __repr__(self) -> str:
        return f"<MemoryQueue {self.owner} of {self.store!r}>"

    def close(self) -> None:
        """Fall silent, as if the process had ended."""
        if self._woken in self._pool.wakers:
            self._pool.wakers.remove(self._woken)

    def unix_now(self) -> float:
        return self._pool.unix_now()

    async def refused_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        found = ((name, self._line.refused_list(name)) for name in names)
        return {name: why for name, why in found if why is not None}

    async def claim(
        self,
        most: int,
        nonce: str,
        permit: Permit,
        *,
        lanes: Mapping[Lane, int] = ONE_OF_EACH,
        units: int = 1,
    ) -> Claimed:
        return self._claim(most, nonce, permit, lanes, units)

    async def probe(self, nonce: str, permit: Permit) -> Claimed:
        return self._claim(1, nonce, permit, ONE_OF_EACH, 1, probing=True)

    def _claim(
        self,
        most: int,
        nonce: str,
        permit: Permit,
        lanes: Mapping[Lane, int],
        units: int,
        *,
        probing: bool = False,
    ) -> Claimed:
        me = self._begin()
        theirs = self._theirs_of(permit)
        taken, waiting = steps.claim(
            self._line, me, nonce, theirs, most=most, lanes=lanes, units=units, probing=probing
        )
        return Claimed([_lease(each) for each in taken], self._leases(me), self._shared(), waiting)

    async def renew(self, leases: Sequence[Lease]) -> Renewed:
        me = self._begin()
        return Renewed(steps.renew(self._line, me, leases), self._leases(me), self._shared())

    async def weigh(self, weights: Sequence[tuple[Lease, int]], permit: Permit) -> Weighed:
        me = self._begin()
        fits = steps.weigh(self._line, me, weights, self._theirs_of(permit))
        return Weighed(fits, self._leases(me), self._shared())

    async def line_up(self, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms) -> LinedUp:
        me = self._begin()
        verdicts = sequences.line_up(self._line, turns, terms)
        return LinedUp(verdicts, self._leases(me), self._shared())

    async def unserved(self, most: int) -> Sequence[Unserved]:
        self._begin()
        return sequences.unserved(self._line, most)

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        me = self._begin()
        if overload is not None:
            overload = replace(overload, at=self._theirs(overload.at), until=self._theirs(overload.until))
        steps.renew(self._line, me, permit=self._theirs_of(permit), overload=overload)
        return Renewed((), self._leases(me), self._shared())

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | None]:
        self._begin()
        return results.settle(self._line, [(each, None) for each in settlements])

    async def hand_over(self, settlements: Sequence[Settlement], nonce: str, permit: Permit) -> HandedOver:
        me, line, came = self._begin(), self._line, list[Entry]()
        answers = results.settle(line, [(each, None) for each in settlements], came)
        taken = steps.hand_over(line, me, nonce, self._theirs_of(permit), came)
        waiting = line.waiting_count - line.passed_over({}, taken)
        claimed = Claimed([_lease(each) for each in taken], self._leases(me), self._shared(), waiting)
        return HandedOver(answers, claimed, [sequences.goes_of(line, each.entry) for each in taken])

    async def release(self, releases: Sequence[Release]) -> Sequence[Settled]:
        return steps.release(self._line, self._begin().now, releases)

    async def recall(self, models: Sequence[str]) -> Recalled:
        self._begin()
        return steps.recall(self._line, models)

    async def awaited(self) -> Mapping[str, int]:
        self._begin()
        return steps.awaited(self._line)

    async def marks(
        self, keep: Collection[tuple[str, str]], cold: Collection[tuple[str, str]], using: Collection[str]
    ) -> ModelMarks:
        return self._pool.board.marks(self._begin().now, self.owner, keep, cold, using)

    async def model_marks(self) -> ModelMarks:
        return self._pool.board.look(self._begin().now)

    async def warming(self, model: str, endpoint: str) -> bool:
        return self._pool.board.take(self._begin().now, self.owner, model, endpoint)

    async def warmed(self, model: str, endpoint: str) -> None:
        self._pool.board.give_back(self._begin().now, self.owner, model, endpoint, warm=True)

    async def unwarmed(self, model: str, endpoint: str) -> None:
        self._pool.board.give_back(self._begin().now, self.owner, model, endpoint, warm=False)

    async def pin(self, pins: Sequence[PinAsked]) -> Sequence[str]:
        return self._pool.board.pin(self._begin().now, pins)

    async def bury(self, burials: Sequence[Burial]) -> Sequence[Settled | None]:
        self._begin()
        return results.settle(self._line, [(each.settlement, each.reason) for each in burials])

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self._begin()
        return [steps.is_cancelled(self._line, name, token) for name, token in requests]

    async def sweep(self) -> Swept:
        me = self._begin()
        self._line.max_pending = self._max_pending
        reclaimed, due, due_at, turns, revoked = sweep(self._line, me, ())
        # Leases of owners that are proven to have ended are taken back in a second sweep, as in Redis.
        if gone := self._gone():
            more, _, due_at, again, _ = sweep(self._line, me, gone)
            reclaimed, turns = reclaimed + more, turns + again
        due_at = None if due_at is None else self._mine(due_at)
        return Swept(reclaimed, due, due_at, self._pool.lost, turns, revoked)

    def _gone(self) -> Sequence[str]:
        """Return the owners that hold leases and are proven to have ended."""
        others = [owner for owner in self._pool.held_by if owner != self.owner]
        return self._prover.gone(others) if self._prover is not None else ()

    async def expired(self, most: int) -> Sequence[Expired]:
        self._begin()
        return results.overdue(self._line, most)

    async def expire(self, items: Sequence[tuple[Expired, Settlement]]) -> int:
        self._begin()
        return results.expire(self._line, items)

    async def counts(self) -> Counts:
        return await self.store.counts()

    async def line(self, rate: float | None = None, service_s: float = 0.0) -> LineAhead:
        """Return a snapshot in which each score is a span of its own, whatever the rate."""
        return steps.outlook(self._line, self._begin())

    async def wait_for_work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._woken.wait()
            except TimeoutError:
                self._begin()
                if self._line.claimable:
                    return
            else:
                self._woken.clear()
                return

    def _begin(self) -> Caller:
        return Caller(self.owner, self._timeout_s, steps.begin(self._pool))

    def _apart_by(self) -> float:
        return 0.0 if self._clock is None else self._clock() - self._pool.clock()

    def _mine(self, at: float) -> float:
        return at + self._apart_by()

    def _theirs(self, at: float) -> float:
        return at - self._apart_by()

    def _theirs_of(self, permit: Permit) -> Permit:
        return permit if self._clock is None else permit.but(read_at=self._theirs(permit.read_at))

    def _leases(self, me: Caller) -> Leases:
        pool = self._pool
        others = pool.units - pool.held_by[self.owner]
        return Leases(self._mine(me.now), pool.units, others, steps.young(pool, me), pool.lost, pool.stray)

    def _shared(self) -> Shared:
        pool = self._pool
        overload = pool.overload
        if overload is not None and self._clock is not None:
            overload = replace(overload, at=self._mine(overload.at), until=self._mine(overload.until))
        permit = pool.permit
        return Shared(
            limit=None if permit is None else permit.limit,
            read_at=0.0 if permit is None else self._mine(permit.read_at),
            overload=overload,
            prober=pool.prober,
            paused=pool.pause is not None,
        )


def _lease(grant: Grant) -> Lease:
    entry = grant.entry
    return Lease(
        entry.id,
        grant.token,
        entry.member,
        entry.score,
        entry.deliveries,
        entry.attempts,
        entry.refusals,
        entry.losses,
        entry.lane,
        entry.units,
        entry.last_try,
    )
