"""The wire to the gateway: connections, one request written, one answer as it comes.

A prepared httpx.Request goes straight to the aiohttp transport; the client in between (redirects, cookies,
proxies of the environment, decoding) is neither wanted nor free. Below it lies a connector of ours that
knows, for each try, since when it holds a connection and whether that had been used before.
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

from dispatcher.forward.buffers import AnswerHold

CONNECT_S = 1.5
"""From looking the name up to the end of the TLS handshake."""
KEPT_ALIVE_S = 30.0
"""An idle connection is closed after this."""
UNACKNOWLEDGED_S = 10.0
"""A peer that acknowledges nothing for so long is gone (TCP_USER_TIMEOUT, where the system has it)."""
STREAMED_BYTES = 262_144
"""Larger payloads are written in pieces, so that a slow gateway does not make us hold them twice."""

READ_AHEAD_BYTES = 16_384
"""Read-ahead of a connection. While its answer waits it reads up to twice this, and the bytes of one call."""
READ_BYTES = 65_536
"""Largest number of bytes that one call reads. asyncio's default is 256 KB, which each of hundreds of
connections would hold beyond the bound on answers."""

INTERIM_MOST = 8
"""Largest number of 1xx responses before an answer."""

_TIMEOUT = aiohttp.ClientTimeout(connect=CONNECT_S, sock_connect=CONNECT_S)


class _UnsentError(Exception):
    """Comes out of the transport as some error of aiohttp's."""


@dataclass(slots=True)
class Progress:
    """What is known of a running try beside its outcome."""

    connected_at: float | None = None
    reused: bool = False
    """The connection had carried a request before."""
    fresh: bool = False
    """Only a new connection will do."""
    may_send: Callable[[], bool] = lambda: True
    unsent: bool = False
    """Whether `may_send` forbade to send the request."""
    token_header: str = ""
    """Name of a header of the answer whose value is wanted. Empty if none is."""
    token: str = ""
    """Value of that header."""
    queued_s: float | None = None
    """Seconds that the request waited in the endpoint picker, as the answer says."""
    hold: AnswerHold | None = None
    """Memory that the answer takes. `None` if it is not counted."""
    timer: asyncio.Timeout | None = None
    """The time limit of the try."""
    deadline: float = float("inf")
    """Loop time beyond which no pause prolongs the try."""

    async def make_room(self, size: int) -> None:
        """Wait until the answer may have `size` bytes. The time limit of the try is extended by the wait,
        which is not the fault of a slow server."""
        if self.hold is None or size <= self.hold.size:
            return
        timer, now = self.timer, asyncio.get_running_loop().time
        if timer is None or (ends := timer.when()) is None:
            await self.hold.grow(size)
            return
        began = now()
        timer.reschedule(self.deadline)
        await self.hold.grow(size)
        timer.reschedule(min(self.deadline, ends + now() - began))

    def end(self) -> None:
        """A connection that is kept keeps the context that it was made in, and this with it: no request."""
        self.may_send = lambda: False

    def check(self) -> None:
        """To be asked right before the first byte leaves. Raises what is to end the try."""
        if not self.may_send():
            self.unsent = True
            raise _UnsentError


running: ContextVar[Progress] = ContextVar("try")


class _Protocol(ResponseHandler):
    """An answer as it arrives; not with interim ones before it without end, each of which costs a parse."""

    _interim = 0
    _flood: aiohttp.ClientError | None = None

    def set_response_params(self, **params: Any) -> None:
        self._interim = 0
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        if self._flood is not None:
            return
        if 100 <= data[0].code < 200:
            self._interim += 1
        if self._interim <= INTERIM_MOST:
            super().feed_data(data, size)
            return
        self._flood = aiohttp.ClientPayloadError(f"more than {INTERIM_MOST} interim answers (1xx)")
        self.set_exception(self._flood)
        if self.transport is not None:
            self.transport.abort()

    def set_exception(self, exc: Any, *cause: Any) -> None:
        """That the connection is lost by then is no news."""
        super().set_exception(self._flood or exc, *cause)


