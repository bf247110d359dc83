"""Model servers asked one by one. Their pages are made after the documentation of each, not recorded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dispatcher.check.readings import check_sources
from dispatcher.core.limit.budget import Policy, Reason, Signal
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.settings import Problem, Settings, parse_settings
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.model_servers import ModelServersSource
from dispatcher.signals.readings import derive_readings
from dispatcher.signals.scrape import Targets
from dispatcher.signals.sources import build_sources
from tests.signals.fakes import PATIENT_S, golden, serving
from tests.support import free_port

PAGES = Path(__file__).parent / "servers"
VLLM = (PAGES / "vllm-0.11.txt").read_text()


def without(what: str) -> str:
    return "".join(line for line in VLLM.splitlines(keepends=True) if what not in line)


@contextlib.asynccontextmanager
async def servers(*pages: str | int) -> AsyncIterator[tuple[str, ...]]:
    """A server for each page; a number is a status instead."""

    def answer(page: str | int) -> Callable[[web.Request], Any]:
        async def respond(request: web.Request) -> web.Response:
            return web.Response(text=page) if isinstance(page, str) else web.Response(status=page)

        return respond

    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(serving(answer(page))) for page in pages]
        yield tuple(f"http://127.0.0.1:{port}" for port in ports)


async def poll(urls: tuple[str, ...]) -> tuple[PoolView, ...] | ReadFailure:
    source = ModelServersSource(Targets(urls=urls), timeout_s=PATIENT_S)
    try:
        return await source.poll()
    finally:
        await source.close()


async def view_of(*pages: str) -> PoolView:
    async with servers(*pages) as urls:
        seen = await poll(urls)
    assert not isinstance(seen, ReadFailure), seen
    (view,) = seen
    return view


async def unread(*pages: str | int) -> ReadFailure:
    async with servers(*pages) as urls:
        seen = await poll(urls)
    assert isinstance(seen, ReadFailure)
    assert seen.reason is Reason.UNREADABLE
    return seen


@pytest.mark.parametrize(
    ("page", "running", "waiting", "kv_cache"),
    [
        ("vllm-0.11", 20, 2, 0.41),
        ("vllm-0.6", 8, 4, 0.97),  # one was swapped out: it waits
        ("sglang", 6, 1, 0.28),  # its two ranks serve the same requests
        ("tensorrt-llm", 4, 0, None),
    ],
)
async def test_each_kind_of_server_is_read(
    page: str, running: float, waiting: float, kv_cache: float | None
) -> None:
    view = await view_of((PAGES / f"{page}.txt").read_text())
    assert (view.running, view.waiting, view.kv_cache, view.ready) == (running, waiting, kv_cache, 1)


async def test_servers_add_up_and_nothing_is_taken_for_older_than_the_pages() -> None:
    view = await view_of(VLLM, (PAGES / "vllm-0.6.txt").read_text(), (PAGES / "sglang.txt").read_text())
    verdict = derive_readings([view], "auto", Policy(per_endpoint=32), "vllm")
    (reading,) = verdict.readings
    assert (reading.signal, reading.max_sys, reading.f_epp) == (Signal.REQUESTS, 96, 0)
    assert reading.f_sys == pytest.approx((20 + 2 + 8 + 4 + 6 + 1) / 96)
    assert (reading.opened_at, reading.closed_at) == (view.opened_at, view.closed_at)
    assert reading.running == pytest.approx(34)
    assert reading.waiting == pytest.approx(7)
    assert (reading.has_exact_counts, reading.averages) == (True, None)
    assert reading.raw_values == {"servers": 3, "running": 34, "waiting": 7, "kv_cache_most": 0.97}


def waits(reasons: dict[str, str]) -> str:
    """Return a page of vLLM with two waiting requests and the series of a newer version with the reasons."""
    lines = [
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}} {number}'
        for reason, number in reasons.items()
    ]
    return VLLM + "\n".join([*lines, ""])


@pytest.mark.parametrize(
    ("reasons", "for_capacity"),
    [
        ({"capacity": "0", "deferred": "2"}, 0),
        ({"capacity": "1", "deferred": "1"}, 1),
        ({"deferred": "1"}, 1),
        ({"capacity": "2"}, 2),
        ({"deferred": "1", "a newer reason": "1"}, 1),
        # The series disagree, or are impossible: the largest number that one of them allows counts.
        ({"capacity": "2", "deferred": "2"}, 2),
        ({"capacity": "5", "deferred": "1"}, 2),
        ({"capacity": "0", "deferred": "3"}, 2),
        ({"capacity": "0", "deferred": "-1"}, 2),
        ({"capacity": "0", "deferred": "NaN"}, 2),
        ({"capacity": "NaN", "deferred": "2"}, 2),
        ({"capacity": "0", "deferred": "+Inf"}, 2),
    ],
)
async def test_deferred_requests_are_load_but_no_sign_of_a_full_server(
    reasons: dict[str, str], for_capacity: int
) -> None:
    (reading,) = derive_readings(
        [await view_of(waits(reasons))], "auto", Policy(per_endpoint=32), "vllm"
    ).readings
    assert reading.waiting == for_capacity
    assert reading.load == pytest.approx(22), "they run in a moment, and ours among them have been sent"


async def test_a_capacity_that_no_page_shows_is_searched_for() -> None:
    verdict = derive_readings([await view_of(VLLM)], "auto", Policy(), "vllm")
    (reading,) = verdict.readings
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (8, "search")
    assert (reading.max_sys, reading.is_capacity_known) == (8, False)


def limited(*limits: str | float) -> str:
    """A page of vLLM with the limit of each of its engines."""
    lines = [
        f'vllm:max_num_seqs{{engine="{number}",model_name="m"}} {limit}'
        for number, limit in enumerate(limits)
    ]
    return VLLM + "\n".join([*lines, ""])


SGLANG = (PAGES / "sglang.txt").read_text()
SGLANG_LIMITED = SGLANG + "".join(
    f'sglang:max_running_requests_under_SLO{{model_name="m",pp_rank="0",tp_rank="{rank}"}} 48.0\n'
    for rank in (0, 1)
)


def sglang_gauge(name: str, value: float, priority: str = "") -> str:
    """Return a line of SGLang's page as a version with priority scheduling writes it."""
    return f'sglang:{name}{{model_name="m",pp_rank="0",priority="{priority}",tp_rank="0"}} {value}\n'


