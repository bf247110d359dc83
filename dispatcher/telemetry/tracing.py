"""Traces of requests: one trace per request, from its producer to its result.

    send     PRODUCER   submission by the producer (`client`, if its program uses OpenTelemetry)
    wait     INTERNAL   from the submission to the first attempt; for later deliveries from the claim
    process  CONSUMER   one delivery: from the claim to the end of the lease
      POST   CLIENT     one attempt; the gateway receives its context as traceparent
      settle CLIENT     the completion sent to the queue (or release, or dead-letter)

The span of the producer is the parent of `wait` and `process`. All attempts of a request are therefore in one
trace, on whatever replica they run. The OpenTelemetry conventions suggest only a link for messages received
in batches, which would scatter them over several traces; here each delivery is of one message. Without a span
of the producer the trace id is derived from the request.

A request is traced if its producer's span was sampled or, without one, if its trace id is within the sample
ratio. An untraced request costs at most a hash, and its traceparent is forwarded unchanged.

The tasks of requests only fill in tuples and dicts; the module `otlp` builds and sends the spans. This module
does not import OpenTelemetry.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from dispatcher import __version__

_LOW_64 = (1 << 64) - 1
_SAMPLED = 1
_MAX_REASON_CHARS = 200

SpanKind = Literal["INTERNAL", "PRODUCER", "CONSUMER", "CLIENT"]


class ParentSpan(NamedTuple):
    """Ids of a parent span. `span_id` is 0 if there is none."""

    trace_id: int
    span_id: int
    tracestate: str = ""
    """Value of the header tracestate."""


class EndedSpan(NamedTuple):
    """Ended span that waits to be sent. Times are Unix nanoseconds."""

    name: str
    kind: SpanKind
    parent: ParentSpan
    span_id: int
    started_at: int
    ended_at: int
    attributes: Mapping[str, str | int]
    error: str | None = None
    """Description of the error, or `None` if there was none."""
    is_linked: bool = False
    """True if the span also has a link to its parent, as the conventions ask of spans that consume a
    message."""


class DeliveryTrace:
    """Trace of one delivery of a request. Times are those of the event loop."""

    def __init__(
        self, tracing: Tracing, root: ParentSpan, message: Mapping[str, str | int], claimed_at: float
    ) -> None:
        self._tracing = tracing
        self._root = root
        self._message_attributes = message
        self._claimed_at = claimed_at
        self._process_span = ParentSpan(root.trace_id, new_span_id(), root.tracestate)
        self._attempt_attributes: dict[str, str | int] | None = None
        self._attempt_span_id = 0
        self._has_ended = False
        self._sent_at = claimed_at

    @property
    def trace_id(self) -> str:
        return f"{self._root.trace_id:032x}"

    def start_attempt(self, at: float, *, created: int, attempt: int, is_first_delivery: bool) -> None:
        """Start an attempt in the calling task.

        `created` is the Unix time at which the producer created the request, or 0. `attempt` counts from 1.
        `is_first_delivery` is True if the request was never delivered before.
        """
        tracing = self._tracing
        until = tracing.to_unix_ns(at)
        since = tracing.to_unix_ns(self._claimed_at)
        if is_first_delivery and created:
            # The clock of the producer may be ahead: a span must not start after its end.
            since = min(max(0, created) * 1_000_000_000, until)
        tracing.record(
            EndedSpan(
                f"wait {tracing.queue}",
                "INTERNAL",
                self._root,
                new_span_id(),
                since,
                until,
                self._message_attributes,
            )
        )
        self._sent_at = at
        self._attempt_span_id = new_span_id()
        self._attempt_attributes = {"http.request.method": "POST"}
        if attempt > 1:
            self._attempt_attributes["http.request.resend_count"] = attempt - 1
        # Set in the task of the attempt, so that the transport finds the trace without a parameter.
        _current_trace.set(self)

    def make_traceparent(self, url: str) -> str:
        """Record the URL of the attempt, which must not contain credentials, and return the traceparent to
        send."""
        if self._attempt_attributes is not None:
            self._attempt_attributes["url.full"] = url
        return f"00-{self._root.trace_id:032x}-{self._attempt_span_id:016x}-01"

    def end_attempt(self, at: float, *, status: int | None, error: str | None, why: str = "") -> None:
        """End the attempt. `error` is the kind of the failure, or `None`."""
        if self._attempt_attributes is None:
            return
        tracing, attributes = self._tracing, {**self._tracing.server, **self._attempt_attributes}
        if status is not None:
            attributes["http.response.status_code"] = status
        if error is not None:
            attributes["error.type"] = str(status) if status is not None and status >= 400 else error
        self._attempt_attributes = None
        sent_at, ended_at = tracing.to_unix_ns(self._sent_at), tracing.to_unix_ns(at)
        words = None if error is None else why[:_MAX_REASON_CHARS] or error
        tracing.record(
            EndedSpan(
                "POST",
                "CLIENT",
                self._process_span,
                self._attempt_span_id,
                sent_at,
                ended_at,
                attributes,
                words,
            )
        )

    def end_delivery(self, since: float, at: float, *, step: str, error: str | None) -> None:
        """End the delivery with the queue operation `step`, which was due at `since`. `error` is the reason
        why the request or the operation failed."""
        tracing = self._tracing
        if self._has_ended:  # `mark_lost` ended the delivery before
            return
        if self._attempt_attributes is not None:  # the attempt was cancelled: it ended without an outcome
            since = at
            self.end_attempt(at, status=None, error="cut")
        name, began, ended = f"{step} {tracing.queue}", tracing.to_unix_ns(since), tracing.to_unix_ns(at)
        settle_attributes = self._make_operation_attributes(step, "settle")
        tracing.record(
            EndedSpan(name, "CLIENT", self._process_span, new_span_id(), began, ended, settle_attributes)
        )
        self._record_process_span(at, error)

    def mark_lost(self, at: float) -> None:
        """End the delivery because the lease now belongs to another owner."""
        self._has_ended = True
        self.end_attempt(at, status=None, error="lost")
        self._record_process_span(at, "lost")

    def _record_process_span(self, at: float, error: str | None) -> None:
        tracing, span_id = self._tracing, self._process_span.span_id
        began, ended = tracing.to_unix_ns(self._claimed_at), tracing.to_unix_ns(at)
        attributes = self._make_operation_attributes("process", "process")
        if error is not None:
            attributes["error.type"] = error
        name = f"process {tracing.queue}"
        tracing.record(
            EndedSpan(name, "CONSUMER", self._root, span_id, began, ended, attributes, error, is_linked=True)
        )

    def _make_operation_attributes(self, name: str, kind: str) -> dict[str, str | int]:
        return {
            **self._message_attributes,
            "messaging.operation.name": name,
            "messaging.operation.type": kind,
        }


_current_trace: ContextVar[DeliveryTrace | None] = ContextVar("trail", default=None)


def make_traceparent(url: str) -> str:
    """Return the traceparent for the attempt of the current task to `url`, or an empty string if it is not
    traced."""
    trace = _current_trace.get()
    return "" if trace is None else trace.make_traceparent(url)


@contextmanager
def trace_submission(queue: str, request_id: str, metadata: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Record the span of the producer around the block, and yield the metadata with its context.

    The span is made by the tracer that the calling program has set up. Without a tracer, or if the metadata
    already have a traceparent, no span is made and the metadata stay unchanged.
    """
    # Not imported here: a program that traces has imported it.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or "traceparent" in metadata:
        yield metadata
        return
    attributes = {
        "messaging.system": "redis",
        "messaging.destination.name": queue,
        "messaging.message.id": request_id,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    tracer = trace.get_tracer("batch-dispatcher", __version__)
    with tracer.start_as_current_span(
        f"send {queue}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    ) as span:
        context = span.get_span_context()
        if context.is_valid:
            ids = f"{context.trace_id:032x}-{context.span_id:016x}"
            flags = context.trace_flags & _SAMPLED
            metadata = {**metadata, "traceparent": f"00-{ids}-{flags:02x}"}
            if context.trace_state:
                metadata["tracestate"] = context.trace_state.to_header()
        yield metadata


def new_span_id() -> int:
    # The id 0 is invalid.
    return random.getrandbits(64) or 1


class Tracing:
    """Decision which requests are traced, and the attributes that all their spans share."""

    def __init__(
        self,
        record: Callable[[EndedSpan], None],
        *,
        queue: str,
        gateway: str,
        sample_ratio: float,
        can_accept: Callable[[], bool] = lambda: True,
    ) -> None:
        self.queue = queue
        self.record = record
        self._can_accept = can_accept
        """Function that returns False while new spans would be lost, so that none are built."""
        address = urlsplit(gateway)
        port = address.port or (443 if address.scheme == "https" else 80)
        self.server: Mapping[str, str | int] = {
            "server.address": address.hostname or "",
            "server.port": port,
        }
        self._sample_bound = round(sample_ratio * (1 << 64))
        self._offset_ns = 0
        self._offset_at = float("-inf")

    def start_delivery(
        self,
        claimed_at: float,
        *,
        request_id: str,
        seed: str,
        delivery: int,
        traceparent: str = "",
        tracestate: str = "",
    ) -> DeliveryTrace | None:
        """Start the trace of a delivery claimed at `claimed_at`, or return `None` if the request is not
        traced.

        `traceparent` is that of the producer, well-formed or empty. If it is empty the trace id is derived
        from `seed`, which is the same for each delivery of the request.
        """
        if not self._can_accept():
            return None
        if traceparent:
            # The flags of the producer decide, so that a trace is complete or absent.
            _, trace_id, span_id, flags = traceparent.split("-")
            if not int(flags, 16) & _SAMPLED:
                return None
            root = ParentSpan(int(trace_id, 16), int(span_id, 16), tracestate)
        else:
            id_hash = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest(), "big")
            # The low 64 bits decide, as in OpenTelemetry's TraceIdRatioBased sampler.
            if id_hash & _LOW_64 >= self._sample_bound:
                return None
            root = ParentSpan(id_hash, 0)
        message: dict[str, str | int] = {
            "messaging.system": "redis",
            "messaging.destination.name": self.queue,
            "messaging.message.id": request_id,
            "batch_dispatcher.delivery": delivery,
        }
        return DeliveryTrace(self, root, message, claimed_at)

    def to_unix_ns(self, at: float) -> int:
        """Convert a time of the event loop to Unix nanoseconds. The clocks are compared at most once per
        second, so that a span cannot end before it starts when the system clock is adjusted."""
        now = asyncio.get_running_loop().time()
        if now - self._offset_at >= 1.0:
            self._offset_ns, self._offset_at = time.time_ns() - int(now * 1e9), now
        return int(at * 1e9) + self._offset_ns
