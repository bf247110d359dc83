"""Batch files through real processes: a client by its command line, a dispatcher, a pool, and SIGKILL."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.batchfiles import line
from tests.scenarios.processes import Dispatcher, Process, Stage, World
from tests.support import wait_until_sync
from tests.warm import cold, warm

SLOTS = 128
MEMORY_MB = 150


def write(path: Path, count: int, *, systems: int = 1, words: int = 20) -> None:
    """Lines of so many system prompts, in turn."""
    prompts = [f"You are number {each}. " + "Be terse. " * words for each in range(systems)]
    with path.open("wb") as file:
        for n in range(count):
            file.write(line(f"c-{n}", system=prompts[n % systems]) + b"\n")


class Submitting:
    """`submit --file` on a stage, again and again."""

    def __init__(self, one: Dispatcher, folder: Path, *options: str, is_cold: bool = False) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.errors, self.log = folder / "out.errors.jsonl", folder / "submit.log"
        self.peak_mb = 0.0
        self._run: Callable[..., AbstractContextManager[Process]] = cold if is_cold else warm
        self._arguments: tuple[str, ...] = ("submit", "--config", str(one.config), "--file", str(self.source))
        self._arguments += ("--output", str(self.output), *options)

    @contextmanager
    def started(self) -> Iterator[Process]:
        with self.log.open("ab") as log, self._run("dispatcher", *self._arguments, stderr=log) as process:
            yield process

    def written(self) -> int:
        """Lines that are in the files by now."""
        return sum(path.read_bytes().count(b"\n") for path in (self.output, self.errors) if path.exists())

    def until(self, process: Process, lines: int, within_s: float) -> None:
        """Wait until so many lines are written, or it has ended."""

        def there() -> bool:
            self._look(process)
            return self.written() >= lines or process.poll() is not None

        wait_until_sync(there, within_s, what=f"{lines} lines", every_s=0.05)

    def finish(self, within_s: float) -> int:
        """One run to its end; the exit code."""
        with self.started() as process:
            self.until(process, 1 << 40, within_s)
            assert process.returncode is not None
            return int(process.returncode)

    def _look(self, process: Process) -> None:
        """At its memory."""
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return
        peaks = [each for each in status.splitlines() if each.startswith("VmHWM")]
        self.peak_mb = max([self.peak_mb, *(int(each.split()[1]) / 1024 for each in peaks)])

    def custom_ids(self, path: Path) -> list[str]:
        return [json.loads(each)["custom_id"] for each in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    "lines",
    [2000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
    ids=["short", "long"],
)
def test_a_file_whose_client_and_dispatcher_are_killed_is_finished_without_loss(
    stage: Stage, tmp_path: Path, lines: int
) -> None:
    is_long = lines > 2000
    world = stage.world(slots=SLOTS, seconds=0.05)
    one = stage.dispatcher(stage.settings(world, max_sys=SLOTS, queue={"lease_s": 2}))
    run = Submitting(one, tmp_path, is_cold=is_long)
    write(run.source, lines)
    began = time.monotonic()
    for share in (0.15, 0.4, 0.7):
        with run.started() as client:
            run.until(client, round(share * lines), 60 + lines / 100)
            assert client.poll() is None, run.log.read_text()
            client.kill()
            client.wait(10)
        if share == 0.4:
            one.kill()
            one.start()
    assert run.finish(60 + lines / 100) == 0, run.log.read_text()
    took = time.monotonic() - began
    ids = Counter(run.custom_ids(run.output))
    assert len(ids) == lines
    assert ids.most_common(1)[0][1] == 1
    assert run.errors.read_bytes() == b""
    seen = world.observed()["gateway"]["ids"]
    # What ran when its dispatcher was killed is run again; nothing else is.
    assert (seen["distinct"], seen["served_again"] <= SLOTS) == (lines, True)
    assert f"{lines:,} answered, 0 failed" in run.log.read_text()
    if is_long:
        print(f"{lines} lines in {took:.0f} s through three kills, at most {run.peak_mb:.0f} MB")
        assert run.peak_mb <= MEMORY_MB


def prefix_hits(world: World, one: Dispatcher, folder: Path, group: str) -> float:
    """Share of the prompts' blocks that the model servers still had."""
    folder.mkdir()
    run = Submitting(one, folder, "--group", group)
    write(run.source, 600, systems=60, words=200)
    world.control(restart=True)
    assert run.finish(60) == 0, run.log.read_text()
    told = world.observed()["gateway"]["prefixes"]
    return float(told["hits"] / told["asked"])


def test_lines_of_one_system_prompt_hit_the_prefix_cache(stage: Stage, tmp_path: Path) -> None:
    """Ten lines for each of 60 system prompts of 2 kB, which come in turn, and room for some ten of them."""
    world = stage.world(slots=16, seconds=0.02, prefix_blocks=350)
    one = stage.dispatcher(stage.settings(world, max_sys=16))
    apart = prefix_hits(world, one, tmp_path / "none", "none")
    together = prefix_hits(world, one, tmp_path / "prefix", "prefix")
    print(f"prefix hits: {apart:.0%} in the order of the file, {together:.0%} grouped")
    assert apart < 0.1
    assert together > 0.8


def test_interrupted_it_says_how_to_go_on(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(slots=4, seconds=3.0)
    one = stage.dispatcher(stage.settings(world, max_sys=4))
    run = Submitting(one, tmp_path)
    write(run.source, 50)
    with run.started() as client:
        wait_until_sync(lambda: world.in_flight() > 0, 30, what="some to be at work")
        client.send_signal(signal.SIGINT)
        assert client.wait(20) == 130
    told = run.log.read_text()
    assert "stopped: 0 of 50 are done, 50 are in the queue and go on being answered" in told
    assert "The same command goes on from here; nothing is sent twice." in told
    assert "Traceback" not in told
