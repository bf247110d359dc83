"""What a scrape costs: a large pool's page must neither eat a core nor hold up the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from dispatcher.core.limit.budget import Policy
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.settings import SignalsSettings
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.scrape import Targets
from tests.floors import beside
from tests.signals.fakes import fake_epp, golden
from tests.support import running, wait_until

PODS = 300


def large_page() -> bytes:
    """A page of 3 MB as 300 pods make it: their queues, a thousand flows, and histograms of many models."""
    draw = random.Random(1)
    lines = golden("router-newest-flow-control-on").splitlines()
    pods = [f"vllm-qwen-7f9c6d5b8{draw.getrandbits(32):08x}" for _ in range(PODS)]
    for pod in pods:
        lines.append(
            f'llm_d_epp_per_endpoint_queue_size{{model_server_endpoint="{pod}-rank-0",name="qwen"}} 1'
        )
        for status in ("success", "failure"):
            lines.append(
                f'llm_d_epp_scheduler_attempts_total{{endpoint_name="{pod}-rank-0",namespace="default",'
                f'port="8000",status="{status}",target_model_name="meta-llama/Llama-3.1-8B"}} 1234'
            )
    for flow in range(1000):
        lines.append(
            f'llm_d_epp_flow_control_queue_size{{fairness_id="tenant-{flow}",inference_pool="qwen",'
            f'model_name="meta-llama/Llama-3.1-8B",priority="0",target_model_name="m-{flow}"}} 0'
        )
    size, model = sum(len(line) + 1 for line in lines), 0
    while size < 3_000_000:
        for bound in ("0.005", "0.025", "0.1", "0.5", "1", "5", "10", "60", "600", "+Inf"):
            line = (
                f'llm_d_epp_request_duration_seconds_bucket{{fairness_id="tenant-{model}",model_name="m-{model}",'
                f'priority="0",target_model_name="m-{model}",le="{bound}"}} {draw.randrange(100_000)}'
            )
            lines.append(line)
            size += len(line) + 1
        model += 1
    return "\n".join([*lines, ""]).encode()


@contextlib.contextmanager
def served(path: Path) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("serve_page.py")), str(path)]
    with running(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
async def test_a_page_of_300_pods_is_cheap_and_leaves_the_loop_its_turns(
    tmp_path: Path, packed: bool
) -> None:
    """Reading the series costs at most five times what it takes to fetch the page and part its lines, and no
    piece of it, between two turns of the loop, as much as that alone. On an idle machine: 50 and 10 ms."""
    page = large_page()
    path = tmp_path / ("page.gz" if packed else "page")
    path.write_bytes(gzip.compress(page) if packed else page)
    pieces: list[float] = []
    before = 0.0

    def turn() -> None:
        nonlocal before
        now = time.thread_time()
        pieces.append(now - before)
        before = now
        handle[0] = loop.call_soon(turn)

    loop, handle = asyncio.get_running_loop(), list[asyncio.Handle]()
    with served(path) as url:
        async with aiohttp.ClientSession() as http:
            source = EppSource("qwen", Targets(urls=(url,)), timeout_s=20)

            async def scrape() -> float:
                began = time.thread_time()
                assert not isinstance(await source.poll(), ReadFailure)
                return time.thread_time() - began

            async def longest_piece() -> float:
                nonlocal before, handle
                before = time.thread_time()
                pieces.clear()
                handle = [loop.call_soon(turn)]
                assert not isinstance(await source.poll(), ReadFailure)
                handle[0].cancel()
                return max(pieces)

            async def bare() -> float:
                began = time.thread_time()
                async with http.get(url) as answer:
                    assert len((await answer.text()).splitlines()) > 10 * PODS
                return time.thread_time() - began

            whole, piece = await beside(scrape, bare), await beside(longest_piece, bare)
            await source.close()
    print(
        f"\n{len(page) / 1e6:.1f} MB page: {whole.ours * 1000:.0f} ms CPU a scrape, {whole.ratio:.1f} × what "
        f"it takes to fetch; longest piece {piece.ours * 1000:.1f} ms, {piece.ratio:.2f} ×"
    )
    assert whole.ratio <= 5
    assert piece.ratio <= 1


async def test_polling_an_ordinary_page_each_second_takes_no_hundredth_of_a_core() -> None:
    """Over fifty polls in a row; the server works in this thread too, so that this is an upper bound."""
    told: list[SourcePoll] = []
    async with fake_epp() as epp:
        source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20)
        poller = Poller([source], SignalsSettings.model_validate({"interval_s": 0.05}), Policy(), told.append)
        polling = asyncio.create_task(poller.run())
        try:
            await wait_until(lambda: len(told) >= 5, every_s=0.1)
            began, count = time.thread_time(), len(told)
            await wait_until(lambda: len(told) >= count + 50, 60, every_s=0.1)
            each_s = (time.thread_time() - began) / (len(told) - count)
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
    print(f"\n{each_s * 1000:.2f} ms CPU a poll, with the server's share")
    assert each_s <= 0.010
