"""The programs of docs/examples: what each needs, how it is built, and one that runs.

A build is kept in build/examples, and made anew where its sources have changed.
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
from tests.support import missing, require_tool, running, wait_until_sync

EXAMPLES = DOCS / "examples"
BUILT = ROOT / "build" / "examples"


def python_program() -> list[str]:
    return [sys.executable, str(EXAMPLES / "python" / "submit.py")]


def javascript_program() -> list[str]:
    """npm installs what the lock names, once: it is asked again where the lock is another."""
    node, npm, folder = require_tool("node"), require_tool("npm"), BUILT / "javascript"
    source, locked = EXAMPLES / "javascript", folder / "package-lock.json"
    with _alone("javascript"):
        folder.mkdir(exist_ok=True)
        lock = (source / "package-lock.json").read_bytes()
        if not (folder / "installed").exists() or (folder / "installed").read_bytes() != lock:
            shutil.copy(source / "package.json", folder)
            locked.write_bytes(lock)
            _fetch([npm, "ci", "--no-audit", "--no-fund"], folder)
            (folder / "installed").write_bytes(lock)
        shutil.copy(source / "submit.js", folder)
    return [node, str(folder / "submit.js")]


def go_program() -> list[str]:
    """Go's own cache spares what has not changed."""
    go, program = require_tool("go"), BUILT / "submit"
    with _alone("go"):
        _fetch([go, "mod", "download"], EXAMPLES / "go")
        build = [go, "build", "-buildvcs=false", "-mod=readonly", "-o", str(program), "."]
        done = _run(build, EXAMPLES / "go")
        assert done.returncode == 0, done.stderr
    return [str(program)]


PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "python": python_program,
    "javascript": javascript_program,
    "go": go_program,
}


@dataclass
class Running:
    """A program that submits and waits; what it printed so far."""

    process: subprocess.Popen[bytes]
    folder: Path

    def printed(self) -> dict[str, dict[str, Any]]:
        """Results by id: each was printed once."""
        lines = (self.folder / "out").read_bytes().split(b"\n")[:-1]
        results = [json.loads(line) for line in lines]
        by_id = {result["id"]: result for result in results}
        assert len(by_id) == len(results), "a result was printed twice"
        return by_id

    def told(self) -> str:
        return (self.folder / "err").read_text()

    def end(self, within_s: float = 30.0) -> int:
        """Its exit code."""
        wait_until_sync(lambda: self.process.poll() is not None, within_s, what=f"an end; {self.told()}")
        return int(self.process.returncode)


@contextmanager
def submitting(
    command: list[str], folder: Path, url: str, queue: str, bodies: list[str], deadline_s: int = 600
) -> Iterator[Running]:
    (folder / "in").write_text("".join(f"{body}\n" for body in bodies))
    with (
        (folder / "in").open("rb") as given,
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        running(
            *command,
            queue,
            str(deadline_s),
            stdin=given,
            stdout=out,
            stderr=err,
            env=os.environ | {"REDIS_URL": url},
        ) as process,
    ):
        yield Running(process, folder)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process of the tests builds; others wait for it."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(command: list[str], folder: Path) -> None:
    """Packages, from where they are to be had."""
    done = _run(command, folder)
    if done.returncode != 0:
        missing(
            f"{' '.join(command)}: {done.stderr.strip()[-500:]}: what the example imports is not installed"
        )


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
