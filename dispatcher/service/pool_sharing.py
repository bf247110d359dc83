"""Tell the dispatchers of a queue to which pool this one sends, and notice if others send to another pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dispatcher.queue.pool_identity import (
    PoolIdentity,
    decode_identities,
    describe_different_pools,
    encode_identity,
)
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import Endpoints

INTERVAL_S = 10.0
"""Interval at which identities are shared and read."""
VALID_S = 30.0
"""Time for which a shared identity counts."""


def get_pool_identity(settings: Settings, endpoints: Endpoints) -> PoolIdentity | None:
    """Return the identity of the pool. `None` while Kubernetes has not shown the pool."""
    pool = settings.pool
    if settings.signals.watches_pool and endpoints.has_cluster:
        name = f"{pool.namespace}/{pool.name}"
        return PoolIdentity("inferencepool", endpoints.pool_uid, name) if endpoints.pool_uid else None
    return PoolIdentity("gateway", str(settings.gateway.url), pool.name)


class PoolSharing:
    """`get_identity` returns the identity of the pool of this dispatcher. An observer only reads."""

    def __init__(
        self, queue: RedisQueue, get_identity: Callable[[], PoolIdentity | None], *, observe: bool
    ) -> None:
        self._queue = queue
        self._get_identity = get_identity
        self._observe = observe
        self.problem: str | None = None
        """Sentence about the other pools that share the queue. `None` if there are none."""

    async def run(self) -> None:
        while True:
            await self._exchange_identities()
            await asyncio.sleep(INTERVAL_S)

    async def _exchange_identities(self) -> None:
        own = self._get_identity()
        if own is None:
            self.problem = None
            return
        try:
            shared = await self._queue.share_pool_identity(
                b"" if self._observe else encode_identity(own), VALID_S
            )
        except QueueUnavailableError:
            return  # the loop reports the outage, and the last problem stays
        clause = describe_different_pools([own, *decode_identities(shared)])
        self.problem = (
            f"{clause[0].upper()}{clause[1:]}. Give each pool a queue of its own (queue.name)"
            if clause
            else None
        )
