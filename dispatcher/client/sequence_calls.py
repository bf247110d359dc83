"""Calls of a client for its sequences: get the secret that proves ownership, and cancel a sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from dispatcher.client.item import Item, TokenGenerator, seconds_until
from dispatcher.core.sequences.turns import Turn
from dispatcher.queue.constants import CANCEL_TTL_S

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin


class SequenceCalls:
    """The calls of one client. Each is retried while Redis is unreachable, as `call` does."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        open_admin: Callable[[], RedisQueueAdmin],
        tokens: TokenGenerator,
    ) -> None:
        """`call` makes a call to the queue, with an optional time limit on the monotonic clock. `open_admin`
        returns the administrator's side of the queue."""
        self._call, self._open_admin, self._tokens = call, open_admin, tokens
        self._secret = ""
        self._lock = asyncio.Lock()

    async def add_secret(self, item: Item) -> Item:
        """Return the item with the secret that all programs with this client share.

        An item that belongs to no sequence, or that has its own secret, is returned unchanged.
        """
        turn = Turn(item.sequence) if isinstance(item.sequence, str) else item.sequence
        if turn is None or turn.secret:
            return item
        if not self._secret:
            give_up_at = time.monotonic() + seconds_until(item.deadline, time.time())
            async with self._lock:  # fair: the callers continue in the order in which they came
                if not self._secret:
                    self._secret = await self._call(
                        lambda: self._open_admin().get_or_create_sequence_secret(), give_up_at
                    )
        return replace(item, sequence=structs.replace(turn, secret=self._secret))

    async def cancel_sequence(self, sequence_id: str, max_wait_s: float = CANCEL_TTL_S) -> bool:
        """Cancel all requests of a sequence that were submitted until now.

        `max_wait_s` is the longest time for which one of them may still wait to be claimed. Return False if,
        as far as dispatchers know, the sequence has ended or does not exist.
        """
        # The clock of the tokens, so that no request of this client is missed.
        cancelled_at = self._tokens.current_time()
        is_cancelled: bool = await self._call(
            lambda: self._open_admin().cancel_sequence(sequence_id, cancelled_at, max_wait_s)
        )
        return is_cancelled
