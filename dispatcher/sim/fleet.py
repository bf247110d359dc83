"""The real dispatch loop in the simulated world: dispatchers on one queue in memory that never runs empty."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import count

import msgspec

from dispatcher.core.budget import Policy as Budgeting
from dispatcher.core.budget import Reading, Reason, Signal
from dispatcher.core.harvest import Meter
from dispatcher.core.limiter import Limiter
from dispatcher.core.outcome import RetryPolicy
from dispatcher.core.patience import Patience
from dispatcher.core.request import Request, encode_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.ports import Gateway
from dispatcher.queue.memory import MemoryQueue, MemoryStore
from dispatcher.sim.policies import Policy
from dispatcher.sim.road import End, Road, RoadGateway
from dispatcher.sim.world import Job, batch_job, batch_tokens
from dispatcher.telemetry.metrics import Metrics

EPOCH = 1_764_000_000.0
"""Unix time when a simulation starts."""
OWNER_TIMEOUT_S = 5.0
"""As it is by default."""
FOREVER = int(EPOCH) + 10**8


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
    ) -> None:
        self.limiter = Limiter(budgeting, uses)
        self._patience = Patience(0.0, budgeting.max_age_s)
        self.queue = MemoryQueue(store, owner, owner_timeout_s=options.owner_timeout_s)
        self.dispatcher = Dispatcher(
            self.queue, gateway, self.limiter, options, Journal(Metrics()), random.Random(f"{seed}/{owner}")
        )
        self.task = tasks.create_task(self.dispatcher.run(), name=owner)

    def read(self, readings: Sequence[Reading], now: float) -> None:
        """What the poller tells, as the service hands it on."""
        for reading in readings:
            self.limiter.reading(reading, now)
        if readings:
            self._patience.read(
                min(each.closed_at for each in readings), max(each.closed_at for each in readings)
            )
        self.dispatcher.readings_came()

    def unread(self, why: str, now: float) -> None:
        self.limiter.reading_failed(Reason.UNREADABLE, why, now, closes_at=self._patience.until())
        self.dispatcher.readings_came()

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

    def __init__(
        self,
        budgeting: Budgeting,
        slots: int,
        uses: Sequence[Signal],
        road: Road,
        tasks: asyncio.TaskGroup,
        *,
        replicas: int = 1,
        lease_s: float = 30.0,
        seed: int = 0,
        tokens: int | None = None,
    ) -> None:
        super().__init__(budgeting, slots)
        self._tokens = tokens
        self._uses = uses
        self._tasks = tasks
        self._seed = seed
        timeout_s = min(OWNER_TIMEOUT_S, lease_s)
        self._options = Options(retry=RetryPolicy(), lease_s=lease_s, owner_timeout_s=timeout_s)
        self._store = MemoryStore(asyncio.get_running_loop().time, unix_origin=EPOCH, lease_s=lease_s)
        self._road = road
        self._gateway = RoadGateway(road, self._job_of)
        self._sizes = random.Random(f"{seed}/batch")
        self._submitted = 0
        self._names = count(1)
        self._next_to_die = 0
        self._refill()
        self._replicas = [self._replica() for _ in range(replicas)]

    def read(self, readings: Sequence[Reading], now: float) -> None:
        self._store.lists.clear()  # nobody waits for these results
        for replica in self._replicas:
            replica.read(readings, now)

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

    def _replica(self) -> Replica:
        owner = f"dispatcher-{next(self._names)}"
        return Replica(
            self._tasks, self._store, owner, self._gateway, self.budgeting, self._uses, self._options,
            seed=self._seed,
        )  # fmt: skip

    def _job_of(self, request: Request) -> Job:
        self._refill()
        return batch_job(msgspec.json.decode(request.payload)["max_tokens"])

    def _refill(self) -> None:
        """Have as many requests unanswered as workers could hold: more than ever are in flight."""
        while self._submitted - self._road.ended[End.ANSWERED] < self.workers:
            # Equal scores: the queue takes them in the order of their bytes, which is that of their numbers.
            name, payload = (
                f"batch-{self._submitted:08d}",
                {"max_tokens": self._tokens or batch_tokens(self._sizes)},
            )
            self._store.add(encode_member(name, payload, FOREVER, created=int(EPOCH)), FOREVER)
            self._submitted += 1
