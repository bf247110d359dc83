"""Traces: one for each request, from its producer to its result.

    send     PRODUCER   by the producer (`client` does it where its program traces)
    wait     INTERNAL   from the submission to the first try; later from the claim
    process  CONSUMER   one a delivery: from the claim to the end of the lease
      POST   CLIENT     the try; its context is what the gateway gets as traceparent
      settle CLIENT     the end of the lease handed to the queue (or release, or bury)

`wait` and `process` have the producer's span for a parent: a delivery is of one message, so nothing is lost
by it, and all of its tries, on whatever replica, are in one trace. (A link alone, which the conventions ask
for where messages come in batches, would scatter them.) Without a producer's span they share a trace id that
is made from the request. A trace is taken where the producer's was sampled, else by a share of trace ids;
one that is not taken costs a hash at the most, and its traceparent goes to the gateway as it came.

What a request's task does here is to fill in tuples and dicts; `otlp` does the rest, elsewhere. Nothing of
OpenTelemetry is imported here.
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
_WHY_CHARS = 200

Kind = Literal["INTERNAL", "PRODUCER", "CONSUMER", "CLIENT"]


class Parent(NamedTuple):
    """The span that another one hangs from; `span_id` 0: none."""

    trace_id: int
    span_id: int
    state: str = ""
    """Its tracestate."""


class EndedSpan(NamedTuple):
    """A span that has ended, as it waits to be sent. Times are Unix nanoseconds."""

    name: str
    kind: Kind
    parent: Parent
    span_id: int
    started_at: int
    ended_at: int
    attributes: Mapping[str, str | int]
    error: str | None = None
    """In words; None: it went well."""
    linked: bool = False
    """It is linked to its parent, too, as the conventions have it for what consumes a message."""


class Trail:
    """What is traced of one delivery of a request. Times are the loop's."""

    def __init__(self, tracing: Tracing, root: Parent, message: Mapping[str, str | int], at: float) -> None:
        self._tracing = tracing
        self._root = root
        self._message = message
        self._claimed_at = at
        self._within = Parent(root.trace_id, new_id(), root.state)
        self._try: dict[str, str | int] | None = None
        self._try_id = 0
        self._over = False
        self._sent_at = at

    @property
    def trace_id(self) -> str:
        return f"{self._root.trace_id:032x}"

    def sent(self, at: float, *, created: int, attempt: int, first: bool) -> None:
        """A try begins, in the task that calls this. `created`: Unix seconds by the producer's clock, or 0;
        `attempt`: which one it is, from 1; `first`: it was never delivered before."""
        tracing = self._tracing
        until = tracing.unix_ns(at)
        since = tracing.unix_ns(self._claimed_at)
        if first and created:
            since = min(max(0, created) * 1_000_000_000, until)
        tracing.record(
            EndedSpan(f"wait {tracing.queue}", "INTERNAL", self._root, new_id(), since, until, self._message)
        )
        self._sent_at = at
        self._try_id = new_id()
        self._try = {"http.request.method": "POST"}
        if attempt > 1:
            self._try["http.request.resend_count"] = attempt - 1
        _current.set(self)

    def going_to(self, url: str) -> str:
        """The try goes to this URL, which holds no credentials; the traceparent that goes with it."""
        if self._try is not None:
            self._try["url.full"] = url
        return f"00-{self._root.trace_id:032x}-{self._try_id:016x}-01"

    def tried(self, at: float, *, status: int | None, error: str | None, why: str = "") -> None:
        """What came of the try. `error`: what kind of failure it was, where it was one."""
        if self._try is None:
            return
        tracing, attributes = self._tracing, {**self._tracing.server, **self._try}
        if status is not None:
            attributes["http.response.status_code"] = status
        if error is not None:
            attributes["error.type"] = str(status) if status is not None and status >= 400 else error
        self._try = None
        sent_at, ended_at = tracing.unix_ns(self._sent_at), tracing.unix_ns(at)
        words = None if error is None else why[:_WHY_CHARS] or error
        tracing.record(
            EndedSpan("POST", "CLIENT", self._within, self._try_id, sent_at, ended_at, attributes, words)
        )

    def ended(self, since: float, at: float, *, step: str, error: str | None) -> None:
        """The lease has ended by this `step` of the queue, which was due `since` then. `error`: why the
        request, or the step, failed."""
        tracing = self._tracing
        if self._over:  # it was lost
            return
        if self._try is not None:  # it was cut
            since = at
            self.tried(at, status=None, error="cut")
        name, began, ended = f"{step} {tracing.queue}", tracing.unix_ns(since), tracing.unix_ns(at)
        settled = self._operation(step, "settle")
        tracing.record(EndedSpan(name, "CLIENT", self._within, new_id(), began, ended, settled))
        self._processed(at, error)

    def lost(self, at: float) -> None:
        """The lease is another's."""
        self._over = True
        self.tried(at, status=None, error="lost")
        self._processed(at, "lost")

    def _processed(self, at: float, error: str | None) -> None:
        tracing, span_id = self._tracing, self._within.span_id
        began, ended = tracing.unix_ns(self._claimed_at), tracing.unix_ns(at)
        attributes = self._operation("process", "process")
        if error is not None:
            attributes["error.type"] = error
        name = f"process {tracing.queue}"
        tracing.record(
            EndedSpan(name, "CONSUMER", self._root, span_id, began, ended, attributes, error, linked=True)
        )

    def _operation(self, name: str, kind: str) -> dict[str, str | int]:
        return {**self._message, "messaging.operation.name": name, "messaging.operation.type": kind}


