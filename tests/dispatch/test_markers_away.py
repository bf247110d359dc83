"""Cancel markers that cannot be read, while the queue itself answers: their Cluster node is away."""

from __future__ import annotations

import asyncio

from dispatcher.core.limit.budget import Reason
from tests.dispatch.scene import Scene, perform

AWAY_S = 60.0


def test_nothing_is_claimed_again_and_again_while_markers_cannot_be_read() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.queue.away = "r"
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(AWAY_S)
        assert scene.queue.record_claim == 2, "once each"
        assert scene.queue.looked_up < AWAY_S + 10, "and looked up each second"
        assert scene.told() == ["queue-unreachable"]
        assert scene.dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
        problem = "Redis did not answer in time: cancel markers cannot be read"
        assert scene.dispatcher.view.problem == problem
        assert (await scene.store.count_requests()).pending == 2
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert sorted(scene.gateway.sent) == ["r-1", "r-2"]
        assert scene.told() == ["queue-unreachable", "queue-reachable"]
        assert scene.dispatcher.view.problem is None

    perform(scene_of)


def test_markers_that_can_be_read_say_nothing_of_those_that_cannot() -> None:
    """What runs is looked up each second: those markers lie on a node that answers."""

    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = AWAY_S / 2
        await scene.submit("here")
        await asyncio.sleep(0.5)
        assert scene.gateway.sent == ["here"]
        scene.queue.away = "r"
        await scene.submit("r-1")
        await asyncio.sleep(AWAY_S / 3)
        assert (scene.queue.record_claim, scene.told()) == (2, ["queue-unreachable"])
        assert scene.dispatcher.running_count == 1
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == ["here", "r-1"]

    perform(scene_of)


def test_queue_that_is_away_as_well_is_told_of_while_it_is() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.queue.away = "r"
        await scene.submit("r-1")
        await asyncio.sleep(5)
        scene.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(5)
        assert scene.dispatcher.view.problem == "Redis refuses connections"
        scene.store.outage_message = None
        await asyncio.sleep(5)
        assert "markers" in (scene.dispatcher.view.problem or "")
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == ["r-1"]
        assert scene.told() == ["queue-unreachable", "queue-reachable"]

    perform(scene_of)


def test_cancelled_meanwhile_is_seen_when_markers_can_be_read() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.queue.away = "r"
        await scene.submit("r-1")
        await asyncio.sleep(5)
        await scene.store.cancel_request("r-1")
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == []
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 1

    perform(scene_of)
