"""Fake endpoint picker and fake Prometheus on 127.0.0.1, with configurable faults."""

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
ANSWER_TIMEOUT_S = 30.0
"""Time-out of a source that is expected to answer, even on a busy machine."""


def timeout_for(fault: str) -> float:
    """Return the time-out of a source for a fault. It is short where only the time-out ends the poll."""
    return 0.5 if fault in ("hanging", "never-ending") else ANSWER_TIMEOUT_S


def read_page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


class FakeEpp:
    """Metrics port of an endpoint picker. It answers with `page`, or with the result of `respond` if that is
    set."""

    def __init__(self) -> None:
        self.page = read_page("router-newest-flow-control-on")
        self.respond: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.requests: list[web.Request] = []
        self.requested_at: list[float] = []
        self.url = ""
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.requested_at.append(asyncio.get_running_loop().time())
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
    """Run an HTTP server that passes requests for every path to `handler`, and yield its port."""
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
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Run a TCP server that passes each connection to `handler`, for answers that no HTTP library would
    send. Yields its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await handler(reader, writer)
        except asyncio.CancelledError:
            pass  # The context manager was left.
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(body: bytes, *, then_hang: bool = False) -> Callable[..., Awaitable[None]]:
    """Return a connection handler that answers with these bytes, status line included, and closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        await writer.drain()
        if then_hang:
            await asyncio.Event().wait()

    return handler


async def hanging(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connection handler that reads the request and never answers."""
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.Event().wait()


async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connection handler that reads the request and resets the connection."""
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


def dripping(head: bytes, every_s: float) -> Callable[..., Awaitable[None]]:
    """Return a connection handler whose answer never ends: it sends a byte every `every_s`, before the
    time-out of a single read."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(every_s)

    return handler


class FakePrometheus:
    """Prometheus API that answers every query with `rows` (label sets and values), or with the result of
    `respond` if that is set."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.respond: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.requests: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self.respond is not None:
            return await self.respond(request)
        return web.json_response(vector_answer(self.rows))

    def add_target(
        self, values: dict[str, float], *, age_s: float = 0.5, took_s: float | None = None, **target: str
    ) -> None:
        """Add the series of one scraped target: values by family name, all of one age, and the duration of
        the scrape."""
        target = {"job": "epp", "namespace": "default", "instance": "10.0.0.1:9090"} | target
        for family, value in values.items():
            self.rows.append(vector_row(value, {**target, "dispatcher_value": family}))
            self.rows.append(vector_row(age_s, {**target, "dispatcher_age": family}))
        if took_s is not None:
            labels = {**target, "dispatcher_took": "s"}
            self.rows.append({"metric": labels, "value": [1_764_000_000.0, str(took_s)]})


def vector_row(value: float | str, labels: dict[str, str]) -> dict[str, Any]:
    family = labels.get("dispatcher_value", "")
    pool = {"inference_pool": "qwen"} if family in ("SATURATION", "QUEUED") else {"name": "qwen"}
    return {"metric": {**pool, **labels}, "value": [1_764_000_000.0, str(value)]}


def vector_answer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


@contextlib.asynccontextmanager
async def fake_prometheus(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakePrometheus]:
    prometheus = FakePrometheus()
    async with serving(prometheus.handle, tls=tls) as port:
        prometheus.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        yield prometheus


HEALTHY_VALUES = {"SATURATION": 0.4, "QUEUED": 12.0, "RUNNING": 30.25, "WAITING": 1.5, "READY": 4.0}


def json_answer(document: Any, status: int = 200) -> bytes:
    """Return a complete HTTP answer with a JSON body, as bytes."""
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


PLAIN_TEXT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def http_answer(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([PLAIN_TEXT_HEAD.strip(), *headers, b"Content-Length: %d" % len(body), b"", body])
