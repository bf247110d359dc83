"""Each fault of a network or a server has an outcome, and none raises."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.gateway.transport import CONNECT_S
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    Overloaded,
    TooLate,
    Unreachable,
)
from tests.gateway.scripted_server import Connection, Script, a_request, always, forward, outcome, serving
from tests.support import free_port, wait_until

MakeGateway = Callable[..., HttpGateway]
EVENT = b'data: {"choices":[{"text":"hi"}]}\n\n'


async def test_refused_connection_is_unreachable(gateway_to: MakeGateway) -> None:
    port = free_port()
    forwarded = await forward(gateway_to(f"http://127.0.0.1:{port}"))
    assert forwarded.outcome == Unreachable(f"no connection: 127.0.0.1:{port}: connection refused")
    assert forwarded.sent_at == forwarded.ended_at


async def test_name_that_does_not_resolve_is_unreachable(gateway_to: MakeGateway) -> None:
    assert isinstance(await outcome(gateway_to("http://nowhere.invalid")), Unreachable)


async def test_connection_that_is_not_accepted_is_unreachable_within_the_connect_timeout(
    gateway_to: MakeGateway,
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]  # the backlog is full, so that further SYNs are dropped
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        forwarded = await forward(gateway_to(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        for filler in fillers:
            filler.close()
    assert isinstance(forwarded.outcome, Unreachable)
    assert forwarded.ended_at - forwarded.sent_at < CONNECT_S + 5


@pytest.mark.parametrize("nothing_but", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\ncontent-le"])
@pytest.mark.parametrize("ending", ["closed", "reset"])
async def test_new_connection_that_ends_before_an_answer_is_a_failure(
    gateway_to: MakeGateway, nothing_but: bytes, ending: str
) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(nothing_but)
        await connection.writer.drain()
        if ending == "reset":
            connection.reset()

    async with serving(script) as server:
        found = await outcome(gateway_to(server.url))
    assert isinstance(found, Failed)
    assert found.status is None
    # aiohttp does not pass on that the connection was reset.
    assert found.kind is FailureKind.NO_ANSWER
    assert not found.is_intermediary_error
    assert len(server.received) == 1  # not sent twice, because the first may have been processed


def breaking_the_second(ending: str, *, also_new_ones: bool = False) -> Script:
    """Answer the first request of a connection and break the next."""

    async def script(connection: Connection) -> None:
        if not (also_new_ones and connection.number):
            await connection.receive()
            await connection.answer(b"%d" % connection.number)
        await connection.receive()
        if ending == "reset":
            connection.reset()

    return script


@pytest.mark.parametrize("ending", ["closed", "reset"])
async def test_request_on_a_kept_connection_that_breaks_is_sent_again_on_a_new_one(
    gateway_to: MakeGateway, ending: str
) -> None:
    async with serving(breaking_the_second(ending)) as server:
        gateway = gateway_to(server.url)
        assert await outcome(gateway) == Delivered(200, b"0")
        assert await outcome(gateway) == Delivered(200, b"1")
    assert [len(server.connections), len(server.received)] == [2, 3]


async def test_large_payload_is_sent_again_from_its_start(gateway_to: MakeGateway) -> None:
    async with serving(breaking_the_second("reset")) as server:
        gateway = gateway_to(server.url)
        await outcome(gateway)
        payload = b'{"a":"' + b"0123456789" * 100_000 + b'"}'
        assert await outcome(gateway, a_request(payload)) == Delivered(200, b"1")
    assert [received.body for received in server.received[1:]] == [payload, payload]


async def test_request_that_breaks_two_connections_is_a_failure(
    gateway_to: MakeGateway,
) -> None:
    async with serving(breaking_the_second("reset", also_new_ones=True)) as server:
        gateway = gateway_to(server.url)
        await outcome(gateway)
        assert isinstance(await outcome(gateway), Failed)
    assert len(server.received) == 3


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this"])
async def test_gateway_that_dies_with_requests_on_new_connections_is_unreachable(
    gateway_to: MakeGateway, answer: bytes
) -> None:
    together = 5

    async def script(connection: Connection) -> None:
        await connection.receive()
        await wait_until(lambda: len(server.received) >= together)
        assert server.listener is not None
        server.listener.close()
        connection.writer.write(answer)
        await connection.writer.drain()
        connection.reset()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        found = await asyncio.gather(*(forward(gateway) for _ in range(together)))
    kind = FailureKind.BROKEN_OFF if answer else FailureKind.NO_ANSWER
    assert [type(one.outcome) for one in found] == [Unreachable] * together
    assert {one.outcome.kind for one in found if isinstance(one.outcome, Unreachable)} == {kind}
    assert all(one.sent_at < one.ended_at for one in found), "they had been sent"


async def test_gateway_that_stops_speaking_tls_is_unreachable_for_requests_it_dropped(
    gateway_to: MakeGateway, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    plain: list[asyncio.Server] = []

    async def script(connection: Connection) -> None:
        await connection.receive()
        assert server.listener is not None
        server.listener.close()
        plain.append(await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", server.port))
        connection.reset()

    async with serving(script, tls) as server:
        found = await outcome(gateway_to(server.url, tls={"ca_file": str(tmp_path / "ca.pem")}))
    plain[0].close()
    assert isinstance(found, Unreachable)


async def test_gateway_that_hangs_and_accepts_no_connection_is_unreachable(gateway_to: MakeGateway) -> None:
    fillers = [socket.socket() for _ in range(4)]

    async def script(connection: Connection) -> None:
        await connection.receive()
        assert server.listener is not None
        server.listener.close()
        hole.bind(("127.0.0.1", server.port))
        hole.listen(0)
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", server.port))
        await connection.wait_until_closed()

    with socket.socket() as hole:
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        async with serving(script) as server:
            forwarded = await forward(gateway_to(server.url, timeout_s=0.5))
    for filler in fillers:
        filler.close()
    assert isinstance(forwarded.outcome, Unreachable)
    assert forwarded.ended_at - forwarded.sent_at < CONNECT_S, (
        "the connection check is not part of the attempt"
    )


async def test_restart_of_the_gateway_costs_no_request_on_a_kept_connection(
    gateway_to: MakeGateway,
) -> None:
    """All kept connections break at their next use, so no second send may use another one of them."""
    together = 8
    arrived = asyncio.Semaphore(0)
    restarted = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            if restarted.is_set() and connection.number < together:
                return connection.reset()
            if not restarted.is_set():
                arrived.release()
                await wait_until(lambda: len(server.received) >= together)
            await connection.answer()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        await asyncio.gather(*(outcome(gateway) for _ in range(together)))
        assert len(server.connections) == together
        restarted.set()
        found = await asyncio.gather(*(outcome(gateway) for _ in range(together)))
    assert found == [Delivered(200, b"{}")] * together


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n50\r\nhel",
    ],
    ids=["length", "chunks", "no chunk", "in a chunk"],
)
@pytest.mark.parametrize("ending", ["closed", "reset"])
async def test_truncated_body_is_a_failure(gateway_to: MakeGateway, answer: bytes, ending: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(answer)
        await connection.writer.drain()
        if ending == "reset":
            connection.reset()

    async with serving(script) as server:
        found = await outcome(gateway_to(server.url))
    assert isinstance(found, Failed)
    is_http = b"zz" not in answer
    assert (found.status, found.kind) == (
        None,
        FailureKind.BROKEN_OFF if is_http else FailureKind.NO_ANSWER,
    )
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("headers", "sent", "expected"),
    [
        ("", EVENT, Failed),
        ("x-llm-d-request-dropped-reason: evicted-priority\r\n", EVENT, Evicted),
        ("", EVENT + b'data: {"error":{"message":"bye","type":"evicted"}}\n\n', Evicted),
        ("", EVENT + b'data: {"error":{"message":"The request queue is full.","code":503}}\n\n', Overloaded),
        ("", EVENT + b'data: {"error":{"message":"out of memory"}}\n\n', Failed),
        ("", EVENT * 2000 + b'data: {"error":{"type":"evicted"', Failed),
    ],
)
async def test_cut_stream_is_an_eviction_only_if_it_says_so(
    gateway_to: MakeGateway, headers: str, sent: bytes, expected: type
) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{headers}"
        connection.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        connection.writer.write(b"%x\r\n%b\r\n" % (len(sent), sent))
        await connection.writer.drain()

    async with serving(script) as server:
        assert type(await outcome(gateway_to(server.url))) is expected


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"<html>not http</html>\r\n\r\n",
    ],
)
async def test_answer_that_is_not_http_is_a_failure(gateway_to: MakeGateway, garbage: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(garbage)
        await connection.writer.drain()

    async with serving(script) as server:
        found = await outcome(gateway_to(server.url))
        assert isinstance(found, Failed), found
        assert found.kind is FailureKind.NO_ANSWER
        assert len(found.why) < 400


async def test_answer_without_a_request_is_not_taken_for_the_next_answer(gateway_to: MakeGateway) -> None:
    """A second answer to one request must not be taken for the answer to the next request."""

    async def script(connection: Connection) -> None:
        received = await connection.receive()
        own = received.headers["x-request-id"].encode()
        connection.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(own), own) * 2)
        await connection.wait_until_closed()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        for name in ("a", "b", "c"):
            assert await outcome(gateway, a_request(id=name)) == Delivered(200, name.encode())


async def silence(connection: Connection) -> None:
    await connection.receive()
    await connection.wait_until_closed()


async def half_an_answer(connection: Connection) -> None:
    await connection.receive()
    connection.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhello")
    await connection.wait_until_closed()


async def never_reading(connection: Connection) -> None:
    """Do not read, so that the client stays in the middle of its upload."""
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await connection.server.go_on.wait()
    connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
    await connection.wait_until_closed()


LARGE = b'{"a":"' + b"x" * (32 << 20) + b'"}'


@pytest.mark.parametrize(
    ("script", "payload"),
    [(silence, b"{}"), (half_an_answer, b"{}"), (never_reading, LARGE)],
    ids=["before the answer", "within the answer", "within the upload"],
)
async def test_cancelling_closes_the_connection_at_once(
    gateway_to: MakeGateway, script: Script, payload: bytes
) -> None:
    async with serving(script) as server:
        gateway = gateway_to(server.url)
        request = a_request(payload)
        task = asyncio.create_task(outcome(gateway, request, token="one"))
        await wait_until(lambda: server.received or (payload is LARGE and server.connections))
        await wait_until(lambda: gateway.get_connected_at("one") is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gateway.get_connected_at("one") is None
        server.go_on.set()
        await wait_until(server.client_closed.is_set, what="the server to see the connection closed")


@pytest.mark.parametrize("script", [silence, half_an_answer], ids=["before the answer", "within the answer"])
async def test_attempt_ends_at_the_timeout(gateway_to: MakeGateway, script: Script) -> None:
    """The time begins with the attempt, before its connection. It is brought forward here, because a busy
    machine may need any time for the connection."""
    now = asyncio.get_running_loop().time
    async with serving(script) as server:
        gateway = gateway_to(server.url, timeout_s=600.0)
        started_at = now()
        attempt = asyncio.create_task(forward(gateway, within_s=3600.0, token="one"))
        await wait_until(lambda: server.received)
        timer = gateway._attempts["one"].timer
        assert timer is not None
        ends_at = timer.when()
        assert ends_at is not None
        assert started_at <= ends_at - 600.0 <= now()
        timer.reschedule(now())
        forwarded = await attempt
        assert forwarded.outcome == Failed("no answer within 600 s", kind=FailureKind.NO_ANSWER_IN_TIME)
        await wait_until(server.client_closed.is_set)


@pytest.mark.parametrize("script", [silence, half_an_answer], ids=["before the answer", "within the answer"])
async def test_attempt_ends_at_the_deadline(
    gateway_to: MakeGateway, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the loop is moved, for the same reason."""
    loop = asyncio.get_running_loop()
    now = loop.time
    async with serving(script) as server:
        attempt = asyncio.create_task(outcome(gateway_to(server.url), within_s=200.0))
        await wait_until(lambda: server.received)
        monkeypatch.setattr(loop, "time", lambda: now() + 200.0)
        assert await attempt == TooLate()
        await wait_until(server.client_closed.is_set)


