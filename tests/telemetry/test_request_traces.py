"""Traces of requests, from the producer through retries to the settled result, with the real dispatch loop
and gateway client."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import Queue
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.headers import DROP_REASON
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from dispatcher.service.service import open_queue
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.telemetry.events import add_sink
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.otlp import SpanSender
from dispatcher.telemetry.tracing import EndedSpan, Tracing
from dispatcher.wire_format import ErrorCode
from tests.gateway.scripted_server import Connection, Script, Server, options, serving
from tests.memory_queue import MemoryStore
from tests.queue.servers import server
from tests.support import wait_until
from tests.telemetry.trace_collector import QUEUE, create_memory_exporter, run_sender

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
PRODUCER_PROGRAM = """
import asyncio, json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from dispatcher.client import BatchClient

trace.set_tracer_provider(TracerProvider())

async def main():
    async with BatchClient(sys.argv[1], queue=sys.argv[2], results=sys.argv[3]) as client:
        with trace.get_tracer("job").start_as_current_span("job") as span:
            handle = await client.enqueue(b"{}", deadline=60)
        result = await client.result(handle)
        print(json.dumps([handle.id, f"{span.get_span_context().trace_id:032x}", result.status]))

asyncio.run(main())
"""
"""A program that creates its own traces and submits a request within a span."""


def answer_with(*statuses: str) -> Script:
    """Script of a gateway that answers with these statuses, over all connections, and with 200 after that."""
    remaining = list(statuses)

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            status = remaining.pop(0) if remaining else "200 OK"
            await connection.answer(status=status, headers=f"location: {'p' * 40}\r\n")

    return script


@asynccontextmanager
async def run_dispatcher(queue: Queue, gateway: Server, tracing: Tracing | None) -> AsyncIterator[Dispatcher]:
    """Run the dispatch loop with a reading that leaves room."""
    limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
    at = asyncio.get_running_loop().time()
    limiter.add_reading(Reading(Signal.REQUESTS, at, at, 0.0, 0.0, 10), at)
    journal = Journal(Metrics())
    journal.tracing = tracing
    http_gateway = HttpGateway(options(gateway.url))
    retry = RetryPolicy(base_s=0.01, max_s=0.02, max_attempts=3)
    dispatcher = Dispatcher(queue, http_gateway, limiter, Options(retry), journal)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            dispatcher.drain(5.0)
    await http_gateway.aclose()


def create_tracing(span_sender: SpanSender, ratio: float = 1.0) -> Tracing:
    return Tracing(span_sender.add_span, queue=QUEUE, gateway="http://gateway:8080", sample_ratio=ratio)


async def trace_request(
    script: Script, *, metadata: dict[str, str] | None = None, ratio: float = 1.0, created: int | None = None
) -> tuple[list[ReadableSpan], Server]:
    """Return the spans of one request to a gateway with this script, and the gateway."""
    exporter = create_memory_exporter()
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    member = encode_member("r-1", b'{"prompt":"secret"}', deadline, metadata=metadata or {}, created=created)
    await store.submit([Submission(member, float(deadline))])
    async with serving(script) as gateway:
        with run_sender(exporter) as (span_sender, _):
            queue = MemoryQueue(store, "a")
            async with run_dispatcher(queue, gateway, create_tracing(span_sender, ratio)):
                await wait_until(lambda: store.result_lists.get(store.default_result_list), what="a result")
    return list(exporter.get_finished_spans()), gateway


def find_spans(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.name == name), key=get_start)


def get_attributes(span: ReadableSpan) -> Mapping[str, Any]:
    """Return the attributes of a span."""
    assert span.attributes is not None
    return span.attributes


def get_start(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def get_end(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


async def test_one_trace_spans_producer_retry_and_settled_result(
    tmp_path: Path,
) -> None:
    exporter = create_memory_exporter()
    names = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
    with server("redis", tmp_path / "redis") as redis, run_sender(exporter) as (span_sender, _):
        url = f"redis://127.0.0.1:{redis.port}"
        settings = parse_settings(
            f"gateway: {{url: http://gateway}}\nqueue: {{url: {url}}}\npool: {{name: qwen}}", {}
        )
        assert isinstance(settings, Settings), settings
        async with (
            serving(answer_with("503 Busy")) as gateway,
            open_queue(settings) as (queue, _),
            run_dispatcher(queue, gateway, create_tracing(span_sender)),
        ):
            producer = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PRODUCER_PROGRAM, url, names.queue, names.result_list),
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _stderr = await asyncio.wait_for(producer.communicate(), 60)
    request_id, trace_id, status = json.loads(printed)
    spans = exporter.get_finished_spans()
    assert status == 200
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    assert all(
        get_attributes(span)["messaging.message.id"] == request_id for span in spans if span.name != "POST"
    )
    process_spans, attempts = find_spans(spans, f"process {QUEUE}"), find_spans(spans, "POST")
    wait_spans = find_spans(spans, f"wait {QUEUE}")
    (released,), (settled,) = find_spans(spans, f"release {QUEUE}"), find_spans(spans, f"settle {QUEUE}")
    assert len(spans) == 8

    (producer_span,) = {span.parent.span_id for span in (*wait_spans, *process_spans) if span.parent}
    assert all(span.parent and span.parent.is_remote for span in (*wait_spans, *process_spans))
    assert [link.context.span_id for span in process_spans for link in span.links] == [
        producer_span,
        producer_span,
    ]
    assert [span.kind for span in (*process_spans, *attempts)] == [SpanKind.CONSUMER] * 2 + [
        SpanKind.CLIENT
    ] * 2
    process_span_ids = [span.context.span_id for span in process_spans]
    assert [span.parent.span_id if span.parent else None for span in (*attempts, released, settled)] == [
        *process_span_ids,
        *process_span_ids,
    ]
    assert [get_attributes(span)["http.response.status_code"] for span in attempts] == [503, 200]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [get_attributes(span).get("error.type") for span in attempts] == ["503", None]
    assert get_attributes(attempts[0])["url.full"] == f"{gateway.url}/v1/completions"
    assert [span.status.status_code for span in process_spans] == [StatusCode.UNSET] * 2
    for span in spans:
        assert get_start(span) <= get_end(span)
    assert get_end(wait_spans[0]) <= get_start(attempts[1])
    assert get_end(attempts[1]) <= get_end(settled) <= get_end(process_spans[1])
    traceparents = [received.headers["traceparent"] for received in gateway.received]
    assert traceparents == [f"00-{trace_id}-{span.context.span_id:016x}-01" for span in attempts]


async def test_attempts_of_a_request_without_a_parent_share_one_trace() -> None:
    spans, gateway = await trace_request(answer_with("503 Busy", "500 Oh"))
    assert len({span.context.trace_id for span in spans}) == 1
    assert len(find_spans(spans, "POST")) == 3
    assert all(span.parent is None for span in find_spans(spans, f"process {QUEUE}"))
    assert {received.headers["traceparent"].split("-")[1] for received in gateway.received} == {
        f"{spans[0].context.trace_id:032x}"
    }


async def test_spans_of_a_failed_request_have_the_error_and_no_content() -> None:
    spans, _ = await trace_request(answer_with(*["500 Elsewhere"] * 9), metadata={"traceparent": TRACEPARENT})
    attempts, process_spans = find_spans(spans, "POST"), find_spans(spans, f"process {QUEUE}")
    assert [get_attributes(span).get("http.request.resend_count") for span in attempts] == [None, 1, 2]
    assert {get_attributes(span)["error.type"] for span in attempts} == {"500"}
    assert get_attributes(process_spans[-1])["error.type"] == ErrorCode.RETRIES_EXHAUSTED
    assert len(find_spans(spans, f"dead-letter {QUEUE}")) == 1
    text = " ".join(span.to_json() for span in spans)
    assert "secret" not in text
    assert "ppp" not in text, "headers of the gateway are not in the spans"


async def test_request_cancelled_before_it_is_sent_has_a_complete_trace() -> None:
    exporter, store = create_memory_exporter(), MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    member = encode_member("r", b"{}", deadline, token="t", metadata={"traceparent": TRACEPARENT})
    await store.submit([Submission(member, float(deadline), "r", "t", deadline)])
    assert await store.cancel_request("r", "t")
    async with serving(answer_with()) as gateway:
        with run_sender(exporter) as (span_sender, _):
            async with run_dispatcher(MemoryQueue(store, "a"), gateway, create_tracing(span_sender)):
                await wait_until(lambda: store.result_lists.get(store.default_result_list), what="a result")
    assert not gateway.received
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {f"process {QUEUE}", f"settle {QUEUE}"}
    assert get_attributes(spans[f"process {QUEUE}"])["error.type"] == ErrorCode.CANCELLED


@pytest.mark.parametrize(
    ("metadata", "ratio", "is_traced", "forwarded"),
    [
        ({"traceparent": TRACEPARENT}, 0.0, True, None),
        ({"traceparent": TRACEPARENT[:-1] + "0"}, 1.0, False, TRACEPARENT[:-1] + "0"),
        ({}, 0.0, False, None),
    ],
    ids=["sampled by the producer", "not sampled by the producer", "ratio of 0"],
)
async def test_producer_decides_on_sampling_and_otherwise_the_ratio(
    metadata: dict[str, str], ratio: float, is_traced: bool, forwarded: str | None
) -> None:
    spans, gateway = await trace_request(answer_with(), metadata=metadata, ratio=ratio)
    assert bool(spans) is is_traced
    sent = gateway.received[0].headers.get("traceparent")
    assert sent == (
        forwarded
        if not is_traced
        else f"{TRACEPARENT[:36]}{find_spans(spans, 'POST')[0].context.span_id:016x}-01"
    )


async def test_ratio_sets_the_share_of_traced_requests() -> None:
    with run_sender(create_memory_exporter()) as (span_sender, _):
        tracing = create_tracing(span_sender, 0.25)
        traced = [
            tracing.start_delivery(0.0, request_id=f"r-{n}", seed=f"r-{n}", delivery=1) is not None
            for n in range(4000)
        ]
        assert traced == [
            tracing.start_delivery(9.0, request_id=f"r-{n}", seed=f"r-{n}", delivery=2) is not None
            for n in range(4000)
        ], "each delivery of a request gets the same decision"
    assert 850 < sum(traced) < 1150


@pytest.mark.parametrize(
    "traceparent",
    [
        "00-zz",
        TRACEPARENT.upper(),
        TRACEPARENT + "-more",
        TRACEPARENT + "\r\nx: y",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        "00-" + "a" * 60_000,
        "٠٠-" + "a" * 32 + "-" + "b" * 16 + "-01",
    ],
    ids=range(9),
)
async def test_invalid_traceparent_is_ignored(traceparent: str) -> None:
    spans, gateway = await trace_request(
        answer_with(), metadata={"traceparent": traceparent, "tracestate": "k=v"}
    )
    assert all(span.parent is None for span in find_spans(spans, f"process {QUEUE}"))
    context = find_spans(spans, "POST")[0].context
    assert context.trace_id not in (0, int("a" * 32, 16))
    assert (
        gateway.received[0].headers["traceparent"] == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    )
    assert "tracestate" not in gateway.received[0].headers


@pytest.mark.parametrize(
    ("state", "is_forwarded"), [("k=v,other=1", True), ("x" * 513, False), ("a\r\nb: c", False), ("ü", False)]
)
async def test_valid_tracestate_is_forwarded(state: str, is_forwarded: bool) -> None:
    spans, gateway = await trace_request(
        answer_with(), metadata={"traceparent": TRACEPARENT, "tracestate": state}
    )
    assert (gateway.received[0].headers.get("tracestate") == state) is is_forwarded
    assert find_spans(spans, "POST")[0].context.trace_state.to_header() == (state if is_forwarded else "")


@pytest.mark.parametrize("created", [-5, 0, 1, 10**12, 10**15, 2**62, 10**400], ids=lambda at: str(at)[:13])
async def test_invalid_creation_time_loses_no_span(created: int) -> None:
    spans, _ = await trace_request(answer_with(), created=created)
    assert len(spans) == 4
    assert all(0 <= get_start(span) <= get_end(span) for span in spans)
    assert encode_spans(spans).SerializeToString()


async def test_defect_in_tracing_does_not_affect_the_request() -> None:
    def raise_error(_: EndedSpan) -> None:
        raise RuntimeError("no span")

    received_events: list[str] = []
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    await store.submit([Submission(encode_member("r-1", b"{}", deadline), float(deadline))])
    tracing = Tracing(raise_error, queue=QUEUE, gateway="http://gateway:8080", sample_ratio=1.0)
    with add_sink(lambda event, fields: received_events.append(f"{event.event_name} {fields.get('where')}")):
        async with (
            serving(answer_with()) as gateway,
            run_dispatcher(MemoryQueue(store, "a"), gateway, tracing),
        ):
            await wait_until(lambda: store.result_lists.get(store.default_result_list), what="a result")
    assert len(gateway.received) == 1
    # On a busy machine the first attempt may not get a connection in time. It is recorded as well.
    internal_errors = {each for each in received_events if each.startswith("internal-error")}
    assert internal_errors == {
        "internal-error journal: record_sent",
        "internal-error journal: record_completion",
    }


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        ("429 No", f"{DROP_REASON}: the prompt, sent back", "overloaded"),
        ("429 No", f"{DROP_REASON}: evicted; by=the prompt", "evicted"),
        ("429 No", f"{DROP_REASON}: rejected-saturated", "rejected-saturated"),
        ("302 Found", "location: it's the prompt", "maybe no gateway"),
    ],
)
async def test_error_of_a_span_does_not_repeat_the_text_of_the_gateway(
    status: str, headers: str, error: str
) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            await connection.answer(status=status, headers=f"{headers}\r\n")

    spans: list[EndedSpan] = []
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    await store.submit([Submission(encode_member("r-1", b"{}", deadline), float(deadline))])
    tracing = Tracing(spans.append, queue=QUEUE, gateway="http://gateway:8080", sample_ratio=1.0)
    async with serving(script) as gateway, run_dispatcher(MemoryQueue(store, "a"), gateway, tracing):
        await wait_until(lambda: [span for span in spans if span.name == "POST"], what="an attempt")
    assert {span.error for span in spans if span.name == "POST"} == {error}
