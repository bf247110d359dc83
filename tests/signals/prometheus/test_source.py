"""Prometheus as a stand-in answers: every shape and every fault of its API."""

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

from dispatcher.core.limit.budget import Policy, Reason, Signal
from dispatcher.core.limit.picker_inference import FLUSH_S
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource, build_pool_query
from dispatcher.signals.readings import derive_readings
from tests.signals import fakes
from tests.signals.fakes import (
    GOOD,
    FakePrometheus,
    answering,
    fake_prometheus,
    json_answer,
    raw_server,
    row,
    vector,
)
from tests.signals.goldens import POLICY
from tests.support import free_port, wait_until


@pytest.fixture
async def prometheus() -> AsyncIterator[FakePrometheus]:
    async with fake_prometheus() as server:
        yield server


def source(url: str, **options: Any) -> PrometheusSource:
    access = PrometheusAddress(
        url, **{key: options.pop(key) for key in tuple(options) if key in PrometheusAddress.__slots__}
    )
    return PrometheusSource(
        access, "qwen", "default", **{"timeout_s": fakes.PATIENT_S, "max_age_s": 60, **options}
    )


async def poll(url: str, **options: Any) -> tuple[PoolView, ...] | ReadFailure:
    made = source(url, **options)
    try:
        return await made.poll()
    finally:
        await made.close()


async def unread(url: str, **options: Any) -> ReadFailure:
    seen = await poll(url, **options)
    assert isinstance(seen, ReadFailure), seen
    assert seen.reason is Reason.UNREADABLE
    assert seen.why.startswith("127.0.0.1: ")
    return seen


async def views(url: str, **options: Any) -> tuple[PoolView, ...]:
    seen = await poll(url, **options)
    assert not isinstance(seen, ReadFailure), seen
    return seen


async def test_a_reading_is_dated_by_the_age_that_the_server_reckons(prometheus: FakePrometheus) -> None:
    """Its clock may be minutes off: only the difference of two of its times counts."""
    prometheus.show(GOOD, age_s=7.5)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await views(prometheus.url)
    after = loop.time()
    assert before - 7.5 <= view.opened_at <= view.closed_at <= after - 7.5
    saturation, requests = derive_readings([view], "both", POLICY, "prometheus").readings
    assert (saturation.f_sys, saturation.f_epp, saturation.max_sys) == (0.4, 12 / 400, 400)
    assert requests.signal is Signal.REQUESTS
    assert requests.f_sys == pytest.approx(127 / 400)
    assert (requests.opened_at, requests.closed_at) == (view.opened_at - FLUSH_S, view.closed_at)


@pytest.mark.parametrize(
    ("took_s", "wider_s"),
    [(2.5, 2.5), (None, 0), (0.0, 0), (-3.0, 0), (math.nan, 0), (60.0, 7.5), (math.inf, 7.5)],
)
async def test_a_scrape_is_of_any_moment_until_its_end(
    prometheus: FakePrometheus, took_s: float | None, wider_s: float
) -> None:
    """Prometheus dates it by its start; it had ended when the answer came."""
    prometheus.show(GOOD, age_s=7.5, took_s=took_s)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await views(prometheus.url)
    after = loop.time()
    assert before - 7.5 <= view.opened_at <= after - 7.5
    assert before - 7.5 + wider_s <= view.closed_at <= after - 7.5 + wider_s


async def test_each_replica_s_scrape_took_its_own_time(prometheus: FakePrometheus) -> None:
    prometheus.show(GOOD, age_s=7.5, took_s=3.0)
    prometheus.show(GOOD, age_s=7.5, took_s=0.1, instance="10.0.0.2:9090")
    slow, fast = await views(prometheus.url)
    assert slow.closed_at - fast.closed_at == pytest.approx(2.9, abs=0.05)


