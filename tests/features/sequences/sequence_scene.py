"""Requests of sequences for a scene, and a gateway that records when each of them was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from dispatcher.features.sequences.turns import Turn
from dispatcher.gateway.contract import AttemptResult
from dispatcher.requests.outcomes.outcome import Delivered, Outcome
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import Submission
from tests.features.scene import Scene
from tests.kernel.scene import AnsweringGateway


class SequenceGateway(AnsweringGateway):
    """Gateway that answers after 0.1 s and records what it was sent, and when."""

    answer_after_s = 0.1

    def __init__(
        self, build_outcome: Callable[[Request], Outcome] = lambda _: Delivered(200, b"{}"), token: str = ""
    ) -> None:
        super().__init__()
        self.build_outcome = build_outcome
        self.session_token = token
        """Session token of the answers to requests of sequences."""
        self.requests: list[Request] = []
        self.spans: list[tuple[str, float, float]] = []
        """Id, start and end of each answered request."""
        self.running_by_sequence: dict[str, int] = {}
        """Number of requests at the gateway, by the id of their sequence."""
        self.max_running_per_sequence = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        sent_at = asyncio.get_running_loop().time()
        sequence_id = request.extra.id if request.extra else ""
        self.sent.append(request.id)
        self.requests.append(request)
        self.running_by_sequence[sequence_id] = self.running_by_sequence.get(sequence_id, 0) + 1
        if sequence_id:
            self.max_running_per_sequence = max(
                self.max_running_per_sequence, self.running_by_sequence[sequence_id]
            )
        await asyncio.sleep(self.answer_after_s)
        self.running_by_sequence[sequence_id] -= 1
        answered_at = asyncio.get_running_loop().time()
        self.spans.append((request.id, sent_at, answered_at))
        token = self.session_token if request.affinity is not None else ""
        return AttemptResult(self.build_outcome(request), sent_at, answered_at, sticky_token=token)

    def list_sent_of(self, sequence_id: str) -> list[str]:
        """Return the ids of the requests of one sequence, in the order in which they were sent."""
        return [
            request.id
            for request in self.requests
            if request.extra is not None and request.extra.id == sequence_id
        ]


async def submit_turns(scene: Scene, turns: Sequence[tuple[str, Turn | None]], body: bytes = b"{}") -> None:
    deadline = int(time.time()) + 10**6
    await scene.store.submit(
        [
            Submission(
                encode_member(request_id, body, deadline, token="t", extra=turn),
                float(deadline),
                request_id,
                "t",
                deadline,
            )
            for request_id, turn in turns
        ]
    )


def build_turns(sequence_id: str, count: int, **fields: Any) -> list[tuple[str, Turn | None]]:
    """Return the ids and turns of the first requests of a sequence."""
    return [(f"{sequence_id}-{index}", Turn(sequence_id, index, **fields)) for index in range(count)]
