"""HTTP/1.1 for a stand-in: as much as clients and proxies send, with a hand on every byte that goes back.

A web framework answers requests; a stand-in must also cut an answer in two, reset a connection, refuse
connections or swallow them, and cost little enough that it does not become what a benchmark measures. So
this speaks the protocol itself: no task per request, one callback for a request and one when its client
goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TypeVar, cast

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_MAX_HEAD_BYTES = 65_536
_FILLERS = 8
_REBIND_S = 1.0

T = TypeVar("T")


def head(status: int, headers: Iterable[tuple[str, str]], length: int | None) -> bytes:
    """The head of an answer; `length` None: the body is chunked."""
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Exchange:
    """One request, and the means to answer it."""

    __slots__ = ("_connection", "body", "headers", "method", "on_gone", "open", "target")

    def __init__(self, connection: _Connection, method: str, target: str, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        """By lower-case name."""
        self.body = b""
        self.open = True
        """False once it is answered, reset, or its client has gone."""
        self.on_gone: Callable[[], None] | None = None
        """Called when the client closes the connection before the answer is complete."""

    def answer(self, status: int, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()) -> None:
        """The whole answer at once; nothing when the client has gone."""
        self.send(head(status, headers, len(body)) + body)
        self.finish()

    def send(self, data: bytes) -> None:
        """Part of an answer, as it is."""
        if self.open:
            self._connection.transport.write(data)

    def finish(self) -> None:
        """The answer is complete: the connection takes its next request."""
        if self.open:
            self.open = False
            self._connection.next()

    def reset(self) -> None:
        """Break the connection (RST); what was sent may be lost."""
        if self.open:
            self.open = False
            self._connection.reset()

    def close(self) -> None:
        """End the connection after what was sent, complete or not."""
        if self.open:
            self.open = False
            self._connection.close()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self._awaited: Exchange | None = None
        """The request whose head is here and whose body is not."""
        self._length: int | None = None
        self._chunks: list[bytes] = []
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.open:
            exchange.open = False
            if exchange.on_gone is not None:
                exchange.on_gone()

    def next(self) -> None:
        self._exchange = None
        if self._buffer:
            self._read()

    def close(self) -> None:
        self._exchange = None
        self.transport.close()

    def reset(self) -> None:
        self._exchange = None
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            # Without it the kernel says goodbye politely (FIN), and the client sees an empty answer.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.transport.abort()

    def _read(self) -> None:
        if self._busy:
            return  # a request answered at once: the loop below goes on
        self._busy = True
        try:
            while self._exchange is None and not self.transport.is_closing():
                exchange = self._parse()
                if exchange is None:
                    return
                self._exchange = exchange
                self._server.handle(exchange)
        except ValueError:
            self.transport.write(head(400, [("connection", "close")], 0))
            self.transport.close()
        finally:
            self._busy = False

    def _parse(self) -> Exchange | None:
        """The next whole request in the buffer, if it is there."""
        if self._awaited is None:
            if self._buffer and not self._buffer[:1].isupper():
                raise ValueError("not HTTP: most likely TLS")
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD_BYTES:
                    raise ValueError("a head without end")
                return None
            lines = self._buffer[:end].decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            method, target, _ = lines[0].split(" ")
            headers = {}
            for line in lines[1:]:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            self._awaited = Exchange(self, method, target, headers)
            chunked = "chunked" in headers.get("transfer-encoding", "")
            self._length = None if chunked else int(headers.get("content-length", 0))
            if headers.get("expect") == "100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._chunked_body() if self._length is None else self._plain_body(self._length)
        if body is None:
            return None
        exchange, self._awaited = self._awaited, None
        exchange.body = body
        return exchange

    def _plain_body(self, length: int) -> bytes | None:
        if len(self._buffer) < length:
            return None
        body = bytes(memoryview(self._buffer)[:length])
        del self._buffer[:length]
        return body

    def _chunked_body(self) -> bytes | None:
        while True:
            line = self._buffer.find(b"\r\n")
            if line < 0:
                return None
            size = int(self._buffer[:line].partition(b";")[0], 16)
            if len(self._buffer) < line + 2 + size + 2:
                return None
            data = bytes(memoryview(self._buffer)[line + 2 : line + 2 + size])
            del self._buffer[: line + 2 + size + 2]
            if size == 0:
                body = b"".join(self._chunks)
                self._chunks.clear()
                return body
            self._chunks.append(data)


class Server:
    """A listener on one address that can go away and come back there."""

    def __init__(
        self, handle: Callable[[Exchange], None], host: str, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.handle = handle
        self.host = host
        self.port = port
        """0 until it is opened for the first time; the same from then on."""
        self.connections: set[_Connection] = set()
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._hole: list[socket.socket] = []

    async def open(self, *, plain: bool = False) -> None:
        """Listen; `plain`: without TLS, which a client that expects it takes for a broken gateway."""
        await self.close()
        self._listener = await self._bound(lambda: self._listen(plain))
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening (new connections are refused) and reset all that are there."""
        for each in self._hole:
            each.close()
        self._hole.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def blackhole(self) -> None:
        """Take connections and never answer: what is connected hangs, and a new connect() hangs as well.

        No packet filter is needed: a listener that never accepts, its queue filled by connections of our own,
        makes the kernel drop further SYNs.
        """
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            await asyncio.sleep(0)
        self._hole.append(await self._bound(self._dig))
        for _ in range(_FILLERS):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((self.host, self.port))
            self._hole.append(filler)

    async def _listen(self, plain: bool) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: _Connection(self),
            self.host,
            self.port,
            ssl=None if plain else self._tls,
            backlog=4096,
        )

    async def _dig(self) -> socket.socket:
        hole = socket.socket()
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            hole.bind((self.host, self.port))
            hole.listen(0)
        except OSError:
            hole.close()
            raise
        return hole

    async def _bound(self, bind: Callable[[], Awaitable[T]]) -> T:
        """Bind to our address. The event loop closes a listener in a later turn: it is free in a moment."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _REBIND_S
        while True:
            try:
                return await bind()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or loop.time() > until:
                    raise
            await asyncio.sleep(0.01)
