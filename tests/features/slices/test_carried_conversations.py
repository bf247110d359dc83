"""Sequences that carry their conversation, where the answers are generated in slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from dispatcher.features.sequences.turns import CarryMode, Turn
from dispatcher.gateway.contract import AttemptResult
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.requests.request import Request
from tests.features.scene import Scene, run_in_scene
from tests.features.slices.generation_gateway import GenerationGateway
from tests.features.slices.slice_scene import CHAT, build_options, build_payload, submit, wait_for_results


@dataclass
class RecordingGateway(GenerationGateway):
    """Gateway that notes the body of each call, with the id of its request."""

    bodies: list[tuple[str, Any]] = field(default_factory=list)

    async def forward(self, request: Request, **options: Any) -> AttemptResult:
        self.bodies.append((request.id, msgspec.json.decode(request.payload)))
        return await super().forward(request, **options)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_next_turn_carries_the_whole_text_of_an_answer_in_slices(*, is_streamed: bool) -> None:
    gateway = RecordingGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        first, second = (Turn("s", index=index, carry=CarryMode.MESSAGES) for index in range(2))
        await submit(scene, CHAT, build_payload(CHAT, 1), "r-1", extra=first)
        answered = (await wait_for_results(scene, 1))["r-1"]
        assert (answered.slices or 0) > 1
        text = msgspec.json.decode(answered.payload)["choices"][0]["message"]["content"]
        await submit(scene, CHAT, build_payload(CHAT, 2, max_tokens=5), "r-2", extra=second)
        assert (await wait_for_results(scene, 1))["r-2"].status_code == 200
        sent = next(body for request_id, body in gateway.bodies if request_id == "r-2")
        assert sent["messages"][1]["content"] == text

    run_in_scene(check, gateway, build_options(skips_check=True, is_streamed=is_streamed))
