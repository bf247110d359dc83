"""How fast a batch file is checked and enqueued, and in how much memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.batchfiles import line
from tests.queue.servers import server
from tests.support import running, wait_until_sync

LINES = 100_000
FASTEST_PER_S = 5_000
MEMORY_MB = 150
PROGRAM = """
import asyncio, json, resource, sys, time
from pathlib import Path
from dispatcher.client.files import FileOptions, FilePaths, run_file
from dispatcher.queue.keys import QueueNames

url, folder, lines = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
began = time.monotonic()
found = {}

def show(progress):
    if progress.in_queue == lines and not found:
        found["enqueued_s"] = time.monotonic() - began
        found["cpu_s"] = time.process_time()
        found["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(found), flush=True)

names = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
paths = FilePaths(folder / "in.jsonl", folder / "out.jsonl")
asyncio.run(run_file(url, names, paths, FileOptions(max_pending=lines), on_progress=show))
"""


@pytest.mark.long
def test_a_hundred_thousand_lines_are_enqueued_within_bounds(tmp_path: Path) -> None:
    """From the start of the process to the last line in the queue, the check of the whole file included.

    Judged by the CPU of client and server together, as if they had one core: others may be busy there.
    """
    with (tmp_path / "in.jsonl").open("wb") as file:
        for n in range(LINES):
            file.write(line(f"c-{n}", system=f"You are number {n % 50}. " + "Be terse. " * 20) + b"\n")
    told = tmp_path / "told"
    with server("redis", tmp_path / "redis") as queue, told.open("wb") as out:
        command = (sys.executable, "-c", PROGRAM, queue.url, tmp_path, str(LINES))
        with running(*command, stdout=out) as process:
            wait_until_sync(
                lambda: told.read_bytes() or process.poll() is not None, 300, what="all to be enqueued"
            )
        with queue.client() as client:
            used = client.info("cpu")
    found = json.loads(told.read_text())
    server_s = used["used_cpu_sys"] + used["used_cpu_user"]
    rate = LINES / (found["cpu_s"] + server_s)
    cpu = f"CPU of the client {found['cpu_s']:.1f} s, of the server {server_s:.1f} s"
    took = f"{found['enqueued_s']:.1f} s, {cpu}"
    print(f"{LINES:,} lines enqueued: {took} ({rate:,.0f}/s of both), {found['memory_mb']:.0f} MB")
    assert rate >= FASTEST_PER_S
    assert found["memory_mb"] <= MEMORY_MB
