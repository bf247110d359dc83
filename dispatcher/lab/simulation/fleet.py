"""The real dispatch loop in the simulated world. All dispatchers share one in-memory queue that never runs
empty."""

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
"""Unix time at the start of a simulation."""
OWNER_TIMEOUT_S = 5.0
"""Default of `queue.owner_timeout_s`."""
FOREVER = int(EPOCH) + 10**8
NO_DEADLINE = float(len(PRIORITIES) * PRIORITY_STEP)
"""Score beyond the scores of all deadlines, so that the queue does not have to sort these requests by
deadline."""
MEMBER = encode_member("batch-%08d", b'{"max_tokens":"%d"}', FOREVER, created=int(EPOCH)).replace(
    b'"%d"', b"%d"
)
"""Template of a batch request, filled in with number and tokens. Encoding hundreds of thousands of requests
one by one would take longer."""


class _MeterAlone(Journal):
    """Journal that only measures the utilization. Metrics and log of a simulated dispatcher have no reader,
    and take a tenth of the time."""

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
    """Queue whose calls take `call_s`, half of it before and half after the operation."""

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
    """One dispatcher process: loop, limiter and queue. It starts when it is created."""

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
        """Handle the result of a poll, as the service does."""
        self._signals = poll.signals
        if poll.readings:
            closed_at = [each.closed_at for each in poll.readings]
            self._patience.read(min(closed_at), max(closed_at))
        self.dispatcher.read(poll)

    def unread(self, why: str, now: float) -> None:
        """Handle a failed scrape."""
        # The older readings stay valid until the staleness limit, as in the service.
        unread = Unread(Reason.UNREADABLE, why)
        until = self._patience.until()
        self.dispatcher.read(Poll(at=now, signals=self._signals, unread=(unread,), closes_at=until))

    def capacity(self, max_requests: float | None, now: float) -> None:
        """Handle a capacity reported by the Kubernetes watch."""
        self.limiter.capacity(max_requests, now)
        self.dispatcher.poke()

    def kill(self) -> None:
        """Stop like a process killed by SIGKILL: connections close, and leases stay until others notice the
        silence."""
        self.task.cancel()
        self.queue.close()


class Law(Policy):
    """Policy that runs the real dispatcher in any number of replicas.

    The dispatchers send on their own, so that `count_sendable` is always 0. A new request is added for each
    answered one, so that requests always wait.
    """

    def __init__(self, setting: Setting, road: Road, tasks: asyncio.TaskGroup) -> None:
        super().__init__(setting.budgeting, setting.slots)
        self._setting = setting
        self._road = road
        self._tasks = tasks
        lease_s = setting.lease_s
        self._options = Options(
            # As the default of `queue.owner_timeout_s`: never above the lease.
            retry=RetryPolicy(),
            lease_s=lease_s,
            owner_timeout_s=min(OWNER_TIMEOUT_S, lease_s),
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
        self._store.lists.clear()  # no client reads these results
        for replica in self._replicas:
            replica.read(Poll(at=now, signals=found.signals, readings=found.readings, unread=found.unread))

    def unread(self, why: str, now: float) -> None:
        for replica in self._replicas:
            replica.unread(why, now)

    def capacity(self, max_requests: float, now: float) -> None:
        for replica in self._replicas:
            replica.capacity(max_requests, now)

    def kill(self) -> None:
        """Kill the replicas in turn. A new one without any knowledge replaces each at once."""
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
        """Return the time by the clock of the queue, which may step away from the time of the loop."""
        now = self._time()
        return now + sum(by for at, by in self._setting.clock_steps if at <= now)

    def _job_of(self, request: Request) -> Job:
        self._refill()
        # The payload comes from MEMBER_TEMPLATE: slicing is much cheaper than decoding JSON.
        return self._setting.batch.job(int(request.payload[len(b'{"max_tokens":') : -1]), self._setting.grain)

    def _refill(self) -> None:
        """Add requests until the queue has more unanswered ones than can ever be in flight."""
        while self._submitted - self._road.ended[End.ANSWERED] < self.workers:
            # Equal scores: the queue takes them in the order of their bytes, which is that of their numbers.
            member = MEMBER % (self._submitted, self._setting.batch.draw(self._sizes))
            self._store.add(member, NO_DEADLINE)
            # As if a dispatcher had already weighed it.
            self._store.line.pending[member].units = self._setting.grain
            self._submitted += self._setting.grain
