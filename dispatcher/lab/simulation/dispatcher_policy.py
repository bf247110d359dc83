"""The real dispatch loop in the simulated world. All dispatchers share one in-memory queue that never runs
empty."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

from dispatcher.gateway.contract import AttemptResult, Gateway
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.completions import Completion
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation import sliced_requests
from dispatcher.lab.simulation.policies import Policy
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.transport import JobEnd, SimulatedGateway, SimulatedTransport
from dispatcher.lab.simulation.world import Job
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.budget import Policy as Budgeting
from dispatcher.limit.budget import Reason, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.poll import Poll, ReadFailure
from dispatcher.limit.staleness import StalenessLimit
from dispatcher.limit.utilization import UtilizationMeter
from dispatcher.queue.contract import Queue, SettleStatus
from dispatcher.requests.outcomes.outcome import Outcome, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.score import PRIORITIES, PRIORITY_STEP
from dispatcher.requests.units import compute_units
from dispatcher.signals.readings import PollReadings
from dispatcher.telemetry.metrics import Metrics

EPOCH = 1_764_000_000.0
"""Unix time at the start of a simulation."""
OWNER_TIMEOUT_S = 5.0
"""Default of `queue.owner_timeout_s`."""
FOREVER = int(EPOCH) + 10**8
NO_DEADLINE = float(len(PRIORITIES) * PRIORITY_STEP)
"""Score beyond the scores of all deadlines, so that the queue does not have to sort these requests by
deadline."""


def _build_member_template(payload: bytes) -> bytes:
    """Return the template of a batch request, filled in with its number and the fields of the payload.
    Encoding hundreds of thousands of requests one by one would take longer."""
    member = encode_member("batch-%08d", payload, FOREVER, created=int(EPOCH))
    # Numbers in JSON, but the template has to be valid JSON, too, to be encoded.
    return member.replace(b'"%d"', b"%d")


MEMBER_TEMPLATE = _build_member_template(b'{"context":"%d","max_tokens":"%d"}')
SLICED_MEMBER_TEMPLATE = _build_member_template(sliced_requests.PAYLOAD_TEMPLATE)


def _build_token_options(scenario: Scenario) -> dict[type, object]:
    """Return the options of the token budget. Empty if tokens are not counted."""
    if not scenario.counts_tokens or scenario.kv_tokens is None:
        return {}
    # A build without the feature simulates dispatchers that count requests only.
    from dispatcher.features.tokens.options import TokenOptions

    parse = _parse_payload if scenario.slice_tokens is None else sliced_requests.parse_payload
    options = TokenOptions(
        is_on=True,
        per_endpoint=scenario.kv_tokens // scenario.pods,
        reserve=scenario.reserve,
        # The simulated bodies are shorter than their prompts.
        find_prompt=lambda payload: parse(payload)[0],
        assumed_factor=scenario.token_factor,
    )
    return {TokenOptions: options}


def _parse_payload(payload: bytes) -> tuple[int, int]:
    """Return the context tokens and the tokens of a request that is not sliced."""
    # The payload comes from MEMBER_TEMPLATE: splitting is much cheaper than decoding JSON.
    context, _, tokens = payload[len(b'{"context":') : -1].partition(b',"max_tokens":')
    return int(context), int(tokens)


class _MeterOnlyJournal(Journal):
    """Journal that only measures the utilization. Metrics and log of a simulated dispatcher have no reader,
    and take a tenth of the time."""

    def record_state(self, at: float, allowance: Allowance, limiter: Limiter, *, used_units: int) -> None:
        self.observe_state(at, allowance, limiter, used_units)

    def record_sent(self, entry: InFlightLease, request: Request, unix_now: float) -> None:
        pass

    def record_attempt(
        self,
        entry: InFlightLease,
        result: AttemptResult,
        outcome: Outcome,
        tokens: tuple[int, int, int] | None = None,
    ) -> None:
        pass

    def record_completion(
        self,
        entry: InFlightLease | None,
        completion: Completion,
        status: SettleStatus,
        at: float,
        unix_now: float,
    ) -> None:
        pass


class _SlowQueue:
    """Queue whose calls take `call_s`, half of it before and half after the operation."""

    def __init__(self, queue: Queue, call_s: float) -> None:
        self._queue = queue
        self._one_way_s = call_s / 2

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._queue, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call_with_delay(*args: Any, **named: Any) -> Any:
            await asyncio.sleep(self._one_way_s)
            answer = await method(*args, **named)
            await asyncio.sleep(self._one_way_s)
            return answer

        return call_with_delay


class Replica:
    """One dispatcher process: loop, limiter and queue. It starts when it is created."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        store: MemoryStore,
        owner: str,
        gateway: Gateway,
        budgeting: Budgeting,
        signals: Sequence[Signal],
        options: Options,
        *,
        seed: object = 0,
        weigh: Callable[[Request], int] = compute_units,
        clock: Callable[[], float] | None = None,
        call_s: float = 0.0,
        journal: Journal | None = None,
    ) -> None:
        self.limiter = Limiter(budgeting, signals)
        self._signals = tuple(signals)
        self._staleness_limit = StalenessLimit(0.0, budgeting.max_age_s)
        self.queue = MemoryQueue(store, owner, clock=clock, owner_timeout_s=options.owner_timeout_s)
        self.dispatcher = Dispatcher(
            cast(Queue, _SlowQueue(self.queue, call_s)) if call_s else self.queue,
            gateway,
            self.limiter,
            options,
            journal or _MeterOnlyJournal(Metrics()),
            random.Random(f"{seed}/{owner}"),
            weigh_request=weigh,
        )
        self.task = tasks.create_task(self.dispatcher.run(), name=owner)

    def handle_poll(self, poll: Poll) -> None:
        """Handle the result of a poll, as the service does."""
        self._signals = poll.signals
        if poll.readings:
            closed_at = [each.closed_at for each in poll.readings]
            self._staleness_limit.record_sample(min(closed_at), max(closed_at))
        self.dispatcher.apply_poll(poll)

    def handle_scrape_failure(self, why: str, now: float) -> None:
        """Handle a failed scrape."""
        # The older readings stay valid until the staleness limit, as in the service.
        unread = ReadFailure(Reason.UNREADABLE, why)
        until = self._staleness_limit.compute_stale_at()
        self.dispatcher.apply_poll(
            Poll(completed_at=now, signals=self._signals, failures=(unread,), closes_at=until)
        )

    def handle_capacity(self, max_requests: float | None, now: float) -> None:
        """Handle a capacity reported by the Kubernetes watch."""
        self.limiter.set_capacity_bound(max_requests, now)
        self.dispatcher.wake_up()

    def kill(self) -> None:
        """Stop like a process killed by SIGKILL: connections close, and leases stay until others notice the
        silence."""
        self.task.cancel()
        self.queue.close()


