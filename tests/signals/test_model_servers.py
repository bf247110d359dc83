"""Readings from the metrics pages of single model servers. The pages follow the documentation of each
server."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dispatcher.check.readings import check_sources
from dispatcher.limit.budget import KvUse, Policy, Reason, Signal
from dispatcher.limit.poll import ReadFailure
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.yaml_source import Problem
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.model_servers import ModelServersSource
from dispatcher.signals.readings import derive_readings
from dispatcher.signals.scrape import Targets
from dispatcher.signals.sources import build_sources
from tests.signals.fakes import ANSWER_TIMEOUT_S, read_page, serving
from tests.support import free_port

PAGES = Path(__file__).parent / "servers"
VLLM = (PAGES / "vllm-0.11.txt").read_text()


def vllm_page_without(text: str) -> str:
    return "".join(line for line in VLLM.splitlines(keepends=True) if text not in line)


@contextlib.asynccontextmanager
async def serve_pages(*pages: str | int) -> AsyncIterator[tuple[str, ...]]:
    """Run a server for each page. A number is an HTTP status instead of a page."""

    def answer(page: str | int) -> Callable[[web.Request], Any]:
        async def respond(request: web.Request) -> web.Response:
            return web.Response(text=page) if isinstance(page, str) else web.Response(status=page)

        return respond

    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(serving(answer(page))) for page in pages]
        yield tuple(f"http://127.0.0.1:{port}" for port in ports)


async def poll_servers(urls: tuple[str, ...]) -> tuple[PoolView, ...] | ReadFailure:
    source = ModelServersSource(Targets(urls=urls), timeout_s=ANSWER_TIMEOUT_S)
    try:
        return await source.poll()
    finally:
        await source.close()


async def read_view(*pages: str) -> PoolView:
    async with serve_pages(*pages) as urls:
        result = await poll_servers(urls)
    assert not isinstance(result, ReadFailure), result
    (view,) = result
    return view


async def read_failure(*pages: str | int) -> ReadFailure:
    async with serve_pages(*pages) as urls:
        result = await poll_servers(urls)
    assert isinstance(result, ReadFailure)
    assert result.reason is Reason.UNREADABLE
    return result


@pytest.mark.parametrize(
    ("page", "running", "waiting", "kv_cache", "kv_tokens"),
    [
        ("vllm-newest", 20, 2, 0.41, 240_000),
        ("vllm-0.11", 20, 2, 0.41, None),
        ("vllm-0.6", 8, 4, 0.97, None),  # one request was swapped out, so it waits
        ("sglang", 6, 1, 0.28, 80_000),  # its two ranks run the same requests
        ("tensorrt-llm", 4, 0, None, None),
    ],
)
async def test_pages_of_each_kind_of_server_are_read(
    page: str, running: float, waiting: float, kv_cache: float | None, kv_tokens: float | None
) -> None:
    view = await read_view((PAGES / f"{page}.txt").read_text())
    assert (view.running, view.waiting, view.ready) == (running, waiting, 1)
    assert (view.kv_cache, view.kv_tokens) == (kv_cache, kv_tokens)


async def test_values_of_all_servers_are_summed() -> None:
    view = await read_view(VLLM, (PAGES / "vllm-0.6.txt").read_text(), (PAGES / "sglang.txt").read_text())
    verdict = derive_readings([view], "auto", Policy(per_endpoint=32), "vllm")
    (reading,) = verdict.readings
    assert (reading.signal, reading.max_sys, reading.f_epp) == (Signal.REQUESTS, 96, 0)
    assert reading.f_sys == pytest.approx((20 + 2 + 8 + 4 + 6 + 1) / 96)
    assert (reading.opened_at, reading.closed_at) == (view.opened_at, view.closed_at)
    assert reading.running == pytest.approx(34)
    assert reading.waiting == pytest.approx(7)
    assert (reading.has_exact_counts, reading.averages) == (True, None)
    assert reading.raw_values == {"servers": 3, "running": 34, "waiting": 7, "kv_cache_most": 0.97}


async def test_requests_that_wait_in_one_server_while_another_has_room_are_uneven() -> None:
    idle = re.sub(r"(num_requests_(?:running|waiting){.*}) .*", r"\1 0", VLLM)
    just_full = re.sub(r"(num_requests_waiting{.*}) .*", r"\1 0", VLLM)
    for pages, is_uneven in (((VLLM, idle), True), ((VLLM, VLLM), False), ((VLLM, just_full), False)):
        verdict = derive_readings([await read_view(*pages)], "auto", Policy(per_endpoint=32), "vllm")
        assert [each.is_uneven for each in verdict.readings] == [is_uneven]


def page_with_waiting_reasons(reasons: dict[str, str]) -> str:
    """Return a page of vLLM with two waiting requests and the series of a newer version with the reasons."""
    lines = [
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}} {number}'
        for reason, number in reasons.items()
    ]
    return VLLM + "\n".join([*lines, ""])


@pytest.mark.parametrize(
    ("reasons", "waiting_for_capacity"),
    [
        ({"capacity": "0", "deferred": "2"}, 0),
        ({"capacity": "1", "deferred": "1"}, 1),
        ({"deferred": "1"}, 1),
        ({"capacity": "2"}, 2),
        ({"deferred": "1", "a newer reason": "1"}, 1),
        # The series disagree or are impossible: the largest number that one of them allows is used.
        ({"capacity": "2", "deferred": "2"}, 2),
        ({"capacity": "5", "deferred": "1"}, 2),
        ({"capacity": "0", "deferred": "3"}, 2),
        ({"capacity": "0", "deferred": "-1"}, 2),
        ({"capacity": "0", "deferred": "NaN"}, 2),
        ({"capacity": "NaN", "deferred": "2"}, 2),
        ({"capacity": "0", "deferred": "+Inf"}, 2),
    ],
)
async def test_deferred_requests_are_load_but_do_not_show_a_full_server(
    reasons: dict[str, str], waiting_for_capacity: int
) -> None:
    (reading,) = derive_readings(
        [await read_view(page_with_waiting_reasons(reasons))], "auto", Policy(per_endpoint=32), "vllm"
    ).readings
    assert reading.waiting == waiting_for_capacity
    assert reading.load == pytest.approx(22), (
        "deferred requests run soon, and batch requests among them have been sent"
    )


async def test_capacity_that_no_page_shows_is_searched_for() -> None:
    verdict = derive_readings([await read_view(VLLM)], "auto", Policy(), "vllm")
    (reading,) = verdict.readings
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (8, "search")
    assert (reading.max_sys, reading.is_capacity_known) == (8, False)


def page_with_limits(*limits: str | float) -> str:
    """Return a page of vLLM with the limit of each of its engines."""
    lines = [
        f'vllm:max_num_seqs{{engine="{number}",model_name="m"}} {limit}'
        for number, limit in enumerate(limits)
    ]
    return VLLM + "\n".join([*lines, ""])


SGLANG = (PAGES / "sglang.txt").read_text()
SGLANG_WITH_LIMIT = SGLANG + "".join(
    f'sglang:max_running_requests_under_SLO{{model_name="m",pp_rank="0",tp_rank="{rank}"}} 48.0\n'
    for rank in (0, 1)
)


def sglang_gauge(name: str, value: float, priority: str = "") -> str:
    """Return a line of SGLang's page as a version with priority scheduling writes it."""
    return f'sglang:{name}{{model_name="m",pp_rank="0",priority="{priority}",tp_rank="0"}} {value}\n'


