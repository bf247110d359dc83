"""Tests of the fork server: programs that it starts are ordinary processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fork_server import forked_process, run_cli
from tests.support import running_process, wait_until_sync


def test_program_has_its_own_exit_code_and_output(tmp_path: Path) -> None:
    assert "Usage: batch-dispatcher" in run_cli("--help").stdout
    failed = run_cli("run", "--config", tmp_path / "none.yaml")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "none.yaml" in failed.stderr
    assert run_cli("status", "--queue-url", "redis://127.0.0.1:1/0").returncode == 1


def test_program_sees_only_the_environment_that_was_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_DISPATCHER__BUDGET__RESERVE", "7")
    arguments = ("check", "--offline", "--config", os.devnull)
    assert "RESERVE" in run_cli(*arguments).stderr + run_cli(*arguments).stdout
    without = run_cli(*arguments, env={"PATH": os.environ["PATH"]})
    assert "RESERVE" not in without.stderr + without.stdout


def test_signal_ends_the_program_and_is_its_exit_code() -> None:
    with forked_process("dispatcher.lab.standin", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"{")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(5) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL


RUN_IN_THREADS = """
import threading
from tests.fork_server import run_cli
for _ in range(2):
    thread = threading.Thread(target=lambda: print(run_cli("--version").returncode, flush=True))
    thread.start()
    thread.join()
"""


def test_fork_server_outlives_the_thread_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", RUN_IN_THREADS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n0\n", "")


PRINT_NEW_IMPORTS = """
import contextlib, sys
from tests.fork_server import PROGRAMS, import_programs
run = import_programs()[PROGRAMS[0]]
before = set(sys.modules)
for arguments in (["status", "--queue-url", "redis://127.0.0.1:1/0"], ["run", "--config", "none.yaml"]):
    sys.argv = ["batch-dispatcher", *arguments]
    with contextlib.suppress(SystemExit):
        run()
print()
print(len(before & {"dispatcher.service.service", "dispatcher.lab.simulation.report", "kubernetes", "redis"}))
print(sorted(set(sys.modules) - before))
"""


def test_fork_server_imports_all_modules_of_its_programs_before_it_forks() -> None:
    """Otherwise each of hundreds of processes imports them: 0.15 s of CPU for a command that takes 0.05 s."""
    done = subprocess.run(
        [sys.executable, "-c", PRINT_NEW_IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["4", "[]"]


START_AND_SLEEP = """
import subprocess, sys, time
from tests.fork_server import forked_process
with forked_process("dispatcher.lab.standin", stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    print(process.pid, flush=True)
    time.sleep(100)
"""


def test_program_dies_with_the_process_that_started_it() -> None:
    with running_process(sys.executable, "-c", START_AND_SLEEP, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert psutil.pid_exists(pid)
        client.kill()
        wait_until_sync(lambda: not psutil.pid_exists(pid), 10, what="the program to end")
