"""What the path of a request costs, as ratios within one run: the machine's speed cancels out."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import timeit
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from dispatcher.core.outcome import Delivered
from dispatcher.core.request import Request, encode_member, parse
from dispatcher.forward import HttpGateway
from tests.forward.conftest import a_request, outcome
from tests.support import running

MakeGateway = Callable[..., HttpGateway]

SERVER = """
import asyncio
ANSWER = b"HTTP/1.1 200 OK\\r\\ncontent-length: 500\\r\\n\\r\\n" + b"x" * 500
class Answering(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        while (end := self.data.find(b"}}\\r\\n")) >= 0:
            self.data = self.data[end + 4:]
            self.transport.write(ANSWER)
async def main():
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
# Ends as nothing else in a request does, so that the server need not parse.
PAYLOAD = b'{"model":"m","prompt":{"text":"' + b"x" * 400 + b'"}}\r\n'


async def cpu_s(once: Callable[[], Awaitable[None]], requests: int = 1500, together: int = 15) -> float:
    """CPU seconds of this process for so many requests; the server is another process."""

    async def some() -> None:
        for _ in range(requests // together):
            await once()

    started = time.process_time()
    await asyncio.gather(*(some() for _ in range(together)))
    return time.process_time() - started


@pytest.mark.serial
async def test_forwarding_costs_less_than_twice_a_bare_client(gateway_to: MakeGateway) -> None:
    with running(sys.executable, "-c", SERVER, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        gateway = gateway_to(url)
        request = a_request(PAYLOAD, metadata={"userid": "t1"}, headers={"x-a": "b"})
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "x",
            "x-request-id": "r-1",
            "x-llm-d-inference-fairness-id": "t1",
            "x-a": "b",
        }
        bare_client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

        async def ours() -> None:
            assert isinstance(await outcome(gateway, request), Delivered)

        async def bare() -> None:
            async with bare_client.post(url + "/v1/completions", data=PAYLOAD, headers=headers) as response:
                assert len(await response.read()) == 500

        async with bare_client:
            await cpu_s(ours, 150)
            await cpu_s(bare, 150)
            ratios = sorted([await cpu_s(ours) / await cpu_s(bare) for _ in range(5)])
    print(f"CPU per request, forward to bare aiohttp: {ratios}")
    assert ratios[0] < 2.0  # about 1.4 on a quiet machine; noise only ever adds to one side at a time


@pytest.mark.serial
def test_parsing_costs_no_more_than_three_times_the_standard_librarys() -> None:
    member = encode_member(
        "r-1",
        {"model": "m", "prompt": "x" * 150},
        1764047600,
        created=1764044000,
        endpoint="/v1/chat/completions",
        headers={"x-a": "b"},
        metadata={"userid": "t1"},
        token="ab" * 16,
        results="batch:{q}:results",
    )
    assert isinstance(parse(member), Request)

    def seconds(once: Callable[[], object]) -> float:
        return min(timeit.repeat(once, number=5000, repeat=7)) / 5000

    ours, theirs = seconds(lambda: parse(member)), seconds(lambda: json.loads(member))
    print(f"{len(member)} bytes: parse {ours * 1e6:.1f} µs, json.loads {theirs * 1e6:.1f} µs")
    assert ours < 3 * theirs
