"""A hostile answer affects only its own request, and neither other requests nor the end of the process."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable

import pytest

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.gateway.transport import MAX_HEAD_BYTES
from dispatcher.gateway.unpack import MAX_CODINGS, MAX_MEMBERS, STEP_OUTPUT_BYTES, decode_content
from dispatcher.requests.outcomes.outcome import Delivered, Failed, TooLarge
from tests.gateway.scripted_server import Connection, always, outcome, serving
from tests.support import wait_until

MakeGateway = Callable[..., HttpGateway]
EMPTY = gzip.compress(b"", mtime=0)
MB = 2**20


class Turns:
    """Counts the iterations of the event loop within a block."""

    async def __aenter__(self) -> Turns:
        self.count = 0
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1


def stored(body: bytes) -> bytes:
    packer = zlib.compressobj(0, wbits=31)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("members", "fits"), [(MAX_MEMBERS, True), (MAX_MEMBERS + 1, False), (100_000, False)]
)
async def test_number_of_members_of_a_compressed_body_is_bounded(
    gateway_to: MakeGateway, members: int, fits: bool
) -> None:
    """Each member may be empty, and costs a copy of all later ones."""
    body = gzip.compress(b"{}", mtime=0) + EMPTY * (members - 1)
    async with serving(always(body=body, headers="content-encoding: gzip\r\n")) as server:
        found = await outcome(gateway_to(server.url))
    if fits:
        assert found == Delivered(200, b"{}")
    else:
        assert isinstance(found, Failed)
        assert f"more than {MAX_MEMBERS} members" in found.why


@pytest.mark.parametrize(("layers", "fits"), [(MAX_CODINGS, True), (MAX_CODINGS + 1, False), (20, False)])
async def test_number_of_nested_codings_is_bounded(gateway_to: MakeGateway, layers: int, fits: bool) -> None:
    body = b"{}"
    for _ in range(layers):
        body = stored(body)
    header = f"content-encoding: identity, {', '.join(['gzip'] * layers)}\r\n"
    async with serving(always(body=body, headers=header)) as server:
        found = await outcome(gateway_to(server.url))
    if fits:
        assert found == Delivered(200, b"{}")
    else:
        assert isinstance(found, Failed)
        assert f"{layers} codings" in found.why


@pytest.mark.parametrize(
    "packed", [gzip.compress(bytes(8 * MB)), stored(bytes(8 * MB))], ids=["bomb", "plain"]
)
async def test_other_tasks_run_while_a_large_body_is_decompressed(packed: bytes) -> None:
    async with Turns() as turns:
        assert await decode_content(packed, "gzip", 16 * MB) == bytes(8 * MB)
    assert turns.count >= 8 * MB // STEP_OUTPUT_BYTES - 2


async def test_decompression_stops_at_the_limit() -> None:
    packed = gzip.compress(bytes(64 * MB), 1)
    async with Turns() as turns:
        assert await decode_content(packed, "gzip", MB) is None
    assert turns.count <= MB // STEP_OUTPUT_BYTES + 2


def list_executor_threads() -> set[threading.Thread]:
    """Return the threads in which executors run functions, such as those of `asyncio.to_thread`. pytest-xdist
    has threads as well, which may start at any time."""
    return {
        each for each in threading.enumerate() if each.name.startswith(("asyncio_", "ThreadPoolExecutor"))
    }


async def test_no_thread_works_on_an_answer_after_its_attempt(gateway_to: MakeGateway) -> None:
    """Work in a thread would continue after its attempt, and delay the end of the process."""
    before = list_executor_threads()
    body = gzip.compress(bytes(8 * MB), 1)
    async with serving(always(body=body, headers="content-encoding: gzip\r\n")) as server:
        gateway = gateway_to(server.url, max_response_bytes=MB)
        assert await outcome(gateway) == TooLarge(200, MB)
        assert list_executor_threads() <= before
    unpacking = asyncio.create_task(decode_content(body, "gzip", 16 * MB))
    for _ in range(3):
        await asyncio.sleep(0)
    unpacking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unpacking


def interim(count: int, status: str = "102 Processing") -> Callable[[Connection], object]:
    """Return a script that sends interim answers before the answer."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            for _ in range(count):
                connection.writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
            await connection.answer()

    return script


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints", "199 Own"])
async def test_interim_answers_are_skipped(gateway_to: MakeGateway, status: str) -> None:
    count = MAX_HEAD_BYTES // 2 // len(f"HTTP/1.1 {status}\r\n\r\n")
    async with serving(interim(count, status)) as server:  # type: ignore[arg-type]
        gateway = gateway_to(server.url)
        for _ in range(3):
            assert await outcome(gateway) == Delivered(200, b"{}")
    assert len(server.connections) == 1, "their bytes are counted per answer"


async def test_large_body_does_not_count_as_a_head(gateway_to: MakeGateway) -> None:
    async with serving(always(body=b"x" * (2 * MAX_HEAD_BYTES))) as server:
        gateway = gateway_to(server.url)
        for _ in range(2):
            assert await outcome(gateway) == Delivered(200, b"x" * (2 * MAX_HEAD_BYTES))
    assert len(server.connections) == 1


async def test_too_many_interim_answers_are_a_failure_and_end_the_connection(gateway_to: MakeGateway) -> None:
    status = "102 " + "x" * 1000
    async with serving(interim(MAX_HEAD_BYTES // 1000, status)) as server:  # type: ignore[arg-type]
        gateway = gateway_to(server.url)
        for number in (1, 2):
            found = await outcome(gateway)
            assert isinstance(found, Failed)
            assert f"more than {MAX_HEAD_BYTES} bytes of headers and interim answers" in found.why
            assert len({each.number for each in server.connections}) >= number


async def test_flood_of_interim_answers_is_not_read_to_its_end(gateway_to: MakeGateway) -> None:
    """Each interim answer is parsed on the event loop and kept in memory."""
    written = 0

    async def script(connection: Connection) -> None:
        nonlocal written
        await connection.receive()
        flood = b"HTTP/1.1 102 Processing\r\n\r\n" * 1000
        while written < 64 * MB:
            connection.writer.write(flood)
            await connection.writer.drain()
            written += len(flood)

    async with serving(script) as server:
        found = await outcome(gateway_to(server.url))
        assert isinstance(found, Failed)
        assert "interim" in found.why
    print(f"{written / MB:.1f} MB were written before it noticed")
    assert written < 16 * MB, "no more than the socket buffers hold"


async def test_idle_connection_is_closed_if_the_server_goes_on_sending(gateway_to: MakeGateway) -> None:
    was_closed = False

    async def script(connection: Connection) -> None:
        nonlocal was_closed
        await connection.receive()
        await connection.answer()
        try:
            for _ in range(64):
                connection.writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 10_000)
                await connection.writer.drain()
        except ConnectionError:
            was_closed = True

    async with serving(script) as server:
        assert await outcome(gateway_to(server.url)) == Delivered(200, b"{}")
        await wait_until(lambda: was_closed)
