"""Batch files and bad luck: full disks, torn journals, inputs that are none, a queue that was away."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dispatcher.client import BatchError
from dispatcher.client.files import FileOptions, FilePaths, InputError, JournalError, SinkError
from dispatcher.client.files import run as running
from dispatcher.client.files.job import FileJob
from dispatcher.client.files.line_queue import LineQueue
from dispatcher.client.files.run import FileRun
from dispatcher.ports import Submission
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.producer import ResultBox
from dispatcher.queue.redis.scripts import ScriptRunner
from tests.batchfiles import broken_off, errors, ids, left, line, output, requests, run, source, until, write
from tests.client.answering import NAMES, Answering
from tests.queue.servers import Server


def beside(paths: FilePaths, suffix: str) -> Path:
    return output(paths).with_name(output(paths).name + suffix)


# Lines that run twice, or never.


async def test_what_is_on_its_way_is_not_taken_to_be_lost(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    """After an outage of minutes the run looks for what was lost, while a chunk goes in at last."""
    write(source(paths), *requests(20))
    job, thread = FileJob(paths, FileOptions(), NAMES, Path()), ThreadPoolExecutor(1)
    job.start_run()
    reached, there = asyncio.Event(), asyncio.Event()

    class Late(LineQueue):
        async def submit_chunk(self, chunk: int, submissions: Sequence[Submission]) -> None:
            if chunk == 1:
                reached.set()
                await there.wait()
            await super().submit_chunk(chunk, submissions)

    queue = Late(one_redis.url, NAMES, job.job_names)
    one = FileRun(job, queue, thread, 20_000, 2**31)
    working = asyncio.create_task(one.run_to_end(lambda _: None))
    await reached.wait()
    async with answering.always():
        await one._resend_lost()
        there.set()
        await working
    await queue.aclose()
    thread.shutdown()
    job.close()
    assert len(answering.served) == 20


async def test_what_redis_has_lost_is_missed_although_others_push_into_the_list(
    one_redis: Server, answering: Answering, paths: FilePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOST_CHECK_INTERVAL_S", 0.5)
    write(source(paths), *requests(3))
    task = asyncio.create_task(run(one_redis, paths))
    await until(lambda: bool(left(one_redis)))
    with one_redis.client() as client:
        member = client.zrange(NAMES.queue, 0, 0)[0]
        (results,) = [each for each in member.split(b'"') if each.startswith(b"batch-results:")]
        client.flushall()

        async def push() -> None:
            while True:
                client.lpush(results, b"noise")
                await asyncio.sleep(0.1)

        pushing = asyncio.create_task(push())
        async with answering.always():
            async with asyncio.timeout(15):
                await task
        pushing.cancel()
    assert len(ids(output(paths))) == 3


async def test_what_was_given_back_is_not_looked_for_again(one_redis: Server) -> None:
    """Millions of numbers, looked up in one call by whoever resumes, would keep Redis from others."""
    box, client = ResultBox("batch-results:{many}"), connect(one_redis.url)
    scripts = ScriptRunner(client)
    seen, stays, given_back, firsts = 0, 0, list[int](), list[int]()
    for count in range(20):
        await client.lpush(box.result_list, *(b"%d" % n for n in range(50)))
        told = await producer.collect_results(
            scripts, box, client_id="", owner_ttl_s=1, last_seen=seen, acknowledged=given_back
        )
        assert (told.has_been_reset, len(told.results)) == (False, 50)
        seen, given_back = told.last_number, [number for number, _ in told.results]
        if count == 10:
            stays = given_back.pop(25)
        firsts.append(int(await client.hget(box.kept_key, "first") or 0))
    told = await producer.collect_results(
        scripts, box, client_id="", owner_ttl_s=1, last_seen=seen, acknowledged=given_back
    )
    assert (told.has_been_reset, told.results) == (False, [])
    assert firsts[10] - firsts[0] == 500
    assert int(await client.hget(box.kept_key, "first") or 0) == firsts[-1] == stays
    next_one = await producer.collect_results(scripts, box, client_id="", owner_ttl_s=1, last_seen=0)
    assert [number for number, _ in next_one.results] == [stays]
    await client.aclose()


@pytest.mark.parametrize("taken", [False, True])
async def test_what_never_came_to_the_queue_has_the_time_of_the_run_that_sends_it(
    one_redis: Server, answering: Answering, paths: FilePaths, *, taken: bool
) -> None:
    """A process ended before its chunk was submitted (or known to be), and the next one comes a day later."""
    write(source(paths), *requests(10))
    job = FileJob(paths, FileOptions(), NAMES, Path())
    job.start_run()
    found = job.begin_next_chunk(10, int(time.time()) - 86_400)
    assert found is not None
    chunk, submissions = found
    queue = LineQueue(one_redis.url, NAMES, job.job_names)
    if taken:
        await queue.submit_chunk(chunk.number, submissions)
    job.close()
    await queue.aclose()
    async with answering.always():
        done = await run(one_redis, paths)
    assert (done.done, done.failed, len(answering.served)) == (10, 0, 10)


# What is not the run's own.


async def test_an_output_whose_journal_is_empty_is_left_alone(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(3))
    write(output(paths), b"precious")
    beside(paths, ".journal").touch()
    with pytest.raises(JournalError, match="name another file, or remove it"):
        await run(one_redis, paths)
    assert output(paths).read_bytes() == b"precious\n"


async def test_two_runs_do_not_write_into_one_file(
    one_redis: Server, paths: FilePaths, tmp_path: Path
) -> None:
    write(source(paths), *requests(10))
    first, second = (
        FilePaths(source(paths), tmp_path / f"{name}.jsonl", tmp_path / "failed.jsonl") for name in "ab"
    )
    task = asyncio.create_task(run(one_redis, first))
    await until(lambda: bool(left(one_redis)))
    try:
        with pytest.raises(SinkError, match="another process writes to it"):
            await run(one_redis, second)
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("suffix", [".journal", ".journal-wal", ".spool"])
async def test_files_of_the_run_are_not_named_for_something_else(
    one_redis: Server, paths: FilePaths, suffix: str
) -> None:
    write(source(paths), *requests(3))
    with pytest.raises(InputError, match="a file of the run's own"):
        await run(one_redis, replace(paths, errors=beside(paths, suffix)))
    with pytest.raises(InputError, match="a file of the run's own"):
        await run(one_redis, replace(paths, source=write(beside(paths, suffix), *requests(3))))


async def test_an_input_that_is_called_like_a_kept_one_stays(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    mine = write(beside(paths, ".input"), *requests(3))
    async with answering.always():
        await run(one_redis, replace(paths, source=mine))
    assert len(mine.read_bytes().splitlines()) == 3


async def test_what_came_in_is_kept_until_the_run_has_ended_whatever_comes_next(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    def given(count: int) -> FilePaths:
        return replace(paths, source=io.BytesIO(b"\n".join(requests(count))))

    await broken_off(one_redis, given(20))
    kept = beside(paths, ".input")
    before = kept.read_bytes()
    with pytest.raises(InputError, match="is not the input that this run was begun with"):
        await run(one_redis, given(3))
    assert kept.read_bytes() == before
    async with answering.always():
        await run(one_redis, replace(paths, source=io.BytesIO()))
    assert len(ids(output(paths))) == 20
    assert (await run(one_redis, given(20))).done == 20
    assert sorted(each.name for each in output(paths).parent.iterdir()) == [
        "out.errors.jsonl",
        "out.jsonl",
        "out.jsonl.journal",
    ]


async def test_an_input_that_changes_under_way_is_not_sent(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    """With a template every line is a request, and nothing in it would tell."""
    source(paths).write_bytes(b"one\ntwo\nsix\n")
    options = {"template": {"prompt": ""}, "field": "prompt", "path": "/v1/x", "max_pending": 1}
    task = asyncio.create_task(run(one_redis, paths, **options))
    await until(lambda: bool(left(one_redis)))
    source(paths).write_bytes(b"one\nbad\nsix\n")
    async with answering.always():
        with pytest.raises(InputError, match="is not the input"):
            await task
    source(paths).write_bytes(b"one\ntwo\nsix\n")
    async with answering.always():
        await run(one_redis, paths, **options)
    assert sorted(ids(output(paths))) == ["line-1", "line-2", "line-3"]


@pytest.mark.parametrize("place", ["source", "output", "errors", "journal"])
async def test_a_loop_of_links_is_an_error_that_names_it(
    one_redis: Server, paths: FilePaths, place: str
) -> None:
    paths = replace(paths, errors=beside(paths, ".bad"))
    write(source(paths), *requests(1))
    there = {"source": source(paths), "output": output(paths), "errors": paths.errors}
    loop = there.get(place) or beside(paths, f".{place}")
    loop.unlink(missing_ok=True)
    loop.symlink_to(loop.name)
    with pytest.raises(InputError, match=f"{loop.name} is a loop of symbolic links"):
        await run(one_redis, paths)


# What would wait for ever.


async def test_a_pipe_by_its_name_is_refused_at_once(one_redis: Server, paths: FilePaths) -> None:
    os.mkfifo(source(paths))
    with pytest.raises(InputError, match="is no file; give -"):
        await run(one_redis, paths)


async def test_a_run_can_be_ended_while_it_waits_for_its_input(one_redis: Server, paths: FilePaths) -> None:
    reads, writes = os.pipe()
    with open(reads, "rb") as stream, open(writes, "wb") as still_open:  # noqa: ASYNC230, PTH123 - a pipe
        still_open.write(line("a"))
        still_open.flush()
        task = asyncio.create_task(run(one_redis, replace(paths, source=stream)))
        await until(beside(paths, ".input.partial").exists)
        task.cancel()
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()
    assert not beside(paths, ".input.partial").exists()


@pytest.mark.parametrize("wrong", [{"max_pending": 0}, {"group": "suffix"}, {"deadline": "soon"}])
async def test_options_that_make_no_sense_are_refused(
    one_redis: Server, paths: FilePaths, wrong: dict[str, Any]
) -> None:
    write(source(paths), *requests(1))
    with pytest.raises(ValueError, match=next(iter(wrong))):
        await run(one_redis, paths, **wrong)


# Disks.


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """As on a full disk: what stands behind that cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("padding", "told"), [(10, JournalError), (3000, SinkError)])
async def test_a_full_disk_ends_the_run_and_the_same_process_goes_on_later(
    one_redis: Server,
    answering: Answering,
    paths: FilePaths,
    padding: int,
    told: type[BatchError],
    *,
    ordered: bool,
) -> None:
    write(source(paths), *(line(f"c-{n}", padding="x" * padding) for n in range(200)))
    async with answering.always():
        most = 70_000 if told is JournalError else 200_000
        with files_no_larger_than(most), pytest.raises(told, match="cannot be"):
            await run(one_redis, paths, ordered=ordered)
        await run(one_redis, paths, ordered=ordered)
    assert sorted(ids(output(paths))) == sorted(f"c-{n}" for n in range(200))
    assert len(answering.served) == 200
    assert errors(paths).read_bytes() == b""


