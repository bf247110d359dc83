"""Readings through Prometheus, with a fake server that has every shape and fault of its API."""

from __future__ import annotations

import asyncio
import math
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from dispatcher.limit.budget import KvUse, Policy, Reason, Signal
from dispatcher.limit.picker_inference import FLUSH_LATE_FACTOR, FLUSH_S
from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource, build_pool_query
from dispatcher.signals.readings import derive_readings
from tests.signals import fakes
from tests.signals.expected_readings import POLICY
from tests.signals.fakes import (
    HEALTHY_VALUES,
    FakePrometheus,
    answering,
    fake_prometheus,
    json_answer,
    raw_server,
    vector_answer,
    vector_row,
)
from tests.support import free_port, wait_until


@pytest.fixture
async def prometheus() -> AsyncIterator[FakePrometheus]:
    async with fake_prometheus() as server:
        yield server


def create_source(url: str, **options: Any) -> PrometheusSource:
    access = PrometheusAddress(
        url, **{key: options.pop(key) for key in tuple(options) if key in PrometheusAddress.__slots__}
    )
    return PrometheusSource(
        access, "qwen", "default", **{"timeout_s": fakes.ANSWER_TIMEOUT_S, "max_age_s": 60, **options}
    )


async def poll_once(url: str, **options: Any) -> tuple[PoolView, ...] | ReadFailure:
    created = create_source(url, **options)
    try:
        return await created.poll()
    finally:
        await created.close()


async def poll_failure(url: str, **options: Any) -> ReadFailure:
    result = await poll_once(url, **options)
    assert isinstance(result, ReadFailure), result
    assert result.reason is Reason.UNREADABLE
    assert result.why.startswith("127.0.0.1: ")
    return result


async def poll_views(url: str, **options: Any) -> tuple[PoolView, ...]:
    result = await poll_once(url, **options)
    assert not isinstance(result, ReadFailure), result
    return result


async def test_reading_is_dated_by_the_age_that_the_server_computes(prometheus: FakePrometheus) -> None:
    """The clock of the server may be wrong by minutes: only the difference of two of its times counts."""
    prometheus.add_target(HEALTHY_VALUES, age_s=7.5)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await poll_views(prometheus.url)
    after = loop.time()
    assert before - 7.5 <= view.opened_at <= view.closed_at <= after - 7.5
    saturation, requests = derive_readings([view], "both", POLICY, "prometheus").readings
    assert (saturation.f_sys, saturation.f_epp, saturation.max_sys) == (0.4, 12 / 400, 400)
    assert requests.signal is Signal.REQUESTS
    assert requests.f_sys == pytest.approx(127 / 400)
    assert (requests.opened_at, requests.closed_at) == (view.opened_at - FLUSH_S, view.closed_at)


@pytest.mark.parametrize(
    ("duration_s", "extra_width_s"),
    [(2.5, 2.5), (None, 0), (0.0, 0), (-3.0, 0), (math.nan, 0), (60.0, 7.5), (math.inf, 7.5)],
)
async def test_time_window_reaches_until_the_end_of_the_scrape(
    prometheus: FakePrometheus, duration_s: float | None, extra_width_s: float
) -> None:
    """Prometheus dates a scrape by its start; it had ended when the answer came."""
    prometheus.add_target(HEALTHY_VALUES, age_s=7.5, took_s=duration_s)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await poll_views(prometheus.url)
    after = loop.time()
    assert before - 7.5 <= view.opened_at <= after - 7.5
    assert before - 7.5 + extra_width_s <= view.closed_at <= after - 7.5 + extra_width_s


async def test_each_replica_has_its_own_scrape_duration(prometheus: FakePrometheus) -> None:
    prometheus.add_target(HEALTHY_VALUES, age_s=7.5, took_s=3.0)
    prometheus.add_target(HEALTHY_VALUES, age_s=7.5, took_s=0.1, instance="10.0.0.2:9090")
    slow, fast = await poll_views(prometheus.url)
    assert slow.closed_at - fast.closed_at == pytest.approx(2.9, abs=0.05)


