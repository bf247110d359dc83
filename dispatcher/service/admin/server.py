"""HTTP server for operators and their tools: /livez, /readyz, /metrics, /status, /events, and a page at /.

Probes and page need no token; the page itself contains no data. Everything else needs the bearer token if
admin.token_file is set. The file is read for each request, so a rotated token applies at once. The page asks
for the token and reads /events with it. Without a token, the Host header is checked (host_check.py).
"""

from __future__ import annotations

import asyncio
import hmac
import resource
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dispatcher.features import find_files
from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.service.admin.host_check import is_own_host
from dispatcher.service.admin.stream import MAX_STREAMS, LiveFeed
from dispatcher.settings.watched_files import TokenFileError, TokenReader
from dispatcher.telemetry.status import Status

SHUTDOWN_S = 0.5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PAGE = Path(__file__).parent / "page"
_ASSETS = {
    "/": ((_PAGE / "index.html",), "text/html"),
    "/page.css": ((_PAGE / "page.css",), "text/css"),
    "/page.js": ((_PAGE / "page.js",), "text/javascript"),
    "/features.js": (find_files("page.js"), "text/javascript"),
    "/icon.svg": ((_PAGE / "icon.svg",), "image/svg+xml"),
}
"""Files that are joined, and the media type, by path."""
_OPEN_PATHS = {"/livez", "/readyz", *_ASSETS}
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "batch-dispatcher",  # aiohttp would name itself and Python
}


@dataclass(frozen=True, slots=True)
class AdminLimits:
    """Limits of connections and times."""

    max_connections: int = 64
    """Maximum number of connections. One more closes the one that has waited longest for a request, or the
    new one if none waits."""
    request_timeout_s: float = 10.0
    """Time after which a connection that has not sent a complete request is closed, also an idle one."""
    reserved_descriptors: int = 64
    """File descriptors that are reserved for Redis, the gateway and files. If no more are free, each new
    connection closes another one."""
    heartbeat_s: float = 5.0
    """Interval of comments in a stream without messages. The token is checked again at the same interval."""
    write_timeout_s: float = 10.0
    """Time after which a reader that takes nothing is disconnected."""


_DEFAULT_LIMITS = AdminLimits()


@dataclass(frozen=True, slots=True)
class AdminViews:
    """Sources of the content. A probe returns a problem, or `None` if there is none."""

    live: Callable[[], str | None]
    ready: Callable[[], str | None]
    status: Callable[[], Status]
    metrics: Callable[[str], tuple[bytes, str]]
    """Returns the page in the format that an Accept header asks for, and its content type."""
    settings: Callable[[], Mapping[str, Any]]
    """Returns the settings in force that may be shown: `settings` by section, and `defaults`, the keys that
    were not set."""
    results: Callable[[], Mapping[str, float]]
    """Returns the number of results so far, by code."""
    dead: Callable[[int], Awaitable[Sequence[DeadRequest]]]
    """Returns so many of the newest dead requests, newest first."""

    def make_feed(self, clock: Callable[[], float]) -> LiveFeed:
        return LiveFeed(
            lambda: self.status().to_dict(),
            settings=self.settings,
            results=self.results,
            dead=self.dead,
            clock=clock,
        )


