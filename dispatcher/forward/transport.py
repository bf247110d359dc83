"""Transport to the gateway: connections, how a request is written and how its answer is read.

A prepared httpx.Request goes straight to the aiohttp transport. An httpx.Client in between would follow
redirects, keep cookies, use proxies of the environment and decode bodies, and it would cost time. The
connector below knows for each attempt since when it has a connection, and whether the connection had been
used before. docs/decisions/0015-third-party-libraries.md has the reasons.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport
from multidict import CIMultiDict

from dispatcher.forward.buffers import AnswerBuffer

CONNECT_S = 1.5
"""Largest time from the DNS lookup to the end of the TLS handshake."""
KEPT_ALIVE_S = 30.0
"""Time after which an idle connection is closed."""
UNACKNOWLEDGED_S = 10.0
"""Time without an acknowledgement after which a peer is gone (TCP_USER_TIMEOUT, if the system has it)."""
STREAMED_BYTES = 262_144
"""Size above which a payload is written in pieces. With a slow gateway, a large payload that is written at
once would be in memory twice."""

READ_AHEAD_BYTES = 16_384
"""Read-ahead of a connection. A connection whose answer waits reads up to twice this, and the bytes of one
call."""
READ_BYTES = 65_536
"""Largest number of bytes that one call reads. asyncio's default is 256 KB, which each of hundreds of
connections would keep in memory beyond the bound on answers."""

MAX_INTERIM_RESPONSES = 8
"""Largest number of 1xx responses before an answer."""

_TIMEOUT = aiohttp.ClientTimeout(connect=CONNECT_S, sock_connect=CONNECT_S)


class _UnsentError(Exception):
    """Stops an attempt before its first byte. aiohttp may wrap it in an error of its own."""


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


class _ResponseProtocol(ResponseHandler):
    """Response handler that bounds the number of interim responses (1xx) before the answer.

    aiohttp accepts any number of them and parses each one.
    """

    _interim_count = 0
    _flood_error: aiohttp.ClientError | None = None

    def set_response_params(self, **params: Any) -> None:
        self._interim_count = 0  # aiohttp calls this once for each request on the connection
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        if self._flood_error is not None:
            return
        if 100 <= data[0].code < 200:
            self._interim_count += 1
        if self._interim_count <= MAX_INTERIM_RESPONSES:
            super().feed_data(data, size)
            return
        self._flood_error = aiohttp.ClientPayloadError(
            f"more than {MAX_INTERIM_RESPONSES} interim answers (1xx)"
        )
        self.set_exception(self._flood_error)
        if self.transport is not None:
            self.transport.abort()

    def set_exception(self, exc: Any, *cause: Any) -> None:
        """Report the flood, and not the loss of the connection that follows it."""
        super().set_exception(self._flood_error or exc, *cause)


class _Connector(aiohttp.TCPConnector):
    """Connector that records in the current attempt which connection it got.

    The number of connections has no bound, because the limit bounds the number of requests.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        # Two addresses of one name are tried 0.25 s apart, well within CONNECT_S.
        super().__init__(limit=0, ssl=tls, keepalive_timeout=KEPT_ALIVE_S, ttl_dns_cache=10)
        # aiohttp has no option for the protocol class, so its private factory is replaced.
        self._factory = functools.partial(_ResponseProtocol, loop=self._loop)  # type: ignore[assignment]
        self._used_protocols: WeakSet[Any] = WeakSet()

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        progress = _current_attempt.get()
        # The retry must not get another idle connection that the server has closed meanwhile: a restarted
        # server has closed all of them.
        if progress.needs_new_connection:
            self.close_idle(0)
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        progress.is_reused = protocol in self._used_protocols
        if not progress.is_reused:
            self._used_protocols.add(protocol)
            transport: Any = connection.transport
            if hasattr(transport, "max_size"):  # only plain asyncio transports have it
                transport.max_size = READ_BYTES
            _detect_dead_peer(connection.transport)
        progress.connected_at = self._loop.time()
        return connection

    def close_idle(self, keep: int) -> None:
        """Close idle connections, the longest idle first, except for `keep` of them."""
        idle = [protocol for kept in self._conns.values() for protocol, _ in kept]
        for protocol in idle[: max(0, len(idle) - keep)]:
            protocol.close()