async def test_samples_of_nearly_the_same_age_widen_the_time_window(prometheus: FakePrometheus) -> None:
    prometheus.add_target({"READY": 4.0}, age_s=1)
    prometheus.add_target({"SATURATION": 0.5}, age_s=1.9)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await poll_views(prometheus.url)
    after = loop.time()
    assert before - 1.9 <= view.opened_at <= after - 1.9
    assert before - 1 <= view.closed_at <= after - 1
    assert (view.saturation, view.ready) == (0.5, 4)


async def test_series_of_an_earlier_scrape_are_ignored(prometheus: FakePrometheus) -> None:
    """Prometheus still returns a series that left the page without a staleness marker."""
    # A value and its age need the same labels.
    pool: dict[str, Any] = {"name": "qwen", "inference_pool": "qwen"}
    prometheus.add_target({"READY": 4.0, "RUNNING": 30.25, "WAITING": 1.5}, age_s=1, **pool)
    prometheus.add_target({"SATURATION": 0.5, "QUEUED": 12.0, "SERVER_QUEUES": 9.0}, age_s=82, **pool)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await poll_views(prometheus.url)
    assert before - 1 <= view.opened_at <= view.closed_at <= loop.time() - 1
    assert (view.saturation, view.queued, view.server_queued) == (None, None, None)
    assert (view.ready, view.running, view.waiting) == (4, 30.25, 1.5)
    verdict = derive_readings([view], "auto", POLICY, "prometheus")
    assert ([reading.signal for reading in verdict.readings], verdict.unread) == ([Signal.REQUESTS], ())


async def test_newest_scrape_is_found_for_each_replica(prometheus: FakePrometheus) -> None:
    """Replicas are scraped at different times, which does not make the samples of one an earlier scrape."""
    prometheus.add_target(HEALTHY_VALUES, age_s=1)
    prometheus.add_target(HEALTHY_VALUES | {"QUEUED": 3.0}, age_s=14, instance="10.0.0.2:9090")
    newer, older = await poll_views(prometheus.url)
    assert (newer.queued, older.queued) == (12, 3)
    assert newer.opened_at - older.opened_at == pytest.approx(13, abs=0.05)


async def test_target_that_is_no_longer_scraped_keeps_its_values_and_their_age(
    prometheus: FakePrometheus,
) -> None:
    prometheus.add_target(HEALTHY_VALUES, age_s=82)
    before = asyncio.get_running_loop().time()
    (view,) = await poll_views(prometheus.url)
    assert view.closed_at <= asyncio.get_running_loop().time() - 82
    assert view.opened_at >= before - 82
    assert (view.saturation, view.queued, view.ready) == (0.4, 12, 4)


async def test_window_of_the_kv_use_reaches_back_to_the_flush_before_the_sample(
    prometheus: FakePrometheus,
) -> None:
    prometheus.add_target({**HEALTHY_VALUES, "KV_CACHE": 0.42}, age_s=7.5)
    views = await poll_views(prometheus.url)
    (view,) = views
    readings = derive_readings(views, "both", POLICY, "prometheus").readings
    expected = KvUse(0.42, None, 4, view.opened_at - FLUSH_S * FLUSH_LATE_FACTOR, view.closed_at)
    assert [each.kv_use for each in readings] == [expected, expected]


async def test_requests_queued_in_model_servers_are_not_counted_as_running(
    prometheus: FakePrometheus,
) -> None:
    prometheus.add_target(HEALTHY_VALUES | {"SERVER_QUEUES": 9.0, "IN_FLIGHT": 120.0})
    (view,) = await poll_views(prometheus.url)
    assert view.server_queued == 9
    (reading,) = derive_readings([view], "requests", POLICY, "prometheus").readings
    assert (reading.running, reading.waiting, reading.has_exact_counts) == (120 - 9, 9 + 12, False)