async def test_values_of_sglang_by_priority_are_not_added_to_their_total() -> None:
    page = "".join(
        sglang_gauge(name, value, priority)
        for name, values in {"num_running_reqs": (6, 4, 2), "num_queue_reqs": (3, 0, 3)}.items()
        for value, priority in zip(values, ("", "0", "10"), strict=True)
    )
    view = await read_view(page)
    assert (view.running, view.waiting) == (6, 3)


async def test_requests_that_wait_for_a_grammar_in_sglang_are_load_but_do_not_show_a_full_server() -> None:
    page = SGLANG + sglang_gauge("num_grammar_queue_reqs", 2)
    (reading,) = derive_readings([await read_view(page)], "auto", Policy(per_endpoint=32), "vllm").readings
    assert reading.load == pytest.approx(6 + 1 + 2)
    assert reading.waiting == 1


async def test_capacity_is_the_sum_of_the_limits_if_all_servers_show_one() -> None:
    """The limits of engines are summed. Of the ranks of one engine the first counts, as for running
    requests."""
    view = await read_view(page_with_limits(128, 64), SGLANG_WITH_LIMIT)
    assert view.per_endpoint == pytest.approx((128 + 64 + 48) / 2)
    assert view.raw == {"servers": 2, "running": 26, "waiting": 3, "kv_cache_most": 0.41, "limit": 240}
    verdict = derive_readings([view], "auto", Policy(), "vllm")
    (reading,) = verdict.readings
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (120, "server")
    assert (reading.max_sys, reading.is_capacity_known) == (240, True)
    assert reading.f_sys == pytest.approx((26 + 3) / 240)


