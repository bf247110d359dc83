"""Batch files with real processes: command line client, dispatcher and pool, some of which are killed."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.features.batch_files.files import make_line
from tests.fork_server import forked_process, fresh_process
from tests.scenarios.processes import Dispatcher, Process, Stage, World
from tests.support import wait_until_sync

SLOTS = 128
MEMORY_MB = 150


def write_file(path: Path, count: int, *, system_prompts: int = 1, words: int = 20) -> None:
    """Write lines that alternate between this number of system prompts."""
    prompts = [f"You are number {each}. " + "Be terse. " * words for each in range(system_prompts)]
    with path.open("wb") as file:
        for n in range(count):
            file.write(make_line(f"c-{n}", system=prompts[n % system_prompts]) + b"\n")


class FileSubmission:
    """Command `submit --file`, which may be started several times for the same file."""

    def __init__(self, dispatcher: Dispatcher, folder: Path, *options: str, is_cold: bool = False) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.errors, self.log = folder / "out.errors.jsonl", folder / "submit.log"
        self.peak_mb = 0.0
        self._run: Callable[..., AbstractContextManager[Process]] = (
            fresh_process if is_cold else forked_process
        )
        self._arguments: tuple[str, ...] = (
            "submit",
            "--config",
            str(dispatcher.config),
            "--file",
            str(self.source),
        )
        self._arguments += ("--output", str(self.output), *options)

    @contextmanager
    def start(self) -> Iterator[Process]:
        with self.log.open("ab") as log, self._run("dispatcher", *self._arguments, stderr=log) as process:
            yield process

    def count_written_lines(self) -> int:
        """Return the number of lines in the output files."""
        return sum(path.read_bytes().count(b"\n") for path in (self.output, self.errors) if path.exists())

    def wait_for_lines(self, process: Process, lines: int, within_s: float) -> None:
        """Wait until this number of lines is written or the process has ended."""

        def is_reached() -> bool:
            self._record_peak_memory(process)
            return self.count_written_lines() >= lines or process.poll() is not None

        wait_until_sync(is_reached, within_s, what=f"{lines} lines", every_s=0.05)

    def run_to_end(self, within_s: float) -> int:
        """Run the command until it ends, and return its exit code."""
        with self.start() as process:
            self.wait_for_lines(process, 1 << 40, within_s)
            assert process.returncode is not None
            return int(process.returncode)

    def _record_peak_memory(self, process: Process) -> None:
        """Update `peak_mb` with the peak memory of the process so far."""
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return
        peak_lines = [each for each in status.splitlines() if each.startswith("VmHWM")]
        self.peak_mb = max([self.peak_mb, *(int(each.split()[1]) / 1024 for each in peak_lines)])

    def read_custom_ids(self, path: Path) -> list[str]:
        return [json.loads(each)["custom_id"] for each in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    "lines",
    # Each wait of the test has a limit of its own, and together they may last longer than other tests.
    [
        pytest.param(2000, marks=pytest.mark.timeout(400)),
        pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
    ids=["short", "long"],
)
def test_file_is_finished_without_loss_though_client_and_dispatcher_are_killed(
    stage: Stage, tmp_path: Path, lines: int
) -> None:
    is_long = lines > 2000
    world = stage.world(slots=SLOTS, seconds=0.05)
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=SLOTS, queue={"lease_s": 2}))
    submission = FileSubmission(dispatcher, tmp_path, is_cold=is_long)
    write_file(submission.source, lines)
    started_at = time.monotonic()
    for fraction in (0.15, 0.4, 0.7):
        with submission.start() as client:
            submission.wait_for_lines(client, round(fraction * lines), 60 + lines / 100)
            assert client.poll() is None, submission.log.read_text()
            client.kill()
            client.wait(10)
        if fraction == 0.4:
            dispatcher.kill()
            dispatcher.start()
    assert submission.run_to_end(60 + lines / 100) == 0, submission.log.read_text()
    took = time.monotonic() - started_at
    ids = Counter(submission.read_custom_ids(submission.output))
    assert len(ids) == lines
    assert ids.most_common(1)[0][1] == 1
    assert submission.errors.read_bytes() == b""
    request_ids = world.observed()["gateway"]["ids"]
    # Only requests that ran when the dispatcher was killed run again.
    assert (request_ids["distinct"], request_ids["served_again"] <= SLOTS) == (lines, True)
    assert f"{lines:,} answered, 0 failed" in submission.log.read_text()
    if is_long:
        print(f"{lines} lines in {took:.0f} s through three kills, at most {submission.peak_mb:.0f} MB")
        assert submission.peak_mb <= MEMORY_MB


def measure_prefix_hits(world: World, dispatcher: Dispatcher, folder: Path, group: str) -> float:
    """Submit a file, and return the fraction of prompt blocks that the model servers had cached."""
    folder.mkdir()
    submission = FileSubmission(dispatcher, folder, "--group", group)
    write_file(submission.source, 600, system_prompts=60, words=200)
    world.control(restart=True)
    assert submission.run_to_end(60) == 0, submission.log.read_text()
    prefixes = world.observed()["gateway"]["prefixes"]
    return float(prefixes["hits"] / prefixes["asked"])


def test_lines_with_the_same_system_prompt_hit_the_prefix_cache(stage: Stage, tmp_path: Path) -> None:
    """Ten lines for each of 60 system prompts of 2 kB alternate, and the cache holds about ten prompts."""
    world = stage.world(slots=16, seconds=0.02, prefix_blocks=350)
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=16))
    ungrouped = measure_prefix_hits(world, dispatcher, tmp_path / "none", "none")
    grouped = measure_prefix_hits(world, dispatcher, tmp_path / "prefix", "prefix")
    print(f"prefix hits: {ungrouped:.0%} in the order of the file, {grouped:.0%} grouped")
    assert ungrouped < 0.1
    assert grouped > 0.8


def test_interrupted_client_prints_how_to_continue(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(slots=4, seconds=3.0)
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=4))
    submission = FileSubmission(dispatcher, tmp_path)
    write_file(submission.source, 50)
    with submission.start() as client:
        wait_until_sync(lambda: world.in_flight() > 0, 30, what="some requests to run")
        client.send_signal(signal.SIGINT)
        assert client.wait(20) == 130
    log_text = submission.log.read_text()
    assert "stopped: 0 of 50 are done, 50 are in the queue and go on being answered" in log_text
    assert "The same command goes on from here; nothing is sent twice." in log_text
    assert "Traceback" not in log_text
