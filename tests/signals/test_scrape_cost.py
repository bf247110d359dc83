"""CPU time of a scrape: the page of a large pool must not use a whole core or block the event loop."""

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

import pytest

from dispatcher.limit.budget import Policy
from dispatcher.limit.poll import ReadFailure
from dispatcher.settings.signals import SignalsSettings
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.scrape import Targets
from tests.cost_comparison import compare_costs
from tests.signals.fakes import fake_epp, read_page
from tests.support import running_process, wait_until

PODS = 300


def large_page() -> bytes:
    """Return a page of 3 MB as 300 pods produce it: their queues, a thousand flows, and histograms of many
    models."""
    generator = random.Random(1)
    lines = read_page("router-newest-flow-control-on").splitlines()
    pods = [f"vllm-qwen-7f9c6d5b8{generator.getrandbits(32):08x}" for _ in range(PODS)]
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
                f'priority="0",target_model_name="m-{model}",le="{bound}"}} {generator.randrange(100_000)}'
            )
            lines.append(line)
            size += len(line) + 1
        model += 1
    return "\n".join([*lines, ""]).encode()


@contextlib.contextmanager
def serve_file(path: Path) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("serve_page.py")), str(path)]
    with running_process(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
async def test_page_of_300_pods_is_cheap_and_does_not_block_the_event_loop(
    tmp_path: Path, compressed: bool
) -> None:
    """Fetching the page and reading its series costs at most five times as much as splitting its lines at
    their spaces, and no step between two turns of the event loop costs more than that. On an idle machine
    the scrape takes 40 ms and the longest step 6 ms."""
    page = large_page()
    path = tmp_path / ("page.gz" if compressed else "page")
    path.write_bytes(gzip.compress(page) if compressed else page)
    step_times_s: list[float] = []
    before = 0.0

    def record_step() -> None:
        nonlocal before
        now = time.thread_time()
        step_times_s.append(now - before)
        before = now
        handle[0] = loop.call_soon(record_step)

    def split_page() -> float:
        started_at = time.thread_time()
        assert sum(len(line.split(" ")) for line in page.decode().splitlines()) > 10 * PODS
        return time.thread_time() - started_at

    loop, handle = asyncio.get_running_loop(), list[asyncio.Handle]()
    with serve_file(path) as url:
        source = EppSource("qwen", Targets(urls=(url,)), timeout_s=20)

        async def measure_scrape() -> float:
            started_at = time.thread_time()
            assert not isinstance(await source.poll(), ReadFailure)
            return time.thread_time() - started_at

        async def measure_longest_step() -> float:
            nonlocal before, handle
            before = time.thread_time()
            step_times_s.clear()
            handle = [loop.call_soon(record_step)]
            assert not isinstance(await source.poll(), ReadFailure)
            handle[0].cancel()
            return max(step_times_s)

        scrape_cost, step = (
            await compare_costs(measure_scrape, split_page),
            await compare_costs(measure_longest_step, split_page),
        )
        await source.close()
    print(
        f"\n{len(page) / 1e6:.1f} MB page: {scrape_cost.ours * 1000:.0f} ms CPU per scrape, "
        f"{scrape_cost.ratio:.1f} × the cost of splitting it; "
        f"longest step {step.ours * 1000:.1f} ms, {step.ratio:.2f} ×"
    )
    assert scrape_cost.ratio <= 5
    assert step.ratio <= 1


async def test_poll_of_an_ordinary_page_takes_at_most_10_ms_of_cpu() -> None:
    """Measured over fifty polls in a row. The server runs in this thread too, so this is an upper bound."""
    polls: list[SourcePoll] = []
    async with fake_epp() as epp:
        source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=20)
        poller = Poller(
            [source], SignalsSettings.model_validate({"interval_s": 0.05}), Policy(), polls.append
        )
        polling = asyncio.create_task(poller.run())
        try:
            await wait_until(lambda: len(polls) >= 5, every_s=0.1)
            started_at, first_count = time.thread_time(), len(polls)
            await wait_until(lambda: len(polls) >= first_count + 50, 60, every_s=0.1)
            each_s = (time.thread_time() - started_at) / (len(polls) - first_count)
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
    print(f"\n{each_s * 1000:.2f} ms CPU a poll, with the server's share")
    assert each_s <= 0.010