@pytest.mark.parametrize(
    ("policy", "source", "max_sys"),
    [(Policy(per_endpoint=32), "setting", 64), (Policy(max_sys=50), None, 50)],
)
async def test_setting_takes_precedence_over_the_limits_of_the_servers(
    policy: Policy, source: str | None, max_sys: float
) -> None:
    verdict = derive_readings(
        [await read_view(page_with_limits(128, 64), SGLANG_WITH_LIMIT)], "auto", policy, "vllm"
    )
    (reading,) = verdict.readings
    assert verdict.per_endpoint_source == source
    assert (reading.max_sys, reading.is_capacity_known) == (max_sys, True)


@pytest.mark.parametrize(
    "other",
    [
        VLLM,
        SGLANG,
        page_with_limits(0),
        page_with_limits(-1),
        page_with_limits("NaN"),
        page_with_limits("+Inf"),
        page_with_limits(64, "NaN"),
    ],
)
async def test_limits_are_ignored_unless_every_server_shows_a_positive_number(other: str) -> None:
    view = await read_view(page_with_limits(128), other)
    assert view.per_endpoint is None
    assert "limit" not in view.raw
    assert derive_readings([view], "auto", Policy(), "vllm").per_endpoint_source == "search"


async def test_check_reports_the_limit_of_the_servers() -> None:
    async with serve_pages(page_with_limits(128), SGLANG_WITH_LIMIT) as urls:
        parsed = parse_signals(f"{{vllm: {{urls: {list(urls)}}}}}")
        assert isinstance(parsed, Settings)
        findings = await check_sources(parsed, build_sources(parsed))
    findings_of_limit = [
        (finding.level, finding.what) for finding in findings if finding.where == "budget.per_endpoint"
    ]
    assert findings_of_limit == [("ok", "auto: 88, by the model servers' own pages")]


# Use of the KV memory.

VLLM_NEWEST = (PAGES / "vllm-newest.txt").read_text()
CACHE_SIZE = 'kv_cache_size_tokens="120000"'


def page_with_cache_size(label: str) -> str:
    """Return a page of vLLM on which the second of two engines has this label for the size of its cache."""
    before, size, after = VLLM_NEWEST.rpartition(CACHE_SIZE)
    assert size
    return f"{before}{label}{after}"


def sglang_page_with_tokens(value: str) -> str:
    page = SGLANG.replace("80000.0", value)
    assert page != SGLANG
    return page


