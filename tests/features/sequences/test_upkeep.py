"""Requests that are left of an ended sequence are answered beside the rounds of the loop."""

from __future__ import annotations

import asyncio

from dispatcher.features.sequences import upkeep
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.telemetry.events import Event
from tests.features.scene import Scene, run_in_scene
from tests.features.sequences.sequence_scene import SequenceGateway, build_turns, submit_turns
from tests.kernel.faults import Fault, inject
from tests.kernel.scene import read_results


def test_remaining_request_that_raises_an_exception_holds_up_no_other() -> None:
    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("s", 4, on_error="abort"))
        await asyncio.sleep(5.0)
        results = await read_results(scene)
        assert {name: result.get("error_code") for name, result in results.items()} == {
            "s-0": None,
            "s-1": "SEQUENCE_ABORTED",
            "s-3": "SEQUENCE_ABORTED",
        }
        assert Event.INTERNAL_ERROR in [event for event, _ in scene.events]

    gateway = SequenceGateway(lambda _: Delivered(400, b"{}"))
    with inject(Fault(upkeep, "build_remaining_error", request_id="s-2", is_active=True)):
        run_in_scene(check, gateway)
