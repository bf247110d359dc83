"""Sending spans to an OTLP endpoint that works, refuses, hangs, fails or recovers: cost and events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from dispatcher.settings.values import SecretUrl
from dispatcher.telemetry import otlp
from dispatcher.telemetry.events import Event, add_sink
from dispatcher.telemetry.otlp import BATCH_SIZE, MAX_QUEUED_SPANS, create_exporter, get_traces_url
from dispatcher.telemetry.tracing import EndedSpan, ParentSpan, Tracing
from tests.support import free_port, wait_until, wait_until_sync
from tests.telemetry.trace_collector import Collector, EmittedEvents, run_sender

SPAN_COUNT = 3 * MAX_QUEUED_SPANS


def create_span(number: int = 1) -> EndedSpan:
    return EndedSpan("POST", "CLIENT", ParentSpan(0xA, 0xB, "k=v"), number, 10, 20, {"n": number})


@contextmanager
def run_endpoint(kind: str) -> Iterator[tuple[SpanExporter, Collector]]:
    collector = Collector({"fails": 500, "busy": 503, "hangs": None}.get(kind, 200))
    with collector.serve():
        if kind == "refuses":
            yield create_exporter(SecretUrl(f"http://127.0.0.1:{free_port()}")), collector
        else:
            yield create_exporter(SecretUrl(collector.url)), collector


def get_event_names(events: EmittedEvents) -> list[Event]:
    return [event for event, _ in list(events)]


def test_spans_arrive_once_with_credentials_in_the_header() -> None:
    collector = Collector()
    with collector.serve():
        url = SecretUrl(collector.url.replace("//", "//user:pa%20ss@"))
        with run_sender(create_exporter(url)) as (sender, events):
            for number in range(1, BATCH_SIZE + 11):
                sender.add_span(create_span(number))
    spans = collector.read_spans()
    assert sorted(int.from_bytes(span.span_id, "big") for span in spans) == list(range(1, BATCH_SIZE + 11))
    (first, *_) = spans
    assert (first.name, first.start_time_unix_nano, first.end_time_unix_nano) == ("POST", 10, 20)
    assert (int.from_bytes(first.trace_id, "big"), int.from_bytes(first.parent_span_id, "big")) == (0xA, 0xB)
    assert first.trace_state == "k=v"
    assert set(collector.paths) == {"/v1/traces"}
    assert {each["authorization"] for each in collector.headers} == {"Basic dXNlcjpwYSBzcw=="}
    assert not events


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://u:p@c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_url_without_a_path_gets_the_path_of_otlp(url: str, expected: str) -> None:
    assert get_traces_url(SecretUrl(url)) == expected


@pytest.mark.parametrize("kind", ["refuses", "hangs", "fails", "busy"])
def test_failing_endpoint_loses_spans_and_logs_one_event(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_endpoint(kind) as (exporter, collector):
        with run_sender(exporter) as (sender, events):
            for number in range(1, SPAN_COUNT + 1):
                sender.add_span(create_span(number))
                assert len(sender) <= MAX_QUEUED_SPANS
            wait_until_sync(lambda: get_event_names(events), 20, what="an event about a loss")
            for number in range(1, SPAN_COUNT + 1):
                sender.add_span(create_span(number))
            assert len(sender) <= MAX_QUEUED_SPANS
            started_at = time.monotonic()
            sender.close()
            duration_s = time.monotonic() - started_at
        assert duration_s < 10, "a hanging endpoint hangs for 30 s"
        assert len(collector.paths) < 20, "requests pause after a failure"
        assert get_event_names(events) == [Event.TRACES_LOST]
        assert events[0][1]["why"]
        assert capfd.readouterr() == ("", ""), "OpenTelemetry itself must not write to the log"


def test_answer_of_the_endpoint_is_in_the_event() -> None:
    with run_endpoint("fails") as (exporter, _), run_sender(exporter) as (sender, events):
        sender.add_span(create_span())
        wait_until_sync(lambda: get_event_names(events), what="an event about a loss")
    assert "500" in events[0][1]["why"]


def test_event_about_lost_spans_has_no_secret_of_the_url() -> None:
    url = SecretUrl(f"http://user:hunter2@127.0.0.1:{free_port()}/v1/traces?key=hunter3&a=b")
    with run_sender(create_exporter(url), send_interval_s=0.01) as (sender, events):
        sender.add_span(create_span())
        wait_until_sync(lambda: get_event_names(events), what="an event about a loss")
    assert "/v1/traces?" in events[0][1]["why"]
    assert "hunter" not in events[0][1]["why"]


def test_recovery_of_the_endpoint_is_logged_with_the_number_of_lost_spans() -> None:
    with (
        run_endpoint("fails") as (exporter, collector),
        run_sender(exporter, send_interval_s=0.01, max_backoff_s=0.2) as (sender, events),
    ):
        sender.add_span(create_span(1))
        wait_until_sync(lambda: get_event_names(events), what="an event about a loss")
        collector.status = 200
        sender.add_span(create_span(2))
        wait_until_sync(lambda: len(events) == 2, what="an event about the recovery")
    assert get_event_names(events) == [Event.TRACES_LOST, Event.TRACES_RECOVERED]
    assert events[1][1]["lost"] == 1
    assert [int.from_bytes(span.span_id, "big") for span in collector.read_spans()] == [2]


async def test_no_spans_are_created_while_they_would_be_lost() -> None:
    with (
        run_endpoint("fails") as (exporter, collector),
        run_sender(exporter, send_interval_s=0.5, max_backoff_s=1.0) as (sender, events),
    ):
        tracing = Tracing(
            sender.add_span, queue="q", gateway="http://g", sample_ratio=1.0, can_accept=sender.can_accept
        )

        def is_traced() -> bool:
            return tracing.start_delivery(0.0, request_id="r", seed="r", delivery=1) is not None

        assert is_traced()
        sender.add_span(create_span())
        await wait_until(lambda: get_event_names(events), what="an event about a loss")
        assert is_traced(), "the endpoint may recover before the queue is full"
        while len(sender) < MAX_QUEUED_SPANS:
            sender.add_span(create_span())
        assert not is_traced()
        collector.status = 200
        await wait_until(is_traced, what="the recovery of the endpoint")


def test_exporter_that_raises_does_not_stop_the_sender() -> None:
    class BrokenExporter(SpanExporter):
        def export(self, spans: object) -> None:  # type: ignore[override]
            raise RuntimeError("no " + "x" * 1000)

    with run_sender(BrokenExporter(), send_interval_s=0.01, max_backoff_s=0.02) as (sender, events):
        sender.add_span(create_span())
        wait_until_sync(lambda: get_event_names(events), what="an event about a loss")
        sender.add_span(create_span())
        wait_until_sync(lambda: not len(sender), what="the next one to be tried")
    assert events[0][1]["why"].startswith("RuntimeError('no xxx")
    assert len(events[0][1]["why"]) <= 200


async def test_events_are_emitted_in_the_thread_of_the_event_loop() -> None:
    received: list[tuple[str, bool]] = []
    with add_sink(lambda event, _: received.append((event.event_name, asyncio.get_running_loop() is loop))):
        loop = asyncio.get_running_loop()
        emit_in_loop = otlp._create_loop_emitter()
        await asyncio.to_thread(emit_in_loop, Event.TRACES_LOST, {"lost": 1, "why": "x"})
        await asyncio.sleep(0)
    assert received == [("traces-lost", True)]