async def test_all_series_are_read_with_one_query(prometheus: FakePrometheus) -> None:
    prometheus.add_target(HEALTHY_VALUES)
    await poll_views(prometheus.url + "/prom/")
    (request,) = prometheus.requests
    assert request.path == "/prom/api/v1/query"
    assert request.query["query"] == build_pool_query("qwen", "default", 60)
    assert float(request.query["timeout"]) == fakes.ANSWER_TIMEOUT_S
    assert len(str(request.url)) < 8000  # common limit of proxies


async def test_token_and_headers_are_sent(prometheus: FakePrometheus, tmp_path: Path) -> None:
    prometheus.add_target(HEALTHY_VALUES)
    token = tmp_path / "token"
    created = create_source(prometheus.url, token_file=str(token), headers={"X-Scope-OrgID": "batch"})
    for text in ("one", "two\n"):
        token.write_text(text)
        assert not isinstance(await created.poll(), ReadFailure)
    await created.close()
    sent = [
        (request.headers["Authorization"], request.headers["X-Scope-OrgID"])
        for request in prometheus.requests
    ]
    assert sent == [("Bearer one", "batch"), ("Bearer two", "batch")]


async def test_unusable_token_file_is_a_failure_with_a_hint(
    prometheus: FakePrometheus, tmp_path: Path
) -> None:
    assert (
        await poll_failure(prometheus.url, token_file=str(tmp_path / "none"))
    ).hint == "signals.prometheus.token_file"
    (tmp_path / "empty").write_text("\n")
    assert (
        await poll_failure(prometheus.url, token_file=str(tmp_path / "empty"))
    ).hint == "signals.prometheus.token_file"


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
async def test_tls_with_a_private_authority(tmp_path: Path) -> None:
    authority, server = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    async with fake_prometheus(tls=server) as prometheus:
        prometheus.add_target(HEALTHY_VALUES)
        assert (await poll_views(prometheus.url, ca_file=str(ca_file)))[0].ready == 4
        assert (await poll_views(prometheus.url, insecure_skip_verify=True))[0].ready == 4
        assert "certificate" in (await poll_failure(prometheus.url)).why
        assert (await poll_failure(prometheus.url, ca_file=str(tmp_path / "none"))).why


# Which series belong to the pool


async def test_replicas_are_distinguished_by_their_instance(prometheus: FakePrometheus) -> None:
    prometheus.add_target(HEALTHY_VALUES, instance="10.0.0.1:9090", pod="epp-a")
    prometheus.add_target(
        HEALTHY_VALUES | {"SATURATION": 0.7, "QUEUED": 3}, age_s=3, instance="10.0.0.2:9090", pod="epp-b"
    )
    pool_views = await poll_views(prometheus.url)
    saturation, requests = derive_readings(pool_views, "both", POLICY, "prometheus").readings
    assert (saturation.f_sys, saturation.f_epp) == (0.7, 15 / 400)
    assert requests.f_sys == pytest.approx(127 / 400)
    assert requests.f_epp == 15 / 400


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"namespace": ""}, "namespace"),
        ({"job": "pods", "instance": "10.0.0.9:9090"}, "job"),
        ({"cluster": "west", "instance": "10.0.0.9:9090"}, "cluster"),
        ({"prometheus_replica": "b"}, "2 times"),
    ],
)
async def test_pool_with_two_sets_of_series_is_a_failure(
    prometheus: FakePrometheus, other: dict[str, str], expected: str
) -> None:
    """Two pools have the same name, or one pool is scraped twice: the sum would be wrong either way."""
    extra_labels: dict[str, Any] = {**other}
    prometheus.add_target(HEALTHY_VALUES)
    prometheus.add_target(HEALTHY_VALUES, **extra_labels)
    result = await poll_failure(prometheus.url)
    assert expected in result.why
    assert result.hint


