"""The boundary for unexpected exceptions: an error costs the leases concerned a failed attempt, and nothing
else.

Exceptions are caught in these places, so that none of them reaches the loop:

    attempts        attempts.py     the exception counts like a failed answer, or the leases are charged
    claimed leases  pipeline.py     each request runs through the stages again, alone
    batch groups    sending.py      the members of the call that could not be prepared are charged
    completions     flush.py        each one is reported alone, and given up if the queue cannot take it
    overdue         maintenance.py  the other overdue requests are answered
    tasks           `start_task`    the task starts again after a pause, also those of the service

A CancelledError counts as an exception if the task itself was not cancelled.

If the failed attempt cannot be recorded either, the lease is removed from the table. Nothing renews it any
more, so it expires, and the queue gives its request to the next claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dispatcher.kernel import completions
from dispatcher.kernel.queue_access import is_unexpected
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.in_flight import InFlightLease

RESTART_PAUSE_S = 1.0
"""Time after which a task of the loop starts again if it has raised an exception."""


class ErrorGuard:
    """Ends leases whose handling has raised an exception."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context

    def find_open(self, entries: Iterable[InFlightLease]) -> list[InFlightLease]:
        """Return the leases that nothing works on: not completed, not at the gateway, and in no batch
        group."""
        completed = {completions.get_lease(completion).token for completion in self._context.pending}
        return [
            entry
            for entry in entries
            if entry in self._context.in_flight
            and entry.attempt is None
            and not entry.is_in_batch_group
            and entry.lease.token not in completed
        ]

    @contextmanager
    def charge(self, entry: InFlightLease, where: str) -> Iterator[None]:
        """Let an exception of the block cost this lease a failed attempt."""
        try:
            yield
        except Exception as error:
            self.fail_leases((entry,), error, where)

    def fail_leases(self, entries: Iterable[InFlightLease], error: Exception, where: str) -> None:
        """Log the exception, and complete those of the leases that are open with a failed attempt."""
        emit(Event.INTERNAL_ERROR, where=where, error=repr(error))
        for entry in self.find_open(entries):
            if entry.stop_reason == "lost":  # another owner has it
                self.drop_lease(entry.lease.token)
                continue
            try:
                self._context.complete(
                    completions.build_internal_failure(
                        entry.lease,
                        entry.request,
                        error,
                        self._context.access.queue.unix_now(),
                        self._context.options.retry,
                        self._context.random.random(),
                    )
                )
            except Exception as second_error:
                emit(Event.INTERNAL_ERROR, where=where, error=repr(second_error))
                self.drop_lease(entry.lease.token)

    def drop_lease(self, token: str) -> None:
        """Remove a lease without a completion, so that it expires."""
        # The table comes first, so the lease leaves it even if a later step raises.
        with suppress(Exception):
            self._context.remove_lease(token)


def start_task(tasks: asyncio.TaskGroup, run: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Start a task that ends only when it is cancelled. After an exception, it starts again."""
    return tasks.create_task(_keep_running(run, name), name=name)


async def _keep_running(run: Callable[[], Awaitable[None]], name: str) -> None:
    while True:
        try:
            await run()
        except BaseException as error:
            if not is_unexpected(error):
                raise
            emit(Event.INTERNAL_ERROR, where=name, error=repr(error))
        await asyncio.sleep(RESTART_PAUSE_S)
