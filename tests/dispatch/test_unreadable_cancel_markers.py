"""Cancel markers that cannot be read while the queue answers, because their node is down."""

from __future__ import annotations

import asyncio

from dispatcher.core.limit.budget import Reason
from tests.dispatch.scene import Scene, run_in_scene

UNREADABLE_FOR_S = 60.0


def test_requests_are_claimed_only_once_while_their_markers_cannot_be_read() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.unreadable_prefixes = "r"
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(UNREADABLE_FOR_S)
        assert scene.queue.claimed_count == 2, "each request is claimed once"
        assert scene.queue.cancel_check_count < UNREADABLE_FOR_S + 10, (
            "and its marker is looked up each second"
        )
        assert scene.list_queue_events() == ["queue-unreachable"]
        assert scene.dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
        problem = "Redis did not answer in time: cancel markers cannot be read"
        assert scene.dispatcher.view.problem == problem
        assert (await scene.store.count_requests()).pending == 2
        scene.queue.unreadable_prefixes = ""
        await asyncio.sleep(1.5)
        assert sorted(scene.gateway.sent) == ["r-1", "r-2"]
        assert scene.list_queue_events() == ["queue-unreachable", "queue-reachable"]
        assert scene.dispatcher.view.problem is None

    run_in_scene(check)


def test_gate_stays_closed_although_other_markers_can_be_read() -> None:
    """The marker of the running request is looked up each second, on a node that answers."""

    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = UNREADABLE_FOR_S / 2
        await scene.submit("here")
        await asyncio.sleep(0.5)
        assert scene.gateway.sent == ["here"]
        scene.queue.unreadable_prefixes = "r"
        await scene.submit("r-1")
        await asyncio.sleep(UNREADABLE_FOR_S / 3)
        assert (scene.queue.claimed_count, scene.list_queue_events()) == (2, ["queue-unreachable"])
        assert scene.dispatcher.running_count == 1
        scene.queue.unreadable_prefixes = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == ["here", "r-1"]

    run_in_scene(check)


def test_problem_shows_the_queue_outage_while_it_lasts_and_then_the_markers() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.unreadable_prefixes = "r"
        await scene.submit("r-1")
        await asyncio.sleep(5)
        scene.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(5)
        assert scene.dispatcher.view.problem == "Redis refuses connections"
        scene.store.outage_message = None
        await asyncio.sleep(5)
        assert "markers" in (scene.dispatcher.view.problem or "")
        scene.queue.unreadable_prefixes = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == ["r-1"]
        assert scene.list_queue_events() == ["queue-unreachable", "queue-reachable"]

    run_in_scene(check)


def test_cancellation_during_the_outage_applies_when_markers_can_be_read_again() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.unreadable_prefixes = "r"
        await scene.submit("r-1")
        await asyncio.sleep(5)
        await scene.store.cancel_request("r-1")
        scene.queue.unreadable_prefixes = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == []
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 1

    run_in_scene(check)
