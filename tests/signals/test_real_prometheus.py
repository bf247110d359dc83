"""Readings through a real Prometheus server that scrapes a fake endpoint picker."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from dispatcher.limit.budget import Policy, Reason, Signal
from dispatcher.limit.poll import Poll, ReadFailure
from dispatcher.limit.realtime_impact import ReplicaHistograms, compute_quantile
from dispatcher.settings.signals import SignalsSettings
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView, build_view
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource, build_pool_query
from dispatcher.signals.readings import derive_readings
from tests.paths import DOCS
from tests.signals.expected_readings import EXPECTED_READINGS, POLICY
from tests.signals.fakes import PAGES, FakeEpp, fake_epp, read_page, serving
from tests.support import free_port, require_tool, running_process, wait_until

SLOW_ANSWER_S = 0.6
DATE_TOLERANCE_S = 0.005
"""Prometheus dates in milliseconds, and shifts a date by up to 2 ms to keep the scrape interval even."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """A scrape as Prometheus recorded it: its start, by the clock of the event loop, and its duration."""

    at: float
    duration_s: float


@dataclass
class PrometheusServer:
    """A Prometheus process with a configuration that can be rewritten."""

    directory: Path
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def configure(self, jobs: str) -> None:
        (self.directory / "prometheus.yml").write_text(f"scrape_configs:\n{jobs}")

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[int]:
        """Run the server on its existing data, and yield its process id."""
        command = [
            require_tool("prometheus"),
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with running_process(*command, stop_s=20) as process:
            yield process.pid

    async def read_scrapes(self, namespace: str = "default") -> list[Scrape]:
        """Return the scrapes of the last ten minutes, oldest first. Prometheus uses the same machine clock
        as the test."""
        query = f'scrape_duration_seconds{{namespace="{namespace}"}}[10m]'
        found = await self.run_query(query)
        unix_offset = time.time() - asyncio.get_running_loop().time()
        return [
            Scrape(at - unix_offset, float(duration)) for series in found for at, duration in series["values"]
        ]

    async def run_query(self, query: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}/api/v1/query", params={"query": query}) as answer,
        ):
            rows: list[dict[str, Any]] = (await answer.json())["data"]["result"]
            return rows

    def create_source(
        self,
        namespace: str = "default",
        max_age_s: float = 60,
        *,
        has_objective: bool = False,
        **queries: str,
    ) -> PrometheusSource:
        return PrometheusSource(
            PrometheusAddress(self.url),
            "qwen",
            namespace,
            timeout_s=5,
            max_age_s=max_age_s,
            queries=queries,
            has_objective=has_objective,
        )


def scrape_job(
    epp_port: int, interval_s: float, name: str = "epp", path: str = "/metrics", namespace: str = "default"
) -> str:
    return (
        f"- job_name: {name}\n  scrape_interval: {interval_s:g}s\n  scrape_timeout: 1s\n"
        f"  metrics_path: {path}\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{epp_port}'], labels: {{namespace: {namespace}}}}}]\n"
    )


@pytest.fixture
def server(tmp_path: Path) -> PrometheusServer:
    return PrometheusServer(tmp_path)


async def wait_for_views(source: PrometheusSource, timeout_s: float = 30) -> tuple[PoolView, ...]:
    """Wait until the source can be read, and return its views."""

    async def poll() -> tuple[PoolView, ...] | None:
        result = await source.poll()
        return None if isinstance(result, ReadFailure) else result

    views = await wait_until(poll, timeout_s, what="Prometheus shows the pool", every_s=0.1)
    assert views is not None
    return views


@pytest.mark.parametrize("intervals_s", [(1, 5), pytest.param((15,), marks=pytest.mark.long)], ids=str)
async def test_view_is_dated_by_its_scrape(server: PrometheusServer, intervals_s: tuple[int, ...]) -> None:
    """At each moment of the interval, the view has the time of the newest scrape."""
    async with contextlib.AsyncExitStack() as stack:
        epps = {interval_s: await stack.enter_async_context(fake_epp()) for interval_s in intervals_s}
        jobs = [
            scrape_job(epp.port, interval_s, f"e{interval_s}", namespace=f"n{interval_s}")
            for interval_s, epp in epps.items()
        ]
        server.configure("".join(jobs))
        await stack.enter_async_context(server.run())
        async with asyncio.TaskGroup() as group:
            for interval_s, epp in epps.items():
                group.create_task(
                    assert_views_are_dated_by_scrapes(server, f"n{interval_s}", epp, interval_s)
                )


async def assert_views_are_dated_by_scrapes(
    server: PrometheusServer, namespace: str, epp: FakeEpp, interval_s: float
) -> None:
    """Compare the views with the scrapes that Prometheus recorded, so that delays of either process do not
    matter."""
    loop, source = asyncio.get_running_loop(), server.create_source(namespace)
    await wait_for_views(source, 30 + 2 * interval_s)
    until = loop.time() + 1.5 * interval_s
    checked_scrapes: list[Scrape] = []
    while loop.time() < until or len(checked_scrapes) < 5:
        newest = (await server.read_scrapes(namespace))[-1]
        began = loop.time()
        (view,) = await wait_for_views(source)
        # The window contains the newest scrape, and is no longer than the query and the scrape together.
        recent_scrapes = [
            scrape
            for scrape in await server.read_scrapes(namespace)
            if scrape.at >= newest.at - DATE_TOLERANCE_S
        ]
        assert any(
            view.opened_at - DATE_TOLERANCE_S <= each.at <= view.closed_at + DATE_TOLERANCE_S
            for each in recent_scrapes
        )
        duration_s = max(scrape.duration_s for scrape in recent_scrapes)
        assert view.closed_at - view.opened_at <= loop.time() - began + duration_s
        assert (view.address, view.started_at) == (f"127.0.0.1:{epp.port}", 1.76386e9)
        checked_scrapes.append(newest)
        _, requests = derive_readings([view], "both", Policy(), "prometheus").readings
        assert requests.opened_at == view.opened_at
        await asyncio.sleep(interval_s / 10)
    await source.close()
    # The recorded date is also the time at which the endpoint picker was scraped.
    for each in checked_scrapes:
        assert any(
            -DATE_TOLERANCE_S <= at - each.at <= each.duration_s + DATE_TOLERANCE_S for at in epp.requested_at
        ), each


async def test_time_window_of_a_slow_scrape_reaches_until_its_end(server: PrometheusServer) -> None:
    """The endpoint picker may create its page when it is asked, or long after."""
    created_at: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        epp = await stack.enter_async_context(fake_epp())

        async def respond(_: web.Request) -> web.Response:
            await asyncio.sleep(SLOW_ANSWER_S)
            created_at.append(asyncio.get_running_loop().time())
            return web.Response(text=epp.page, content_type="text/plain")

        epp.respond = respond
        server.configure(scrape_job(epp.port, 2))
        await stack.enter_async_context(server.run())
        source = server.create_source()
        (view,) = await wait_for_views(source)
        await source.close()
    assert view.closed_at - view.opened_at >= SLOW_ANSWER_S
    assert any(
        view.opened_at - DATE_TOLERANCE_S <= at <= view.closed_at + DATE_TOLERANCE_S for at in created_at
    )


async def test_failing_exporter_closes_the_gate_and_its_recovery_opens_it(server: PrometheusServer) -> None:
    """A failed scrape ends the series at once (staleness), long before max_age."""
    async with contextlib.AsyncExitStack() as stack:
        epp = await stack.enter_async_context(fake_epp())
        server.configure(scrape_job(epp.port, 1))
        await stack.enter_async_context(server.run())
        polls: list[Poll] = []
        settings = SignalsSettings.model_validate(
            {"source": "prometheus", "prometheus": {"url": server.url}, "max_age_s": 8}
        )
        poller = Poller([server.create_source()], settings, Policy(), polls.append)
        polling = asyncio.create_task(poller.run())
        try:
            await wait_until(lambda: polls and polls[-1].readings, 30)
            refused, port = asyncio.Event(), epp.port

            async def refuse(_: web.Request) -> web.Response:
                refused.set()
                return web.Response(status=503)

            epp.respond = refuse
            await asyncio.wait_for(refused.wait(), 10)
            refused_at = asyncio.get_running_loop().time()
            await wait_until(lambda: polls[-1].failures, 8)
            assert polls[-1].completed_at - refused_at < 8
            assert polls[-1].failures[0].reason is Reason.UNREADABLE
            assert "no series" in polls[-1].failures[0].why
            epp.respond = None
            assert port == epp.port
            await wait_until(lambda: polls[-1].readings, 10)
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling


async def test_samples_become_stale_when_prometheus_stops_scraping(server: PrometheusServer) -> None:
    """The job is removed and its data stays without staleness markers, so only their age shows it."""
    async with fake_epp() as epp:
        server.configure(scrape_job(epp.port, 1))
        async with server.run():
            source = server.create_source()
            await wait_for_views(source)
        server.configure("- job_name: other\n")
        async with server.run():
            (before,) = await wait_for_views(source)
            last_scrape = (await server.read_scrapes())[-1]
            assert (
                before.opened_at - DATE_TOLERANCE_S <= last_scrape.at <= before.closed_at + DATE_TOLERANCE_S
            )
            polls: list[SourcePoll] = []
            settings = SignalsSettings.model_validate(
                {"source": "prometheus", "prometheus": {"url": server.url}, "max_age_s": 2}
            )
            polling = asyncio.create_task(Poller([source], settings, Policy(), polls.append).run())
            try:
                await wait_until(lambda: polls and polls[-1].failures, 10)
            finally:
                polling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await polling
            (stale,) = polls[-1].failures
            assert stale.reason is Reason.STALE
            # The sentence has the age of the last scrape, in tenths of a second.
            matched = re.fullmatch(r"the samples are (\d+\.\d) s old, more than 2 s", stale.why)
            assert matched is not None, stale.why
            assert float(matched[1]) == pytest.approx(polls[-1].completed_at - last_scrape.at, abs=0.2)


async def test_readings_continue_after_reload_and_restart(server: PrometheusServer) -> None:
    async with fake_epp() as epp:
        server.configure(scrape_job(epp.port, 1))
        source = server.create_source(max_age_s=3)
        async with server.run() as pid:
            await wait_for_views(source)
            # The last samples of the old job remain beside the new ones: two sets for one pool, until the
            # old are stale.
            server.configure(scrape_job(epp.port, 1, name="renamed"))
            os.kill(pid, signal.SIGHUP)
            epp.page = read_page("replica-b")

            async def has_new_values() -> bool:
                answer = await source.poll()
                return not isinstance(answer, ReadFailure) and answer[0].saturation == 0.55

            await wait_until(has_new_values, 30, every_s=0.1)
        failure = await source.poll()
        assert isinstance(failure, ReadFailure)
        assert "refused" in failure.why
        async with server.run():
            await wait_until(
                has_new_values, 30, every_s=0.1
            )  # not at once if the last scrape before had failed
        await source.close()


async def test_prometheus_and_direct_scrape_give_the_same_readings(server: PrometheusServer) -> None:
    """Prometheus scrapes every recorded page, and its readings equal those of a direct scrape."""

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=(PAGES / f"{request.path.strip('/')}.txt").read_text())

    async with serving(respond) as port:
        jobs = [
            scrape_job(port, 1, name=name, path=f"/{name}", namespace=f"ns-{number}")
            for number, name in enumerate(EXPECTED_READINGS)
        ]
        server.configure("".join(jobs))
        async with server.run():
            for number, (name, expected) in enumerate(EXPECTED_READINGS.items()):
                source = server.create_source(f"ns-{number}")
                views = await wait_for_views(source)
                verdict = derive_readings(views, "auto", POLICY, "prometheus")
                await source.close()
                assert [view.server_queued for view in views] == [
                    view_of_direct_scrape(name).server_queued
                ], name
                found = {reading.signal: (reading.f_sys, reading.f_epp) for reading in verdict.readings}
                expected_terms = {Signal.SATURATION: expected.saturation, Signal.REQUESTS: expected.requests}
                for signal_, terms in expected_terms.items():
                    assert (signal_ in found) == (terms is not None), name
                    assert terms is None or found[signal_] == pytest.approx(terms), name


def view_of_direct_scrape(name: str) -> PoolView:
    """Return the view that a direct scrape makes of a recorded page."""
    page = PageParser(SERIES_NAMES)
    page.feed(read_page(name).encode())
    view = build_view(page.close(), "qwen", 0.0, 0.0)
    assert isinstance(view, PoolView)
    return view


async def test_prometheus_returns_only_the_sum_of_the_model_server_queues(server: PrometheusServer) -> None:
    """A pool may have hundreds of servers. A negative queue counts as empty, before the sum is computed."""
    newest, older = (
        "".join(f'{series}="pod-{at}",name="qwen"}} {queue}\n' for at, queue in enumerate((7, -3, 2.5, 4)))
        for series in (
            "llm_d_epp_per_endpoint_queue_size{model_server_endpoint",
            "inference_pool_per_pod_queue_size{model_server_pod",
        )
    )
    async with fake_epp() as first, fake_epp() as second:
        base = "".join(
            f"{line}\n"
            for line in read_page("router-newest-flow-control-off").splitlines()
            if "per_endpoint_queue_size" not in line
        )
        first.page, second.page = base + newest, base + older
        server.configure(
            scrape_job(first.port, 1, "first") + scrape_job(second.port, 1, "second", namespace="elsewhere")
        )
        async with server.run():
            for namespace in ("default", "elsewhere"):
                source = server.create_source(namespace)
                (view,) = await wait_for_views(source)
                await source.close()
                assert view.server_queued == 13.5
                rows = await server.run_query(build_pool_query("qwen", namespace, 60))
                sums = [row for row in rows if row["metric"].get("dispatcher_value") == "SERVER_QUEUES"]
                assert [float(row["value"][1]) for row in sums] == [13.5]


LEFTOVER_AGE_S = 82.0


def leftover_lines(*series: str) -> str:
    """Return lines for these series with the time of an old scrape. Prometheus returns such samples for five
    minutes and writes no staleness markers for them."""
    at_ms = round((time.time() - LEFTOVER_AGE_S) * 1000)
    return "".join(f"{each} {at_ms}\n" for each in series)


async def poll_beside_leftovers(
    server: PrometheusServer, leftover_query: str, count: int
) -> tuple[PoolView, SourcePoll]:
    """Return the view of the source and the poll of the poller while Prometheus still returns `count` old
    series.

    `leftover_query` selects the old series. The view and the readings must be of the newest scrapes.
    """
    source = server.create_source()
    await wait_for_views(source)
    ages = [float(row["value"][1]) for row in await server.run_query(f"time() - timestamp({leftover_query})")]
    assert [age > LEFTOVER_AGE_S for age in ages] == [True] * count
    newest = (await server.read_scrapes())[-1]
    (view,) = await wait_for_views(source)
    assert newest.at - view.opened_at < LEFTOVER_AGE_S / 2
    polls: list[SourcePoll] = []
    settings = SignalsSettings.model_validate({"source": "prometheus", "prometheus": {"url": server.url}})
    polling = asyncio.create_task(Poller([source], settings, POLICY, polls.append).run())
    try:
        await wait_until(lambda: polls, 10)
    finally:
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
    for reading in polls[0].readings:
        assert newest.at - reading.opened_at < LEFTOVER_AGE_S / 2
    return view, polls[0]


async def test_series_that_left_the_page_do_not_count(server: PrometheusServer) -> None:
    """After a restart of the picker, Prometheus may still return flows that the new process does not have."""
    labels = 'priority="-1",model_name="gone",target_model_name="gone"'
    async with fake_epp() as epp:
        epp.page += leftover_lines(
            f'llm_d_epp_flow_control_queue_size{{inference_pool="qwen",fairness_id="batch",{labels}}} 500',
            f"llm_d_epp_request_running{{{labels}}} 300",
            'llm_d_epp_per_endpoint_queue_size{name="qwen",model_server_endpoint="gone"} 70',
        )
        server.configure(scrape_job(epp.port, 1))
        async with server.run():
            leftover_query = (
                '{__name__=~"llm_d_epp_(flow_control_queue_size|request_running)",model_name="gone"}'
            )
            view, poll = await poll_beside_leftovers(server, leftover_query, 2)
    expected = view_of_direct_scrape("router-newest-flow-control-on")
    assert (view.queued, view.in_flight, view.server_queued) == (
        12,
        120,
        1.5,
    )
    assert (view.queued, view.in_flight) == (expected.queued, expected.in_flight)
    assert poll.failures == ()
    assert [reading.signal for reading in poll.readings] == [Signal.SATURATION, Signal.REQUESTS]
    assert {reading.f_epp for reading in poll.readings} == {12 / 400}


async def test_metric_families_that_left_the_page_are_absent(server: PrometheusServer) -> None:
    """Flow control was turned off, so the earlier saturation and queues no longer count."""
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-flow-control-off") + leftover_lines(
            'llm_d_epp_flow_control_pool_saturation{inference_pool="qwen",stage="effective"} 1.7',
            'llm_d_epp_flow_control_queue_size{fairness_id="a",inference_pool="qwen",priority="0"} 500',
        )
        server.configure(scrape_job(epp.port, 1))
        async with server.run():
            view, poll = await poll_beside_leftovers(server, '{__name__=~"llm_d_epp_flow_control_.+"}', 2)
    assert (view.saturation, view.queued) == (None, None)
    assert (poll.signals, poll.failures) == ((Signal.REQUESTS,), ())
    assert [reading.f_epp for reading in poll.readings] == [0]


async def test_instances_of_one_job_are_replicas_and_two_jobs_are_a_failure(server: PrometheusServer) -> None:
    """Two instances of one job are replicas. The same pool name in two jobs is a collision."""
    async with fake_epp() as one, fake_epp() as two:
        one.page, two.page = read_page("replica-a"), read_page("replica-b")
        targets = f"['127.0.0.1:{one.port}', '127.0.0.1:{two.port}']"
        replica_job = (
            "- job_name: epp\n  scrape_interval: 1s\n"
            f"  static_configs: [{{targets: {targets}, labels: {{namespace: default}}}}]\n"
        )
        server.configure(replica_job + scrape_job(two.port, 1, name="again", namespace="elsewhere"))
        async with server.run():
            source = server.create_source()

            async def both_views() -> tuple[PoolView, ...] | None:
                answer = await source.poll()
                return answer if not isinstance(answer, ReadFailure) and len(answer) == 2 else None

            views = await wait_until(both_views, 30, every_s=0.1)
            assert views is not None
            (reading,) = derive_readings(views, "saturation", POLICY, "prometheus").readings
            assert (reading.f_sys, reading.f_epp) == (0.55, 15 / 400)
            await source.close()
        server.configure(replica_job + scrape_job(two.port, 1, name="again"))
        async with server.run():
            source = server.create_source()

            async def refused() -> bool:
                answer = await source.poll()
                return isinstance(answer, ReadFailure) and 'job="again", job="epp"' in answer.why

            await wait_until(refused, 30, every_s=0.1)
            await source.close()


async def test_documented_queries_give_a_reading(server: PrometheusServer) -> None:
    """The queries of docs/explanation/signals.md for vLLM series, with the labels that vLLM and a scrape
    set."""
    page = "".join(
        f'vllm:num_requests_{what}{{engine="{engine}",model_name="m"}} {value}\n'
        for engine in (0, 1)
        for what, value in (("running", 12), ("waiting", 3))
    )

    async def respond(_: web.Request) -> web.Response:
        return web.Response(text=page)

    async with serving(respond) as port:
        server.configure(scrape_job(port, 1, name="vllm"))
        async with server.run():
            queries: dict[str, Any] = {**read_documented_queries()}
            source = server.create_source(**queries)
            (view,) = await wait_for_views(source)
            (reading,) = derive_readings([view], "auto", Policy(), "prometheus").readings
            assert (reading.f_sys, reading.f_epp, reading.max_sys) == (0.3, 0, 100)
            await source.close()


def read_documented_queries() -> dict[str, str]:
    """Return the queries of the vLLM example in docs/explanation/signals.md."""
    text = (DOCS / "explanation" / "signals.md").read_text()
    example = next(
        block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "queries:" in block
    )
    queries = yaml.safe_load(example)["signals"]["prometheus"]["queries"]
    assert isinstance(queries, dict)
    return queries


VLLM_HISTOGRAM = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.25"}} {half}
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.5"}} {all}
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="+Inf"}} {all}
"""


