"""Run of a batch file: send chunks of lines, receive results, and resolve what an earlier process left open.

The docstring of the package describes the order in which data becomes durable.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from dispatcher.client.errors import QueueUnreachableError
from dispatcher.client.item import seconds_until
from dispatcher.features.batch_files.job import PAGE_LINES, FileJob
from dispatcher.features.batch_files.journal import Chunk
from dispatcher.features.batch_files.line_queue import LineQueue
from dispatcher.features.batch_files.progress import FileProgress, RecentRate
from dispatcher.features.batch_files.run_options import FileOptions, FilePaths, FileStart
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.producer import MAX_COLLECTED
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.wire_format import PoppedResult

T = TypeVar("T")

MAX_PENDING_BYTES = 256 << 20
"""Largest size of the lines that are in the queue at a time."""
MIN_WRITE_INTERVAL_S = 0.1
"""Shortest time between two writes, each of which waits for the disk."""
LOST_CHECK_INTERVAL_S = 60.0
"""Seconds without a result after which the run looks for lost requests."""
MIN_RESEND_TIME_S = 5.0
"""A lost request is sent again only if its deadline is at least this far away."""
LATE_RESULT_S = 30.0
"""Seconds after its deadline at which a request without a result is written as expired."""
CANCEL_TIMEOUT_S = 10.0
"""Longest time for which an interrupted run without an output file cancels its requests."""


async def run_file(
    url: str,
    names: QueueNames,
    paths: FilePaths,
    options: FileOptions,
    *,
    on_start: Callable[[FileStart], None] = lambda _: None,
    on_progress: Callable[[FileProgress], None] = lambda _: None,
) -> FileProgress:
    """Run a batch file to its end, and return the final progress.

    After an interruption, a call with the same arguments continues the run. `on_start` is called after the
    check of the input, and `on_progress` once a second.

    Raises InputError (BadInputError for bad lines), TemplateError, JournalError, SinkError and
    QueueUnreachableError.
    """
    ends_at = time.time() + seconds_until(options.deadline, time.time())
    with ExitStack() as stack:
        folder = Path()
        if not isinstance(paths.output, Path):  # without an output file, the side files have no place
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batch-dispatcher-")))
        job = FileJob(paths, options, names, folder)
        thread = ThreadPoolExecutor(1, "batch file")  # one thread, because the job is not thread-safe
        try:
            try:
                start = await asyncio.get_running_loop().run_in_executor(thread, job.start_run)
            except asyncio.CancelledError:
                job.interrupt_run()  # the thread would otherwise go on checking, perhaps for minutes
                raise
            on_start(start)
            if start.is_finished:
                return job.get_progress()
            queue = LineQueue(url, names, job.job_names)
            run = FileRun(job, queue, thread, options.max_pending, ends_at)
            try:
                await run.run_to_end(on_progress)
            except BaseException:
                if not isinstance(paths.output, Path):
                    # Such a run cannot be continued, so its answers have no reader.
                    await run.cancel_open_lines()
                raise
            finally:
                await queue.aclose()
            return job.get_progress()
        finally:
            thread.submit(job.close)  # runs after the last step of the job, even if this task was cancelled
            thread.shutdown(wait=True)


class FileRun:
    """Work of one process on a run: moves lines from the files to the queue, and results back.

    All file access happens in `thread`, so that waiting for the disk does not block the event loop.
    """

    def __init__(
        self, job: FileJob, queue: LineQueue, thread: ThreadPoolExecutor, max_pending: int, ends_at: float
    ) -> None:
        self._job, self._queue, self._thread = job, queue, thread
        self._max_pending, self._ends_at = max_pending, ends_at
        self._room_event = asyncio.Event()
        self._rate = RecentRate()
        self._last_number = 0
        self._given_back_numbers: Sequence[int] = ()
        self._is_caught_up = False
        """True if the last collect call left nothing in the result list."""
        self._last_result_at = time.monotonic()

    async def run_to_end(self, on_progress: Callable[[FileProgress], None]) -> None:
        """Send and receive until every line is done."""
        await self._run_in_thread(self._job.write_bad_lines)
        try:
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(self._report_progress(on_progress))
                if self._job.open_count:
                    await self._resolve_unconfirmed()
                    self._rate = RecentRate()  # results of an earlier process would distort the rate
                receiving = tasks.create_task(self._receive_results())
                await self._send_chunks()
                if self._job.is_complete:  # the receiver would wait for a result that never comes
                    receiving.cancel()
                else:
                    await receiving
                ticking.cancel()
        except BaseExceptionGroup as group:  # the first failure cancelled the other tasks
            raise group.exceptions[0] from None
        finally:
            on_progress(self._job.get_progress(None, self._queue.connection_error))
        await self._queue.discard_results()
        await self._run_in_thread(self._job.finish_run)

    async def cancel_open_lines(self) -> None:
        """Cancel the requests of all open lines, as far as CANCEL_TIMEOUT_S allows."""
        give_up_at, after = time.monotonic() + CANCEL_TIMEOUT_S, 0
        with suppress(QueueUnavailableError, QueueUnreachableError):
            while (
                page := await self._run_in_thread(self._job.open_lines, after)
            ) and time.monotonic() < give_up_at:
                after = page[-1][0]
                await self._queue.cancel_lines([n for n, _, _ in page], give_up_at)

    async def _run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the thread of the files, after the calls before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _report_progress(self, on_progress: Callable[[FileProgress], None]) -> None:
        while True:
            rate = self._rate.update_rate(time.monotonic(), self._job.get_progress().done)
            on_progress(self._job.get_progress(rate, self._queue.connection_error))
            await asyncio.sleep(1.0)

    async def _send_chunks(self) -> None:
        """Send chunks in order, as long as there are lines and time. Wait while too many lines are open."""
        while not self._job.is_all_sent:
            left_s = self._ends_at - time.time()
            if left_s <= 1:
                await self._run_in_thread(self._job.expire_unsent)
                return
            # Before the check, so that results which arrive meanwhile are not missed.
            self._room_event.clear()
            room = self._max_pending - self._job.open_count
            next_chunk = None
            if room > 0 and self._job.open_bytes < MAX_PENDING_BYTES:
                next_chunk = await self._run_in_thread(self._job.begin_next_chunk, room, int(self._ends_at))
            if next_chunk is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._room_event.wait()
                continue
            chunk, submissions = next_chunk
            await self._queue.submit_chunk(chunk.number, submissions)
            await self._run_in_thread(self._job.confirm_chunk, chunk.number)

    async def _receive_results(self) -> None:
        lost_checked_at = time.monotonic()
        while not self._job.is_complete:
            has_results = await self._write_arrived()
            now = time.monotonic()
            if (
                self._job.open_count
                and now - max(lost_checked_at, self._last_result_at) > LOST_CHECK_INTERVAL_S
            ):
                lost_checked_at = now
                await self._resend_lost()
            if not has_results and not self._job.is_complete:
                await self._queue.wait_for_results()

    async def _write_arrived(self) -> bool:
        """Collect results, and write them to the files. Return False if there were none."""
        began_at = time.monotonic()
        collected = await self._queue.collect_results(self._last_number, self._given_back_numbers)
        self._given_back_numbers = ()
        if collected.has_been_reset:  # Redis lost the keep, or it expired: begin at the start of the new one
            self._last_number, self._is_caught_up = 0, False
            return True
        self._last_number = collected.last_number
        if not collected.results:
            return False
        size = sum(len(raw) for _, raw in collected.results)
        self._is_caught_up = len(collected.results) < MAX_COLLECTED and size < MAX_SCRIPT_BYTES
        results: dict[int, PoppedResult] = {}
        for _, raw in collected.results:
            if (parsed := self._queue.parse_result(raw)) is not None:
                results.setdefault(*parsed)
        await self._run_in_thread(self._job.write_results, results)
        # Only now are the results durable in the files, and may be deleted in Redis.
        self._given_back_numbers = [number for number, _ in collected.results]
        if results:  # elements that other programs push must not delay the search for lost requests
            self._last_result_at = time.monotonic()
        self._room_event.set()
        if self._is_caught_up:
            await asyncio.sleep(max(0.0, MIN_WRITE_INTERVAL_S - (time.monotonic() - began_at)))
        return True

    # Lost requests. First ask the queue which requests wait or are in flight, and then collect all results,
    # in this order: a request leaves the queue in the same step in which its result is pushed. So a request
    # that is not in the queue and has no result was never there, or was lost.

    async def _resolve_unconfirmed(self) -> None:
        """Find out what happened to the lines that an earlier process sent, or was about to send."""
        unconfirmed = await self._run_in_thread(self._job.unconfirmed_chunks)
        lost = await self._find_lost(confirmed_only=False)
        for chunk in unconfirmed:
            absent = {line.line_number for line in chunk.lines} & lost.keys()
            if absent and len(absent) == len(chunk.lines):  # the queue accepts a chunk as a whole
                await self._resubmit_chunk(chunk)
            await self._run_in_thread(self._job.confirm_chunk, chunk.number)
            for n in absent:
                del lost[n]
        await self._resend_lines(lost)

    async def _resubmit_chunk(self, chunk: Chunk) -> None:
        """Submit a chunk again that perhaps never reached the queue.

        If its deadline has passed meanwhile, its lines get the deadline of this run.
        """
        if chunk.deadline <= time.time() + MIN_RESEND_TIME_S and not await self._queue.has_chunk(
            chunk.number
        ):
            numbers = [line.line_number for line in chunk.lines]
            chunk, submissions = await self._run_in_thread(
                self._job.begin_lost_chunk, numbers, int(self._ends_at)
            )
            await self._queue.submit_chunk(chunk.number, submissions)
            await self._run_in_thread(self._job.confirm_chunk, chunk.number)
        else:
            await self._queue.submit_chunk(
                chunk.number, await self._run_in_thread(self._job.build_submissions, chunk)
            )

    async def _resend_lost(self) -> None:
        """Send requests again that Redis has lost, or whose results expired."""
        await self._resend_lines(await self._find_lost(confirmed_only=True))

    async def _find_lost(self, *, confirmed_only: bool) -> dict[int, int]:
        """Return the deadlines of sent lines that are not in the queue and have no result, by line number.

        With `confirmed_only`, only lines of chunks that the queue has accepted. The submission of another
        chunk may still be in progress.
        """
        missing: dict[int, int] = {}
        after = 0
        while page := await self._run_in_thread(self._job.open_lines, after, confirmed_only):
            after = page[-1][0]
            inactive = await self._queue.find_inactive([n for n, _, _ in page])
            missing |= {n: deadline for n, _, deadline in page if n in inactive}
        while await self._write_arrived() and not self._is_caught_up:
            pass
        still = await self._run_in_thread(self._job.select_open, list(missing))
        return {n: missing[n] for n in still}

    async def _resend_lines(self, lost: dict[int, int]) -> None:
        now = time.time()
        late = sorted(n for n, deadline in lost.items() if deadline + LATE_RESULT_S < now)
        for at in range(0, len(late), PAGE_LINES):
            await self._run_in_thread(self._job.expire_lines, late[at : at + PAGE_LINES])
        by_deadline: dict[int, list[int]] = {}  # the lines of a chunk have one deadline
        for n, deadline in lost.items():
            # Lines with a nearer deadline are written as expired by a later search.
            if deadline > now + MIN_RESEND_TIME_S:
                by_deadline.setdefault(deadline, []).append(n)
        for deadline, numbers in by_deadline.items():
            for at in range(0, len(numbers), PAGE_LINES):
                some = numbers[at : at + PAGE_LINES]
                chunk, submissions = await self._run_in_thread(self._job.begin_lost_chunk, some, deadline)
                await self._queue.submit_chunk(chunk.number, submissions)
                await self._run_in_thread(self._job.confirm_chunk, chunk.number)
