"""One try of one request over HTTP, translated into an Outcome: the only place that knows HTTP errors.

`docs/forwarding.md` has the tables: what is sent, what is refused, which answer leads to what.

A prepared httpx.Request goes straight to the aiohttp transport; the client in between (redirects, cookies,
proxies of the environment, decoding) is neither wanted nor free. Below it lies a connector of ours that
knows, for each try, since when it holds a connection and whether that had been used before: a kept-alive
connection that breaks before an answer says nothing but that the server had closed it, and such a request
goes out once more on a new one.

A try that ends without an answer may be the request's fault or the gateway's, which took all that it was
running with it. So the gateway is asked for a connection then: where it gives none, there is no gateway.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport
from multidict import CIMultiDict

import dispatcher
from dispatcher.core.outcome import Expired, Failed, Outcome, Refused, TooLarge, Unreachable, classify
from dispatcher.core.request import Request
from dispatcher.core.routing import Route
from dispatcher.peer import reason
from dispatcher.ports import Forwarded
from dispatcher.settings import Gateway, Tls
from dispatcher.telemetry.tracing import going_to

CONNECT_S = 1.5
"""From looking the name up to the end of the TLS handshake."""
KEPT_ALIVE_S = 30.0
"""An idle connection is closed after this."""
UNACKNOWLEDGED_S = 10.0
"""A peer that acknowledges nothing for so long is gone (TCP_USER_TIMEOUT, where the system has it)."""
WATCH_S = 1.0
"""Token and certificate files are looked at no more often."""
STREAMED_BYTES = 262_144
"""Larger payloads are written in pieces, so that a slow gateway does not make us hold them twice."""

_TIMEOUT = aiohttp.ClientTimeout(connect=CONNECT_S, sock_connect=CONNECT_S)
_VISIBLE = re.compile(r"[!-~]+")

T = TypeVar("T")


@dataclass(slots=True)
class _Try:
    """What is known of a running try beside its outcome."""

    connected_at: float | None = None
    reused: bool = False
    """The connection had carried a request before."""
    fresh: bool = False
    """Only a new connection will do."""


_running: ContextVar[_Try] = ContextVar("try")


class _Connector(aiohttp.TCPConnector):
    """Connections without a bound (the limit on requests is the bound), and each try told which it got."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        # Two addresses of one name are tried 0.25 s apart, well within CONNECT_S.
        super().__init__(limit=0, ssl=tls, keepalive_timeout=KEPT_ALIVE_S, ttl_dns_cache=10)
        self._used: WeakSet[Any] = WeakSet()

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        current = _running.get()
        if current.fresh:
            self.close_idle(0)
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        current.reused = protocol in self._used
        if not current.reused:
            self._used.add(protocol)
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

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._payload), STREAMED_BYTES):
            yield self._payload[start : start + STREAMED_BYTES]


class _Prepared(httpx.Request):
    """A POST that holds just what the transport reads. Building a plain one costs a third of an exchange."""

    def __init__(self, url: str, headers: dict[str, str], payload: bytes) -> None:
        self.url = url  # type: ignore[assignment] # the transport wants its text
        self.headers = CIMultiDict(headers)  # type: ignore[assignment]
        self.data: bytes | _Pieces = payload
        if len(payload) > STREAMED_BYTES:
            self.headers["content-length"] = str(len(payload))
            self.data = _Pieces(payload)


class _Body(httpx.AsyncByteStream):
    """An answer's body as it comes."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._answer.content.iter_any().__aiter__()

    async def aclose(self) -> None:
        await self._answer.__aexit__(None, None, None)


class _Answer(httpx.Response):
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

    async def handle_async_request(self, request: httpx.Request) -> _Answer:
        assert isinstance(request, _Prepared)  # noqa: S101 - nobody else has this transport
        answer = await self._session.request(
            "POST",
            str(request.url),
            headers=request.headers,
            data=request.data,
            allow_redirects=False,
            auto_decompress=False,
            timeout=_TIMEOUT,
        )
        return _Answer(answer)


class _Watched(Generic[T]):
    """What is made of files that others replace under us: made again when one has changed.

    A change that cannot be read leaves the old value in force, and is tried again.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        self.paths = tuple(paths)
        self.value: T | None = None
        self.fault = ""
        self._make = make
        self._look_at = float("-inf")
        self._seen: object = None

    def refresh(self, now: float) -> bool:
        """Look at the files, at most every WATCH_S; whether the value was made anew."""
        if now < self._look_at:
            return False
        self._look_at = now + WATCH_S
        seen = [_identity(Path(path)) for path in self.paths if path]
        if seen == self._seen and not self.fault:
            return False
        try:
            self.value = self._make()
        except (OSError, ValueError) as error:
            self.fault = str(error)
            return False
        self._seen, self.fault = seen, ""
        return True


