"""Minimal aiohttp client: workers only post requests and read answers. This is the least cost of a client.

python bare_client.py URL WORKERS      for each number of requests on stdin: {"rate": …, "own_s": …}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp
import uvloop


async def post_requests(session: aiohttp.ClientSession, url: str, workers: int, requests: int) -> None:
    remaining = requests

    async def run_worker() -> None:
        nonlocal remaining
        while remaining > 0:
            remaining -= 1
            async with session.post(url, data=b'{"prompt":"hi"}', headers=headers) as answer:
                assert answer.status == 200
                await answer.read()

    headers = {"content-type": "application/json", "x-request-id": "r-1"}
    await asyncio.gather(*(run_worker() for _ in range(workers)))


async def main(url: str, workers: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while line := sys.stdin.readline():
            requests = int(line)
            started, cpu = time.perf_counter(), time.process_time()
            await post_requests(session, url, workers, requests)
            rate = requests / (time.perf_counter() - started)
            own_s = (time.process_time() - cpu) / requests
            print(json.dumps({"rate": rate, "own_s": own_s}), flush=True)


uvloop.run(main(sys.argv[1], int(sys.argv[2])))