@pytest.mark.parametrize(
    ("has_objective", "scope", "median_s"), [(True, "realtime", 0.5), (False, "all", 7.5)]
)
async def test_latencies_come_from_the_picker_of_the_pool(
    server: PrometheusServer, has_objective: bool, scope: str, median_s: float
) -> None:
    """Another pool and model servers export latencies as well. Only realtime requests count if batch
    requests have an objective."""
    async with contextlib.AsyncExitStack() as stack:
        epp, other_epp, vllm = [await stack.enter_async_context(fake_epp()) for _ in range(3)]
        other_epp.page = read_page("router-newest-latencies").replace('"qwen"', '"other"')
        vllm.page = VLLM_HISTOGRAM.format(half=5, all=10)
        epp.page = read_page("router-newest-latencies")
        jobs = (
            scrape_job(epp.port, 1, "ours")
            + scrape_job(other_epp.port, 1, "theirs")
            + scrape_job(vllm.port, 1, "vllm")
        )
        server.configure(jobs)
        await stack.enter_async_context(server.run())
        source = server.create_source(has_objective=has_objective)
        await wait_for_views(source)
        request_count = len(epp.requested_at)
        await wait_until(lambda: len(epp.requested_at) >= request_count + 3)
        # 200 streamed realtime requests with a first token after 0.4 to 0.6 s, and 900 batch requests after
        # 5 to 10 s.
        epp.page = with_more_requests(epp.page, 'priority="0",streaming="true"', 0.6, 200)
        epp.page = with_more_requests(epp.page, 'priority="-10",streaming="true"', 10, 900)
        other_epp.page = with_more_requests(other_epp.page, 'priority="0",streaming="true"', 120, 5000)

        async def read_latencies() -> ReplicaHistograms | None:
            found = await source.read_latencies()
            assert not found.why_not
            return found if found.ttft and found.ttft[math.inf] > 100 else None

        found = await wait_until(read_latencies, 30, every_s=0.1)
        await source.close()
    assert found is not None
    assert found.ttft is not None
    assert (found.scope, found.series_name) == (scope, "llm_d_epp_request_ttft_seconds")
    assert compute_quantile(found.ttft, 0.5) == pytest.approx(median_s, rel=0.2)