async def test_sglangs_parts_by_priority_are_not_added_to_their_total() -> None:
    page = "".join(
        sglang_gauge(name, value, priority)
        for name, values in {"num_running_reqs": (6, 4, 2), "num_queue_reqs": (3, 0, 3)}.items()
        for value, priority in zip(values, ("", "0", "10"), strict=True)
    )
    view = await view_of(page)
    assert (view.running, view.waiting) == (6, 3)


async def test_requests_that_wait_for_a_grammar_in_sglang_are_load_but_no_sign_of_a_full_server() -> None:
    page = SGLANG + sglang_gauge("num_grammar_queue_reqs", 2)
    (reading,) = derive_readings([await view_of(page)], "auto", Policy(per_endpoint=32), "vllm").readings
    assert reading.load == pytest.approx(6 + 1 + 2)
    assert reading.waiting == 1


async def test_limits_that_all_servers_show_are_the_capacity() -> None:
    """The limits of engines add up, and of the ranks of one engine the first counts, as for what runs."""
    view = await view_of(limited(128, 64), SGLANG_LIMITED)
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
async def test_a_setting_wins_over_the_limits_that_the_servers_show(
    policy: Policy, source: str | None, max_sys: float
) -> None:
    verdict = derive_readings([await view_of(limited(128, 64), SGLANG_LIMITED)], "auto", policy, "vllm")
    (reading,) = verdict.readings
    assert verdict.per_endpoint_source == source
    assert (reading.max_sys, reading.is_capacity_known) == (max_sys, True)


@pytest.mark.parametrize(
    "other", [VLLM, SGLANG, limited(0), limited(-1), limited("NaN"), limited("+Inf"), limited(64, "NaN")]
)
async def test_limits_do_not_count_unless_every_server_shows_a_positive_number(other: str) -> None:
    view = await view_of(limited(128), other)
    assert view.per_endpoint is None
    assert "limit" not in view.raw
    assert derive_readings([view], "auto", Policy(), "vllm").per_endpoint_source == "search"


