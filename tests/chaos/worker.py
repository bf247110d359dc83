"""Minimal dispatcher without a gateway, for tests that kill it: claims, waits, and settles with an answer.

python -m tests.chaos.worker URL OWNER LEASE_S SLOTS WORK_MIN_S WORK_MAX_S

It uses the queue like the real dispatcher: it repeats a claim with the same nonce if it got no reply, renews
its leases, drops lost ones, and keeps answers during an outage. It prints `working` when it has claimed
requests, and `lost` for each lease that it has lost before it could write the result.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

from dispatcher.queue.contract import DeadLetter, Lease, Permit, Settlement, SettleStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import QueueOptions, RedisQueue
from dispatcher.requests.lanes import Lane
from dispatcher.requests.result import encode_failure
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.wire_format import ErrorCode

NAMES = QueueNames("chaos:{pool}:requests", "chaos:{pool}:results")
LIMIT = 64
MAX_LOSSES = 5
_RETRY_S = 0.05


def make_answer(request_id: str) -> str:
    """Return the only correct answer to a request."""
    return f"answer to {request_id}"


class Worker:
    def __init__(self, queue: RedisQueue, lease_s: float, slots: int, work_s: tuple[float, float]) -> None:
        self._queue = queue
        self._lease_s = lease_s
        self._slots = slots
        self._work_s = work_s
        self._in_flight: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._lost_units = 0
        self._slot_freed = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_every(self._lease_s / 5, self._renew))
            tasks.create_task(self._run_every(min(1.0, self._lease_s / 5), self._sweep))
            await self._claim_repeatedly(tasks)

    async def _claim_repeatedly(self, tasks: asyncio.TaskGroup) -> None:
        nonce = uuid.uuid4().hex
        while True:
            self._slot_freed.clear()
            count_by_lane = Counter(lease.lane for lease, _ in self._in_flight.values())
            lanes = {lane: 1 - count_by_lane[lane] for lane in Lane}
            permit = Permit(LIMIT, asyncio.get_running_loop().time(), self._lost_units)
            try:
                claimed = await self._queue.claim(
                    self._slots - len(self._in_flight), nonce, permit, max_per_lane=lanes
                )
            except QueueUnavailableError:
                await asyncio.sleep(_RETRY_S)
                continue
            nonce = uuid.uuid4().hex
            self._lost_units = claimed.lease_counts.lost_units
            for lease in claimed.leases:
                self._in_flight[lease.token] = lease, tasks.create_task(self._answer(lease))
            if claimed.leases:
                print("working", flush=True)
            try:
                async with asyncio.timeout(0.05):
                    await self._slot_freed.wait()
            except TimeoutError:
                continue

    async def _answer(self, lease: Lease) -> None:
        request_id = json.loads(lease.member)["data"]["id"]
        try:
            await asyncio.sleep(random.uniform(*self._work_s))
            await self._write(lease, request_id)
        finally:
            self._in_flight.pop(lease.token, None)
            self._slot_freed.set()

    async def _write(self, lease: Lease, request_id: str) -> None:
        result = json.dumps(
            {"id": request_id, "status_code": 200, "payload": make_answer(request_id)}
        ).encode()
        while True:
            try:
                if lease.deaths_as_suspect > MAX_LOSSES:
                    result = encode_failure(request_id, ErrorCode.DELIVERIES_EXHAUSTED, "its owners died")
                    dead_letter = DeadLetter(Settlement(lease, result, "", request_id), "its owners died")
                    [status] = await self._queue.move_to_dead_letters([dead_letter])
                else:
                    [status] = await self._queue.settle([Settlement(lease, result, "", request_id)])
            except QueueUnavailableError:
                await asyncio.sleep(_RETRY_S)
                continue
            if status is SettleStatus.LOST:
                print("lost", flush=True)
            return

    async def _renew(self) -> None:
        renewed = await self._queue.renew([lease for lease, _ in self._in_flight.values()])
        for lease, task in list(self._in_flight.values()):
            if lease.entry_id in renewed.lost_entry_ids:
                print("lost", flush=True)
                task.cancel()

    async def _sweep(self) -> None:
        await self._queue.sweep()

    @staticmethod
    async def _run_every(seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await action()
            except QueueUnavailableError:
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(seconds)


async def main(url: str, owner: str, lease_s: float, slots: int, *work_s: float) -> None:
    queue = RedisQueue(
        connect(url, connect_timeout_s=0.5),
        NAMES,
        owner,
        QueueOptions(lease_s=lease_s, attempt_timeout_s=1.0),
    )
    await Worker(queue, lease_s, slots, (work_s[0], work_s[1])).run()


def run() -> None:
    url, owner, *numbers = sys.argv[1:]
    lease_s, slots, shortest_s, longest_s = numbers
    asyncio.run(main(url, owner, float(lease_s), int(slots), float(shortest_s), float(longest_s)))


if __name__ == "__main__":
    run()
