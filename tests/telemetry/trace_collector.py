"""Helpers for tests of traces: a span sender with an exporter in memory, and an OTLP endpoint with
configurable answers."""

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
EmittedEvents = list[tuple[Event, Mapping[str, Any]]]


@contextmanager
def run_sender(exporter: Any, **intervals: float) -> Iterator[tuple[SpanSender, EmittedEvents]]:
    """Run a span sender with this exporter, and yield it with the events that it emits."""
    events: EmittedEvents = []
    sender = SpanSender(
        exporter, Resource({}), lambda event, fields: events.append((event, fields)), **intervals
    )
    try:
        yield sender, events
    finally:
        sender.close()


def create_memory_exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


class Collector:
    """An OTLP/HTTP endpoint in threads of its own. It answers with `status`, or not at all if that is
    `None`."""

    def __init__(self, status: int | None = 200) -> None:
        self.status = status
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.may_answer = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def read_spans(self) -> list[Any]:
        found = []
        for body in list(self.bodies):
            request = ExportTraceServiceRequest.FromString(body)
            for resource_spans in request.resource_spans:
                for scope_spans in resource_spans.scope_spans:
                    found += list(scope_spans.spans)
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
                    collector.may_answer.wait(30)
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
            self.may_answer.set()
            server.shutdown()
            thread.join()
            server.server_close()