async def test_a_journal_that_was_torn_at_any_byte_is_told_or_goes_on(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(300))
    task = asyncio.create_task(run(one_redis, paths, max_pending=100))
    await until(lambda: bool(left(one_redis)))
    await answering.once()
    await until(lambda: output(paths).stat().st_size > 0)
    task.cancel()
    await asyncio.wait([task])
    journal, written = beside(paths, ".journal"), output(paths).read_bytes()
    whole = journal.read_bytes()
    for size in (0, 1, 99, 100, *range(4000, len(whole), 3333)):
        beside(paths, ".journal-wal").unlink(missing_ok=True)
        journal.write_bytes(whole[:size])
        job = FileJob(paths, FileOptions(), NAMES, Path())
        with suppress(BatchError):
            job.start_run()
            job.unconfirmed_chunks()
            job.begin_next_chunk(10, 2**31)
        job.close()
        assert output(paths).read_bytes() == written, size


async def test_a_place_that_is_not_there_is_told(
    one_redis: Server, answering: Answering, paths: FilePaths, tmp_path: Path
) -> None:
    write(source(paths), *requests(3))
    with pytest.raises(JournalError, match="the directory of the output must be there"):
        await run(one_redis, replace(paths, output=tmp_path / "no" / "out.jsonl"))
    with pytest.raises(InputError, match="No such file"):
        await run(one_redis, replace(paths, source=tmp_path / "no.jsonl"))
    with pytest.raises(InputError, match="is no file"):
        await run(one_redis, replace(paths, source=tmp_path))


async def test_a_stream_that_takes_nothing_more_is_told(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(3))

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    full: BinaryIO = Full()
    async with answering.always():
        with pytest.raises(SinkError, match="the output cannot be written: No space left"):
            await run(one_redis, replace(paths, output=full))
