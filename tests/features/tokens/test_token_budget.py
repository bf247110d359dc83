"""Requests are sent only if the KV memory has room for their tokens, in a running dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.features.tokens.options import TokenOptions
from dispatcher.features.tokens.token_budget import MAX_AGE_S, RETRY_S
from dispatcher.limit.budget import Policy, Reason
from tests.features.tokens.token_scene import (
    CAPACITY,
    UsageGateway,
    build_options,
    find_budget,
    show,
    show_for,
    submit,
)
from tests.kernel.scene import Scene, UnreachableGateway


def run(
    check: Callable[[Scene], Awaitable[None]], gateway: Any = None, used: float = 0.0, **changes: Any
) -> None:
    """Run `check` after a reading of an endpoint with room for 100 requests has been applied."""

    async def check_after_reading(scene: Scene) -> None:
        scene.limiter.set_policy(Policy(max_sys=100, max_age_s=1e6), 2.0)
        show(scene, used)
        await asyncio.sleep(0.5)
        await check(scene)

    Scene.run(check_after_reading, gateway or UsageGateway(), build_options(**changes))


def test_no_more_tokens_are_in_flight_than_the_memory_has_room_for() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        for number in range(40):
            await submit(scene, f"r-{number}", 6_000, 2_000)
        await show_for(scene, 60.0, 0.0)
        assert len(gateway.sent) == 40
        assert 88_000 - 8_000 <= gateway.most_tokens <= 95_000
        budget = find_budget(scene)
        assert (budget.memory.reserved, budget.leases) == (0, {})
        # No request was claimed again and again: at most one without room for each answer or second.
        assert scene.queue.claimed_count <= 40 + 60

    run(check, gateway)


def test_realtime_requests_leave_less_room() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        for number in range(10):
            await submit(scene, f"r-{number}", 6_000, 2_000)
        await asyncio.sleep(4.0)
        assert gateway.sent == ["r-0", "r-1", "r-2"]  # of 25,000 tokens
        allowance = scene.dispatcher.get_allowance()
        assert allowance.reason is Reason.OPEN
        assert allowance.detail == (
            "the KV memory has room for 1,000 tokens, and the next request needs about 8,000"
        )

    run(check, gateway, 0.7)


def test_small_request_is_sent_while_a_large_one_waits_but_cannot_keep_it_waiting() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        await submit(scene, "first", 50_000, 10)
        await show_for(scene, 1.0, 0.0)
        await submit(scene, "large", 60_000, 10, in_s=10**5)  # has an earlier deadline than the small ones
        for number in range(200):
            await submit(scene, f"small-{number}", 3_000, 10)
        await show_for(scene, 2.0, 0.0)
        assert "large" not in gateway.sent
        await show_for(scene, 6.0, 0.0)
        assert "large" in gateway.sent
        assert gateway.most_tokens <= 95_000

    run(check, gateway)


def test_request_larger_than_the_memory_is_sent_alone() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        await submit(scene, "huge", 200_000, 10)
        await submit(scene, "next", 1_000, 10)
        await show_for(scene, 4.0, 0.5)
        assert gateway.sent == ["huge"]
        await show_for(scene, 10.0, 0.5)
        assert gateway.sent == ["huge", "next"]

    run(check, gateway, 0.5)


def test_nothing_is_sent_into_a_full_memory() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        await submit(scene, "r", 10, 10)
        await show_for(scene, 30.0, 0.96)
        assert gateway.sent == []
        assert scene.queue.claimed_count == 0
        await show_for(scene, 1.0, 0.5)
        assert gateway.sent == ["r"]

    run(check, gateway, 0.96)


@pytest.mark.parametrize(
    "changes",
    [
        {"share": float("nan")},
        {"share": -0.1},
        {"share": float("inf")},
        {"endpoints": 0},
        {"endpoints": None},
    ],
)
def test_memory_that_readings_do_not_show_any_more_stops_the_requests(changes: dict[str, Any]) -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        await submit(scene, "before", 10, 10)
        await asyncio.sleep(0.5)
        assert gateway.sent == ["before"]
        for _ in range(int(2 * MAX_AGE_S) + 4):
            show(scene, **{"used": 0.1, **changes})
            await asyncio.sleep(0.5)
        await submit(scene, "after", 10, 10)
        for _ in range(4):
            show(scene, None)
            await asyncio.sleep(0.5)
        assert gateway.sent == ["before"]
        assert find_budget(scene).problem == "the readings do not show the use of the KV memory any more"
        assert scene.dispatcher.get_allowance().detail == find_budget(scene).problem
        show(scene, 0.1)
        await asyncio.sleep(0.5)
        assert gateway.sent == ["before", "after"]

    run(check, gateway)


@pytest.mark.parametrize("changes", [{"per_endpoint": None}, {"is_on": False}])
def test_tokens_are_not_counted_without_a_capacity_or_when_off(changes: dict[str, Any]) -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        for number in range(30):
            await submit(scene, f"r-{number}", 6_000, 2_000)
        await show_for(scene, 2.0, 0.99)
        assert len(gateway.sent) == 30
        assert find_budget(scene).leases == {}

    run(check, gateway, 0.99, **changes)


def test_capacity_of_the_pages_counts_if_no_setting_names_it() -> None:
    async def check(scene: Scene) -> None:
        show(scene, 0.5, capacity_tokens=40_000, endpoints=2)
        await asyncio.sleep(0.2)
        await submit(scene, "r", 10, 10)
        await asyncio.sleep(0.2)
        assert find_budget(scene).memory.capacity == 40_000

    run(check, per_endpoint=None)


def test_reload_switches_the_budget_off_and_on() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        await submit(scene, "r-1", 10, 10)
        await show_for(scene, 1.0, 0.99)
        assert gateway.sent == []
        options = scene.dispatcher.context.options
        off = replace(options, of_features={TokenOptions: TokenOptions()})
        scene.dispatcher.reconfigure(off)
        await show_for(scene, 1.0, 0.99)
        assert gateway.sent == ["r-1"]
        scene.dispatcher.reconfigure(options)
        await submit(scene, "r-2", 10, 10)
        await show_for(scene, 1.0, 0.99)
        assert gateway.sent == ["r-1"]

    run(check, gateway, 0.99)


def test_usage_of_answers_teaches_the_length_of_later_requests() -> None:
    gateway = UsageGateway(lambda body: (body["prompt_tokens"], 100))

    async def check(scene: Scene) -> None:
        for number in range(12):
            await submit(scene, f"r-{number}", 100, 8_000)
        await show_for(scene, 12.0, 0.0)
        await submit(scene, "later", 100, 8_000)
        await show_for(scene, 1.0, 0.0)
        (call,) = find_budget(scene).leases.values()
        assert (call.prompt, call.output) == (100, 100)

    run(check, gateway)


def test_probe_is_sent_although_the_memory_is_full() -> None:
    gateway = UnreachableGateway()

    async def check(scene: Scene) -> None:
        await submit(scene, "r-1", 10, 10)
        await asyncio.sleep(0.5)
        sent = len(gateway.sent)
        assert sent
        await show_for(scene, 10.0, 1.0)
        assert len(gateway.sent) > sent
        gateway.is_unreachable = False
        await show_for(scene, 10.0, 1.0)
        assert scene.store.pop_result() is not None

    run(check, gateway)


def test_single_reading_without_the_memory_stops_nothing() -> None:
    gateway = UsageGateway()

    async def check(scene: Scene) -> None:
        await show_for(scene, 3.0, 0.1)
        show(scene, None)
        await submit(scene, "r-1", 10, 10)
        await asyncio.sleep(0.5)
        assert gateway.sent == ["r-1"]
        assert find_budget(scene).memory.mean_call == 20

    run(check, gateway)


def test_estimated_tokens_of_a_simulated_request_have_a_factor() -> None:
    async def check(scene: Scene) -> None:
        await submit(scene, "r-1", 10, 100)
        await asyncio.sleep(0.5)
        (call,) = find_budget(scene).leases.values()
        assert (call.prompt, call.output, call.max_output) == (1_400, 140, 100)

    run(check, find_prompt=lambda payload: 1_000, assumed_factor=1.4)


@pytest.mark.parametrize(("cached_tokens", "least", "most"), [(0, 80_000, 95_000), (8_000, 200_000, 300_000)])
def test_shared_prompts_are_sent_as_far_as_readings_show_room(
    cached_tokens: int, least: float, most: float
) -> None:
    gateway = UsageGateway(cached_tokens=cached_tokens)

    async def check(scene: Scene) -> None:
        for number in range(200):
            await submit(scene, f"r-{number}", 9_000, 10)
        for _ in range(200):
            prefixes = 8_000 * max(0, len(find_budget(scene).leases) - 1)
            show(scene, max(0, gateway.tokens - prefixes) / CAPACITY)
            await asyncio.sleep(0.1)
        assert least < gateway.most_tokens <= most

    run(check, gateway)


def test_request_without_room_is_tried_again_at_most_once_a_second() -> None:
    async def check(scene: Scene) -> None:
        await submit(scene, "first", 60_000, 10)
        await show_for(scene, 0.5, 0.0)
        await submit(scene, "second", 60_000, 10)
        before = scene.queue.claimed_count
        for _ in range(200):  # each of these starts a round of the loop
            scene.dispatcher.wake_up()
            await asyncio.sleep(0.01)
        assert scene.queue.claimed_count - before <= 2.0 / RETRY_S + 1

    run(check)
