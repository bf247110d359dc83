"""An OTLP endpoint that is well, and ones that refuse, hang, fail or come back: what that costs and tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from dispatcher.settings import SecretUrl
from dispatcher.telemetry import otlp
from dispatcher.telemetry.events import Event, add_sink
from dispatcher.telemetry.otlp import BATCH_SIZE, MAX_QUEUED_SPANS, create_exporter, get_traces_url
from dispatcher.telemetry.tracing import EndedSpan, ParentSpan, Tracing
from tests.support import free_port, wait_until, wait_until_sync
from tests.telemetry.traces import Collector, Told, line_into

ENOUGH = 3 * MAX_QUEUED_SPANS


def a_span(number: int = 1) -> EndedSpan:
    return EndedSpan("POST", "CLIENT", ParentSpan(0xA, 0xB, "k=v"), number, 10, 20, {"n": number})


@contextmanager
def endpoint(kind: str) -> Iterator[tuple[SpanExporter, Collector]]:
    collector = Collector({"fails": 500, "busy": 503, "hangs": None}.get(kind, 200))
    with collector.serve():
        if kind == "refuses":
            yield create_exporter(SecretUrl(f"http://127.0.0.1:{free_port()}")), collector
        else:
            yield create_exporter(SecretUrl(collector.url)), collector


def losses(told: Told) -> list[Event]:
    return [event for event, _ in list(told)]


def test_spans_arrive_once_each_with_credentials_where_otlp_has_them() -> None:
    collector = Collector()
    with collector.serve():
        url = SecretUrl(collector.url.replace("//", "//user:pa%20ss@"))
        with line_into(create_exporter(url)) as (line, told):
            for number in range(1, BATCH_SIZE + 11):
                line.add_span(a_span(number))
    spans = collector.spans()
    assert sorted(int.from_bytes(span.span_id, "big") for span in spans) == list(range(1, BATCH_SIZE + 11))
    (first, *_) = spans
    assert (first.name, first.start_time_unix_nano, first.end_time_unix_nano) == ("POST", 10, 20)
    assert (int.from_bytes(first.trace_id, "big"), int.from_bytes(first.parent_span_id, "big")) == (0xA, 0xB)
    assert first.trace_state == "k=v"
    assert set(collector.paths) == {"/v1/traces"}
    assert {each["authorization"] for each in collector.headers} == {"Basic dXNlcjpwYSBzcw=="}
    assert not told


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://u:p@c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_without_a_path_spans_go_where_otlp_has_them(url: str, where: str) -> None:
    assert get_traces_url(SecretUrl(url)) == where


@pytest.mark.parametrize("kind", ["refuses", "hangs", "fails", "busy"])
def test_an_endpoint_that_is_not_well_costs_spans_and_one_line_in_the_log(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with endpoint(kind) as (exporter, collector):
        with line_into(exporter) as (line, told):
            for number in range(1, ENOUGH + 1):
                line.add_span(a_span(number))
                assert len(line) <= MAX_QUEUED_SPANS
            wait_until_sync(lambda: losses(told), 20, what="a loss to be told")
            for number in range(1, ENOUGH + 1):
                line.add_span(a_span(number))
            assert len(line) <= MAX_QUEUED_SPANS
            began = time.monotonic()
            line.close()
            took_s = time.monotonic() - began
        assert took_s < 10, "the endpoint that hangs does so for 30 s"
        assert len(collector.paths) < 20, "it is left alone after a failure"
        assert losses(told) == [Event.TRACES_LOST]
        assert told[0][1]["why"]
        assert capfd.readouterr() == ("", ""), "OpenTelemetry itself says nothing beside our log"


def test_what_an_endpoint_says_is_in_the_event() -> None:
    with endpoint("fails") as (exporter, _), line_into(exporter) as (line, told):
        line.add_span(a_span())
        wait_until_sync(lambda: losses(told), what="a loss to be told")
    assert "500" in told[0][1]["why"]


def test_why_spans_are_lost_holds_no_secret_of_the_endpoints_url() -> None:
    url = SecretUrl(f"http://user:hunter2@127.0.0.1:{free_port()}/v1/traces?key=hunter3&a=b")
    with line_into(create_exporter(url), send_interval_s=0.01) as (line, told):
        line.add_span(a_span())
        wait_until_sync(lambda: losses(told), what="a loss to be told")
    assert "/v1/traces?" in told[0][1]["why"]
    assert "hunter" not in told[0][1]["why"]


def test_an_endpoint_that_came_back_is_told_with_what_was_lost() -> None:
    with (
        endpoint("fails") as (exporter, collector),
        line_into(exporter, send_interval_s=0.01, max_backoff_s=0.2) as (line, told),
    ):
        line.add_span(a_span(1))
        wait_until_sync(lambda: losses(told), what="a loss to be told")
        collector.status = 200
        line.add_span(a_span(2))
        wait_until_sync(lambda: len(told) == 2, what="it to be told that all is well")
    assert losses(told) == [Event.TRACES_LOST, Event.TRACES_RECOVERED]
    assert told[1][1]["lost"] == 1
    assert [int.from_bytes(span.span_id, "big") for span in collector.spans()] == [2]


async def test_nothing_is_spent_on_spans_that_would_be_lost() -> None:
    with (
        endpoint("fails") as (exporter, collector),
        line_into(exporter, send_interval_s=0.5, max_backoff_s=1.0) as (line, told),
    ):
        tracing = Tracing(
            line.add_span, queue="q", gateway="http://g", sample_ratio=1.0, can_accept=line.can_accept
        )

        def followed() -> bool:
            return tracing.start_delivery(0.0, request_id="r", seed="r", delivery=1) is not None

        assert followed()
        line.add_span(a_span())
        await wait_until(lambda: losses(told), what="a loss to be told")
        assert followed(), "it may be back before the line is full"
        while len(line) < MAX_QUEUED_SPANS:
            line.add_span(a_span())
        assert not followed()
        collector.status = 200
        await wait_until(followed, what="it to be back")


def test_an_exporter_that_raises_stops_nothing() -> None:
    class Broken(SpanExporter):
        def export(self, spans: object) -> None:  # type: ignore[override]
            raise RuntimeError("no " + "x" * 1000)

    with line_into(Broken(), send_interval_s=0.01, max_backoff_s=0.02) as (line, told):
        line.add_span(a_span())
        wait_until_sync(lambda: losses(told), what="a loss to be told")
        line.add_span(a_span())
        wait_until_sync(lambda: not len(line), what="the next one to be tried")
    assert told[0][1]["why"].startswith("RuntimeError('no xxx")
    assert len(told[0][1]["why"]) <= 200


async def test_what_is_told_comes_from_the_loops_own_thread() -> None:
    heard: list[tuple[str, bool]] = []
    with add_sink(lambda event, _: heard.append((event.event_name, asyncio.get_running_loop() is loop))):
        loop = asyncio.get_running_loop()
        tell = otlp._create_loop_emitter()
        await asyncio.to_thread(tell, Event.TRACES_LOST, {"lost": 1, "why": "x"})
        await asyncio.sleep(0)
    assert heard == [("traces-lost", True)]
