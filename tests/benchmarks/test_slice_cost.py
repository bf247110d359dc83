"""Cost of slices: a slice, compared with a plain request of the same size, and requests that are not sliced.

One dispatcher runs both alternately. Plain requests ask for as many tokens as slices, which differ in size.
The test checks the CPU of dispatcher and queue server for each call. What a slice costs in addition are
mostly longer bodies: the prompt and the stored progress have all that was generated so far, and each event of
a stream is read.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dispatcher.features.slices.size import vary_tokens
from dispatcher.kernel import Options
from dispatcher.lab.standin.generation_api import GenerationConfig, parse_request
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.benchmarks.process_costs import make_stage, read_cpu_s
from tests.cost_comparison import compare_costs
from tests.kernel.scene import AnsweringGateway, Scene, run_in_scene
from tests.scenarios.processes import Stage
from tests.support import wait_until_sync

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LIMIT = 32
SLICE_TOKENS, SLICES = 128, 8
CONFIG = GenerationConfig(end_probability=0)
PROMPT = "x" * 250


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with make_stage(tmp_path) as stage:
        yield stage


def begins_with_space(payload: bytes) -> bool:
    """Return True if the answer to a chat begins with white space."""
    answer = parse_request(payload, is_chat=True, config=CONFIG).generate_answer(0)
    return answer.generation.text[:1].isspace()


class SliceBenchmark:
    """One dispatcher, which runs the same number of calls repeatedly."""

    def __init__(self, stage: Stage, path: str, calls: int, *, is_streamed: bool) -> None:
        world = stage.world(generation=msgspec.json.encode(CONFIG).decode(), slots=4 * LIMIT, seconds=0.05)
        settings = stage.settings(
            world,
            max_sys=4 * LIMIT,
            budget={"max_in_flight": LIMIT},
            queue={"lease_s": 60},
            slicing={"mode": "on", "tokens": SLICE_TOKENS, "stream": is_streamed, "revoke": "off"},
        )
        self.path, self.calls = path, calls
        self.dispatcher = stage.dispatcher(settings)
        self.dispatcher.wait_for(limit=LIMIT)
        self.producer = stage.producer
        self.server_pid = int(stage.producer.client.info("server")["process_id"])
        self.run_count = 0
        self.is_checked = False

    def run(self, *, in_slices: bool) -> tuple[float, float]:
        """Return the CPU seconds of dispatcher and queue server for each call."""
        self.run_count += 1
        deadline, client = int(time.time()) + 3600, self.producer.client
        count = self.calls // SLICES if in_slices else self.calls
        members: dict[bytes, float] = {}
        for number in itertools.count():
            if len(members) == count:
                break
            text = f"{PROMPT} {self.run_count}-{number}:"
            content: dict[str, Any] = (
                {"messages": [{"role": "user", "content": text}]} if self.path == CHAT else {"prompt": text}
            )
            tokens = SLICES * SLICE_TOKENS if in_slices else vary_tokens(SLICE_TOKENS, number)
            payload = msgspec.json.encode({"model": "m", "max_tokens": tokens, "temperature": 0, **content})
            if self.path == CHAT and begins_with_space(payload):
                continue  # such chats are sent whole
            member = encode_member(f"{self.run_count}-{number}", payload, deadline, endpoint=self.path)
            members[member] = float(deadline)
        slices_before = self._count_slices()
        pids = (self.dispatcher.child.pid, self.server_pid)
        before = [read_cpu_s(pid) for pid in pids]
        self.producer.add_members(members)
        wait_until_sync(
            lambda: client.llen(self.producer.names.result_list) >= count,
            60,
            what="all results",
            every_s=0.02,
        )
        own_s, server_s = (read_cpu_s(pid) - used for pid, used in zip(pids, before, strict=True))
        self.producer.collect()
        # Chats take more slices, because white space at their ends is generated again.
        calls = self._count_slices() - slices_before if in_slices else self.calls
        assert calls >= self.calls or not self.is_checked
        return own_s / max(1, calls), server_s / max(1, calls)

    def _count_slices(self) -> int:
        counts = self.dispatcher.status()["slices"]
        assert counts.get("restarted", 0) == 0
        return int(sum(counts.values()))

    def wait_for_check(self) -> None:
        """Run requests until the model has been checked."""

        def is_checked() -> bool:
            models = self.dispatcher.status()["sliced_models"]
            if any(not model["whole_reason"] for model in models):
                return True
            self.run(in_slices=True)
            return False

        wait_until_sync(is_checked, 60, what="the check of the model")
        self.is_checked = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "is_streamed", "calls", "pairs", "max_ratio"),
    [
        pytest.param(COMPLETION, False, 640, 4, 1.5, id="completions", marks=pytest.mark.serial),
        *(
            pytest.param(
                path,
                is_streamed,
                2560,
                8,
                max_ratio,
                id=id_,
                marks=[pytest.mark.long, pytest.mark.timeout(900)],
            )
            for path, is_streamed, max_ratio, id_ in (
                (COMPLETION, False, 1.1, "completions-long"),
                (CHAT, False, 1.1, "chats-long"),
                (COMPLETION, True, 1.9, "streams-long"),
            )
        ),
    ],
)
async def test_slice_costs_little_more_than_a_plain_request(
    stage: Stage, path: str, is_streamed: bool, calls: int, pairs: int, max_ratio: float
) -> None:
    benchmark = SliceBenchmark(stage, path, calls, is_streamed=is_streamed)
    benchmark.wait_for_check()
    costs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    def measure(*, in_slices: bool) -> float:
        costs[in_slices].append(benchmark.run(in_slices=in_slices))
        return sum(costs[in_slices][-1])

    comparison = await compare_costs(lambda: measure(in_slices=True), lambda: measure(in_slices=False), pairs)
    for name, runs in (("slice", costs[True][1:]), ("plain request", costs[False][1:])):
        own_s, server_s = (statistics.median(values) for values in zip(*runs, strict=True))
        print(f"{path}: {name}: {own_s * 1e6:.0f} µs, of the queue server {server_s * 1e6:.0f} µs")
    print(f"{path}: a slice has {comparison.ratio:.2f} × the cost of a plain request")
    assert benchmark.producer.count_results().keys() == {"200"}
    sliced = [results[0] for results in benchmark.producer.results.values() if results[0].get("slices")]
    # Their sizes vary around SLICE_TOKENS.
    assert all(result["slices"] > SLICES // 2 for result in sliced)
    assert len(sliced) >= pairs * calls // SLICES
    assert comparison.ratio <= max_ratio


def test_stage_is_called_for_claims_and_not_for_requests_if_slicing_is_off() -> None:
    """Function calls, which unlike seconds are the same on every machine."""
    requests = 500
    profile = cProfile.Profile()

    async def check(scene: Scene) -> None:
        deadline = int(asyncio.get_running_loop().time()) + 10**6
        members = [encode_member(f"r-{n}", b'{"max_tokens":5000}', deadline) for n in range(requests)]
        with profile:
            await scene.store.submit([Submission(member, float(deadline)) for member in members])
            while sum(map(len, scene.store.result_lists.values())) < requests:  # noqa: ASYNC110 -- in virtual time
                await asyncio.sleep(0.1)

    run_in_scene(check, AnsweringGateway(), Options(RetryPolicy()))
    stats: dict[tuple[str, int, str], tuple[int, ...]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    calls = {name: figures[1] for (file, _, name), figures in stats.items() if "/slices/" in file}
    print({name: round(count / requests, 2) for name, count in calls.items()})
    assert calls["apply"] > 0
    assert sum(calls.values()) < requests / 2