def _identity(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class _Line:
    """A transport and its connections; replaced as a whole when TLS changes."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self.connector = _Connector(tls)
        session = aiohttp.ClientSession(connector=self.connector, cookie_jar=aiohttp.DummyCookieJar())
        self._transport = _Transport(session, tls)
        self.send = self._transport.handle_async_request
        self.running = 0

    async def aclose(self) -> None:
        await self._transport.aclose()


class _Plan:
    """Options prepared for use: everything that is the same for all requests."""

    def __init__(self, options: Gateway) -> None:
        self.secure = options.url.scheme == "https"
        self.timeout_s = options.timeout_s
        self.max_response_bytes = options.max_response_bytes
        self.route = Route(options, user_agent=f"batch-dispatcher/{dispatcher.__version__}")
        self.basic = ""
        if options.url.credentials:
            self.basic = "Basic " + base64.b64encode(":".join(options.url.credentials).encode()).decode()
        self._base = options.url.bare.rstrip("/")
        address = urlsplit(self._base)
        self.host, self.port = address.hostname or "", address.port or (443 if self.secure else 80)

    def url(self, endpoint: str) -> str | Refused:
        path = self.route.path(endpoint)
        return path if isinstance(path, Refused) else self._base + path


class HttpGateway:
    """`ports.Gateway` over HTTP/1.1.

    Options may change at any time: running tries end as they began, the next one uses the new. Connections
    are opened as needed and kept; a request never waits for one, for the limit bounds what is in flight.
    """

    def __init__(self, options: Gateway) -> None:
        self._line: _Line | None = None
        self._retired: list[_Line] = []
        self._tries: dict[int, _Try] = {}
        self._options: Gateway | None = None
        self.reconfigure(options)

    def reconfigure(self, options: Gateway) -> None:
        """Use these options from the next request on."""
        self._plan = _Plan(options)
        before, self._options = self._options, options
        if before is None or before.token_file != options.token_file:
            self._bearer = _Watched([options.token_file], lambda: _bearer(options.token_file))
        if before is None or (before.tls, before.url) != (options.tls, options.url):
            tls, secure = options.tls, self._plan.secure
            files = [tls.ca_file, tls.cert_file, tls.key_file] if secure else []
            self._tls = _Watched(files, lambda: _tls_context(tls, secure=secure))

    def prepare(self) -> None:
        """Build what the first request would else wait for."""
        self._refresh(asyncio.get_running_loop().time())

    def resize(self, limit: int) -> None:
        """Keep no more connections than `limit` requests can use at once."""
        if self._line is not None:
            self._line.connector.close_idle(max(0, limit - self._line.running))

    def connected(self, request: Request) -> float | None:
        """Since when the running try of this very request holds a connection; None: it holds none (yet)."""
        current = self._tries.get(id(request))
        return None if current is None else current.connected_at

    async def aclose(self) -> None:
        """Close every connection."""
        lines, self._line = [*self._retired, *([self._line] if self._line else [])], None
        self._retired = []
        for line in lines:
            await line.aclose()

    async def forward(self, request: Request, *, deadline: float) -> Forwarded:
        """Try once, until `deadline` (loop time) or gateway.timeout_s, whichever is first."""
        now = asyncio.get_running_loop().time
        started = now()
        if deadline <= started:
            return Forwarded(Expired(), started, started)
        plan = self._plan
        url = plan.url(request.endpoint)
        if isinstance(url, Refused):
            return Forwarded(url, started, started)
        line = self._refresh(started)
        if isinstance(line, Unreachable):
            return Forwarded(line, started, started)
        headers = plan.route.headers_for(request, self._bearer.value or plan.basic, going_to(url))
        prepared = _Prepared(url, headers, request.payload)
        ends = min(deadline, started + plan.timeout_s)
        current = self._tries[id(request)] = _Try()
        _running.set(current)
        line.running += 1
        try:
            async with asyncio.timeout_at(ends):
                outcome = await _exchange(line, prepared, current, plan.max_response_bytes)
        except TimeoutError:
            outcome = Expired() if ends == deadline else Failed(f"no answer within {plan.timeout_s:g} s")
        finally:
            line.running -= 1
            self._tries.pop(id(request), None)
        if self._retired:
            await self._close_retired()
        ended = now()
        if isinstance(outcome, Failed) and outcome.status is None and deadline - ended > CONNECT_S:
            why = await _knock(line, plan)
            outcome = Unreachable(f"{outcome.why}, and now {why}") if why else outcome
        return Forwarded(outcome, ended if current.connected_at is None else current.connected_at, ended)

    def _refresh(self, now: float) -> _Line | Unreachable:
        """The line to use, after a look at the files that rotate: certificates and token."""
        if self._tls.refresh(now) and self._tls.value is not None:
            if self._line is not None:
                self._retired.append(self._line)
            self._line = _Line(self._tls.value)
        self._bearer.refresh(now)
        if self._line is None or self._tls.value is None:
            return Unreachable(f"gateway.tls: {self._tls.fault}")
        if self._bearer.value is None:
            return Unreachable(f"gateway.token_file: {self._bearer.fault}")
        return self._line

    async def _close_retired(self) -> None:
        done = [line for line in self._retired if not line.running]
        self._retired = [line for line in self._retired if line.running]
        for line in done:
            await line.aclose()


async def _knock(line: _Line, plan: _Plan) -> str:
    """Connect to the gateway and hang up; why that cannot be done, or nothing."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(
                plan.host, plan.port, ssl=line.tls if plan.secure else None
            )
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s"
    except OSError as error:
        return f"no connection: {plan.host}:{plan.port}: {reason(error)}"
    writer.transport.abort()
    return ""


