"""`submit --file`: exit codes and output, for people and for programs."""

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

from dispatcher.features.batch_files.progress import FileProgress, RecentRate, progress_facts
from tests.client.fake_dispatcher import NAMES, FakeDispatcher
from tests.features.batch_files.files import INVALID_LINES, make_changed_line, make_line, write_lines
from tests.fork_server import forked_process
from tests.queue.servers import Server
from tests.support import free_port, wait_until


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(make_line(f"c-{n}") + b"\n" for n in range(3)))
    return path


async def run_submit(server: Server, *arguments: object) -> subprocess.CompletedProcess[str]:
    return await run_submit_with_url(server.url, "--queue", NAMES.queue, *arguments)


async def run_submit_with_url(url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a child process while the event loop answers requests."""
    arguments_of_command = ["submit", "--queue-url", url, *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with forked_process("dispatcher", *arguments_of_command, stdout=out, stderr=err) as child:
            await wait_until(lambda: child.poll() is not None, 60, what="submit to end")
        outputs = []
        for file in (out, err):
            file.seek(0)
            outputs.append(file.read().decode())
    assert child.returncode is not None
    return subprocess.CompletedProcess(arguments_of_command, child.returncode, *outputs)


async def test_finished_file_is_summarized(
    one_redis: Server, fake_dispatcher: FakeDispatcher, source: Path
) -> None:
    output = source.with_name("out.jsonl")
    async with fake_dispatcher.answer_continuously():
        done = await run_submit(one_redis, "--file", source, "--output", output)
    assert (done.returncode, done.stdout) == (0, "")
    first, *_, last = done.stderr.splitlines()  # a slow machine prints progress between them
    assert re.fullmatch(r"in\.jsonl: 3 lines; in the queue line N has the id (file-\w+)-N, .* file=\1", first)
    assert last.startswith("3 answered, 0 failed, 0 tokens in, 0 out, ")
    repeated = await run_submit(one_redis, "--file", source, "--output", output, "--json")
    assert repeated.returncode == 0
    assert {"lines": 3, "done": 3, "failed": 0}.items() <= json.loads(repeated.stdout).items()


@pytest.fixture
def source_with_invalid_line(source: Path) -> Path:
    source.write_bytes(source.read_bytes() + INVALID_LINES["GET"][0])
    return source


async def test_failed_lines_set_the_exit_code_and_are_written_to_a_file(
    one_redis: Server, fake_dispatcher: FakeDispatcher, source_with_invalid_line: Path
) -> None:
    source = source_with_invalid_line
    output, errors = source.with_name("out.jsonl"), source.with_name("err.jsonl")
    arguments_of_command = ("--file", source, "--output", output, "--errors", errors)
    rejected = await run_submit(one_redis, *arguments_of_command)
    assert (rejected.returncode, output.exists()) == (2, False)
    assert rejected.stderr.splitlines() == [
        "in.jsonl:4: method: must be POST, not 'GET'",
        "in.jsonl: 1 bad line: nothing was submitted; --skip-bad runs the others, and these become errors",
    ]
    async with fake_dispatcher.answer_continuously():
        done = await run_submit(one_redis, *arguments_of_command, "--skip-bad")
    assert done.returncode == 1
    assert "3 answered, 1 failed (1 of them a bad line)" in done.stderr
    assert f"what failed is in {errors}" in done.stderr
    assert [json.loads(each)["error"]["code"] for each in errors.read_text().splitlines()] == [
        "invalid_method"
    ]


async def test_plain_text_file_gets_a_hint(one_redis: Server, source: Path) -> None:
    await asyncio.to_thread(source.write_text, "Good morning\nGood night\n")
    done = await run_submit(one_redis, "--file", source, "--output", source.with_name("out.jsonl"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "in.jsonl: 2 bad lines: nothing was submitted; lines of plain text need --template and --field"
    )


def test_rate_is_unknown_during_the_first_seconds() -> None:
    rate = RecentRate()
    assert [rate.update_rate(at, done) for at, done in ((0.0, 0), (1.0, 1), (2.9, 40))] == [None] * 3
    assert rate.update_rate(4.0, 60) == 15.0


def test_progress_says_if_requests_may_not_have_reached_the_queue() -> None:
    known = FileProgress(9, 0, 0, 0, in_queue=9, tokens_in=0, tokens_out=0, seconds=1.0)
    assert progress_facts(known) == ["9 in the queue"]
    assert progress_facts(replace(known, connection_error="away")) == ["9 in the queue or on their way there"]


async def test_unknown_fields_are_reported_once_with_their_number(
    one_redis: Server, fake_dispatcher: FakeDispatcher, source: Path
) -> None:
    lines_with_unknown_fields = [
        make_changed_line(custom_id=f"o-{n}", urll="/v1/x", **({"prio\x1brity": 1} if n else {}))
        for n in range(2)
    ]
    await asyncio.to_thread(write_lines, source, make_line("c-1"), *lines_with_unknown_fields)
    async with fake_dispatcher.answer_continuously():
        done = await run_submit(one_redis, "--file", source, "--output", source.with_name("out.jsonl"))
    assert done.returncode == 0, "the lines are answered nevertheless"
    warning = "fields that no line of a batch file has, and how many lines do: urll (2), prio\\x1brity (1)."
    assert f"in.jsonl: {warning} They are not sent." in done.stderr.splitlines()


async def test_standard_input_is_answered_to_standard_output(
    one_redis: Server, fake_dispatcher: FakeDispatcher
) -> None:
    command = [sys.executable, "-m", "dispatcher", "submit", "--queue-url", one_redis.url]
    command += ["--queue", NAMES.queue, "--file", "-", "--output", "-"]
    async with fake_dispatcher.answer_continuously():
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-1)
        output, error_output = await process.communicate(make_line("a") + b"\n" + make_line("b"))
    assert process.returncode == 0, error_output
    assert sorted(json.loads(each)["custom_id"] for each in output.splitlines()) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give a request, or --file"),
        (("--file", "SOURCE"), "say by --output where the answers go"),
        (("--file", "SOURCE", "--output", "out", "{}"), "give it no request"),
        (("--file", "SOURCE", "--output", "out", "--group", "x"), "--group x: give prefix or none"),
        (("--file", "SOURCE", "--output", "out", "--field", "x"), "give --template and --field together"),
        (
            ("--file", "SOURCE", "--output", "out", "--path", "/v1/x"),
            "each line of a batch file has its own url",
        ),
        (("--file", "SOURCE", "--output", "SOURCE"), "must be files of their own"),
        (("--file", "nothing", "--output", "out"), "nothing: No such file"),
        (("--file", "SOURCE", "--output", "out", "--template", "none", "--field", "x"), "none: No such file"),
        (("--file", "SOURCE", "--output", "no/such/out"), "no/such"),
    ],
)
async def test_wrong_usage_is_an_error(
    one_redis: Server,
    source: Path,
    arguments: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(source.parent)
    done = await run_submit(one_redis, *(str(source) if each == "SOURCE" else each for each in arguments))
    assert done.returncode in (1, 2), done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert [each.name for each in source.parent.iterdir()] == ["in.jsonl"]


async def test_unreachable_redis_is_reported_in_one_line(source: Path, tmp_path: Path) -> None:
    arguments_of_command = ("--file", str(source), "--output", str(tmp_path / "out.jsonl"))
    address = f"127.0.0.1:{free_port()}"
    started_at = time.monotonic()
    await run_submit_with_url(f"redis://{address}", "--no-such-option")
    startup_s, started_at = time.monotonic() - started_at, time.monotonic()
    done = await run_submit_with_url(f"redis://alice:secret@{address}", *arguments_of_command)
    took_s = time.monotonic() - started_at
    assert took_s - startup_s < 10, "a wrong URL must not take ten seconds to report"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Redis cannot be reached: {address}: connection refused"
    assert "Traceback" not in done.stderr


async def test_address_that_never_answers_is_named(source: Path, tmp_path: Path) -> None:
    """A server accepts connections there and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        arguments_of_command = ("--file", str(source), "--output", str(tmp_path / "out.jsonl"))
        done = await run_submit_with_url(f"redis://alice:secret@{address}", *arguments_of_command)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"Redis did not answer in time ({address})",
    )