async def test_picker_without_a_pool_name_is_ignored(prometheus: FakePrometheus) -> None:
    """It runs with an endpoint selector in the same namespace, and its detector has no pool label either."""
    prometheus.add_target(HEALTHY_VALUES)
    unnamed = {
        "job": "epp",
        "namespace": "default",
        "instance": "10.0.0.7:9090",
        "name": "",
        "inference_pool": "",
    }
    for family, value in HEALTHY_VALUES.items():
        prometheus.rows.append(vector_row(value * 9, {**unnamed, "dispatcher_value": family}))
    prometheus.rows.append(
        vector_row(0, {**unnamed, "dispatcher_value": "STALE", "detector": "utilization-detector"})
    )
    prometheus.rows.append(vector_row(99, {**unnamed, "dispatcher_value": "IN_FLIGHT"}))
    (view,) = await poll_views(prometheus.url)
    assert view.saturation == 0.4
    assert view.utilization_detectors == frozenset()
    assert view.in_flight is None


async def test_missing_series_are_reported_with_the_expected_labels(prometheus: FakePrometheus) -> None:
    result = await poll_failure(prometheus.url)
    assert 'name="qwen"' in result.why
    assert "default" in result.why
    assert "scraped" in result.hint


async def test_values_without_an_age_are_a_failure(prometheus: FakePrometheus) -> None:
    target = {"job": "epp", "instance": "a"}
    prometheus.rows = [vector_row(4, {**target, "dispatcher_value": "READY"})]
    assert "age" in (await poll_failure(prometheus.url)).why
    prometheus.rows.append(vector_row("NaN", {**target, "dispatcher_age": "READY"}))
    assert "age" in (await poll_failure(prometheus.url)).why


# Queries of the operator


def answer_own_queries(
    prometheus: FakePrometheus, default: list[dict[str, Any]], **values: list[float]
) -> None:
    """Answer the known query with `default`, and the operator's own queries with one sample per value."""

    async def respond(request: web.Request) -> web.Response:
        if "dispatcher_own" not in request.query["query"]:
            return web.json_response(vector_answer(default))
        rows = [
            {"metric": {"dispatcher_own": name}, "value": [1.0, str(value)]}
            for name, samples in values.items()
            for value in samples
        ]
        return web.json_response(vector_answer(rows))

    prometheus.respond = respond


async def test_own_queries_give_a_reading_without_a_picker(prometheus: FakePrometheus) -> None:
    answer_own_queries(prometheus, [], saturation=[0.25], queued=[8], capacity=[64])
    queries = {"saturation": "a # why", "queued": "b", "capacity": "c"}
    (view,) = await poll_views(prometheus.url, queries=queries)
    assert len(prometheus.requests) == 1
    assert (
        "\n)" in prometheus.requests[0].query["query"]
    )  # the line break ends a comment at the end of a query
    assert float(prometheus.requests[0].query["lookback_delta"]) == 60
    verdict = derive_readings([view], "auto", Policy(), "prometheus")
    (reading,) = verdict.readings
    assert verdict.signals == (Signal.SATURATION,)
    assert (reading.f_sys, reading.f_epp, reading.max_sys) == (0.25, 8 / 64, 64)
    assert not reading.is_request_count
    assert 0 < reading.closed_at - reading.opened_at < 20


async def test_own_query_replaces_one_series(prometheus: FakePrometheus) -> None:
    default_series = FakePrometheus()
    default_series.add_target(HEALTHY_VALUES, age_s=2)
    default_series.add_target(HEALTHY_VALUES, age_s=2, instance="b")
    answer_own_queries(prometheus, default_series.rows, queued=[7], capacity=[64])
    two = await poll_views(prometheus.url, queries={"queued": "q", "capacity": "c"})
    reading, _ = derive_readings(two, "both", Policy(), "prometheus").readings
    assert (reading.f_sys, reading.f_epp, reading.max_sys) == (0.4, 7 / 64, 64)


