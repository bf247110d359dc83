"""The loop: allowance → claim → forward → settle, and the upkeep of what is held.

One task turns the loop: it hands in what has finished, then claims what the allowance leaves free, in two
round trips however many requests that is. A request lives in a task of its own from claim to answer and
ends as an item in `_done`, which the next turn hands in. Nothing else is buffered: a claim happens only for
a free slot.

    woken by   a finished request, new work, a reading, a retry that is due, a change of settings, an alarm
    turn       done → settle/release/bury;  allowance → claim → check cancelled → start

Upkeep runs beside it, each in a task with its own pace: leases are renewed, expired and due requests swept,
cancel markers looked up, limits shared with other replicas.

When the queue cannot be reached nothing is claimed, requests in flight go on, and what they bring stays in
`_done` until the queue is back. Every step can be repeated: claims by nonce, the others fenced by the
lease's token.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from dispatcher.core.allowance import Allowance
from dispatcher.core.bounces import Bounces
from dispatcher.core.harvest import Meter
from dispatcher.core.limiter import Limiter
from dispatcher.core.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    Unreachable,
    after_losses,
)
from dispatcher.core.request import Rejection, Request, parse
from dispatcher.core.stranger import Stranger
from dispatcher.core.tenants import Tenants
from dispatcher.core.tenure import Tenure
from dispatcher.core.units import units_of
from dispatcher.dispatch import endings
from dispatcher.dispatch.access import Access, View, now, withheld
from dispatcher.dispatch.endings import Ending
from dispatcher.dispatch.holding import Cut, Held, Holding
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.suspects import Suspects
from dispatcher.dispatch.upkeep import Upkeep, permit_of
from dispatcher.dispatch.weighing import Weighing
from dispatcher.ports import (
    Burial,
    Claimed,
    Forwarded,
    Gateway,
    Lease,
    Overload,
    Permit,
    Queue,
    Release,
    Settled,
    Settlement,
)
from dispatcher.telemetry.events import Event, emit

GATHER_S = 0.002
"""A finished request waits this long for others to be handed in with it, when others are running."""
GATHERED = 8
"""So many are worth a call of their own: where they come fast, a turn's own length gathers them."""
LARGE_BYTES = 65_536
"""A member longer than this is not kept beside its request, which holds the payload once more."""
TURN_S = 1.0
"""The loop turns at least this often."""
LOOK_S = 0.1
"""While there is no gateway, those that are connected are looked at this often."""
LAST_HAND_IN_S = 10.0
"""How long a stopping process tries to hand in what it has."""


