"""Record which pool a dispatcher sends to, and read those of all dispatchers: share_pool_identity.lua."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.queue.constants import MAX_POOL_IDENTITIES
from dispatcher.queue.redis.backend import Backend


async def share_pool_identity(backend: Backend, identity: bytes, valid_s: float) -> Sequence[bytes]:
    """Record the pool of a dispatcher for `valid_s`, unless `identity` is empty. Return the pools of all
    dispatchers."""
    reply = await backend.run_script(
        "share_pool_identity",
        {"identity": identity, "valid_s": valid_s, "max_count": MAX_POOL_IDENTITIES},
        keys={"IDENTITIES": backend.names.identities_key},
    )
    identities: Sequence[bytes] = reply.value
    return identities
