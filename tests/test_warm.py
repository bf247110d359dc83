"""What is forked from the warm interpreter is a process like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import running, wait_until_sync
from tests.warm import warm, warm_run


def test_it_ends_with_its_own_code_and_words(tmp_path: Path) -> None:
    assert "Usage: batch-dispatcher" in warm_run("--help").stdout
    wrong = warm_run("run", "--config", tmp_path / "none.yaml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "none.yaml" in wrong.stderr
    assert warm_run("status", "--queue-url", "redis://127.0.0.1:1/0").returncode == 1


def test_it_has_the_environment_that_it_is_given_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_DISPATCHER__BUDGET__RESERVE", "7")
    arguments = ("check", "--offline", "--config", os.devnull)
    assert "RESERVE" in warm_run(*arguments).stderr + warm_run(*arguments).stdout
    plain = warm_run(*arguments, env={"PATH": os.environ["PATH"]})
    assert "RESERVE" not in plain.stderr + plain.stdout


def test_a_signal_ends_it_and_is_told() -> None:
    with warm("dispatcher.lab.standin", stdout=subprocess.PIPE) as world:
        assert world.stdout is not None
        assert world.stdout.readline().startswith(b"{")
        with pytest.raises(subprocess.TimeoutExpired):
            world.wait(0.01)
        world.kill()
        assert world.wait(5) == -signal.SIGKILL
        assert world.poll() == -signal.SIGKILL


IN_A_THREAD = """
import threading
from tests.warm import warm_run
for _ in range(2):
    thread = threading.Thread(target=lambda: print(warm_run("version").returncode, flush=True))
    thread.start()
    thread.join()
"""


def test_it_outlives_the_thread_that_asked_first() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n0\n", "")


IMPORTED = """
import contextlib, sys
from tests.warm import PROGRAMS, programs
run = programs()[PROGRAMS[0]]
before = set(sys.modules)
for arguments in (["status", "--queue-url", "redis://127.0.0.1:1/0"], ["run", "--config", "none.yaml"]):
    sys.argv = ["batch-dispatcher", *arguments]
    with contextlib.suppress(SystemExit):
        run()
print()
print(len(before & {"dispatcher.app.service", "dispatcher.lab.simulation.report", "kubernetes", "redis"}))
print(sorted(set(sys.modules) - before))
"""


def test_what_programs_import_when_they_are_asked_is_there_before_it_forks() -> None:
    """Else each of hundreds imports it: 0.15 s of CPU for a verb that takes 0.05."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["4", "[]"]


START = """
import subprocess, sys, time
from tests.warm import warm
with warm("dispatcher.lab.standin", stdout=subprocess.PIPE) as world:
    world.stdout.readline()
    print(world.pid, flush=True)
    time.sleep(100)
"""


def test_it_dies_with_whoever_asked_for_it() -> None:
    with running(sys.executable, "-c", START, stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        assert psutil.pid_exists(pid)
        asking.kill()
        wait_until_sync(lambda: not psutil.pid_exists(pid), 10, what="it to be gone")
