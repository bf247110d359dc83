"""The requests with which probes look for a gateway that cannot be reached."""

from __future__ import annotations

import asyncio
import time

from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.request import encode_member
from dispatcher.ports import Submission
from tests.dispatch.scene import Scene, UnreachableGateway, run_in_scene

UNSENT_COUNT = 2000
"""Number of cancelled requests that come before the request that can be sent."""


def test_probe_with_a_cancelled_request_takes_the_next_request_immediately() -> None:
    gateway = UnreachableGateway()

    async def check(scene: Scene) -> None:
        await scene.submit("r-0")
        await asyncio.sleep(5)
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        cancelled_ids = [f"c-{number:04}" for number in range(UNSENT_COUNT)]
        # Their deadlines put them before the request that waits.
        deadline = int(time.time()) + 10**5
        await scene.store.submit(
            [
                Submission(
                    encode_member(request_id, b"{}", deadline, token="t"),
                    float(deadline),
                    request_id,
                    "t",
                    deadline,
                )
                for request_id in cancelled_ids
            ]
        )
        for request_id in cancelled_ids:
            await scene.store.cancel_request(request_id, "t")
        gateway.is_unreachable = False
        sent_before = len(gateway.sent)
        await asyncio.sleep(3)
        assert gateway.sent[sent_before:] == ["r-0"]
        assert not scene.dispatcher.get_allowance().reason.is_closed
        assert len(scene.store.result_lists[scene.store.default_result_list]) == UNSENT_COUNT + 1

    run_in_scene(check, gateway)