class AdminServer:
    """Server as an async context manager. `port` becomes the actual port if 0 was requested. The caller runs
    the feed."""

    def __init__(
        self,
        views: AdminViews,
        feed: LiveFeed,
        *,
        host: str,
        port: int,
        token_file: str = "",
        allowed_hosts: Sequence[str] = (),
        limits: AdminLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.port = port
        self._views = views
        self._feed = feed
        self._host = host
        self._limits = limits
        self._token_file = token_file
        self._allowed_hosts = [pattern.lower() for pattern in allowed_hosts]
        self._tokens = TokenReader()
        self._server: web.Server | None = None
        self._busy_connections: set[object] = set()
        """Connections whose request is being answered."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> AdminServer:
        app = web.Application(middlewares=[self._guard_request])
        app.on_response_prepare.append(_add_security_headers)
        for path, handler in (
            ("/livez", self._handle_livez),
            ("/readyz", self._handle_readyz),
            ("/metrics", self._handle_metrics),
            ("/status", self._handle_status),
            *((path, _make_asset_handler(files, kind)) for path, (files, kind) in _ASSETS.items()),
        ):
            app.router.add_get(path, handler)
        app.router.add_get("/events", self._handle_events, allow_head=False)
        self._runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        self._server = self._runner.server
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._make_connection, self._host, self.port)
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._listener is not None:
            self._listener.close()
        self._feed.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # Connections.

    def _make_connection(self) -> asyncio.Protocol:
        assert self._server is not None  # noqa: S101 -- set before the port is opened
        return _AdminConnection(self._server, self._limits.request_timeout_s, self._make_room)

    def _make_room(self, new: web.RequestHandler) -> None:
        assert self._server is not None  # noqa: S101
        alive = [each for each in self._server.connections if each.transport is not None]
        if (
            len(alive) > self._limits.max_connections
            or _get_descriptor(new) >= self._compute_max_descriptor()
        ):
            # `connections` is ordered by the time of opening, so the oldest idle connection is closed.
            next((each for each in alive if each not in self._busy_connections), new).force_close()

    def _compute_max_descriptor(self) -> float:
        """Return the number below which the descriptor of a connection has to stay. A new descriptor gets the
        lowest free number, so a higher one means that all lower ones are in use."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return float("inf") if soft == resource.RLIM_INFINITY else soft - self._limits.reserved_descriptors

    @web.middleware
    async def _guard_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._busy_connections.add(request.protocol)
        try:
            rejection = self._check_host(request) or await self._check_token(request)
            return rejection or await handler(request)
        finally:
            self._busy_connections.discard(request.protocol)

    def _check_host(self, request: web.Request) -> web.Response | None:
        """Return the response that rejects a request whose Host header a stranger may own. `None` if it may
        be answered."""
        if self._token_file or is_own_host(request.headers.get("Host", ""), self._allowed_hosts):
            return None
        return web.Response(
            status=403,
            text="the Host header has a name that somebody else may own: use an IP address or localhost, set "
            "admin.token_file, or add the name to admin.allowed_hosts\n",
        )

    async def _check_token(self, request: web.Request) -> web.Response | None:
        """Return the response that rejects the request. `None` if it may be answered."""
        if not self._token_file or request.path in _OPEN_PATHS:
            return None
        try:
            token = await self._tokens.read_token(self._token_file)
        except TokenFileError as error:
            if not error.is_readable:
                # The token is unknown, so no request can be authorized. That is a fault of the server and not
                # of the request.
                return web.Response(status=503, text=f"admin.token_file {error.problem}\n")
            token = ""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        # `hmac.compare_digest` takes the same time wherever the tokens differ, so that timing reveals
        # nothing.
        if token and hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
            return None
        return web.Response(
            status=401, text="a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"}
        )

    # Handlers.

    async def _handle_livez(self, _: web.Request) -> web.Response:
        return _make_probe_response(self._views.live())

    async def _handle_readyz(self, _: web.Request) -> web.Response:
        return _make_probe_response(self._views.ready())

    async def _handle_metrics(self, request: web.Request) -> web.Response:
        body, kind = self._views.metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _handle_status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._views.status().to_dict())
        return web.Response(body=body, content_type="application/json")

    async def _handle_events(self, request: web.Request) -> web.StreamResponse:
        """Stream the live feed while the client reads it and its token is valid."""
        stream = self._feed.subscribe(request.headers.get("Last-Event-ID", ""))
        if stream is None:
            return web.Response(
                status=503, text=f"{MAX_STREAMS} pages are connected already: close one of them\n"
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        clock = asyncio.get_running_loop().time
        checked_at = clock()
        try:
            await response.prepare(request)
            while (frames := await stream.take_frames(self._limits.heartbeat_s)) is not None:
                async with asyncio.timeout(self._limits.write_timeout_s):
                    await response.write(frames or b": still here\n\n")
                if clock() - checked_at >= self._limits.heartbeat_s:
                    checked_at = clock()
                    if await self._check_token(request) is not None:
                        break
            if not stream.is_dropped:
                async with asyncio.timeout(SHUTDOWN_S):
                    await response.write_eof()
        except (TimeoutError, ConnectionError):
            stream.is_dropped = True
        finally:
            self._feed.unsubscribe(stream)
            if stream.is_dropped and request.transport is not None:
                request.transport.abort()  # do not wait for the client to read the rest
        return response


class _AdminConnection(web.RequestHandler):
    """One connection. `make_room` is called with it as soon as it is open."""

    __slots__ = ("_make_room",)

    def __init__(
        self, server: web.Server, head_s: float, make_room: Callable[[web.RequestHandler], None]
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=head_s,
            lingering_time=1.0,
        )
        self._make_room = make_room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._make_room(self)

    def handle_error(self, *args: Any, **more: Any) -> web.StreamResponse:
        """Answer a request that is not valid HTTP, which reaches no handler, with the same headers as any
        other."""
        response = super().handle_error(*args, **more)
        response.headers.update(_SECURITY_HEADERS)
        return response

    def log_exception(self, *args: Any, **more: Any) -> None:
        """Log a traceback only for a defect of the dispatcher, and not for invalid HTTP."""
        if not isinstance(more.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **more)


def _get_descriptor(connection: web.RequestHandler) -> int:
    """Return the descriptor of the connection's socket. -1 if it is closed already."""
    transport = connection.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    return int(sock.fileno()) if sock is not None else -1


def _make_asset_handler(files: Sequence[Path], kind: str) -> Handler:
    body = b"\n".join(file.read_bytes() for file in files)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return answer


async def _add_security_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_SECURITY_HEADERS)


def _make_probe_response(problem: str | None) -> web.Response:
    return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")
