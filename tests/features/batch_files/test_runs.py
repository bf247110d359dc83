"""Runs of batch files with a real queue: output, errors in the input, continuation, and crashes."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import sqlite3
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dispatcher.client import BatchClient
from dispatcher.features.batch_files.database import JournalError
from dispatcher.features.batch_files.input_check import BadInputError, InputError
from dispatcher.features.batch_files.job import FileJob
from dispatcher.features.batch_files.line_queue import LineQueue
from dispatcher.features.batch_files.run import FileRun, run_file
from dispatcher.features.batch_files.run_options import FileOptions, FilePaths, FileStart
from dispatcher.features.batch_files.sinks import SinkError
from dispatcher.features.batch_files.template import TemplateError
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import encode_failure
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import NAMES, POOL, FakeDispatcher, echo, fail_with
from tests.features.batch_files.files import (
    INVALID_LINES,
    find_file_keys,
    get_errors_path,
    get_output_path,
    get_source_path,
    interrupt_run,
    make_line,
    make_lines,
    read_custom_ids,
    read_records,
    run_batch_file,
    wait_until_true,
    write_lines,
)
from tests.paths import DOCS
from tests.queue.servers import Server


async def test_every_line_is_answered_once(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(250))
    async with fake_dispatcher.answer_continuously():
        progress = await run_batch_file(one_redis, paths)
    assert (progress.lines, progress.done, progress.failed, progress.in_queue) == (250, 250, 0, 0)
    assert sorted(read_custom_ids(get_output_path(paths))) == sorted(f"c-{n}" for n in range(250))
    first = min(read_records(get_output_path(paths)), key=lambda each: int(each["custom_id"][2:]))
    assert first["response"]["body"] == json.loads(make_line("c-0", system="You are 0."))["body"]
    assert read_records(get_errors_path(paths)) == []
    assert find_file_keys(one_redis) == set()


async def test_lines_with_the_same_prefix_are_sent_together(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(30))
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths)
    numbers = [int(each.rpartition("-")[2]) - 1 for each in fake_dispatcher.answered]
    assert numbers == sorted(range(30), key=lambda n: (n % 3, n))


async def test_lines_are_sent_in_the_order_of_the_input_without_groups(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(30))
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths, group="none", priority=9)
    assert [int(each.rpartition("-")[2]) for each in fake_dispatcher.answered] == list(range(1, 31))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"c-0": {"userid": "a"}, "c-1": {"userid": "a", "slicing": "off"}}),
        (
            {"slicing": False},
            {"c-0": {"userid": "a", "slicing": "off"}, "c-1": {"userid": "a", "slicing": "off"}},
        ),
    ],
)
async def test_line_or_run_can_decline_slicing(
    one_redis: Server,
    fake_dispatcher: FakeDispatcher,
    paths: FilePaths,
    options: dict[str, bool],
    expected: dict[str, dict[str, str]],
) -> None:
    declined = make_line("c-1")[:-1] + b', "slicing": false}'
    write_lines(get_source_path(paths), make_line("c-0"), declined)
    seen: dict[str, dict[str, str]] = {}

    def record_metadata(request: Request) -> bytes:
        custom_id = json.loads(request.payload)["messages"][-1]["content"].removeprefix("question ")
        seen[custom_id] = dict(request.metadata)
        return echo(request)

    async with fake_dispatcher.answer_continuously(record_metadata):
        await run_batch_file(one_redis, paths, metadata={"userid": "a"}, **options)
    assert seen == expected


def fail_every_seventh(request: Request) -> bytes:
    """Answer each request, but fail every seventh."""
    number = int(request.id.rpartition("-")[2])
    if number % 7 == 0:
        return encode_failure(request.id, ErrorCode.RETRIES_EXHAUSTED, "no", 502, b"bad", token=request.token)
    return echo(request)


async def test_answers_and_failures_are_written_to_separate_files_in_order(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), b"", *make_lines(100), b"  ", INVALID_LINES["text"][0])
    async with fake_dispatcher.answer_continuously(fail_every_seventh):
        progress = await run_batch_file(one_redis, paths, ordered=True, skip_bad=True, max_pending=13)
    numbers = [int(each[2:]) for each in read_custom_ids(get_output_path(paths))]
    assert numbers == [n for n in range(100) if (n + 2) % 7]
    *failed, bad = read_records(get_errors_path(paths))
    assert [int(each["custom_id"][2:]) for each in failed] == [n for n in range(100) if not (n + 2) % 7]
    assert failed[0]["response"]["status_code"] == 502
    assert (bad["custom_id"], bad["response"], bad["error"]["line"]) == (None, None, 103)
    assert (progress.failed, progress.bad) == (len(failed) + 1, 1)
    assert [each.name for each in sorted(get_output_path(paths).parent.iterdir())] == [
        "in.jsonl",
        "out.errors.jsonl",
        "out.jsonl",
        "out.jsonl.journal",
    ]


async def test_number_of_requests_in_the_queue_is_limited(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(100))
    max_in_queue = 0

    def count_and_answer(request: Request) -> bytes:
        nonlocal max_in_queue
        with one_redis.client() as client:
            max_in_queue = max(max_in_queue, len(client.keys(f"{NAMES.queue_prefix}:active:*")))
        return echo(request)

    async with fake_dispatcher.answer_continuously(count_and_answer):
        await run_batch_file(one_redis, paths, max_pending=20)
    assert 0 < max_in_queue <= 20


async def test_documented_example_runs(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "how-to" / "batch-files.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block = block.replace("redis://localhost:6379", one_redis.url)
    write_lines(get_source_path(paths), *make_lines(5))
    monkeypatch.chdir(get_source_path(paths).parent)
    namespace: dict[str, Any] = {"BatchClient": BatchClient}
    exec("async def block():\n" + textwrap.indent(block, "    "), namespace)
    async with fake_dispatcher.answer_continuously():
        await asyncio.wait_for(namespace["block"](), 20)
    assert read_custom_ids(get_output_path(paths)) == [f"c-{n}" for n in range(5)]


def test_blocking_client_runs_files(one_redis: Server, paths: FilePaths) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    with BatchClient.sync(one_redis.url, pool=POOL) as client:
        progress = client.run_file(str(get_source_path(paths)), str(get_output_path(paths)), deadline=0.5)
    assert (progress.done, progress.failed) == (3, 3)


# Errors in the input


async def test_all_invalid_lines_are_reported_and_nothing_is_submitted(
    one_redis: Server, paths: FilePaths
) -> None:
    kinds = list(INVALID_LINES.items())
    bad = [kinds[n % len(kinds)] for n in range(1000)]
    write_lines(
        get_source_path(paths),
        *(text for pair in zip((b for _, (b, _) in bad), make_lines(1000), strict=True) for text in pair),
    )
    assert len(kinds) > 30
    with pytest.raises(BadInputError) as caught:
        await run_batch_file(one_redis, paths)
    assert [each.line_number for each in caught.value.faulty] == list(range(1, 2000, 2))
    for each, (kind, (_, expected)) in zip(caught.value.faulty, bad, strict=True):
        assert expected in each.message, kind
    assert [each.name for each in get_output_path(paths).parent.iterdir()] == ["in.jsonl"]


async def test_duplicate_custom_id_is_reported_with_both_lines(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(
        get_source_path(paths),
        *make_lines(5),
        make_line("c-1"),
        make_line("c-3", model="other"),
        make_line("c-1"),
    )
    with pytest.raises(BadInputError) as caught:
        await run_batch_file(one_redis, paths)
    faults = [(each.line_number, each.custom_id, each.message) for each in caught.value.faulty]
    assert faults == [
        (6, "c-1", "custom_id: line 2 has the same"),
        (7, "c-3", "custom_id: line 4 has the same"),
        (8, "c-1", "custom_id: line 2 has the same"),
    ]
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths, skip_bad=True)
    assert sorted(read_custom_ids(get_output_path(paths))) == [f"c-{n}" for n in range(5)]
    assert read_custom_ids(get_errors_path(paths)) == ["c-1", "c-3", "c-1"]


async def test_line_that_is_too_long_is_skipped(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), make_line("a"), b"x" * 40_000_000, make_line("b"))
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths, skip_bad=True)
    assert read_custom_ids(get_output_path(paths)) == ["a", "b"]
    assert [each["error"]["line"] for each in read_records(get_errors_path(paths))] == [2]


async def test_byte_order_mark_and_windows_line_ends_are_accepted(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    get_source_path(paths).write_bytes(b"\xef\xbb\xbf" + make_line("a") + b"\r\n" + make_line("b"))
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths)
    assert read_custom_ids(get_output_path(paths)) == ["a", "b"]


async def test_input_without_lines_is_rejected(one_redis: Server, paths: FilePaths) -> None:
    write_lines(get_source_path(paths), b"", b" ")
    with pytest.raises(InputError, match="holds no line"):
        await run_batch_file(one_redis, paths)


async def test_template_turns_lines_of_text_into_requests(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), b'say "hi"', b"", "und ö".encode(), b"\xff")
    template = b'{"model": "m", "messages": [{"role": "user", "content": "Translate: {}"}]}'
    async with fake_dispatcher.answer_continuously():
        options = {"template": template, "field": "messages.0.content", "path": "/v1/x"}
        await run_batch_file(one_redis, paths, skip_bad=True, **options)
    assert read_custom_ids(get_output_path(paths)) == ["line-1", "line-3"]
    bodies = [
        each["response"]["body"]["messages"][0]["content"] for each in read_records(get_output_path(paths))
    ]
    assert bodies == ['Translate: say "hi"', "Translate: und ö"]
    assert read_custom_ids(get_errors_path(paths)) == ["line-4"]
    with pytest.raises(TemplateError, match="has no messages"):
        await run_batch_file(one_redis, paths, template={}, field="messages.0")


# Existing files


async def test_finished_run_is_not_repeated(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(10))
    async with fake_dispatcher.answer_continuously():
        first = await run_batch_file(one_redis, paths)
    output = get_output_path(paths).read_bytes()
    started: list[FileStart] = []
    repeated = await run_file(one_redis.url, NAMES, paths, FileOptions(), on_start=started.append)
    assert (started[0].is_finished, repeated.done, repeated.seconds) == (True, 10, first.seconds)
    assert get_output_path(paths).read_bytes() == output
    write_lines(get_source_path(paths), *make_lines(11))
    with pytest.raises(InputError, match="is not the input"):
        await run_batch_file(one_redis, paths)


@pytest.mark.parametrize("harm", ["removed", "emptied"])
@pytest.mark.parametrize("has_input", [True, False])
async def test_finished_run_without_its_output_is_an_error(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths, harm: str, has_input: bool
) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths)
    if harm == "removed":
        get_output_path(paths).unlink()
    else:
        get_output_path(paths).write_bytes(b"")
    if not has_input:
        get_source_path(paths).unlink()
    with pytest.raises(SinkError, match=r"out.jsonl has 0 bytes.*remove it and .*out.jsonl.journal"):
        await run_batch_file(one_redis, paths)


async def test_files_of_others_are_not_overwritten(one_redis: Server, paths: FilePaths) -> None:
    write_lines(get_source_path(paths), *make_lines(1))
    write_lines(get_output_path(paths), b"precious")
    with pytest.raises(JournalError, match="name another file, or remove it"):
        await run_batch_file(one_redis, paths)
    assert get_output_path(paths).read_bytes() == b"precious\n"
    get_output_path(paths).unlink()
    with pytest.raises(InputError, match="files of their own"):
        await run_batch_file(one_redis, FilePaths(get_source_path(paths), get_source_path(paths)))
    write_lines(Path(f"{get_output_path(paths)}.journal"), b"no journal at all" * 100)
    with pytest.raises(JournalError, match="no journal of a batch file"):
        await run_batch_file(one_redis, paths)


async def test_two_runs_cannot_write_to_one_output(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(10))
    first = asyncio.create_task(run_batch_file(one_redis, paths))
    await wait_until_true(lambda: find_file_keys(one_redis) != set())
    with pytest.raises(JournalError, match="another process works on this output"):
        await run_batch_file(one_redis, paths)
    async with fake_dispatcher.answer_continuously():
        assert (await first).done == 10


# Interrupted runs


async def test_interrupted_run_continues_only_with_the_same_input_and_options(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths, tmp_path: Path
) -> None:
    write_lines(get_source_path(paths), *make_lines(10))
    await interrupt_run(one_redis, paths)
    with pytest.raises(InputError, match="--group"):
        await run_batch_file(one_redis, paths, group="none")
    moved = get_source_path(paths).rename(tmp_path / "moved.jsonl")
    write_lines(get_source_path(paths), *make_lines(11))
    with pytest.raises(InputError, match="is not the input"):
        await run_batch_file(one_redis, paths)
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, FilePaths(moved, get_output_path(paths)))
    assert sorted(read_custom_ids(get_output_path(paths))) == sorted(f"c-{n}" for n in range(10))
    assert len(fake_dispatcher.answered) == 10


async def test_run_with_a_truncated_output_is_an_error(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(40))
    task = asyncio.create_task(run_batch_file(one_redis, paths, max_pending=10))
    await wait_until_true(lambda: bool(find_file_keys(one_redis)))
    await fake_dispatcher.answer_once()
    await wait_until_true(lambda: get_output_path(paths).stat().st_size > 0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    text = get_output_path(paths).read_bytes()
    get_output_path(paths).write_bytes(text[:-1])
    with pytest.raises(SinkError, match="put it back as it was"):
        await run_batch_file(one_redis, paths, max_pending=10)
    get_output_path(paths).write_bytes(text + b'{"id": "torn')
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths, max_pending=10)
    assert sorted(read_custom_ids(get_output_path(paths))) == sorted(f"c-{n}" for n in range(40))


async def test_cancellation_does_not_wait_for_the_validation_of_a_large_file(
    one_redis: Server, paths: FilePaths
) -> None:
    with get_source_path(paths).open("wb") as file:
        for n in range(120_000):
            file.write(make_line(f"c-{n}") + b"\n")
        file.write(b"{}\n")
    started_at = time.process_time()
    with pytest.raises(BadInputError):
        await run_batch_file(one_redis, paths)
    validation_s = time.process_time() - started_at
    task = asyncio.create_task(run_batch_file(one_redis, paths))
    journal = Path(f"{get_output_path(paths)}.journal")
    await wait_until_true(journal.exists)
    started_at = time.process_time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.process_time() - started_at < validation_s / 2
    assert [each.name for each in get_source_path(paths).parent.iterdir()] == ["in.jsonl"]


async def test_lost_requests_are_sent_again(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(20))
    await interrupt_run(one_redis, paths)
    with one_redis.client() as client:
        client.flushall()
    async with fake_dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths)
    assert sorted(read_custom_ids(get_output_path(paths))) == sorted(f"c-{n}" for n in range(20))


async def test_lines_past_their_deadline_are_errors(one_redis: Server, paths: FilePaths) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    progress = await run_batch_file(one_redis, paths, deadline=0.5)
    assert (progress.done, progress.failed) == (3, 3)
    assert {each["error"]["code"] for each in read_records(get_errors_path(paths))} == {"batch_expired"}


async def test_forged_results_are_ignored(
    one_redis: Server, fake_dispatcher: FakeDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *make_lines(3))

    def push_forged_results(request: Request) -> bytes:
        with one_redis.client() as client:
            for forged in (b"", b"[1]", echo(request).replace(request.token.encode(), b"0" * 48)):
                client.lpush(request.results, forged.replace(b"question", b"forged"))
        return echo(request)

    async with fake_dispatcher.answer_continuously(push_forged_results):
        await run_batch_file(one_redis, paths)
    assert len(read_custom_ids(get_output_path(paths))) == 3
    assert b"forged" not in get_output_path(paths).read_bytes()


async def test_input_and_output_can_be_streams(one_redis: Server, fake_dispatcher: FakeDispatcher) -> None:
    output = io.BytesIO()
    source = io.BytesIO(b"\n".join([*make_lines(20), INVALID_LINES["text"][0]]))
    async with fake_dispatcher.answer_continuously(fail_with(ErrorCode.CANCELLED)):
        await run_batch_file(one_redis, FilePaths(source, output), skip_bad=True)
    assert Counter(each["error"]["code"] for each in map(json.loads, output.getvalue().splitlines())) == {
        "batch_cancelled": 20,
        "invalid_json_line": 1,
    }


async def test_interrupted_run_with_streams_cancels_its_requests(one_redis: Server) -> None:
    source = io.BytesIO(b"\n".join(make_lines(20)))
    await interrupt_run(one_redis, FilePaths(source, io.BytesIO()))
    with one_redis.client() as client:
        assert len(client.keys(f"{NAMES.queue_prefix}:cancel:*")) == 20


def test_chunk_that_is_submitted_again_has_the_same_bytes(paths: FilePaths) -> None:
    write_lines(get_source_path(paths), *make_lines(3))
    options = FileOptions()
    job = FileJob(paths, options, NAMES, Path())
    job.start_run()
    found = job.begin_next_chunk(10, 4_000_000_000)
    assert found is not None
    _, first = found
    job.close()
    with sqlite3.connect(f"{get_output_path(paths)}.journal") as journal:  # an hour earlier
        journal.execute("update chunk set created = created - 3600")
    journal.close()
    job = FileJob(paths, options, NAMES, Path())
    job.start_run()
    (chunk,) = job.unconfirmed_chunks()
    rebuilt = job.build_submissions(chunk)
    job.close()
    request = parse_member(first[0].member)
    assert isinstance(request, Request)
    assert [each.member for each in rebuilt] == [
        each.member.replace(b"%d" % request.created, b"%d" % (request.created - 3600)) for each in first
    ]


# A crash between any two steps


class CrashError(Exception):
    pass


class CrashingProxy:
    """Proxy that counts the calls of methods and crashes before or after one of them."""

    def __init__(self, inner: Any, steps: Iterator[int], at: int, when: str) -> None:
        self._inner, self._steps, self._at, self._when = inner, steps, at, when

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "finish" and self._when == "after":
            return found  # the files are closed, so the test must not damage them any more
        if not callable(found) or name in ("progress", "read", "close", "aclose", "arrival"):
            return found

        def call(*arguments: Any) -> Any:
            is_crash_step = next(self._steps) == self._at
            if is_crash_step and self._when == "before":
                raise CrashError
            done = found(*arguments)
            if not is_crash_step:
                return done
            if asyncio.iscoroutine(done):

                async def crash() -> None:
                    await done
                    raise CrashError

                return crash()
            raise CrashError

        return call


async def run_until_crash(server: Server, paths: FilePaths, options: FileOptions, at: int, when: str) -> bool:
    """Run until the crash at this step and return whether it happened. Otherwise the run has ended."""
    job, thread = FileJob(paths, options, NAMES, Path()), ThreadPoolExecutor(1)
    steps = iter(range(1_000_000))
    try:
        if job.start_run().is_finished:
            return False
        queue = LineQueue(server.url, NAMES, job.job_names)
        wrapped: list[Any] = [CrashingProxy(each, steps, at, when) for each in (job, queue)]
        try:
            await FileRun(wrapped[0], wrapped[1], thread, options.max_pending, 2**31).run_to_end(
                lambda _: None
            )
        except CrashError:
            return True
        finally:
            await queue.aclose()
        return False
    finally:
        thread.shutdown(wait=True)
        job.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ordered", [False, True])
async def test_crash_at_any_step_loses_nothing_and_sends_nothing_twice(
    one_redis: Server, fake_dispatcher: FakeDispatcher, tmp_path: Path, seed: int, when: str, *, ordered: bool
) -> None:
    random_generator = random.Random(f"{seed} {when} {ordered}")
    paths = FilePaths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    write_lines(get_source_path(paths), *make_lines(60), INVALID_LINES["text"][0])
    options = FileOptions(ordered=ordered, skip_bad=True, max_pending=16)
    crash_count = 0
    async with fake_dispatcher.answer_continuously(fail_every_seventh):
        while await run_until_crash(
            one_redis, paths, options, random_generator.randrange(25) if crash_count < 20 else -1, when
        ):
            crash_count += 1
            for path in (get_output_path(paths), get_errors_path(paths)):
                if random_generator.random() < 0.5:
                    with path.open("ab") as file:
                        file.write(b'{"id": "torn')
    assert crash_count
    custom_ids = read_custom_ids(get_output_path(paths)) + read_custom_ids(get_errors_path(paths))
    assert Counter(custom_ids) == Counter([*(f"c-{n}" for n in range(60)), None])
    assert Counter(fake_dispatcher.answered).most_common(1)[0][1] == 1
    if ordered:
        numbers = [int(each[2:]) for each in read_custom_ids(get_output_path(paths))]
        assert numbers == sorted(numbers)
