"""Counts calls of the dispatch loop to its queue, and can lose replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatcher.queue.contract import EndAndClaimResult, Permit, Release, Settlement, SettleStatus
from dispatcher.requests.submission import QueueUnavailableError
from tests.kernel.scene import Scene


class CallRecorder:
    """Counts the queue calls of the loop, and can lose replies of those that claim."""

    def __init__(self, scene: Scene) -> None:
        self.queue = scene.queue
        self.leases_per_settle: list[int] = []
        self.leases_per_release: list[int] = []
        self.settle_count = self.claimed_count = 0
        self.replies_to_lose = 0
        self._settle_and_claim_next, self._settle = self.queue.settle_and_claim_next, self.queue.settle
        self._release_and_claim_again = self.queue.release_and_claim_again
        self._claim = self.queue.claim
        for name in ("settle_and_claim_next", "settle", "release_and_claim_again", "claim"):
            setattr(self.queue, name, getattr(self, name))

    async def settle_and_claim_next(
        self, settlements: Sequence[Settlement], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        reply = await self._settle_and_claim_next(settlements, nonce, permit)
        return self._deliver(reply, self.leases_per_settle)

    async def release_and_claim_again(
        self, releases: Sequence[Release], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        reply = await self._release_and_claim_again(releases, nonce, permit)
        return self._deliver(reply, self.leases_per_release)

    def _deliver(self, reply: EndAndClaimResult, lease_counts: list[int]) -> EndAndClaimResult:
        if self.replies_to_lose:
            self.replies_to_lose -= 1
            raise QueueUnavailableError("Redis did not answer in time")
        assert reply.claim_result is not None
        lease_counts.append(len(reply.claim_result.leases))
        return reply

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        self.settle_count += 1
        return await self._settle(settlements)

    async def claim(self, *args: Any, **options: Any) -> Any:
        claimed = await self._claim(*args, **options)
        self.claimed_count += len(claimed.leases)
        return claimed