async def test_samples_of_nearly_one_age_make_a_wider_window(prometheus: FakePrometheus) -> None:
    prometheus.show({"READY": 4.0}, age_s=1)
    prometheus.show({"SATURATION": 0.5}, age_s=1.9)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await views(prometheus.url)
    after = loop.time()
    assert before - 1.9 <= view.opened_at <= after - 1.9
    assert before - 1 <= view.closed_at <= after - 1
    assert (view.saturation, view.ready) == (0.5, 4)


async def test_a_series_of_an_earlier_scrape_is_absent(prometheus: FakePrometheus) -> None:
    """Prometheus goes on to answer with a series that left the page without a staleness mark."""
    # A value and its age have the same labels.
    pool: dict[str, Any] = {"name": "qwen", "inference_pool": "qwen"}
    prometheus.show({"READY": 4.0, "RUNNING": 30.25, "WAITING": 1.5}, age_s=1, **pool)
    prometheus.show({"SATURATION": 0.5, "QUEUED": 12.0, "SERVER_QUEUES": 9.0}, age_s=82, **pool)
    loop = asyncio.get_running_loop()
    before = loop.time()
    (view,) = await views(prometheus.url)
    assert before - 1 <= view.opened_at <= view.closed_at <= loop.time() - 1
    assert (view.saturation, view.queued, view.server_queued) == (None, None, None)
    assert (view.ready, view.running, view.waiting) == (4, 30.25, 1.5)
    verdict = derive_readings([view], "auto", POLICY, "prometheus")
    assert ([reading.signal for reading in verdict.readings], verdict.unread) == ([Signal.REQUESTS], ())


async def test_each_replica_has_a_newest_scrape_of_its_own(prometheus: FakePrometheus) -> None:
    """One is scraped some time after the other, so that its samples are not of an earlier scrape."""
    prometheus.show(GOOD, age_s=1)
    prometheus.show(GOOD | {"QUEUED": 3.0}, age_s=14, instance="10.0.0.2:9090")
    newer, older = await views(prometheus.url)
    assert (newer.queued, older.queued) == (12, 3)
    assert newer.opened_at - older.opened_at == pytest.approx(13, abs=0.05)


async def test_a_target_that_is_no_longer_scraped_keeps_its_values_and_its_age(
    prometheus: FakePrometheus,
) -> None:
    prometheus.show(GOOD, age_s=82)
    before = asyncio.get_running_loop().time()
    (view,) = await views(prometheus.url)
    assert view.closed_at <= asyncio.get_running_loop().time() - 82
    assert view.opened_at >= before - 82
    assert (view.saturation, view.queued, view.ready) == (0.4, 12, 4)


async def test_queues_of_the_model_servers_are_told_apart_from_what_runs(prometheus: FakePrometheus) -> None:
    prometheus.show(GOOD | {"SERVER_QUEUES": 9.0, "IN_FLIGHT": 120.0})
    (view,) = await views(prometheus.url)
    assert view.server_queued == 9
    (reading,) = derive_readings([view], "requests", POLICY, "prometheus").readings
    assert (reading.running, reading.waiting, reading.has_exact_counts) == (120 - 9, 9 + 12, False)


async def test_everything_is_asked_in_one_query(prometheus: FakePrometheus) -> None:
    prometheus.show(GOOD)
    await views(prometheus.url + "/prom/")
    (request,) = prometheus.requests
    assert request.path == "/prom/api/v1/query"
    assert request.query["query"] == build_pool_query("qwen", "default", 60)
    assert float(request.query["timeout"]) == fakes.PATIENT_S
    assert len(str(request.url)) < 8000  # what proxies in front commonly take


async def test_token_and_headers_go_along(prometheus: FakePrometheus, tmp_path: Path) -> None:
    prometheus.show(GOOD)
    token = tmp_path / "token"
    made = source(prometheus.url, token_file=str(token), headers={"X-Scope-OrgID": "batch"})
    for text in ("one", "two\n"):
        token.write_text(text)
        assert not isinstance(await made.poll(), ReadFailure)
    await made.close()
    sent = [
        (request.headers["Authorization"], request.headers["X-Scope-OrgID"])
        for request in prometheus.requests
    ]
    assert sent == [("Bearer one", "batch"), ("Bearer two", "batch")]


