"""Record a queue as commit 4b348e7 left it: run with the code of that commit, never with today's.

    git archive 4b348e7 dispatcher/__init__.py dispatcher/ports.py dispatcher/core dispatcher/queue \\
        dispatcher/telemetry/__init__.py dispatcher/telemetry/events.py \\
        --format=zip -9 -o tests/queue/older/4b348e7.zip
    PYTHONPATH=<a checkout of it> python tests/queue/older/record.py redis://localhost:6379 <folder>

The Redis is emptied first. Twelve requests, all that may be there at an upgrade: pending, given back,
delayed, leased by two owners, suspect, dead, with results that nobody has popped, and paused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from dispatcher.core.request import encode_member
from dispatcher.queue.connect import connect

from dispatcher.ports import Burial, Overload, Permit, Release, Settlement, Submission
from dispatcher.queue.embedded import embedded_valkey
from dispatcher.queue.keys import Names
from dispatcher.queue.redis import RedisQueue

NAMES = Names("batch:{pool}:requests", "batch:{pool}:results")
DEADLINE = 4_000_000_000
NO_SUSPECTS: Any = {"suspects": 0}
"""As claims of that version have it."""


def submission(number: int) -> Submission:
    name, token = f"r-{number:02}", f"token-{number}"
    member = encode_member(name, {"prompt": "hi", "n": number}, DEADLINE + number, token=token)
    return Submission(member, DEADLINE + number, name, token, DEADLINE + number)


def settlement(lease: Any) -> Settlement:
    name = json.loads(lease.member)["data"]["id"]
    result = json.dumps({"id": name, "status_code": 200, "payload": "older"}).encode()
    return Settlement(lease, result, "", name, f"token-{int(name[2:])}")


async def leave(url: str) -> None:
    """What the older version was at when it was stopped."""
    client = connect(url)
    first, second = (RedisQueue(connect(url), NAMES, f"older-{n}", lease_s=30) for n in (1, 2))
    now = asyncio.get_running_loop().time
    await first.submit([submission(number) for number in range(12)])
    await first.sweep()
    for _ in range(2):  # r-00 is there when its owner dies, twice
        (lease,) = (await second.claim(1, f"n-{_}", Permit(1, now(), _))).leases
        await client.zadd(f"{NAMES.prefix}:leases", {f"{lease.entry}:older-2": 0})
        assert (await first.sweep()).reclaimed == 1
    leases = (await first.claim(7, "all", Permit(9, now(), 2), **NO_SUSPECTS)).leases  # r-01 … r-07
    await first.settle([settlement(leases[0])])
    await first.bury([Burial(settlement(leases[1]), "it broke")])
    await first.release([Release(leases[2]), Release(leases[3], delay_s=5), Release(leases[4], delay_s=500)])
    await second.claim(1, "mine", Permit(9, now(), 2), **NO_SUSPECTS)  # r-03, again
    await first.cancel("r-11", "token-11")
    await first.share(Permit(9, now(), 2), Overload(now() - 60, now() - 50, capacity=True, in_flight=3))
    await first.pause("me", "the upgrade")
    for queue in (first, second):
        await queue.aclose()
    await client.aclose()


async def dump(url: str) -> dict[str, Any]:
    """Every lasting key, and when: bytes as base64."""
    client = connect(url)
    seconds, micros = await client.time()
    found: dict[str, Any] = {}
    for key in sorted([key async for key in client.scan_iter()]):
        if b":reply:" in key:
            continue
        kind = (await client.type(key)).decode()
        if kind == "zset":
            pairs = await client.zrange(key, 0, -1, withscores=True)
            value: Any = [[text(member), score] for member, score in pairs]
        elif kind == "hash":
            value = [[text(field), text(one)] for field, one in (await client.hgetall(key)).items()]
        elif kind == "list":
            value = [text(one) for one in await client.lrange(key, 0, -1)]
        else:
            value = text(await client.get(key))
        found[key.decode()] = {"type": kind, "value": value}
    await client.aclose()
    return {"commit": "4b348e7", "at": seconds + micros / 1e6, "keys": found}


def text(value: bytes) -> str:
    return base64.b64encode(value).decode()


async def main(url: str, folder: Path) -> None:
    client = connect(url)
    await client.flushall()
    await client.aclose()
    await leave(url)
    (folder / "4b348e7.json").write_text(json.dumps(await dump(url), indent=1) + "\n")
    kept = folder / "embedded"
    shutil.rmtree(kept, ignore_errors=True)
    async with embedded_valkey(folder / "kept") as own:
        await leave(own)
    shutil.move(folder / "kept" / "appendonlydir", kept)
    shutil.rmtree(folder / "kept")


asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