async def test_check_tells_that_the_servers_show_their_limit() -> None:
    async with servers(limited(128), SGLANG_LIMITED) as urls:
        read = settings(f"{{vllm: {{urls: {list(urls)}}}}}")
        assert isinstance(read, Settings)
        findings = await check_sources(read, build_sources(read))
    told = [(finding.level, finding.what) for finding in findings if finding.where == "budget.per_endpoint"]
    assert told == [("ok", "auto: 88, by the model servers' own pages")]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "none of the series of vLLM, SGLang or TensorRT-LLM is there"),
        (golden("router-newest-flow-control-on"), "none of the series of vLLM"),
        (
            without("waiting"),
            "vllm:num_requests_waiting is not",
        ),
        (
            without("running"),
            "vllm:num_requests_running is not",
        ),
        ("vllm:num_requests_running{", "the page is malformed"),
        (503, "HTTP 503"),
        (401, "HTTP 401"),
    ],
)
async def test_one_server_that_cannot_be_read_hides_what_runs_there(page: str | int, said: str) -> None:
    told = await unread(VLLM, page)
    assert told.why.startswith("127.0.0.1:")
    assert said in told.why


async def test_server_that_is_gone_is_told() -> None:
    async with servers(VLLM) as urls:
        seen = await poll((*urls, f"http://127.0.0.1:{free_port()}"))
    assert isinstance(seen, ReadFailure)
    assert "refused" in seen.why


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3"])
async def test_numbers_that_cannot_be_reach_the_limiter_which_refuses_them(value: str) -> None:
    page = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 0\n"
    (reading,) = derive_readings([await view_of(page)], "auto", Policy(per_endpoint=32), "vllm").readings
    assert not 0 <= reading.f_sys < float("inf")


async def test_each_address_behind_a_service_is_asked() -> None:
    async with servers(VLLM) as (url,):
        targets = Targets(service="localhost", port=int(url.rpartition(":")[2]))
        source = ModelServersSource(targets, timeout_s=PATIENT_S)
        try:
            seen = await source.poll()
        finally:
            await source.close()
    assert not isinstance(seen, ReadFailure)
    assert seen[0].ready == 1


def settings(signals: str) -> Settings | list[Problem]:
    return parse_settings(f"gateway: {{url: 'http://gateway'}}\nsignals: {signals}\n", {})


@pytest.mark.parametrize(
    "signals", ["{vllm: {service: vllm}}", "{source: vllm, vllm: {urls: ['http://a:8000']}}"]
)
def test_servers_that_are_named_are_the_only_source(signals: str) -> None:
    read = settings(signals)
    assert isinstance(read, Settings)
    assert [source.name for source in build_sources(read)] == ["vllm"]
    assert read.limit_policy().max_age_s == 10


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ("{source: vllm}", "urls or service is required"),
        ("{source: epp, vllm: {service: vllm}}", "signals.source is epp"),
        ("{vllm: {service: vllm}, epp: {service: epp}}", "stands beside signals.epp"),
        ("{vllm: {service: vllm}, use: saturation}", "shows requests alone"),
        ("{vllm: {urls: ['http://a:8000', 'http://a:8000/metrics']}}", "has a server twice"),
        ("{vllm: {urls: ['http://a:8000'], service: vllm}}", "give one of them"),
    ],
)
def test_settings_that_contradict_are_refused(signals: str, said: str) -> None:
    found = settings(signals)
    assert isinstance(found, list)
    assert any(said in str(problem) for problem in found), list(map(str, found))


async def test_check_tells_what_the_servers_show_and_asks_for_their_limit() -> None:
    async with servers(VLLM, (PAGES / "sglang.txt").read_text()) as urls:
        read = settings(f"{{vllm: {{urls: {list(urls)}}}}}")
        assert isinstance(read, Settings)
        findings = await check_sources(read, build_sources(read))
    read_in, shown, *_ = (finding.what for finding in findings)
    assert read_in.startswith("2 model servers, read in ")
    assert shown.startswith("servers 2, running 26, waiting 3, kv_cache_most 0.41, ")
    warned = [(finding.where, finding.what) for finding in findings if finding.level == "warning"]
    assert warned == [
        (
            "budget.per_endpoint",
            "auto: not known, so it is searched for, starting at 8 requests per endpoint",
        )
    ]
    assert not any(finding.level == "failed" for finding in findings)