@pytest.mark.parametrize("values", [[], [1.0, 2.0]])
async def test_own_query_that_does_not_return_one_series_is_a_failure(
    prometheus: FakePrometheus, values: list[float]
) -> None:
    answer_own_queries(prometheus, [], saturation=values)
    result = await poll_failure(prometheus.url, queries={"saturation": "x"})
    assert f"{len(values)} series" in result.why
    assert "signals.prometheus.queries.saturation" in result.hint


async def test_own_capacity_of_zero_means_no_endpoints(prometheus: FakePrometheus) -> None:
    answer_own_queries(prometheus, [], saturation=[0.0], capacity=[0.0])
    result = await poll_views(prometheus.url, queries={"saturation": "x", "capacity": "y"})
    (poll_failure,) = derive_readings(result, "auto", Policy(), "prometheus").unread
    assert poll_failure.reason is Reason.NO_ENDPOINTS


# Faults

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def json_bytes_answer(body: bytes) -> bytes:
    return JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body


SERVER_FAULTS: dict[str, tuple[Any, str, str]] = {
    "reset": (fakes.resetting, "", ""),
    "hanging": (fakes.hanging, "", ""),
    "never-ending": (fakes.dripping(JSON + b"\r\n", 0.1), "", ""),
    "cut short": (answering(JSON + b"Content-Length: 999\r\n\r\n{"), "", ""),
    "not HTTP": (answering(b"nonsense\r\n\r\n"), "", ""),
    "not JSON": (answering(JSON + b"Content-Length: 3\r\n\r\n{{{"), "not Prometheus' JSON", "url"),
    "a web page": (answering(JSON + b"Content-Length: 6\r\n\r\n<html>"), "not Prometheus' JSON", "url"),
    "null": (answering(json_answer(None)), "not Prometheus' JSON", "url"),
    "an error": (answering(json_answer({"status": "error", "error": "boom"})), "not Prometheus' JSON", ""),
    "no data": (answering(json_answer({"status": "success"})), "not an instant vector", ""),
    "a scalar": (
        answering(json_answer({"status": "success", "data": {"resultType": "scalar", "result": [1, "2"]}})),
        "is scalar",
        "queries",
    ),
    "not a list": (answering(json_answer(vector_answer({}))), "not a list", ""),  # type: ignore[arg-type]
    "not samples": (answering(json_answer(vector_answer([{"metric": {}}]))), "not an instant vector", ""),
    "no result": (
        answering(json_answer({"status": "success", "data": {"resultType": "vector"}})),
        "list",
        "",
    ),
    "warnings that are a number": (
        answering(json_answer({**vector_answer([]), "warnings": 5})),
        "not Prometheus' JSON (Expected `array | null`, got `int` - at `$.warnings`)",
        "url",
    ),
    "an error that is a list": (answering(json_answer({"error": [1]}, 503)), "HTTP 503", ""),
    "nested deeply": (answering(json_bytes_answer(b"[" * 100_000)), "not Prometheus' JSON", "url"),
    "nested deeply inside": (
        answering(json_bytes_answer(b'{"status":"success","x":' + b"[" * 100_000)),
        "not Prometheus' JSON",
        "url",
    ),
    "a result nested deeply": (
        answering(
            json_bytes_answer(
                b'{"status":"success","data":{"resultType":"vector","result":[{"metric":'
                + b'{"a":' * 100_000
                + b"1"
                + b"}" * 100_000
                + b"}]}}"
            )
        ),
        "not Prometheus' JSON",
        "url",
    ),
    "labels that are lists": (
        answering(json_answer(vector_answer([{"metric": {"pod": ["a"]}, "value": [1, "1"]}]))),
        "not an instant vector",
        "queries",
    ),
    "values that are numbers": (
        answering(json_answer(vector_answer([{"metric": {}, "value": [1, 1]}]))),
        "not an instant vector",
        "queries",
    ),
    "numbers with underscores": (
        answering(json_answer(vector_answer([{"metric": {}, "value": [1, "1_0"]}]))),
        "not an instant vector",
        "queries",
    ),
    "series that nobody asked for": (
        answering(
            json_answer(vector_answer([{"metric": {"dispatcher_value": "NOTHING"}, "value": [1, "1"]}])),
        ),
        "no series",
        "pool.name",
    ),
    "not numbers": (
        answering(json_answer(vector_answer([{"metric": {}, "value": [1, "x"]}]))),
        "not an instant",
        "",
    ),
    "no labels": (
        answering(json_answer(vector_answer([{"metric": None, "value": [1, "1"]}]))),
        "not an instant",
        "",
    ),
    "partial": (
        answering(json_answer({**vector_answer([]), "warnings": ["store x is away"]})),
        "partial: store x is away",
        "",
    ),
    "a redirect": (
        answering(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
        "redirect",
        "url",
    ),
    "400": (
        answering(json_answer({"status": "error", "error": "parse error"}, 400)),
        "parse error",
        "queries",
    ),
    "401": (answering(json_answer({}, 401)), "HTTP 401", "token_file"),
    "403": (answering(json_answer({}, 403)), "HTTP 403", "X-Scope-OrgID"),
    "404": (answering(json_answer({}, 404)), "HTTP 404", "url"),
    "422": (answering(json_answer({"error": "too many samples"}, 422)), "too many samples", ""),
    "503": (answering(json_answer([], 503)), "HTTP 503", ""),
}


@pytest.mark.parametrize("fault", SERVER_FAULTS)
async def test_every_server_fault_is_a_failure_with_a_sentence(fault: str) -> None:
    handler, why, hint = SERVER_FAULTS[fault]
    async with raw_server(handler) as port:
        result = await poll_failure(f"http://127.0.0.1:{port}", timeout_s=fakes.timeout_for(fault))
    assert len("127.0.0.1: ") < len(result.why) < 400
    assert why in result.why
    assert hint in result.hint


async def test_refused_connection_is_a_failure_with_a_sentence() -> None:
    assert "refused" in (await poll_failure(f"http://127.0.0.1:{free_port()}")).why


async def test_answer_that_is_too_large_is_a_failure(prometheus: FakePrometheus) -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 20_000_000)

    prometheus.respond = respond
    assert "larger" in (await poll_failure(prometheus.url)).why


