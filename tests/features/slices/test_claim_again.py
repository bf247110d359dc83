"""The next slice of a generation is leased by the call that ends the previous one."""

from __future__ import annotations

import pytest

from dispatcher.features.slices import slicer
from dispatcher.features.slices.counts import SliceCounts
from dispatcher.features.slices.eligibility import Generation, SliceTerms, WholeReason, check_generation
from dispatcher.kernel import admission
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.requests.request import Rejection, Request, parse_member
from tests.features.slices.generation_gateway import GenerationGateway, generate_whole
from tests.features.slices.slice_scene import (
    COMPLETION,
    build_options,
    build_payload,
    submit,
    summarize,
    wait_for_calls,
    wait_for_results,
)
from tests.kernel.call_recorder import CallRecorder
from tests.kernel.scene import Scene, run_in_scene


def test_next_slices_need_no_claim() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION))
        await wait_for_calls(gateway, 20, 1)
        calls = CallRecorder(scene)
        await wait_for_results(scene, 1)
        assert calls.leases_per_release == [1] * 4
        assert calls.claimed_count == 0

    run_in_scene(check, gateway, build_options(skips_check=True))


def test_request_is_parsed_and_checked_once_for_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_ids = list[str | None]()
    checked_paths = list[str]()

    def parse_and_record(member: bytes, **options: int) -> Request | Rejection:
        parsed = parse_member(member, **options)
        parsed_ids.append(parsed.id)
        return parsed

    def check_and_record(
        path: str, payload: bytes, terms: SliceTerms, *, has_begun: bool = False
    ) -> Generation | WholeReason:
        checked_paths.append(path)
        return check_generation(path, payload, terms, has_begun=has_begun)

    monkeypatch.setattr(admission, "parse_member", parse_and_record)
    monkeypatch.setattr(slicer, "check_generation", check_and_record)
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION))
        assert (await wait_for_results(scene, 1))["r-1"].slices == 5
        assert parsed_ids == ["r-1"]
        assert checked_paths == [COMPLETION]
        assert scene.dispatcher.context.parsed_requests.size_bytes == 0

    run_in_scene(check, gateway, build_options(skips_check=True))


def run_and_count_calls(lost_count: int) -> int:
    """Run three generations while replies of the queue are lost. Return the number of calls to the
    servers."""
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        calls = CallRecorder(scene)
        calls.replies_to_lose = lost_count
        for number in range(3):
            await submit(scene, COMPLETION, build_payload(COMPLETION, number), f"r-{number}")
        results = await wait_for_results(scene, 3)
        for number in range(3):
            answer = results[f"r-{number}"].payload
            assert isinstance(answer, str)
            whole = generate_whole(COMPLETION, build_payload(COMPLETION, number), gateway.config)
            assert summarize(answer) == summarize(whole)
        counts = await scene.queue.count_requests()
        assert (counts.pending, counts.leased, counts.of(SliceCounts).started) == (0, 0, 0)
        assert calls.replies_to_lose == 0

    run_in_scene(check, gateway, build_options(skips_check=True))
    return len(gateway.calls)


@pytest.mark.parametrize("lost_count", [1, 2, 5])
def test_lost_reply_loses_no_slice_and_sends_none_twice(lost_count: int) -> None:
    assert run_and_count_calls(lost_count) == run_and_count_calls(0)


def test_request_of_a_higher_priority_is_sent_before_the_next_slice() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        # As many generations as the limit allows requests.
        for number in range(9):
            await submit(scene, COMPLETION, build_payload(COMPLETION, number), f"r-{number}", priority=5)
        await wait_for_calls(gateway, 20, 9)
        await submit(scene, COMPLETION, build_payload(COMPLETION, max_tokens=7), "urgent")
        await wait_for_calls(gateway, 20, 18)
        asked = [call.max_tokens for call in gateway.calls]
        assert 7 in asked[9:18]

    run_in_scene(check, gateway, build_options(skips_check=True))
