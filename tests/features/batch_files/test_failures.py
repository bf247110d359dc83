"""Runs of batch files with failures: full disks, damaged journals, invalid inputs, unreachable queues."""

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
from dispatcher.features.batch_files import run as running
from dispatcher.features.batch_files.database import JournalError
from dispatcher.features.batch_files.input_check import InputError
from dispatcher.features.batch_files.job import FileJob
from dispatcher.features.batch_files.line_queue import LineQueue
from dispatcher.features.batch_files.progress import FileProgress
from dispatcher.features.batch_files.run import FileRun, run_file
from dispatcher.features.batch_files.run_options import FileOptions, FilePaths
from dispatcher.features.batch_files.sinks import SinkError
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.producer import ResultBox
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.requests.submission import Submission
from tests.client.fake_dispatcher import NAMES, FakeDispatcher
from tests.features.batch_files.files import (
    find_file_keys,
    get_errors_path,
    get_output_path,
    get_source_path,
    interrupt_run,
    make_line,
    make_lines,
    read_custom_ids,
    run_batch_file,
    wait_until_true,
    write_lines,
)
from tests.queue.factories import queues
from tests.queue.servers import Server, cluster_set
from tests.support import wait_until


def path_with_suffix(paths: FilePaths, suffix: str) -> Path:
    return get_output_path(paths).with_name(get_output_path(paths).name + suffix)


# Lines must run neither twice nor never


