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

from dispatcher.client.errors import QueueAwayError
from dispatcher.client.files.job import AT_ONCE, FileJob
from dispatcher.client.files.journal import Chunk
from dispatcher.client.files.options import FileOptions, FilePaths, FileStart
from dispatcher.client.files.outbound import LineQueue
from dispatcher.client.files.progress import FileProgress, RecentRate
from dispatcher.client.item import seconds_from
from dispatcher.core.requests.result import PoppedResult
from dispatcher.core.requests.submission import QueueUnavailableError
from dispatcher.queue.keys import Names
from dispatcher.queue.redis.producer import COLLECTED_MOST
from dispatcher.queue.redis.scripts import SCRIPT_BYTES

T = TypeVar("T")

PENDING_BYTES = 256 << 20
"""Largest size of the lines that are in the queue at a time."""
WRITTEN_EVERY_S = 0.1
"""Shortest time between two writes, each of which waits for the disk."""
LOOK_EVERY_S = 60.0
"""Seconds without a result after which the run looks for lost requests."""
SURELY_S = 5.0
"""A lost request is sent again only if its deadline is at least this far away."""
LATE_S = 30.0
"""Seconds after its deadline at which a request without a result is written as expired."""
CANCEL_S = 10.0
"""Longest time for which an interrupted run without an output file cancels its requests."""


