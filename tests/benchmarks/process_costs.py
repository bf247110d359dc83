"""Stage of real processes for the benchmarks, and CPU time and memory of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.queue.servers import server
from tests.scenarios.fixtures import default_engine
from tests.scenarios.processes import Dispatcher, Stage

MIB = 2**20


@contextmanager
def make_stage(folder: Path) -> Iterator[Stage]:
    with server(default_engine(), folder / "queue") as queue_server, ExitStack() as stack:
        stage = Stage(folder, queue_server, stack, is_forked=False)  # forked processes would share memory
        yield stage
        defects = stage.find_defects()
    assert not defects, "\n".join(defects)


def read_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    if found := [int(task.read_text().split()[0]) for task in tasks]:
        return sum(found) / 1e9
    times = psutil.Process(pid).cpu_times()  # in hundredths of a second
    return float(times.user + times.system)


def read_rss_mib(dispatcher: Dispatcher) -> float:
    return float(psutil.Process(dispatcher.child.pid).memory_info().rss / MIB)
