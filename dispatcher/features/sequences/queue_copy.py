"""State of sequences that `batch-dispatcher queue copy` copies beside the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.features.sequences.queue.secret import get_secret_key

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin


async def copy_state(source: RedisQueueAdmin, destination: RedisQueueAdmin) -> None:
    """Copy the secret of sequences, unless the destination has one.

    Without it, programs with our client could not go on with the sequences of the copied requests.
    """
    there, here = source.backend.scripts, destination.backend.scripts
    value = await there.call_with_retries(lambda: there.client.get(get_secret_key(source.names)))
    if value:
        key = get_secret_key(destination.names)
        await here.call_with_retries(lambda: here.client.set(key, value, nx=True))
