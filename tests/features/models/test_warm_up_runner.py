"""Warm-up in the loop: a cold version gets its recorded requests before any batch request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.features.models.availability import Listing, ModelTerms, WhenNotServed
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.features.models.versions import FamilyTerms
from dispatcher.features.models.warm_up_runner import (
    CHECK_INTERVAL_S,
    ERROR_RETRY_S,
    MAX_PARALLEL_WARM_UPS,
    RETRY_SOON_S,
    WarmUpRunner,
)
from dispatcher.features.models.warmup import WarmupRequest
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.options import index_options
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import Permit, Release
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    RetryPolicy,
    TooLate,
    Unreachable,
)
from dispatcher.requests.request import Request
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.metrics import Metrics
from tests.features.memory_queue import MemoryQueue
from tests.features.models.model_scene import (
    EXCHANGE_INTERVAL_S,
    MODEL_NOT_FOUND_BODY,
    change_models,
    list_version_states,
    submit_requests,
    update_listings,
)
from tests.features.scene import Scene, run_in_scene
from tests.kernel.scene import AnsweringGateway, find_part, open_limiter

T = TypeVar("T")
CHAT = "/v1/chat/completions"
LIMIT = 9
"""Limit in a pool of ten, less the reserve."""
WARM_UP_REQUESTS = (
    WarmupRequest(CHAT, b'{"model":"x","messages":["short"]}', 3),
    WarmupRequest("/v1/completions", b'{"model":"x","prompt":"long"}'),
)


class WarmUpGateway(AnsweringGateway):
    """Gateway, and the model servers behind it, which also accept direct calls."""

    answer_after_s = 0.1
    warm_up_outcome: Outcome = Delivered(200, b"{}")
    """Outcome of warm-up calls."""

    def __init__(self) -> None:
        super().__init__()
        self.warm_up_calls: list[tuple[str, str, bytes]] = []
        """Endpoint, path and body of each warm-up call, in the order in which they began."""
        self.batch_calls: list[tuple[str, str]] = []
        """Model and endpoints of each batch request, in the order in which they were answered."""
        self.running_count = self.max_running_count = self.closed_count = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        forwarded = await self._count_running(
            super().forward(request, token=token, deadline=deadline, may_send=may_send)
        )
        if "warm-up" in request.id:
            self.warm_up_calls.append((request.endpoints, request.endpoint, request.payload))
            return forwarded.copy_with(outcome=self.warm_up_outcome)
        self.batch_calls.append((json.loads(request.payload)["model"], request.endpoints))
        return forwarded

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        async def answer_after_delay() -> Outcome:
            await asyncio.sleep(self.answer_after_s)
            return self.warm_up_outcome

        self.warm_up_calls.append((endpoint, path, body))
        return await self._count_running(answer_after_delay())

    async def aclose(self) -> None:
        self.closed_count += 1

    async def _count_running(self, call: Awaitable[T]) -> T:
        self.running_count += 1
        self.max_running_count = max(self.max_running_count, self.running_count)
        try:
            return await call
        finally:
            self.running_count -= 1


def options(
    *,
    is_required: bool = False,
    can_steer: bool = False,
    warm_directly: bool | None = None,
    timeout_s: float = 300.0,
    warm_up_requests: Sequence[WarmupRequest] = WARM_UP_REQUESTS,
    problem: str = "",
    observe: bool = False,
    merge_rules: Sequence[BatchRule] = (),
    **terms: Any,
) -> Options:
    async def read() -> tuple[Sequence[WarmupRequest], str]:
        return warm_up_requests, problem

    family = FamilyTerms(
        "qwen",
        VersionTemplate("qwen-v"),
        has_warm_up=True,
        load_warmup=read,
        is_warmup_required=is_required,
        **terms,
    )
    return Options(
        RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3),
        observe=observe,
        of_features=index_options(
            MergeOptions(merge_rules),
            ModelOptions(
                ModelTerms({"qwen": WhenNotServed.WAIT}),
                (family,),
                can_steer,
                warm_directly,
                timeout_s,
            ),
        ),
    )


async def wait_for_exchange(scene: Scene) -> None:
    """Wait until the model registry was read, and warm-ups were started."""
    await asyncio.sleep(EXCHANGE_INTERVAL_S + CHECK_INTERVAL_S)


def list_warm_up_events(scene: Scene) -> list[dict[str, Any]]:
    """Return the fields of all log events about warm-ups. Those with errors must be warnings."""
    events = [each for each in scene.events if each[0] in (Event.WARM_UP, Event.WARM_UP_FAILED)]
    assert all((event is Event.WARM_UP_FAILED) is bool(fields["errors"]) for event, fields in events)
    return [dict(fields) for _, fields in events]


def run_with_gateway(check: Any, gateway: WarmUpGateway, warm_up_options: Options) -> None:
    async def check_with_servers(scene: Scene) -> None:
        find_part(scene.dispatcher, WarmUpRunner).servers = gateway
        await check(scene)

    run_in_scene(check_with_servers, gateway, warm_up_options)


def test_each_endpoint_is_warmed_up_before_it_gets_batch_requests() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        await submit_requests(scene, *(f"r{number}" for number in range(20)))
        update_listings(scene, a="qwen-v1", b="qwen-v1")
        await asyncio.sleep(20)
        expected = [
            (path, body.replace(b'"x"', b'"qwen-v1"'))
            for path, body, repeat in ((each.url, each.body, each.repeat) for each in WARM_UP_REQUESTS)
            for _ in range(repeat)
        ]
        for endpoint in "ab":
            assert [each[1:] for each in gateway.warm_up_calls if each[0] == endpoint] == expected
        assert len(gateway.batch_calls) == 20
        assert list_version_states(scene, "qwen-v1") == ["cold", "open"]
        assert [
            (each["endpoint"], each["calls"], each["is_used"]) for each in list_warm_up_events(scene)
        ] == [
            ("a", 4, True),
            ("b", 4, True),
        ]
        assert find_part(scene.dispatcher, WarmUpRunner).result_counts == {"warm": 2, "errors": 0, "retry": 0}
        assert gateway.max_running_count <= LIMIT

    run_with_gateway(check, gateway, options())
    assert gateway.closed_count == 1


def test_steered_requests_avoid_a_new_endpoint_until_it_is_warm() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        assert gateway.batch_calls == [("qwen-v1", "a")]
        gateway.answer_after_s = 3.0
        update_listings(scene, a="qwen-v1", b="qwen-v1")
        await submit_requests(scene, "r2")
        await asyncio.sleep(1)
        update_listings(scene, a="qwen-v1", b="qwen-v1")
        await asyncio.sleep(30)
        await submit_requests(scene, "r3")
        await asyncio.sleep(10)
        assert gateway.batch_calls == [("qwen-v1", "a"), ("qwen-v1", "a"), ("qwen-v1", "a,b")]
        assert {endpoint for endpoint, _, _ in gateway.warm_up_calls} == {"a", "b"}

    run_with_gateway(check, gateway, options(can_steer=True))


@pytest.mark.parametrize("warm_directly", [True, False])
def test_warm_up_is_sent_directly_or_through_the_gateway_as_configured(warm_directly: bool) -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        assert {endpoint for endpoint, _, _ in gateway.warm_up_calls} == {"a"}
        assert bool(gateway.sent) is not warm_directly

    run_with_gateway(check, gateway, options(can_steer=True, warm_directly=warm_directly))


def test_warm_up_names_no_endpoint_if_only_the_gateway_lists_models() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, gateway="qwen-v1")
        await wait_for_exchange(scene)
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        assert [endpoint for endpoint, _, _ in gateway.warm_up_calls] == [""] * 4
        assert gateway.batch_calls == [("qwen-v1", "")]

    run_with_gateway(check, gateway, options(can_steer=True))


def test_old_version_gets_requests_until_the_new_one_is_warm() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        gateway.answer_after_s = 1.0
        update_listings(scene, a="qwen-v1", b="qwen-v2")
        for number in range(10):
            await submit_requests(scene, f"r{number}")
            await asyncio.sleep(1)
        models = [model for model, _ in gateway.batch_calls]
        assert models == sorted(models)
        assert set(models) == {"qwen-v1", "qwen-v2"}
        assert list_version_states(scene, "qwen-v2") == ["cold", "open"]
        assert list_version_states(scene, "qwen-v1")[:3] == ["cold", "open", "draining"]

    run_with_gateway(check, gateway, options())


def test_version_opens_after_warm_up_errors_unless_the_warm_up_is_required() -> None:
    gateway = WarmUpGateway()
    gateway.warm_up_outcome = Failed("the server answered 500", 500)

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1")
        await wait_for_exchange(scene)
        assert list_version_states(scene, "qwen-v1") == ["cold", "open"]
        assert len(gateway.batch_calls) == 1
        (event,) = list_warm_up_events(scene)
        assert (event["errors"], event["is_used"]) == (4, True)
        assert event["why"] == "500: the server answered 500"

    run_with_gateway(check, gateway, options())


def test_required_warm_up_is_retried_until_it_succeeds() -> None:
    gateway = WarmUpGateway()
    gateway.warm_up_outcome = Delivered(400, b'{"error":"bad \x1b[31m"}')

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1")
        await wait_for_exchange(scene)
        assert len(gateway.warm_up_calls) == 4
        assert "\x1b" not in list_warm_up_events(scene)[0]["why"]
        for _ in range(20):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1")
        # Retries after 30 s, and 60 s later.
        assert ERROR_RETRY_S[0] == 30.0
        assert len(gateway.warm_up_calls) == 12
        assert gateway.batch_calls == []
        ((_, _, why),) = find_part(scene.dispatcher, ModelRouter).list_held_back()
        assert "'qwen-v1' is being warmed up" in why
        gateway.warm_up_outcome = Delivered(200, b"{}")
        for _ in range(30):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1")
        assert gateway.batch_calls == [("qwen-v1", "")]
        assert find_part(scene.dispatcher, WarmUpRunner).result_counts == {"warm": 1, "errors": 0, "retry": 3}

    run_with_gateway(check, gateway, options(is_required=True))


@pytest.mark.parametrize(
    "answer",
    [Unreachable("nobody listens"), Delivered(404, MODEL_NOT_FOUND_BODY % b"qwen-v1")],
    ids=["unreachable", "model not loaded"],
)
def test_endpoint_that_is_not_ready_is_retried_soon_and_stays_cold(answer: Outcome) -> None:
    gateway = WarmUpGateway()
    gateway.warm_up_outcome = answer

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1")
        await wait_for_exchange(scene)
        await asyncio.sleep(2 * RETRY_SOON_S)
        update_listings(scene, a="qwen-v1")
        assert 2 <= len(gateway.warm_up_calls) <= 4
        assert (gateway.batch_calls, list_warm_up_events(scene)) == ([], [])
        gateway.warm_up_outcome = Delivered(200, b"{}")
        await asyncio.sleep(2 * RETRY_SOON_S)
        assert gateway.batch_calls == [("qwen-v1", "")]

    run_with_gateway(check, gateway, options())


def test_refused_warm_up_call_is_retried_and_counts_as_no_error() -> None:
    gateway = WarmUpGateway()
    gateway.warm_up_outcome = Overloaded(429, "", is_out_of_capacity=True, retry_after_s=0.5)

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(10)
        calls_before = len(gateway.warm_up_calls)
        assert 5 <= calls_before <= 12
        gateway.warm_up_outcome = Delivered(200, b"{}")
        await asyncio.sleep(5)
        assert len(gateway.warm_up_calls) == calls_before + 4
        assert list_warm_up_events(scene)[0]["errors"] == 0

    run_with_gateway(check, gateway, options())


def test_late_answer_and_exceeded_warm_up_timeout_are_errors() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 4.0

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(60)
        (event,) = list_warm_up_events(scene)
        assert (event["calls"], event["errors"], event["why"]) == (3, 1, "not done within 10 s")
        gateway.warm_up_outcome = TooLate()
        update_listings(scene, b="qwen-v1")
        await asyncio.sleep(60)
        assert list_warm_up_events(scene)[1]["why"] == "no answer in time"

    run_with_gateway(check, gateway, options(timeout_s=10.0))


def test_no_warm_up_is_sent_while_the_gate_is_closed() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        await scene.store.pause("ada", "")
        await asyncio.sleep(5)
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(30)
        assert gateway.warm_up_calls == []
        await scene.store.resume()
        await asyncio.sleep(5)
        assert len(gateway.warm_up_calls) == 4

    run_with_gateway(check, gateway, options())


def test_warm_ups_take_units_from_batch_requests_within_the_limit() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 0.5

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1", b="other")
        await wait_for_exchange(scene)
        await submit_requests(scene, *(f"r{number}" for number in range(300)))
        await asyncio.sleep(2)
        assert gateway.max_running_count == LIMIT
        calls_before = len(gateway.warm_up_calls)
        update_listings(scene, a="qwen-v1", b="qwen-v1", c="qwen-v1", d="qwen-v1", e="qwen-v1", f="qwen-v1")
        await asyncio.sleep(12)
        assert len(gateway.warm_up_calls) == calls_before + 20
        assert gateway.max_running_count <= LIMIT
        assert len(gateway.batch_calls) >= 150

    run_with_gateway(check, gateway, options(can_steer=True, warm_directly=True))


def test_only_the_owner_of_the_lock_warms_up_an_endpoint() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        assert await other.take_warm_up_lock("qwen-v1", "a")
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        assert gateway.warm_up_calls == []
        await other.mark_warm("qwen-v1", "a")
        await asyncio.sleep(2 * EXCHANGE_INTERVAL_S)
        assert list_version_states(scene, "qwen-v1") == ["cold", "open"]
        assert gateway.warm_up_calls == []

    run_with_gateway(check, gateway, options())


def test_warm_up_lock_is_renewed_during_the_warm_up_and_then_released() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 25.0

    async def check(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        update_listings(scene, a="qwen-v1")
        for _ in range(18):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1")
            assert not await other.take_warm_up_lock("qwen-v1", "a")
        await asyncio.sleep(30)
        assert list_version_states(scene, "qwen-v1") == ["cold", "open"]
        assert await other.take_warm_up_lock("qwen-v1", "a")

    run_with_gateway(check, gateway, options())


def test_endpoint_is_cold_again_after_it_stops_listing_the_version_or_restarts() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        assert len(gateway.warm_up_calls) == 4
        update_listings(scene, a="")
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        assert len(gateway.warm_up_calls) == 8
        at = asyncio.get_running_loop().time()
        find_part(scene.dispatcher, ModelRouter).update_listings(
            [Listing("a", at, None, problem="refused", is_down=True)]
        )
        await wait_for_exchange(scene)
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        # The endpoint may have been warmed up while it was down as well.
        assert len(gateway.warm_up_calls) in (12, 16)
        find_part(scene.dispatcher, ModelRouter).update_listings(
            [Listing("a", at, None, problem="it took too long")]
        )
        update_listings(scene, a="qwen-v1")
        calls_before = len(gateway.warm_up_calls)
        await wait_for_exchange(scene)
        assert len(gateway.warm_up_calls) == calls_before

    run_with_gateway(check, gateway, options())


def test_warm_up_of_a_version_that_is_no_longer_desired_is_stopped() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 3.0

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(5)
        update_listings(scene, a="qwen-v2")
        await asyncio.sleep(30)
        calls_of_first_version = [body for _, _, body in gateway.warm_up_calls if b"qwen-v1" in body]
        assert 1 <= len(calls_of_first_version) < 4
        assert list_version_states(scene, "qwen-v1") == ["cold", "gone"]
        assert list_version_states(scene, "qwen-v2") == ["cold", "open"]

    run_with_gateway(check, gateway, options())


def test_preferred_sizes_of_merged_calls_are_warmed_up_as_well() -> None:
    gateway = WarmUpGateway()
    rule = BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(8, preferred_sizes=(4, 8))
    )
    warm_up_request = WarmupRequest("/v1/embeddings", b'{"model":"x","input":"a"}')

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        sizes = [
            len(texts) if isinstance(texts, list) else 1
            for texts in (json.loads(body)["input"] for _, _, body in gateway.warm_up_calls)
        ]
        assert sizes == [1, 4, 8]

    run_with_gateway(check, gateway, options(warm_up_requests=(warm_up_request,), merge_rules=(rule,)))


def test_problem_of_the_warm_up_file_is_logged() -> None:
    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        assert list_warm_up_events(scene)[0]["why"] == "warmup.jsonl cannot be read"

    run_with_gateway(check, WarmUpGateway(), options(problem="warmup.jsonl cannot be read"))


def test_observer_sends_no_warm_up() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(30)
        assert gateway.warm_up_calls == []

    run_with_gateway(check, gateway, options(observe=True))


def without_families(warm_up_options: Options) -> Options:
    return change_models(warm_up_options, families=())


async def can_take_lock(scene: Scene, endpoint: str = "a") -> bool:
    return await MemoryQueue(scene.store, "b").take_warm_up_lock("qwen-v1", endpoint)


def test_removing_a_family_from_the_settings_ends_only_its_warm_up() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s, gateway.warm_up_outcome = 2.0, Failed("it broke", 500)

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 other")
        await asyncio.sleep(2)
        assert len(gateway.warm_up_calls) == 1
        scene.dispatcher.reconfigure(without_families(options()))
        await submit_requests(scene, "r1", payload=b'{"model":"other"}')
        await asyncio.sleep(10)
        assert (len(gateway.warm_up_calls), gateway.batch_calls) == (1, [("other", "")])
        assert await can_take_lock(scene)

    run_with_gateway(check, gateway, options(is_required=True))


def test_internal_error_in_a_warm_up_is_logged_and_stops_no_other_work() -> None:
    class FailingGateway(WarmUpGateway):
        async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
            raise ValueError(f"what is {endpoint}?")

    gateway = FailingGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1")
        await wait_for_exchange(scene)
        assert gateway.batch_calls == [("qwen-v1", "")]
        (event,) = list_warm_up_events(scene)
        assert (event["is_used"], event["why"]) == (
            True,
            "the dispatcher failed: ValueError('what is a?')",
        )

    run_with_gateway(check, gateway, options())


def test_drain_releases_the_warm_up_lock() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 2.0

    async def check(scene: Scene) -> None:
        gateway.answer_after_s = 60.0
        update_listings(scene, a="qwen-v1 other")
        await submit_requests(scene, "r1", payload=b'{"model":"other"}')
        await asyncio.sleep(0.5)
        assert gateway.running_count == 2
        assert not await can_take_lock(scene)
        scene.dispatcher.drain(600.0)
        await asyncio.sleep(65)
        assert len(gateway.warm_up_calls) == 1
        assert await can_take_lock(scene)

    run_with_gateway(check, gateway, options())


def test_warm_up_lock_is_released_when_drain_ends_during_a_call() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 200.0

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(5)
        at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(1.0)
        await scene.wait_until_finished()
        assert asyncio.get_running_loop().time() < at + 2
        assert await can_take_lock(scene)

    run_with_gateway(check, gateway, options())


def test_unavailable_queue_does_not_delay_the_end_of_a_drain() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 200.0

    async def check(scene: Scene) -> None:
        async def hang_forever(_model: str, _endpoint: str) -> None:
            await asyncio.sleep(3600)

        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(5)
        scene.queue.release_warm_up_lock = hang_forever  # type: ignore[method-assign,assignment]
        at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(1.0)
        await scene.wait_until_finished()
        assert asyncio.get_running_loop().time() < at + 4

    run_with_gateway(check, gateway, options())


def test_paused_warm_up_releases_the_lock_and_continues_without_repeating_calls() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 2.0

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(3)
        calls_before = len(gateway.warm_up_calls)
        assert 1 <= calls_before < 4
        await scene.store.pause("ada", "")
        for _ in range(6):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1")
        other = MemoryQueue(scene.store, "b")
        assert await other.take_warm_up_lock("qwen-v1", "a")
        await other.release_warm_up_lock("qwen-v1", "a")
        assert len(gateway.warm_up_calls) <= calls_before + 1
        await scene.store.resume()
        await asyncio.sleep(15)
        assert len(gateway.warm_up_calls) == 4
        assert list_version_states(scene, "qwen-v1") == ["cold", "open"]

    run_with_gateway(check, gateway, options())


class StalledOwner:
    """Owner that warms up `qwen-v1` at endpoint `a`, and that can stall."""

    def __init__(self, scene: Scene, gateway: WarmUpGateway, warm_up_options: Options) -> None:
        self.clock_offset_s = 0.0
        self.warm_up_calls = gateway.warm_up_calls
        self.registry = scene.store.queue.model_registry
        loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(
            MemoryQueue(scene.store, "hung"),
            gateway,
            open_limiter(),
            warm_up_options,
            Journal(Metrics()),
            clock=lambda: loop.time() + self.clock_offset_s,
        )
        find_part(self.dispatcher, WarmUpRunner).servers = gateway
        self.task = asyncio.create_task(self.dispatcher.run())
        find_part(self.dispatcher, ModelRouter).update_listings([Listing("a", loop.time(), ("qwen-v1",))])

    async def stall(self, *, is_noticed: bool = True) -> None:
        """Stall after the first call until the lock has expired."""
        await asyncio.sleep(2)
        assert len(self.warm_up_calls) == 1
        self.advance_queue_time(31, is_noticed=is_noticed)

    def advance_queue_time(self, seconds: float, *, is_noticed: bool) -> None:
        """Let time pass for the queue, and by the clock of the owner as well if `is_noticed`."""
        self.registry.lock_until = {name: until - seconds for name, until in self.registry.lock_until.items()}
        self.clock_offset_s += seconds if is_noticed else 0.0

    async def drain(self) -> None:
        self.dispatcher.drain(1.0)
        await self.task


@pytest.mark.parametrize("is_noticed", [True, False])
def test_stalled_owner_sends_no_more_calls_after_another_took_the_lock(is_noticed: bool) -> None:
    """It stops immediately by its own clock, or else when it renews the lock, which another owner has."""
    slow_gateway, gateway = WarmUpGateway(), WarmUpGateway()
    slow_gateway.answer_after_s = gateway.answer_after_s = 7.0

    async def check(scene: Scene) -> None:
        stalled_owner = StalledOwner(scene, slow_gateway, warm_up_options)
        await stalled_owner.stall(is_noticed=is_noticed)
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(60)
        assert len(stalled_owner.warm_up_calls) == (1 if is_noticed else 2)
        assert len(gateway.warm_up_calls) == 4
        assert find_part(stalled_owner.dispatcher, WarmUpRunner).result_counts == {
            "warm": 0,
            "errors": 0,
            "retry": 1,
        }
        assert find_part(scene.dispatcher, WarmUpRunner).result_counts == {"warm": 1, "errors": 0, "retry": 0}
        assert set((await scene.store.read_model_registry()).warm_markers) == {("qwen-v1", "a")}
        assert stalled_owner.registry.lock_until == {}
        await stalled_owner.drain()

    warm_up_options = options()
    run_with_gateway(check, gateway, warm_up_options)


def test_owner_that_stalled_while_waiting_for_room_sends_no_calls() -> None:
    slow_gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        await scene.store.pause("ada", "no other dispatcher may claim")
        await submit_requests(scene, *(f"r{number}" for number in range(LIMIT)), payload=b'{"model":"other"}')
        await scene.store.resume()
        other = MemoryQueue(scene.store, "b")
        claim_result = await other.claim(LIMIT, "n", Permit(LIMIT, asyncio.get_running_loop().time(), 0))
        assert len(claim_result.leases) == LIMIT
        stalled_owner = StalledOwner(scene, slow_gateway, warm_up_options)
        await asyncio.sleep(4)
        assert (stalled_owner.warm_up_calls, len(stalled_owner.registry.lock_until)) == ([], 1)
        stalled_owner.advance_queue_time(31, is_noticed=True)
        assert await scene.queue.take_warm_up_lock("qwen-v1", "a")
        await other.release([Release(lease, delay_s=1000.0) for lease in claim_result.leases])
        await asyncio.sleep(20)
        assert stalled_owner.warm_up_calls == []
        await stalled_owner.drain()

    warm_up_options = options()
    run_with_gateway(check, WarmUpGateway(), warm_up_options)


def test_owner_whose_lock_expired_takes_it_again_if_it_is_free() -> None:
    slow_gateway = WarmUpGateway()
    slow_gateway.answer_after_s = 3.0

    async def check(scene: Scene) -> None:
        stalled_owner = StalledOwner(scene, slow_gateway, warm_up_options)
        await stalled_owner.stall()
        await asyncio.sleep(3)
        assert len(stalled_owner.warm_up_calls) == 2
        assert not await scene.queue.take_warm_up_lock("qwen-v1", "a")
        await asyncio.sleep(12)
        assert len(stalled_owner.warm_up_calls) == 4
        assert find_part(stalled_owner.dispatcher, WarmUpRunner).result_counts == {
            "warm": 1,
            "errors": 0,
            "retry": 0,
        }
        await stalled_owner.drain()

    warm_up_options = options()
    run_with_gateway(check, WarmUpGateway(), warm_up_options)


def test_stalled_owner_sends_no_more_calls_after_another_finished_the_warm_up() -> None:
    slow_gateway = WarmUpGateway()
    slow_gateway.answer_after_s = 3.0

    async def check(scene: Scene) -> None:
        stalled_owner = StalledOwner(scene, slow_gateway, warm_up_options)
        await stalled_owner.stall()
        assert await scene.queue.take_warm_up_lock("qwen-v1", "a")
        await scene.queue.mark_warm("qwen-v1", "a")
        await asyncio.sleep(20)
        assert len(stalled_owner.warm_up_calls) == 1
        assert stalled_owner.registry.lock_until == {}
        await stalled_owner.drain()

    warm_up_options = options()
    run_with_gateway(check, WarmUpGateway(), warm_up_options)


@pytest.mark.parametrize("warm_directly", [True, False])
def test_unreachable_gateway_is_probed_although_all_requests_wait_for_a_cold_version(
    warm_directly: bool,
) -> None:
    """Otherwise the warm-up waits for the gate, the gate for a probe, and each probe for the warm-up."""

    class UnreachableGateway(WarmUpGateway):
        is_unreachable = True

        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            if self.is_unreachable:
                at = asyncio.get_running_loop().time()
                self.sent.append(request.id)
                return AttemptResult(Unreachable("nobody listens"), at, at)
            return await super().forward(request, token=token, deadline=deadline, may_send=may_send)

    gateway = UnreachableGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="other")
        await submit_requests(scene, "o1", payload=b'{"model":"other"}', within_s=3)
        await asyncio.sleep(5)
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1", "r2")
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        assert len(gateway.sent) <= 60 + at  # Warm-up calls are no more frequent than probes.
        gateway.is_unreachable = False
        for _ in range(12):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1")
        assert gateway.batch_calls == [("qwen-v1", "")] * 2
        assert scene.dispatcher.get_allowance().reason is Reason.IDLE

    run_with_gateway(check, gateway, options(warm_directly=warm_directly))


def test_warm_marker_of_an_endpoint_seen_only_by_another_owner_is_kept() -> None:
    async def check(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        await other.mark_warm("qwen-v1", "x")
        await other.mark_warm("qwen-v1", "down")
        at = asyncio.get_running_loop().time()
        down = Listing("down", at, None, problem="refused", is_down=True)
        for listings in ([], [Listing("a", at, ("qwen-v1",)), down], [Listing("gateway", at, ("qwen-v1",))]):
            find_part(scene.dispatcher, ModelRouter).update_listings(listings)
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
        assert {("qwen-v1", "x"), ("qwen-v1", "down")} < (
            await other.refresh_warm_markers([], [], [])
        ).warm_markers

    run_with_gateway(check, WarmUpGateway(), options())


def test_warm_up_is_not_repeated_if_its_marker_could_not_be_written() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        async def raise_unavailable(_model: str, _endpoint: str) -> None:
            raise QueueUnavailableError("Redis did not answer in time")

        scene.queue.mark_warm = raise_unavailable  # type: ignore[method-assign,assignment]
        for _ in range(6):
            update_listings(scene, a="qwen-v1")
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
        assert (len(gateway.warm_up_calls), list_version_states(scene, "qwen-v1")) == (4, ["cold", "open"])
        del scene.queue.mark_warm
        await asyncio.sleep(2 * EXCHANGE_INTERVAL_S)
        assert ("qwen-v1", "a") in (
            await MemoryQueue(scene.store, "b").refresh_warm_markers([], [], [])
        ).warm_markers
        update_listings(scene, a="")
        update_listings(scene, a="qwen-v1")
        await wait_for_exchange(scene)
        assert len(gateway.warm_up_calls) == 8

    run_with_gateway(check, gateway, options())


@asynccontextmanager
async def run_other_owners(
    scene: Scene, gateway: WarmUpGateway, *, owners: int, requests: int, endpoints: int, rounds: int
) -> AsyncIterator[None]:
    """Run further owners on the queue of the scene, which has requests for another model only. `endpoints` is
    the number of endpoints that need a warm-up, and `rounds` how often they are listed before the block."""
    warm_up_options = options(can_steer=True, warm_directly=True)
    dispatchers = [scene.dispatcher]
    other_tasks: list[asyncio.Task[None]] = []
    for number in range(owners - 1):
        queue = MemoryQueue(scene.store, f"other-{number}")
        dispatcher = Dispatcher(queue, gateway, open_limiter(), warm_up_options, Journal(Metrics()))
        find_part(dispatcher, WarmUpRunner).servers = gateway
        dispatchers.append(dispatcher)
        other_tasks.append(asyncio.create_task(dispatcher.run()))
    await submit_requests(scene, *(f"r{number}" for number in range(requests)), payload=b'{"model":"other"}')
    names = dict.fromkeys((f"e{number}" for number in range(endpoints)), "qwen-v1")
    for _ in range(rounds):
        at = asyncio.get_running_loop().time()
        listings = [Listing(name, at, (model,)) for name, model in ({"a": "other"} | names).items()]
        for each in dispatchers:
            find_part(each, ModelRouter).update_listings(listings)
        await asyncio.sleep(EXCHANGE_INTERVAL_S)
    assert len({endpoint for endpoint, _, _ in gateway.warm_up_calls}) == endpoints
    yield
    for each in dispatchers[1:]:
        each.drain(1.0)
    await asyncio.gather(*other_tasks)


@pytest.mark.parametrize("owners", [2, 3])
def test_all_endpoints_are_warmed_up_although_other_owners_fill_the_limit(owners: int) -> None:
    """An owner without batch requests cannot make room, so it leaves the warm-ups to the others."""
    gateway = WarmUpGateway()
    gateway.answer_after_s = 0.5

    async def check(scene: Scene) -> None:
        async with run_other_owners(scene, gateway, owners=owners, requests=6000, endpoints=12, rounds=30):
            assert len(gateway.warm_up_calls) == 48
            assert len(gateway.batch_calls) > 2000
            assert gateway.max_running_count <= LIMIT + 1

    run_with_gateway(check, gateway, options(can_steer=True, warm_directly=True))


def test_warm_ups_and_batch_requests_of_all_owners_share_one_limit() -> None:
    """Owners learn of warm-ups of others within a second, and may exceed the limit by these until then."""
    gateway = WarmUpGateway()
    gateway.answer_after_s = 3.0

    async def check(scene: Scene) -> None:
        async with run_other_owners(scene, gateway, owners=5, requests=900, endpoints=24, rounds=40):
            assert len(gateway.batch_calls) > 400
            assert gateway.max_running_count <= LIMIT + MAX_PARALLEL_WARM_UPS

    run_with_gateway(check, gateway, options(can_steer=True, warm_directly=True))


def test_batch_requests_leave_units_for_warm_ups_of_other_owners() -> None:
    gateway = WarmUpGateway()
    gateway.answer_after_s = 1.0

    async def check(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        for number in range(4):
            assert await other.take_warm_up_lock("elsewhere", f"e{number}")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, *(f"r{number}" for number in range(100)), payload=b'{"model":"other"}')
        update_listings(scene, a="other")
        await asyncio.sleep(5)
        assert gateway.max_running_count == scene.dispatcher.running_count == LIMIT - 4
        for number in range(4):
            await other.release_warm_up_lock("elsewhere", f"e{number}")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert gateway.max_running_count == LIMIT

    run_with_gateway(check, gateway, options())


@pytest.mark.parametrize(("other_version", "is_first"), [("elsewhere", False), ("somewhere", True)])
def test_warm_ups_start_in_order_of_their_names_if_there_are_more_than_units(
    other_version: str, is_first: bool
) -> None:
    """Locks of an owner that stalls expire, so that the others are not blocked forever."""
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        for number in range(LIMIT):
            assert await other.take_warm_up_lock(other_version, f"e{number}")
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(EXCHANGE_INTERVAL_S)
        assert len(gateway.warm_up_calls) == (4 if is_first else 0)
        for _ in range(8):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1")
        assert len(gateway.warm_up_calls) == 4

    run_with_gateway(check, gateway, options())


def test_long_queue_outage_makes_only_changed_endpoints_cold() -> None:
    gateway = WarmUpGateway()

    async def check(scene: Scene) -> None:
        async def raise_unavailable(*_: object) -> None:
            raise QueueUnavailableError("Redis did not answer in time")

        update_listings(scene, a="qwen-v1", b="qwen-v1")
        await wait_for_exchange(scene)
        assert len(gateway.warm_up_calls) == 8
        scene.queue.refresh_warm_markers = raise_unavailable  # type: ignore[method-assign,assignment]
        for number in range(24):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1", b="" if number == 10 else "qwen-v1")
        del scene.queue.refresh_warm_markers
        for _ in range(4):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1", b="qwen-v1")
        assert [endpoint for endpoint, _, _ in gateway.warm_up_calls[8:]] == ["b"] * 4
        assert list_version_states(scene, "qwen-v1") == ["cold", "open"]
        assert (
            len((await MemoryQueue(scene.store, "other").refresh_warm_markers([], [], [])).warm_markers) == 2
        )

    run_with_gateway(check, gateway, options())
