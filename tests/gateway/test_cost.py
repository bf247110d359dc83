"""CPU time of the path of a request, compared with a baseline that runs alternately with it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.requests.request import Request, encode_member, parse_member
from tests.cost_comparison import compare_costs, measure_cpu_s
from tests.gateway.scripted_server import a_request, outcome
from tests.support import running_process

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
# No other part of a request ends like this, so that the server need not parse.
PAYLOAD = b'{"model":"m","prompt":{"text":"' + b"x" * 400 + b'"}}\r\n'


async def cpu_s(once: Callable[[], Awaitable[None]], requests: int = 450, together: int = 15) -> float:
    """Return the CPU seconds of this process for these requests. The server is another process."""

    async def some() -> None:
        for _ in range(requests // together):
            await once()

    started = time.process_time()
    await asyncio.gather(*(some() for _ in range(together)))
    return time.process_time() - started


@pytest.mark.slow
async def test_forwarding_costs_less_than_twice_a_plain_client(gateway_to: MakeGateway) -> None:
    with running_process(sys.executable, "-c", SERVER, stdout=subprocess.PIPE) as server:
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
            found = await compare_costs(lambda: cpu_s(ours), lambda: cpu_s(bare))
    print(f"CPU per request, forward to bare aiohttp: {found.ratio:.2f}")
    assert found.ratio < 2.0


async def test_parsing_costs_no_more_than_three_times_the_standard_librarys() -> None:
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
    assert isinstance(parse_member(member), Request)

    def often(once: Callable[[bytes], object]) -> None:
        for _ in range(2000):
            once(member)

    found = await compare_costs(
        measure_cpu_s(lambda: often(parse_member)), measure_cpu_s(lambda: often(json.loads))
    )
    print(f"{len(member)} bytes: parse {found.ratio:.2f} × json.loads, {found.ours / 2000 * 1e6:.1f} µs")
    assert found.ratio < 3