@pytest.mark.parametrize("within_s", [0.0, -1.0, float("-inf")])
async def test_nothing_is_sent_after_the_deadline(gateway_to: MakeGateway, within_s: float) -> None:
    async with serving(always()) as server:
        assert await outcome(gateway_to(server.url), within_s=within_s) == TooLate()
        assert not server.connections


async def test_running_attempt_has_the_time_of_its_connection(gateway_to: MakeGateway) -> None:
    now = asyncio.get_running_loop().time
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.receive()
        await go_on.wait()
        await connection.answer()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        before = now()
        assert gateway.get_connected_at("one") is None
        task = asyncio.create_task(forward(gateway, token="one"))
        await wait_until(lambda: server.received)
        since = gateway.get_connected_at("one")
        assert since is not None
        assert before <= since <= now()
        assert gateway.get_connected_at("another") is None
        go_on.set()
        assert (await task).sent_at == since
        assert gateway.get_connected_at("one") is None


async def test_resizing_closes_idle_connections_beyond_the_limit(gateway_to: MakeGateway) -> None:
    closed: list[int] = []

    async def script(connection: Connection) -> None:
        await connection.receive()
        await wait_until(lambda: len(server.received) >= 6)
        await connection.answer()
        await connection.wait_until_closed()
        closed.append(connection.number)

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        gateway.resize_connection_pool(3)  # nothing is open yet
        await asyncio.gather(*(outcome(gateway) for _ in range(6)))
        gateway.resize_connection_pool(2)
        await wait_until(lambda: len(closed) == 4)
        gateway.resize_connection_pool(0)
        await wait_until(lambda: len(closed) == 6)


