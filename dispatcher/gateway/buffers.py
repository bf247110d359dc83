"""Bound the memory that the answers of all attempts take together.

An answer is kept in memory from the first byte that is read until its result is written to the queue. A few
hundred large answers at once would take more memory than the pod has. Therefore reading pauses while the
bound is reached, and the gateway has to wait at its socket.

    shared bytes   the bound less the size of the largest answer; all answers share them
    overflow       one answer that is read to its end although no shared bytes are left. It takes the bytes
                   that were reserved for the largest answer, until its result is written. One answer always
                   makes progress this way, and the bound is kept.

Answers that wait are served in the order in which they asked. Two kinds of memory are not counted: the up to
128 KB that each connection reads ahead (300 KB over TLS), and the parts of a merged answer while single calls
are made to compare them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class AnswerBufferPool:
    """Memory that the answers of one gateway share. `largest_bytes` is the size of the largest answer."""

    def __init__(self, limit_bytes: int, largest_bytes: int) -> None:
        self._shared_used_bytes = 0
        """Bytes of all answers except `_overflow`."""
        self._overflow: AnswerBuffer | None = None
        self._waiting: deque[tuple[AnswerBuffer, int, asyncio.Future[None]]] = deque()
        self.set_limits(limit_bytes, largest_bytes)

    @property
    def used_bytes(self) -> int:
        """Number of bytes that all answers take now."""
        return self._shared_used_bytes + (self._overflow.size_bytes if self._overflow is not None else 0)

    def set_limits(self, limit_bytes: int, largest_bytes: int) -> None:
        """Change the bound. Answers that already take more than the new bound are read to their end."""
        self._shared_bytes = max(0, limit_bytes - largest_bytes)
        self._grant_waiting()

    def take_bytes(self, buffer: AnswerBuffer, more_bytes: int) -> bool:
        """Give an answer more bytes. Return False if there is no room for them now."""
        if buffer is not self._overflow:
            if self._shared_used_bytes + more_bytes <= self._shared_bytes:
                self._shared_used_bytes += more_bytes
            elif self._overflow is None:
                # All bytes of the answer move to the reserved part, so that its shared bytes are free for
                # the others at once.
                self._shared_used_bytes -= buffer.size_bytes
                self._overflow = buffer
            else:
                return False
        buffer.size_bytes += more_bytes
        return True

    def take_bytes_in_order(self, buffer: AnswerBuffer, more_bytes: int) -> bool:
        """Give an answer more bytes. Return False if there is no room for them now, or if others wait."""
        # A new answer must not overtake those that wait already. The overflow answer must never wait behind
        # them: it is the one whose progress frees memory for the others.
        may_take = not self._waiting or buffer is self._overflow
        return may_take and self.take_bytes(buffer, more_bytes)

    async def wait_for_bytes(self, buffer: AnswerBuffer, more_bytes: int) -> None:
        """Wait behind the other answers until there is room for the bytes, and take them."""
        granted = asyncio.get_running_loop().create_future()
        turn = buffer, more_bytes, granted
        self._waiting.append(turn)
        try:
            await granted
        except asyncio.CancelledError:
            # The next answer in the queue may need fewer bytes than this one, and fit now.
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._grant_waiting()
            raise

    def return_bytes(self, buffer: AnswerBuffer, size_bytes: int) -> None:
        """Take back `size_bytes` bytes of an answer."""
        buffer.size_bytes -= size_bytes
        if buffer is not self._overflow:
            self._shared_used_bytes -= size_bytes
        elif not buffer.size_bytes:
            self._overflow = None
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        while self._waiting:
            buffer, more_bytes, granted = self._waiting[0]
            # A future that is done was cancelled. Bytes taken for it would never be returned.
            if not granted.done() and not self.take_bytes(buffer, more_bytes):
                return
            self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)


class AnswerBuffer:
    """Number of bytes that one answer takes; implements `ports.AnswerMemory`."""

    __slots__ = ("_pool", "_shares", "size_bytes")

    def __init__(self, pool: AnswerBufferPool) -> None:
        self.size_bytes = 0
        self._pool = pool
        self._shares = 1

    def try_grow_to(self, size_bytes: int) -> bool:
        """Return True if the answer may have `size_bytes` bytes in all from now on, without waiting."""
        more_bytes = size_bytes - self.size_bytes
        return more_bytes <= 0 or self._pool.take_bytes_in_order(self, more_bytes)

    async def grow_to(self, size_bytes: int) -> None:
        """Wait until the answer may have `size_bytes` bytes in all."""
        if not self.try_grow_to(size_bytes):
            await self._pool.wait_for_bytes(self, size_bytes - self.size_bytes)

    def shrink_to(self, size_bytes: int) -> None:
        """Keep only `size_bytes` bytes, because the answer turned out to be no larger."""
        if size_bytes < self.size_bytes:
            self._pool.return_bytes(self, self.size_bytes - size_bytes)

    def split_into(self, share_count: int) -> None:
        """Give the bytes back after `share_count` calls of `free_share`, or at once if it is 0."""
        self._shares = share_count
        if not share_count:
            self._shares = 1
            self.free_share()

    def free_share(self) -> None:
        """Give up one share of the answer. Calls beyond the number of shares have no effect."""
        self._shares -= 1
        if self._shares == 0:
            self._pool.return_bytes(self, self.size_bytes)
