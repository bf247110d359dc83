"""Writing of results to their lists. A result that cannot be written affects only its own request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dispatcher.core.requests.result import NO_LIST, ErrorCode, decode_result, failed, misdirected
from dispatcher.ports import CallRefusedError, QueueUnavailableError
from dispatcher.queue.constants import BAD_LIST, DONE, STUCK, TOO_LARGE
from dispatcher.queue.keys import ACTIVE, CANCEL
from dispatcher.queue.redis import script_calls
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.queue.redis.result_lists import Destinations
from dispatcher.queue.redis.script_calls import Write, key_of
from dispatcher.queue.redis.scripts import BrokenCallError, in_steps

_WRITTEN = (DONE, BAD_LIST, TOO_LARGE)
_ALONE_BYTES = 65_536
"""Size above which a result counts as too large if the server does not take it but still answers."""
_WRITES_S = 10.0
"""Seconds after which a call begins to write no more large results, because claims wait for it."""

Step = Callable[[Sequence[Write]], Awaitable[Sequence[int]]]
"""Call that settles the writes, or settles them unleased. Returns a status for each."""


class Writer:
    """Passes results to the scripts so that each is written once and holds up no other."""

    def __init__(self, backend: Backend, destinations: Destinations, outbox: Outbox) -> None:
        self._backend = backend
        self._destinations = destinations
        self._outbox = outbox
        self._doubted: set[int] = set()
        """Large results that a reachable server did not take once, by the hash of their `identity`."""

    async def write(self, step: Step, writes: Sequence[Write]) -> list[int]:
        """Settle all writes. Return a status for each, `UNWRITABLE` if its request stays as it is.

        A result for an invalid list is answered on the default list. Raises if nothing could be written.
        """
        checked = [self._checked(write) for write in writes]
        statuses, failure = await self._write_apart(step, checked)
        # The script has done nothing for a bad list. Write again, with INVALID_REQUEST to the default list.
        again = [at for at, status in enumerate(statuses) if status == BAD_LIST and not checked[at].instead]
        if again:
            refused, failure = await self._write_apart(step, [_refused(checked[at]) for at in again])
            for at, status in zip(again, refused, strict=True):
                statuses[at] = status
        if self._backend.scripts.is_cluster:
            with contextlib.suppress(QueueUnavailableError):
                await self._clean_up(checked, statuses)
        if statuses and statuses.count(STUCK) == len(statuses):
            name = self._backend.names.results
            raise failure or CallRefusedError(
                f"{name} is no list that this user may push to: results have no place to go"
            )
        return statuses

    async def _write_apart(
        self, step: Step, writes: Sequence[Write]
    ) -> tuple[list[int], QueueUnavailableError | None]:
        """Write in batches of a megabyte, large results last, so that a result that cannot be written holds
        up no other: if a batch fails while the server answers, its results are written one by one. Also
        return why a write failed."""
        clock = asyncio.get_running_loop().time
        enough_at = clock() + _WRITES_S
        statuses = [STUCK] * len(writes)
        # The sort is stable, so the writes of each half keep their order.
        order = sorted(range(len(writes)), key=lambda at: writes[at].size > _ALONE_BYTES)
        batches = deque(in_steps(order, lambda at: writes[at].size))
        failure: QueueUnavailableError | None = None
        while batches:
            batch = batches.popleft()
            some = [writes[at] for at in batch]
            large = some[-1].size > _ALONE_BYTES
            if large and clock() > enough_at:
                break
            try:
                for at, status in zip(batch, await _write_some(step, some), strict=True):
                    statuses[at] = status
                if self._doubted:  # written now, so they are not too large
                    self._doubted.difference_update(hash(write.ends) for write in some)
            except BrokenCallError as error:
                alone, before, failure = len(batch) == 1, failure, error
                if alone and not large:
                    # A second small result that fails shows that the cause is not this result.
                    if before is not None:
                        break
                    continue
                if not await self._backend.scripts.answers(self._backend.names.queue):
                    break  # the server is unreachable: the rest stays as it is
                if alone:
                    statuses[batch[0]] = await self._write_less(step, some[0], error)
                else:
                    # Something in this batch cannot be written, so try its results one by one.
                    batches.extendleft([at] for at in reversed(batch))
                    failure = None
            except QueueUnavailableError as error:
                failure = error
                break
        return statuses, failure

    async def _write_less(self, step: Step, write: Write, why: QueueUnavailableError) -> int:
        """Handle a large result that a reachable server did not take. When that happens again, write
        TOO_LARGE instead."""
        known = hash(write.ends)
        if known not in self._doubted:
            self._doubted.add(known)
            return STUCK
        settlement = write.settlement
        message = f"the result ({len(settlement.result)} bytes) cannot be written to the queue: {why}"
        told = settlement.request_id or decode_result(settlement.result).id
        short = settlement.but(
            result=failed(told, ErrorCode.TOO_LARGE, message, token=settlement.request_token)
        )
        try:
            instead = replace(write, settlement=short, instead=write.instead or TOO_LARGE)
            (status,) = await _write_some(step, [instead])
        except QueueUnavailableError:
            return STUCK
        self._doubted.discard(known)
        return status

    def _checked(self, write: Write) -> Write:
        name = write.settlement.results
        why = self._destinations.refused(name) if name else None
        return write if why is None else _refused(write, why)

    async def _clean_up(self, writes: Sequence[Write], statuses: Sequence[int]) -> None:
        """Finish on a Cluster what the script could not reach, because it is in other slots.

        Failures are not reported, because everything is settled: the sweep delivers what stays in the outbox,
        and markers expire.
        """
        lists = (write.settlement.results or self._backend.names.results for write in writes)
        if not self._outbox.waits and any(self._backend.elsewhere(key_of(name)) for name in lists):
            await self._outbox.carry()
        done = [
            write.settlement
            for write, status in zip(writes, statuses, strict=True)
            if status in _WRITTEN and write.settlement.request_id and write.settlement.request_token
        ]
        await asyncio.gather(
            *(
                script_calls.forget(self._backend, key_of(kind + each.request_id), key_of(each.request_token))
                for each in done
                for kind in (ACTIVE, CANCEL)
            )
        )


async def _write_some(step: Step, writes: Sequence[Write]) -> list[int]:
    statuses = await step(writes)
    return [
        status or write.instead  # DONE is 0: use the status for which the replacement stands
        for status, write in zip(statuses, writes, strict=True)
    ]


def _refused(write: Write, why: str = NO_LIST) -> Write:
    """Return a write of INVALID_REQUEST to the default list."""
    settlement = write.settlement
    told = settlement.request_id or decode_result(settlement.result).id
    result = misdirected(told, settlement.results, why, token=settlement.request_token)
    return replace(write, settlement=settlement.but(result=result, results=""), instead=BAD_LIST)
