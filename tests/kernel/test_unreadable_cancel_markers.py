"""Cancel markers that cannot be read while the queue answers: all of them, or those of one Cluster node."""

from __future__ import annotations

import asyncio

from dispatcher.limit.budget import Reason
from tests.kernel.scene import Scene, run_in_scene

UNREADABLE_FOR_S = 60.0


def test_requests_are_claimed_only_once_while_no_marker_can_be_read() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.are_all_markers_unreadable = True
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
        counts = await scene.store.count_requests()
        assert counts.pending + counts.delayed == 2
        scene.queue.are_all_markers_unreadable = False
        await asyncio.sleep(2.5)
        assert sorted(scene.gateway.sent) == ["r-1", "r-2"]
        assert scene.list_queue_events() == ["queue-unreachable", "queue-reachable"]
        assert scene.dispatcher.view.problem is None

    run_in_scene(check)


def test_only_requests_with_unreadable_markers_wait() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.unreadable_prefixes = "x"
        await scene.submit("x-1", "r-1", "x-2")
        for number in range(2, 20):
            await asyncio.sleep(UNREADABLE_FOR_S / 20)
            await scene.submit(f"r-{number}")
        await asyncio.sleep(UNREADABLE_FOR_S / 20)
        assert scene.gateway.sent == [f"r-{number}" for number in range(1, 20)]
        assert scene.dispatcher.get_allowance().reason is not Reason.QUEUE_UNREACHABLE
        assert scene.dispatcher.view.problem is None
        assert scene.dispatcher.view.markers_problem == "Redis did not answer in time"
        assert scene.queue.claimed_count < 19 + 2 * 10, "the pauses between the claims of a request grow"
        assert [event.event_name for event, _ in scene.events if "markers" in event.event_name] == [
            "cancel-markers-unreadable"
        ]

    run_in_scene(check)


def test_held_requests_are_sent_without_a_counted_attempt_once_their_markers_are_readable() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.unreadable_prefixes = "x"
        await scene.submit("x-1")
        await asyncio.sleep(UNREADABLE_FOR_S)
        scene.queue.unreadable_prefixes = ""
        await asyncio.sleep(1.5)
        assert scene.dispatcher.view.markers_problem is None
        await asyncio.sleep(30.0)
        assert scene.gateway.sent == ["x-1"]
        assert scene.queue.highest_delivery == 1
        assert [event.event_name for event, _ in scene.events if "markers" in event.event_name] == [
            "cancel-markers-unreadable",
            "cancel-markers-readable",
        ]

    run_in_scene(check)


def test_problem_shows_the_queue_outage_while_it_lasts_and_then_the_markers() -> None:
    async def check(scene: Scene) -> None:
        scene.queue.are_all_markers_unreadable = True
        await scene.submit("r-1")
        await asyncio.sleep(5)
        scene.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(5)
        assert scene.dispatcher.view.problem == "Redis refuses connections"
        scene.store.outage_message = None
        await asyncio.sleep(5)
        assert "markers" in (scene.dispatcher.view.problem or "")
        scene.queue.are_all_markers_unreadable = False
        await asyncio.sleep(2.5)
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
        await asyncio.sleep(10)
        assert scene.gateway.sent == []
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 1

    run_in_scene(check)
