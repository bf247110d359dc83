"""Overrides of the settings of sequences for models, in a running dispatcher."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.features.sequences.decisions import (
    OverrideCounts,
    SequenceCounts,
    SequenceOverride,
    SequenceTerms,
)
from dispatcher.features.sequences.options import SequenceOptions
from dispatcher.features.sequences.turns import Turn
from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.features.scene import Scene, run_in_scene
from tests.features.sequences.sequence_scene import SequenceGateway, submit_turns
from tests.kernel.scene import read_results

BIG = SequenceOverride("big-*", max_active=1)
QUICK = SequenceOverride("quick", max_idle_s=5.0)


def make_options(*overrides: SequenceOverride) -> Options:
    return Options(
        RetryPolicy(), of_features=index_options(SequenceOptions(SequenceTerms(overrides=overrides)))
    )


def test_sequences_of_a_full_model_wait_and_others_run() -> None:
    gateway = SequenceGateway()
    gateway.answer_after_s = 1.0

    async def check(scene: Scene) -> None:
        for name in ("one", "two"):
            await submit_turns(scene, [(name, Turn(name, 0, last=True))], b'{"model":"big-7b"}')
        await submit_turns(scene, [("three", Turn("three", 0, last=True))], b'{"model":"small"}')
        await asyncio.sleep(0.5)
        assert sorted(gateway.sent) == ["one", "three"]
        counts = (await scene.queue.count_requests()).of(SequenceCounts)
        assert counts.overrides == (OverrideCounts("big-*", 1, 1),)
        await asyncio.sleep(3)
        assert sorted(gateway.sent) == ["one", "three", "two"]

    run_in_scene(check, gateway, make_options(BIG))


def test_sequence_of_a_quick_model_ends_after_its_own_idle_time() -> None:
    async def check(scene: Scene) -> None:
        await submit_turns(scene, [("q", Turn("quick", 0))], b'{"model":"quick"}')
        await submit_turns(scene, [("o", Turn("other", 0))], b'{"model":"other"}')
        await asyncio.sleep(10)
        assert [name for name in ("quick", "other") if await scene.store.get_sequence(name)] == ["other"]

    run_in_scene(check, SequenceGateway(), make_options(QUICK))


@pytest.mark.parametrize("is_paused", [False, True])
def test_sequence_that_begins_with_an_expired_request_has_the_override_of_its_model(is_paused: bool) -> None:
    """While the queue is paused, the request is answered without a claim."""

    async def check(scene: Scene) -> None:
        await submit_turns(scene, [("first", Turn("known", 0))])
        await asyncio.sleep(1)
        if is_paused:
            await scene.store.pause("me", "a test")
        until = int(asyncio.get_running_loop().time()) - 1
        member = encode_member("late", b'{"model":"big-7b"}', until, token="t", extra=Turn("late", 0))
        await scene.store.submit([Submission(member, float(until), "late", "t", until)])
        await asyncio.sleep(3)
        assert (await read_results(scene))["late"]["error_code"] == "DEADLINE_EXCEEDED"
        snapshot = await scene.store.get_sequence("late")
        assert snapshot is not None
        assert snapshot.override == "big-*"
        await scene.store.resume()

    run_in_scene(check, SequenceGateway(), make_options(BIG))


def test_changed_overrides_apply_to_sequences_that_are_parked_already() -> None:
    gateway = SequenceGateway()
    gateway.answer_after_s = 100.0

    async def check(scene: Scene) -> None:
        for name in ("one", "two"):
            await submit_turns(scene, [(name, Turn(name, 0))], b'{"model":"big-7b"}')
        await asyncio.sleep(3)
        assert gateway.sent == ["one"]
        scene.dispatcher.reconfigure(make_options(SequenceOverride("big-*", max_active=2)))
        await asyncio.sleep(3)
        assert gateway.sent == ["one", "two"]
        await asyncio.sleep(200)

    run_in_scene(check, gateway, make_options(BIG))
