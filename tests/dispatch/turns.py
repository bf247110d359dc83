"""Requests of sequences for a scene, and a gateway that knows what of them it was sent, when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from dispatcher.core.gateway.outcome import Delivered, Outcome
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.core.sequences.turns import Turn
from dispatcher.ports import AttemptResult, Submission
from tests.dispatch.scene import Answers, Scene


class Servers(Answers):
    """Answers after a tenth of a second, each request by what is said of it; knows what it was sent, when."""

    takes_s = 0.1

    def __init__(
        self, how: Callable[[Request], Outcome] = lambda _: Delivered(200, b"{}"), token: str = ""
    ) -> None:
        super().__init__()
        self.how = how
        self.token = token
        self.requests: list[Request] = []
        self.spans: list[tuple[str, float, float]] = []
        self.at_once: dict[str, int] = {}
        self.most_at_once = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        began = asyncio.get_running_loop().time()
        name = request.sequence.id if request.sequence else ""
        self.sent.append(request.id)
        self.requests.append(request)
        self.at_once[name] = self.at_once.get(name, 0) + 1
        if name:
            self.most_at_once = max(self.most_at_once, self.at_once[name])
        await asyncio.sleep(self.takes_s)
        self.at_once[name] -= 1
        ended = asyncio.get_running_loop().time()
        self.spans.append((request.id, began, ended))
        said = self.token if request.session is not None else ""
        return AttemptResult(self.how(request), began, ended, sticky_token=said)

    def of(self, name: str) -> list[str]:
        return [each.id for each in self.requests if each.sequence is not None and each.sequence.id == name]


async def submit(scene: Scene, turns: Sequence[tuple[str, Turn | None]], body: bytes = b"{}") -> None:
    until = int(time.time()) + 10**6
    await scene.store.submit(
        [
            Submission(
                encode_member(name, body, until, token="t", sequence=turn), float(until), name, "t", until
            )
            for name, turn in turns
        ]
    )


def turns(sequence: str, count: int, **how: Any) -> list[tuple[str, Turn | None]]:
    return [(f"{sequence}-{number}", Turn(sequence, number, **how)) for number in range(count)]


async def results(scene: Scene) -> dict[str, dict[str, Any]]:
    found = [
        json.loads(each) for each in await scene.store.read_results(scene.store.default_result_list, 1000)
    ]
    return {each["id"]: each for each in found}
