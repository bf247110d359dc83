"""A scene with all features, in which exceptions are raised."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.features.models.availability import ModelTerms, WhenNotServed
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.sequences.turns import Turn
from dispatcher.features.slices.eligibility import SliceTerms
from dispatcher.features.slices.options import SliceOptions
from dispatcher.gateway.buffers import AnswerBuffer, AnswerBufferPool
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.limit.budget import Reading, Signal
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.events import Event
from dispatcher.wire_format import PoppedResult
from tests.features.merging.embedding_gateway import EmbeddingGateway
from tests.features.models.model_scene import update_listings
from tests.features.scene import Scene, run_in_scene
from tests.features.slices.generation_gateway import GenerationGateway
from tests.kernel.faults import Fault, count_completions, inject
from tests.kernel.scene import AnsweringGateway, find_part

EMBEDDINGS, CHAT = "/v1/embeddings", "/v1/chat/completions"
MAX_ATTEMPTS = 5
OPTIONS = Options(
    RetryPolicy(max_attempts=MAX_ATTEMPTS, max_s=2.0),
    lease_s=10.0,
    default_path="/v1/completions",
    of_features=index_options(
        MergeOptions(
            (BatchRule((EMBEDDINGS,), SHAPES["embeddings"], MergeMode.ON, GroupingRule(8, max_delay_s=0.02)),)
        ),
        SliceOptions(is_on=True, terms=SliceTerms(20, 21, (CHAT,)), spread=0.0),
        ModelOptions(ModelTerms({"m": WhenNotServed.WAIT})),
    ),
)


class FeatureGateway(AnsweringGateway):
    """Gateway to servers for embeddings, chats and everything else. Its answers take memory."""

    answer_after_s = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.chats = EmbeddingGateway(), GenerationGateway()
        self.buffers = AnswerBufferPool(10_000, 100)

    async def forward(self, request: Request, *, token: str, deadline: float, may_send: Any) -> AttemptResult:
        servers: Any = {EMBEDDINGS: self.embeddings, CHAT: self.chats}.get(request.endpoint, super())
        if request.endpoint in (EMBEDDINGS, CHAT):
            self.sent.append(request.id)
        result: AttemptResult = await servers.forward(
            request, token=token, deadline=deadline, may_send=may_send
        )
        memory = AnswerBuffer(self.buffers)
        assert memory.try_grow_to(10)
        return result.copy_with(memory=memory)


async def submit_all_kinds(scene: Scene) -> set[str]:
    """Submit plain requests, requests that are merged, sliced, and in sequence. Return their ids."""
    deadline = int(asyncio.get_running_loop().time()) + 10**5
    members: list[tuple[str, bytes]] = []

    def add(request_id: str, body: Mapping[str, Any], endpoint: str = "", turn: Turn | None = None) -> None:
        payload = msgspec.json.encode(body)
        member = encode_member(request_id, payload, deadline, token="t", endpoint=endpoint, extra=turn)
        members.append((request_id, member))

    for number in range(3):
        add(f"plain-{number}", {"prompt": "x"})
    for number in range(5):
        add(f"merged-{number}", {"model": "m", "input": f"text {number}"}, EMBEDDINGS)
    for number in range(2):
        content = {"messages": [{"role": "user", "content": f"question {number}"}]}
        add(f"sliced-{number}", {"model": "m", "max_tokens": 60, "temperature": 0, **content}, CHAT)
    for number in range(3):
        add(f"turn-{number}", {}, turn=Turn("s", number))
    await scene.store.submit(
        [Submission(member, float(deadline), name, "t", deadline) for name, member in members]
    )
    return {name for name, _ in members}


async def wait_for_results(scene: Scene, names: set[str], within_s: float = 300.0) -> dict[str, PoppedResult]:
    """Return the result of each of these requests, which must have only one."""
    results: dict[str, PoppedResult] = {}
    for _ in range(round(within_s / 0.05)):
        while (popped := scene.store.pop_result()) is not None:
            result = decode_result(popped)
            assert result.id not in results, f"{result.id} has two results"
            results[result.id] = result
        if names <= results.keys():
            return results
        await asyncio.sleep(0.05)
    raise AssertionError(f"no results of {sorted(names - results.keys())}")


def run_with_faults(check: Callable[[Scene, FeatureGateway], Awaitable[None]], *faults: Fault) -> None:
    """Run a scene with faults. Afterwards nothing must be in flight, each lease must have had one completion
    at most, and the errors must be in the log."""
    gateway = FeatureGateway()

    async def read_pool(scene: Scene) -> None:
        """Add readings, without which the units of lost leases would count for ever."""
        while True:
            now = asyncio.get_running_loop().time()
            scene.limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 10), now)
            scene.dispatcher.wake_up()
            await asyncio.sleep(1.0)

    async def check_in_scene(scene: Scene) -> None:
        update_listings(scene, a="m")
        reading_pool = asyncio.create_task(read_pool(scene))
        for fault in faults:
            fault.is_active = True
        await check(scene, gateway)
        for fault in faults:
            fault.is_active = False
        for _ in range(400):
            if not scene.limiter.in_flight and not (await scene.store.count_requests()).leased:
                break
            await asyncio.sleep(0.1)
        reading_pool.cancel()
        table = scene.dispatcher._in_flight
        assert not scene.task.done(), "the dispatcher runs"
        assert (len(table), table.units, table.running_units, table.running_count) == (0, 0, 0, 0)
        assert scene.limiter.in_flight == 0
        assert (await scene.store.count_requests()).leased == 0
        assert gateway.buffers.used_bytes == 0
        targets = list(find_part(scene.dispatcher, RequestMerger).targets)
        assert [(each.in_flight_units, each.in_flight_turns) for each in targets] == [(0, 0)] * len(targets)
        logged = Counter(event for event, _ in scene.events)[Event.INTERNAL_ERROR]
        assert bool(logged) == any(fault.raised_count for fault in faults)

    # Before the dispatcher is built, which keeps references to methods.
    with inject(*faults), count_completions() as counts:
        run_in_scene(check_in_scene, gateway, OPTIONS)
    assert set(counts.values()) == {1}, "each lease is completed once"
