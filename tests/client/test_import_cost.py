"""Modules and function calls that the import of the client costs."""

from __future__ import annotations

import sys

from tests.function_calls import count_calls, run_python

BLOCK_OTHER_PACKAGES = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"redis", "hiredis", "msgspec", "dispatcher"} | set(sys.stdlib_module_names):
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
"""
"""Code that makes all third-party packages but redis and msgspec unavailable."""
MAX_RATIO = 1.32 if sys.version_info < (3, 12) else 1.4
"""Largest ratio to the function calls of the import of the client of Redis. Measured: 1.29 with Python 3.11
(167,540 and 129,420), 1.35 with 3.12, 1.36 with 3.13."""


def test_client_needs_only_redis_and_msgspec() -> None:
    loaded = run_python(
        BLOCK_OTHER_PACKAGES + "from dispatcher.client import BatchClient\n"
        "print(BatchClient.sync)\n"
        "print(*[name for name in sys.modules if name.startswith('dispatcher.')])"
    )
    packages = {name.split(".")[1] for name in loaded.splitlines()[-1].split()}
    assert not any(name.startswith("dispatcher.batched") for name in loaded.split()), "loaded only on use"
    allowed = {"client", "common", "features", "queue", "requests", "telemetry", "wire_format"}
    assert packages == allowed, "no part of the dispatcher itself"
    loaded_on_use = {"batch_files", "named_streams", "sequences.client"}
    assert not {f"dispatcher.features.{name}" for name in loaded_on_use} & set(loaded.split())


def test_worker_process_modules_are_not_loaded_by_the_import() -> None:
    loaded = run_python(
        BLOCK_OTHER_PACKAGES + "from dispatcher.client import batched\nimport sys\nprint(*sys.modules)"
    ).split()
    assert "dispatcher.batched.decorator" in loaded
    assert {"pickle", "multiprocessing", "dispatcher.batched.worker_process"} & set(loaded) == set()


def test_import_costs_little_more_than_the_redis_client() -> None:
    redis_client = count_calls("import redis.asyncio, msgspec", BLOCK_OTHER_PACKAGES)
    assert count_calls("import dispatcher.client", BLOCK_OTHER_PACKAGES) < MAX_RATIO * redis_client
