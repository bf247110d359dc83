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
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dispatcher import endings
from dispatcher.core.allowance import Allowance, explain
from dispatcher.core.budget import Reason
from dispatcher.core.limiter import Limiter
from dispatcher.core.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    RetryPolicy,
    TooLarge,
    Unreachable,
    after,
    after_losses,
)
from dispatcher.core.request import Rejection, Request, parse
from dispatcher.core.tenants import Tenants
from dispatcher.endings import Ending
from dispatcher.ports import (
    Burial,
    Claimed,
    Counts,
    Forwarded,
    Gateway,
    Lease,
    Overload,
    Permit,
    Queue,
    QueueUnavailableError,
    Release,
    Renewed,
    Settled,
    Settlement,
    Shared,
)
from dispatcher.telemetry import Event, Metrics, emit

GATHER_S = 0.002
"""A finished request waits this long for others to be handed in with it, when others are running."""
SWEEP_S = 1.0
CANCEL_CHECK_S = 1.0
RETRY_QUEUE_S = (0.1, 1.0)
"""Pauses while the queue cannot be reached: from, to."""
HAND_IN_BYTES = 1 << 20
"""One call hands in results up to this, one result at least: a script holds up the whole of Redis."""
SUSPECT_DELIVERIES = 3
"""From this delivery on a request whose owners died runs without another such beside it in its process."""
CONNECTED_S = 2.0
"""A probe that has been connected this long has reached the gateway, though its answer is still to come."""
LAST_HAND_IN_S = 10.0
"""How long a stopping process tries to hand in what it has."""
EXPIRED_AT_ONCE = 256

T = TypeVar("T")


@dataclass(slots=True)
class Options:
    """What the loop takes from the settings; may be replaced while it runs."""

    retry: RetryPolicy
    lease_s: float = 30.0
    max_payload_bytes: int = 16 << 20
    tenant_from: str = ""
    """The metadata attribute that names a request's tenant."""
    observe: bool = False
    """Decide and show everything, touch nothing."""


@dataclass(slots=True)
class _Held:
    """A lease of ours, from claim until the queue confirmed its end."""

    lease: Lease
    request: Request | None = None
    task: asyncio.Task[None] | None = None
    probe: bool = False
    cut: Literal["", "cancelled", "lost", "drain"] = ""
    """Why its task was cancelled."""


@dataclass(slots=True)
class View:
    """What the loop knows of the queue, for people."""

    counts: Counts | None = None
    shared: Shared | None = None
    problem: str | None = None


