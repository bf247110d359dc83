"""A stage of real processes for the benchmarks, and what a process costs as the system counts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.queue.servers import server
from tests.scenarios.conftest import default_engine
from tests.scenarios.processes import Dispatcher, Stage

MIB = 2**20


@contextmanager
def stage_in(folder: Path) -> Iterator[Stage]:
    with server(default_engine(), folder / "queue") as running, ExitStack() as stack:
        stage = Stage(folder, running, stack, is_warm=False)  # their memory is their own
        yield stage
        complaints = stage.complaints()
    assert not complaints, "\n".join(complaints)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all its threads'."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    if found := [int(task.read_text().split()[0]) for task in tasks]:
        return sum(found) / 1e9
    times = psutil.Process(pid).cpu_times()  # in hundredths of a second
    return float(times.user + times.system)


def rss_mib(one: Dispatcher) -> float:
    return float(psutil.Process(one.child.pid).memory_info().rss / MIB)
