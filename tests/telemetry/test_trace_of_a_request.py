"""One trace, from the producer through a retry to the settled result, with the real loop and gateway."""

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

from dispatcher.app.service import open_queue
from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.headers import DROP_REASON
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.result import ErrorCode
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.forward import HttpGateway
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.ports import Queue, Submission
from dispatcher.queue.keys import QueueNames
from dispatcher.settings import Settings
from dispatcher.settings.load import parse_settings
from dispatcher.telemetry.events import add_sink
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.otlp import SpanSender
from dispatcher.telemetry.tracing import EndedSpan, Tracing
from tests.forward.scripted import Connection, Script, Server, options, serving
from tests.queue.servers import server
from tests.support import wait_until
from tests.telemetry.traces import QUEUE, in_memory, line_into

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
PRODUCER = """
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
"""A program that traces itself, and submits within a span of its own."""


def answers(*statuses: str) -> Script:
    """A gateway that answers so, over all connections, and 200 from then on."""
    left = list(statuses)

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            status = left.pop(0) if left else "200 OK"
            await connection.answer(status=status, headers=f"location: {'p' * 40}\r\n")

    return script


@asynccontextmanager
async def dispatching(queue: Queue, gateway: Server, tracing: Tracing | None) -> AsyncIterator[Dispatcher]:
    """The loop at work, with a reading that shows room."""
    limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
    at = asyncio.get_running_loop().time()
    limiter.add_reading(Reading(Signal.REQUESTS, at, at, 0.0, 0.0, 10), at)
    journal = Journal(Metrics())
    journal.tracing = tracing
    sender = HttpGateway(options(gateway.url))
    retry = RetryPolicy(base_s=0.01, max_s=0.02, max_attempts=3)
    dispatcher = Dispatcher(queue, sender, limiter, Options(retry), journal)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            dispatcher.drain(5.0)
    await sender.aclose()


def tracing_into(line: SpanSender, ratio: float = 1.0) -> Tracing:
    return Tracing(line.add_span, queue=QUEUE, gateway="http://gateway:8080", sample_ratio=ratio)


async def spans_of(
    script: Script, *, metadata: dict[str, str] | None = None, ratio: float = 1.0, created: int | None = None
) -> tuple[list[ReadableSpan], Server]:
    """What is traced of one request to a gateway that behaves so, and what the gateway saw."""
    exporter = in_memory()
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    member = encode_member("r-1", b'{"prompt":"secret"}', deadline, metadata=metadata or {}, created=created)
    await store.submit([Submission(member, float(deadline))])
    async with serving(script) as gateway:
        with line_into(exporter) as (line, _):
            queue = MemoryQueue(store, "a")
            async with dispatching(queue, gateway, tracing_into(line, ratio)):
                await wait_until(lambda: store.result_lists.get(store.default_result_list), what="a result")
    return list(exporter.get_finished_spans()), gateway


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.name == name), key=began)


def told(span: ReadableSpan) -> Mapping[str, Any]:
    """Its attributes."""
    assert span.attributes is not None
    return span.attributes


def began(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def ended(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


async def test_one_trace_leads_from_the_producer_through_a_retry_to_the_settled_result(
    tmp_path: Path,
) -> None:
    exporter = in_memory()
    names = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
    with server("redis", tmp_path / "redis") as redis, line_into(exporter) as (line, _):
        url = f"redis://127.0.0.1:{redis.port}"
        settings = parse_settings(
            f"gateway: {{url: http://gateway}}\nqueue: {{url: {url}}}\npool: {{name: qwen}}", {}
        )
        assert isinstance(settings, Settings), settings
        async with (
            serving(answers("503 Busy")) as gateway,
            open_queue(settings) as (queue, _),
            dispatching(queue, gateway, tracing_into(line)),
        ):
            producer = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PRODUCER, url, names.queue, names.result_list),
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _stderr = await asyncio.wait_for(producer.communicate(), 60)
    request_id, trace_id, status = json.loads(printed)
    spans = exporter.get_finished_spans()
    assert status == 200
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    assert all(told(span)["messaging.message.id"] == request_id for span in spans if span.name != "POST")
    processes, tries = named(spans, f"process {QUEUE}"), named(spans, "POST")
    waits = named(spans, f"wait {QUEUE}")
    (released,), (settled,) = named(spans, f"release {QUEUE}"), named(spans, f"settle {QUEUE}")
    assert len(spans) == 8

    (sent_by,) = {span.parent.span_id for span in (*waits, *processes) if span.parent}
    assert all(span.parent and span.parent.is_remote for span in (*waits, *processes))
    assert [link.context.span_id for span in processes for link in span.links] == [sent_by, sent_by]
    assert [span.kind for span in (*processes, *tries)] == [SpanKind.CONSUMER] * 2 + [SpanKind.CLIENT] * 2
    within = [span.context.span_id for span in processes]
    assert [span.parent.span_id if span.parent else None for span in (*tries, released, settled)] == [
        *within,
        *within,
    ]
    assert [told(span)["http.response.status_code"] for span in tries] == [503, 200]
    assert [span.status.status_code for span in tries] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [told(span).get("error.type") for span in tries] == ["503", None]
    assert told(tries[0])["url.full"] == f"{gateway.url}/v1/completions"
    assert [span.status.status_code for span in processes] == [StatusCode.UNSET] * 2
    for span in spans:
        assert began(span) <= ended(span)
    assert ended(waits[0]) <= began(tries[1])
    assert ended(tries[1]) <= ended(settled) <= ended(processes[1])
    seen = [received.headers["traceparent"] for received in gateway.received]
    assert seen == [f"00-{trace_id}-{span.context.span_id:016x}-01" for span in tries]


async def test_tries_of_a_request_without_a_producers_span_are_in_one_trace() -> None:
    spans, gateway = await spans_of(answers("503 Busy", "500 Oh"))
    assert len({span.context.trace_id for span in spans}) == 1
    assert len(named(spans, "POST")) == 3
    assert all(span.parent is None for span in named(spans, f"process {QUEUE}"))
    assert {received.headers["traceparent"].split("-")[1] for received in gateway.received} == {
        f"{spans[0].context.trace_id:032x}"
    }


async def test_a_failed_request_says_so_and_holds_nothing_of_what_it_carried() -> None:
    spans, _ = await spans_of(answers(*["500 Elsewhere"] * 9), metadata={"traceparent": PARENT})
    tries, processes = named(spans, "POST"), named(spans, f"process {QUEUE}")
    assert [told(span).get("http.request.resend_count") for span in tries] == [None, 1, 2]
    assert {told(span)["error.type"] for span in tries} == {"500"}
    assert told(processes[-1])["error.type"] == ErrorCode.RETRIES_EXHAUSTED
    assert len(named(spans, f"dead-letter {QUEUE}")) == 1
    text = " ".join(span.to_json() for span in spans)
    assert "secret" not in text
    assert "ppp" not in text, "what the gateway said is not ours to pass on"


async def test_a_request_that_is_cancelled_before_it_is_sent_ends_its_trace_all_the_same() -> None:
    exporter, store = in_memory(), MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    member = encode_member("r", b"{}", deadline, token="t", metadata={"traceparent": PARENT})
    await store.submit([Submission(member, float(deadline), "r", "t", deadline)])
    assert await store.cancel_request("r", "t")
    async with serving(answers()) as gateway:
        with line_into(exporter) as (line, _):
            async with dispatching(MemoryQueue(store, "a"), gateway, tracing_into(line)):
                await wait_until(lambda: store.result_lists.get(store.default_result_list), what="a result")
    assert not gateway.received
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {f"process {QUEUE}", f"settle {QUEUE}"}
    assert told(spans[f"process {QUEUE}"])["error.type"] == ErrorCode.CANCELLED


@pytest.mark.parametrize(
    ("metadata", "ratio", "traced", "passed_on"),
    [
        ({"traceparent": PARENT}, 0.0, True, None),
        ({"traceparent": PARENT[:-1] + "0"}, 1.0, False, PARENT[:-1] + "0"),
        ({}, 0.0, False, None),
    ],
    ids=["the producer's word", "not sampled by the producer", "none of a share of nothing"],
)
async def test_the_producer_decides_else_the_ratio(
    metadata: dict[str, str], ratio: float, traced: bool, passed_on: str | None
) -> None:
    spans, gateway = await spans_of(answers(), metadata=metadata, ratio=ratio)
    assert bool(spans) is traced
    sent = gateway.received[0].headers.get("traceparent")
    assert sent == (
        passed_on if not traced else f"{PARENT[:36]}{named(spans, 'POST')[0].context.span_id:016x}-01"
    )


async def test_about_the_share_that_was_asked_for_is_traced() -> None:
    with line_into(in_memory()) as (line, _):
        tracing = tracing_into(line, 0.25)
        followed = [
            tracing.start_delivery(0.0, request_id=f"r-{n}", seed=f"r-{n}", delivery=1) is not None
            for n in range(4000)
        ]
        assert followed == [
            tracing.start_delivery(9.0, request_id=f"r-{n}", seed=f"r-{n}", delivery=2) is not None
            for n in range(4000)
        ], "each delivery is decided alike"
    assert 850 < sum(followed) < 1150


@pytest.mark.parametrize(
    "traceparent",
    [
        "00-zz",
        PARENT.upper(),
        PARENT + "-more",
        PARENT + "\r\nx: y",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        "00-" + "a" * 60_000,
        "٠٠-" + "a" * 32 + "-" + "b" * 16 + "-01",
    ],
    ids=range(9),
)
async def test_a_hostile_traceparent_is_no_parent(traceparent: str) -> None:
    spans, gateway = await spans_of(answers(), metadata={"traceparent": traceparent, "tracestate": "k=v"})
    assert all(span.parent is None for span in named(spans, f"process {QUEUE}"))
    own = named(spans, "POST")[0].context
    assert own.trace_id not in (0, int("a" * 32, 16))
    assert gateway.received[0].headers["traceparent"] == f"00-{own.trace_id:032x}-{own.span_id:016x}-01"
    assert "tracestate" not in gateway.received[0].headers


@pytest.mark.parametrize(
    ("state", "kept"), [("k=v,other=1", True), ("x" * 513, False), ("a\r\nb: c", False), ("ü", False)]
)
async def test_tracestate_goes_along_where_it_is_one(state: str, kept: bool) -> None:
    spans, gateway = await spans_of(answers(), metadata={"traceparent": PARENT, "tracestate": state})
    assert (gateway.received[0].headers.get("tracestate") == state) is kept
    assert named(spans, "POST")[0].context.trace_state.to_header() == (state if kept else "")


@pytest.mark.parametrize("created", [-5, 0, 1, 10**12, 10**15, 2**62, 10**400], ids=lambda at: str(at)[:13])
async def test_a_hostile_time_of_creation_costs_no_span(created: int) -> None:
    spans, _ = await spans_of(answers(), created=created)
    assert len(spans) == 4
    assert all(0 <= began(span) <= ended(span) for span in spans)
    assert encode_spans(spans).SerializeToString()


async def test_a_defect_in_what_is_only_shown_costs_no_request_anything() -> None:
    def broken(_: EndedSpan) -> None:
        raise RuntimeError("no span")

    heard: list[str] = []
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    await store.submit([Submission(encode_member("r-1", b"{}", deadline), float(deadline))])
    tracing = Tracing(broken, queue=QUEUE, gateway="http://gateway:8080", sample_ratio=1.0)
    with add_sink(lambda event, fields: heard.append(f"{event.event_name} {fields.get('where')}")):
        async with serving(answers()) as gateway, dispatching(MemoryQueue(store, "a"), gateway, tracing):
            await wait_until(lambda: store.result_lists.get(store.default_result_list), what="a result")
    assert len(gateway.received) == 1
    told = [each for each in heard if each.startswith("internal-error")]
    assert told == ["internal-error journal: record_sent", "internal-error journal: record_completion"]


@pytest.mark.parametrize(
    ("status", "headers", "told"),
    [
        ("429 No", f"{DROP_REASON}: the prompt, sent back", "overloaded"),
        ("429 No", f"{DROP_REASON}: evicted; by=the prompt", "evicted"),
        ("429 No", f"{DROP_REASON}: rejected-saturated", "rejected-saturated"),
        ("302 Found", "location: it's the prompt", "redirected (302) to"),
    ],
)
async def test_why_a_try_failed_is_told_in_our_words(status: str, headers: str, told: str) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            await connection.answer(status=status, headers=f"{headers}\r\n")

    spans: list[EndedSpan] = []
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    deadline = int(time.time() + 600)
    await store.submit([Submission(encode_member("r-1", b"{}", deadline), float(deadline))])
    tracing = Tracing(spans.append, queue=QUEUE, gateway="http://gateway:8080", sample_ratio=1.0)
    async with serving(script) as gateway, dispatching(MemoryQueue(store, "a"), gateway, tracing):
        await wait_until(lambda: [span for span in spans if span.name == "POST"], what="a try")
    assert {span.error for span in spans if span.name == "POST"} == {told}
