"""Calls of a client for its sequences: get the secret that proves ownership, and cancel a sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from dispatcher.client.item import Item, Tokens, seconds_from
from dispatcher.core.sequences.turns import Turn
from dispatcher.queue.constants import CANCEL_TTL_S

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisDesk


class SequenceCalls:
    """The calls of one client. Each is retried while Redis is unreachable, as `call` does."""

    def __init__(
        self, call: Callable[..., Awaitable[Any]], desk: Callable[[], RedisDesk], tokens: Tokens
    ) -> None:
        """`call` makes a call to the queue, with an optional time limit on the monotonic clock. `open_admin`
        returns the administrator's side of the queue."""
        self._call, self._desk, self._tokens = call, desk, tokens
        self._secret = ""
        self._lock = asyncio.Lock()

    async def with_secret(self, item: Item) -> Item:
        """Return the item with the secret that all programs with this client share.

        An item that belongs to no sequence, or that has its own secret, is returned unchanged.
        """
        turn = Turn(item.sequence) if isinstance(item.sequence, str) else item.sequence
        if turn is None or turn.secret:
            return item
        if not self._secret:
            until = time.monotonic() + seconds_from(item.deadline, time.time())
            async with self._lock:  # fair: the callers continue in the order in which they came
                if not self._secret:
                    self._secret = await self._call(lambda: self._desk().sequence_secret(), until)
        return replace(item, sequence=structs.replace(turn, secret=self._secret))

    async def cancel(self, sequence_id: str, for_s: float = CANCEL_TTL_S) -> bool:
        """Cancel all requests of a sequence that were submitted until now.

        `max_wait_s` is the longest time for which one of them may still wait to be claimed. Return False if,
        as far as dispatchers know, the sequence has ended or does not exist.
        """
        # The clock of the tokens, so that no request of this client is missed.
        at = self._tokens.now()
        done: bool = await self._call(lambda: self._desk().cancel_sequence(sequence_id, at, for_s))
        return done
