"""The programs of docs/examples: how each is built and run.

Builds are kept in build/examples and repeated if their sources have changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import DOCS, ROOT
from tests.support import require_tool, running_process, skip_or_fail, wait_until_sync

EXAMPLES_DIR = DOCS / "examples"
BUILD_DIR = ROOT / "build" / "examples"


def build_python_program() -> list[str]:
    return [sys.executable, str(EXAMPLES_DIR / "python" / "submit.py")]


def build_javascript_program() -> list[str]:
    """Install the packages of the lock file with npm, unless they are installed already."""
    node, npm, folder = require_tool("node"), require_tool("npm"), BUILD_DIR / "javascript"
    source, installed_lock = EXAMPLES_DIR / "javascript", folder / "package-lock.json"
    with _lock_build("javascript"):
        folder.mkdir(exist_ok=True)
        lock = (source / "package-lock.json").read_bytes()
        if not (folder / "installed").exists() or (folder / "installed").read_bytes() != lock:
            shutil.copy(source / "package.json", folder)
            installed_lock.write_bytes(lock)
            _fetch_packages([npm, "ci", "--no-audit", "--no-fund"], folder)
            (folder / "installed").write_bytes(lock)
        shutil.copy(source / "submit.js", folder)
    return [node, str(folder / "submit.js")]


def build_go_program() -> list[str]:
    """Build the program. Go's own cache avoids unnecessary work."""
    go, program = require_tool("go"), BUILD_DIR / "submit"
    with _lock_build("go"):
        _fetch_packages([go, "mod", "download"], EXAMPLES_DIR / "go")
        build = [go, "build", "-buildvcs=false", "-mod=readonly", "-o", str(program), "."]
        completed = _run(build, EXAMPLES_DIR / "go")
        assert completed.returncode == 0, completed.stderr
    return [str(program)]


PROGRAM_BUILDERS: dict[str, Callable[[], list[str]]] = {
    "python": build_python_program,
    "javascript": build_javascript_program,
    "go": build_go_program,
}


@dataclass
class RunningProgram:
    """Running program, which submits requests and waits for results, and its output so far."""

    process: subprocess.Popen[bytes]
    folder: Path

    def read_results(self) -> dict[str, dict[str, Any]]:
        """Return the printed results by id. Each must have been printed once."""
        lines = (self.folder / "out").read_bytes().split(b"\n")[:-1]
        results = [json.loads(line) for line in lines]
        by_id = {result["id"]: result for result in results}
        assert len(by_id) == len(results), "a result was printed twice"
        return by_id

    def read_stderr(self) -> str:
        return (self.folder / "err").read_text()

    def wait_for_exit(self, within_s: float = 30.0) -> int:
        """Wait until the program ends, and return its exit code."""
        wait_until_sync(
            lambda: self.process.poll() is not None,
            within_s,
            what=f"the program to end; {self.read_stderr()}",
        )
        return int(self.process.returncode)


@contextmanager
def run_program(
    command: list[str], folder: Path, url: str, queue: str, bodies: list[str], deadline_s: int = 600
) -> Iterator[RunningProgram]:
    (folder / "in").write_text("".join(f"{body}\n" for body in bodies))
    with (
        (folder / "in").open("rb") as stdin,
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        running_process(
            *command,
            queue,
            str(deadline_s),
            stdin=stdin,
            stdout=out,
            stderr=err,
            env=os.environ | {"REDIS_URL": url},
        ) as process,
    ):
        yield RunningProgram(process, folder)


@contextmanager
def _lock_build(name: str) -> Iterator[None]:
    """Let only one test process build at a time."""
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    with (BUILD_DIR / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_packages(command: list[str], folder: Path) -> None:
    """Download packages. Skip the test, or fail it if CI=true, if that is not possible."""
    completed = _run(command, folder)
    if completed.returncode != 0:
        skip_or_fail(f"{' '.join(command)}: {completed.stderr.strip()[-500:]}: its imports are not installed")


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=500)