async def test_a_missing_token_file_is_a_sentence(prometheus: FakePrometheus, tmp_path: Path) -> None:
    assert (
        await unread(prometheus.url, token_file=str(tmp_path / "none"))
    ).hint == "signals.prometheus.token_file"
    (tmp_path / "empty").write_text("\n")
    assert (
        await unread(prometheus.url, token_file=str(tmp_path / "empty"))
    ).hint == "signals.prometheus.token_file"


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
async def test_tls_with_an_own_authority(tmp_path: Path) -> None:
    authority, server = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    async with fake_prometheus(tls=server) as prometheus:
        prometheus.show(GOOD)
        assert (await views(prometheus.url, ca_file=str(ca_file)))[0].ready == 4
        assert (await views(prometheus.url, insecure_skip_verify=True))[0].ready == 4
        assert "certificate" in (await unread(prometheus.url)).why
        assert (await unread(prometheus.url, ca_file=str(tmp_path / "none"))).why


# ── whose series ────────────────────────────────────────────────────────────────────────────────────────


async def test_replicas_are_told_apart_by_their_instance(prometheus: FakePrometheus) -> None:
    prometheus.show(GOOD, instance="10.0.0.1:9090", pod="epp-a")
    prometheus.show(GOOD | {"SATURATION": 0.7, "QUEUED": 3}, age_s=3, instance="10.0.0.2:9090", pod="epp-b")
    both = await views(prometheus.url)
    saturation, requests = derive_readings(both, "both", POLICY, "prometheus").readings
    assert (saturation.f_sys, saturation.f_epp) == (0.7, 15 / 400)
    assert requests.f_sys == pytest.approx(127 / 400)
    assert requests.f_epp == 15 / 400


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"namespace": ""}, "namespace"),
        ({"job": "pods", "instance": "10.0.0.9:9090"}, "job"),
        ({"cluster": "west", "instance": "10.0.0.9:9090"}, "cluster"),
        ({"prometheus_replica": "b"}, "2 times"),
    ],
)
async def test_a_pool_that_is_there_twice_is_refused(
    prometheus: FakePrometheus, other: dict[str, str], named: str
) -> None:
    """Two pools of one name, or one that is scraped twice: adding them up would be wrong either way."""
    given: dict[str, Any] = {**other}
    prometheus.show(GOOD)
    prometheus.show(GOOD, **given)
    seen = await unread(prometheus.url)
    assert named in seen.why
    assert seen.hint


async def test_an_unnamed_picker_beside_ours_is_not_ours(prometheus: FakePrometheus) -> None:
    """It runs with an endpoint selector in the same namespace; its detector has no pool label either."""
    prometheus.show(GOOD)
    stranger = {
        "job": "epp",
        "namespace": "default",
        "instance": "10.0.0.7:9090",
        "name": "",
        "inference_pool": "",
    }
    for family, value in GOOD.items():
        prometheus.rows.append(row(value * 9, {**stranger, "dispatcher_value": family}))
    prometheus.rows.append(
        row(0, {**stranger, "dispatcher_value": "STALE", "detector": "utilization-detector"})
    )
    prometheus.rows.append(row(99, {**stranger, "dispatcher_value": "IN_FLIGHT"}))
    (view,) = await views(prometheus.url)
    assert view.saturation == 0.4
    assert view.utilization_detectors == frozenset()
    assert view.in_flight is None


async def test_without_any_series_the_labels_are_named(prometheus: FakePrometheus) -> None:
    seen = await unread(prometheus.url)
    assert 'name="qwen"' in seen.why
    assert "default" in seen.why
    assert "scraped" in seen.hint


