"""What the tests of traces share: a line into memory, an OTLP endpoint that behaves as told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dispatcher.telemetry.events import Event
from dispatcher.telemetry.otlp import SpanSender

QUEUE = "batch:{qwen}:requests"
Told = list[tuple[Event, Mapping[str, Any]]]


@contextmanager
def line_into(exporter: Any, **paces: float) -> Iterator[tuple[SpanSender, Told]]:
    """A line to that exporter, and what it tells."""
    told: Told = []
    line = SpanSender(exporter, Resource({}), lambda event, fields: told.append((event, fields)), **paces)
    try:
        yield line, told
    finally:
        line.close()


def in_memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


class Collector:
    """An OTLP/HTTP endpoint in threads of its own. `status`: what it answers; None: nothing at all."""

    def __init__(self, status: int | None = 200) -> None:
        self.status = status
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.let_go = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spans(self) -> list[Any]:
        found = []
        for body in list(self.bodies):
            request = ExportTraceServiceRequest.FromString(body)
            for of_resource in request.resource_spans:
                for of_scope in of_resource.scope_spans:
                    found += list(of_scope.spans)
        return found

    @contextmanager
    def serve(self) -> Iterator[Collector]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.append(self.path)
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                if collector.status is None:
                    collector.let_go.wait(30)
                    return
                if collector.status == 200:
                    collector.bodies.append(body)
                with suppress(OSError):
                    self.send_response(collector.status)
                    self.send_header("content-length", "0")
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.let_go.set()
            server.shutdown()
            thread.join()
            server.server_close()
