"""Runs of batch files on a real queue: what is written, and what survives which end."""

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
from dispatcher.client.files import (
    BadInputError,
    FileOptions,
    FilePaths,
    FileStart,
    InputError,
    JournalError,
    SinkError,
    TemplateError,
    run_file,
)
from dispatcher.client.files.job import FileJob
from dispatcher.client.files.line_queue import LineQueue
from dispatcher.client.files.run import FileRun
from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode, encode_failure
from tests.batchfiles import (
    BAD,
    broken_off,
    errors,
    ids,
    left,
    line,
    output,
    read,
    requests,
    run,
    source,
    until,
    write,
)
from tests.client.answering import NAMES, POOL, Answering, echo, refusal
from tests.paths import DOCS
from tests.queue.servers import Server


async def test_every_line_is_answered_once(one_redis: Server, answering: Answering, paths: FilePaths) -> None:
    write(source(paths), *requests(250))
    async with answering.always():
        progress = await run(one_redis, paths)
    assert (progress.lines, progress.done, progress.failed, progress.in_queue) == (250, 250, 0, 0)
    assert sorted(ids(output(paths))) == sorted(f"c-{n}" for n in range(250))
    first = min(read(output(paths)), key=lambda each: int(each["custom_id"][2:]))
    assert first["response"]["body"] == json.loads(line("c-0", system="You are 0."))["body"]
    assert read(errors(paths)) == []
    assert left(one_redis) == set()


async def test_lines_with_one_beginning_are_sent_side_by_side(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(30))
    async with answering.always():
        await run(one_redis, paths)
    numbers = [int(each.rpartition("-")[2]) - 1 for each in answering.served]
    assert numbers == sorted(range(30), key=lambda n: (n % 3, n))


async def test_or_in_the_order_of_the_input(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(30))
    async with answering.always():
        await run(one_redis, paths, group="none", priority=9)
    assert [int(each.rpartition("-")[2]) for each in answering.served] == list(range(1, 31))


def mixed(request: Request) -> bytes:
    """Some fail, by number."""
    number = int(request.id.rpartition("-")[2])
    if number % 7 == 0:
        return encode_failure(request.id, ErrorCode.RETRIES_EXHAUSTED, "no", 502, b"bad", token=request.token)
    return echo(request)


async def test_answers_and_failures_are_apart_and_in_order_where_asked_for(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), b"", *requests(100), b"  ", BAD["text"][0])
    async with answering.always(mixed):
        progress = await run(one_redis, paths, ordered=True, skip_bad=True, max_pending=13)
    numbers = [int(each[2:]) for each in ids(output(paths))]
    assert numbers == [n for n in range(100) if (n + 2) % 7]
    *refused, bad = read(errors(paths))
    assert [int(each["custom_id"][2:]) for each in refused] == [n for n in range(100) if not (n + 2) % 7]
    assert refused[0]["response"]["status_code"] == 502
    assert (bad["custom_id"], bad["response"], bad["error"]["line"]) == (None, None, 103)
    assert (progress.failed, progress.bad) == (len(refused) + 1, 1)
    assert [each.name for each in sorted(output(paths).parent.iterdir())] == [
        "in.jsonl",
        "out.errors.jsonl",
        "out.jsonl",
        "out.jsonl.journal",
    ]


async def test_never_more_are_in_the_queue_than_may_be(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(100))
    most = 0

    def look(request: Request) -> bytes:
        nonlocal most
        with one_redis.client() as client:
            most = max(most, len(client.keys(f"{NAMES.queue_prefix}:active:*")))
        return echo(request)

    async with answering.always(look):
        await run(one_redis, paths, max_pending=20)
    assert 0 < most <= 20


