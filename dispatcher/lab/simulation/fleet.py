"""The real dispatch loop in the simulated world: dispatchers on one queue in memory that never runs empty."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

from dispatcher.core.gateway.outcome import Outcome, RetryPolicy
from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.budget import Policy as Budgeting
from dispatcher.core.limit.budget import Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import Poll, Unread
from dispatcher.core.limit.staleness import Patience
from dispatcher.core.limit.utilization import Meter
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.core.requests.score import PRIORITIES, PRIORITY_STEP
from dispatcher.core.requests.units import units_of
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.in_flight import HeldLease
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.policies import Policy
from dispatcher.lab.simulation.scenario import Setting
from dispatcher.lab.simulation.transport import End, Road, RoadGateway
from dispatcher.lab.simulation.world import Job
from dispatcher.ports import Forwarded, Gateway, Queue, Settled
from dispatcher.signals.readings import Verdict
from dispatcher.telemetry.metrics import Metrics

EPOCH = 1_764_000_000.0
"""Unix time when a simulation starts."""
OWNER_TIMEOUT_S = 5.0
"""As it is by default."""
FOREVER = int(EPOCH) + 10**8
NO_DEADLINE = float(len(PRIORITIES) * PRIORITY_STEP)
"""A score beyond those of all deadlines: the queue need not keep these requests in the order of theirs."""
MEMBER = encode_member("batch-%08d", b'{"max_tokens":"%d"}', FOREVER, created=int(EPOCH)).replace(
    b'"%d"', b"%d"
)
"""Of a batch request, for its number and its tokens: hundreds of thousands differ in nothing else."""


class _MeterAlone(Journal):
    """What a simulated dispatcher tells: nobody reads its metrics and its log, and they cost a tenth."""

    def turned(self, at: float, allowance: Allowance, limiter: Limiter, *, used: int) -> None:
        self.observed(at, allowance, limiter, used)

    def sent(self, held: HeldLease, request: Request, unix_now: float) -> None:
        pass

    def tried(self, held: HeldLease, forwarded: Forwarded, outcome: Outcome) -> None:
        pass

    def ended(
        self, held: HeldLease | None, ending: Ending, answer: Settled, at: float, unix_now: float
    ) -> None:
        pass


class _SlowQueue:
    """A queue whose calls take `call_s`, half of it each way."""

    def __init__(self, queue: Queue, call_s: float) -> None:
        self._queue = queue
        self._way_s = call_s / 2

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._queue, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **named: Any) -> Any:
            await asyncio.sleep(self._way_s)
            answer = await method(*args, **named)
            await asyncio.sleep(self._way_s)
            return answer

        return call


class Replica:
    """One dispatcher process: the loop, its limiter, its door to the queue. Runs as soon as it is made."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        store: MemoryStore,
        owner: str,
        gateway: Gateway,
        budgeting: Budgeting,
        uses: Sequence[Signal],
        options: Options,
        *,
        seed: object = 0,
        weigh: Callable[[Request], int] = units_of,
        clock: Callable[[], float] | None = None,
        call_s: float = 0.0,
        journal: Journal | None = None,
    ) -> None:
        self.limiter = Limiter(budgeting, uses)
        self._signals = tuple(uses)
        self._patience = Patience(0.0, budgeting.max_age_s)
        self.queue = MemoryQueue(store, owner, clock=clock, owner_timeout_s=options.owner_timeout_s)
        self.dispatcher = Dispatcher(
            cast(Queue, _SlowQueue(self.queue, call_s)) if call_s else self.queue,
            gateway,
            self.limiter,
            options,
            journal or _MeterAlone(Metrics()),
            random.Random(f"{seed}/{owner}"),
            weigh=weigh,
        )
        self.task = tasks.create_task(self.dispatcher.run(), name=owner)

    def read(self, poll: Poll) -> None:
        """What the poller tells, as the service hands it on."""
        self._signals = poll.signals
        if poll.readings:
            closed_at = [each.closed_at for each in poll.readings]
            self._patience.read(min(closed_at), max(closed_at))
        self.dispatcher.read(poll)

    def unread(self, why: str, now: float) -> None:
        """A scrape was lost."""
        unread = Unread(Reason.UNREADABLE, why)
        until = self._patience.until()
        self.dispatcher.read(Poll(at=now, signals=self._signals, unread=(unread,), closes_at=until))

    def capacity(self, max_requests: float | None, now: float) -> None:
        """What the Kubernetes watch tells."""
        self.limiter.capacity(max_requests, now)
        self.dispatcher.poke()

    def kill(self) -> None:
        """As SIGKILL does: connections close, leases stay until its silence is noticed."""
        self.task.cancel()
        self.queue.close()