class DispatcherPolicy(Policy):
    """Policy that runs the real dispatcher in any number of replicas.

    The dispatchers send on their own, so that `count_sendable` is always 0. A new request is added for each
    answered one, so that requests always wait.
    """

    def __init__(self, scenario: Scenario, transport: SimulatedTransport, tasks: asyncio.TaskGroup) -> None:
        super().__init__(scenario.budgeting, scenario.slots)
        self._scenario = scenario
        self._transport = transport
        self._tasks = tasks
        lease_s = scenario.lease_s
        self._options = Options(
            # As the default of `queue.owner_timeout_s`: never above the lease.
            retry=RetryPolicy(),
            lease_s=lease_s,
            owner_timeout_s=min(OWNER_TIMEOUT_S, lease_s),
            default_path=sliced_requests.PATH,
            of_features={
                **sliced_requests.build_options(scenario.slice_tokens, revokes=scenario.revokes_slices),
                **_build_token_options(scenario),
            },
        )
        self._time = asyncio.get_running_loop().time
        clock = self._read_stepping_clock if scenario.clock_steps else self._time
        self._store = MemoryStore(clock, unix_origin=EPOCH, lease_s=lease_s)
        has_slices = scenario.slice_tokens is not None
        make_job = self._make_slice if has_slices else self._make_job
        self._gateway = SimulatedGateway(
            transport,
            make_job,
            scenario.seconds,
            writes_text=has_slices,
            writes_usage=scenario.counts_tokens,
        )
        self._token_rng = random.Random(f"{scenario.seed}/batch")
        self._submitted = 0
        self._replica_numbers = count(1)
        self._next_victim = 0
        self._refill_queue()
        self._replicas = [self._start_replica() for _ in range(scenario.replicas)]

    def handle_reading(self, verdict: PollReadings, now: float) -> None:
        self._store.result_lists.clear()  # no client reads these results
        for replica in self._replicas:
            replica.handle_poll(
                Poll(
                    completed_at=now,
                    signals=verdict.signals,
                    readings=verdict.readings,
                    failures=verdict.unread,
                )
            )

    def handle_scrape_failure(self, why: str, now: float) -> None:
        for replica in self._replicas:
            replica.handle_scrape_failure(why, now)

    def handle_capacity(self, max_requests: float, now: float) -> None:
        for replica in self._replicas:
            replica.handle_capacity(max_requests, now)

    def kill_replica(self) -> None:
        """Kill the replicas in turn. A new one without any knowledge replaces each at once."""
        victim = self._next_victim % len(self._replicas)
        self._next_victim += 1
        self._replicas[victim].kill()
        self._replicas[victim] = self._start_replica()

    def stop(self) -> None:
        for replica in self._replicas:
            replica.kill()

    def get_meters(self) -> Sequence[UtilizationMeter]:
        return [replica.dispatcher.measure_utilization() for replica in self._replicas]

    def get_limit_and_reason(self, now: float) -> tuple[int | None, Reason | None]:
        allowance = self._replicas[0].dispatcher.get_allowance()
        return allowance.limit, allowance.reason if allowance.reason.is_closed else None

    def get_estimated_capacity(self) -> float | None:
        budget = self._replicas[0].dispatcher.get_allowance().budget
        return None if budget is None else budget.max_sys

    def _start_replica(self) -> Replica:
        owner = f"dispatcher-{next(self._replica_numbers)}"
        return Replica(
            self._tasks, self._store, owner, self._gateway, self.budgeting, self._scenario.initial_signals,
            self._options, seed=self._scenario.seed,
            weigh=lambda _: self._scenario.requests_per_job,
            clock=self._time if self._scenario.clock_steps else None,
        )  # fmt: skip

    def _read_stepping_clock(self) -> float:
        """Return the time by the clock of the queue, which may step away from the time of the loop."""
        now = self._time()
        return now + sum(by for at, by in self._scenario.clock_steps if at <= now)

    def _make_job(self, request: Request) -> Job:
        self._refill_queue()
        return self._scenario.batch.make_job(
            *_parse_payload(request.payload), self._scenario.requests_per_job
        )

    def _make_slice(self, request: Request) -> Job:
        self._refill_queue()
        return self._scenario.make_call(
            *sliced_requests.parse_payload(request.payload), request_count=self._scenario.requests_per_job
        )

    def _refill_queue(self) -> None:
        """Add requests until the queue has more unanswered ones than can ever be in flight."""
        while self._submitted - self._transport.ended[JobEnd.ANSWERED] < self.workers:
            # Equal scores: the queue takes them in the order of their bytes, which is that of their numbers.
            context, tokens = self._scenario.batch.draw_size(self._token_rng)
            member = (
                MEMBER_TEMPLATE % (self._submitted, context, tokens)
                if self._scenario.slice_tokens is None
                else SLICED_MEMBER_TEMPLATE % (self._submitted, context, tokens, tokens)
            )
            self._store.add_member(member, NO_DEADLINE)
            # As if a dispatcher had already weighed it.
            self._store.queue.pending[member].units = self._scenario.requests_per_job
            self._submitted += self._scenario.requests_per_job