_current: ContextVar[Trail | None] = ContextVar("trail", default=None)


def going_to(url: str) -> str:
    """The traceparent for the try of this task, which goes to `url`; empty where it is not traced."""
    trail = _current.get()
    return "" if trail is None else trail.going_to(url)


@contextmanager
def sending(queue: str, request_id: str, metadata: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """The producer's span for the length of the block, and the metadata that carry its context on.

    By the tracer that the program has set up for itself; where it has none, or the metadata hold a
    traceparent already, there is no span and they stay as they are.
    """
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


def new_id() -> int:
    return random.getrandbits(64) or 1


class Tracing:
    """Which requests are traced, and what is known of each to say."""

    def __init__(
        self,
        record: Callable[[EndedSpan], None],
        *,
        queue: str,
        gateway: str,
        sample_ratio: float,
        takes: Callable[[], bool] = lambda: True,
    ) -> None:
        self.queue = queue
        self.record = record
        self._takes = takes
        """Whether spans have a chance: else nothing is spent on them."""
        address = urlsplit(gateway)
        port = address.port or (443 if address.scheme == "https" else 80)
        self.server: Mapping[str, str | int] = {
            "server.address": address.hostname or "",
            "server.port": port,
        }
        self._bound = round(sample_ratio * (1 << 64))
        self._offset_ns = 0
        self._offset_at = float("-inf")

    def follow(
        self,
        at: float,
        *,
        request_id: str,
        seed: str,
        delivery: int,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Trail | None:
        """The trail of a delivery that was claimed at `at`; None: it is not traced.

        `traceparent`: the producer's, well-formed, or empty; then `seed`, which is the same for each delivery
        of the request, makes the trace id.
        """
        if not self._takes():
            return None
        if traceparent:
            _, trace_id, span_id, flags = traceparent.split("-")
            if not int(flags, 16) & _SAMPLED:
                return None
            root = Parent(int(trace_id, 16), int(span_id, 16), tracestate)
        else:
            made = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest(), "big")
            if made & _LOW_64 >= self._bound:
                return None
            root = Parent(made, 0)
        message: dict[str, str | int] = {
            "messaging.system": "redis",
            "messaging.destination.name": self.queue,
            "messaging.message.id": request_id,
            "batch_dispatcher.delivery": delivery,
        }
        return Trail(self, root, message, at)

    def unix_ns(self, at: float) -> int:
        """Loop time as Unix time. Clocks are compared once a second: a span never ends before it starts."""
        now = asyncio.get_running_loop().time()
        if now - self._offset_at >= 1.0:
            self._offset_ns, self._offset_at = time.time_ns() - int(now * 1e9), now
        return int(at * 1e9) + self._offset_ns
