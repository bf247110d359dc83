"""Direct calls of model servers: address, content, and outcome of each answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping

import pytest
import trustme
from aiohttp import web

from dispatcher import __version__
from dispatcher.gateway.direct import DirectServers, ServerAccess
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    TooLate,
    Unreachable,
)
from tests.gateway.scripted_server import GENEROUS_S, Connection, always, serving
from tests.signals.fakes import serving as http_serving
from tests.support import free_port, wait_until

PATH = "/v1/completions"
SECRET = "hunter2-of-the-servers"
LIMIT_BYTES = 4096


def make_access(
    base_url: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> ServerAccess:
    return ServerAccess(base_url, {"Authorization": f"Bearer {SECRET}"} if headers is None else headers, tls)


class Servers:
    """Known model servers by endpoint."""

    def __init__(self) -> None:
        self.known: dict[str, ServerAccess] = {}
        self.direct = DirectServers(self._find, lambda: LIMIT_BYTES)

    def _find(self, endpoint: str) -> ServerAccess | str:
        return self.known.get(endpoint, "it is unknown")

    async def post(
        self,
        endpoint: str = "a:1",
        path: str = PATH,
        body: bytes = b'{"model":"m"}',
        within_s: float = GENEROUS_S,
    ) -> Outcome:
        return await self.direct.post(
            endpoint, path, body, deadline=asyncio.get_running_loop().time() + within_s
        )


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    yield made
    await made.direct.aclose()


async def test_call_reaches_its_server_with_credentials_and_unchanged_body(
    servers: Servers,
) -> None:
    async with serving(always(body=b'{"of":"a"}')) as one, serving(always(body=b'{"of":"b"}')) as two:
        servers.known = {"a:1": make_access(one.url + "/servers/0"), "b:1": make_access(two.url, {})}
        assert await servers.post("a:1", body=b'{"z":1, "a":9223372036854775807}') == Delivered(
            200, b'{"of":"a"}'
        )
        assert await servers.post("b:1", "/v1/embeddings") == Delivered(200, b'{"of":"b"}')
    (received,), (other,) = one.received, two.received
    assert received.first_line == "POST /servers/0/v1/completions HTTP/1.1"
    assert received.body == b'{"z":1, "a":9223372036854775807}'
    assert received.headers == {
        "host": f"127.0.0.1:{one.port}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "authorization": f"Bearer {SECRET}",
        "content-type": "application/json",
        "content-length": str(len(received.body)),
        "user-agent": f"batch-dispatcher/{__version__}",
    }
    assert other.first_line == "POST /v1/embeddings HTTP/1.1"
    assert "authorization" not in other.headers


async def test_connections_to_a_server_are_kept(servers: Servers) -> None:
    peers = set()

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        asked = await request.json()
        return web.json_response({"model": asked["model"], "path": request.path})

    async with http_serving(handle) as port:
        servers.known = {"a:1": make_access(f"http://127.0.0.1:{port}")}
        for _ in range(3):
            assert await servers.post() == Delivered(200, b'{"model": "m", "path": "/v1/completions"}')
    assert len(peers) == 1


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("404 Not Found", b'{"error":"no such model"}', Delivered),
        ("429 Too Many Requests", b"", Overloaded),
        ("503 Service Unavailable", b"loading", Failed),
        ("401 Unauthorized", b"who", Failed),
        ("200 OK", b"x" * (LIMIT_BYTES + 1), TooLarge),
    ],
)
async def test_answer_of_a_server_is_classified_and_bounded_like_one_of_the_gateway(
    servers: Servers, status: str, body: bytes, kind: type[Outcome]
) -> None:
    async with serving(always(status=status, body=body)) as server:
        servers.known = {"a:1": make_access(server.url)}
        found = await servers.post()
    assert isinstance(found, kind), found
    assert "gateway" not in str(found)
    if isinstance(found, Failed):
        assert found.why.startswith("a:1 answered ")


async def test_server_that_is_absent_or_unknown_is_unreachable_with_a_reason(servers: Servers) -> None:
    port = free_port()
    servers.known = {"a:1": make_access(f"http://127.0.0.1:{port}")}
    assert await servers.post() == Unreachable(f"no connection: 127.0.0.1:{port}: connection refused")
    assert await servers.post("b:1") == Unreachable("b:1: it is unknown")


async def test_answer_that_breaks_off_is_a_failure_without_secrets(servers: Servers) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        await connection.writer.drain()
        connection.writer.close()

    async with serving(script) as server:
        servers.known = {"a:1": make_access(server.url)}
        found = await servers.post()
    assert isinstance(found, Failed)
    assert SECRET not in repr(found)
    assert "Bearer" not in repr(found)


async def test_call_ends_at_its_deadline_and_closes_the_connection(servers: Servers) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        await connection.wait_until_closed()

    async with serving(script) as server:
        servers.known = {"a:1": make_access(server.url)}
        assert await servers.post(within_s=0.3) == TooLate()
        await server.client_closed.wait()
        assert await servers.post(within_s=0.0) == TooLate()
        assert len(server.connections) == 1, "nothing is sent after the deadline"


async def test_cancelling_a_call_closes_the_connection(servers: Servers) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        await connection.wait_until_closed()

    async with serving(script) as server:
        servers.known = {"a:1": make_access(server.url)}
        call = asyncio.create_task(servers.post())
        await wait_until(lambda: server.received)
        call.cancel()
        await server.client_closed.wait()


@pytest.mark.parametrize("path", ["", "v1/x", "//evil/v1/x", "/v1/../admin", "/v1/x?a=b", "/v1/x\r\nx: y"])
async def test_path_that_is_not_plain_is_refused(servers: Servers, path: str) -> None:
    async with serving(always()) as server:
        servers.known = {"a:1": make_access(server.url)}
        assert isinstance(await servers.post(path=path), Refused)
        assert not server.connections


@pytest.fixture
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of a server and of a client that trusts it."""
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    authority.configure_trust(ours)
    return theirs, ours


async def test_server_is_verified_over_tls(
    servers: Servers, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    theirs, ours = contexts
    async with serving(always(), theirs) as server:
        servers.known = {"a:1": make_access(server.url, tls=ssl.create_default_context())}
        found = await servers.post()
        assert isinstance(found, Unreachable)
        assert "its certificate is not trusted" in found.why
        assert not server.received
        servers.known = {"a:1": make_access(server.url, tls=ours)}
        for _ in range(2):
            assert await servers.post() == Delivered(200, b"{}")
        assert server.received[0].headers["authorization"] == f"Bearer {SECRET}"


async def test_new_certificates_apply_to_the_next_call_and_not_to_a_running_one(
    servers: Servers, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    theirs, ours = contexts

    async def script(connection: Connection) -> None:
        await connection.receive()
        if connection.number == 0:
            await connection.server.go_on.wait()
        await connection.answer(str(connection.number).encode())
        await connection.wait_until_closed()

    async with serving(script, theirs) as server:
        servers.known = {"a:1": make_access(server.url, tls=ours)}
        first = asyncio.create_task(servers.post())
        await wait_until(lambda: server.received)
        servers.known = {"a:1": make_access(server.url, tls=ssl.create_default_context())}
        assert isinstance(await servers.post(), Unreachable)
        server.go_on.set()
        assert await first == Delivered(200, b"0")
        await server.client_closed.wait()
