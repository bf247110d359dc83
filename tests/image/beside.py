"""What stands beside the dispatcher's container, inside its network namespace: that has a loopback alone.

python -m tests.image.beside ready URL          # wait until it answers 200; prints when, in seconds of uptime
python -m tests.image.beside kubernetes DIR     # an API server with a pool of three pods; DIR/kubeconfig
"""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.signals.apiserver import PODS, POOLS, ApiServer, pod, pool


def ready(url: str, within_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                if answer.status == 200:
                    print(time.clock_gettime(time.CLOCK_BOOTTIME))
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.005)
    sys.exit(f"{url} was not ready within {within_s:g} s")


async def kubernetes(directory: Path) -> None:
    async with ApiServer().serve(directory) as server:
        server.put(POOLS, pool())
        for number in range(3):
            server.put(PODS, pod(f"vllm-{number}"))
        print(server.url, flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    verb, argument = sys.argv[1:]
    if verb == "ready":
        ready(argument)
    else:
        asyncio.run(kubernetes(Path(argument)))
