"""Transport to the gateway: connections, how a request is written and how its answer is read.

aiohttp is used without cookies, redirects, proxies of the environment and decoding. The connector below
records for each attempt since when it has a connection, and whether the connection had been used before.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from dispatcher.gateway.buffers import AnswerBuffer

CONNECT_S = 1.5
"""Largest time from the DNS lookup to the end of the TLS handshake."""
KEPT_ALIVE_S = 30.0
"""Time after which an idle connection is closed."""
UNACKNOWLEDGED_S = 10.0
"""Time without an acknowledgement after which a peer is gone (TCP_USER_TIMEOUT, if the system has it)."""
STREAMED_BYTES = 262_144
"""Largest piece of a payload that is written at once. With a slow gateway, a large payload that is written
at once would be in memory twice."""

READ_AHEAD_BYTES = 16_384
"""Read-ahead of a connection. A connection whose answer waits reads up to twice this, and the bytes of one
call."""
READ_BYTES = 65_536
"""Largest number of bytes that one call reads. asyncio's default is 256 KB, which each of hundreds of
connections would keep in memory beyond the bound on answers."""

MAX_HEAD_BYTES = 1_048_576
"""Largest number of bytes that a server may send before the status of its answer is known: interim responses
(1xx), of which aiohttp parses any number, and headers."""

_TIMEOUT = aiohttp.ClientTimeout(connect=CONNECT_S, sock_connect=CONNECT_S)


class _UnsentError(Exception):
    """Stops an attempt before its first byte. aiohttp may wrap it in an error of its own."""


class PreparedRequest(NamedTuple):
    """POST request."""

    url: str
    headers: dict[str, str]
    payload: bytes


@dataclass(slots=True)
class AttemptProgress:
    """Facts about a running attempt, apart from its outcome."""

    connected_at: float | None = None
    is_reused: bool = False
    """True if the connection had carried a request before."""
    needs_new_connection: bool = False
    """True if the request must go over a new connection."""
    may_send: Callable[[], bool] = lambda: True
    """Callback that decides right before the first byte whether the request may be sent."""
    is_unsent: bool = False
    """True if `may_send` stopped the attempt."""
    head_limit: _HeadLimit | None = None
    """Limit of the bytes before the answer on the connection of the attempt."""
    token_header: str = ""
    """Name of the response header that has the sticky token. Empty if no token is expected."""
    token: str = ""
    """Value of the response header `token_header`."""
    queued_s: float | None = None
    """Seconds that the request waited in the endpoint picker, according to the answer."""
    received: list[bytes] | None = None
    """List to which the parts of the answer are added. `None` if the caller does not need it."""
    buffer: AnswerBuffer | None = None
    """Memory that the answer takes. `None` if it is not counted."""
    timer: asyncio.Timeout | None = None
    """Time limit of the attempt."""
    deadline: float = float("inf")
    """Loop time beyond which the time limit is never moved."""

    async def make_room(self, size_bytes: int) -> None:
        """Wait until the answer may have `size_bytes` bytes.

        The time limit of the attempt is extended by the wait, which is not the fault of a slow server.
        """
        if self.buffer is None or self.buffer.try_grow_to(size_bytes):
            return
        timer, now = self.timer, asyncio.get_running_loop().time
        if timer is None or (ends_at := timer.when()) is None:
            await self.buffer.grow_to(size_bytes)
            return
        # While the answer waits for memory only the deadline counts. Afterwards the time that was left when
        # the wait began starts to run again.
        began_at = now()
        timer.reschedule(self.deadline)
        await self.buffer.grow_to(size_bytes)
        timer.reschedule(min(self.deadline, ends_at + now() - began_at))

    def forbid_sending(self) -> None:
        """Forbid any further send, and release what `may_send` refers to.

        A kept connection holds the context variables of the attempt that opened it, and so this object.
        """
        self.may_send = lambda: False

    def check_may_send(self) -> None:
        """Raise an exception that ends the attempt if the request may no longer be sent.

        The transport calls this right before it writes the first byte.
        """
        if not self.may_send():
            self.is_unsent = True
            raise _UnsentError


_current_attempt: ContextVar[AttemptProgress] = ContextVar("attempt")


class _HeadLimit:
    """Protocol between a connection and aiohttp that bounds the bytes before an answer.

    It passes everything on to the protocol of aiohttp. The bound also holds while the connection is idle.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        protocol: Any = transport.get_protocol()
        self.bytes_left: float = MAX_HEAD_BYTES
        self._transport = transport
        self._error: aiohttp.ClientError | None = None
        self._pass_on = protocol.data_received
        self._end = protocol.connection_lost
        self.eof_received = protocol.eof_received
        self.pause_writing = protocol.pause_writing
        self.resume_writing = protocol.resume_writing

    def data_received(self, data: bytes) -> None:
        self.bytes_left -= len(data)
        if self.bytes_left >= 0:
            self._pass_on(data)
        elif self._error is None:
            self._error = aiohttp.ClientPayloadError(
                f"more than {MAX_HEAD_BYTES} bytes of headers and interim answers (1xx)"
            )
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._error or error)


