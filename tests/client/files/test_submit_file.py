"""`submit --file`: exit codes and what is said, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.client.files.progress import FileProgress, RecentRate, progress_facts
from tests.batchfiles import BAD, bent, line, write
from tests.client.answering import NAMES, Answering
from tests.queue.servers import Server
from tests.support import free_port, wait_until
from tests.warm import warm


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(line(f"c-{n}") + b"\n" for n in range(3)))
    return path


async def submit(server: Server, *arguments: object) -> subprocess.CompletedProcess[str]:
    return await submit_to(server.url, "--queue", NAMES.queue, *arguments)


async def submit_to(url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """While the loop goes on, in which somebody answers."""
    given = ["submit", "--queue-url", url, *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with warm("dispatcher", *given, stdout=out, stderr=err) as child:
            await wait_until(lambda: child.poll() is not None, 60, what="submit to end")
        told = []
        for file in (out, err):
            file.seek(0)
            told.append(file.read().decode())
    assert child.returncode is not None
    return subprocess.CompletedProcess(given, child.returncode, *told)


async def test_a_finished_file_is_summed_up(one_redis: Server, answering: Answering, source: Path) -> None:
    output = source.with_name("out.jsonl")
    async with answering.always():
        done = await submit(one_redis, "--file", source, "--output", output)
    assert (done.returncode, done.stdout) == (0, "")
    first, last = done.stderr.splitlines()
    assert re.fullmatch(r"in\.jsonl: 3 lines; in the queue line N has the id (file-\w+)-N, .* file=\1", first)
    assert last.startswith("3 answered, 0 failed, 0 tokens in, 0 out, ")
    again = await submit(one_redis, "--file", source, "--output", output, "--json")
    assert again.returncode == 0
    assert {"lines": 3, "done": 3, "failed": 0}.items() <= json.loads(again.stdout).items()


@pytest.fixture
def with_a_bad_line(source: Path) -> Path:
    source.write_bytes(source.read_bytes() + BAD["GET"][0])
    return source


async def test_failed_lines_are_an_exit_code_and_a_file(
    one_redis: Server, answering: Answering, with_a_bad_line: Path
) -> None:
    source = with_a_bad_line
    output, errors = source.with_name("out.jsonl"), source.with_name("err.jsonl")
    given = ("--file", source, "--output", output, "--errors", errors)
    refused = await submit(one_redis, *given)
    assert (refused.returncode, output.exists()) == (2, False)
    assert refused.stderr.splitlines() == [
        "in.jsonl:4: method: must be POST, not 'GET'",
        "in.jsonl: 1 bad line: nothing was submitted; --skip-bad runs the others, and these become errors",
    ]
    async with answering.always():
        done = await submit(one_redis, *given, "--skip-bad")
    assert done.returncode == 1
    assert "3 answered, 1 failed (1 of them a bad line)" in done.stderr
    assert f"what failed is in {errors}" in done.stderr
    assert [json.loads(each)["error"]["code"] for each in errors.read_text().splitlines()] == [
        "invalid_method"
    ]


async def test_a_file_of_plain_text_is_told_what_it_needs(one_redis: Server, source: Path) -> None:
    await asyncio.to_thread(source.write_text, "Good morning\nGood night\n")
    told = await submit(one_redis, "--file", source, "--output", source.with_name("out.jsonl"))
    assert told.returncode == 2
    assert told.stderr.splitlines()[-1] == (
        "in.jsonl: 2 bad lines: nothing was submitted; lines of plain text need --template and --field"
    )


def test_the_first_answers_say_nothing_of_the_time_that_is_left() -> None:
    rate = RecentRate()
    assert [rate.update_rate(at, done) for at, done in ((0.0, 0), (1.0, 1), (2.9, 40))] == [None] * 3
    assert rate.update_rate(4.0, 60) == 15.0


def test_what_may_not_have_reached_the_queue_is_not_said_to_be_there() -> None:
    known = FileProgress(9, 0, 0, 0, in_queue=9, tokens_in=0, tokens_out=0, seconds=1.0)
    assert progress_facts(known) == ["9 in the queue"]
    assert progress_facts(replace(known, connection_error="away")) == ["9 in the queue or on their way there"]


async def test_fields_that_mean_nothing_are_named_once(
    one_redis: Server, answering: Answering, source: Path
) -> None:
    odd = [bent(custom_id=f"o-{n}", urll="/v1/x", **({"prio\x1brity": 1} if n else {})) for n in range(2)]
    await asyncio.to_thread(write, source, line("c-1"), *odd)
    async with answering.always():
        done = await submit(one_redis, "--file", source, "--output", source.with_name("out.jsonl"))
    assert done.returncode == 0, "they are answered all the same"
    said = "fields that no line of a batch file has, and how many lines do: urll (2), prio\\x1brity (1)."
    assert f"in.jsonl: {said} They are not sent." in done.stderr.splitlines()


async def test_standard_input_goes_to_standard_output(one_redis: Server, answering: Answering) -> None:
    command = [sys.executable, "-m", "dispatcher", "submit", "--queue-url", one_redis.url]
    command += ["--queue", NAMES.queue, "--file", "-", "--output", "-"]
    async with answering.always():
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-1)
        told, said = await process.communicate(line("a") + b"\n" + line("b"))
    assert process.returncode == 0, said
    assert sorted(json.loads(each)["custom_id"] for each in told.splitlines()) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give a request, or --file"),
        (("--file", "SOURCE"), "say by --output where the answers go"),
        (("--file", "SOURCE", "--output", "out", "{}"), "give it no request"),
        (("--file", "SOURCE", "--output", "out", "--group", "x"), "--group x: give prefix or none"),
        (("--file", "SOURCE", "--output", "out", "--field", "x"), "give --template and --field together"),
        (
            ("--file", "SOURCE", "--output", "out", "--endpoint", "/v1/x"),
            "each line of a batch file has its own url",
        ),
        (("--file", "SOURCE", "--output", "SOURCE"), "must be files of their own"),
        (("--file", "nothing", "--output", "out"), "nothing: No such file"),
        (("--file", "SOURCE", "--output", "out", "--template", "none", "--field", "x"), "none: No such file"),
        (("--file", "SOURCE", "--output", "no/such/out"), "no/such"),
    ],
)
async def test_wrong_use_is_told(
    one_redis: Server, source: Path, arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    done = await submit(one_redis, *(str(source) if each == "SOURCE" else each for each in arguments))
    assert done.returncode in (1, 2), done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert [each.name for each in source.parent.iterdir()] == ["in.jsonl"]


async def test_without_redis_it_says_so_in_a_line(source: Path, tmp_path: Path) -> None:
    given = ("--file", str(source), "--output", str(tmp_path / "out.jsonl"))
    place = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    await submit_to(f"redis://{place}", "--no-such-option")
    beginning_s, began = time.monotonic() - began, time.monotonic()
    done = await submit_to(f"redis://alice:secret@{place}", *given)
    took_s = time.monotonic() - began
    assert took_s - beginning_s < 6, "a slip in the URL: nobody waits ten seconds for it"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Redis cannot be reached: {place}: connection refused"
    assert "Traceback" not in done.stderr


async def test_an_address_that_never_answers_is_named(source: Path, tmp_path: Path) -> None:
    """Something listens there, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        given = ("--file", str(source), "--output", str(tmp_path / "out.jsonl"))
        done = await submit_to(f"redis://alice:secret@{place}", *given)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"Redis did not answer in time ({place})",
    )