async def test_chunk_that_is_being_submitted_is_not_resent_as_lost(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    """After a long outage the run looks for lost requests while a chunk is still being submitted."""
    write_lines(get_source_path(paths), *make_lines(20))
    job, thread = FileJob(paths, FileOptions(), NAMES, Path()), ThreadPoolExecutor(1)
    job.start_run()
    submission_started, may_submit = asyncio.Event(), asyncio.Event()

    class DelayedQueue(LineQueue):
        async def submit_chunk(self, chunk: int, submissions: Sequence[Submission]) -> None:
            if chunk == 1:
                submission_started.set()
                await may_submit.wait()
            await super().submit_chunk(chunk, submissions)

    queue = DelayedQueue(one_redis.url, NAMES, job.job_names)
    file_run = FileRun(job, queue, thread, 20_000, 2**31)
    working = asyncio.create_task(file_run.run_to_end(lambda _: None))
    await submission_started.wait()
    async with fake_dispatcher.answer_continuously():
        await file_run._resend_lost()
        may_submit.set()
        await working
    await queue.aclose()
    thread.shutdown()
    job.close()
    assert len(fake_dispatcher.answered) == 20


async def test_run_waits_while_a_cluster_refuses_all_calls(paths: FilePaths, tmp_path: Path) -> None:
    """A cluster is down while the owner of a slot is gone, even if no key of the run is in that slot."""
    write_lines(get_source_path(paths), *make_lines(20))
    errors: set[str] = set()

    def keep_error(progress: FileProgress) -> None:
        errors.add(str(progress.connection_error))

    with cluster_set("redis", tmp_path, "--cluster-node-timeout", "1000") as cluster:
        home = cluster.node_of(NAMES.queue)
        lost = next(node for node in cluster.nodes if node is not home)
        run = asyncio.create_task(run_file(cluster.url, NAMES, paths, FileOptions(), on_progress=keep_error))
        with home.client() as client:
            await wait_until(lambda: client.zcard(NAMES.queue) == 20, what="the lines to be sent")
        lost.kill()
        await wait_until(lambda: run.done() or any("cluster that is down" in error for error in errors), 60)
        assert not run.done()
        await asyncio.to_thread(lost.start)
        async with (
            queues(cluster.url, "a", names=NAMES) as (queue,),
            FakeDispatcher(queue).answer_continuously(),
        ):
            assert (await run).answered == 20


async def test_lost_requests_are_found_although_others_push_into_the_result_list(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOST_CHECK_INTERVAL_S", 0.5)
    write_lines(get_source_path(paths), *make_lines(3))
    task = asyncio.create_task(run_batch_file(one_redis, paths))
    await wait_until_true(lambda: bool(find_file_keys(one_redis)))
    with one_redis.client() as client:
        member = client.zrange(NAMES.queue, 0, 0)[0]
        (results,) = [each for each in member.split(b'"') if each.startswith(b"batch-results:")]
        client.flushall()

        async def push() -> None:
            while True:
                client.lpush(results, b"noise")
                await asyncio.sleep(0.1)

        pushing = asyncio.create_task(push())
        async with fake_dispatcher.answer_continuously():
            async with asyncio.timeout(15):
                await task
        pushing.cancel()
    assert len(read_custom_ids(get_output_path(paths))) == 3


async def test_acknowledged_results_are_not_looked_up_again(one_redis: Server) -> None:
    """Looking up millions of numbers in one call when a run resumes would block Redis."""
    box, client = ResultBox("batch-results:{many}"), connect(one_redis.url)
    scripts = ScriptRunner(client)
    last_seen, not_acknowledged, acknowledged, first_numbers = 0, 0, list[int](), list[int]()
    for count in range(20):
        await client.lpush(box.result_list, *(b"%d" % n for n in range(50)))
        collected = await producer.collect_results(
            scripts, box, client_id="", owner_ttl_s=1, last_seen=last_seen, acknowledged=acknowledged
        )
        assert (collected.has_been_reset, len(collected.results)) == (False, 50)
        last_seen, acknowledged = collected.last_number, [number for number, _ in collected.results]
        if count == 10:
            not_acknowledged = acknowledged.pop(25)
        first_numbers.append(int(await client.hget(box.kept_key, "first") or 0))
    collected = await producer.collect_results(
        scripts, box, client_id="", owner_ttl_s=1, last_seen=last_seen, acknowledged=acknowledged
    )
    assert (collected.has_been_reset, collected.results) == (False, [])
    assert first_numbers[10] - first_numbers[0] == 500
    assert int(await client.hget(box.kept_key, "first") or 0) == first_numbers[-1] == not_acknowledged
    resumed = await producer.collect_results(scripts, box, client_id="", owner_ttl_s=1, last_seen=0)
    assert [number for number, _ in resumed.results] == [not_acknowledged]
    await client.aclose()


@pytest.mark.parametrize("submitted", [False, True])
async def test_resumed_chunk_gets_the_deadline_of_the_run_that_sends_it(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths, *, submitted: bool
) -> None:
    """A process ended before its chunk was submitted (or confirmed), and the next one starts a day later."""
    write_lines(get_source_path(paths), *make_lines(10))
    job = FileJob(paths, FileOptions(), NAMES, Path())
    job.start_run()
    found = job.begin_next_chunk(10, int(time.time()) - 86_400)
    assert found is not None
    chunk, submissions = found
    queue = LineQueue(one_redis.url, NAMES, job.job_names)
    if submitted:
        await queue.submit_chunk(chunk.number, submissions)
    job.close()
    await queue.aclose()
    async with fake_dispatcher.answer_continuously():
        done = await run_batch_file(one_redis, paths)
    assert (done.done, done.failed, len(fake_dispatcher.answered)) == (10, 0, 10)


# Files that do not belong to the run


async def test_output_with_an_empty_journal_is_not_overwritten(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    write_lines(get_output_path(paths), b"precious")
    path_with_suffix(paths, ".journal").touch()
    with pytest.raises(JournalError, match="name another file, or remove it"):
        await run_batch_file(one_redis, paths)
    assert get_output_path(paths).read_bytes() == b"precious\n"


async def test_two_runs_cannot_write_to_one_errors_file(
    one_redis: Server, paths: FilePaths, tmp_path: Path
) -> None:
    write_lines(get_source_path(paths), *make_lines(10))
    first, second = (
        FilePaths(get_source_path(paths), tmp_path / f"{name}.jsonl", tmp_path / "failed.jsonl")
        for name in "ab"
    )
    task = asyncio.create_task(run_batch_file(one_redis, first))
    await wait_until_true(lambda: bool(find_file_keys(one_redis)))
    try:
        with pytest.raises(SinkError, match="another process writes to it"):
            await run_batch_file(one_redis, second)
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("suffix", [".journal", ".journal-wal", ".spool"])
async def test_internal_files_of_the_run_are_rejected_as_input_or_errors(
    one_redis: Server, paths: FilePaths, suffix: str
) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    with pytest.raises(InputError, match="a file of the run's own"):
        await run_batch_file(one_redis, replace(paths, errors=path_with_suffix(paths, suffix)))
    with pytest.raises(InputError, match="a file of the run's own"):
        await run_batch_file(
            one_redis, replace(paths, source=write_lines(path_with_suffix(paths, suffix), *make_lines(3)))
        )


async def test_input_with_the_name_of_a_stored_input_is_not_deleted(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    source = write_lines(path_with_suffix(paths, ".input"), *make_lines(3))
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, replace(paths, source=source))
    assert len(source.read_bytes().splitlines()) == 3


async def test_streamed_input_is_stored_until_the_run_has_ended(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    def paths_with_stream(count: int) -> FilePaths:
        return replace(paths, source=io.BytesIO(b"\n".join(make_lines(count))))

    await interrupt_run(one_redis, paths_with_stream(20))
    stored_input = path_with_suffix(paths, ".input")
    before = stored_input.read_bytes()
    with pytest.raises(InputError, match="is not the input that this run was begun with"):
        await run_batch_file(one_redis, paths_with_stream(3))
    assert stored_input.read_bytes() == before
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, replace(paths, source=io.BytesIO()))
    assert len(read_custom_ids(get_output_path(paths))) == 20
    assert (await run_batch_file(one_redis, paths_with_stream(20))).done == 20
    assert sorted(each.name for each in get_output_path(paths).parent.iterdir()) == [
        "out.errors.jsonl",
        "out.jsonl",
        "out.jsonl.journal",
    ]


async def test_input_that_changes_during_the_run_is_an_error(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    """With a template every line is a valid request, so validation would not notice the change."""
    get_source_path(paths).write_bytes(b"one\ntwo\nsix\n")
    options = {"template": {"prompt": ""}, "field": "prompt", "path": "/v1/x", "max_pending": 1}
    task = asyncio.create_task(run_batch_file(one_redis, paths, **options))
    await wait_until_true(lambda: bool(find_file_keys(one_redis)))
    get_source_path(paths).write_bytes(b"one\nbad\nsix\n")
    async with fake_dispatcher.answer_continuously():
        with pytest.raises(InputError, match="is not the input"):
            await task
    get_source_path(paths).write_bytes(b"one\ntwo\nsix\n")
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths, **options)
    assert sorted(read_custom_ids(get_output_path(paths))) == ["line-1", "line-2", "line-3"]


@pytest.mark.parametrize("which", ["source", "output", "errors", "journal"])
async def test_loop_of_symbolic_links_is_an_error(one_redis: Server, paths: FilePaths, which: str) -> None:
    paths = replace(paths, errors=path_with_suffix(paths, ".bad"))
    write_lines(get_source_path(paths), *make_lines(1))
    files = {"source": get_source_path(paths), "output": get_output_path(paths), "errors": paths.errors}
    loop = files.get(which) or path_with_suffix(paths, f".{which}")
    loop.unlink(missing_ok=True)
    loop.symlink_to(loop.name)
    with pytest.raises(InputError, match=f"{loop.name} is a loop of symbolic links"):
        await run_batch_file(one_redis, paths)


# Inputs that could block for ever


async def test_named_pipe_is_rejected_at_once(one_redis: Server, paths: FilePaths) -> None:
    os.mkfifo(get_source_path(paths))
    with pytest.raises(InputError, match="is no file; give -"):
        await run_batch_file(one_redis, paths)


async def test_run_can_be_cancelled_while_it_waits_for_its_input(one_redis: Server, paths: FilePaths) -> None:
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as stream, open(write_fd, "wb") as writer:  # noqa: ASYNC230, PTH123 - a pipe
        writer.write(make_line("a"))
        writer.flush()
        task = asyncio.create_task(run_batch_file(one_redis, replace(paths, source=stream)))
        await wait_until_true(path_with_suffix(paths, ".input.partial").exists)
        task.cancel()
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()
    assert not path_with_suffix(paths, ".input.partial").exists()


@pytest.mark.parametrize("invalid", [{"max_pending": 0}, {"group": "suffix"}, {"deadline": "soon"}])
async def test_invalid_options_are_rejected(
    one_redis: Server, paths: FilePaths, invalid: dict[str, Any]
) -> None:
    write_lines(get_source_path(paths), *make_lines(1))
    with pytest.raises(ValueError, match=next(iter(invalid))):
        await run_batch_file(one_redis, paths, **invalid)


# Disks


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Make writes beyond this size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("padding", "error_type"), [(10, JournalError), (3000, SinkError)])
async def test_full_disk_ends_the_run_and_a_later_run_continues(
    one_redis: Server,
    fake_dispatcher: FakeDispatcher,
    paths: FilePaths,
    padding: int,
    error_type: type[BatchError],
    *,
    ordered: bool,
) -> None:
    write_lines(get_source_path(paths), *(make_line(f"c-{n}", padding="x" * padding) for n in range(200)))
    async with fake_dispatcher.answer_continuously():
        max_size = 70_000 if error_type is JournalError else 200_000
        with limit_file_size(max_size), pytest.raises(error_type, match="cannot be"):
            await run_batch_file(one_redis, paths, ordered=ordered)
        await run_batch_file(one_redis, paths, ordered=ordered)
    assert sorted(read_custom_ids(get_output_path(paths))) == sorted(f"c-{n}" for n in range(200))
    assert len(fake_dispatcher.answered) == 200
    assert get_errors_path(paths).read_bytes() == b""


async def test_truncated_journal_is_an_error_or_the_run_continues(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(300))
    task = asyncio.create_task(run_batch_file(one_redis, paths, max_pending=100))
    await wait_until_true(lambda: bool(find_file_keys(one_redis)))
    await fake_dispatcher.answer_once()
    await wait_until_true(lambda: get_output_path(paths).stat().st_size > 0)
    task.cancel()
    await asyncio.wait([task])
    journal, written = path_with_suffix(paths, ".journal"), get_output_path(paths).read_bytes()
    content = journal.read_bytes()
    for size in (0, 1, 99, 100, *range(4000, len(content), 3333)):
        path_with_suffix(paths, ".journal-wal").unlink(missing_ok=True)
        journal.write_bytes(content[:size])
        job = FileJob(paths, FileOptions(), NAMES, Path())
        with suppress(BatchError):
            job.start_run()
            job.unconfirmed_chunks()
            job.begin_next_chunk(10, 2**31)
        job.close()
        assert get_output_path(paths).read_bytes() == written, size


async def test_missing_directory_or_input_is_an_error(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths, tmp_path: Path
) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    with pytest.raises(JournalError, match="the directory of the output must be there"):
        await run_batch_file(one_redis, replace(paths, output=tmp_path / "no" / "out.jsonl"))
    with pytest.raises(InputError, match="No such file"):
        await run_batch_file(one_redis, replace(paths, source=tmp_path / "no.jsonl"))
    with pytest.raises(InputError, match="is no file"):
        await run_batch_file(one_redis, replace(paths, source=tmp_path))


async def test_output_stream_that_cannot_be_written_is_an_error(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(3))

    class FullStream(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    full: BinaryIO = FullStream()
    async with fake_dispatcher.answer_continuously():
        with pytest.raises(SinkError, match="the output cannot be written: No space left"):
            await run_batch_file(one_redis, replace(paths, output=full))