async def test_the_pages_example_runs(
    one_redis: Server, answering: Answering, paths: FilePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "how-to" / "batch-files.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block = block.replace("redis://localhost:6379", one_redis.url)
    write(source(paths), *requests(5))
    monkeypatch.chdir(source(paths).parent)
    names: dict[str, Any] = {"BatchClient": BatchClient}
    exec("async def block():\n" + textwrap.indent(block, "    "), names)
    async with answering.always():
        await asyncio.wait_for(names["block"](), 20)
    assert ids(output(paths)) == [f"c-{n}" for n in range(5)]


def test_programs_without_a_loop_run_files_too(one_redis: Server, paths: FilePaths) -> None:
    write(source(paths), *requests(3))
    with BatchClient.sync(one_redis.url, pool=POOL) as client:
        told = client.run_file(str(source(paths)), str(output(paths)), deadline=0.5)
    assert (told.done, told.failed) == (3, 3)


# What is wrong with the input.


async def test_all_bad_lines_are_named_and_nothing_is_submitted(one_redis: Server, paths: FilePaths) -> None:
    kinds = list(BAD.items())
    bad = [kinds[n % len(kinds)] for n in range(1000)]
    write(
        source(paths),
        *(text for pair in zip((b for _, (b, _) in bad), requests(1000), strict=True) for text in pair),
    )
    assert len(kinds) > 30
    with pytest.raises(BadInputError) as caught:
        await run(one_redis, paths)
    assert [each.line_number for each in caught.value.faulty] == list(range(1, 2000, 2))
    for each, (kind, (_, words)) in zip(caught.value.faulty, bad, strict=True):
        assert words in each.message, kind
    assert [each.name for each in output(paths).parent.iterdir()] == ["in.jsonl"]


async def test_a_custom_id_that_is_there_already_is_named_with_both_lines(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(5), line("c-1"), line("c-3", model="other"), line("c-1"))
    with pytest.raises(BadInputError) as caught:
        await run(one_redis, paths)
    told = [(each.line_number, each.custom_id, each.message) for each in caught.value.faulty]
    assert told == [
        (6, "c-1", "custom_id: line 2 has the same"),
        (7, "c-3", "custom_id: line 4 has the same"),
        (8, "c-1", "custom_id: line 2 has the same"),
    ]
    async with answering.always():
        await run(one_redis, paths, skip_bad=True)
    assert sorted(ids(output(paths))) == [f"c-{n}" for n in range(5)]
    assert ids(errors(paths)) == ["c-1", "c-3", "c-1"]


async def test_a_line_that_is_too_long_is_passed_over_without_being_held(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), line("a"), b"x" * 40_000_000, line("b"))
    async with answering.always():
        await run(one_redis, paths, skip_bad=True)
    assert ids(output(paths)) == ["a", "b"]
    assert [each["error"]["line"] for each in read(errors(paths))] == [2]


async def test_a_byte_order_mark_and_line_ends_of_windows_are_no_fault(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    source(paths).write_bytes(b"\xef\xbb\xbf" + line("a") + b"\r\n" + line("b"))
    async with answering.always():
        await run(one_redis, paths)
    assert ids(output(paths)) == ["a", "b"]


async def test_an_input_without_lines_is_refused(one_redis: Server, paths: FilePaths) -> None:
    write(source(paths), b"", b" ")
    with pytest.raises(InputError, match="holds no line"):
        await run(one_redis, paths)


async def test_a_template_makes_requests_of_text(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), b'say "hi"', b"", "und ö".encode(), b"\xff")
    template = b'{"model": "m", "messages": [{"role": "user", "content": "Translate: {}"}]}'
    async with answering.always():
        options = {"template": template, "field": "messages.0.content", "path": "/v1/x"}
        await run(one_redis, paths, skip_bad=True, **options)
    assert ids(output(paths)) == ["line-1", "line-3"]
    bodies = [each["response"]["body"]["messages"][0]["content"] for each in read(output(paths))]
    assert bodies == ['Translate: say "hi"', "Translate: und ö"]
    assert ids(errors(paths)) == ["line-4"]
    with pytest.raises(TemplateError, match="has no messages"):
        await run(one_redis, paths, template={}, field="messages.0")


# What is already there.


async def test_a_finished_run_does_nothing_when_it_is_called_again(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(10))
    async with answering.always():
        before = await run(one_redis, paths)
    written = output(paths).read_bytes()
    started: list[FileStart] = []
    again = await run_file(one_redis.url, NAMES, paths, FileOptions(), on_start=started.append)
    assert (started[0].is_finished, again.done, again.seconds) == (True, 10, before.seconds)
    assert output(paths).read_bytes() == written
    write(source(paths), *requests(11))
    with pytest.raises(InputError, match="is not the input"):
        await run(one_redis, paths)


