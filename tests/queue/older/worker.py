"""An owner of an older version: steps as lines on standard input, what came of them on standard output.

Runs with that version's code on its path, never with today's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dispatcher.queue.connect import connect

from dispatcher.ports import Lease, Permit, Release, Settlement
from dispatcher.queue.keys import Names
from dispatcher.queue.redis import RedisQueue


class Worker:
    def __init__(self, url: str, queue: str, results: str, owner: str) -> None:
        self.queue = RedisQueue(connect(url), Names(queue, results), owner, lease_s=30, owner_timeout_s=20)
        self.leases: dict[int, Lease] = {}

    async def claim(self, most: int, nonce: str, limit: int, lost: int) -> dict[str, Any]:
        permit = Permit(limit, asyncio.get_running_loop().time(), lost)
        told = await self.queue.claim(most, nonce, permit)
        self.leases |= {lease.entry: lease for lease in told.leases}
        members = {lease.entry: lease.member.decode() for lease in told.leases}
        return {"members": members, "live": told.count.live, "others": told.count.others}

    async def settle(self, entry: int) -> str:
        lease = self.leases.pop(entry)
        result = json.dumps({"id": json.loads(lease.member)["data"]["id"], "status_code": 200}).encode()
        return str((await self.queue.settle([Settlement(lease, result, "")]))[0])

    async def release(self, entry: int, delay_s: float) -> str:
        return str((await self.queue.release([Release(self.leases.pop(entry), delay_s=delay_s)]))[0])

    async def renew(self) -> list[int]:
        lost = list((await self.queue.renew(list(self.leases.values()))).lost)
        for entry in lost:
            del self.leases[entry]
        return lost

    async def sweep(self) -> int:
        return (await self.queue.sweep()).reclaimed


async def main() -> None:
    worker = Worker(*sys.argv[1:])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        step, *args = json.loads(line)
        print(json.dumps(await getattr(worker, step)(*args)), flush=True)
    await worker.queue.aclose()


asyncio.run(main())