def _tls_context(options: Tls, *, secure: bool) -> ssl.SSLContext:
    if not secure:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the transport asks for one; none is used
    return options.context()


def _bearer(token_file: str) -> str:
    """The Authorization header of a token file; empty without one."""
    if not token_file:
        return ""
    token = Path(token_file).read_text().strip()
    if not _VISIBLE.fullmatch(token):
        raise ValueError(f"{token_file} is empty, or holds more than a token")
    return f"Bearer {token}"


async def _exchange(line: _Line, request: _Prepared, current: _Try, limit_bytes: int) -> Outcome:
    """Send and read the answer. The time limit is the caller's."""
    while True:
        try:
            response = await line.send(request)
            break
        except _ERRORS as error:
            if current.reused and isinstance(error, _CLOSED_BY_PEER):
                current.fresh, current.reused, current.connected_at = True, False, None
                continue
            if current.connected_at is None:
                line.connector.close_idle(0)  # they lead to what is not there any more
            if current.connected_at is None or _is_tls(error):
                return Unreachable(f"no connection: {_words(error)}")
            return Failed(f"no answer: {_words(error)}")
    stream, headers = response.body, _plain(response.raw_headers)
    try:
        body = await _read(headers, stream, limit_bytes)
    except _ERRORS as error:
        return Failed(f"the answer ({response.status_code}) broke off: {_words(error)}")
    finally:
        await stream.aclose()
    if body is None:
        return TooLarge(response.status_code, limit_bytes)
    return classify(response.status_code, headers, body, time.time())


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Names in lower case."""
    plain: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.lower().decode("latin-1"), raw_value.decode("latin-1")
        plain[name] = f"{plain[name]}, {value}" if name in plain else value
    return plain


async def _read(headers: Mapping[str, str], stream: AsyncIterable[bytes], limit_bytes: int) -> bytes | None:
    """The body, decoded; None when it is larger than the limit."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes:
        return None
    chunks, size = [], 0
    async for chunk in stream:
        size += len(chunk)
        if size > limit_bytes:
            return None
        chunks.append(chunk)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if encodings := headers.get("content-encoding"):
        # We ask for none; who sends one nevertheless may send a bomb, hence not on the loop's time.
        for encoding in reversed(encodings.lower().split(",")):
            decoded = await asyncio.to_thread(_decoded, body, encoding.strip(), limit_bytes)
            if decoded is None:
                return None
            body = decoded
    return body


def _decoded(body: bytes, encoding: str, limit_bytes: int) -> bytes | None:
    """Undo one content coding; None when the result is too large. Raises OSError when it cannot be."""
    if encoding in ("identity", "") or not body:
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise OSError(f"content-encoding {encoding[:40]!r}, which we did not ask for")
    # "deflate" means zlib's format, but some send the bare one.
    wbits = -15 if encoding == "deflate" and body[0] & 0x0F != 8 else 47
    parts, size = [], 0
    while body:
        inflate = zlib.decompressobj(wbits)
        try:
            part = inflate.decompress(body, limit_bytes - size + 1)
        except zlib.error as error:
            raise OSError(f"content-encoding {encoding}: {error}") from error
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            return None
        if not inflate.eof:
            raise OSError(f"content-encoding {encoding}: cut short")
        body = inflate.unused_data
    return b"".join(parts)


_ERRORS = (aiohttp.ClientError, OSError)
"""All that a network or a server can do to us."""
_CLOSED_BY_PEER = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


def _is_tls(error: BaseException | None) -> bool:
    """A refusal by TLS that comes after the connection, as TLS 1.3 has it for client certificates."""
    seen = 0
    while error is not None and seen < 5:
        if isinstance(error, ssl.SSLError):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _words(error: BaseException) -> str:
    """One line that names the error, with no bytes of the peer's beyond 200."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return f"{error.host}:{error.port}: {reason(error.os_error)}"  # its own words speak of TLS always
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