async def run_file(
    url: str,
    names: Names,
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
    ends_at = time.time() + seconds_from(options.deadline, time.time())
    with ExitStack() as stack:
        folder = Path()
        if not isinstance(paths.output, Path):  # without an output file, the side files have no place
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batch-dispatcher-")))
        job = FileJob(paths, options, names, folder)
        thread = ThreadPoolExecutor(1, "batch file")  # one thread, because the job is not thread-safe
        try:
            try:
                start = await asyncio.get_running_loop().run_in_executor(thread, job.begin)
            except asyncio.CancelledError:
                job.end()  # the thread would otherwise go on checking, perhaps for minutes
                raise
            on_start(start)
            if start.finished:
                return job.progress()
            queue = LineQueue(url, names, job.naming)
            run = FileRun(job, queue, thread, options.max_pending, ends_at)
            try:
                await run.work(on_progress)
            except BaseException:
                if not isinstance(paths.output, Path):
                    # Such a run cannot be continued, so its answers have no reader.
                    await run.cancel()
                raise
            finally:
                await queue.aclose()
            return job.progress()
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
        self._room = asyncio.Event()
        self._rate = RecentRate()
        self._seen = 0
        self._given_back: Sequence[int] = ()
        self._at_end = False
        """True if the last collect call left nothing in the result list."""
        self._heard_at = time.monotonic()

    async def work(self, on_progress: Callable[[FileProgress], None]) -> None:
        """Send and receive until every line is done."""
        await self._do(self._job.write_bad)
        try:
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(self._tick(on_progress))
                if self._job.open:
                    await self._settle_doubts()
                    self._rate = RecentRate()  # results of an earlier process would distort the rate
                receiving = tasks.create_task(self._receive())
                await self._send()
                if self._job.complete:  # the receiver would wait for a result that never comes
                    receiving.cancel()
                else:
                    await receiving
                ticking.cancel()
        except BaseExceptionGroup as group:  # the first failure cancelled the other tasks
            raise group.exceptions[0] from None
        finally:
            on_progress(self._job.progress(None, self._queue.trouble))
        await self._queue.discard()
        await self._do(self._job.finish)

    async def cancel(self) -> None:
        """Cancel the requests of all open lines, as far as CANCEL_TIMEOUT_S allows."""
        until, after = time.monotonic() + CANCEL_S, 0
        with suppress(QueueUnavailableError, QueueAwayError):
            while (page := await self._do(self._job.open_lines, after)) and time.monotonic() < until:
                after = page[-1][0]
                await self._queue.cancel([n for n, _, _ in page], until)

    async def _do(self, act: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the thread of the files, after the calls before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, act, *arguments)

    async def _tick(self, on_progress: Callable[[FileProgress], None]) -> None:
        while True:
            rate = self._rate.rate(time.monotonic(), self._job.progress().done)
            on_progress(self._job.progress(rate, self._queue.trouble))
            await asyncio.sleep(1.0)

    async def _send(self) -> None:
        """Send chunks in order, as long as there are lines and time. Wait while too many lines are open."""
        while not self._job.all_sent:
            left_s = self._ends_at - time.time()
            if left_s <= 1:
                await self._do(self._job.give_up_rest)
                return
            # Before the check, so that results which arrive meanwhile are not missed.
            self._room.clear()
            room = self._max_pending - self._job.open
            found = None
            if room > 0 and self._job.open_bytes < PENDING_BYTES:
                found = await self._do(self._job.next_chunk, room, int(self._ends_at))
            if found is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._room.wait()
                continue
            chunk, submissions = found
            await self._queue.submit(chunk.number, submissions)
            await self._do(self._job.sure, chunk.number)

    async def _receive(self) -> None:
        looked_at = time.monotonic()
        while not self._job.complete:
            came = await self._take_some()
            now = time.monotonic()
            if self._job.open and now - max(looked_at, self._heard_at) > LOOK_EVERY_S:
                looked_at = now
                await self._look_for_lost()
            if not came and not self._job.complete:
                await self._queue.arrival()

    async def _take_some(self) -> bool:
        """Collect results, and write them to the files. Return False if there were none."""
        began = time.monotonic()
        collected = await self._queue.collect(self._seen, self._given_back)
        self._given_back = ()
        if collected.other:  # Redis lost the keep, or it expired: begin at the start of the new one
            self._seen, self._at_end = 0, False
            return True
        self._seen = collected.last
        if not collected.results:
            return False
        size = sum(len(raw) for _, raw in collected.results)
        self._at_end = len(collected.results) < COLLECTED_MOST and size < SCRIPT_BYTES
        found: dict[int, PoppedResult] = {}
        for _, raw in collected.results:
            if (read := self._queue.read(raw)) is not None:
                found.setdefault(*read)
        await self._do(self._job.take, found)
        # Only now are the results durable in the files, and may be deleted in Redis.
        self._given_back = [number for number, _ in collected.results]
        if found:  # elements that other programs push must not delay the search for lost requests
            self._heard_at = time.monotonic()
        self._room.set()
        if self._at_end:
            await asyncio.sleep(max(0.0, WRITTEN_EVERY_S - (time.monotonic() - began)))
        return True

    # Lost requests. First ask the queue which requests wait or are in flight, and then collect all results,
    # in this order: a request leaves the queue in the same step in which its result is pushed. So a request
    # that is not in the queue and has no result was never there, or was lost.

    async def _settle_doubts(self) -> None:
        """Find out what happened to the lines that an earlier process sent, or was about to send."""
        unsure = await self._do(self._job.unsure)
        lost = await self._lost(sure=False)
        for chunk in unsure:
            absent = {line.n for line in chunk.lines} & lost.keys()
            if absent and len(absent) == len(chunk.lines):  # the queue accepts a chunk as a whole
                await self._submit_again(chunk)
            await self._do(self._job.sure, chunk.number)
            for n in absent:
                del lost[n]
        await self._send_again(lost)

    async def _submit_again(self, chunk: Chunk) -> None:
        """Submit a chunk again that perhaps never reached the queue.

        If its deadline has passed meanwhile, its lines get the deadline of this run.
        """
        if chunk.deadline <= time.time() + SURELY_S and not await self._queue.took(chunk.number):
            numbers = [line.n for line in chunk.lines]
            chunk, submissions = await self._do(self._job.chunk_again, numbers, int(self._ends_at))
            await self._queue.submit(chunk.number, submissions)
            await self._do(self._job.sure, chunk.number)
        else:
            await self._queue.submit(chunk.number, await self._do(self._job.submissions, chunk))

    async def _look_for_lost(self) -> None:
        """Send requests again that Redis has lost, or whose results expired."""
        await self._send_again(await self._lost(sure=True))

    async def _lost(self, *, sure: bool) -> dict[int, int]:
        """Return the deadlines of sent lines that are not in the queue and have no result, by line number.

        With `confirmed_only`, only lines of chunks that the queue has accepted. The submission of another
        chunk may still be in progress.
        """
        absent: dict[int, int] = {}
        after = 0
        while page := await self._do(self._job.open_lines, after, sure):
            after = page[-1][0]
            gone = await self._queue.inactive([n for n, _, _ in page])
            absent |= {n: deadline for n, _, deadline in page if n in gone}
        while await self._take_some() and not self._at_end:
            pass
        still = await self._do(self._job.still_open, list(absent))
        return {n: absent[n] for n in still}

    async def _send_again(self, lost: dict[int, int]) -> None:
        now = time.time()
        late = sorted(n for n, deadline in lost.items() if deadline + LATE_S < now)
        for at in range(0, len(late), AT_ONCE):
            await self._do(self._job.write_off, late[at : at + AT_ONCE])
        by_deadline: dict[int, list[int]] = {}  # the lines of a chunk have one deadline
        for n, deadline in lost.items():
            # Lines with a nearer deadline are written as expired by a later search.
            if deadline > now + SURELY_S:
                by_deadline.setdefault(deadline, []).append(n)
        for deadline, numbers in by_deadline.items():
            for at in range(0, len(numbers), AT_ONCE):
                some = numbers[at : at + AT_ONCE]
                chunk, submissions = await self._do(self._job.chunk_again, some, deadline)
                await self._queue.submit(chunk.number, submissions)
                await self._do(self._job.sure, chunk.number)
