"""Latencies of the pool's users: from pages and from Prometheus, shown and never acted upon."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dispatcher.core.limit.budget import Policy
from dispatcher.core.limit.realtime_impact import RealtimeImpact, ReplicaHistograms
from dispatcher.settings import SignalsSettings
from dispatcher.signals.epp import latency
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.exposition import PageParser, Sample
from dispatcher.signals.poller import Poller, SignalSource, SourcePoll
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.scrape import Targets
from tests.signals.fakes import GOOD, FakeEpp, FakePrometheus, fake_epp, fake_prometheus, golden
from tests.support import wait_until

NEWEST, PREDICTOR = "router-newest-latencies", "gie-1.5-latency-predictor"


def read(text: str, *, marked: bool = True, most: int = latency.MAX_SERIES) -> ReplicaHistograms:
    page = PageParser(SERIES_NAMES, optional_names=latency.NAMES, max_optional=most)
    page.feed(text.encode())
    page.close()
    return latency.build_histograms(
        page.optional_samples, "a", has_objective=marked, problem=page.optional_problem
    )


class TestPages:
    def test_realtime_alone_where_priorities_are_told_and_only_what_was_streamed(self) -> None:
        found = read(golden(NEWEST))
        assert (found.scope, found.series_name, found.why_not) == (
            "realtime",
            "llm_d_epp_request_ttft_seconds",
            "",
        )
        assert found.ttft is not None
        assert found.tpot is not None
        assert (found.ttft[0.1], found.ttft[0.2], found.ttft[math.inf]) == (200, 600, 700)
        assert (found.tpot[0.02], found.tpot[math.inf]) == (480, 500)

    def test_all_where_our_requests_carry_no_objective(self) -> None:
        found = read(golden(NEWEST), marked=False)
        assert found.scope == "all"
        assert found.ttft is not None
        assert found.ttft[math.inf] == 800, "what was not streamed has no time to first token"

    def test_all_where_the_series_tell_no_priority(self) -> None:
        found = read(golden(PREDICTOR))
        assert (found.scope, found.series_name) == ("all", "inference_objective_request_ttft_seconds")
        assert found.ttft is not None
        assert found.ttft[math.inf] == 500

    def test_a_page_without_them_says_which_are_missing(self) -> None:
        found = read(golden("router-newest-flow-control-on"))
        assert (found.ttft, found.tpot) == (None, None)
        assert found.why_not == "the endpoint picker shows no llm_d_epp_request_ttft_seconds"

    def test_no_realtime_request_yet_is_an_empty_histogram(self) -> None:
        lines = [
            line for line in golden(NEWEST).splitlines() if "ttft" not in line or 'priority="-10"' in line
        ]
        assert read("\n".join([*lines, ""])).ttft == {math.inf: 0}

    @pytest.mark.parametrize(
        "line",
        [
            'llm_d_epp_request_ttft_seconds_bucket{le="0.1"',
            'llm_d_epp_request_ttft_seconds_bucket{le="0.1"} many',
            "llm_d_epp_request_ttft_seconds_bucket\xff",
            'llm_d_epp_request_streaming_tpot_seconds_bucket{le="1",le="2"} 4',
        ],
    )
    def test_a_broken_line_of_them_refuses_them_and_nothing_else(self, line: str) -> None:
        page = PageParser(SERIES_NAMES, optional_names=latency.NAMES, max_optional=99_999)
        page.feed(f"{golden(NEWEST)}{line}\n".encode("latin-1"))
        assert len(page.close()) > 5
        assert latency.build_histograms(
            page.optional_samples, "a", has_objective=True, problem=page.optional_problem
        ).why_not

    @pytest.mark.parametrize("bound", ["", "NaN", "five", "1_0"])
    def test_a_bucket_without_a_bound_is_refused_with_its_histogram(self, bound: str) -> None:
        sample = Sample("llm_d_epp_request_ttft_seconds_bucket", {"le": bound}, 3.0)
        found = latency.build_histograms([sample], "a", has_objective=False)
        assert found.ttft is not None
        assert any(math.isnan(each) for each in found.ttft)

    def test_too_many_series_are_not_read(self) -> None:
        found = read(golden(NEWEST), most=20)
        assert found.why_not == "more than 20 series of requests' latencies"


def later(page: str, ttft_times: int) -> str:
    """The page after so many more realtime requests with a first token within 0.4 to 0.6 s."""
    lines = []
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if 'ttft_seconds_bucket{fairness_id="default-flow"' in head and 'streaming="true"' in head:
            bound = float(head.rpartition('le="')[2].rstrip('"}'))
            line = f"{head} {int(value) + (ttft_times if bound >= 0.6 else 0)}"
        lines.append(line)
    return "\n".join([*lines, ""])


@contextlib.asynccontextmanager
async def polling(
    *sources: SignalSource, share: float | None = 0.25, **settings: Any
) -> AsyncIterator[list[SourcePoll]]:
    told: list[SourcePoll] = []
    wanted = SignalsSettings.model_validate({"interval_s": 0.05, **settings})
    poller = Poller(sources, wanted, Policy(per_endpoint=100), told.append, batch_share=lambda: share)
    task = asyncio.create_task(poller.run())
    try:
        yield told
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def priced(epp: FakeEpp) -> AsyncIterator[list[SourcePoll]]:
    """What is told while its page is polled, from the first price on."""
    source = EppSource(
        "qwen", Targets(urls=(epp.url,)), timeout_s=20, has_objective=True, latency_interval_s=0.1
    )
    async with polling(source) as told:
        await wait_until(lambda: told and told[-1].realtime_impact.source)
        yield told


class TestPolled:
    async def test_the_price_comes_from_the_pages_that_are_scraped_anyway(self) -> None:
        async with fake_epp() as epp:
            epp.page = golden(NEWEST)
            async with priced(epp) as told:
                assert told[-1].realtime_impact.request_count == 0
                epp.page = later(golden(NEWEST), 40)
                await wait_until(lambda: told[-1].realtime_impact.request_count == 40)
                price = told[-1].realtime_impact
        assert price.scope == "realtime"
        assert price.ttft_p50_s == pytest.approx(0.5)
        assert price.ttft_p95_s == pytest.approx(0.59)
        assert price.tpot_p50_s is None
        assert price.batch_share == pytest.approx(0.25)
        assert price.source == "epp: llm_d_epp_request_ttft_seconds"

    async def test_pages_are_read_for_it_now_and_then_only(self) -> None:
        async with fake_epp() as epp:
            epp.page = golden(NEWEST)
            source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20)
            first, second = await source.poll(), await source.poll()
            await source.close()
        assert isinstance(first, tuple)
        assert isinstance(second, tuple)
        assert first[0].histograms is not None
        assert second[0].histograms is None

    async def test_broken_latencies_never_close_the_gate(self) -> None:
        async with fake_epp() as epp:
            epp.page = f"{golden(NEWEST)}llm_d_epp_request_ttft_seconds_bucket{{le=}} NaN\n"
            source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20, latency_interval_s=0.0)
            async with polling(source) as told:
                await wait_until(lambda: len(told) > 3)
        assert all(poll.readings and not poll.failures for poll in told)
        assert "labels that do not end" in told[-1].realtime_impact.why_not

    async def test_a_price_that_is_too_old_says_so_and_not_that_it_was_never_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dispatcher.signals.poller.IMPACT_MAX_AGE_S", 0.2)
        async with fake_epp() as epp:
            epp.page = golden(NEWEST)
            async with priced(epp) as told:
                epp.page = "nothing of it\n"
                await wait_until(lambda: not told[-1].realtime_impact.source)
        assert told[-1].realtime_impact.why_not == "not read for 0.2 s"

    async def test_a_page_without_them_says_why(self) -> None:
        async with fake_epp() as epp:
            source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20)
            async with polling(source) as told:
                await wait_until(lambda: told)
        assert told[-1].realtime_impact == RealtimeImpact(
            batch_share=0.25,
            source="epp",
            why_not="the endpoint picker shows no llm_d_epp_request_ttft_seconds",
        )

    async def test_where_the_pages_show_none_prometheus_is_asked(self) -> None:
        async with (
            fake_epp() as epp,
            prometheus_with({"all/vllm:time_to_first_token_seconds": 80.0}) as server,
        ):
            sources: list[SignalSource] = [
                EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20),
                PrometheusSource(PrometheusAddress(server.url), "qwen", "default", timeout_s=5, max_age_s=60),
            ]
            async with polling(*sources) as told:
                await wait_until(lambda: told and told[-1].realtime_impact.request_count)
        assert told[-1].source == "epp"
        assert told[-1].realtime_impact.source == "prometheus: vllm:time_to_first_token_seconds"
        assert (told[-1].realtime_impact.scope, told[-1].realtime_impact.request_count) == ("all", 80)


@contextlib.asynccontextmanager
async def prometheus_with(ttft: dict[str, float]) -> AsyncIterator[FakePrometheus]:
    """It answers the query for latencies with half of each within 1 s, and all within 2 s."""

    def rows(whose: str, count: float) -> Iterator[dict[str, Any]]:
        for bound, value in (("1", count / 2), ("2", count), ("+Inf", count)):
            yield {
                "metric": {latency.ROW_LABEL: f"ttft/{whose}", "le": bound},
                "value": [1_764_000_000.0, str(value)],
            }

    async with fake_prometheus() as server:
        server.rows = [row for whose, count in ttft.items() for row in rows(whose, count)]
        yield server


class TestThroughPrometheus:
    async def ask(self, server: FakePrometheus, **options: Any) -> ReplicaHistograms:
        source = PrometheusSource(
            PrometheusAddress(server.url), "qwen", "default", timeout_s=5, max_age_s=60, **options
        )
        try:
            return await source.read_latencies()
        finally:
            await source.close()

    async def test_the_first_that_has_requests_counts(self) -> None:
        names = {
            "realtime/llm_d_epp_request_ttft_seconds": 0.0,
            "all/inference_objective_request_ttft_seconds": 12.0,
            "all/vllm:time_to_first_token_seconds": 80.0,
        }
        async with prometheus_with(names) as server:
            found = await self.ask(server)
        assert (found.series_name, found.scope) == ("inference_objective_request_ttft_seconds", "all")
        assert found.ttft == {1.0: 6.0, 2.0: 12.0, math.inf: 12.0}

    async def test_nothing_there_says_what_was_looked_for(self) -> None:
        async with prometheus_with({}) as server:
            found = await self.ask(server)
        assert "no llm_d_epp_request_ttft_seconds" in found.why_not
        assert "inference_pool" in found.why_not

    async def test_a_server_that_does_not_answer_is_a_reason_and_no_exception(self) -> None:
        source = PrometheusSource(
            PrometheusAddress("http://127.0.0.1:9"), "qwen", "default", timeout_s=5, max_age_s=60
        )
        found = await source.read_latencies()
        await source.close()
        assert found.why_not.startswith("Prometheus: ")

    def test_own_queries_stand_for_the_known_series_of_their_kind(self) -> None:
        query = latency.build_latency_query("qwen", "default", {"ttft": "mine"}, has_objective=True)
        assert '"ttft/all/own query"' in query
        assert "vllm:time_to_first_token_seconds" not in query
        assert "vllm:inter_token_latency_seconds" in query

    async def test_own_queries_of_latencies_are_no_queries_for_readings(self) -> None:
        async with fake_prometheus() as server:
            server.show(GOOD)
            source = PrometheusSource(
                PrometheusAddress(server.url),
                "qwen",
                "default",
                timeout_s=5,
                max_age_s=60,
                queries={"ttft": "mine"},
            )
            seen = await source.poll()
            await source.close()
        assert isinstance(seen, tuple)
        assert isinstance(seen[0], PoolView)
