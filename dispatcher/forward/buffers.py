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


class AnswerBuffers:
    """Memory that the answers of one gateway share. `largest_bytes` is the size of the largest answer."""

    def __init__(self, limit_bytes: int, largest_bytes: int) -> None:
        self._used = 0
        """Bytes of all answers except `_overflow`."""
        self._beyond: AnswerHold | None = None
        self._waiting: deque[tuple[AnswerHold, int, asyncio.Future[None]]] = deque()
        self.resize(limit_bytes, largest_bytes)

    @property
    def held_bytes(self) -> int:
        """Number of bytes that all answers take now."""
        return self._used + (self._beyond.size if self._beyond is not None else 0)

    def resize(self, limit_bytes: int, largest_bytes: int) -> None:
        """Change the bound. Answers that already take more than the new bound are read to their end."""
        self._room = max(0, limit_bytes - largest_bytes)
        self._wake()

    def take(self, hold: AnswerHold, more: int) -> bool:
        """Give an answer more bytes. Return False if there is no room for them now."""
        if hold is not self._beyond:
            if self._used + more <= self._room:
                self._used += more
            elif self._beyond is None:
                # All bytes of the answer move to the reserved part, so that its shared bytes are free for
                # the others at once.
                self._used -= hold.size
                self._beyond = hold
            else:
                return False
        hold.size += more
        return True

    async def wait_for(self, hold: AnswerHold, more: int) -> None:
        """Take the bytes as soon as there is room for them."""
        # A new answer must not overtake those that wait already. The overflow answer must never wait behind
        # them: it is the one whose progress frees memory for the others.
        may = not self._waiting or hold is self._beyond
        if may and self.take(hold, more):
            return
        granted = asyncio.get_running_loop().create_future()
        turn = hold, more, granted
        self._waiting.append(turn)
        try:
            await granted
        except asyncio.CancelledError:
            # The next answer in the queue may need fewer bytes than this one, and fit now.
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._wake()
            raise

    def give_back(self, hold: AnswerHold, size: int) -> None:
        """Take back `size_bytes` bytes of an answer."""
        hold.size -= size
        if hold is not self._beyond:
            self._used -= size
        elif not hold.size:
            self._beyond = None
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            hold, more, granted = self._waiting[0]
            # A future that is done was cancelled. Bytes taken for it would never be returned.
            if not granted.done() and not self.take(hold, more):
                return
            self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)


class AnswerHold:
    """Number of bytes that one answer takes; implements `ports.AnswerMemory`."""

    __slots__ = ("_buffers", "_shares", "size")

    def __init__(self, buffers: AnswerBuffers) -> None:
        self.size = 0
        self._buffers = buffers
        self._shares = 1

    async def grow(self, size: int) -> None:
        """Wait until the answer may have `size_bytes` bytes in all."""
        if size > self.size:
            await self._buffers.wait_for(self, size - self.size)

    def shrink(self, size: int) -> None:
        """Keep only `size_bytes` bytes, because the answer turned out to be no larger."""
        if size < self.size:
            self._buffers.give_back(self, self.size - size)

    def share(self, shares: int) -> None:
        """Give the bytes back after `share_count` calls of `free_share`, or at once if it is 0."""
        self._shares = shares
        if not shares:
            self._shares = 1
            self.free()

    def free(self) -> None:
        """Give up one share of the answer. Calls beyond the number of shares have no effect."""
        self._shares -= 1
        if self._shares == 0:
            self._buffers.give_back(self, self.size)
