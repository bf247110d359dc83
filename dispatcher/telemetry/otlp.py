"""Spans on their way to an OTLP endpoint: the line they wait in, and the thread that sends them.

The line is bounded and the thread its own: an endpoint that is away, slow or hostile costs spans and nothing
else. OpenTelemetry is imported only where there is an endpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dispatcher import __version__
from dispatcher.settings.values import MASK
from dispatcher.telemetry.events import Event, emit
from dispatcher.telemetry.tracing import EndedSpan, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from dispatcher.settings import SecretUrl, Settings

IN_LINE = 8192
"""More spans than this do not wait to be sent: what comes then is lost."""
AT_ONCE = 256
EACH_S = 1.0
"""Spans are sent this often, and when AT_ONCE of them wait."""
ANSWER_S = 2.0
"""The longest that the endpoint is waited for."""
PAUSE_S = 30.0
"""After a failure the endpoint is left alone, each time twice as long, up to this."""
CLOSE_S = 1.5
"""What is still in line has so long to get out when the process ends."""
MISSING = "tracing needs OpenTelemetry, which is not installed: pip install 'batch-dispatcher[otel]'"

_MODULES = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.trace.span",
)
_WHY_CHARS = 200


class SpanSender:
    """Spans that wait to be sent, and the thread that sends them.

    `tell`: called in that thread, with an event that is worth a line in the log: the first loss, and that
    nothing was lost any more for `pause_s`.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        tell: Callable[[Event, Mapping[str, Any]], None],
        *,
        each_s: float = EACH_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._each_s = each_s
        self._pause_s = pause_s
        self._exporter = exporter
        self._resource = resource
        self._tell = tell
        self._spans: deque[EndedSpan] = deque()
        self._wake = threading.Event()
        self._close_by: float | None = None
        self._failures = 0
        """In a row."""
        self._overflowed = 0
        """Counted by `add`, in the loop's thread alone."""
        self._seen = self._lost = 0
        self._lost_at: float | None = None
        """The last loss, while it is told that spans are lost."""
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: EndedSpan) -> None:
        """Put it in line, or count it as lost. Never waits."""
        waiting = len(self._spans)
        if waiting >= IN_LINE or self._close_by is not None:
            self._overflowed += 1
            return
        self._spans.append(span)
        if waiting + 1 == AT_ONCE and not self._failures:
            self._wake.set()

    def takes(self) -> bool:
        """False while the endpoint is away and the line full: what was recorded now would be lost."""
        return not self._failures or len(self._spans) < IN_LINE

    def close(self) -> None:
        """Blocks for CLOSE_S at the most."""
        self._close_by = time.monotonic() + CLOSE_S
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _work(self) -> None:
        while self._close_by is None:
            self._wake.wait(min(self._pause_s, self._each_s * 2.0 ** min(self._failures, 30)))
            self._wake.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        """Send what waits; after a failure wait for the next time."""
        why = ""
        while self._spans and not self._too_late():
            batch = [self._spans.popleft() for _ in range(min(AT_ONCE, len(self._spans)))]
            why = self._export(batch)
            if why:
                self._failures += 1
                self._lose(len(batch), why)
                break
            self._failures = 0
        overflowed = self._overflowed - self._seen
        if overflowed:
            self._seen += overflowed
            self._lose(overflowed, why or "they come faster than tracing.endpoint takes them")
        elif self._lost_at is not None and not why and time.monotonic() - self._lost_at > self._pause_s:
            self._lost_at = None
            self._tell(Event.TRACES_FINE, {"lost": self._lost})
            self._lost = 0

    def _too_late(self) -> bool:
        return self._close_by is not None and time.monotonic() >= self._close_by

    def _lose(self, count: int, why: str) -> None:
        self._lost += count
        if self._lost_at is None:
            self._tell(Event.TRACES_LOST, {"lost": count, "why": why})
        self._lost_at = time.monotonic()

    def _export(self, batch: list[EndedSpan]) -> str:
        """Why they could not be sent, or nothing."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [_built(span, self._resource) for span in batch]
            _complaints.clear()  # of what producers wrote: nobody's business
            done = self._exporter.export(spans)
        except Exception as error:  # a defect of the library, or of its peer's making
            return _without_secrets(repr(error))
        if done is SpanExportResult.SUCCESS:
            return ""
        return _without_secrets(_complaints[0] if _complaints else "tracing.endpoint does not take them")


def _without_secrets(why: str) -> str:
    """Words of a library, which may name the whole URL: without its query, its user and its password."""
    return re.sub(r"//[^/@\s]+@", f"//{MASK}@", re.sub(r"\?\S+", f"?{MASK}", why))[:_WHY_CHARS]


def _built(span: EndedSpan, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
    from opentelemetry.trace.span import TraceState

    sampled = TraceFlags(TraceFlags.SAMPLED)
    above, state = span.parent, None
    if above.state:
        state = TraceState.from_header([above.state])
    parent = None
    if above.span_id:
        parent = SpanContext(above.trace_id, above.span_id, is_remote=True, trace_flags=sampled)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(above.trace_id, span.span_id, False, sampled, state),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        links=(Link(parent),) if span.linked and parent is not None else (),
        kind=SpanKind[span.kind],
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.started_at,
        end_time=max(span.started_at, span.ended_at),
    )


_complaints: list[str] = []


class _Complaints(logging.Handler):
    """Hears what OpenTelemetry would print to standard error, beside our log, for each batch."""

    def emit(self, record: logging.LogRecord) -> None:
        if len(_complaints) < 8:
            _complaints.append(" ".join(record.getMessage().split()))


def prepare(settings: Settings) -> None:
    """Import what takes long, where it will be needed. Raises OSError where it is not installed."""
    if not settings.tracing.endpoint:
        return
    try:
        for module in _MODULES:
            import_module(module)
    except ImportError as error:
        raise OSError(MISSING) from error


@asynccontextmanager
async def tracing(settings: Settings, owner: str) -> AsyncIterator[Tracing | None]:
    """Tracing as the settings have it, for the length of the block; None: it is off, and nothing is imported.

    At the end of the block what is in line is sent, within CLOSE_S. Raises OSError where the `otel` extra is
    not installed.
    """
    if not settings.tracing.endpoint:
        yield None
        return
    prepare(settings)
    line = SpanSender(exporter_to(settings.tracing.endpoint), resource(settings.pool.name, owner), _teller())
    try:
        yield Tracing(
            line.add,
            takes=line.takes,
            queue=settings.queue.name,
            gateway=settings.gateway.url.bare,
            sample_ratio=settings.tracing.sample_ratio,
        )
    finally:
        await asyncio.to_thread(line.close)


def exporter_to(url: SecretUrl) -> SpanExporter:
    """Sends to an OTLP/HTTP endpoint. What it would log goes nowhere else."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    library = logging.getLogger("opentelemetry")
    library.handlers, library.propagate = [_Complaints()], False
    headers = {}
    if url.credentials:
        headers["authorization"] = url.authorization
    return OTLPSpanExporter(endpoint_of(url), headers=headers, timeout=ANSWER_S)


def resource(pool: str, owner: str) -> Resource:
    """Who we are. The environment (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) has the last word."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    named = {
        "service.name": "batch-dispatcher",
        "service.namespace": pool,
        "service.version": __version__,
        "service.instance.id": owner,
    }
    return Resource.create().merge(Resource(named)).merge(OTELResourceDetector().detect())


def endpoint_of(url: SecretUrl) -> str:
    """Where spans are sent, without credentials. Without a path: where OTLP/HTTP has them."""
    bare = url.bare
    return bare.rstrip("/") + "/v1/traces" if urlsplit(bare).path in ("", "/") else bare


def _teller() -> Callable[[Event, Mapping[str, Any]], None]:
    """Emits events in the loop's thread, to the sinks of whoever calls this."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()

    def tell(event: Event, fields: Mapping[str, Any]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: emit(event, **fields), context=context)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            return

    return tell