async def test_files_that_are_not_its_own_are_left_alone(one_redis: Server, paths: FilePaths) -> None:
    write(source(paths), *requests(1))
    write(output(paths), b"precious")
    with pytest.raises(JournalError, match="name another file, or remove it"):
        await run(one_redis, paths)
    assert output(paths).read_bytes() == b"precious\n"
    output(paths).unlink()
    with pytest.raises(InputError, match="files of their own"):
        await run(one_redis, FilePaths(source(paths), source(paths)))
    write(Path(f"{output(paths)}.journal"), b"no journal at all" * 100)
    with pytest.raises(JournalError, match="no journal of a batch file"):
        await run(one_redis, paths)


async def test_two_processes_do_not_work_on_one_output(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(10))
    first = asyncio.create_task(run(one_redis, paths))
    await until(lambda: left(one_redis) != set())
    with pytest.raises(JournalError, match="another process works on this output"):
        await run(one_redis, paths)
    async with answering.always():
        assert (await first).done == 10


# What is broken off, and goes on.


async def test_a_run_goes_on_with_the_same_input_and_options_only(
    one_redis: Server, answering: Answering, paths: FilePaths, tmp_path: Path
) -> None:
    write(source(paths), *requests(10))
    await broken_off(one_redis, paths)
    with pytest.raises(InputError, match="--group"):
        await run(one_redis, paths, group="none")
    moved = source(paths).rename(tmp_path / "moved.jsonl")
    write(source(paths), *requests(11))
    with pytest.raises(InputError, match="is not the input"):
        await run(one_redis, paths)
    async with answering.always():
        await run(one_redis, FilePaths(moved, output(paths)))
    assert sorted(ids(output(paths))) == sorted(f"c-{n}" for n in range(10))
    assert len(answering.served) == 10


