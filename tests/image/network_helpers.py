"""Helpers that run in the network namespace of the dispatcher's container, which has only a loopback.

python -m tests.image.network_helpers ready URL       # wait for a 200 and print the uptime
python -m tests.image.network_helpers kubernetes DIR  # run an API server with a pool of three pods
"""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.signals.apiserver import PODS, POOLS, ApiServer, pod, pool


def wait_until_ready(url: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                if answer.status == 200:
                    print(time.clock_gettime(time.CLOCK_BOOTTIME))
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.005)
    sys.exit(f"{url} was not ready within {timeout_s:g} s")


async def run_api_server(directory: Path) -> None:
    async with ApiServer().serve(directory) as server:
        server.put(POOLS, pool())
        for number in range(3):
            server.put(PODS, pod(f"vllm-{number}"))
        print(server.url, flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    verb, argument = sys.argv[1:]
    if verb == "ready":
        wait_until_ready(argument)
    else:
        asyncio.run(run_api_server(Path(argument)))
