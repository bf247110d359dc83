"""Which requests a probe is spent on while there is no gateway."""

from __future__ import annotations

import asyncio
import time

from dispatcher.core.gateway.outcome import Unreachable
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.ports import AttemptResult, Submission
from tests.dispatch.scene import Answers, Scene, perform

ENDED = 2000
"""Requests that end without being sent, each before the next request that can be."""


class Away(Answers):
    """Have no gateway until `away` is false."""

    away = True

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        told = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        return told.copy_with(outcome=Unreachable("no connection")) if self.away else told


def test_probe_whose_request_is_cancelled_goes_on_to_the_next_request_at_once() -> None:
    gateway = Away()

    async def scene_of(scene: Scene) -> None:
        await scene.submit("r-0")
        await asyncio.sleep(5)
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        gone = [f"c-{number:04}" for number in range(ENDED)]
        # Before the request that waits, by their deadlines.
        until = int(time.time()) + 10**5
        await scene.store.submit(
            [
                Submission(encode_member(name, b"{}", until, token="t"), float(until), name, "t", until)
                for name in gone
            ]
        )
        for name in gone:
            await scene.store.cancel_request(name, "t")
        gateway.away = False
        sent = len(gateway.sent)
        await asyncio.sleep(3)
        assert gateway.sent[sent:] == ["r-0"]
        assert not scene.dispatcher.get_allowance().reason.is_closed
        assert len(scene.store.result_lists[scene.store.default_result_list]) == ENDED + 1

    perform(scene_of, gateway)
