"""Several simulations at once, each in its own process.

On Linux the processes are forked, so that they have the trace already. Each process sends its progress and
finally its result. Ctrl-C goes to all processes of the terminal; the children ignore it, and the parent stops
them. A child notices at its next simulated scrape that its parent was killed.
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

from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.standin.trace import Trace

PROGRESS_INTERVAL_S = 0.2
WAIT_TIMEOUT_S = 1.0
"""Interval at which the caller gets control even if no process has sent anything."""


class RunFailedError(Exception):
    """Error for a process that ended without a result. The message is a complete sentence."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Request for one simulation."""

    scenario: Scenario
    policy: PolicyName
    sample_interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of all simulations: the completed share of each, from 0 to 1, and those that ended since the
    last report, each with its number."""

    done_shares: Sequence[float]
    ended_runs: Sequence[tuple[int, Run]]


def count_cores() -> int:
    """Return the number of processes that can run at once."""
    affinity = getattr(os, "sched_getaffinity", None)  # missing on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def run_in_parallel(
    jobs: Sequence[RunRequest], trace: Trace, processes: int
) -> Generator[Progress, None, None]:
    """Run the simulations in order, at most `processes` at once. Closing the generator stops them.

    Raises RunFailedError.
    """
    context: BaseContext = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    done = [0.0] * len(jobs)
    # Reversed, since `pop` takes from the end.
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number, job = waiting.pop()
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_run_in_process, args=(job, trace, writer, os.getpid()), daemon=True
                )
                with _block_interrupts():
                    process.start()
                # Without this copy the pipe reports its end when the child exits.
                writer.close()
                running[reader] = (number, process)
            # After the timeout the loop yields without news, so that the caller can update its display.
            ended: list[tuple[int, Run]] = []
            for ready in cast("list[Connection]", wait(list(running), WAIT_TIMEOUT_S)):
                number, process = running[ready]
                message = _receive_message(ready, process)
                if isinstance(message, Run):
                    done[number] = 1.0
                    ended.append((number, message))
                    del running[ready]
                    ready.close()
                    process.join()
                else:
                    done[number] = message
            yield Progress(done, ended)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Python loses a signal that arrives right after a fork, while
    hooks of modules run there, because exceptions in these hooks are ignored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive_message(pipe: Connection, process: BaseProcess) -> float | Run:
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code} ended it" if code < 0 else f"it exited with {code}"
        raise RunFailedError(f"a process of the simulation ended before its run: {how}") from None
    if isinstance(message, str):
        raise RunFailedError(f"a simulated run failed:\n{message}")
    return cast("float | Run", message)


def _run_in_process(job: RunRequest, trace: Trace, pipe: Connection, parent: int) -> None:
    """Run one simulation in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent may have handlers of its own, which a forked child inherits.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sent_at = time.monotonic()

    def send_progress(now: float) -> None:
        nonlocal sent_at
        # An orphan has another parent. No cleanup: the exit handlers are those of the parent.
        if os.getppid() != parent:
            os._exit(1)
        if time.monotonic() - sent_at >= PROGRESS_INTERVAL_S:
            sent_at = time.monotonic()
            pipe.send(min(1.0, now / job.scenario.seconds))

    try:
        pipe.send(
            run_scenario(
                job.scenario,
                trace,
                job.policy,
                sample_interval_s=job.sample_interval_s,
                progress=send_progress,
            )
        )
    except BrokenPipeError:
        return  # the parent has closed the pipe
    except Exception:
        # As text, since an exception may not survive pickling.
        pipe.send(traceback.format_exc())
