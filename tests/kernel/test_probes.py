"""The requests with which probes look for a gateway that cannot be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from dispatcher.gateway.contract import AttemptResult
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import Lease, RenewResult
from dispatcher.requests.outcomes.outcome import Unreachable
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.events import Event
from tests.kernel.scene import AnsweringGateway, Scene, UnreachableGateway, run_in_scene

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


class DrainingGateway(AnsweringGateway):
    """Gateway that answers on open connections, also while it accepts no new ones."""

    accepts_connections = True
    idle_count = 0
    """Number of connections that are open and not in use."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        if self.idle_count:
            self.idle_count -= 1
        elif not self.accepts_connections:
            at = asyncio.get_running_loop().time()
            return AttemptResult(Unreachable("no connection"), at, at)
        result = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        self.idle_count += 1
        return result

    def resize_connection_pool(self, max_requests: int) -> None:
        self.idle_count = min(self.idle_count, max_requests)


def test_probe_does_not_use_the_connection_of_a_request_from_before_the_outage() -> None:
    """Its answer would open the gate, and no other request would get a connection."""
    gateway = DrainingGateway()
    gateway.answer_after_s = 0.5

    async def check(scene: Scene) -> None:
        await scene.submit("r-0")
        await asyncio.sleep(0.1)
        gateway.accepts_connections = False
        await scene.submit(*(f"r-{number}" for number in range(1, 20)))
        await asyncio.sleep(10)
        assert gateway.sent == ["r-0"]
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        gateway.accepts_connections = True
        await asyncio.sleep(10)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 20

    run_in_scene(check, gateway)


def test_probe_with_a_request_whose_old_lease_is_renewed_late_goes_on() -> None:
    """The reply says that the old lease is lost, and the probe has a new one for the same request."""
    gateway = UnreachableGateway()
    gateway.answer_after_s = 11.0

    async def check(scene: Scene) -> None:
        renew = scene.queue.renew

        async def renew_late(leases: Sequence[Lease]) -> RenewResult:
            await asyncio.sleep(2)
            return await renew(leases)

        scene.queue.renew = renew_late  # type: ignore[method-assign]
        await scene.submit("r-0")
        await asyncio.sleep(10.5)
        assert gateway.sent == ["r-0"]
        await asyncio.sleep(1)
        assert gateway.sent == ["r-0"] * 2, "the probe was sent while the queue renews the old lease"
        gateway.is_unreachable = False
        await asyncio.sleep(12)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 1
        assert Event.LEASE_LOST not in [event for event, _ in scene.events]

    run_in_scene(check, gateway)
