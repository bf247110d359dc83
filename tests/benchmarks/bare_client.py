"""A bare aiohttp loop: so many workers post and read, and nothing else. What a gateway client costs at least.

python bare_client.py URL WORKERS REQUESTS      prints {"rate": …, "cpu_s": …} per request
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp
import uvloop


async def main(url: str, workers: int, requests: int) -> None:
    left = requests

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            async with session.post(url, data=b'{"prompt":"hi"}', headers=headers) as answer:
                assert answer.status == 200
                await answer.read()

    headers = {"content-type": "application/json", "x-request-id": "r-1"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work(session) for _ in range(workers)))
        rate = requests / (time.perf_counter() - started)
    print(json.dumps({"rate": rate, "cpu_s": (time.process_time() - cpu) / requests}))


uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