async def test_latencies_of_model_servers_count_if_their_labels_name_the_pool(
    server: PrometheusServer,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        epp, vllm = [await stack.enter_async_context(fake_epp()) for _ in range(2)]
        epp.page = read_page("gie-1.5-flow-control-on")
        vllm.page = VLLM_HISTOGRAM.format(half=5, all=10)
        jobs = scrape_job(epp.port, 1) + scrape_job(vllm.port, 1, "vllm").replace(
            "namespace:", "inference_pool: qwen, namespace:"
        )
        server.configure(jobs)
        await stack.enter_async_context(server.run())
        source = server.create_source()
        await wait_for_views(source)
        request_count = len(vllm.requested_at)
        await wait_until(lambda: len(vllm.requested_at) >= request_count + 3)
        vllm.page = VLLM_HISTOGRAM.format(half=55, all=110)

        async def read_latencies() -> ReplicaHistograms | None:
            found = await source.read_latencies()
            return found if found.ttft and found.ttft[math.inf] > 50 else None

        found = await wait_until(read_latencies, 30, every_s=0.1)
        await source.close()
    assert found is not None
    assert found.ttft is not None
    assert (found.scope, found.series_name, found.tpot) == ("all", "vllm:time_to_first_token_seconds", None)
    assert compute_quantile(found.ttft, 0.5) == pytest.approx(0.25, rel=0.05)


def with_more_requests(page: str, labels: str, bound: float, count: int) -> str:
    """Return the page with `count` more first tokens within the bucket of `bound`."""
    lines = []
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if "ttft_seconds_bucket" in head and labels in head:
            inside = float(head.rpartition('le="')[2].rstrip('"}')) >= bound
            line = f"{head} {int(value) + count * inside}"
        lines.append(line)
    return "\n".join([*lines, ""])
