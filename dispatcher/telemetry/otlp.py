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

    from dispatcher.settings import SecretUrl, Settings

IN_LINE = 8192
"""Maximum number of spans that wait to be sent. More spans are dropped."""
AT_ONCE = 256
EACH_S = 1.0
"""Interval at which spans are sent. They are sent earlier if BATCH_SIZE spans wait."""
ANSWER_S = 2.0
"""Time limit of one export."""
PAUSE_S = 30.0
"""Maximum time without exports after failures. The time doubles with each failure."""
CLOSE_S = 1.5
"""Time limit for sending the remaining spans when the process ends."""
MISSING = "tracing needs OpenTelemetry, which is not installed: pip install 'batch-dispatcher[otel]'"

_MODULES = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.trace.span",
)
_WHY_CHARS = 200


class SpanSender:
    """Queue of spans, and the thread that sends them.

    `on_event` is called in that thread with events for the log: when spans were lost for the first time, and
    when none were lost for `max_backoff_s`.
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
        """Number of failed exports in a row."""
        self._overflowed = 0
        """Number of spans that `add_span` dropped. Only the thread of the event loop writes it."""
        self._seen = self._lost = 0
        self._lost_at: float | None = None
        """Time of the last loss, or `None` if the log says that no spans are being lost."""
        # A daemon thread, so that a hanging export cannot keep the process alive.
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: EndedSpan) -> None:
        """Add a span to the queue, or count it as lost if the queue is full. Never blocks."""
        waiting = len(self._spans)
        if waiting >= IN_LINE or self._close_by is not None:
            self._overflowed += 1
            return
        self._spans.append(span)
        # During a backoff the thread is not woken: it would call the failing endpoint again with each batch.
        if waiting + 1 == AT_ONCE and not self._failures:
            self._wake.set()

    def takes(self) -> bool:
        """Return False if the endpoint is unreachable and the queue is full, so that a new span would be
        lost."""
        return not self._failures or len(self._spans) < IN_LINE

    def close(self) -> None:
        """Send the remaining spans and stop. Blocks for at most CLOSE_TIMEOUT_S."""
        self._close_by = time.monotonic() + CLOSE_S
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _work(self) -> None:
        while self._close_by is None:
            # The exponent is bounded, since a float overflows after 1,024 failures.
            self._wake.wait(min(self._pause_s, self._each_s * 2.0 ** min(self._failures, 30)))
            self._wake.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        """Send the spans that wait. After a failure the remaining ones stay in the queue."""
        why = ""
        while self._spans and not self._too_late():
            batch = [self._spans.popleft() for _ in range(min(AT_ONCE, len(self._spans)))]
            why = self._export(batch)
            if why:
                self._failures += 1
                self._lose(len(batch), why)
                break
            self._failures = 0
        # `add_span` writes the counter in another thread; comparing it with the reported number needs no
        # lock.
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
        """Send the spans and return the reason why that failed, or an empty string."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [_built(span, self._resource) for span in batch]
            _complaints.clear()  # messages about malformed tracestates of producers are not export errors
            done = self._exporter.export(spans)
        except Exception as error:  # exporters raise on malformed responses, too
            return _without_secrets(repr(error))
        if done is SpanExportResult.SUCCESS:
            return ""
        return _without_secrets(_complaints[0] if _complaints else "tracing.endpoint does not take them")


def _without_secrets(why: str) -> str:
    """Return a message of a library without query, user name and password, since it may contain the whole
    URL."""
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
    """Handler that keeps the messages of OpenTelemetry, which would otherwise print one to stderr per failed
    batch."""

    def emit(self, record: logging.LogRecord) -> None:
        if len(_complaints) < 8:
            _complaints.append(" ".join(record.getMessage().split()))


def prepare(settings: Settings) -> None:
    """Import the OpenTelemetry modules, which takes long, before the event loop starts. Raises OSError if
    they are not installed."""
    if not settings.tracing.endpoint:
        return
    try:
        for module in _MODULES:
            import_module(module)
    except ImportError as error:
        raise OSError(MISSING) from error


@asynccontextmanager
async def tracing(settings: Settings, owner: str) -> AsyncIterator[Tracing | None]:
    """Provide tracing for the length of the block, or `None` without importing anything if no endpoint is
    configured.

    At the end of the block the queued spans are sent within CLOSE_TIMEOUT_S. Raises OSError if the extra
    `otel` is not installed.
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
    """Create an exporter for an OTLP/HTTP endpoint, and redirect its log messages to
    `_LibraryMessageHandler`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    library = logging.getLogger("opentelemetry")
    # Without propagation the root handler does not log the same message again.
    library.handlers, library.propagate = [_Complaints()], False
    headers = {}
    if url.credentials:
        headers["authorization"] = url.authorization
    return OTLPSpanExporter(endpoint_of(url), headers=headers, timeout=ANSWER_S)


def resource(pool: str, owner: str) -> Resource:
    """Build the resource that identifies this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take
    precedence."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    named = {
        "service.name": "batch-dispatcher",
        "service.namespace": pool,
        "service.version": __version__,
        "service.instance.id": owner,
    }
    # Later resources win in a merge: the environment comes last.
    return Resource.create().merge(Resource(named)).merge(OTELResourceDetector().detect())


def endpoint_of(url: SecretUrl) -> str:
    """Return the URL for spans, without credentials. A URL without a path gets the default path of
    OTLP/HTTP."""
    bare = url.bare
    return bare.rstrip("/") + "/v1/traces" if urlsplit(bare).path in ("", "/") else bare


def _teller() -> Callable[[Event, Mapping[str, Any]], None]:
    """Return a function that emits events in the thread of the event loop, with the sinks of the calling
    context."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()

    def tell(event: Event, fields: Mapping[str, Any]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: emit(event, **fields), context=context)
        except RuntimeError:  # the loop is closed: the process ends
            return

    return tell
