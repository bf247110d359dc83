"""The dispatch loop: allowance → claim → forward → settle, and the maintenance of leases.

One task runs the turns of the loop: each turn flushes what has finished, then claims what the allowance
leaves free, with two round trips to the queue for any number of requests. Each request runs in a task of its
own from claim to answer, and ends as a completion that the next turn flushes. Nothing else is buffered:
requests are claimed only for free units.

    woken by   a finished request, new work, a reading, a due retry, changed settings, a timer
    turn       flush: settle, release, dead-letter;  allowance → claim → check cancelled → start

Maintenance runs at the same time, each task at its own interval: it renews leases, expires and sweeps
requests, reads cancel markers, and shares limits with other replicas.

While the queue is unreachable nothing is claimed, requests in flight continue, and their completions are kept
until the queue is back. Every step can be repeated: claims by their nonce, the others by the tokens of the
leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial

from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import Poll
from dispatcher.core.limit.utilization import Meter
from dispatcher.core.requests.lease_validity import Tenure
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.units import units_of
from dispatcher.core.sequences.decisions import Goes
from dispatcher.dispatch import completions
from dispatcher.dispatch.admission import BY_ITSELF, TO_SEND, Case, admit, judge
from dispatcher.dispatch.attempts import Tries
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.flush import HandingIn
from dispatcher.dispatch.health_watch import HealthWatch
from dispatcher.dispatch.in_flight import HeldLease, Holding, Try
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.lanes import Lanes
from dispatcher.dispatch.maintenance import Upkeep, permit_of
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess, QueueView, now, withheld
from dispatcher.dispatch.weights import Weighing
from dispatcher.ports import Claimed, Gateway, ModelServers, Permit, Queue, Release
from dispatcher.telemetry.events import Event, emit

GATHER_S = 0.002
"""Time that a flush waits for more completions while other requests are running."""
GATHERED = 8
"""Number of completions that are flushed without waiting: where they come that fast, the duration of a turn
gathers them."""
LARGE_BYTES = 65_536
"""Longest member that is kept beside its parsed request, which holds the payload once more."""
TURN_S = 1.0
"""Longest time between two turns."""
LAST_HAND_IN_S = 10.0
"""Time that a stopping process tries to flush its completions."""


class Dispatcher:
    """One owner that works on one queue. `run` returns after `drain`."""

    def __init__(
        self,
        queue: Queue,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        journal: Journal,
        rand: random.Random | None = None,
        clock: Callable[[], float] | None = None,
        weigh: Callable[[Request], int] = units_of,
        servers: ModelServers | None = None,
    ) -> None:
        """Create the parts of the loop.

        `clock` returns seconds that go on while the machine sleeps; by default, the time of the loop.
        `servers` calls model servers directly; without it, warm-ups go through the gateway.
        """
        self.limiter = limiter
        self.turned_at = 0.0
        """Time of the newest turn."""
        self._options = options
        self._queue = queue
        self._gateway = gateway
        self._journal = journal
        self._lanes = Lanes()
        self._holding = Holding()
        tenure = Tenure(options.lease_s, options.owner_timeout_s)
        self._access = QueueAccess(queue, limiter, tenure, clock or now)
        self._weigh = weigh
        self._weighing = Weighing(self._access, self._holding, self._finish, self._units_of, self._drop)
        self._upkeep = Upkeep(self._access, self._holding, limiter, options, journal)
        self._tries = Tries(
            gateway,
            limiter,
            options,
            self._holding,
            self._access,
            self._upkeep,
            journal,
            rand or random.Random(),
            self._finish,
            self._drop,
            servers,
        )
        self.view: QueueView = self._access.view
        self.batching = self._tries.batching
        self.lineup = self._tries.lineup
        self.models, self.warming = self._tries.models, self._tries.warming
        self.health = HealthWatch(
            limiter, self.view, journal.recent, self._holding, self.models, observing=options.observe
        )
        self._handing = HandingIn(self._access, self._lanes, journal, self._forget)
        self._nonce = self._probe_nonce = ""
        """Nonce of a claim or probe whose reply was lost: the next one repeats it."""
        self._asked_at = self._probe_asked_at = 0.0
        """Time at which it was asked for the first time."""
        self._stop = asyncio.Event()
        self._stop_by = float("inf")
        self._at_rest = asyncio.Event()
        """Set between two turns."""
        self._alarm: asyncio.TimerHandle | None = None
        self._tasks = asyncio.TaskGroup()

    # ── called from outside ──────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Work until drained. An internal error costs its request a failed attempt; an error of the loop is
        raised."""
        async with self._tasks as tasks:
            # Before the first count, see `reclaim_from_ended_owners`.
            await self._upkeep.take_over()
            beside = self._upkeep.start(tasks)
            beside.append(tasks.create_task(self._turns(), name="turns"))
            beside.append(tasks.create_task(self.models.recalling(), name="recall"))
            beside.append(tasks.create_task(self.warming.run(), name="warm-up"))
            beside.append(tasks.create_task(self.health.run(), name="health"))
            self.poke()
            await self._stop.wait()
            await self._run_dry()
            for task in beside:
                task.cancel()
        self._tries.close()

    def drain(self, within_s: float) -> None:
        """Claim nothing more, let requests in flight finish within `within_s`, return the rest, and end.

        A second call can only shorten the time.
        """
        self._stop_by = min(self._stop_by, now() + within_s)
        self.limiter.drain(now())
        self._stop.set()
        # The time limit may be shorter than the one that `_drain_in_flight` waits for.
        self._holding.recheck()

    def reconfigure(self, options: Options) -> None:
        # The options are immutable, so that the parts can keep references to them.
        self._options = self._upkeep.options = options
        self._tries.reconfigure(options)
        tenure = self._access.tenure
        tenure.lease_s, tenure.owner_timeout_s = options.lease_s, options.owner_timeout_s

    def poke(self) -> None:
        """Start a turn, because something has changed that the allowance depends on."""
        self._access.wake.set()

    def read(self, poll: Poll) -> None:
        """Apply the result of a poll of the pool."""
        at = now()
        self.limiter.poll(poll, at)
        self._gateway.resize(self.limiter.allowance(at).limit)
        self._upkeep.count()
        self.poke()

    @property
    def running(self) -> int:
        """Number of requests of this process at the gateway."""
        return self._holding.running

    def allowance(self) -> Allowance:
        return self.limiter.allowance(now())

    # ── the turn ─────────────────────────────────────────────────────────────────────────────────────────

    async def _turns(self) -> None:
        while True:
            await self._access.wake.wait()
            # Clear before working, so that a change during this turn starts another one.
            self._access.wake.clear()
            self.turned_at = now()
            self._at_rest.clear()
            # Flush before claiming: the flush frees the units that the claim uses.
            if self._handing.done:
                await self._hand_in()
            if not self._options.observe:
                await self._take()
                await self._send_together()
            self._set_alarm()
            self._at_rest.set()

    def _set_alarm(self) -> None:
        """Schedule the next turn: when the allowance may change, or after MAX_TURN_INTERVAL_S."""
        at = now()
        allowance = self.limiter.allowance(at)
        alarm_at = at + (self._access.pause_s if self._handing.done else TURN_S)
        if (together_at := self._tries.batching.company.next_at) is not None:
            alarm_at = max(min(alarm_at, together_at), at)
        if allowance.next_check_at is not None:
            # Without the lower bound, a check that is due now would make the loop spin.
            alarm_at = max(min(alarm_at, allowance.next_check_at), at + 1e-4)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(alarm_at, self._access.wake.set)
        self._upkeep.share(allowance)
        self._journal.turned(at, allowance, self.limiter, used=self._holding.running_units)

    def measure(self) -> Meter:
        """Return the integrals over time, until now."""
        at, used = now(), self._holding.running_units
        self._journal.turned(at, self.limiter.allowance(at), self.limiter, used=used)
        return self._journal.meter

    async def _take(self) -> None:
        """Claim requests for the free units, and start them."""
        while True:
            at = now()
            allowance = self.limiter.allowance(at)
            # While the gateway is unreachable, only probes are claimed.
            if allowance.probe:
                await self._probe(allowance)
                return
            free = allowance.limit - self._holding.units - self.limiter.others - self.warming.units
            if free <= 0 or not self._access.work:
                return
            most, units = self._weighing.claim(free, self._tries.batching.company.weightless)
            # If all requests are refused, only a few are tried at a time.
            most = min(most, self._tries.tenants.at_once or most)
            if most < 1:  # requests that wait in groups will use the free units
                return
            lanes = self._lanes.room(self._holding.in_lanes, at)
            # A claim whose reply was lost is repeated with its nonce. Its leases count from when it was first
            # asked.
            if not self._nonce:
                self._nonce, self._asked_at = next(self._handing.nonces), self._access.clock()
            permit = permit_of(allowance, self._options, self.warming.units)
            claim = self._queue.claim(most, self._nonce, permit, lanes=lanes, units=units)
            claimed = await self._access.ask("claim", claim)
            if claimed is None:
                return
            self._nonce = ""
            self._access.heard(self._asked_at)
            self._access.learn(claimed)
            self.limiter.withheld(withheld(claimed, permit))
            self._tries.others_wait = claimed.waiting > 0
            again = self._lanes.claimed(claimed.waiting)
            self._access.work = claimed.waiting > 0 or again
            if claimed.leases:
                waits = await self._start(claimed, self._asked_at, permit)
                if waits and self._handing.done:  # flush first, or others would be claimed ahead
                    return
            elif not again:
                return

    async def _probe(self, allowance: Allowance) -> None:
        """Claim one request to see whether the gateway is back. No other replica probes at the same time."""
        # The previous probe still runs.
        if any(held.probe for held in self._holding):
            return
        if not self._probe_nonce:
            self._probe_nonce, self._probe_asked_at = next(self._handing.nonces), self._access.clock()
        permit = permit_of(allowance, self._options).but(limit=allowance.probe)
        claimed = await self._access.ask("probe", self._queue.probe(self._probe_nonce, permit))
        if claimed is not None:
            self._probe_nonce = ""
            self._access.heard(self._probe_asked_at)
            self._access.learn(claimed)
            self._tries.others_wait = claimed.waiting > 0
            if self._tries.others_wait and claimed.leases:
                (lease,) = claimed.leases
                # One bad request must not be the probe again and again, or the gateway would never count as
                # back.
                rest_s = self._tries.bounces.rest_s(lease.entry, now())
                if rest_s > 0:  # it has probed before: let another one probe, at once
                    self._holding.add(lease, self._probe_asked_at, probe=True)
                    self._finish(completions.returned(lease, after_s=rest_s))
                    return
            if await self._start(claimed, self._probe_asked_at, permit, probe=True):
                self.poke()  # it was not sent: let another one probe, at once
                return
            self.warming.probe(claimed, allowance.probe)
        self.limiter.probed(now(), others=self._tries.others_wait)

    async def _start(
        self,
        claimed: Claimed,
        asked_at: float,
        permit: Permit,
        *,
        probe: bool = False,
        goes: Sequence[Goes] = (),
    ) -> bool:
        """Start the requests of a call at `asked_at` that may be sent.

        Return True if some wait for their turn or their model, or if the probe ended unsent. `granted_turns`
        has the turns that are known already.
        """
        admitted: list[tuple[HeldLease, Request]] = []
        most_bytes = self._options.max_payload_bytes
        for number, lease in enumerate(claimed.leases):
            held = self._holding.add(lease, asked_at, probe=probe)
            held.goes = goes[number] if goes else None
            request = self.lineup.read_before.taken(lease, most_bytes) or admit(lease, most_bytes)
            if isinstance(request, Request):
                admitted.append((held, request))
            else:
                self._finish(request)
        cases: list[tuple[HeldLease, Case]] = []
        unix_now = self._queue.unix_now()
        for held, request in await self.models.direct(admitted):
            held.request, lease = request, held.lease
            self._tries.batching.read(held, request)
            case = Case(lease, request, unix_now, self._options.retry)
            if (ending := judge(case, BY_ITSELF)) is not None:
                self._finish(ending)
                continue
            # The payload is in the request already: do not keep large bytes twice while the request runs.
            if len(lease.member) > LARGE_BYTES:
                held.lease = case.lease = lease.but(member=b"")
            cases.append((held, case))
        cases, waits = await self.lineup.lined_up(cases)  # first, because the conversation adds weight
        read = [(held, case.request) for held, case in cases]
        gone = await self._weighing.without_room(read, permit, self.limiter)
        cases = [each for each in cases if each[0].lease.token not in gone] if gone else cases
        # A claim does not read cancel markers: one lookup for all claimed requests is cheaper.
        cancelled = await self._access.cancelled([held for held, _ in cases])
        lists = {case.request.results for _, case in cases} - {""}
        unfit = await self._queue.refused_lists(lists) if lists else {}
        # Ask again: a refusal since the claim closes the gate for these requests, too.
        at, tenure, clock = now(), self._access.tenure, self._access.clock()
        may_send = (probe or not self.limiter.allowance(at).reason.closed) and not self._stop.is_set()
        for (held, case), yes in zip(cases, cancelled, strict=True):
            case.lease, case.cancelled, case.unfit = held.lease, yes, unfit.get(case.request.results)
            case.may_send, case.ours = may_send, tenure.holds(held.confirmed_at, clock)
            case.without_model = partial(self.models.put_off, held, case.request)
            # Called only if all other rules agree, because the lookup counts the request as sent.
            case.rest_s = partial(self._tries.rest_s, held)
            if (ending := judge(case, TO_SEND)) is not None:
                waits = waits or (isinstance(ending, Release) and ending.awaits != "")
                self._finish(ending)
            elif not self._tries.batching.gathers(held, at, case.request.deadline - unix_now):
                self._tries.begin(Try(case.lease.token, case.request, [held]), self._tasks)
        return waits or (probe and self._handing.ends(claimed.leases))

    def _units_of(self, held: HeldLease, request: Request) -> float:
        item = self._tries.batching.item_of(held)
        return self._weigh(request) if item is None else item.units

    async def _send_together(self) -> None:
        """Send the batch groups that are complete or have waited long enough. Return all leases if nothing
        may be sent."""
        batching = self._tries.batching
        if batching.company.next_at is None:
            return
        allowance = self.allowance()
        if allowance.reason.closed or self._stop.is_set():
            self._tries.give_up(batching.company.given_up())
            return
        room = allowance.limit - self._holding.units - self.limiter.others
        # No request can join soon: none waits in the queue, or there is no room and no running request will
        # make some.
        nobody_comes = not self._tries.others_wait or (room <= 0 and not self.running)
        tries, gone = batching.formed(now(), nobody_comes=nobody_comes, ours=self._access.ours)
        self._tries.give_up(gone)
        seated = [each for each in tries if batching.counts_one(each)]
        back = await self._weighing.seat(seated, permit_of(allowance, self._options, self.warming.units))
        for each in tries:
            if back and any(held.lease.token in back for held in each.riders):
                batching.cut(each)
                self._tries.give_up(held for held in each.riders if held.lease.token not in back)
            else:
                self._tries.begin(each, self._tasks)

    def _finish(self, ending: Ending) -> None:
        self._handing.done.append(ending)
        self._access.wake.set()

    # ── completions ──────────────────────────────────────────────────────────────────────────────────────

    async def _hand_in(self) -> None:
        """Flush all completions, and start the requests that come with the replies."""
        done = self._handing.done
        if self.running and len(done) < GATHERED and not self._stop.is_set():
            # Requests of a pool often finish together; one call for all is cheaper than one each.
            await asyncio.sleep(GATHER_S)
        taken = await self._handing.all(self._permit_to_take_over)
        if taken is None:
            return
        if taken.claimed is None:  # the reply was lost: the next claim repeats it
            self._nonce, self._asked_at, self._access.work = taken.nonce, taken.asked_at, True
            return
        self._tries.others_wait = taken.claimed.waiting > 0
        if taken.claimed.leases:
            await self._start(taken.claimed, taken.asked_at, taken.permit, goes=taken.goes)

    def _permit_to_take_over(self) -> Permit | None:
        """Return the permit to claim next requests of sequences. `None` if a claim now would be impossible or
        different: a probe, a repetition, one by one."""
        allowance = self.allowance()
        other = self._nonce or self._options.observe or self._tries.tenants.at_once or allowance.limit <= 0
        return None if other else permit_of(allowance, self._options, self.warming.units)

    def _drop(self, token: str) -> HeldLease | None:
        self.poke()
        return self._forget(token)

    def _forget(self, token: str) -> HeldLease | None:
        self._tries.batching.forget(token)
        held = self._holding.drop(token)
        if held is not None and held.uses:
            self.models.left(held)
        return held

    async def _run_dry(self) -> None:
        """Let requests in flight finish in time, return the rest, and flush everything."""
        # A claim may be in progress; its leases are known when the queue answers. Later turns claim nothing.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._stop_by):
                await self._at_rest.wait()
        while len(self._holding) and now() < self._stop_by:
            await self._holding.emptied(self._stop_by - now())
        for held in self._holding:
            # Each lease is returned, so that another owner can run its request at once.
            self._holding.cut(held, "drain")
        # If the queue stays unreachable, the leases run out and are taken back by other owners.
        give_up_at = now() + LAST_HAND_IN_S
        while len(self._holding) and now() < give_up_at:
            self.poke()
            await self._holding.emptied(self._access.pause_s)
        if len(self._holding):
            emit(Event.LEFT_BEHIND, leases=len(self._holding))