async def test_without_an_age_nothing_is_believed(prometheus: FakePrometheus) -> None:
    target = {"job": "epp", "instance": "a"}
    prometheus.rows = [row(4, {**target, "dispatcher_value": "READY"})]
    assert "age" in (await unread(prometheus.url)).why
    prometheus.rows.append(row("NaN", {**target, "dispatcher_age": "READY"}))
    assert "age" in (await unread(prometheus.url)).why


# ── own queries ─────────────────────────────────────────────────────────────────────────────────────────


def own(prometheus: FakePrometheus, default: list[dict[str, Any]], **values: list[float]) -> None:
    """Answer the known query with `default`, and the operator's own with one sample per value."""

    async def respond(request: web.Request) -> web.Response:
        if "dispatcher_own" not in request.query["query"]:
            return web.json_response(vector(default))
        rows = [
            {"metric": {"dispatcher_own": name}, "value": [1.0, str(value)]}
            for name, those in values.items()
            for value in those
        ]
        return web.json_response(vector(rows))

    prometheus.respond = respond


async def test_own_queries_make_a_reading_without_any_picker(prometheus: FakePrometheus) -> None:
    own(prometheus, [], saturation=[0.25], queued=[8], capacity=[64])
    queries = {"saturation": "a # why", "queued": "b", "capacity": "c"}
    (view,) = await views(prometheus.url, queries=queries)
    assert len(prometheus.requests) == 1
    assert "\n)" in prometheus.requests[0].query["query"]  # a comment at a query's end ends with its line
    assert float(prometheus.requests[0].query["lookback_delta"]) == 60
    verdict = derive_readings([view], "auto", Policy(), "prometheus")
    (reading,) = verdict.readings
    assert verdict.signals == (Signal.SATURATION,)
    assert (reading.f_sys, reading.f_epp, reading.max_sys) == (0.25, 8 / 64, 64)
    assert not reading.is_request_count
    assert 0 < reading.closed_at - reading.opened_at < 20


async def test_an_own_query_takes_the_place_of_one_series(prometheus: FakePrometheus) -> None:
    known = FakePrometheus()
    known.show(GOOD, age_s=2)
    known.show(GOOD, age_s=2, instance="b")
    own(prometheus, known.rows, queued=[7], capacity=[64])
    two = await views(prometheus.url, queries={"queued": "q", "capacity": "c"})
    reading, _ = derive_readings(two, "both", Policy(), "prometheus").readings
    assert (reading.f_sys, reading.f_epp, reading.max_sys) == (0.4, 7 / 64, 64)


@pytest.mark.parametrize("values", [[], [1.0, 2.0]])
async def test_an_own_query_must_give_one_series(prometheus: FakePrometheus, values: list[float]) -> None:
    own(prometheus, [], saturation=values)
    seen = await unread(prometheus.url, queries={"saturation": "x"})
    assert f"{len(values)} series" in seen.why
    assert "signals.prometheus.queries.saturation" in seen.hint


async def test_an_own_capacity_of_zero_is_no_endpoint(prometheus: FakePrometheus) -> None:
    own(prometheus, [], saturation=[0.0], capacity=[0.0])
    seen = await views(prometheus.url, queries={"saturation": "x", "capacity": "y"})
    (unread,) = derive_readings(seen, "auto", Policy(), "prometheus").unread
    assert unread.reason is Reason.NO_ENDPOINTS


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def whole_json(body: bytes) -> bytes:
    return JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body