async def derive_kv_use(*pages: str) -> KvUse | None:
    view = await read_view(*pages)
    (reading,) = derive_readings([view], "auto", Policy(per_endpoint=32), "vllm").readings
    if reading.kv_use is not None:
        assert (reading.kv_use.opened_at, reading.kv_use.closed_at) == (view.opened_at, view.closed_at)
    return reading.kv_use


async def test_kv_use_is_weighted_by_the_sizes_of_the_caches_if_all_servers_show_them() -> None:
    """The fullest engine of the first server uses 0.41 of its cache."""
    kv_use = await derive_kv_use(VLLM_NEWEST, SGLANG)
    assert kv_use is not None
    assert (kv_use.capacity_tokens, kv_use.endpoints) == (320_000, 2)
    assert kv_use.share == pytest.approx(0.75 * 0.41 + 0.25 * 0.28)


async def test_kv_use_is_the_plain_mean_if_a_server_does_not_show_the_size_of_its_cache() -> None:
    kv_use = await derive_kv_use(VLLM_NEWEST, SGLANG, VLLM)
    assert kv_use is not None
    assert (kv_use.capacity_tokens, kv_use.endpoints) == (None, 3)
    assert kv_use.share == pytest.approx((0.41 + 0.28 + 0.41) / 3)


@pytest.mark.parametrize(
    "page",
    [
        *map(
            page_with_cache_size,
            (
                'other=""',
                'kv_cache_size_tokens=""',
                'kv_cache_size_tokens="None"',
                'kv_cache_size_tokens="NaN"',
                'kv_cache_size_tokens="-5"',
                'kv_cache_size_tokens="0"',
                'kv_cache_size_tokens="1e400"',
                "kv_cache_size_tokens=120000",
            ),
        ),
        VLLM_NEWEST.replace(CACHE_SIZE, 'kv_cache_size_tokens="1e308"'),
        # The size of one of two engines is missing, or is there twice.
        "".join(line for line in VLLM_NEWEST.splitlines(keepends=True) if 'engine="1",gpu' not in line),
        "".join(line * (1 + ('engine="1",gpu' in line)) for line in VLLM_NEWEST.splitlines(keepends=True)),
        *map(sglang_page_with_tokens, ("NaN", "-5", "0", "1e400", "many")),
    ],
)
async def test_size_of_a_cache_is_ignored_unless_each_engine_shows_a_positive_number(page: str) -> None:
    """The other values of the page stay valid, whatever the series of the size contains."""
    kv_use = await derive_kv_use(page)
    assert kv_use is not None
    assert kv_use.capacity_tokens is None
    assert kv_use.share == (0.28 if "sglang" in page else 0.41)
    both = await derive_kv_use(VLLM_NEWEST, page)
    assert both is not None
    assert both.capacity_tokens is None, "a sum without this server is too small"


async def test_sizes_of_caches_whose_sum_is_not_finite_are_ignored() -> None:
    large = sglang_page_with_tokens("1.2e308")
    kv_use = await derive_kv_use(large, large)
    assert kv_use is not None
    assert (kv_use.capacity_tokens, kv_use.share) == (None, 0.28)


async def test_kv_use_is_unknown_if_a_server_does_not_show_its_share() -> None:
    without_share = "".join(
        line for line in VLLM_NEWEST.splitlines(keepends=True) if "kv_cache_usage_perc" not in line
    )
    assert await derive_kv_use(without_share) is None
    assert await derive_kv_use(VLLM_NEWEST, without_share) is None