def _detect_dead_peer(transport: asyncio.Transport | None) -> None:
    """Let the system detect a peer that vanished. By default, TCP waits about 15 minutes for it."""
    sock: socket.socket | None = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(UNACKNOWLEDGED_S * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _StreamedPayload(httpx.AsyncByteStream):
    """Large payload that is written in pieces. It can be iterated again when the request is sent again."""

    def __init__(self, payload: bytes, progress: AttemptProgress) -> None:
        self._payload = payload
        self._progress = progress

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._progress.check_may_send()  # aiohttp writes the request head together with the first piece
        for start in range(0, len(self._payload), STREAMED_BYTES):
            yield self._payload[start : start + STREAMED_BYTES]


class _WholePayload(aiohttp.BytesPayload):
    """Payload that is written in one piece, together with the head."""

    def __init__(self, payload: bytes, progress: AttemptProgress) -> None:
        super().__init__(payload)
        self._progress = progress

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        self._progress.check_may_send()
        await super().write_with_length(writer, content_length)


class PreparedRequest(httpx.Request):
    """POST request that has only the attributes that the transport reads.

    Building a complete httpx.Request takes a third of the CPU time of an exchange.
    """

    # The constructor of httpx.Request is not called on purpose.
    def __init__(self, url: str, headers: dict[str, str], payload: bytes, progress: AttemptProgress) -> None:
        self.progress = progress
        self.url = url  # type: ignore[assignment] # the transport needs the text only
        self.headers = CIMultiDict(headers)  # type: ignore[assignment]
        self.data: _WholePayload | _StreamedPayload
        if len(payload) > STREAMED_BYTES:
            self.headers["content-length"] = str(len(payload))
            self.data = _StreamedPayload(payload, progress)
        else:
            self.data = _WholePayload(payload, progress)


class _ResponseBody(httpx.AsyncByteStream):
    """Body of an answer, in the chunks in which it arrives."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._answer.content.iter_any().__aiter__()

    async def aclose(self) -> None:
        await self._answer.__aexit__(None, None, None)


class _Response(httpx.Response):
    """Response that has only the attributes that `dispatcher.forward` reads.

    Building a complete httpx.Response takes a tenth of the CPU time of an exchange.
    """

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.status_code = answer.status
        self.raw_headers = answer.raw_headers
        self.body = _ResponseBody(answer)


class _PreparedTransport(AiohttpTransport):
    """Transport of httpx over aiohttp, for prepared requests.

    Errors of aiohttp are not translated to those of httpx, because the translation of httpx-aiohttp is
    lossy: it turns a connection reset into a connect timeout.
    """

    def __init__(self, session: aiohttp.ClientSession, tls: ssl.SSLContext) -> None:
        super().__init__(verify=tls, trust_env=False, client=session)
        self._session = session

    async def handle_async_request(self, request: httpx.Request) -> _Response:
        assert isinstance(request, PreparedRequest)  # noqa: S101 - the transport is private to this module
        context_token = _current_attempt.set(request.progress)
        try:
            answer = await self._session.request(
                "POST",
                str(request.url),
                headers=request.headers,
                data=request.data,
                allow_redirects=False,
                auto_decompress=False,
                timeout=_TIMEOUT,
            )
        finally:
            # The time limit of the attempt refers to its task. If the context of the task referred to the
            # attempt, the memory of both would be in use until the next garbage collection.
            _current_attempt.reset(context_token)
        return _Response(answer)


class Transport:
    """An HTTP transport with its connections. It is replaced as a whole when the TLS settings change."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self.connector = _Connector(tls)
        session = aiohttp.ClientSession(
            connector=self.connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=READ_AHEAD_BYTES
        )
        self._transport = _PreparedTransport(session, tls)
        self.send = self._transport.handle_async_request
        self.running_count = 0

    async def aclose(self) -> None:
        await self._transport.aclose()


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
        idle = [wire for wire in self._retired if not wire.running_count]
        self._retired = [wire for wire in self._retired if wire.running_count]
        for wire in idle:
            await wire.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        transports, self.current = [*self._retired, *([self.current] if self.current else [])], None
        self._retired = []
        for wire in transports:
            await wire.aclose()