async def test_an_output_that_was_shortened_is_not_gone_on_with(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(40))
    task = asyncio.create_task(run(one_redis, paths, max_pending=10))
    await until(lambda: bool(left(one_redis)))
    await answering.once()
    await until(lambda: output(paths).stat().st_size > 0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    text = output(paths).read_bytes()
    output(paths).write_bytes(text[:-1])
    with pytest.raises(SinkError, match="put it back as it was"):
        await run(one_redis, paths, max_pending=10)
    output(paths).write_bytes(text + b'{"id": "torn')
    async with answering.always():
        await run(one_redis, paths, max_pending=10)
    assert sorted(ids(output(paths))) == sorted(f"c-{n}" for n in range(40))


async def test_ctrl_c_does_not_wait_for_the_check_of_a_large_file(
    one_redis: Server, paths: FilePaths
) -> None:
    with source(paths).open("wb") as file:
        for n in range(120_000):
            file.write(line(f"c-{n}") + b"\n")
        file.write(b"{}\n")
    began = time.process_time()
    with pytest.raises(BadInputError):
        await run(one_redis, paths)
    whole_s = time.process_time() - began
    task = asyncio.create_task(run(one_redis, paths))
    journal = Path(f"{output(paths)}.journal")
    await until(journal.exists)
    began = time.process_time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.process_time() - began < whole_s / 2
    assert [each.name for each in source(paths).parent.iterdir()] == ["in.jsonl"]


async def test_what_redis_has_lost_is_sent_again(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(20))
    await broken_off(one_redis, paths)
    with one_redis.client() as client:
        client.flushall()
    async with answering.always():
        await run(one_redis, paths)
    assert sorted(ids(output(paths))) == sorted(f"c-{n}" for n in range(20))


async def test_lines_whose_time_is_over_are_told_so(one_redis: Server, paths: FilePaths) -> None:
    write(source(paths), *requests(3))
    progress = await run(one_redis, paths, deadline=0.5)
    assert (progress.done, progress.failed) == (3, 3)
    assert {each["error"]["code"] for each in read(errors(paths))} == {"batch_expired"}


async def test_results_of_others_in_the_list_are_passed_over(
    one_redis: Server, answering: Answering, paths: FilePaths
) -> None:
    write(source(paths), *requests(3))

    def forge(request: Request) -> bytes:
        with one_redis.client() as client:
            for forged in (b"", b"[1]", echo(request).replace(request.token.encode(), b"0" * 48)):
                client.lpush(request.results, forged.replace(b"question", b"forged"))
        return echo(request)

    async with answering.always(forge):
        await run(one_redis, paths)
    assert len(ids(output(paths))) == 3
    assert b"forged" not in output(paths).read_bytes()


async def test_a_stream_is_answered_into_a_stream(one_redis: Server, answering: Answering) -> None:
    written = io.BytesIO()
    given = io.BytesIO(b"\n".join([*requests(20), BAD["text"][0]]))
    async with answering.always(refusal(ErrorCode.CANCELLED)):
        await run(one_redis, FilePaths(given, written), skip_bad=True)
    assert Counter(each["error"]["code"] for each in map(json.loads, written.getvalue().splitlines())) == {
        "batch_cancelled": 20,
        "invalid_json_line": 1,
    }


async def test_what_a_stream_would_have_got_is_cancelled_when_it_breaks_off(one_redis: Server) -> None:
    given = io.BytesIO(b"\n".join(requests(20)))
    await broken_off(one_redis, FilePaths(given, io.BytesIO()))
    with one_redis.client() as client:
        assert len(client.keys(f"{NAMES.queue_prefix}:cancel:*")) == 20


def test_a_chunk_that_is_submitted_again_is_byte_for_byte_the_same(paths: FilePaths) -> None:
    write(source(paths), *requests(3))
    options = FileOptions()
    job = FileJob(paths, options, NAMES, Path())
    job.start_run()
    found = job.begin_next_chunk(10, 4_000_000_000)
    assert found is not None
    _, first = found
    job.close()
    with sqlite3.connect(f"{output(paths)}.journal") as journal:  # an hour ago
        journal.execute("update chunk set created = created - 3600")
    journal.close()
    job = FileJob(paths, options, NAMES, Path())
    job.start_run()
    (chunk,) = job.unconfirmed_chunks()
    again = job.build_submissions(chunk)
    job.close()
    now = parse_member(first[0].member)
    assert isinstance(now, Request)
    assert [each.member for each in again] == [
        each.member.replace(b"%d" % now.created, b"%d" % (now.created - 3600)) for each in first
    ]


# A crash between any two steps.


class CrashError(Exception):
    pass


class Crashing:
    """Counts steps, and breaks off before or after one of them."""

    def __init__(self, inner: Any, steps: Iterator[int], at: int, when: str) -> None:
        self._inner, self._steps, self._at, self._when = inner, steps, at, when

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "finish" and self._when == "after":
            return found  # its files are nobody's to tear any more
        if not callable(found) or name in ("progress", "read", "close", "aclose", "arrival"):
            return found

        def act(*arguments: Any) -> Any:
            here = next(self._steps) == self._at
            if here and self._when == "before":
                raise CrashError
            done = found(*arguments)
            if not here:
                return done
            if asyncio.iscoroutine(done):

                async def crash() -> None:
                    await done
                    raise CrashError

                return crash()
            raise CrashError

        return act


async def crashed(server: Server, paths: FilePaths, options: FileOptions, at: int, when: str) -> bool:
    """One process of a run that ends at this step; False: it came to the end of the run."""
    job, thread = FileJob(paths, options, NAMES, Path()), ThreadPoolExecutor(1)
    steps = iter(range(1_000_000))
    try:
        if job.start_run().is_finished:
            return False
        queue = LineQueue(server.url, NAMES, job.job_names)
        wrapped: list[Any] = [Crashing(each, steps, at, when) for each in (job, queue)]
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
async def test_a_crash_at_any_step_loses_nothing_and_sends_nothing_twice(
    one_redis: Server, answering: Answering, tmp_path: Path, seed: int, when: str, *, ordered: bool
) -> None:
    chance = random.Random(f"{seed} {when} {ordered}")
    paths = FilePaths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    write(source(paths), *requests(60), BAD["text"][0])
    options = FileOptions(ordered=ordered, skip_bad=True, max_pending=16)
    crashes = 0
    async with answering.always(mixed):
        while await crashed(one_redis, paths, options, chance.randrange(25) if crashes < 20 else -1, when):
            crashes += 1
            for path in (output(paths), errors(paths)):
                if chance.random() < 0.5:
                    with path.open("ab") as file:
                        file.write(b'{"id": "torn')
    assert crashes
    both = ids(output(paths)) + ids(errors(paths))
    assert Counter(both) == Counter([*(f"c-{n}" for n in range(60)), None])
    assert Counter(answering.served).most_common(1)[0][1] == 1
    if ordered:
        numbers = [int(each[2:]) for each in ids(output(paths))]
        assert numbers == sorted(numbers)