class Dispatcher:
    """One owner at work on one queue. `run()` returns after `drain()`."""

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
    ) -> None:
        """`clock`: seconds that go on while the machine sleeps; without one, those of the loop."""
        self.limiter = limiter
        self.turned_at = 0.0
        """When the loop last turned."""
        self._options = options
        self._queue = queue
        self._gateway = gateway
        self._journal = journal
        self._random = rand or random.Random()
        self._tenants = Tenants()
        self._bounces = Bounces()
        self._stranger = Stranger()
        self._suspects = Suspects()
        self._holding = Holding()
        self._access = Access(queue, limiter, Tenure(options.lease_s, options.owner_timeout_s), clock or now)
        self._weighing = Weighing(self._access, self._holding, self._finish, weigh)
        self._upkeep = Upkeep(self._access, self._holding, limiter, options, journal)
        self._done: list[Ending] = []
        self._refused = (float("-inf"), 0)
        """Under the reading of when refusals came last, and the most in flight at one of them."""
        self._free: float | None = None
        self._free_by = float("nan"), 0
        """The reading and the limit by which it was free: while the gate is open it changes with either."""
        self._nonce = self._probe_nonce = ""
        """Of a claim or probe whose reply was lost: the next one repeats it."""
        self._asked_at = self._probe_asked_at = 0.0
        """When it was asked for the first time."""
        self._others_wait = False
        """The newest claim or probe left some to be claimed."""
        self._stop = asyncio.Event()
        self._stop_by = float("inf")
        self._alarm: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None

    # From outside.

    async def run(self) -> None:
        """Work until drained. A surprise in a request costs it an attempt; one in the loop is raised."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._upkeep.take_over()
            beside = self._upkeep.start(tasks)
            beside.append(tasks.create_task(self._turns(), name="turns"))
            self.poke()
            await self._stop.wait()
            await self._run_dry()
            for task in beside:
                task.cancel()
        if self._looking is not None:
            self._looking.cancel()

    def drain(self, within_s: float) -> None:
        """Claim nothing more, let what runs finish within `within_s`, give the rest back, end.

        Again with less time: end sooner.
        """
        self._stop_by = min(self._stop_by, now() + within_s)
        self.limiter.drain(now())
        self._stop.set()
        self._holding.stir()

    def reconfigure(self, options: Options) -> None:
        if options.gateway != self._options.gateway:
            self._stranger = Stranger()
        self._options = self._upkeep.options = options
        tenure = self._access.tenure
        tenure.lease_s, tenure.owner_timeout_s = options.lease_s, options.owner_timeout_s

    def poke(self) -> None:
        """Something that the allowance depends on has changed."""
        self._access.wake.set()

    def readings_came(self) -> None:
        """The limiter was handed new readings."""
        self._upkeep.count()
        self.poke()

    @property
    def running(self) -> int:
        """Requests of this process at the gateway."""
        return self._holding.running

    @property
    def view(self) -> View:
        return self._access.view

    def allowance(self) -> Allowance:
        return self.limiter.allowance(now())

    # The turn.

    async def _turns(self) -> None:
        while True:
            await self._access.wake.wait()
            self._access.wake.clear()
            self.turned_at = now()
            if self._done:
                await self._hand_in()
            if not self._options.observe:
                await self._take()
            self._set_alarm()

    def _set_alarm(self) -> None:
        """Wake when the allowance wants to be asked again, and each second at the latest."""
        allowance = self.allowance()
        at = now() + (self._access.pause_s if self._done else TURN_S)
        if allowance.next_check_at is not None:
            at = max(min(at, allowance.next_check_at), now() + 1e-4)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(at, self._access.wake.set)
        self._upkeep.share(allowance)
        self.measure()

    def measure(self) -> Meter:
        """The integrals over time, until now."""
        at, limiter = now(), self.limiter
        allowance = limiter.allowance(at)
        seen = allowance.read_at, allowance.limit
        if seen != self._free_by or allowance.reason.closed:
            self._free, self._free_by = limiter.free(at), seen
        used = self._holding.running_units
        self._journal.turned(at, allowance, used=used, free=self._free, waiting=limiter.work)
        return self._journal.meter

    async def _take(self) -> None:
        """Claim what is free now, and start it."""
        while True:
            allowance = self.allowance()
            if allowance.probe:
                await self._probe(allowance)
                return
            free = allowance.limit - self._holding.units - self.limiter.others
            if free <= 0 or not self._access.work:
                return
            most, units = self._weighing.claim(free)
            most = min(most, self._tenants.at_once or most)
            suspects = self._suspects.room(self._holding.suspects, now())
            if not self._nonce:
                self._nonce, self._asked_at = secrets.token_hex(8), self._access.clock()
            permit = permit_of(allowance, self._options)
            claim = self._queue.claim(most, self._nonce, permit, suspects=suspects, units=units)
            claimed = await self._access.ask("claim", claim)
            if claimed is None:
                return
            self._nonce = ""
            self._access.heard(self._asked_at)
            self._access.learn(claimed)
            self.limiter.withheld(withheld(claimed, permit))
            self._others_wait = claimed.waiting > 0
            again = self._suspects.claimed(claimed.waiting)
            self._access.work = claimed.waiting > 0 or again
            if claimed.leases:
                await self._start(claimed, self._asked_at, permit)
            elif not again:
                return

    async def _probe(self, allowance: Allowance) -> None:
        """One request to see whether the gateway is back; no other replica probes meanwhile."""
        if any(held.probe for held in self._holding):
            return
        if not self._probe_nonce:
            self._probe_nonce, self._probe_asked_at = secrets.token_hex(8), self._access.clock()
        permit = replace(permit_of(allowance, self._options), limit=allowance.probe)
        claimed = await self._access.ask("probe", self._queue.probe(self._probe_nonce, permit))
        if claimed is not None:
            self._probe_nonce = ""
            self._access.heard(self._probe_asked_at)
            self._access.learn(claimed)
            self._others_wait = claimed.waiting > 0
            if self._others_wait and claimed.leases:
                (lease,) = claimed.leases
                rest_s = self._bounces.rest_s(lease.entry, now())
                if rest_s > 0:  # it has probed before: let another one, at once
                    self._holding.add(lease, self._probe_asked_at, probe=True)
                    self._finish(endings.returned(lease, after_s=rest_s))
                    return
            await self._start(claimed, self._probe_asked_at, permit, probe=True)
        self.limiter.probed(now(), others=self._others_wait)

    async def _start(self, claimed: Claimed, asked_at: float, permit: Permit, *, probe: bool = False) -> None:
        """Look at what was claimed by a call at `asked_at`, and start what may be sent."""
        ready: list[tuple[Held, Request]] = []
        for lease in claimed.leases:
            held = self._holding.add(lease, asked_at, probe=probe)
            parsed = parse(lease.member, max_payload_bytes=self._options.max_payload_bytes)
            if isinstance(parsed, Rejection):
                self._finish(endings.rejected(lease, parsed))
                continue
            held.request = parsed
            if (verdict := after_losses(lease.losses, self._options.retry)) is not None:
                self._finish(endings.deadly(lease, parsed, verdict))
            elif parsed.deadline <= self._queue.unix_now():
                self._finish(endings.expired(lease, parsed))
            else:
                if len(lease.member) > LARGE_BYTES:
                    held.lease = replace(lease, member=b"")
                ready.append((held, parsed))
        ready = await self._weighing.fit(ready, permit, self.limiter.most)
        cancelled = await self._access.cancelled([held for held, _ in ready])
        refused = await self._queue.refused_lists({request.results for _, request in ready} - {""})
        # What happened meanwhile counts: a refusal since the claim closes the gate for these too.
        is_open = (probe or not self.allowance().reason.closed) and not self._stop.is_set()
        for (held, request), gone in zip(ready, cancelled, strict=True):
            if gone:
                self._finish(endings.cancelled(held.lease, request))
            elif (why := refused.get(request.results)) is not None:
                self._finish(endings.unlisted(held.lease, request, why))
            elif gone is None or not is_open or not self._access.ours(held):
                self._finish(endings.returned(held.lease))
            elif (rest_s := self._rest_s(held.lease, request)) > 0:
                self._finish(endings.returned(held.lease, after_s=rest_s))
            elif self._tasks is not None:
                task = self._tasks.create_task(self._run(held, request))
                task.add_done_callback(partial(self._never_began, held, request))
                self._holding.started(held, task)

    # One request.

    async def _run(self, held: Held, request: Request) -> None:
        lease = held.lease
        started = now()
        self.limiter.sent(lease.token, started, lease.units)
        self._journal.sent(held, request, self._queue.unix_now())
        try:
            deadline = started + request.deadline - self._queue.unix_now()
            ours = partial(self._access.ours, held)
            forwarded = await self._gateway.forward(request, deadline=deadline, may_send=ours)
        except asyncio.CancelledError:
            self.limiter.answered(lease.token, now())
            if held.cut is None:
                raise
            self._was_cut(held, held.cut, request)
            return
        except Exception as error:
            emit(Event.SURPRISE, where="forward", error=repr(error))
            forwarded = Forwarded(Failed(f"the dispatcher failed: {error!r}"), started, now())
        finally:
            self._holding.back(held)
        self.limiter.answered(lease.token, forwarded.ended_at, forwarded.opened_s)
        outcome = self._gateway_seen(held, request, forwarded)
        self._journal.tried(held, forwarded, outcome)
        self._finish(self._decide(lease, request, outcome))

    def _never_began(self, held: Held, request: Request, _task: asyncio.Task[None]) -> None:
        """A task that is cut before its first step runs nothing of its own, so its end is seen to here."""
        if held.task is not None:
            self._holding.back(held)
            self._was_cut(held, held.cut or "drain", request)

    def _was_cut(self, held: Held, why: Cut, request: Request) -> None:
        if why == "cancelled":
            self._finish(endings.cancelled(held.lease, request))
        elif why == "drain":
            self._finish(endings.returned(held.lease))
        else:
            self._drop(held.lease.token)

    def _gateway_seen(self, held: Held, request: Request, forwarded: Forwarded) -> Outcome:
        """Tell the limiter what the outcome says of the gateway; the outcome as it counts for the request."""
        outcome, at, sent_at = self._stranger.judged(forwarded.outcome), forwarded.ended_at, forwarded.sent_at
        limiter, tenant = self.limiter, self._tenant(request)
        entry, again = held.lease.entry, held.lease.refusals > 0
        match outcome:
            case Overloaded():
                self._reached(entry, at, sent_at)
                read_at = limiter.allowance(at).read_at
                alone = all(other.claimed_at >= read_at for other in self._holding.at_gateway())
                teaches = self._tenants.refused(tenant, at, read_at, again=again, alone=alone)
                # The limiter has counted it out already, and those that were refused with it.
                before = self._refused[1] if self._refused[0] == read_at else 0
                self._refused = (read_at, max(before, limiter.in_flight + held.lease.units))
                overload = Overload(
                    at=at,
                    until=at + min(outcome.retry_after_s or 0.0, self._options.retry.max_s),
                    capacity=outcome.capacity and teaches,
                    in_flight=self._refused[1],
                )
                self._access.overloaded(overload)
                self._upkeep.share(limiter.allowance(at), overload)
                return outcome
            case Delivered() | TooLarge():
                self._reached(entry, at, sent_at)
                self._tenants.accepted(tenant, sent_at, again=again)
                return outcome
            case Failed(nobody_home=True):
                gone = limiter.nobody_home(at, sent_at, outcome.why, self._connected())
                blamed = self._bounces.bounced(entry, at)
                if gone:
                    self._without_gateway()
                    outcome = Unreachable(outcome.why, self._make_way(entry, request, at))
                elif not blamed:
                    again_s = self._bounces.again_s(entry, at - sent_at, self._options.retry)
                    outcome = Unreachable(outcome.why, again_s)
            case Failed() if outcome.status is not None:
                self._reached(entry, at, sent_at)
            case Unreachable():
                limiter.unreachable(at, outcome.why)
                self._without_gateway()
            case _:
                pass  # not sent, or no answer: it says nothing of the gateway
        self._tenants.ended(tenant, again=again)
        return outcome

    def _reached(self, entry: int, at: float, sent_at: float) -> None:
        self.limiter.reached(at, sent_at)
        self._bounces.answered(entry, sent_at)

    def _make_way(self, entry: int, request: Request, at: float) -> float:
        """How long it lies aside, so that others can show whether there is a gateway; alone it does that."""
        since = self.limiter.without_gateway_since
        if since is None or not self._others_wait:
            return 0.0
        left_s = request.deadline - self._queue.unix_now()
        return self._bounces.make_way(entry, at, since=since, left_s=left_s)

    def _without_gateway(self) -> None:
        self._look_again()
        self._gateway.resize(0)  # what is kept alive may be dead: a probe must prove the way anew

    def _rest_s(self, lease: Lease, request: Request) -> float:
        """How long its tenant, or the refused that it belongs to, rest."""
        return self._tenants.rest_s(self._tenant(request), now(), again=lease.refusals > 0)

    def _tenant(self, request: Request) -> str:
        return request.metadata.get(self._options.tenant_from, "")

    def _decide(self, lease: Lease, request: Request, outcome: Outcome) -> Ending:
        policy, at = self._options.retry, self._queue.unix_now()
        return endings.after_try(lease, request, outcome, at, policy, self._random.random())

    def _look(self) -> None:
        """While there is no gateway: see whether a probe, or who was sent along with the first that failed,
        stays connected. Who does has reached it, though the answer is still to come."""
        if self.limiter.look(now(), self._connected()):
            for held in self._holding:
                held.probe = False
            self.poke()
        self._looking = None
        self._look_again()

    def _look_again(self) -> None:
        if self._looking is None and self.limiter.without_gateway_since is not None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _connected(self) -> Iterator[float]:
        """Since when each request at the gateway holds its connection."""
        for held in self._holding.at_gateway():
            since = None if held.request is None else self._gateway.connected(held.request)
            if since is not None:
                yield since

    def _finish(self, ending: Ending) -> None:
        self._done.append(ending)
        self.poke()

    # Handing in.

    async def _hand_in(self) -> None:
        """Everything that has finished, one call for each way to end."""
        if self.running and len(self._done) < GATHERED and not self._stop.is_set():
            await asyncio.sleep(GATHER_S)
        done, self._done = self._done, []
        settlements = [ending for ending in done if isinstance(ending, Settlement)]
        releases = [ending for ending in done if isinstance(ending, Release)]
        burials = [ending for ending in done if isinstance(ending, Burial)]
        if settlements:
            self._ended(settlements, await self._access.ask("settle", self._queue.settle(settlements)))
        if releases:
            self._ended(releases, await self._access.ask("release", self._queue.release(releases)))
        if burials:
            self._ended(burials, await self._access.ask("bury", self._queue.bury(burials)))

    def _ended(self, handed_in: Sequence[Ending], answers: Sequence[Settled | None] | None) -> None:
        if answers is None:
            self._done.extend(handed_in)
            return
        for ending, answer in zip(handed_in, answers, strict=True):
            if answer is None:  # alone, it waits for the next turn
                self._done.append(ending)
                continue
            held = self._drop(endings.lease_of(ending).token)
            self._journal.ended(held, ending, answer, now(), self._queue.unix_now())
            if self._suspects.ended(ending) or (isinstance(ending, Release) and ending.delay_s <= 0):
                self._access.work = True

    def _drop(self, token: str) -> Held | None:
        self.poke()
        return self._holding.drop(token)

    async def _run_dry(self) -> None:
        """Let what runs finish in time, give back the rest, hand everything in."""
        while len(self._holding) and now() < self._stop_by:
            await self._holding.emptied(self._stop_by - now())
        for held in self._holding:
            self._holding.cut(held, "drain")
        give_up_at = now() + LAST_HAND_IN_S
        while len(self._holding) and now() < give_up_at:
            self.poke()
            await self._holding.emptied(self._access.pause_s)
        if len(self._holding):
            emit(Event.LEFT_BEHIND, leases=len(self._holding))
