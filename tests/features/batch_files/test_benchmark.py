"""Rate and memory with which a batch file is checked and enqueued."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.features.batch_files.files import make_line
from tests.queue.servers import server
from tests.support import running_process, wait_until_sync

LINES = 100_000
MIN_LINES_PER_S = 5_000
MEMORY_MB = 150
PROGRAM = """
import asyncio, json, resource, sys, time
from pathlib import Path
from dispatcher.features.batch_files.run_options import FileOptions, FilePaths
from dispatcher.features.batch_files.run import run_file
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
def test_hundred_thousand_lines_are_enqueued_fast_and_with_little_memory(tmp_path: Path) -> None:
    """Measure from the start of the process to the last line in the queue, including the check of the whole
    file.

    The rate is computed from the CPU time of client and server, since the machine may be busy.
    """
    with (tmp_path / "in.jsonl").open("wb") as file:
        for n in range(LINES):
            file.write(make_line(f"c-{n}", system=f"You are number {n % 50}. " + "Be terse. " * 20) + b"\n")
    output_path = tmp_path / "output"
    with server("redis", tmp_path / "redis") as queue, output_path.open("wb") as out:
        command = (sys.executable, "-c", PROGRAM, queue.url, tmp_path, str(LINES))
        with running_process(*command, stdout=out) as process:
            wait_until_sync(
                lambda: output_path.read_bytes() or process.poll() is not None,
                300,
                what="all lines to be enqueued",
            )
        with queue.client() as client:
            server_cpu = client.info("cpu")
    figures = json.loads(output_path.read_text())
    server_s = server_cpu["used_cpu_sys"] + server_cpu["used_cpu_user"]
    rate = LINES / (figures["cpu_s"] + server_s)
    cpu = f"CPU of the client {figures['cpu_s']:.1f} s, of the server {server_s:.1f} s"
    summary = f"{figures['enqueued_s']:.1f} s, {cpu}"
    print(f"{LINES:,} lines enqueued: {summary} ({rate:,.0f}/s of both), {figures['memory_mb']:.0f} MB")
    assert rate >= MIN_LINES_PER_S
    assert figures["memory_mb"] <= MEMORY_MB
