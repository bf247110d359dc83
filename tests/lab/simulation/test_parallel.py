"""Runs in processes of their own: the same figures as in this one, and ends that are told."""

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


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_runs_are_those_of_one_process(trace: Trace) -> None:
    wanted = [
        RunRequest(SHORT, name, 1.0) for name in (PolicyName.NONE, PolicyName.DISPATCHER, PolicyName.CAP)
    ]
    runs: dict[int, Run] = {}
    for progress in run_in_parallel(wanted, trace, 2):
        assert all(0 <= done <= 1 for done in progress.done_shares)
        runs |= dict(progress.ended_runs)
    for number, each in enumerate(wanted):
        here = run_scenario(each.scenario, trace, each.policy, sample_interval_s=1.0)
        assert replace(runs[number], meters=()) == replace(here, meters=())


def test_process_that_is_killed_is_told(trace: Trace) -> None:
    before = children()
    playing = run_in_parallel([RunRequest(Scenario(seconds=900.0), PolicyName.DISPATCHER)], trace, 1)
    next(playing)
    (child,) = set(children()) - set(before)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(RunFailedError, match="signal 9 ended it"):
        list(playing)
    assert set(children()) <= set(before)


def test_run_that_fails_is_told(trace: Trace) -> None:
    with pytest.raises(RunFailedError, match="ZeroDivisionError"):
        list(run_in_parallel([RunRequest(replace(SHORT, pods=0), PolicyName.NONE)], trace, 1))


def test_who_stops_asking_ends_the_processes(trace: Trace) -> None:
    before = children()
    playing = run_in_parallel([RunRequest(Scenario(seconds=900.0), PolicyName.DISPATCHER)] * 3, trace, 2)
    next(playing)
    assert len(set(children()) - set(before)) == 2
    playing.close()
    wait_until_sync(lambda: set(children()) <= set(before), 10)