class _Connector(aiohttp.TCPConnector):
    """Connections without a bound (the limit on requests is the bound), and each try told which it got."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        # Two addresses of one name are tried 0.25 s apart, well within CONNECT_S.
        super().__init__(limit=0, ssl=tls, keepalive_timeout=KEPT_ALIVE_S, ttl_dns_cache=10)
        self._factory = functools.partial(_Protocol, loop=self._loop)  # type: ignore[assignment] # its own
        self._used: WeakSet[Any] = WeakSet()

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        current = running.get()
        if current.fresh:
            self.close_idle(0)
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        current.reused = protocol in self._used
        if not current.reused:
            self._used.add(protocol)
            transport: Any = connection.transport
            if hasattr(transport, "max_size"):  # only a plain asyncio transport lets it be set
                transport.max_size = READ_BYTES
            _detect_dead_peer(connection.transport)
        current.connected_at = self._loop.time()
        return connection

    def close_idle(self, keep: int) -> None:
        """Close idle connections, the longest idle first, but for `keep` of them."""
        idle = [protocol for kept in self._conns.values() for protocol, _ in kept]
        for protocol in idle[: max(0, len(idle) - keep)]:
            protocol.close()


def _detect_dead_peer(transport: asyncio.Transport | None) -> None:
    """Have the system notice a peer that vanished, for which TCP alone waits a quarter of an hour."""
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


class _Pieces(httpx.AsyncByteStream):
    """A large payload, written in pieces; can be read again for a second send."""

    def __init__(self, payload: bytes, current: Progress) -> None:
        self._payload = payload
        self._try = current

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._try.check()  # the head waits for the first piece
        for start in range(0, len(self._payload), STREAMED_BYTES):
            yield self._payload[start : start + STREAMED_BYTES]


class _Whole(aiohttp.BytesPayload):
    """A payload written in one piece, together with the head."""

    def __init__(self, payload: bytes, current: Progress) -> None:
        super().__init__(payload)
        self._try = current

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        self._try.check()
        await super().write_with_length(writer, content_length)


class Prepared(httpx.Request):
    """A POST that holds just what the transport reads. Building a plain one costs a third of an exchange."""

    def __init__(self, url: str, headers: dict[str, str], payload: bytes, current: Progress) -> None:
        self.url = url  # type: ignore[assignment] # the transport wants its text
        self.headers = CIMultiDict(headers)  # type: ignore[assignment]
        self.data: _Whole | _Pieces
        if len(payload) > STREAMED_BYTES:
            self.headers["content-length"] = str(len(payload))
            self.data = _Pieces(payload, current)
        else:
            self.data = _Whole(payload, current)


class _Body(httpx.AsyncByteStream):
    """An answer's body as it comes."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._answer.content.iter_any().__aiter__()

    async def aclose(self) -> None:
        await self._answer.__aexit__(None, None, None)


class _WireAnswer(httpx.Response):
    """What is read of an answer; building a whole one costs a tenth of an exchange."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.status_code = answer.status
        self.raw_headers = answer.raw_headers
        self.body = _Body(answer)


class _Transport(AiohttpTransport):
    """httpx's transport over aiohttp, for prepared requests. aiohttp's errors come as they are: their
    translation to httpx's is lossy (a reset becomes a connect time-out)."""

    def __init__(self, session: aiohttp.ClientSession, tls: ssl.SSLContext) -> None:
        super().__init__(verify=tls, trust_env=False, client=session)
        self._session = session

    async def handle_async_request(self, request: httpx.Request) -> _WireAnswer:
        assert isinstance(request, Prepared)  # noqa: S101 - nobody else has this transport
        answer = await self._session.request(
            "POST",
            str(request.url),
            headers=request.headers,
            data=request.data,
            allow_redirects=False,
            auto_decompress=False,
            timeout=_TIMEOUT,
        )
        return _WireAnswer(answer)


class Wire:
    """A transport and its connections; replaced as a whole when TLS changes."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self.connector = _Connector(tls)
        session = aiohttp.ClientSession(
            connector=self.connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=READ_AHEAD_BYTES
        )
        self._transport = _Transport(session, tls)
        self.send = self._transport.handle_async_request
        self.running = 0

    async def aclose(self) -> None:
        await self._transport.aclose()


class Wires:
    """One wire after the other: the one before is closed when the last request on it has ended."""

    def __init__(self) -> None:
        self.current: Wire | None = None
        self._retired: list[Wire] = []

    def renew(self, tls: ssl.SSLContext) -> Wire:
        """What is sent from now on goes over a new one."""
        if self.current is not None:
            self._retired.append(self.current)
        self.current = Wire(tls)
        return self.current

    async def close_unused(self) -> None:
        """Close those before that carry nothing any more."""
        if not self._retired:
            return
        done = [wire for wire in self._retired if not wire.running]
        self._retired = [wire for wire in self._retired if wire.running]
        for wire in done:
            await wire.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        wires, self.current = [*self._retired, *([self.current] if self.current else [])], None
        self._retired = []
        for wire in wires:
            await wire.aclose()
