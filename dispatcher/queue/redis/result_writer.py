"""Writing of results to their lists. A result that cannot be written affects only its own request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dispatcher.queue.constants import BAD_LIST, DONE, TOO_LARGE, UNWRITABLE
from dispatcher.queue.keys import encode_key
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.cancel_markers import ForeignMarkers
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.queue.redis.result_lists import ResultListChecker
from dispatcher.queue.redis.scripts import CallFailedError, split_batches
from dispatcher.queue.redis.steps.settle import ResultWrite
from dispatcher.requests.result import NOT_A_LIST, decode_result, encode_bad_list, encode_failure
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError
from dispatcher.wire_format import ErrorCode

_WRITTEN = (DONE, BAD_LIST, TOO_LARGE)
_LARGE_BYTES = 65_536
"""Size above which a result counts as too large if the server does not take it but still answers."""
_LARGE_WRITES_S = 10.0
"""Seconds after which a call begins to write no more large results, because claims wait for it."""

WriteStep = Callable[[Sequence[ResultWrite]], Awaitable[Sequence[int]]]
"""Call that settles the writes, or settles them unleased. Returns a status for each."""


class ResultWriter:
    """Passes results to the scripts so that each is written once and holds up no other."""

    def __init__(
        self,
        backend: Backend,
        result_lists: ResultListChecker,
        outbox: Outbox,
        foreign_markers: ForeignMarkers,
    ) -> None:
        self._backend = backend
        self._result_lists = result_lists
        self._outbox = outbox
        self._foreign_markers = foreign_markers
        self._maybe_too_large: set[int] = set()
        """Large results that a reachable server did not take once, by the hash of their `identity`."""

    async def write(self, step: WriteStep, writes: Sequence[ResultWrite]) -> list[int]:
        """Settle all writes. Return a status for each, `UNWRITABLE` if its request stays as it is.

        A result for an invalid list is answered on the default list. Raises if nothing could be written.
        """
        checked = [self._redirect_if_invalid(write) for write in writes]
        statuses, failure = await self._write_in_batches(step, checked)
        # The script has done nothing for a bad list. Write again, with INVALID_REQUEST to the default list.
        again = [
            at
            for at, status in enumerate(statuses)
            if status == BAD_LIST and not checked[at].replacement_status
        ]
        if again:
            refused, failure = await self._write_in_batches(
                step, [_redirect_to_default_list(checked[at]) for at in again]
            )
            for at, status in zip(again, refused, strict=True):
                statuses[at] = status
        if self._backend.scripts.is_cluster:
            with contextlib.suppress(QueueUnavailableError):
                await self._clean_up(checked, statuses)
        if statuses and statuses.count(UNWRITABLE) == len(statuses):
            name = self._backend.names.result_list
            raise failure or CallRefusedError(
                f"{name} is not a list that this user may push to: results cannot be delivered"
            )
        return statuses

    async def _write_in_batches(
        self, step: WriteStep, writes: Sequence[ResultWrite]
    ) -> tuple[list[int], QueueUnavailableError | None]:
        """Write in batches of a megabyte, large results last, so that a result that cannot be written holds
        up no other: if a batch fails while the server answers, its results are written one by one. Also
        return why a write failed."""
        clock = asyncio.get_running_loop().time
        enough_at = clock() + _LARGE_WRITES_S
        statuses = [UNWRITABLE] * len(writes)
        # The sort is stable, so the writes of each half keep their order.
        order = sorted(range(len(writes)), key=lambda at: writes[at].size_bytes > _LARGE_BYTES)
        batches = deque(split_batches(order, lambda at: writes[at].size_bytes))
        failure: QueueUnavailableError | None = None
        while batches:
            batch = batches.popleft()
            batch_writes = [writes[at] for at in batch]
            is_large = batch_writes[-1].size_bytes > _LARGE_BYTES
            if is_large and clock() > enough_at:
                break
            try:
                for at, status in zip(batch, await _write_batch(step, batch_writes), strict=True):
                    statuses[at] = status
                if self._maybe_too_large:  # written now, so they are not too large
                    self._maybe_too_large.difference_update(hash(write.identity) for write in batch_writes)
            except CallFailedError as error:
                is_single, previous_failure, failure = len(batch) == 1, failure, error
                if is_single and not is_large:
                    # A second small result that fails shows that the cause is not this result.
                    if previous_failure is not None:
                        break
                    continue
                if not await self._backend.scripts.is_responding(self._backend.names.queue):
                    break  # the server is unreachable: the rest stays as it is
                if is_single:
                    statuses[batch[0]] = await self._write_too_large(step, batch_writes[0], error)
                else:
                    # Something in this batch cannot be written, so try its results one by one.
                    batches.extendleft([at] for at in reversed(batch))
                    failure = None
            except QueueUnavailableError as error:
                failure = error
                break
        return statuses, failure

    async def _write_too_large(self, step: WriteStep, write: ResultWrite, why: QueueUnavailableError) -> int:
        """Handle a large result that a reachable server did not take. When that happens again, write
        TOO_LARGE instead."""
        write_hash = hash(write.identity)
        if write_hash not in self._maybe_too_large:
            self._maybe_too_large.add(write_hash)
            return UNWRITABLE
        settlement = write.settlement
        message = f"the result ({len(settlement.result)} bytes) cannot be written to the queue: {why}"
        request_id = settlement.request_id or decode_result(settlement.result).id
        short = settlement.copy_with(
            result=encode_failure(request_id, ErrorCode.TOO_LARGE, message, token=settlement.request_token)
        )
        try:
            instead = replace(
                write, settlement=short, replacement_status=write.replacement_status or TOO_LARGE
            )
            (status,) = await _write_batch(step, [instead])
        except QueueUnavailableError:
            return UNWRITABLE
        self._maybe_too_large.discard(write_hash)
        return status

    def _redirect_if_invalid(self, write: ResultWrite) -> ResultWrite:
        name = write.settlement.result_list
        why = self._result_lists.find_problem(name) if name else None
        return write if why is None else _redirect_to_default_list(write, why)

    async def _clean_up(self, writes: Sequence[ResultWrite], statuses: Sequence[int]) -> None:
        """Finish on a Cluster what the script could not reach, because it is in other slots.

        Failures are not reported, because everything is settled: the sweep delivers what stays in the outbox,
        and markers expire.
        """
        lists = (write.settlement.result_list or self._backend.names.result_list for write in writes)
        if not self._outbox.has_unreachable_list and any(
            self._backend.is_in_other_slot(encode_key(name)) for name in lists
        ):
            await self._outbox.deliver_pending()
        done = [
            write.settlement
            for write, status in zip(writes, statuses, strict=True)
            if status in _WRITTEN and write.settlement.request_id and write.settlement.request_token
        ]
        await self._foreign_markers.delete([(each.request_id, each.request_token) for each in done])


async def _write_batch(step: WriteStep, writes: Sequence[ResultWrite]) -> list[int]:
    statuses = await step(writes)
    return [
        status or write.replacement_status  # DONE is 0: use the status for which the replacement stands
        for status, write in zip(statuses, writes, strict=True)
    ]


def _redirect_to_default_list(write: ResultWrite, why: str = NOT_A_LIST) -> ResultWrite:
    """Return a write of INVALID_REQUEST to the default list."""
    settlement = write.settlement
    request_id = settlement.request_id or decode_result(settlement.result).id
    result = encode_bad_list(request_id, settlement.result_list, why, token=settlement.request_token)
    return replace(
        write, settlement=settlement.copy_with(result=result, result_list=""), replacement_status=BAD_LIST
    )