BROKEN: dict[str, tuple[Any, str, str]] = {
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
    "not a list": (answering(json_answer(vector({}))), "not a list", ""),  # type: ignore[arg-type]
    "not samples": (answering(json_answer(vector([{"metric": {}}]))), "not an instant vector", ""),
    "no result": (
        answering(json_answer({"status": "success", "data": {"resultType": "vector"}})),
        "list",
        "",
    ),
    "warnings that are a number": (
        answering(json_answer({**vector([]), "warnings": 5})),
        "not Prometheus' JSON (Expected `array | null`, got `int` - at `$.warnings`)",
        "url",
    ),
    "an error that is a list": (answering(json_answer({"error": [1]}, 503)), "HTTP 503", ""),
    "nested deeply": (answering(whole_json(b"[" * 5_000)), "not Prometheus' JSON", "url"),
    "nested deeply inside": (
        answering(whole_json(b'{"status":"success","x":' + b"[" * 100_000)),
        "not Prometheus' JSON",
        "url",
    ),
    "a result nested deeply": (
        answering(
            whole_json(
                b'{"status":"success","data":{"resultType":"vector","result":[{"metric":'
                + b'{"a":' * 5_000
                + b"1"
                + b"}" * 5_000
                + b"}]}}"
            )
        ),
        "not Prometheus' JSON",
        "url",
    ),
    "labels that are lists": (
        answering(json_answer(vector([{"metric": {"pod": ["a"]}, "value": [1, "1"]}]))),
        "not an instant vector",
        "queries",
    ),
    "values that are numbers": (
        answering(json_answer(vector([{"metric": {}, "value": [1, 1]}]))),
        "not an instant vector",
        "queries",
    ),
    "numbers as Python has them": (
        answering(json_answer(vector([{"metric": {}, "value": [1, "1_0"]}]))),
        "not an instant vector",
        "queries",
    ),
    "series that nobody asked for": (
        answering(
            json_answer(vector([{"metric": {"dispatcher_value": "NOTHING"}, "value": [1, "1"]}])),
        ),
        "no series",
        "pool.name",
    ),
    "not numbers": (
        answering(json_answer(vector([{"metric": {}, "value": [1, "x"]}]))),
        "not an instant",
        "",
    ),
    "no labels": (
        answering(json_answer(vector([{"metric": None, "value": [1, "1"]}]))),
        "not an instant",
        "",
    ),
    "partial": (
        answering(json_answer({**vector([]), "warnings": ["store x is away"]})),
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


@pytest.mark.parametrize("fault", BROKEN)
async def test_every_fault_of_a_server_is_a_sentence(fault: str) -> None:
    talk, why, hint = BROKEN[fault]
    async with raw_server(talk) as port:
        seen = await unread(f"http://127.0.0.1:{port}", timeout_s=fakes.patience_s(fault))
    assert len("127.0.0.1: ") < len(seen.why) < 400
    assert why in seen.why
    assert hint in seen.hint


async def test_a_refused_connection_is_a_sentence() -> None:
    assert "refused" in (await unread(f"http://127.0.0.1:{free_port()}")).why


async def test_an_answer_may_not_outgrow_its_bound(prometheus: FakePrometheus) -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 20_000_000)

    prometheus.respond = respond
    assert "larger" in (await unread(prometheus.url)).why


async def test_a_hanging_server_is_not_asked_twice() -> None:
    """The library's thread may hang for ever; until it comes back, polls say so without asking."""
    talks = 0
    let_go = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talks
        talks += 1
        await reader.readuntil(b"\r\n\r\n")
        await let_go.wait()
        writer.write(json_answer(vector([])))
        await writer.drain()

    async with raw_server(talk) as port:
        made = source(f"http://127.0.0.1:{port}", timeout_s=0.5)
        # The thread's own time-out would free it: here it is held, as by a resolver that never answers.
        made._session._timeout_s = 30
        first = await made.poll()
        assert isinstance(first, ReadFailure)
        assert "no answer within 0.5 s" in first.why
        second = await made.poll()
        assert isinstance(second, ReadFailure)
        assert "hanging" in second.why
        assert talks == 1
        let_go.set()

        async def answered() -> bool:
            seen = await made.poll()
            return isinstance(seen, ReadFailure) and "no series" in seen.why

        await wait_until(answered, what="asked again once the thread is back")
        await made.close()


def test_a_process_ends_while_prometheus_hangs() -> None:
    """No thread of the library may hold up the shutdown, wherever it hangs."""
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
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=90, check=True)
    assert done.stdout == b"unreadable\n"
    assert done.stderr == b""
    assert time.monotonic() - began < 90