class _Connector(aiohttp.TCPConnector):
    """Connector that records in the current attempt which connection it got.

    The number of connections has no bound, because the limit bounds the number of requests.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        # Two addresses of one name are tried 0.25 s apart, well within CONNECT_S.
        super().__init__(limit=0, ssl=tls, keepalive_timeout=KEPT_ALIVE_S, ttl_dns_cache=10)
        self._now = asyncio.get_running_loop().time
        self._released: dict[asyncio.Transport, _HeadLimit] = {}
        """Connections that are not in use, the longest idle first. Some of them may be closed."""

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        progress = _current_attempt.get()
        # The retry must not get another idle connection that the server has closed meanwhile: a restarted
        # server has closed all of them.
        if progress.needs_new_connection:
            self.close_idle(0)
        connection = await super().connect(req, traces, timeout)
        progress.connected_at = self._now()
        transport = connection.transport
        if transport is None:  # the server has closed the new connection already: sending fails
            return connection
        released = self._released
        progress.is_reused = transport in released
        head_limit = released.pop(transport) if progress.is_reused else self._prepare_connection(transport)
        progress.head_limit = head_limit

        def record_release() -> None:
            head_limit.bytes_left = MAX_HEAD_BYTES
            released[transport] = head_limit

        connection.add_callback(record_release)
        return connection

    def _prepare_connection(self, transport: asyncio.Transport) -> _HeadLimit:
        # Without this, the transports of connections that the server closed would pile up.
        for closed in [each for each in self._released if each.is_closing()]:
            del self._released[closed]
        if hasattr(transport, "max_size"):  # only plain asyncio transports have it
            transport.max_size = READ_BYTES
        _detect_dead_peer(transport)
        head_limit = _HeadLimit(transport)
        transport.set_protocol(head_limit)  # type: ignore[arg-type] # has all methods of a protocol
        return head_limit

    def close_idle(self, keep: int) -> None:
        """Close idle connections, the longest idle first, except for `keep` of them."""
        if len(self._released) > keep:
            idle = [transport for transport in self._released if not transport.is_closing()]
            for transport in idle[: max(0, len(idle) - keep)]:
                transport.close()


def _detect_dead_peer(transport: asyncio.Transport) -> None:
    """Let the system detect a peer that vanished. By default, TCP waits about 15 minutes for it."""
    sock: socket.socket = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(UNACKNOWLEDGED_S * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Payload(aiohttp.Payload):
    """Payload that is written in pieces, the first of them together with the head of the request.

    It can be written again when the request is sent again.
    """

    def __init__(self, payload: bytes, progress: AttemptProgress) -> None:
        super().__init__(payload)
        self._payload = payload
        self._progress = progress

    @property
    def size(self) -> int:
        return len(self._payload)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._payload.decode(encoding, errors)

    async def write(self, writer: Any) -> None:
        self._progress.check_may_send()
        for start in range(0, len(self._payload), STREAMED_BYTES):
            await writer.write(self._payload[start : start + STREAMED_BYTES])


class Transport:
    """An HTTP transport with its connections. It is replaced as a whole when the TLS settings change."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self.connector = _Connector(tls)
        self._session = aiohttp.ClientSession(
            connector=self.connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=_TIMEOUT,
            read_bufsize=READ_AHEAD_BYTES,
        )
        self.running_count = 0

    async def send(self, request: PreparedRequest, progress: AttemptProgress) -> aiohttp.ClientResponse:
        """Send the request. Return its answer, whose body has not been read yet."""
        context_token = _current_attempt.set(progress)
        try:
            answer = await self._session.post(
                request.url,
                headers=request.headers,
                data=_Payload(request.payload, progress),
                allow_redirects=False,
            )
        finally:
            # The time limit of the attempt refers to its task. If the context of the task referred to the
            # attempt, the memory of both would be in use until the next garbage collection.
            _current_attempt.reset(context_token)
        # The connection of a short answer is released already, and may have another request.
        if answer.connection is not None and progress.head_limit is not None:
            progress.head_limit.bytes_left = float("inf")
        return answer

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()


class TransportRotation:
    """The current transport, and its predecessors until the last request on them has ended."""

    def __init__(self) -> None:
        self.current: Transport | None = None
        self._retired: list[Transport] = []

    def replace_current(self, tls: ssl.SSLContext) -> Transport:
        """Create a new transport for all requests from now on, and retire the current one."""
        if self.current is not None:
            self._retired.append(self.current)
        self.current = Transport(tls)
        return self.current

    async def close_unused(self) -> None:
        """Close retired transports on which no request runs."""
        if not self._retired:
            return
        # The list is replaced before the first await, so that a concurrent call closes none twice.
        idle = [transport for transport in self._retired if not transport.running_count]
        self._retired = [transport for transport in self._retired if transport.running_count]
        for transport in idle:
            await transport.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        transports, self.current = [*self._retired, *([self.current] if self.current else [])], None
        self._retired = []
        for transport in transports:
            await transport.aclose()