@pytest.mark.parametrize("other", [VLLM, SGLANG], ids=["plain mean", "weighted mean"])
async def test_kv_use_of_a_server_that_is_nan_stays_visible(other: str) -> None:
    kv_use = await derive_kv_use(VLLM_NEWEST.replace("} 0.35", "} NaN"), other)
    assert kv_use is not None
    assert math.isnan(kv_use.share)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("", "none of the series of vLLM, SGLang or TensorRT-LLM is there"),
        (read_page("router-newest-flow-control-on"), "none of the series of vLLM"),
        (
            vllm_page_without("waiting"),
            "vllm:num_requests_waiting is not",
        ),
        (
            vllm_page_without("running"),
            "vllm:num_requests_running is not",
        ),
        ("vllm:num_requests_running{", "the page is malformed"),
        (503, "HTTP 503"),
        (401, "HTTP 401"),
    ],
)
async def test_unreadable_server_is_a_failure(page: str | int, expected: str) -> None:
    failure = await read_failure(VLLM, page)
    assert failure.why.startswith("127.0.0.1:")
    assert expected in failure.why


async def test_unreachable_server_is_a_failure() -> None:
    async with serve_pages(VLLM) as urls:
        result = await poll_servers((*urls, f"http://127.0.0.1:{free_port()}"))
    assert isinstance(result, ReadFailure)
    assert "refused" in result.why


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3"])
async def test_impossible_numbers_stay_visible_in_the_reading(value: str) -> None:
    page = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 0\n"
    (reading,) = derive_readings([await read_view(page)], "auto", Policy(per_endpoint=32), "vllm").readings
    assert not 0 <= reading.f_sys < float("inf")


async def test_each_address_of_a_service_is_read() -> None:
    async with serve_pages(VLLM) as (url,):
        targets = Targets(service="localhost", port=int(url.rpartition(":")[2]))
        source = ModelServersSource(targets, timeout_s=ANSWER_TIMEOUT_S)
        try:
            result = await source.poll()
        finally:
            await source.close()
    assert not isinstance(result, ReadFailure)
    assert result[0].ready == 1


def parse_signals(signals: str) -> Settings | list[Problem]:
    return parse_settings(f"gateway: {{url: 'http://gateway'}}\nsignals: {signals}\n", {})


@pytest.mark.parametrize(
    "signals", ["{vllm: {service: vllm}}", "{source: vllm, vllm: {urls: ['http://a:8000']}}"]
)
def test_configured_model_servers_are_the_only_source(signals: str) -> None:
    parsed = parse_signals(signals)
    assert isinstance(parsed, Settings)
    assert [source.name for source in build_sources(parsed)] == ["vllm"]
    assert parsed.limit_policy().max_age_s == 10


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ("{source: vllm}", "urls or service is required"),
        ("{source: epp, vllm: {service: vllm}}", "signals.source is epp"),
        ("{vllm: {service: vllm}, epp: {service: epp}}", "stands beside signals.epp"),
        ("{vllm: {service: vllm}, use: saturation}", "shows requests alone"),
        ("{vllm: {urls: ['http://a:8000', 'http://a:8000/metrics']}}", "has a server twice"),
        ("{vllm: {urls: ['http://a:8000'], service: vllm}}", "give one of them"),
    ],
)
def test_contradicting_settings_are_rejected(signals: str, expected: str) -> None:
    found = parse_signals(signals)
    assert isinstance(found, list)
    assert any(expected in str(problem) for problem in found), list(map(str, found))


async def test_check_reports_the_values_of_the_servers_and_warns_about_the_unknown_limit() -> None:
    async with serve_pages(VLLM, (PAGES / "sglang.txt").read_text()) as urls:
        parsed = parse_signals(f"{{vllm: {{urls: {list(urls)}}}}}")
        assert isinstance(parsed, Settings)
        findings = await check_sources(parsed, build_sources(parsed))
    duration, values, *_ = (finding.what for finding in findings)
    assert duration.startswith("2 model servers, read in ")
    assert values.startswith("servers 2, running 26, waiting 3, kv_cache_most 0.41, ")
    warnings = [(finding.where, finding.what) for finding in findings if finding.level == "warning"]
    assert warnings == [
        (
            "budget.per_endpoint",
            "auto: not known, so it is searched for, starting at 8 requests per endpoint",
        )
    ]
    assert not any(finding.level == "failed" for finding in findings)
