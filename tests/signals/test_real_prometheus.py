"""A real Prometheus server between the endpoint picker and us."""

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

from dispatcher.core.limit.budget import Policy, Reason, Signal
from dispatcher.core.limit.poll import Poll, ReadFailure
from dispatcher.core.limit.realtime_impact import ReplicaHistograms, compute_quantile
from dispatcher.settings import SignalsSettings
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView, build_view
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource, build_pool_query
from dispatcher.signals.readings import derive_readings
from tests.paths import DOCS
from tests.signals.fakes import PAGES, FakeEpp, fake_epp, golden, serving
from tests.signals.goldens import GOLDEN, POLICY
from tests.support import free_port, require_tool, running, wait_until

SLOW_S = 0.6
CLOCK_S = 0.005
"""Prometheus dates in milliseconds, and moves a scrape's date by up to 2 ms to keep its dates even."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One as Prometheus recorded it: when it began, by the loop's clock, and how long it took."""

    at: float
    took_s: float


@dataclass
class Server:
    """A Prometheus of its own, with a configuration that can be rewritten."""

    directory: Path
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def configure(self, jobs: str) -> None:
        (self.directory / "prometheus.yml").write_text(f"scrape_configs:\n{jobs}")

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[int]:
        """Run it on the data it has; gives its pid."""
        command = [
            require_tool("prometheus"),
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with running(*command, stop_s=20) as process:
            yield process.pid

    async def scrapes(self, namespace: str = "default") -> list[Scrape]:
        """Those that a query shows now, oldest first. The clocks are this machine's, like ours."""
        query = f'scrape_duration_seconds{{namespace="{namespace}"}}[10m]'
        found = await self.rows(query)
        unix = time.time() - asyncio.get_running_loop().time()
        return [Scrape(at - unix, float(took)) for series in found for at, took in series["values"]]

    async def rows(self, query: str) -> list[dict[str, Any]]:
        """The samples that an instant query gives now."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}/api/v1/query", params={"query": query}) as answer,
        ):
            rows: list[dict[str, Any]] = (await answer.json())["data"]["result"]
            return rows

    def source(
        self, namespace: str = "default", max_age_s: float = 60, *, marked: bool = False, **queries: str
    ) -> PrometheusSource:
        return PrometheusSource(
            PrometheusAddress(self.url),
            "qwen",
            namespace,
            timeout_s=5,
            max_age_s=max_age_s,
            queries=queries,
            has_objective=marked,
        )


def job(
    epp_port: int, interval_s: float, name: str = "epp", path: str = "/metrics", namespace: str = "default"
) -> str:
    return (
        f"- job_name: {name}\n  scrape_interval: {interval_s:g}s\n  scrape_timeout: 1s\n"
        f"  metrics_path: {path}\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{epp_port}'], labels: {{namespace: {namespace}}}}}]\n"
    )


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def seen(source: PrometheusSource, timeout_s: float = 30) -> tuple[PoolView, ...]:
    """What the source shows once it can be read."""

    async def poll() -> tuple[PoolView, ...] | None:
        answer = await source.poll()
        return None if isinstance(answer, ReadFailure) else answer

    answer = await wait_until(poll, timeout_s, what="Prometheus shows the pool", every_s=0.1)
    assert answer is not None
    return answer


@pytest.mark.parametrize("intervals_s", [(1, 5), pytest.param((15,), marks=pytest.mark.long)], ids=str)
async def test_a_reading_is_dated_by_its_scrape(server: Server, intervals_s: tuple[int, ...]) -> None:
    """Whenever one asks within the interval, the answer is the moment of the newest scrape."""
    async with contextlib.AsyncExitStack() as stack:
        epps = {interval_s: await stack.enter_async_context(fake_epp()) for interval_s in intervals_s}
        jobs = [
            job(epp.port, every_s, f"e{every_s}", namespace=f"n{every_s}") for every_s, epp in epps.items()
        ]
        server.configure("".join(jobs))
        await stack.enter_async_context(server.up())
        async with asyncio.TaskGroup() as group:
            for interval_s, epp in epps.items():
                group.create_task(check_dates(server, f"n{interval_s}", epp, interval_s))


async def check_dates(server: Server, namespace: str, epp: FakeEpp, interval_s: float) -> None:
    """Held to what Prometheus recorded, however late this process or that one comes to its turn."""
    loop, source = asyncio.get_running_loop(), server.source(namespace)
    await seen(source, 30 + 2 * interval_s)
    until = loop.time() + 1.5 * interval_s
    shown: list[Scrape] = []
    while loop.time() < until or len(shown) < 5:
        newest = (await server.scrapes(namespace))[-1]
        began = loop.time()
        (view,) = await seen(source)
        # No wider than it took to ask and to scrape, around the moment of the newest scrape that there was.
        since = [scrape for scrape in await server.scrapes(namespace) if scrape.at >= newest.at - CLOCK_S]
        assert any(view.opened_at - CLOCK_S <= each.at <= view.closed_at + CLOCK_S for each in since)
        took_s = max(scrape.took_s for scrape in since)
        assert view.closed_at - view.opened_at <= loop.time() - began + took_s
        assert (view.address, view.started_at) == (f"127.0.0.1:{epp.port}", 1.76386e9)
        shown.append(newest)
        _, requests = derive_readings([view], "both", Policy(), "prometheus").readings
        assert requests.opened_at == view.opened_at
        await asyncio.sleep(interval_s / 10)
    await source.close()
    # And that date is when the endpoint picker was asked.
    for each in shown:
        assert any(-CLOCK_S <= at - each.at <= each.took_s + CLOCK_S for at in epp.asked_at), each


async def test_a_slow_scrape_is_of_its_end_too(server: Server) -> None:
    """The endpoint picker makes its page when it is asked, or long after."""
    made_at: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        epp = await stack.enter_async_context(fake_epp())

        async def respond(_: web.Request) -> web.Response:
            await asyncio.sleep(SLOW_S)
            made_at.append(asyncio.get_running_loop().time())
            return web.Response(text=epp.page, content_type="text/plain")

        epp.respond = respond
        server.configure(job(epp.port, 2))
        await stack.enter_async_context(server.up())
        source = server.source()
        (view,) = await seen(source)
        await source.close()
    assert view.closed_at - view.opened_at >= SLOW_S
    assert any(view.opened_at - CLOCK_S <= at <= view.closed_at + CLOCK_S for at in made_at)


async def test_a_stopped_exporter_closes_the_gate_and_its_return_opens_it(server: Server) -> None:
    """A failed scrape ends the series at once (staleness), long before max_age."""
    async with contextlib.AsyncExitStack() as stack:
        epp = await stack.enter_async_context(fake_epp())
        server.configure(job(epp.port, 1))
        await stack.enter_async_context(server.up())
        told: list[Poll] = []
        settings = SignalsSettings.model_validate(
            {"source": "prometheus", "prometheus": {"url": server.url}, "max_age_s": 8}
        )
        poller = Poller([server.source()], settings, Policy(), told.append)
        polling = asyncio.create_task(poller.run())
        try:
            await wait_until(lambda: told and told[-1].readings, 30)
            gone, port = asyncio.Event(), epp.port

            async def refuse(_: web.Request) -> web.Response:
                gone.set()
                return web.Response(status=503)

            epp.respond = refuse
            await asyncio.wait_for(gone.wait(), 10)
            gone_at = asyncio.get_running_loop().time()
            await wait_until(lambda: told[-1].failures, 8)
            assert told[-1].completed_at - gone_at < 8
            assert told[-1].failures[0].reason is Reason.UNREADABLE
            assert "no series" in told[-1].failures[0].why
            epp.respond = None
            assert port == epp.port
            await wait_until(lambda: told[-1].readings, 10)
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling


async def test_a_prometheus_that_stops_scraping_goes_stale(server: Server) -> None:
    """Without staleness marks (the job is gone, the data stays) the age tells."""
    async with fake_epp() as epp:
        server.configure(job(epp.port, 1))
        async with server.up():
            source = server.source()
            await seen(source)
        server.configure("- job_name: other\n")
        async with server.up():
            (before,) = await seen(source)
            kept = (await server.scrapes())[-1]
            assert before.opened_at - CLOCK_S <= kept.at <= before.closed_at + CLOCK_S
            told: list[SourcePoll] = []
            settings = SignalsSettings.model_validate(
                {"source": "prometheus", "prometheus": {"url": server.url}, "max_age_s": 2}
            )
            polling = asyncio.create_task(Poller([source], settings, Policy(), told.append).run())
            try:
                await wait_until(lambda: told and told[-1].failures, 10)
            finally:
                polling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await polling
            (stale,) = told[-1].failures
            assert stale.reason is Reason.STALE
            # The age is that of the last scrape, whole or in tenths.
            said = re.fullmatch(r"the samples are (\d+\.\d) s old, more than 2 s", stale.why)
            assert said is not None, stale.why
            assert float(said[1]) == pytest.approx(told[-1].completed_at - kept.at, abs=0.2)


async def test_a_restart_and_a_reload_are_survived(server: Server) -> None:
    async with fake_epp() as epp:
        server.configure(job(epp.port, 1))
        source = server.source(max_age_s=3)
        async with server.up() as pid:
            await seen(source)
            # The old job's last samples stay beside the new ones: two of one pool, until the old are stale.
            server.configure(job(epp.port, 1, name="renamed"))
            os.kill(pid, signal.SIGHUP)
            epp.page = golden("replica-b")

            async def renewed() -> bool:
                answer = await source.poll()
                return not isinstance(answer, ReadFailure) and answer[0].saturation == 0.55

            await wait_until(renewed, 30, every_s=0.1)
        gone = await source.poll()
        assert isinstance(gone, ReadFailure)
        assert "refused" in gone.why
        async with server.up():
            await wait_until(renewed, 30, every_s=0.1)  # not at once where the last scrape before had failed
        await source.close()


async def test_both_ways_to_the_series_give_the_same_reading(server: Server) -> None:
    """Every golden page, scraped by Prometheus: what it makes of them is what a direct scrape does."""

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=(PAGES / f"{request.path.strip('/')}.txt").read_text())

    async with serving(respond) as port:
        jobs = [
            job(port, 1, name=name, path=f"/{name}", namespace=f"ns-{number}")
            for number, name in enumerate(GOLDEN)
        ]
        server.configure("".join(jobs))
        async with server.up():
            for number, (name, expected) in enumerate(GOLDEN.items()):
                source = server.source(f"ns-{number}")
                views = await seen(source)
                verdict = derive_readings(views, "auto", POLICY, "prometheus")
                await source.close()
                assert [view.server_queued for view in views] == [scraped(name).server_queued], name
                got = {reading.signal: (reading.f_sys, reading.f_epp) for reading in verdict.readings}
                wanted = {Signal.SATURATION: expected.saturation, Signal.REQUESTS: expected.requests}
                for signal_, terms in wanted.items():
                    assert (signal_ in got) == (terms is not None), name
                    assert terms is None or got[signal_] == pytest.approx(terms), name


def scraped(name: str) -> PoolView:
    """What a direct scrape makes of a golden page."""
    page = PageParser(SERIES_NAMES)
    page.feed(golden(name).encode())
    made = build_view(page.close(), "qwen", 0.0, 0.0)
    assert isinstance(made, PoolView)
    return made


async def test_of_the_queues_of_the_model_servers_only_the_sum_travels(server: Server) -> None:
    """A pool may have hundreds of servers. A negative queue counts as empty, before the sum is made."""
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
            for line in golden("router-newest-flow-control-off").splitlines()
            if "per_endpoint_queue_size" not in line
        )
        first.page, second.page = base + newest, base + older
        server.configure(job(first.port, 1, "first") + job(second.port, 1, "second", namespace="elsewhere"))
        async with server.up():
            for namespace in ("default", "elsewhere"):
                source = server.source(namespace)
                (view,) = await seen(source)
                await source.close()
                assert view.server_queued == 13.5
                rows = await server.rows(build_pool_query("qwen", namespace, 60))
                sums = [row for row in rows if row["metric"].get("dispatcher_value") == "SERVER_QUEUES"]
                assert [float(row["value"][1]) for row in sums] == [13.5]


OLD_S = 82.0


def left_behind(*series: str) -> str:
    """Lines of a page for these series with the time of a scrape long ago. Prometheus keeps such samples in
    its answers for five minutes and writes no staleness marks for them."""
    at_ms = round((time.time() - OLD_S) * 1000)
    return "".join(f"{each} {at_ms}\n" for each in series)


async def fresh_poll(server: Server, old: str, count: int) -> tuple[PoolView, SourcePoll]:
    """What the source shows and the poller publishes while Prometheus still answers with `count` old series.

    `old`: the query for them. Everything that is shown has to be of the newest scrapes.
    """
    source = server.source()
    await seen(source)
    ages = [float(row["value"][1]) for row in await server.rows(f"time() - timestamp({old})")]
    assert [age > OLD_S for age in ages] == [True] * count
    newest = (await server.scrapes())[-1]
    (shown,) = await seen(source)
    assert newest.at - shown.opened_at < OLD_S / 2
    told: list[SourcePoll] = []
    settings = SignalsSettings.model_validate({"source": "prometheus", "prometheus": {"url": server.url}})
    polling = asyncio.create_task(Poller([source], settings, POLICY, told.append).run())
    try:
        await wait_until(lambda: told, 10)
    finally:
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
    for reading in told[0].readings:
        assert newest.at - reading.opened_at < OLD_S / 2
    return shown, told[0]


async def test_flows_that_left_the_page_neither_age_a_reading_nor_count(server: Server) -> None:
    """After a restart of the picker Prometheus may go on to show flows that the new process does not have."""
    labels = 'priority="-1",model_name="gone",target_model_name="gone"'
    async with fake_epp() as epp:
        epp.page += left_behind(
            f'llm_d_epp_flow_control_queue_size{{inference_pool="qwen",fairness_id="batch",{labels}}} 500',
            f"llm_d_epp_request_running{{{labels}}} 300",
            'llm_d_epp_per_endpoint_queue_size{name="qwen",model_server_endpoint="gone"} 70',
        )
        server.configure(job(epp.port, 1))
        async with server.up():
            old = '{__name__=~"llm_d_epp_(flow_control_queue_size|request_running)",model_name="gone"}'
            shown, poll = await fresh_poll(server, old, 2)
    expected = scraped("router-newest-flow-control-on")
    assert (shown.queued, shown.in_flight, shown.server_queued) == (12, 120, 1.5)
    assert (shown.queued, shown.in_flight) == (expected.queued, expected.in_flight)
    assert poll.failures == ()
    assert [reading.signal for reading in poll.readings] == [Signal.SATURATION, Signal.REQUESTS]
    assert {reading.f_epp for reading in poll.readings} == {12 / 400}


async def test_a_family_that_left_the_page_is_absent(server: Server) -> None:
    """Flow control was turned off: what the saturation and the queues were then no longer counts."""
    async with fake_epp() as epp:
        epp.page = golden("router-newest-flow-control-off") + left_behind(
            'llm_d_epp_flow_control_pool_saturation{inference_pool="qwen",stage="effective"} 1.7',
            'llm_d_epp_flow_control_queue_size{fairness_id="a",inference_pool="qwen",priority="0"} 500',
        )
        server.configure(job(epp.port, 1))
        async with server.up():
            shown, poll = await fresh_poll(server, '{__name__=~"llm_d_epp_flow_control_.+"}', 2)
    assert (shown.saturation, shown.queued) == (None, None)
    assert (poll.signals, poll.failures) == ((Signal.REQUESTS,), ())
    assert [reading.f_epp for reading in poll.readings] == [0]


async def test_replicas_and_a_pool_of_the_same_name(server: Server) -> None:
    """Two instances of one job are replicas; the same pool name in two jobs is a collision."""
    async with fake_epp() as one, fake_epp() as two:
        one.page, two.page = golden("replica-a"), golden("replica-b")
        targets = f"['127.0.0.1:{one.port}', '127.0.0.1:{two.port}']"
        both = (
            "- job_name: epp\n  scrape_interval: 1s\n"
            f"  static_configs: [{{targets: {targets}, labels: {{namespace: default}}}}]\n"
        )
        server.configure(both + job(two.port, 1, name="again", namespace="elsewhere"))
        async with server.up():
            source = server.source()

            async def pair() -> tuple[PoolView, ...] | None:
                answer = await source.poll()
                return answer if not isinstance(answer, ReadFailure) and len(answer) == 2 else None

            views = await wait_until(pair, 30, every_s=0.1)
            assert views is not None
            (reading,) = derive_readings(views, "saturation", POLICY, "prometheus").readings
            assert (reading.f_sys, reading.f_epp) == (0.55, 15 / 400)
            await source.close()
        server.configure(both + job(two.port, 1, name="again"))
        async with server.up():
            source = server.source()

            async def refused() -> bool:
                answer = await source.poll()
                return isinstance(answer, ReadFailure) and 'job="again", job="epp"' in answer.why

            await wait_until(refused, 30, every_s=0.1)
            await source.close()


async def test_the_documented_queries_work(server: Server) -> None:
    """Those of docs/explanation/signals.md for raw vLLM series, on the labels that vLLM and a scrape give."""
    page = "".join(
        f'vllm:num_requests_{what}{{engine="{engine}",model_name="m"}} {value}\n'
        for engine in (0, 1)
        for what, value in (("running", 12), ("waiting", 3))
    )

    async def respond(_: web.Request) -> web.Response:
        return web.Response(text=page)

    async with serving(respond) as port:
        server.configure(job(port, 1, name="vllm"))
        async with server.up():
            queries: dict[str, Any] = {**documented_queries()}
            source = server.source(**queries)
            (view,) = await seen(source)
            (reading,) = derive_readings([view], "auto", Policy(), "prometheus").readings
            assert (reading.f_sys, reading.f_epp, reading.max_sys) == (0.3, 0, 100)
            await source.close()


def documented_queries() -> dict[str, str]:
    """The queries of the vLLM example in docs/explanation/signals.md."""
    text = (DOCS / "explanation" / "signals.md").read_text()
    example = next(
        block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "queries:" in block
    )
    queries = yaml.safe_load(example)["signals"]["prometheus"]["queries"]
    assert isinstance(queries, dict)
    return queries


VLLM = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.25"}} {half}
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.5"}} {all}
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="+Inf"}} {all}
"""


@pytest.mark.parametrize(("marked", "of", "median_s"), [(True, "realtime", 0.5), (False, "all", 7.5)])
async def test_latencies_are_those_of_the_pool_s_own_picker(
    server: Server, marked: bool, of: str, median_s: float
) -> None:
    """Beside another pool's, and model servers': realtime alone where our requests carry an objective."""
    async with contextlib.AsyncExitStack() as stack:
        ours, theirs, vllm = [await stack.enter_async_context(fake_epp()) for _ in range(3)]
        theirs.page = golden("router-newest-latencies").replace('"qwen"', '"other"')
        vllm.page = VLLM.format(half=5, all=10)
        ours.page = golden("router-newest-latencies")
        jobs = job(ours.port, 1, "ours") + job(theirs.port, 1, "theirs") + job(vllm.port, 1, "vllm")
        server.configure(jobs)
        await stack.enter_async_context(server.up())
        source = server.source(marked=marked)
        await seen(source)
        asked = len(ours.asked_at)
        await wait_until(lambda: len(ours.asked_at) >= asked + 3)
        # 200 streamed requests of realtime's, a first token after 0.4 to 0.6 s; 900 of ours, after 5 to 10 s.
        ours.page = grown(ours.page, 'priority="0",streaming="true"', 0.6, 200)
        ours.page = grown(ours.page, 'priority="-10",streaming="true"', 10, 900)
        theirs.page = grown(theirs.page, 'priority="0",streaming="true"', 120, 5000)

        async def latencies() -> ReplicaHistograms | None:
            found = await source.read_latencies()
            assert not found.why_not
            return found if found.ttft and found.ttft[math.inf] > 100 else None

        found = await wait_until(latencies, 30, every_s=0.1)
        await source.close()
    assert found is not None
    assert found.ttft is not None
    assert (found.scope, found.series_name) == (of, "llm_d_epp_request_ttft_seconds")
    assert compute_quantile(found.ttft, 0.5) == pytest.approx(median_s, rel=0.2)


async def test_latencies_of_model_servers_are_the_pool_s_where_the_scrape_says_so(server: Server) -> None:
    async with contextlib.AsyncExitStack() as stack:
        epp, vllm = [await stack.enter_async_context(fake_epp()) for _ in range(2)]
        epp.page = golden("gie-1.5-flow-control-on")
        vllm.page = VLLM.format(half=5, all=10)
        jobs = job(epp.port, 1) + job(vllm.port, 1, "vllm").replace(
            "namespace:", "inference_pool: qwen, namespace:"
        )
        server.configure(jobs)
        await stack.enter_async_context(server.up())
        source = server.source()
        await seen(source)
        asked = len(vllm.asked_at)
        await wait_until(lambda: len(vllm.asked_at) >= asked + 3)
        vllm.page = VLLM.format(half=55, all=110)

        async def latencies() -> ReplicaHistograms | None:
            found = await source.read_latencies()
            return found if found.ttft and found.ttft[math.inf] > 50 else None

        found = await wait_until(latencies, 30, every_s=0.1)
        await source.close()
    assert found is not None
    assert found.ttft is not None
    assert (found.scope, found.series_name, found.tpot) == ("all", "vllm:time_to_first_token_seconds", None)
    assert compute_quantile(found.ttft, 0.5) == pytest.approx(0.25, rel=0.05)


def grown(page: str, labels: str, bound: float, by: int) -> str:
    """The page after so many more first tokens within a bucket."""
    lines = []
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if "ttft_seconds_bucket" in head and labels in head:
            inside = float(head.rpartition('le="')[2].rstrip('"}')) >= bound
            line = f"{head} {int(value) + by * inside}"
        lines.append(line)
    return "\n".join([*lines, ""])
