"""A run of a batch file: what is sent, what comes back, and what an earlier process has left in doubt.

`__init__.py` says in which order things become durable.
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
"""So much of the input may be in the queue at a time."""
WRITTEN_EVERY_S = 0.1
"""Between two writes, each of which waits for the disk."""
LOOK_EVERY_S = 60.0
"""Without a result for so long, the queue is asked whether it still knows of what was sent."""
SURELY_S = 5.0
"""A request this near to its deadline is not sent again: it ends by itself."""
LATE_S = 30.0
"""So long after its deadline a request without a result has none."""
CANCEL_S = 10.0


async def run_file(
    url: str,
    names: Names,
    paths: FilePaths,
    options: FileOptions,
    *,
    on_start: Callable[[FileStart], None] = lambda _: None,
    on_progress: Callable[[FileProgress], None] = lambda _: None,
) -> FileProgress:
    """Have every line of the input answered, and say what came of it. Broken off, and called again with the
    same arguments, it goes on where it was. `on_start` is called after the check, `on_progress` each second.

    Raises InputError (BadInputError for its lines), TemplateError, JournalError, SinkError, QueueAwayError.
    """
    ends_at = time.time() + seconds_from(options.deadline, time.time())
    with ExitStack() as stack:
        folder = Path()
        if not isinstance(paths.output, Path):  # there is nothing that journal and input could lie beside
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batch-dispatcher-")))
        job = FileJob(paths, options, names, folder)
        thread = ThreadPoolExecutor(1, "batch file")
        try:
            try:
                start = await asyncio.get_running_loop().run_in_executor(thread, job.begin)
            except asyncio.CancelledError:
                job.end()
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
                    await run.cancel()  # nobody else could have its answers
                raise
            finally:
                await queue.aclose()
            return job.progress()
        finally:
            thread.submit(job.close)
            thread.shutdown(wait=True)


class FileRun:
    """One process's part of a run: the queue on one side, the disk on the other."""

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
        """The last look saw all that had come by then."""
        self._heard_at = time.monotonic()

    async def work(self, on_progress: Callable[[FileProgress], None]) -> None:
        """Send and receive until every line is done."""
        await self._do(self._job.write_bad)
        try:
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(self._tick(on_progress))
                if self._job.open:
                    await self._settle_doubts()
                    self._rate = RecentRate()  # what had come before says nothing of the pace
                receiving = tasks.create_task(self._receive())
                await self._send()
                if self._job.complete:  # nothing more will come
                    receiving.cancel()
                else:
                    await receiving
                ticking.cancel()
        except BaseExceptionGroup as group:  # one of them failed, and the others were ended
            raise group.exceptions[0] from None
        finally:
            on_progress(self._job.progress(None, self._queue.trouble))
        await self._queue.discard()
        await self._do(self._job.finish)

    async def cancel(self) -> None:
        """What is in the queue is not wanted any more."""
        until, after = time.monotonic() + CANCEL_S, 0
        with suppress(QueueUnavailableError, QueueAwayError):
            while (page := await self._do(self._job.open_lines, after)) and time.monotonic() < until:
                after = page[-1][0]
                await self._queue.cancel([n for n, _, _ in page], until)

    async def _do(self, act: Callable[..., T], *arguments: Any) -> T:
        """All that waits for the disk, one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, act, *arguments)

    async def _tick(self, on_progress: Callable[[FileProgress], None]) -> None:
        while True:
            rate = self._rate.rate(time.monotonic(), self._job.progress().done)
            on_progress(self._job.progress(rate, self._queue.trouble))
            await asyncio.sleep(1.0)

    async def _send(self) -> None:
        """Chunk by chunk, in order, as long as there is room and time."""
        while not self._job.all_sent:
            left_s = self._ends_at - time.time()
            if left_s <= 1:
                await self._do(self._job.give_up_rest)
                return
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
        """What has come, into the files. False: there was nothing."""
        began = time.monotonic()
        collected = await self._queue.collect(self._seen, self._given_back)
        self._given_back = ()
        if collected.other:
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
        self._given_back = [number for number, _ in collected.results]
        if found:  # what others push there must not keep it from looking for what is lost
            self._heard_at = time.monotonic()
        self._room.set()
        if self._at_end:
            await asyncio.sleep(max(0.0, WRITTEN_EVERY_S - (time.monotonic() - began)))
        return True

    # What is in doubt. First the queue is asked who is in line or at work, then everything that has come is
    # taken: a request leaves the line in the step in which its result comes. So what is neither was never
    # there, or is lost.

    async def _settle_doubts(self) -> None:
        """Lines that were sent by an earlier process, or nearly so."""
        unsure = await self._do(self._job.unsure)
        lost = await self._lost(sure=False)
        for chunk in unsure:
            absent = {line.n for line in chunk.lines} & lost.keys()
            if absent and len(absent) == len(chunk.lines):  # a chunk is taken as a whole
                await self._submit_again(chunk)
            await self._do(self._job.sure, chunk.number)
            for n in absent:
                del lost[n]
        await self._send_again(lost)

    async def _submit_again(self, chunk: Chunk) -> None:
        """One that perhaps never came to the queue. Its time may be over since; that of the run is not."""
        if chunk.deadline <= time.time() + SURELY_S and not await self._queue.took(chunk.number):
            numbers = [line.n for line in chunk.lines]
            chunk, submissions = await self._do(self._job.chunk_again, numbers, int(self._ends_at))
            await self._queue.submit(chunk.number, submissions)
            await self._do(self._job.sure, chunk.number)
        else:
            await self._queue.submit(chunk.number, await self._do(self._job.submissions, chunk))

    async def _look_for_lost(self) -> None:
        """Redis may have lost requests; and results that nobody fetched for too long."""
        await self._send_again(await self._lost(sure=True))

    async def _lost(self, *, sure: bool) -> dict[int, int]:
        """Lines that were sent, are neither in line nor at work, and have no result; with their deadlines.

        `sure`: only those of chunks that the queue has taken, for another one may be on its way there.
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
        by_deadline: dict[int, list[int]] = {}
        for n, deadline in lost.items():
            if deadline > now + SURELY_S:
                by_deadline.setdefault(deadline, []).append(n)
        for deadline, numbers in by_deadline.items():
            for at in range(0, len(numbers), AT_ONCE):
                some = numbers[at : at + AT_ONCE]
                chunk, submissions = await self._do(self._job.chunk_again, some, deadline)
                await self._queue.submit(chunk.number, submissions)
                await self._do(self._job.sure, chunk.number)
