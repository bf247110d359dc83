"""Latencies of realtime requests, from metrics pages and from Prometheus. They are only shown."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.limit.budget import Policy
from dispatcher.limit.realtime_impact import RealtimeImpact, ReplicaHistograms
from dispatcher.settings.signals import SignalsSettings
from dispatcher.signals.epp import latency
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.exposition import PageParser, Sample
from dispatcher.signals.poller import Poller, SignalSource, SourcePoll
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.scrape import Targets
from tests.signals.fakes import HEALTHY_VALUES, FakeEpp, FakePrometheus, fake_epp, fake_prometheus, read_page
from tests.support import wait_until

NEWEST_PAGE, PREDICTOR_PAGE = "router-newest-latencies", "gie-1.5-latency-predictor"


def read_histograms(
    text: str, *, marked: bool = True, max_series: int = latency.MAX_SERIES
) -> ReplicaHistograms:
    series = replace(latency.SERIES, max_samples=max_series)
    page = PageParser(SERIES_NAMES, optional=(series,))
    page.feed(text.encode())
    page.close()
    found = page.optional[series]
    return latency.build_histograms(found.samples, "a", has_objective=marked, problem=found.problem)


class TestHistogramsOfPages:
    def test_only_streamed_realtime_requests_count_if_the_page_shows_priorities(self) -> None:
        found = read_histograms(read_page(NEWEST_PAGE))
        assert (found.scope, found.series_name, found.why_not) == (
            "realtime",
            "llm_d_epp_request_ttft_seconds",
            "",
        )
        assert found.ttft is not None
        assert found.tpot is not None
        assert (found.ttft[0.1], found.ttft[0.2], found.ttft[math.inf]) == (200, 600, 700)
        assert (found.tpot[0.02], found.tpot[math.inf]) == (480, 500)

    def test_all_requests_count_if_batch_requests_have_no_objective(self) -> None:
        found = read_histograms(read_page(NEWEST_PAGE), marked=False)
        assert found.scope == "all"
        assert found.ttft is not None
        assert found.ttft[math.inf] == 800, "requests that were not streamed have no time to first token"

    def test_all_requests_count_if_the_page_shows_no_priorities(self) -> None:
        found = read_histograms(read_page(PREDICTOR_PAGE))
        assert (found.scope, found.series_name) == ("all", "inference_objective_request_ttft_seconds")
        assert found.ttft is not None
        assert found.ttft[math.inf] == 500

    def test_missing_series_are_named(self) -> None:
        found = read_histograms(read_page("router-newest-flow-control-on"))
        assert (found.ttft, found.tpot) == (None, None)
        assert found.why_not == "the endpoint picker shows no llm_d_epp_request_ttft_seconds"

    def test_histogram_is_empty_before_the_first_realtime_request(self) -> None:
        lines = [
            line
            for line in read_page(NEWEST_PAGE).splitlines()
            if "ttft" not in line or 'priority="-10"' in line
        ]
        assert read_histograms("\n".join([*lines, ""])).ttft == {math.inf: 0}

    @pytest.mark.parametrize(
        "line",
        [
            'llm_d_epp_request_ttft_seconds_bucket{le="0.1"',
            'llm_d_epp_request_ttft_seconds_bucket{le="0.1"} many',
            "llm_d_epp_request_ttft_seconds_bucket\xff",
            'llm_d_epp_request_streaming_tpot_seconds_bucket{le="1",le="2"} 4',
        ],
    )
    def test_broken_latency_line_invalidates_only_the_latencies(self, line: str) -> None:
        page = PageParser(SERIES_NAMES, optional=(latency.SERIES,))
        page.feed(f"{read_page(NEWEST_PAGE)}{line}\n".encode("latin-1"))
        assert len(page.close()) > 5
        found = page.optional[latency.SERIES]
        assert latency.build_histograms(found.samples, "a", has_objective=True, problem=found.problem).why_not

    @pytest.mark.parametrize("bound", ["", "NaN", "five", "1_0"])
    def test_bucket_without_a_valid_bound_invalidates_its_histogram(self, bound: str) -> None:
        sample = Sample("llm_d_epp_request_ttft_seconds_bucket", {"le": bound}, 3.0)
        found = latency.build_histograms([sample], "a", has_objective=False)
        assert found.ttft is not None
        assert any(math.isnan(each) for each in found.ttft)

    def test_too_many_latency_series_are_not_read(self) -> None:
        found = read_histograms(read_page(NEWEST_PAGE), max_series=20)
        assert found.why_not == "more than 20 series of requests' latencies"


def with_more_requests(page: str, request_count: int) -> str:
    """Return the page after this many more realtime requests with a first token within 0.4 to 0.6 s."""
    lines = []
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if 'ttft_seconds_bucket{fairness_id="default-flow"' in head and 'streaming="true"' in head:
            bound = float(head.rpartition('le="')[2].rstrip('"}'))
            line = f"{head} {int(value) + (request_count if bound >= 0.6 else 0)}"
        lines.append(line)
    return "\n".join([*lines, ""])


@contextlib.asynccontextmanager
async def run_poller(
    *sources: SignalSource, share: float | None = 0.25, **settings: Any
) -> AsyncIterator[list[SourcePoll]]:
    polls: list[SourcePoll] = []
    validated = SignalsSettings.model_validate({"interval_s": 0.05, **settings})
    poller = Poller(sources, validated, Policy(per_endpoint=100), polls.append, batch_share=lambda: share)
    task = asyncio.create_task(poller.run())
    try:
        yield polls
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def poll_impact(epp: FakeEpp) -> AsyncIterator[list[SourcePoll]]:
    """Poll the page of `epp`, and yield the polls once the first impact on realtime is known."""
    source = EppSource(
        "qwen", Targets(urls=(epp.url,)), timeout_s=20, has_objective=True, latency_interval_s=0.1
    )
    async with run_poller(source) as polls:
        await wait_until(lambda: polls and polls[-1].realtime_impact.source)
        yield polls


class TestImpactInPolls:
    async def test_impact_is_computed_from_the_scraped_pages(self) -> None:
        async with fake_epp() as epp:
            epp.page = read_page(NEWEST_PAGE)
            async with poll_impact(epp) as polls:
                assert polls[-1].realtime_impact.request_count == 0
                epp.page = with_more_requests(read_page(NEWEST_PAGE), 40)
                await wait_until(lambda: polls[-1].realtime_impact.request_count == 40)
                impact = polls[-1].realtime_impact
        assert impact.scope == "realtime"
        assert impact.ttft_p50_s == pytest.approx(0.5)
        assert impact.ttft_p95_s == pytest.approx(0.59)
        assert impact.tpot_p50_s is None
        assert impact.batch_share == pytest.approx(0.25)
        assert impact.source == "epp: llm_d_epp_request_ttft_seconds"

    async def test_histograms_are_read_only_at_their_own_interval(self) -> None:
        async with fake_epp() as epp:
            epp.page = read_page(NEWEST_PAGE)
            source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20)
            first, second = await source.poll(), await source.poll()
            await source.close()
        assert isinstance(first, tuple)
        assert isinstance(second, tuple)
        assert first[0].histograms is not None
        assert second[0].histograms is None

    async def test_broken_latencies_do_not_close_the_gate(self) -> None:
        async with fake_epp() as epp:
            epp.page = f"{read_page(NEWEST_PAGE)}llm_d_epp_request_ttft_seconds_bucket{{le=}} NaN\n"
            source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20, latency_interval_s=0.0)
            async with run_poller(source) as polls:
                await wait_until(lambda: len(polls) > 3)
        assert all(poll.readings and not poll.failures for poll in polls)
        assert "labels that do not end" in polls[-1].realtime_impact.why_not

    async def test_impact_that_is_too_old_is_reported_as_such(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dispatcher.signals.poller.IMPACT_MAX_AGE_S", 0.2)
        async with fake_epp() as epp:
            epp.page = read_page(NEWEST_PAGE)
            async with poll_impact(epp) as polls:
                epp.page = "nothing of it\n"
                await wait_until(lambda: not polls[-1].realtime_impact.source)
        assert polls[-1].realtime_impact.why_not == "not read for 0.2 s"

    async def test_poll_says_why_a_page_has_no_latencies(self) -> None:
        async with fake_epp() as epp:
            source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20)
            async with run_poller(source) as polls:
                await wait_until(lambda: polls)
        assert polls[-1].realtime_impact == RealtimeImpact(
            batch_share=0.25,
            source="epp",
            why_not="the endpoint picker shows no llm_d_epp_request_ttft_seconds",
        )

    async def test_latencies_come_from_prometheus_if_the_page_has_none(self) -> None:
        async with (
            fake_epp() as epp,
            serve_prometheus_latencies({"all/vllm:time_to_first_token_seconds": 80.0}) as server,
        ):
            sources: list[SignalSource] = [
                EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20),
                PrometheusSource(PrometheusAddress(server.url), "qwen", "default", timeout_s=5, max_age_s=60),
            ]
            async with run_poller(*sources) as polls:
                await wait_until(lambda: polls and polls[-1].realtime_impact.request_count)
        assert polls[-1].source == "epp"
        assert polls[-1].realtime_impact.source == "prometheus: vllm:time_to_first_token_seconds"
        assert (polls[-1].realtime_impact.scope, polls[-1].realtime_impact.request_count) == ("all", 80)


@contextlib.asynccontextmanager
async def serve_prometheus_latencies(ttft: dict[str, float]) -> AsyncIterator[FakePrometheus]:
    """Run a Prometheus that answers the query for latencies with half of each count within 1 s, and all
    within 2 s."""

    def rows(label: str, count: float) -> Iterator[dict[str, Any]]:
        for bound, value in (("1", count / 2), ("2", count), ("+Inf", count)):
            yield {
                "metric": {latency.ROW_LABEL: f"ttft/{label}", "le": bound},
                "value": [1_764_000_000.0, str(value)],
            }

    async with fake_prometheus() as server:
        server.rows = [row for label, count in ttft.items() for row in rows(label, count)]
        yield server


class TestHistogramsOfPrometheus:
    async def read_latencies_from(self, server: FakePrometheus, **options: Any) -> ReplicaHistograms:
        source = PrometheusSource(
            PrometheusAddress(server.url), "qwen", "default", timeout_s=5, max_age_s=60, **options
        )
        try:
            return await source.read_latencies()
        finally:
            await source.close()

    async def test_first_series_with_requests_is_used(self) -> None:
        names = {
            "realtime/llm_d_epp_request_ttft_seconds": 0.0,
            "all/inference_objective_request_ttft_seconds": 12.0,
            "all/vllm:time_to_first_token_seconds": 80.0,
        }
        async with serve_prometheus_latencies(names) as server:
            found = await self.read_latencies_from(server)
        assert (found.series_name, found.scope) == ("inference_objective_request_ttft_seconds", "all")
        assert found.ttft == {1.0: 6.0, 2.0: 12.0, math.inf: 12.0}

    async def test_missing_series_are_named_with_the_expected_labels(self) -> None:
        async with serve_prometheus_latencies({}) as server:
            found = await self.read_latencies_from(server)
        assert "no llm_d_epp_request_ttft_seconds" in found.why_not
        assert "inference_pool" in found.why_not

    async def test_unreachable_server_is_a_reason_and_not_an_exception(self) -> None:
        source = PrometheusSource(
            PrometheusAddress("http://127.0.0.1:9"), "qwen", "default", timeout_s=5, max_age_s=60
        )
        found = await source.read_latencies()
        await source.close()
        assert found.why_not.startswith("Prometheus: ")

    def test_own_query_replaces_the_known_series_of_its_kind(self) -> None:
        query = latency.build_latency_query("qwen", "default", {"ttft": "mine"}, has_objective=True)
        assert '"ttft/all/own query"' in query
        assert "vllm:time_to_first_token_seconds" not in query
        assert "vllm:inter_token_latency_seconds" in query

    async def test_own_query_for_latencies_is_not_a_query_for_readings(self) -> None:
        async with fake_prometheus() as server:
            server.add_target(HEALTHY_VALUES)
            source = PrometheusSource(
                PrometheusAddress(server.url),
                "qwen",
                "default",
                timeout_s=5,
                max_age_s=60,
                queries={"ttft": "mine"},
            )
            views = await source.poll()
            await source.close()
        assert isinstance(views, tuple)
        assert isinstance(views[0], PoolView)
