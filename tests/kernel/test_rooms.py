"""A feature bounds how many requests are claimed, and learns the tokens that answers report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks, LeasePart
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.limit.budget import Reason
from dispatcher.requests.outcomes.outcome import Delivered, Outcome, Unreachable
from dispatcher.requests.request import Request
from tests.kernel.scene import AnsweringGateway, Scene

REQUESTS = [f"r-{number}" for number in range(10)]
USAGE = b'{"usage":{"prompt_tokens":12,"completion_tokens":3}}'


class Hall(LeasePart):
    """Feature with room for some requests."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.problem = ""
        self.planned: list[int] = []
        self.leases: set[str] = set()
        self.tokens: list[tuple[int, int, int]] = []

    def plan_claim(self, max_count: int) -> int:
        self.planned.append(max_count)
        return min(max_count, self.room - len(self.leases))

    def look_up(self, requests: list[ClaimedRequest]) -> None: ...

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        self.leases |= {claimed.entry.lease.token for claimed in requests}
        return requests

    def record_tokens(
        self, entry: InFlightLease, tokens_in: int, tokens_out: int, cached_tokens: int
    ) -> None:
        assert entry.lease.token in self.leases
        self.tokens.append((tokens_in, tokens_out, cached_tokens))

    def forget_lease(self, token: str) -> None:
        self.leases.remove(token)


class FixedGateway(AnsweringGateway):
    """Gateway whose outcomes are all the same."""

    answer_after_s = 1.0

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome
        self.most_at_once = self.running = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        result = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        self.running -= 1
        return result.copy_with(outcome=self.outcome)


def run_with_room(hall: Hall, outcome: Outcome, check: Callable[[Scene], Awaitable[None]]) -> FixedGateway:
    """Run ten requests, and `check` beside them."""

    class HallScene(Scene):
        @staticmethod
        def build_hooks(_context: KernelContext) -> Hooks:
            return Hooks(stages=(hall,), lease_parts=(hall,), rooms=(hall,))

    async def submit_and_check(scene: Scene) -> None:
        await scene.submit(*REQUESTS)
        await check(scene)

    gateway = FixedGateway(outcome)
    HallScene.run(submit_and_check, gateway)
    assert hall.leases == set()
    return gateway


async def wait_for_all(_scene: Scene) -> None:
    await asyncio.sleep(20)


def test_no_more_requests_are_claimed_than_a_feature_has_room_for() -> None:
    hall = Hall(3)
    gateway = run_with_room(hall, Delivered(200, USAGE), wait_for_all)
    assert gateway.sent == REQUESTS
    assert gateway.most_at_once == 3
    assert hall.planned[0] == 9  # the limit of `open_limiter`


def test_reason_of_a_feature_without_room_is_shown() -> None:
    hall = Hall(0)
    hall.problem = "the hall is full"

    async def check(scene: Scene) -> None:
        await asyncio.sleep(0.5)
        allowance = scene.dispatcher.get_allowance()
        assert (allowance.reason, allowance.detail) == (Reason.OPEN, "the hall is full")

    assert run_with_room(hall, Delivered(200, USAGE), check).sent == []


@pytest.mark.parametrize(
    ("outcome", "tokens"),
    [
        (Delivered(200, USAGE), (12, 3, 0)),
        (Delivered(200, b"{}"), (0, 0, 0)),
        (Delivered(200, b"no JSON"), (0, 0, 0)),
        (Delivered(400, USAGE), None),
        (Unreachable("no connection"), None),
    ],
)
def test_tokens_of_each_answer_are_recorded_once(
    outcome: Outcome, tokens: tuple[int, int, int] | None
) -> None:
    hall = Hall(10)

    async def check(_scene: Scene) -> None:
        await asyncio.sleep(1.5)

    run_with_room(hall, outcome, check)
    assert hall.tokens[:9] == ([] if tokens is None else [tokens] * 9)
