"""Stand-ins for an endpoint picker and for Prometheus, on 127.0.0.1, with every fault one asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

PAGES = Path(__file__).parent / "pages"
PATIENT_S = 30.0
"""Time-out of a source that is to answer, on a machine however busy."""


def patience_s(fault: str) -> float:
    """Time-out of a source under a fault: short where nothing but the time-out ends the poll."""
    return 0.5 if fault in ("hanging", "never-ending") else PATIENT_S


def golden(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


class FakeEpp:
    """An endpoint picker's metrics port. Set `page`, or `respond` for anything else."""

    def __init__(self) -> None:
        self.page = golden("router-newest-flow-control-on")
        self.respond: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.requests: list[web.Request] = []
        self.asked_at: list[float] = []
        self.url = ""
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.respond is not None:
            return await self.respond(request)
        response = web.Response(text=self.page, content_type="text/plain")
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response


@contextlib.asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    *,
    tls: ssl.SSLContext | None = None,
    port: int = 0,
) -> AsyncIterator[int]:
    """An HTTP server whose every path is the handler's; gives its port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fake_epp(*, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[FakeEpp]:
    epp = FakeEpp()
    async with serving(epp.handle, tls=tls, port=port) as bound:
        epp.port = bound
        epp.url = f"{'https' if tls else 'http'}://127.0.0.1:{bound}"
        yield epp


@contextlib.asynccontextmanager
async def raw_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A TCP server that speaks whatever `talk` does, for what no HTTP library would send."""
    talks: set[asyncio.Task[None]] = set()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await talk(reader, writer)
        except asyncio.CancelledError:
            pass  # the block has ended
        finally:
            talks.discard(task)
            writer.close()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(talks):
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


def answering(body: bytes, *, then_hang: bool = False) -> Callable[..., Awaitable[None]]:
    """A talk that answers each request with these bytes, status line and all, and closes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        await writer.drain()
        if then_hang:
            await asyncio.Event().wait()

    return talk


async def hanging(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A talk that takes the request and never answers."""
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.Event().wait()


async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A talk that takes the request and breaks the connection."""
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


def dripping(head: bytes, every_s: float) -> Callable[..., Awaitable[None]]:
    """A talk whose answer never ends: a byte now and then, each before any time-out of a single read."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(every_s)

    return talk


class FakePrometheus:
    """An API that answers every query with `rows` (label sets and values), or as `respond` says."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.respond: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.requests: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self.respond is not None:
            return await self.respond(request)
        return web.json_response(vector(self.rows))

    def show(
        self, values: dict[str, float], *, age_s: float = 0.5, took_s: float | None = None, **target: str
    ) -> None:
        """Add what one scraped target shows: values by family name, all of one age; how long it took to
        scrape it."""
        target = {"job": "epp", "namespace": "default", "instance": "10.0.0.1:9090"} | target
        for family, value in values.items():
            self.rows.append(row(value, {**target, "dispatcher_value": family}))
            self.rows.append(row(age_s, {**target, "dispatcher_age": family}))
        if took_s is not None:
            labels = {**target, "dispatcher_took": "s"}
            self.rows.append({"metric": labels, "value": [1_764_000_000.0, str(took_s)]})


def row(value: float | str, labels: dict[str, str]) -> dict[str, Any]:
    family = labels.get("dispatcher_value", "")
    pool = {"inference_pool": "qwen"} if family in ("SATURATION", "QUEUED") else {"name": "qwen"}
    return {"metric": {**pool, **labels}, "value": [1_764_000_000.0, str(value)]}


def vector(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


@contextlib.asynccontextmanager
async def fake_prometheus(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakePrometheus]:
    prometheus = FakePrometheus()
    async with serving(prometheus.handle, tls=tls) as port:
        prometheus.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        yield prometheus


GOOD = {"SATURATION": 0.4, "QUEUED": 12.0, "RUNNING": 30.25, "WAITING": 1.5, "READY": 4.0}


def json_answer(document: Any, status: int = 200) -> bytes:
    """A whole HTTP answer with a JSON body, as bytes."""
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def whole(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([PLAIN.strip(), *headers, b"Content-Length: %d" % len(body), b"", body])
