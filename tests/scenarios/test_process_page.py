"""The page of a running dispatcher: what it shows, what it costs, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from tests.browser import Browser, Page, chromium
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until

PAGES = 10
SECONDS = float(os.environ.get("PAGES_S", "600"))
CORE_SHARE = 0.03
"""What so many pages may cost."""
SETTLES_S = 5.0
"""After a submission: its requests are answered, and their connections (files, too) are still kept alive."""

STATE = "document.querySelector('#state').textContent"


def url_of(dispatcher: Dispatcher) -> str:
    return f"http://127.0.0.1:{dispatcher.events('started')[-1]['admin_port']}"


async def shows(page: Page, reason: str) -> bool:
    return f": {reason}." in await page.text("#badge")


async def says_the_same(page: Page, one: Dispatcher) -> bool:
    """Whether page and /status show one sentence. It counts requests, which end meanwhile."""
    told = await asyncio.to_thread(one.status)
    return await page.text("#sentence") == str(told["health_sentence"])


async def test_page_tells_what_the_dispatcher_tells_through_a_day(stage: Stage, browser: Browser) -> None:
    world = stage.world(slots=32, seconds=0.2)
    one = stage.dispatcher(stage.settings(world))
    async with browser.page() as page:
        await page.open(url_of(one))
        await wait_until(lambda: shows(page, "idle"), 20)
        stage.producer.submit(600)
        await wait_until(lambda: shows(page, "full"), 20)
        world.control(metrics="gone")
        await wait_until(lambda: shows(page, "unreadable"), 20)
        assert one.status()["reason"] == "unreadable"
        assert one.status()["explanation"].startswith(await page.text("#explanation"))
        await wait_until(lambda: _has(page, STATE, "Failing"), 20, what="the health on the page")
        await wait_until(lambda: says_the_same(page, one), 20, what="the sentence of the health on the page")
        assert await page.text("#bar") == "unknown", "nothing of the last reading remains"
        assert "unreadable" in await page.text("#events"), "with the events, the gate's among them"
        world.control(metrics="ok")
        await wait_until(lambda: asyncio.to_thread(lambda: one.status()["open"]), 20)
        one.reconfigure(budget={"reserve": 0.5})
        setting = (
            "[...document.querySelectorAll('#settings tr')].find(row =>"
            " row.textContent.startsWith('budget.reserve'))?.textContent ?? ''"
        )
        await wait_until(lambda: _has(page, setting, "0.5"), 20, what="the reload on the page")
        await wait_until(lambda: _has(page, "document.querySelector('#outcomes').textContent", "2xx"), 20)
        assert page.console == []
        assert page.network == []
        one.send(signal.SIGSTOP)
        await wait_until(lambda: _has(page, STATE, "No contact"), 60, what="the page to notice that it hangs")
        one.send(signal.SIGCONT)
        await wait_until(lambda: _has(page, "document.body.dataset.link", "live"), 60, what="the page")
        # The page gets one sample per second. The newest may be from before the stop or before a new reading.
        resumed_at = time.time()
        await wait_until(lambda: _shows_current_reason(page, resumed_at + 1.0), 20, what="a new reading")
        began = time.monotonic()
        assert await asyncio.to_thread(one.terminate) == 0
        assert time.monotonic() - began < 5, "an open page holds nothing up"
        await wait_until(lambda: _has(page, STATE, "No contact"))
        assert await _shows_current_reason(page, resumed_at + 1.0)


async def _shows_current_reason(page: Page, after: float) -> bool:
    """Return True if the newest sample of the page is from after this time, and the pool was read then."""
    newest = await page.ask("samples.at(-1)")
    return newest["at"] > after and newest["reason"] in ("draining", "idle", "full", "saturated", "open")


async def _has(page: Page, script: str, text: str) -> bool:
    return text in str(await page.ask(script))


@asynccontextmanager
async def readers(url: str, count: int) -> AsyncIterator[list[int]]:
    """So many that read /events as fast as it comes; how many bytes each has had."""
    had = [0] * count

    async def read(number: int) -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.get(f"{url}/events") as answer,
        ):
            assert answer.status == 200
            async for chunk in answer.content.iter_any():
                had[number] += len(chunk)

    tasks = [asyncio.create_task(read(number)) for number in range(count)]
    await wait_until(lambda: all(had))
    yield had
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cpu_over(process: psutil.Process, seconds: float) -> float:
    """CPU seconds that the process takes for each second of the next few."""

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    began, before = time.monotonic(), used()
    await asyncio.sleep(seconds)
    return (used() - before) / (time.monotonic() - began)


def connections(process: psutil.Process, port: int) -> int:
    """How many of its sockets are a client's of this port, and not the listener's."""
    sockets = process.net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in sockets)


async def test_open_pages_cost_next_to_nothing_and_leave_nothing_behind(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.2)
    one = stage.dispatcher(stage.settings(world))
    process = psutil.Process(one.child.pid)
    url = url_of(one)
    more = []
    for _ in range(3):
        async with readers(url, PAGES):
            assert connections(process, one.admin_port) == PAGES
            with_pages = await cpu_over(process, 2.0)
        more.append(with_pages - await cpu_over(process, 2.0))
    assert sorted(more)[1] < CORE_SHARE, more
    await wait_until(lambda: not connections(process, one.admin_port), what="every connection to be closed")


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_ten_pages_open_for_ten_minutes(stage: Stage) -> None:
    """In real browsers: what they cost the dispatcher, and what grows in it and in them."""
    world = stage.world(slots=32, seconds=0.2)
    one = stage.dispatcher(stage.settings(world))
    process = psutil.Process(one.child.pid)
    alone = await cpu_over(process, 30.0)
    async with AsyncExitStack() as stack:
        pages: list[Page] = []
        for _ in range(2):  # a browser opens six connections to one server at most
            browser = stack.enter_context(chromium())
            for _ in range(PAGES // 2):
                page = await stack.enter_async_context(browser.page())
                await page.open(url_of(one))
                pages.append(page)
        for page in pages:
            await wait_until(lambda page=page: shows(page, "idle"), 30)  # type: ignore[misc]
        stage.producer.submit(20)
        await asyncio.sleep(SETTLES_S)
        before = await _sizes(process, pages)
        shares = []
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            shares.append(await cpu_over(process, 30.0))
            stage.producer.submit(20)
        await asyncio.sleep(SETTLES_S)
        after = await _sizes(process, pages)
        samples = await pages[-1].ask("samples.length")
        complaints = [line for page in pages for line in (*page.console, *page.network)]
    cost = sum(shares) / len(shares) - alone
    print(f"alone {alone:.2%} of a core, {PAGES} pages more: {cost:.2%}, at most {max(shares) - alone:.2%}")
    print(f"before {before}, after {after}, samples in a page {samples}")
    assert cost < CORE_SHARE
    assert complaints == []
    assert samples > SECONDS * 0.95
    assert after["files"] <= before["files"] + 2
    assert after["rss_mb"] - before["rss_mb"] < 6, "the history of ten minutes is less than a megabyte"
    assert after["page_heap_mb"] - before["page_heap_mb"] < 4


async def _sizes(process: psutil.Process, pages: list[Page]) -> dict[str, Any]:
    heaps = []
    for page in pages:
        await page.call("HeapProfiler.collectGarbage")
        heaps.append((await page.call("Runtime.getHeapUsage"))["usedSize"] / 1e6)
    return {
        "rss_mb": round(process.memory_info().rss / 1e6, 1),
        "files": process.num_fds(),
        "page_heap_mb": round(max(heaps), 2),
        "nodes": await pages[0].ask("document.querySelectorAll('*').length"),
    }
