"""The page of a running dispatcher: its content, its cost, and that it delays nothing."""

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

from tests.browser import Browser, Page, start_chromium
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until

PAGE_COUNT = 10
DURATION_S = float(os.environ.get("PAGES_S", "600"))
MAX_CORE_FRACTION = 0.03
"""CPU that PAGE_COUNT pages may cost, as a fraction of a core."""
SETTLE_S = 5.0
"""Time after a submission: its requests are answered, and their connections (descriptors) are kept alive."""

STATE_TEXT_SCRIPT = "document.querySelector('#state').textContent"


def get_url(dispatcher: Dispatcher) -> str:
    return f"http://127.0.0.1:{dispatcher.events('started')[-1]['admin_port']}"


async def is_reason_shown(page: Page, reason: str) -> bool:
    return f": {reason}." in await page.get_text("#badge")


async def is_sentence_current(page: Page, dispatcher: Dispatcher) -> bool:
    """Return True if page and /status show the same sentence. It contains counts, which change meanwhile."""
    status = await asyncio.to_thread(dispatcher.status)
    return await page.get_text("#sentence") == str(status["health_sentence"])


@pytest.mark.slow
async def test_page_shows_the_state_of_the_dispatcher_while_it_changes(
    stage: Stage, browser: Browser
) -> None:
    world = stage.world(slots=32, seconds=0.2)
    dispatcher = stage.dispatcher(stage.settings(world))
    async with browser.page() as page:
        await page.open(get_url(dispatcher))
        await wait_until(lambda: is_reason_shown(page, "idle"), 20)
        stage.producer.submit(600)
        await wait_until(lambda: is_reason_shown(page, "full"), 20)
        world.control(metrics="gone")
        await wait_until(lambda: is_reason_shown(page, "unreadable"), 20)
        assert dispatcher.status()["reason"] == "unreadable"
        assert dispatcher.status()["explanation"].startswith(await page.get_text("#explanation"))
        await wait_until(
            lambda: _is_in_result(page, STATE_TEXT_SCRIPT, "Failing"), 20, what="the health on the page"
        )
        await wait_until(
            lambda: is_sentence_current(page, dispatcher), 20, what="the sentence of the health on the page"
        )
        assert await page.get_text("#bar") == "unknown", "values of the last reading are not shown any more"
        assert "unreadable" in await page.get_text("#events"), "the gate event is among the events"
        world.control(metrics="ok")
        await wait_until(lambda: asyncio.to_thread(lambda: dispatcher.status()["open"]), 20)
        dispatcher.reconfigure(budget={"reserve": 0.5})
        reserve_row_script = (
            "[...document.querySelectorAll('#settings tr')].find(row =>"
            " row.textContent.startsWith('budget.reserve'))?.textContent ?? ''"
        )
        await wait_until(
            lambda: _is_in_result(page, reserve_row_script, "0.5"), 20, what="the reload on the page"
        )
        await wait_until(
            lambda: _is_in_result(page, "document.querySelector('#outcomes').textContent", "2xx"), 20
        )
        assert page.console == []
        assert page.network == []
        dispatcher.send_signal(signal.SIGSTOP)
        await wait_until(
            lambda: _is_in_result(page, STATE_TEXT_SCRIPT, "No contact"),
            60,
            what="the page to notice that the dispatcher hangs",
        )
        dispatcher.send_signal(signal.SIGCONT)
        await wait_until(
            lambda: _is_in_result(page, "document.body.dataset.link", "live"),
            60,
            what="the page to reconnect",
        )
        # The page gets one sample per second. The newest may be from before the stop or before a new reading.
        resumed_at = time.time()
        await wait_until(lambda: _is_current_reason_shown(page, resumed_at + 1.0), 20, what="a new reading")
        started_at = time.monotonic()
        assert await asyncio.to_thread(dispatcher.terminate) == 0
        assert time.monotonic() - started_at < 30, "an open page does not delay the exit"
        await wait_until(lambda: _is_in_result(page, STATE_TEXT_SCRIPT, "No contact"))
        assert await _is_current_reason_shown(page, resumed_at + 1.0)


async def _is_current_reason_shown(page: Page, after: float) -> bool:
    """Return True if the newest sample of the page is from after this time, and the pool was read then."""
    newest = await page.evaluate("samples.at(-1)")
    return newest["at"] > after and newest["reason"] in ("draining", "idle", "full", "saturated", "open")


async def _is_in_result(page: Page, script: str, text: str) -> bool:
    return text in str(await page.evaluate(script))


