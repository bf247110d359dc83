"""A dispatcher with the gateway left out: claims, "answers" after a moment, settles. Made to be killed.

    python -m tests.chaos.worker URL OWNER LEASE_S SLOTS WORK_MIN_S WORK_MAX_S

It behaves towards the queue as the real one does: claims again with the nonce whose reply it did not get,
renews what it holds, drops what it lost, keeps answers while the queue is away. Prints a line when it first
holds work, and one for each lease that was no longer its own when it wanted to write.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

from dispatcher.core.requests.lanes import Lane
from dispatcher.core.requests.result import ErrorCode, encode_failure
from dispatcher.ports import DeadLetter, Lease, Permit, QueueUnavailableError, Settlement, SettleStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue

NAMES = QueueNames("chaos:{pool}:requests", "chaos:{pool}:results")
LIMIT = 64
MAX_LOSSES = 5
_AWAY_S = 0.05


def answer_to(request_id: str) -> str:
    """The one right answer: nobody else's will do."""
    return f"answer to {request_id}"


class Worker:
    def __init__(self, queue: RedisQueue, lease_s: float, slots: int, work_s: tuple[float, float]) -> None:
        self._queue = queue
        self._lease_s = lease_s
        self._slots = slots
        self._work_s = work_s
        self._held: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._lost = 0
        self._freed = asyncio.Event()

    async def run_batch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._every(self._lease_s / 5, self._renew))
            tasks.create_task(self._every(min(1.0, self._lease_s / 5), self._sweep))
            await self._claim_for_ever(tasks)

    async def _claim_for_ever(self, tasks: asyncio.TaskGroup) -> None:
        nonce = uuid.uuid4().hex
        while True:
            self._freed.clear()
            held = Counter(lease.lane for lease, _ in self._held.values())
            lanes = {lane: 1 - held[lane] for lane in Lane}
            permit = Permit(LIMIT, asyncio.get_running_loop().time(), self._lost)
            try:
                claimed = await self._queue.claim(
                    self._slots - len(self._held), nonce, permit, max_per_lane=lanes
                )
            except QueueUnavailableError:
                await asyncio.sleep(_AWAY_S)
                continue
            nonce = uuid.uuid4().hex
            self._lost = claimed.lease_counts.lost_units
            for lease in claimed.leases:
                self._held[lease.token] = lease, tasks.create_task(self._answer(lease))
            if claimed.leases:
                print("working", flush=True)
            try:
                async with asyncio.timeout(0.05):
                    await self._freed.wait()
            except TimeoutError:
                continue

    async def _answer(self, lease: Lease) -> None:
        request_id = json.loads(lease.member)["data"]["id"]
        try:
            await asyncio.sleep(random.uniform(*self._work_s))
            await self._write(lease, request_id)
        finally:
            self._held.pop(lease.token, None)
            self._freed.set()

    async def _write(self, lease: Lease, request_id: str) -> None:
        result = json.dumps({"id": request_id, "status_code": 200, "payload": answer_to(request_id)}).encode()
        while True:
            try:
                if lease.deaths_as_suspect > MAX_LOSSES:
                    result = encode_failure(request_id, ErrorCode.DELIVERIES_EXHAUSTED, "its owners died")
                    burial = DeadLetter(Settlement(lease, result, "", request_id), "its owners died")
                    [said] = await self._queue.move_to_dead_letters([burial])
                else:
                    [said] = await self._queue.settle([Settlement(lease, result, "", request_id)])
            except QueueUnavailableError:
                await asyncio.sleep(_AWAY_S)
                continue
            if said is SettleStatus.LOST:
                print("lost", flush=True)
            return

    async def _renew(self) -> None:
        renewed = await self._queue.renew([lease for lease, _ in self._held.values()])
        for lease, task in list(self._held.values()):
            if lease.entry_id in renewed.lost_entry_ids:
                print("lost", flush=True)
                task.cancel()

    async def _sweep(self) -> None:
        await self._queue.sweep()

    @staticmethod
    async def _every(seconds: float, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except QueueUnavailableError:
                await asyncio.sleep(_AWAY_S)
            await asyncio.sleep(seconds)


async def main(url: str, owner: str, lease_s: float, slots: int, *work_s: float) -> None:
    queue = RedisQueue(
        connect(url, connect_timeout_s=0.5), NAMES, owner, lease_s=lease_s, attempt_timeout_s=1.0
    )
    await Worker(queue, lease_s, slots, (work_s[0], work_s[1])).run_batch()


def run() -> None:
    url, owner, *numbers = sys.argv[1:]
    lease_s, slots, shortest_s, longest_s = numbers
    asyncio.run(main(url, owner, float(lease_s), int(slots), float(shortest_s), float(longest_s)))


if __name__ == "__main__":
    run()
