"""Tasks that run beside the turns of the loop, whatever the gate says, each at its own interval."""

from __future__ import annotations

import asyncio
import contextlib

from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.forecast import Served, look
from dispatcher.core.requests.request import Request, parse
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.dispatch import completions
from dispatcher.dispatch.change_log import Changes, SequenceChanges, terms
from dispatcher.dispatch.in_flight import Holding
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess, now
from dispatcher.ports import Expired, Overload, Permit, Settlement, Swept
from dispatcher.telemetry.events import Event, emit

EACH_S = 1.0
"""Interval for counts, sweeps and cancel markers."""
OUTLOOK_EACH_S = 5.0
SWEEPS_PER_TIMEOUT = 6
"""Number of sweeps in the shorter of owner_timeout_s and lease_s. Sweeps are the heartbeat of this owner, and
a late sweep looks to the queue like the first one after an outage."""
EXPIRED_AT_ONCE = 256
EXPIRED_ROUNDS = 20
"""Maximum number of batches of EXPIRE_BATCH_SIZE in a row, so that the other tasks of a sweep are not
delayed."""


class Upkeep:
    """Renews leases, sweeps the queue, shares limits, and waits for new work and for cancelled requests."""

    def __init__(
        self, access: QueueAccess, holding: Holding, limiter: Limiter, options: Options, journal: Journal
    ) -> None:
        self.options = options
        self._access = access
        self._queue = access.queue
        self._holding = holding
        self._limiter = limiter
        self._journal = journal
        self._changed = asyncio.Event()
        self._gate = Changes()
        self._sequences = SequenceChanges()
        self._terms = options.sequences.terms
        """Terms that the queue has, or gets with the first request of a sequence."""
        self._overload: Overload | None = None
        """Overload that was seen here and is not shared yet."""
        self._allowance: Allowance | None = None
        """Newest allowance that says something about the pool, not only about this process."""
        self._read_at = float("-inf")
        """Newest reading that was shared, or is about to be."""
        self._expired_at = float("-inf")

    async def take_over(self) -> None:
        """Take back the leases of owners that are proven to have ended, before anything else.

        After the first count, these leases would count as lost since then, and would lower the limit until a
        second reading, although the first reading contains none of their requests.
        """
        if not self.options.observe:
            self._tell(await self._swept())

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        duties = [self._watch, self._look_ahead]
        if not self.options.observe:
            # An observer changes nothing in the queue, and so gives no heartbeat either.
            duties += [self._renew, self._sweep, self._share, self._cut_cancelled]
            duties += [self._see_again, self._listen]
        return [tasks.create_task(duty(), name=duty.__name__.strip("_")) for duty in duties]

    def count(self) -> None:
        """Count the leases soon: between two counts, a new reading may allow more."""
        self._changed.set()

    def share(self, allowance: Allowance, overload: Overload | None = None) -> None:
        """Share the limit and the overload with the other replicas soon if they are new, and log a change of
        the gate."""
        self._say(allowance)
        # Other reasons (draining, queue away, …) close only this process and must not limit the others.
        if not allowance.reason.closed or allowance.reason is Reason.NO_ROOM:
            self._allowance = allowance
        if overload is not None:
            self._overload = overload
        if overload is not None or allowance.read_at > self._read_at:
            self._read_at = allowance.read_at
            self._changed.set()

    async def _share(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            allowance, overload = self._allowance, self._overload
            if allowance is None:  # no reading yet: read_at=0 is older than any reading of others
                permit = Permit(limit=0, read_at=0.0, lost=0, retry_after_max_s=self.options.retry.max_s)
            else:
                permit = permit_of(allowance, self.options)
            asked_at = self._access.clock()
            told = await self._access.ask("share", self._queue.share(permit, overload))
            if told is None:
                await asyncio.sleep(self._access.pause_s)
                self._changed.set()
                continue
            # A newer overload may have arrived during the call: keep it and share again.
            if self._overload is overload:
                self._overload = None
            else:
                self._changed.set()
            self._access.heard(asked_at)
            self._access.learn(told)
            self._access.wake.set()

    async def _watch(self) -> None:
        """Count the queue, and log changes of the gate even if the loop does not turn."""
        while True:
            counts = await self._access.ask("counts", self._queue.counts())
            if counts is not None:
                self._access.view.counts, self._access.view.counted_at = counts, now()
                for event, told in self._sequences.look(counts.news, now()):
                    emit(event, **told)
                self._limiter.waiting(counts.claimable, now())
                if self.options.observe:
                    # An observer never claims, so it learns the leases of the others only from these counts.
                    self._limiter.leases(now(), others=counts.units, young=0, lost=0)
            self._say(self._limiter.allowance(now()))
            await asyncio.sleep(EACH_S)

    def _say(self, allowance: Allowance) -> None:
        """Log a change of the gate's reason, if it is to be logged now."""
        at = now()
        untold = self._gate.look(allowance.reason, at)
        if untold is None:
            return
        age_s = min((at - reading.closed_at for reading in self._limiter.readings), default=None)
        told = terms(allowance, in_flight=self._limiter.in_flight, reading_age_s=age_s)
        if untold:
            told["untold"] = untold
        emit(Event.GATE, **told)

    async def _look_ahead(self) -> None:
        """Update the forecast for operators: who misses the deadline, and which replicas work."""
        served = Served()
        while True:
            rate, service_s = served.rate, served.service_s
            try:
                line = await self._access.ask("line", self._queue.line(rate, service_s))
                if line is not None:
                    self._access.view.outlook = look(line, rate, service_s)
                    served.observe(line)
            except Exception as error:  # an internal error in a display must stop nothing
                self._access.view.outlook = None
                emit(Event.SURPRISE, where="outlook", error=repr(error))
            await asyncio.sleep(OUTLOOK_EACH_S)

    async def _renew(self) -> None:
        """Renew the leases of this process; at once if some of them may have been taken back."""
        pause = self.options.lease_s / 3
        robbed = self._access.robbed
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await robbed.wait()
            robbed.clear()
            pause = self.options.lease_s / 3 if await self._renewed() else self._access.pause_s

    async def _renewed(self) -> bool:
        """Renew the leases once. Return True if the queue answered."""
        # Take the time before the call: the queue counts from when it ran, which is never earlier.
        held_now, asked_at = list(self._holding), self._access.clock()
        renewed = await self._access.ask("renew", self._queue.renew([held.lease for held in held_now]))
        if renewed is None:
            return False
        self._access.heard(asked_at)
        self._access.learn(renewed)
        gone = set(renewed.lost)
        for held in held_now:
            if held.lease.entry not in gone:
                held.confirmed_at = asked_at
        for held in self._holding.in_work():  # a lease may have ended here meanwhile
            if held.lease.entry in gone:
                self._journal.lost(held)
                emit(Event.LEASE_LOST, entry=held.lease.entry)
                self._holding.cut(held, "lost")
        return True

    async def _sweep(self) -> None:
        """Return requests to their places whose owners died, whose leases ran out or whose retry is due, and
        answer those past their deadline."""
        while True:
            swept = await self._swept()
            shortest = min(self.options.lease_s, self.options.owner_timeout_s)
            pause = min(EACH_S, shortest / SWEEPS_PER_TIMEOUT)
            self._tell(swept)
            if self._terms != self.options.sequences.terms:
                await self._tell_terms(self.options.sequences.terms)
            if swept is not None:
                self._access.heard_of_losses(swept.lost)
                if swept.reclaimed or swept.due or swept.turns or swept.revoked:
                    self._access.found_work()
                # Sweeps may be more frequent than this with a short lease or owner timeout.
                if now() - self._expired_at >= EACH_S:
                    self._expired_at = now()
                    await self._expire()
                    await self._end_unserved()
                if swept.next_due_at is not None:
                    # Without the lower bound, a request that is due but not moved yet makes this loop spin.
                    pause = min(pause, max(0.01, swept.next_due_at - now()))
            await asyncio.sleep(pause)

    async def _tell_terms(self, terms: SequenceTerms) -> None:
        """Send changed settings of sequences to the queue, so that waiting requests follow them without a new
        request."""
        asked_at = self._access.clock()
        told = await self._access.ask("line_up", self._queue.line_up([], terms))
        if told is not None:
            self._terms = terms
            self._access.heard(asked_at)
            self._access.learn(told)

    async def _swept(self) -> Swept | None:
        asked_at = self._access.clock()
        swept = await self._access.ask("sweep", self._queue.sweep())
        if swept is not None:
            self._access.heard(asked_at)
        return swept

    def _tell(self, swept: Swept | None) -> None:
        if swept is not None and swept.reclaimed:
            self._journal.reclaimed(swept.reclaimed)
            emit(Event.TAKEN_BACK, leases=swept.reclaimed)

    async def _expire(self) -> None:
        for _ in range(EXPIRED_ROUNDS):
            found = await self._access.ask("expired", self._queue.expired(EXPIRED_AT_ONCE)) or ()
            unix_now = self._queue.unix_now()
            parsed = [(one, parse(one.member)) for one in found]
            over = [
                (one, completions.overdue(one, request))
                for one, request in parsed
                if isinstance(request, Request) and request.deadline <= unix_now
            ]
            if over:
                self._journal.expired(await self._access.ask("expire", self._queue.expire(over)) or 0)
                # The end of a request may make the next one of its sequence claimable.
                if any(settlement.turn is not None for _, settlement in over):
                    self._access.found_work()
            # A full batch without a single expired request means scores that are no deadlines: stop here.
            if len(found) < EXPIRED_AT_ONCE or not over:
                return

    async def _end_unserved(self) -> None:
        """Answer the remaining requests of sequences that have ended."""
        for _ in range(EXPIRED_ROUNDS):
            found = await self._access.ask("unserved", self._queue.unserved(EXPIRED_AT_ONCE)) or ()
            by_code: dict[ErrorCode, list[tuple[Expired, Settlement]]] = {}
            for one in found:
                by_code.setdefault(one.code, []).append((one.item, completions.unserved(one)))
            ended = 0
            for code, items in by_code.items():
                answered = await self._access.ask("expire", self._queue.expire(items)) or 0
                self._journal.unserved(code, answered)
                ended += answered
            if not ended:
                return

    async def _cut_cancelled(self) -> None:
        """Stop requests in flight that were cancelled. This closes the connection, so that the gateway stops,
        too."""
        while True:
            await asyncio.sleep(EACH_S)
            running = self._holding.in_work()
            for held, gone in zip(running, await self._access.cancelled(running), strict=True):
                if gone:
                    self._holding.cut(held, "cancelled")

    async def _see_again(self) -> None:
        """Retry cancel markers that cannot be read. Nothing is claimed until they can."""
        while True:
            await self._access.blind.wait()
            await asyncio.sleep(self._access.pause_s)
            await self._access.look_again()

    async def _listen(self) -> None:
        while True:
            if await self._access.ask("work", self._work_came()):
                self._access.found_work()
                shared = self._access.view.shared
                if shared is not None and shared.paused:
                    self._changed.set()  # the wake-up may mean that the pause has ended: ask
            else:
                await asyncio.sleep(self._access.pause_s)

    async def _work_came(self) -> bool:
        await self._queue.wait_for_work()
        return True


def permit_of(allowance: Allowance, options: Options, apart: int = 0) -> Permit:
    return Permit(allowance.limit, allowance.read_at, allowance.lost, options.retry.max_s, apart)