@asynccontextmanager
async def read_events(url: str, count: int) -> AsyncIterator[list[int]]:
    """Run clients that read /events as fast as possible. Yield the number of bytes that each has read."""
    byte_counts = [0] * count

    async def read(number: int) -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.get(f"{url}/events") as answer,
        ):
            assert answer.status == 200
            async for chunk in answer.content.iter_any():
                byte_counts[number] += len(chunk)

    tasks = [asyncio.create_task(read(number)) for number in range(count)]
    await wait_until(lambda: all(byte_counts))
    yield byte_counts
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measure_cpu_fraction(process: psutil.Process, seconds: float) -> float:
    """Return the fraction of a core that the process uses during this time."""

    def get_cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    started_at, cpu_s_before = time.monotonic(), get_cpu_s()
    await asyncio.sleep(seconds)
    return (get_cpu_s() - cpu_s_before) / (time.monotonic() - started_at)


def count_connections(process: psutil.Process, port: int) -> int:
    """Return the number of client connections to this port."""
    sockets = process.net_connections("tcp")
    return sum(socket.laddr.port == port and socket.status != psutil.CONN_LISTEN for socket in sockets)


async def test_open_pages_cost_little_cpu_and_leave_no_connections(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.2)
    dispatcher = stage.dispatcher(stage.settings(world))
    process = psutil.Process(dispatcher.child.pid)
    url = get_url(dispatcher)
    increases = []
    for _ in range(3):
        async with read_events(url, PAGE_COUNT):
            assert count_connections(process, dispatcher.admin_port) == PAGE_COUNT
            cpu_with_pages = await measure_cpu_fraction(process, 2.0)
        increases.append(cpu_with_pages - await measure_cpu_fraction(process, 2.0))
    assert sorted(increases)[1] < MAX_CORE_FRACTION, increases
    await wait_until(
        lambda: not count_connections(process, dispatcher.admin_port), what="every connection to be closed"
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_ten_pages_open_for_ten_minutes(stage: Stage) -> None:
    """Measure with real browsers the CPU of the dispatcher, and the growth of its and their memory."""
    world = stage.world(slots=32, seconds=0.2)
    dispatcher = stage.dispatcher(stage.settings(world))
    process = psutil.Process(dispatcher.child.pid)
    cpu_without_pages = await measure_cpu_fraction(process, 30.0)
    async with AsyncExitStack() as stack:
        pages: list[Page] = []
        for _ in range(2):  # a browser opens at most six connections to one server
            browser = stack.enter_context(start_chromium())
            for _ in range(PAGE_COUNT // 2):
                page = await stack.enter_async_context(browser.page())
                await page.open(get_url(dispatcher))
                pages.append(page)
        for page in pages:
            await wait_until(lambda page=page: is_reason_shown(page, "idle"), 30)  # type: ignore[misc]
        stage.producer.submit(20)
        await asyncio.sleep(SETTLE_S)
        sizes_before = await _measure_sizes(process, pages)
        fractions = []
        until = time.monotonic() + DURATION_S
        while time.monotonic() < until:
            fractions.append(await measure_cpu_fraction(process, 30.0))
            stage.producer.submit(20)
        await asyncio.sleep(SETTLE_S)
        sizes_after = await _measure_sizes(process, pages)
        samples = await pages[-1].evaluate("samples.length")
        log_lines = [line for page in pages for line in (*page.console, *page.network)]
    cost = sum(fractions) / len(fractions) - cpu_without_pages
    print(
        f"{cpu_without_pages:.2%} of a core without pages, {PAGE_COUNT} pages add: "
        f"{cost:.2%}, at most {max(fractions) - cpu_without_pages:.2%}"
    )
    print(f"before {sizes_before}, after {sizes_after}, samples in a page {samples}")
    assert cost < MAX_CORE_FRACTION
    assert log_lines == []
    assert samples > DURATION_S * 0.95
    assert sizes_after["files"] <= sizes_before["files"] + 2
    assert sizes_after["rss_mb"] - sizes_before["rss_mb"] < 6, (
        "the history of ten minutes is less than a megabyte"
    )
    assert sizes_after["page_heap_mb"] - sizes_before["page_heap_mb"] < 4


async def _measure_sizes(process: psutil.Process, pages: list[Page]) -> dict[str, Any]:
    heaps = []
    for page in pages:
        await page.call("HeapProfiler.collectGarbage")
        heaps.append((await page.call("Runtime.getHeapUsage"))["usedSize"] / 1e6)
    return {
        "rss_mb": round(process.memory_info().rss / 1e6, 1),
        "files": process.num_fds(),
        "page_heap_mb": round(max(heaps), 2),
        "nodes": await pages[0].evaluate("document.querySelectorAll('*').length"),
    }