async def test_hanging_server_is_not_queried_again() -> None:
    """The thread of the library may hang for ever. Until it returns, polls fail without sending a query."""
    request_count = 0
    may_answer = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count
        request_count += 1
        await reader.readuntil(b"\r\n\r\n")
        await may_answer.wait()
        writer.write(json_answer(vector_answer([])))
        await writer.drain()

    async with raw_server(handler) as port:
        created = create_source(f"http://127.0.0.1:{port}", timeout_s=0.5)
        # The time-out of the thread would end it. Here it hangs longer, as with a resolver that never
        # answers.
        created._session._timeout_s = 30
        first = await created.poll()
        assert isinstance(first, ReadFailure)
        assert "no answer within 0.5 s" in first.why
        second = await created.poll()
        assert isinstance(second, ReadFailure)
        assert "hanging" in second.why
        assert request_count == 1
        may_answer.set()

        async def answered() -> bool:
            result = await created.poll()
            return isinstance(result, ReadFailure) and "no series" in result.why

        await wait_until(answered, what="the next query after the thread has returned")
        await created.close()


def test_process_ends_while_prometheus_hangs() -> None:
    """A hanging thread of the library does not delay the shutdown."""
    script = """
import asyncio, socket
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.prometheus.session import PrometheusAddress

async def main():
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    source = PrometheusSource(PrometheusAddress(url), "qwen", "default", timeout_s=0.3, max_age_s=60)
    source._session._timeout_s = 600
    print((await source.poll()).reason)
    await source.close()

asyncio.run(main())
"""
    started_at = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=90, check=True)
    assert done.stdout == b"unreadable\n"
    assert done.stderr == b""
    assert time.monotonic() - started_at < 90
