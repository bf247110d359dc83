"""Simulations in separate processes return the same figures as in this one, and failures are reported."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.parallel import RunFailedError, RunRequest, run_in_parallel
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.standin.trace import BUNDLED, Trace, load_trace
from tests.support import wait_until_sync

SHORT = Scenario(seconds=20.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(BUNDLED, slots=64)


def list_child_processes() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_parallel_runs_equal_runs_in_one_process(trace: Trace) -> None:
    requests = [
        RunRequest(SHORT, name, 1.0) for name in (PolicyName.NONE, PolicyName.DISPATCHER, PolicyName.CAP)
    ]
    runs: dict[int, Run] = {}
    for progress in run_in_parallel(requests, trace, 2):
        assert all(0 <= done <= 1 for done in progress.done_shares)
        runs |= dict(progress.ended_runs)
    for number, request in enumerate(requests):
        expected = run_scenario(request.scenario, trace, request.policy, sample_interval_s=1.0)
        assert replace(runs[number], meters=()) == replace(expected, meters=())


def test_killed_process_is_reported(trace: Trace) -> None:
    before = list_child_processes()
    progress_iterator = run_in_parallel(
        [RunRequest(Scenario(seconds=900.0), PolicyName.DISPATCHER)], trace, 1
    )
    next(progress_iterator)
    (child,) = set(list_child_processes()) - set(before)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(RunFailedError, match="signal 9 ended it"):
        list(progress_iterator)
    assert set(list_child_processes()) <= set(before)


def test_failed_run_is_reported(trace: Trace) -> None:
    with pytest.raises(RunFailedError, match="ZeroDivisionError"):
        list(run_in_parallel([RunRequest(replace(SHORT, pods=0), PolicyName.NONE)], trace, 1))


def test_closing_the_iterator_ends_the_processes(trace: Trace) -> None:
    before = list_child_processes()
    progress_iterator = run_in_parallel(
        [RunRequest(Scenario(seconds=900.0), PolicyName.DISPATCHER)] * 3, trace, 2
    )
    next(progress_iterator)
    assert len(set(list_child_processes()) - set(before)) == 2
    progress_iterator.close()
    wait_until_sync(lambda: set(list_child_processes()) <= set(before), 10)
