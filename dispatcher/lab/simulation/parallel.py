"""Several runs at once, each in a process of its own.

A process is forked on Linux, so that the trace is there already. It sends how far it is, and then its run.
Ctrl-C reaches the whole terminal: the processes leave it to their parent, which ends them; a parent that was
killed is noticed at the next simulated scrape.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import cast

from dispatcher.lab.simulation.experiment import Name, Run, play
from dispatcher.lab.simulation.scenario import Setting
from dispatcher.lab.standin.trace import Trace

TOLD_EACH_S = 0.2
LOOK_S = 1.0
"""While nothing is told, whoever waits is called that often."""


class RunFailedError(Exception):
    """A process ended without its run; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run that is wanted."""

    setting: Setting
    policy: Name
    moment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Advance:
    """Something has happened, or LOOK_S has passed: how much of each job is done, from 0 to 1, and the runs
    that have ended since the last time, by the job's number."""

    done: Sequence[float]
    ended: Sequence[tuple[int, Run]]


def cores() -> int:
    """How many processes can run at once."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def play_all(jobs: Sequence[Wanted], trace: Trace, processes: int) -> Generator[Advance, None, None]:
    """Play them in their order, as many at once as there are processes. Closed, it ends them.

    Raises RunFailedError.
    """
    context: BaseContext = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    done = [0.0] * len(jobs)
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number, job = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_work, args=(job, trace, theirs, os.getpid()), daemon=True
                )
                with _uninterrupted():
                    process.start()
                theirs.close()
                running[ours] = (number, process)
            ended: list[tuple[int, Run]] = []
            for ready in cast("list[Connection]", wait(list(running), LOOK_S)):
                number, process = running[ready]
                told = _heard(ready, process)
                if isinstance(told, Run):
                    done[number] = 1.0
                    ended.append((number, told))
                    del running[ready]
                    ready.close()
                    process.join()
                else:
                    done[number] = told
            yield Advance(done, ended)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C comes after this. Python loses one that comes right behind a fork, where what modules have done
    there runs: its exceptions are ignored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heard(pipe: Connection, process: BaseProcess) -> float | Run:
    try:
        told = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code} ended it" if code < 0 else f"it exited with {code}"
        raise RunFailedError(f"a process of the simulation ended before its run: {how}") from None
    if isinstance(told, str):
        raise RunFailedError(f"a simulated run failed:\n{told}")
    return cast("float | Run", told)


def _work(job: Wanted, trace: Trace, pipe: Connection, parent: int) -> None:
    """In the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    told_at = time.monotonic()

    def progress(now: float) -> None:
        nonlocal told_at
        if os.getppid() != parent:
            os._exit(1)
        if time.monotonic() - told_at >= TOLD_EACH_S:
            told_at = time.monotonic()
            pipe.send(min(1.0, now / job.setting.seconds))

    try:
        pipe.send(play(job.setting, trace, job.policy, moment_s=job.moment_s, progress=progress))
    except BrokenPipeError:
        return  # nobody listens any more
    except Exception:
        pipe.send(traceback.format_exc())
