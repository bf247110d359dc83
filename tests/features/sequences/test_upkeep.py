"""Requests that are left of an ended sequence are answered beside the rounds of the loop."""

from __future__ import annotations

import asyncio

import msgspec

from dispatcher.features.sequences import upkeep
from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.queue.calls import SequenceCalls
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.features.slices.progress import Progress, Stage, encode_progress
from dispatcher.queue.contract import Permit, Release, Settlement
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.telemetry.events import Event
from tests.features.memory_queue import MemoryQueue
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


def test_remaining_request_has_what_was_generated_before_its_sequence_ended() -> None:
    """Another process began the last request in slices, and failed the one before it."""
    text = encode_progress(Progress(Stage.SLICES, 1, "once upon", tokens=2, object="text_completion"))
    turn, terms = Turn("s", on_error=OnError.ABORT), SequenceTerms()

    async def check(scene: Scene) -> None:
        other, permit = MemoryQueue(scene.store, "b"), Permit(9, 0.0, 0, 60.0)
        calls = other.open_calls(SequenceCalls)
        await submit_turns(scene, [("last", turn)])
        (begun,) = (await other.claim(1, "n-1", permit)).leases
        await other.release([Release(begun, progress=text)])
        await submit_turns(scene, [("first", turn)])
        leases = (await other.claim(2, "n-2", permit)).leases
        first, last = sorted(leases, key=lambda lease: lease.progress)
        await calls.claim_turns([(first, turn), (last, turn)], terms)
        await other.settle(
            [Settlement(first, b'{"id":"first","payload":""}', "", extra=TurnEnd(turn, has_failed=True))]
        )
        await asyncio.sleep(5.0)
        result = (await read_results(scene))["last"]
        assert (result["error_code"], result["partial"]) == ("SEQUENCE_ABORTED", True)
        assert msgspec.json.decode(result["payload"])["choices"][0]["text"] == "once upon"

    run_in_scene(check)
