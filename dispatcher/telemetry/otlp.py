"""Export of spans to an OTLP endpoint: a bounded queue, and the thread that sends from it.

An endpoint that is unreachable, slow or hostile costs only spans, because the queue is bounded and the thread
shares nothing with the event loop. OpenTelemetry is imported only if an endpoint is configured.
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

    from dispatcher.settings.model import Settings
    from dispatcher.settings.values import SecretUrl

MAX_QUEUED_SPANS = 8192
"""Maximum number of spans that wait to be sent. More spans are dropped."""
BATCH_SIZE = 256
SEND_INTERVAL_S = 1.0
"""Interval at which spans are sent. They are sent earlier if BATCH_SIZE spans wait."""
EXPORT_TIMEOUT_S = 2.0
"""Time limit of one export."""
MAX_BACKOFF_S = 30.0
"""Maximum time without exports after failures. The time doubles with each failure."""
CLOSE_TIMEOUT_S = 1.5
"""Time limit for sending the remaining spans when the process ends."""
NOT_INSTALLED = "tracing needs OpenTelemetry, which is not installed: pip install 'batch-dispatcher[otel]'"

_MODULES = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.trace.span",
)
_MAX_REASON_CHARS = 200


class SpanSender:
    """Queue of spans, and the thread that sends them.

    `on_event` is called in that thread with events for the log: when spans were lost for the first time, and
    when none were lost for `max_backoff_s`.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        on_event: Callable[[Event, Mapping[str, Any]], None],
        *,
        send_interval_s: float = SEND_INTERVAL_S,
        max_backoff_s: float = MAX_BACKOFF_S,
    ) -> None:
        self._send_interval_s = send_interval_s
        self._max_backoff_s = max_backoff_s
        self._exporter = exporter
        self._resource = resource
        self._on_event = on_event
        self._spans: deque[EndedSpan] = deque()
        self._wake = threading.Event()
        self._close_by: float | None = None
        self._consecutive_failures = 0
        """Number of failed exports in a row."""
        self._overflow_count = 0
        """Number of spans that `add_span` dropped. Only the thread of the event loop writes it."""
        self._reported_overflow_count = self._lost_count = 0
        self._lost_at: float | None = None
        """Time of the last loss, or `None` if the log says that no spans are being lost."""
        # A daemon thread, so that a hanging export cannot keep the process alive.
        self._thread = threading.Thread(target=self._run_thread, name="traces", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._spans)

    def add_span(self, span: EndedSpan) -> None:
        """Add a span to the queue, or count it as lost if the queue is full. Never blocks."""
        waiting = len(self._spans)
        if waiting >= MAX_QUEUED_SPANS or self._close_by is not None:
            self._overflow_count += 1
            return
        self._spans.append(span)
        # During a backoff the thread is not woken: it would call the failing endpoint again with each batch.
        if waiting + 1 == BATCH_SIZE and not self._consecutive_failures:
            self._wake.set()

    def can_accept(self) -> bool:
        """Return False if the endpoint is unreachable and the queue is full, so that a new span would be
        lost."""
        return not self._consecutive_failures or len(self._spans) < MAX_QUEUED_SPANS

    def close(self) -> None:
        """Send the remaining spans and stop. Blocks for at most CLOSE_TIMEOUT_S."""
        self._close_by = time.monotonic() + CLOSE_TIMEOUT_S
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._exporter.shutdown()

    def _run_thread(self) -> None:
        while self._close_by is None:
            # The exponent is bounded, since a float overflows after 1,024 failures.
            self._wake.wait(
                min(self._max_backoff_s, self._send_interval_s * 2.0 ** min(self._consecutive_failures, 30))
            )
            self._wake.clear()
            self._send_pending()
        self._send_pending()

    def _send_pending(self) -> None:
        """Send the spans that wait. After a failure the remaining ones stay in the queue."""
        why = ""
        while self._spans and not self._is_past_deadline():
            batch = [self._spans.popleft() for _ in range(min(BATCH_SIZE, len(self._spans)))]
            why = self._export_batch(batch)
            if why:
                self._consecutive_failures += 1
                self._record_loss(len(batch), why)
                break
            self._consecutive_failures = 0
        # `add_span` writes the counter in another thread; comparing it with the reported number needs no
        # lock.
        overflowed = self._overflow_count - self._reported_overflow_count
        if overflowed:
            self._reported_overflow_count += overflowed
            self._record_loss(overflowed, why or "they come faster than tracing.endpoint takes them")
        elif self._lost_at is not None and not why and time.monotonic() - self._lost_at > self._max_backoff_s:
            self._lost_at = None
            self._on_event(Event.TRACES_RECOVERED, {"lost": self._lost_count})
            self._lost_count = 0

    def _is_past_deadline(self) -> bool:
        return self._close_by is not None and time.monotonic() >= self._close_by

    def _record_loss(self, count: int, why: str) -> None:
        self._lost_count += count
        if self._lost_at is None:
            self._on_event(Event.TRACES_LOST, {"lost": count, "why": why})
        self._lost_at = time.monotonic()

    def _export_batch(self, batch: list[EndedSpan]) -> str:
        """Send the spans and return the reason why that failed, or an empty string."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [_build_span(span, self._resource) for span in batch]
            # Messages about malformed tracestates of producers are not export errors
            _library_messages.clear()
            done = self._exporter.export(spans)
        except Exception as error:  # exporters raise on malformed responses, too
            return _remove_secrets(repr(error))
        if done is SpanExportResult.SUCCESS:
            return ""
        return _remove_secrets(
            _library_messages[0] if _library_messages else "tracing.endpoint does not take them"
        )


def _remove_secrets(why: str) -> str:
    """Return a message of a library without query, user name and password, since it may contain the whole
    URL."""
    return re.sub(r"//[^/@\s]+@", f"//{MASK}@", re.sub(r"\?\S+", f"?{MASK}", why))[:_MAX_REASON_CHARS]


def _build_span(span: EndedSpan, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
    from opentelemetry.trace.span import TraceState

    sampled = TraceFlags(TraceFlags.SAMPLED)
    parent_ids, state = span.parent, None
    if parent_ids.tracestate:
        state = TraceState.from_header([parent_ids.tracestate])
    parent = None
    if parent_ids.span_id:
        parent = SpanContext(parent_ids.trace_id, parent_ids.span_id, is_remote=True, trace_flags=sampled)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(parent_ids.trace_id, span.span_id, False, sampled, state),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        links=(Link(parent),) if span.is_linked and parent is not None else (),
        kind=SpanKind[span.kind],
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.started_at,
        end_time=max(span.started_at, span.ended_at),
    )


_library_messages: list[str] = []


class _LibraryMessageHandler(logging.Handler):
    """Handler that keeps the messages of OpenTelemetry, which would otherwise print one to stderr per failed
    batch."""

    def emit(self, record: logging.LogRecord) -> None:
        if len(_library_messages) < 8:
            _library_messages.append(" ".join(record.getMessage().split()))


def import_opentelemetry(settings: Settings) -> None:
    """Import the OpenTelemetry modules, which takes long, before the event loop starts. Raises OSError if
    they are not installed."""
    if not settings.tracing.endpoint:
        return
    try:
        for module in _MODULES:
            import_module(module)
    except ImportError as error:
        raise OSError(NOT_INSTALLED) from error


@asynccontextmanager
async def start_tracing(settings: Settings, owner: str) -> AsyncIterator[Tracing | None]:
    """Provide tracing for the length of the block, or `None` without importing anything if no endpoint is
    configured.

    At the end of the block the queued spans are sent within CLOSE_TIMEOUT_S. Raises OSError if the extra
    `otel` is not installed.
    """
    if not settings.tracing.endpoint:
        yield None
        return
    import_opentelemetry(settings)
    sender = SpanSender(
        create_exporter(settings.tracing.endpoint),
        build_resource(settings.pool.name, owner),
        _create_loop_emitter(),
    )
    try:
        yield Tracing(
            sender.add_span,
            can_accept=sender.can_accept,
            queue=settings.queue.name,
            gateway=settings.gateway.url.without_credentials,
            sample_ratio=settings.tracing.sample_ratio,
        )
    finally:
        await asyncio.to_thread(sender.close)


def create_exporter(url: SecretUrl) -> SpanExporter:
    """Create an exporter for an OTLP/HTTP endpoint, and redirect its log messages to
    `_LibraryMessageHandler`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    library = logging.getLogger("opentelemetry")
    # Without propagation the root handler does not log the same message again.
    library.handlers, library.propagate = [_LibraryMessageHandler()], False
    headers = {}
    if url.credentials:
        headers["authorization"] = url.authorization_header
    return OTLPSpanExporter(get_traces_url(url), headers=headers, timeout=EXPORT_TIMEOUT_S)


def build_resource(pool: str, owner: str) -> Resource:
    """Build the resource that identifies this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take
    precedence."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    attributes = {
        "service.name": "batch-dispatcher",
        "service.namespace": pool,
        "service.version": __version__,
        "service.instance.id": owner,
    }
    # Later resources win in a merge: the environment comes last.
    return Resource.create().merge(Resource(attributes)).merge(OTELResourceDetector().detect())


def get_traces_url(url: SecretUrl) -> str:
    """Return the URL for spans, without credentials. A URL without a path gets the default path of
    OTLP/HTTP."""
    bare = url.without_credentials
    return bare.rstrip("/") + "/v1/traces" if urlsplit(bare).path in ("", "/") else bare


def _create_loop_emitter() -> Callable[[Event, Mapping[str, Any]], None]:
    """Return a function that emits events in the thread of the event loop, with the sinks of the calling
    context."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()

    def emit_in_loop(event: Event, fields: Mapping[str, Any]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: emit(event, **fields), context=context)
        except RuntimeError:  # the loop is closed: the process ends
            return

    return emit_in_loop
