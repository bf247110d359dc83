"""Servers that follow a script byte for byte, and attempts through the gateway adapter."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dispatcher.gateway.contract import AttemptResult
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.requests.outcomes.outcome import Outcome
from dispatcher.requests.request import Request
from dispatcher.settings.model import GatewaySettings

GENEROUS_S = 30.0
"""Deadline of attempts in tests that are not about deadlines."""

Script = Callable[["Connection"], Awaitable[None]]


@dataclass
class Received:
    """One request as the server received it."""

    first_line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Connection:
    """Server side of one connection."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: Server

    async def receive(self) -> Received:
        """Return the next complete request. Raises IncompleteReadError if the client disconnects."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.rstrip("\r\n").split("\r\n")
        headers: dict[str, str] = {}
        for entry in fields:
            name, _, value = entry.partition(":")
            assert name.lower() not in headers, f"{name} sent twice"
            headers[name.lower()] = value.strip()
        assert "transfer-encoding" not in headers
        body = await self.reader.readexactly(int(headers["content-length"]))
        received = Received(line, headers, body)
        self.server.received.append(received)
        return received

    async def answer(self, body: bytes = b"{}", *, status: str = "200 OK", headers: str = "") -> None:
        """Send an answer with its length. Each line of `headers` ends with CRLF."""
        self.writer.write(
            f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body
        )
        await self.writer.drain()

    def reset(self) -> None:
        """Close the connection with a reset."""
        self.writer.transport.abort()

    async def wait_until_closed(self) -> None:
        """Return when the client has closed its end."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.server.client_closed.set()


@dataclass
class Server:
    """A scripted server on a free port of 127.0.0.1; each connection runs the script."""

    url: str = ""
    port: int = 0
    listener: asyncio.Server | None = None
    received: list[Received] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    client_closed: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that a test sets when its script may continue."""


@contextlib.asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(len(server.connections), reader, writer, server)
        server.connections.append(connection)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            # Cancelled by `serving` alone; asyncio's streams would log that as an error.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await script(connection)
        finally:
            tasks.discard(task)
            with contextlib.suppress(RuntimeError):
                writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls, backlog=512)
    server.listener = listener
    server.port = listener.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
    try:
        yield server
    finally:
        listener.close()
        running = list(tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def always(**answer: Any) -> Script:
    """Answer every request of every connection alike."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            await connection.answer(**answer)

    return script


def options(url: str, **more: Any) -> GatewaySettings:
    return GatewaySettings.model_validate({"url": url, **more})


def a_request(payload: bytes = b'{"prompt":"hi"}', **more: Any) -> Request:
    return Request(id=more.pop("id", "r-1"), deadline=10**10, payload=payload, **more)


async def forward(
    gateway: HttpGateway, request: Request | None = None, *, within_s: float = GENEROUS_S, **more: Any
) -> AttemptResult:
    deadline = asyncio.get_running_loop().time() + within_s
    more.setdefault("token", secrets.token_hex(8))
    return await gateway.forward(request or a_request(), deadline=deadline, **more)


async def outcome(gateway: HttpGateway, request: Request | None = None, **more: Any) -> Outcome:
    return (await forward(gateway, request, **more)).outcome
