"""HTTP/1.1 server for the stand-ins, with control over every byte that is sent.

A stand-in must be able to cut an answer in two, to reset, refuse or swallow connections, and must cost so
little that it is not what a benchmark measures. Web frameworks offer neither. This module implements as much
of the protocol as clients and proxies use. It creates no task per request: one callback receives the request,
and one is called when the client disconnects.
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
_FILLER_COUNT = 8
_REBIND_TIMEOUT_S = 1.0

T = TypeVar("T")


def build_head(status: int, headers: Iterable[tuple[str, str]], length: int | None) -> bytes:
    """Build the head of an answer. `length` is `None` for a chunked body."""
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def encode_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Exchange:
    """One HTTP exchange: a request and the methods to answer it."""

    __slots__ = ("_connection", "body", "headers", "is_open", "method", "on_disconnect", "target")

    def __init__(self, connection: _Connection, method: str, target: str, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        """Headers by lower-case name."""
        self.body = b""
        self.is_open = True
        """False after the exchange was answered or reset, or its client disconnected."""
        self.on_disconnect: Callable[[], object] | None = None
        """Function that is called when the client disconnects before the answer is complete."""

    def answer(self, status: int, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send a complete answer. No effect if the client has disconnected."""
        self.send(build_head(status, headers, len(body)) + body)
        self.finish()

    def send(self, data: bytes) -> None:
        """Send part of an answer, unchanged."""
        if self.is_open:
            self._connection.transport.write(data)

    def finish(self) -> None:
        """Complete the answer, so that the connection takes its next request."""
        if self.is_open:
            self.is_open = False
            self._connection.handle_next()

    def reset(self) -> None:
        """Reset the connection (RST). Data that was sent before may be lost."""
        if self.is_open:
            self.is_open = False
            self._connection.reset()

    def close(self) -> None:
        """Close the connection after the data that was sent, complete or not."""
        if self.is_open:
            self.is_open = False
            self._connection.close()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, server: Server, close_count: int) -> None:
        """Create the protocol of a connection that a listener accepted after `close_count` closings of the
        server."""
        self._server = server
        self._close_count = close_count
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self._incomplete_exchange: Exchange | None = None
        """Request whose head was received and whose body is incomplete."""
        self._length: int | None = None
        self._chunks: list[bytes] = []
        self._is_handling = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        # A TLS handshake that began before the server closed its connections may end only now.
        if self._close_count != self._server.close_count:
            self.transport.abort()
        else:
            self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._handle_buffered_requests()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.is_open:
            exchange.is_open = False
            if exchange.on_disconnect is not None:
                exchange.on_disconnect()

    def handle_next(self) -> None:
        self._exchange = None
        if self._buffer:
            self._handle_buffered_requests()

    def close(self) -> None:
        self._exchange = None
        self.transport.close()

    def reset(self) -> None:
        self._exchange = None
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            # Without this the kernel closes with FIN, and the client sees an empty answer instead of a reset.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.transport.abort()

    def _handle_buffered_requests(self) -> None:
        if self._is_handling:
            return  # called from `handle` below, which goes on afterwards
        self._is_handling = True
        try:
            # One request at a time: a pipelined request waits in the buffer.
            while self._exchange is None and not self.transport.is_closing():
                exchange = self._parse_request()
                if exchange is None:
                    return
                self._exchange = exchange
                self._server.handle(exchange)
        except ValueError:
            self.transport.write(build_head(400, [("connection", "close")], 0))
            self.transport.close()
        finally:
            self._is_handling = False

    def _parse_request(self) -> Exchange | None:
        """Take the next complete request from the buffer, or return `None` if there is none yet."""
        if self._incomplete_exchange is None:
            if self._buffer and not self._buffer[:1].isupper():
                # Otherwise a TLS handshake would be buffered until it looks like a head that is too long.
                raise ValueError("not HTTP: most likely TLS")
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD_BYTES:
                    raise ValueError("a head without end")
                return None
            lines = self._buffer[:end].decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            # A malformed line raises ValueError, which the caller answers with 400.
            method, target, _ = lines[0].split(" ")
            headers = {}
            for line in lines[1:]:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            self._incomplete_exchange = Exchange(self, method, target, headers)
            chunked = "chunked" in headers.get("transfer-encoding", "")
            self._length = None if chunked else int(headers.get("content-length", 0))
            if headers.get("expect") == "100-continue":
                # Clients wait for this before they send a large body.
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._take_chunked_body() if self._length is None else self._take_plain_body(self._length)
        if body is None:
            return None
        exchange, self._incomplete_exchange = self._incomplete_exchange, None
        exchange.body = body
        return exchange

    def _take_plain_body(self, length: int) -> bytes | None:
        if len(self._buffer) < length:
            return None
        body = bytes(memoryview(self._buffer)[:length])
        del self._buffer[:length]
        return body

    def _take_chunked_body(self) -> bytes | None:
        while True:
            line = self._buffer.find(b"\r\n")
            if line < 0:
                return None
            # Chunk extensions follow a semicolon and are ignored.
            size = int(self._buffer[:line].partition(b";")[0], 16)
            # The line and the chunk each end with CRLF. Nothing is taken from an incomplete chunk.
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
    """Listener on one address that can be closed and opened again."""

    def __init__(
        self, handle: Callable[[Exchange], None], host: str, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.handle = handle
        self.host = host
        self.port = port
        """Port; 0 until the listener is opened for the first time, and the same from then on."""
        self.connections: set[_Connection] = set()
        self.close_count = 0
        """Number of times that all connections were reset."""
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._blackhole_sockets: list[socket.socket] = []

    async def open(self, *, plain: bool = False) -> None:
        """Start listening. `plain` disables TLS, which looks like a broken gateway to a client that uses
        TLS."""
        await self.close()
        self._listener = await self._bind_with_retry(lambda: self._start_listener(plain))
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, so that new connections are refused, and reset all connections."""
        self.close_count += 1
        for each in self._blackhole_sockets:
            each.close()
        self._blackhole_sockets.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        # A copy, since `connection_lost` removes each from the set.
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def start_blackhole(self) -> None:
        """Keep connections without ever answering, so that new connections hang, too.

        No packet filter is needed: the listener never accepts, its backlog is filled by connections of this
        process, and the kernel drops all further SYN packets.
        """
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            await asyncio.sleep(0)
        # Only the listener is replaced: open connections stay and get no answer.
        self._blackhole_sockets.append(await self._bind_with_retry(self._open_blackhole_socket))
        for _ in range(_FILLER_COUNT):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((self.host, self.port))
            self._blackhole_sockets.append(filler)

    async def _start_listener(self, plain: bool) -> asyncio.Server:
        close_count = self.close_count
        return await asyncio.get_running_loop().create_server(
            lambda: _Connection(self, close_count),
            self.host,
            self.port,
            ssl=None if plain else self._tls,
            backlog=4096,
        )

    async def _open_blackhole_socket(self) -> socket.socket:
        hole = socket.socket()
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            hole.bind((self.host, self.port))
            hole.listen(0)
        except OSError:
            hole.close()
            raise
        return hole

    async def _bind_with_retry(self, bind: Callable[[], Awaitable[T]]) -> T:
        """Bind to the address, and retry for a moment: the event loop closes the previous listener only in a
        later iteration."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REBIND_TIMEOUT_S
        while True:
            try:
                return await bind()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or loop.time() > deadline:
                    raise
            await asyncio.sleep(0.01)