async def test_gateway_that_ended_between_requests_is_unreachable(gateway_to: MakeGateway) -> None:
    """The kept connection breaks and a new one is refused. No attempt is counted."""
    together = 3
    left: list[int] = []

    async def script(connection: Connection) -> None:
        await connection.receive()
        await wait_until(lambda: len(server.received) >= together)
        await connection.answer()
        await connection.receive()
        left.append(connection.number)
        connection.reset()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        await asyncio.gather(*(outcome(gateway) for _ in range(together)))
        assert server.listener is not None
        server.listener.close()
        assert isinstance(await outcome(gateway), Unreachable)
        assert isinstance(await outcome(gateway), Unreachable)
        assert len(left) == 1  # the other kept connections were not tried


async def test_concurrent_requests_get_their_own_answers(gateway_to: MakeGateway) -> None:
    async def script(connection: Connection) -> None:
        while True:
            received = await connection.receive()
            await connection.answer(received.body)

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        requests = [a_request(b'{"n":%d}' % n, id=f"r-{n}") for n in range(200)]
        found = await asyncio.gather(*(outcome(gateway, request) for request in requests))
    assert found == [Delivered(200, request.payload) for request in requests]


async def test_closed_connections_do_not_pile_up(gateway_to: MakeGateway) -> None:
    """The server closes each connection while it is idle. Only the last one may still be remembered."""

    async def script(connection: Connection) -> None:
        await connection.receive()
        await connection.answer()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        await gateway.prepare()
        assert gateway._transports.current is not None
        released = gateway._transports.current.connector._released
        for number in range(1, 6):
            assert isinstance(await outcome(gateway), Delivered)
            await wait_until(lambda: all(each.is_closing() for each in released))
            assert len(server.connections) == number
            assert len(released) == 1