class Law(Policy):
    """The dispatcher itself, in any number of replicas. It sends on its own: its room is always 0.

    Each answered request is followed by a new one, so that there is always work.
    """

    def __init__(self, setting: Setting, road: Road, tasks: asyncio.TaskGroup) -> None:
        super().__init__(setting.budgeting, setting.slots)
        self._setting = setting
        self._road = road
        self._tasks = tasks
        lease_s = setting.lease_s
        self._options = Options(
            retry=RetryPolicy(), lease_s=lease_s, owner_timeout_s=min(OWNER_TIMEOUT_S, lease_s)
        )
        self._time = asyncio.get_running_loop().time
        clock = self._stepping if setting.clock_steps else self._time
        self._store = MemoryStore(clock, unix_origin=EPOCH, lease_s=lease_s)
        self._gateway = RoadGateway(road, self._job_of, setting.seconds)
        self._sizes = random.Random(f"{setting.seed}/batch")
        self._submitted = 0
        self._names = count(1)
        self._next_to_die = 0
        self._refill()
        self._replicas = [self._replica() for _ in range(setting.replicas)]

    def read(self, found: Verdict, now: float) -> None:
        self._store.lists.clear()  # nobody waits for these results
        for replica in self._replicas:
            replica.read(Poll(at=now, signals=found.signals, readings=found.readings, unread=found.unread))

    def unread(self, why: str, now: float) -> None:
        for replica in self._replicas:
            replica.unread(why, now)

    def capacity(self, max_requests: float, now: float) -> None:
        for replica in self._replicas:
            replica.capacity(max_requests, now)

    def kill(self) -> None:
        """The replicas die in turn; a new one takes the place at once, knowing nothing."""
        doomed = self._next_to_die % len(self._replicas)
        self._next_to_die += 1
        self._replicas[doomed].kill()
        self._replicas[doomed] = self._replica()

    def stop(self) -> None:
        for replica in self._replicas:
            replica.kill()

    def meters(self) -> Sequence[Meter]:
        return [replica.dispatcher.measure() for replica in self._replicas]

    def shown(self, now: float) -> tuple[int | None, Reason | None]:
        allowance = self._replicas[0].dispatcher.allowance()
        return allowance.limit, allowance.reason if allowance.reason.closed else None

    def capacity_seen(self) -> float | None:
        budget = self._replicas[0].dispatcher.allowance().budget
        return None if budget is None else budget.max_sys

    def _replica(self) -> Replica:
        owner = f"dispatcher-{next(self._names)}"
        return Replica(
            self._tasks, self._store, owner, self._gateway, self.budgeting, self._setting.at_start,
            self._options, seed=self._setting.seed,
            weigh=lambda _: self._setting.grain,
            clock=self._time if self._setting.clock_steps else None,
        )  # fmt: skip

    def _stepping(self) -> float:
        """The queue's clock, which may step away from everybody else's."""
        now = self._time()
        return now + sum(by for at, by in self._setting.clock_steps if at <= now)

    def _job_of(self, request: Request) -> Job:
        self._refill()
        return self._setting.batch.job(int(request.payload[len(b'{"max_tokens":') : -1]), self._setting.grain)

    def _refill(self) -> None:
        """Have as many requests unanswered as workers could hold: more than ever are in flight."""
        while self._submitted - self._road.ended[End.ANSWERED] < self.workers:
            # Equal scores: the queue takes them in the order of their bytes, which is that of their numbers.
            member = MEMBER % (self._submitted, self._setting.batch.draw(self._sizes))
            self._store.add(member, NO_DEADLINE)
            self._store.line.pending[member].units = self._setting.grain  # as if it had been read before
            self._submitted += self._setting.grain
