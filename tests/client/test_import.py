"""What a program loads that only submits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.floors import beside, cpu_of, of_children

BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"redis", "hiredis", "msgspec", "dispatcher"} | set(sys.stdlib_module_names):
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
"""
"""An environment with redis and msgspec, and nothing else."""
MOST = 1.3
"""Of what Redis's own client costs: 115 ms with it, 100 ms without, where this was measured."""


def python(code: str) -> str:
    # What is measured is a second start: compiled once, whatever this environment says.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", BLOCKED + code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def test_the_client_needs_redis_and_msgspec_alone() -> None:
    loaded = python(
        "from dispatcher.client import BatchClient\n"
        "print(BatchClient.sync)\n"
        "print(*[name for name in sys.modules if name.startswith('dispatcher.')])"
    )
    rooms = {name.split(".")[1] for name in loaded.splitlines()[-1].split()}
    assert not any(name.startswith("dispatcher.batched") for name in loaded.split()), "who asks for it"
    assert rooms == {"client", "core", "queue", "telemetry"}, "nothing of a dispatcher's parts"


def test_what_runs_worker_processes_is_loaded_with_the_first_one() -> None:
    loaded = python("from dispatcher.client import batched\nimport sys\nprint(*sys.modules)").split()
    assert "dispatcher.batched.decorator" in loaded
    assert {"pickle", "multiprocessing", "dispatcher.batched.worker_process"} & set(loaded) == set()


@pytest.mark.serial
async def test_the_client_costs_little_more_to_import_than_redis_does() -> None:
    ours = cpu_of(lambda: python("import dispatcher.client"), of_children)
    floor = cpu_of(lambda: python("import redis.asyncio, msgspec"), of_children)
    cost = await beside(ours, floor, pairs=11)
    assert cost.ratio < MOST, cost