class Dispatcher:
    """One owner at work on one queue. `run()` returns after `drain()`."""

    def __init__(
        self,
        queue: Queue,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        metrics: Metrics,
        rand: random.Random | None = None,
    ) -> None:
        self.limiter = limiter
        self.options = options
        self.view = View()
        self._queue = queue
        self._gateway = gateway
        self._metrics = metrics
        self._tenants = Tenants()
        self._random = rand or random.Random()
        self._held: dict[str, _Held] = {}
        self._done: list[Ending] = []
        self._overload: Overload | None = None
        """Ours, not shared yet."""
        self._work = True
        """There may be something to claim."""
        self._nonce = self._probe_nonce = ""
        """Of a claim or probe whose reply was lost: the next one repeats it."""
        self._permit: Permit | None = None
        """The newest that speaks of the pool, not only of this process."""
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        """The limit or an overload is to be shared."""
        self._empty = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_by: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._shared_read_at = self._swept_at = float("-inf")
        self._pause_s = RETRY_QUEUE_S[0]
        self._turned_at = 0.0
        self._tasks: asyncio.TaskGroup | None = None

    # From outside.

    async def run(self) -> None:
        """Work until drained. A surprise in a request costs it an attempt; one in the loop is raised."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            upkeep = [tasks.create_task(self._watch(), name="watch")]
            if not self.options.observe:
                parts = (self._turns, self._renew, self._sweep, self._share, self._cancel, self._listen)
                upkeep += [tasks.create_task(part(), name=part.__name__.strip("_")) for part in parts]
            await self._stop.wait()
            if not self.options.observe:
                await self._run_dry()
            for task in upkeep:
                task.cancel()

    def drain(self, within_s: float) -> None:
        """Claim nothing more, let what runs finish within `within_s`, give the rest back, end.

        Again with less time: end sooner.
        """
        now = self._now()
        by = now + within_s
        self._stop_by = by if self._stop_by is None else min(self._stop_by, by)
        self.limiter.drain(now)
        self._stop.set()
        self._empty.set()

    def poke(self) -> None:
        """Something that the allowance depends on has changed."""
        self._wake.set()

    @property
    def running(self) -> int:
        return sum(1 for held in self._held.values() if held.task is not None and not held.task.done())

    @property
    def turned_at(self) -> float:
        """When the loop last turned: it turns at least each second while it is alive."""
        return self._turned_at

    def allowance(self) -> Allowance:
        return self.limiter.allowance(self._now())

    def explain(self) -> str:
        return explain(self.allowance(), self.limiter.in_flight)

    # The turn.

    async def _turns(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._turned_at = self._now()
            if self._done:
                await self._hand_in()
            await self._take()
            self._set_alarm()

    def _set_alarm(self) -> None:
        """Wake at the latest when the allowance wants to be asked again, and each second."""
        now = self._now()
        allowance = self.limiter.allowance(now)
        at = now + SWEEP_S if allowance.next_check_at is None else min(allowance.next_check_at, now + SWEEP_S)
        if self._done:
            at = min(at, now + self._pause_s)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(max(at, now + 1e-4), self._wake.set)
        if allowance.read_at > self._shared_read_at:
            self._changed.set()

    async def _take(self) -> None:
        """Claim what is free now, and start it."""
        while True:
            now = self._now()
            allowance = self.limiter.allowance(now)
            if allowance.probe:
                await self._probe(now)
                return
            free = allowance.limit - len(self._held) - self.limiter.others
            if free <= 0 or not self._work:
                return
            suspects = sum(held.lease.deliveries >= SUSPECT_DELIVERIES for held in self._held.values())
            self._nonce = self._nonce or secrets.token_hex(8)
            claimed = await self._try(
                self._queue.claim(free, self._nonce, _permit(allowance), suspects=0 if suspects else 1)
            )
            if claimed is None:
                return
            self._nonce = ""
            self._learn(claimed)
            self._work = claimed.waiting > 0
            if not claimed.leases:
                return
            await self._start(claimed.leases)

    async def _probe(self, now: float) -> None:
        """One request to see whether the gateway is back; no other replica probes meanwhile."""
        if any(held.probe for held in self._held.values()):
            return
        self.limiter.probed(now)
        self._probe_nonce = self._probe_nonce or secrets.token_hex(8)
        claimed = await self._try(self._queue.probe(self._probe_nonce))
        if claimed is not None:
            self._probe_nonce = ""
            self._learn(claimed)
            await self._start(claimed.leases, probe=True)

    async def _start(self, leases: Sequence[Lease], *, probe: bool = False) -> None:
        """Look at what was claimed, and start what may be sent."""
        ready: list[_Held] = []
        for lease in leases:
            held = self._held[lease.token] = _Held(lease, probe=probe)
            parsed = parse(lease.member, max_payload_bytes=self.options.max_payload_bytes)
            if isinstance(parsed, Rejection):
                self._finish(endings.rejected(lease, parsed))
            elif (verdict := after_losses(lease.losses, self.options.retry)) is not None:
                self._finish(endings.deadly(lease, parsed, verdict))
            elif parsed.deadline <= self._queue.unix_now():
                self._finish(endings.expired(lease, parsed))
            else:
                held.request = parsed
                ready.append(held)
        cancelled = await self._cancelled(ready)
        now = self._now()
        open_now = (probe or not self.limiter.allowance(now).reason.closed) and not self._stop.is_set()
        for held, gone in zip(ready, cancelled, strict=True):
            if held.request is None or self._tasks is None:
                continue
            if gone:
                self._finish(endings.cancelled(held.lease, held.request))
            elif gone is None or not open_now:
                self._finish(endings.returned(held.lease))
            elif (rest_s := self._tenants.rest_s(self._tenant(held.request), now)) > 0:
                self._finish(endings.returned(held.lease, after_s=rest_s))
            else:
                held.task = self._tasks.create_task(self._run(held, held.request))
                if probe:
                    asyncio.get_running_loop().call_later(CONNECTED_S, self._still_connected, held)

    async def _cancelled(self, ready: Sequence[_Held]) -> Sequence[bool | None]:
        """Which have been cancelled; None for each where that cannot be known: those are not sent."""
        named = [(h.request.id, h.request.token) for h in ready if h.request is not None and h.request.token]
        if not named:
            return [False] * len(ready)
        found = await self._try(self._queue.cancelled(named))
        if found is None:
            return [None] * len(ready)
        answers = iter(found)
        return [next(answers) if h.request is not None and h.request.token else False for h in ready]

    # One request.

    async def _run(self, held: _Held, request: Request) -> None:
        lease = held.lease
        started = self._now()
        self.limiter.sent(lease.token, started)
        try:
            deadline = started + request.deadline - self._queue.unix_now()
            forwarded = await self._gateway.forward(request, deadline=deadline)
        except asyncio.CancelledError:
            self.limiter.answered(lease.token, self._now())
            if not held.cut:
                raise
            if held.cut == "cancelled":
                self._finish(endings.cancelled(lease, request))
            elif held.cut == "drain":
                self._finish(endings.returned(lease))
            else:
                self._drop(lease.token)
            return
        except Exception as error:
            self.limiter.answered(lease.token, self._now())
            emit(Event.SURPRISE, where="forward", error=repr(error))
            forwarded = Forwarded(Failed(f"the dispatcher failed: {error!r}"), started, self._now())
        else:
            self.limiter.answered(lease.token, forwarded.ended_at)
        outcome = self._gateway_seen(request, forwarded)
        self._metrics.tried(type(outcome).__name__, forwarded.ended_at - forwarded.sent_at)
        self._finish(self._decide(lease, request, outcome))

    def _gateway_seen(self, request: Request, forwarded: Forwarded) -> Outcome:
        """Tell the limiter what the outcome says of the gateway; the outcome as it counts for the request."""
        outcome, now, sent_at = forwarded.outcome, forwarded.ended_at, forwarded.sent_at
        limiter, tenant = self.limiter, self._tenant(request)
        match outcome:
            case Overloaded():
                limiter.reached(now, sent_at)
                teaches = self._tenants.refused(tenant, now, limiter.allowance(now).read_at)
                # Its lease has not ended, but the limiter has counted it out already.
                self._overload = Overload(
                    at=now,
                    until=now + (outcome.retry_after_s or 0.0),
                    capacity=outcome.capacity and teaches,
                    in_flight=limiter.in_flight + 1,
                )
                self._overloaded(self._overload)
                self._changed.set()
                return outcome
            case Delivered() | TooLarge():
                limiter.reached(now, sent_at)
                self._tenants.accepted(tenant, sent_at)
                return outcome
            case Failed(nobody_home=True):
                if limiter.nobody_home(now, outcome.why):
                    outcome = Unreachable(outcome.why)
            case Failed() if outcome.status is not None:
                limiter.reached(now, sent_at)
            case Unreachable():
                limiter.unreachable(now, outcome.why)
            case _:
                pass  # no answer: it says nothing of the gateway
        if isinstance(outcome, Unreachable):
            self._gateway.resize(0)  # what is kept alive may be dead: a probe must prove the way anew
        self._tenants.ended(tenant)
        return outcome

    def _overloaded(self, overload: Overload, *, heard: bool = False) -> None:
        self.limiter.overloaded(
            overload.at,
            until=overload.until,
            capacity=overload.capacity,
            in_flight=overload.in_flight,
            heard=heard,
        )

    def _tenant(self, request: Request) -> str:
        return request.metadata.get(self.options.tenant_from, "")

    def _decide(self, lease: Lease, request: Request, outcome: Outcome) -> Ending:
        decision = after(
            outcome,
            attempts=lease.attempts,
            refusals=lease.refusals,
            deadline=request.deadline,
            now=self._queue.unix_now(),
            policy=self.options.retry,
            rand=self._random.random(),
        )
        return endings.decided(lease, request, decision)

    def _still_connected(self, held: _Held) -> None:
        """A probe that takes its time: it reached the gateway if it holds a connection for long enough."""
        if held.request is None or held.task is None or held.task.done():
            return
        now = self._now()
        since = self._gateway.connected(held.request)
        if since is not None and now - since >= CONNECTED_S:
            held.probe = False
            self.limiter.reached(now, since)
            self._wake.set()
        else:
            again_s = CONNECTED_S if since is None else since + CONNECTED_S - now
            asyncio.get_running_loop().call_later(again_s + 0.001, self._still_connected, held)

    def _finish(self, item: Ending) -> None:
        self._done.append(item)
        self._wake.set()

    # Handing in.

    async def _hand_in(self) -> None:
        """Everything that has finished, in as few calls as its size allows."""
        if self.running and not self._stop.is_set():
            await asyncio.sleep(GATHER_S)
        done, self._done = self._done, []
        settlements = [ending for ending in done if isinstance(ending, Settlement)]
        releases = [ending for ending in done if isinstance(ending, Release)]
        burials = [ending for ending in done if isinstance(ending, Burial)]
        for batch in _batches(settlements):
            self._ended(batch, await self._try(self._queue.settle(batch)))
        if releases:
            self._ended(releases, await self._try(self._queue.release(releases)))
        if burials:
            self._ended(burials, await self._try(self._queue.bury(burials)))

    def _ended(self, endings: Sequence[Ending], answers: Sequence[Settled] | None) -> None:
        if answers is None:
            self._done.extend(endings)
            return
        for ending, answer in zip(endings, answers, strict=True):
            self._metrics.ended(type(ending).__name__, answer)
            lease = ending.settlement.lease if isinstance(ending, Burial) else ending.lease
            self._drop(lease.token)
            if isinstance(ending, Release) and ending.delay_s <= 0:
                self._work = True

    def _drop(self, token: str) -> None:
        self._held.pop(token, None)
        if not self._held:
            self._empty.set()
        self._wake.set()

    # Upkeep.

    async def _watch(self) -> None:
        """Look at the queue, and note when the gate's reason changes."""
        reason = None
        while True:
            allowance = self.allowance()
            if allowance.reason is not reason:
                reason = allowance.reason
                emit(Event.GATE, reason=str(reason), limit=allowance.limit, because=self.explain())
            counts = await self._try(self._queue.counts())
            if counts is not None:
                self.view.counts = counts
                if self.options.observe:
                    now = self._now()
                    self.limiter.leases(now, others=counts.leased, young=0, lost=0)
                    self.limiter.waiting(counts.pending, now)
            if self.options.observe:
                self._turned_at = self._now()
            await asyncio.sleep(SWEEP_S)

    async def _renew(self) -> None:
        pause = self.options.lease_s / 3
        while True:
            await asyncio.sleep(pause)
            leases = [held.lease for held in self._held.values()]
            renewed = await self._try(self._queue.renew(leases))
            pause = self.options.lease_s / 3 if renewed is not None else self._pause_s
            if renewed is None:
                continue
            self._learn(renewed)
            gone = set(renewed.lost)
            for held in [h for h in self._held.values() if h.lease.entry in gone]:
                emit(Event.LEASE_LOST, entry=held.lease.entry)
                self._cut(held, "lost")

    async def _sweep(self) -> None:
        """What ran out or is due goes back to its place; what is past its deadline ends."""
        while True:
            started = self._now()
            swept = await self._try(self._queue.sweep())
            pause = SWEEP_S
            if swept is not None:
                if swept.reclaimed or swept.due:
                    self._work = True
                    self._wake.set()
                if swept.next_due_at is not None:
                    pause = min(pause, max(0.01, swept.next_due_at - self._now()))
                if pause == SWEEP_S or started - self._swept_at >= SWEEP_S:
                    self._swept_at = started
                    await self._expire()
            await asyncio.sleep(pause)

    async def _expire(self) -> None:
        found = await self._try(self._queue.expired(EXPIRED_AT_ONCE))
        now = self._queue.unix_now()
        items = []
        for one in found or ():
            parsed = parse(one.member)
            if isinstance(parsed, Request) and parsed.deadline <= now:
                items.append((one, endings.expired(endings.NOBODY, parsed)))
        if items:
            ended = await self._try(self._queue.expire(items))
            self._metrics.expired(ended or 0)

    async def _share(self) -> None:
        """Tell the other replicas each new limit and overload, and learn theirs."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            allowance = self.allowance()
            if not allowance.reason.closed or allowance.reason is Reason.NO_ROOM:
                self._permit = _permit(allowance)
            if self._permit is None:
                self._permit = Permit(0, 0.0, allowance.lost) if self._overload is not None else None
                if self._permit is None:
                    continue
            overload = self._overload
            told = await self._try(self._queue.share(self._permit, overload))
            if told is None:
                await asyncio.sleep(self._pause_s)
                self._changed.set()
                continue
            if self._overload is overload:
                self._overload = None
            else:
                self._changed.set()
            self._shared_read_at = max(self._shared_read_at, allowance.read_at)
            self._learn(told)

    async def _cancel(self) -> None:
        """Cut requests in flight that have been cancelled: closing the connection is the gateway's cue."""
        while True:
            await asyncio.sleep(CANCEL_CHECK_S)
            running = [h for h in self._held.values() if h.task is not None and not h.task.done()]
            for held, gone in zip(running, await self._cancelled(running), strict=True):
                if gone:
                    self._cut(held, "cancelled")

    async def _listen(self) -> None:
        while True:
            if await self._try(self._wait_for_work()):
                self._work = True
                self._wake.set()
            else:
                await asyncio.sleep(self._pause_s)

    async def _wait_for_work(self) -> bool:
        await self._queue.wait_for_work()
        return True

    def _cut(self, held: _Held, why: Literal["cancelled", "lost", "drain"]) -> None:
        if held.task is not None and not held.task.done() and not held.cut:
            held.cut = why
            held.task.cancel()

    async def _run_dry(self) -> None:
        """Let what runs finish in time, give back the rest, hand everything in."""
        assert self._stop_by is not None  # noqa: S101 - drain() sets it before it sets _stop
        while self._held and self._now() < self._stop_by:
            await self._emptied(self._stop_by - self._now())
        for held in list(self._held.values()):
            self._cut(held, "drain")
        give_up_at = self._now() + LAST_HAND_IN_S
        while self._held and self._now() < give_up_at:
            self._wake.set()
            await self._emptied(RETRY_QUEUE_S[0])
        if self._held:
            emit(Event.LEFT_BEHIND, leases=len(self._held))

    async def _emptied(self, within_s: float) -> None:
        """Nothing is held any more, or the time has passed, or it was shortened."""
        self._empty.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            pass

    # What the queue tells.

    def _learn(self, told: Claimed | Renewed) -> None:
        """Counts, and what other replicas know."""
        now, count, shared = self._now(), told.count, told.shared
        self.view.shared = shared
        self.limiter.leases(count.at, others=count.others, young=count.young, lost=count.lost)
        self.limiter.pause(shared.paused, now)
        if shared.overload is not None:
            self._overloaded(shared.overload, heard=True)
        if isinstance(told, Claimed):
            self.limiter.waiting(told.waiting, now)

    async def _try(self, call: Awaitable[T]) -> T | None:
        """The call's answer; None where the queue cannot be reached, and then the gate is closed."""
        try:
            answer = await call
        except QueueUnavailableError as error:
            if self.view.problem is None:
                emit(Event.QUEUE_UNREACHABLE, why=str(error))
            self.view.problem = str(error)
            self.limiter.queue(str(error), self._now())
            self._pause_s = min(self._pause_s * 2, RETRY_QUEUE_S[1])
            return None
        if self.view.problem is not None:
            emit(Event.QUEUE_BACK)
            self.view.problem = None
            self.limiter.queue(None, self._now())
            self._pause_s = RETRY_QUEUE_S[0]
            self._work = True
            self._wake.set()
        return answer

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _permit(allowance: Allowance) -> Permit:
    return Permit(allowance.limit, allowance.read_at, allowance.lost)


def _batches(settlements: Iterable[Settlement]) -> Iterable[list[Settlement]]:
    """The settlements in batches of at most HAND_IN_BYTES, one at least."""
    batch: list[Settlement] = []
    size = 0
    for settlement in settlements:
        if batch and size + len(settlement.result) > HAND_IN_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(settlement)
        size += len(settlement.result)
    if batch:
        yield batch
