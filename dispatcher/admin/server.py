"""One port for operators and their machines: /livez, /readyz, /metrics, /status.

The probes are open. /metrics and /status want the bearer token where admin.token_file names one; the file
is read at each request, so a rotated token counts at once.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from dispatcher.telemetry.status import Status

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Views:
    """What the port shows. A probe tells a problem, or None when all is well."""

    live: Callable[[], str | None]
    ready: Callable[[], str | None]
    status: Callable[[], Status]
    metrics: Callable[[str], tuple[bytes, str]]
    """The page in the format that an Accept header asks for, and its content type."""


class AdminServer:
    """Async context manager; `port` is the real one when 0 was asked for."""

    def __init__(self, views: Views, *, host: str, port: int, token_file: str = "") -> None:
        self.port = port
        self._views = views
        self._host = host
        self._token_file = Path(token_file) if token_file else None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> AdminServer:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token_file is None or request.path in ("/livez", "/readyz"):
            return await handler(request)
        try:
            token = self._token_file.read_text().strip()
        except OSError as error:
            return web.Response(status=503, text=f"admin.token_file cannot be read: {error.strerror}\n")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not token or not hmac.compare_digest(given.encode(), token.encode()):
            return web.Response(
                status=401, text="a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"}
            )
        return await handler(request)

    async def _livez(self, _: web.Request) -> web.Response:
        return _probe(self._views.live())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _probe(self._views.ready())

    async def _metrics(self, request: web.Request) -> web.Response:
        body, kind = self._views.metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._views.status().json())
        return web.Response(body=body, content_type="application/json")


def _probe(problem: str | None) -> web.Response:
    return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")
