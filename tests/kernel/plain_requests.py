"""Plain requests through the dispatch loop with default settings, in virtual time: no feature takes part.

Meters of what the loop costs run them: tests/benchmarks/test_plain_request_cost.py and
tests/tools/structure.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import KvUse, Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import ClaimResult, EndAndClaimResult, Settlement, SettleStatus
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import Submission
from dispatcher.service.loop_options import build_options
from dispatcher.settings.model import Settings
from dispatcher.telemetry.events import divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.memory_queue import MemoryStore
from tests.support import wait_until

EPOCH = 1_764_000_000
"""Unix time at which the requests were submitted."""
DEADLINE = 4_000_000_000
LIMIT = 32
ANSWER_S = 0.5
PAYLOAD = (
    b'{"model":"qwen","messages":[{"role":"user","content":"Say hello."}],"max_tokens":64,"temperature":0}'
)
ANSWER = Delivered(
    200,
    b'{"id":"chatcmpl-1","object":"chat.completion","model":"qwen","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hello."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15}}',
)


def ignore() -> None:
    """Do nothing."""


class ObservedQueue(MemoryQueue):
    """Queue in memory that reports when leases are handed out, and when results are written."""

    on_claimed: Callable[[], None] = staticmethod(ignore)
    on_settle: Callable[[], None] = staticmethod(ignore)

    async def claim(self, *arguments: Any, **options: Any) -> ClaimResult:
        claimed = await super().claim(*arguments, **options)
        if claimed.leases:
            self.on_claimed()
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        self.on_settle()
        return await super().settle(settlements)

    async def settle_and_claim_next(
        self, settlements: Sequence[Settlement], *offer: Any
    ) -> EndAndClaimResult:
        self.on_settle()
        return await super().settle_and_claim_next(settlements, *offer)


class SteadyGateway:
    """Gateway that answers every request with status 200, after times that differ by up to `spread_s`."""

    def __init__(self, answer_s: float, spread_s: float) -> None:
        self._answer_s = answer_s
        self._spread_s = spread_s
        self._sent_count = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        sent_at = asyncio.get_running_loop().time()
        assert may_send()
        self._sent_count += 1
        await asyncio.sleep(self._answer_s + self._spread_s * (self._sent_count * 7 % LIMIT) / LIMIT)
        return AttemptResult(ANSWER, sent_at, asyncio.get_running_loop().time())

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


def default_settings(**sections: Any) -> Settings:
    return Settings.model_validate({"gateway": {"url": "http://127.0.0.1:1"}, **sections})


def encode_plain_request(number: int) -> Submission:
    member = encode_member(f"r-{number:06}", PAYLOAD, DEADLINE, created=EPOCH, token=f"{number:032x}")
    return Submission(member, float(DEADLINE), f"r-{number:06}", f"{number:032x}", DEADLINE)


def run_plain_requests(
    count: int,
    spread_s: float = 0.0,
    *,
    answer_s: float = ANSWER_S,
    start_s: float = 0.0,
    on_claimed: Callable[[], None] = ignore,
    on_settle: Callable[[], None] = ignore,
    kv_use: KvUse | None = None,
    **sections: Any,
) -> None:
    """Submit requests to a dispatcher that has run for `start_s`. Return when all have their results.

    `kv_use` is shown by the reading of the pool. `sections` are settings that are not the defaults.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(clock=loop.time, unix_origin=float(EPOCH))
        settings = default_settings(**sections)
        limiter = Limiter(Policy(max_sys=LIMIT, reserve=0.0, max_age_s=1e6), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, LIMIT, kv_use=kv_use), 1.0)
        queue = ObservedQueue(store, "a")
        queue.on_claimed, queue.on_settle = on_claimed, on_settle
        dispatcher = Dispatcher(
            queue,
            SteadyGateway(answer_s, spread_s),
            limiter,
            build_options(settings, observe=False),
            Journal(Metrics(settings.pool.name)),
            random.Random(0),
        )
        task = loop.create_task(dispatcher.run())
        await asyncio.sleep(start_s)
        await store.submit([encode_plain_request(number) for number in range(count)])
        await wait_until(
            lambda: sum(map(len, store.result_lists.values())) == count, what="all results", every_s=0.1
        )
        dispatcher.drain(1.0)
        await task

    with divert_events(lambda _event, _fields: None):
        run_in_virtual_time(run(), start=2.0)
