"""The README of the kernel follows a request in ten steps, and its example of a feature works."""

from __future__ import annotations

import asyncio
import re

from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import decode_result
from dispatcher.telemetry.metrics import Metrics
from tests.kernel.readme_example import CODE, README, build_hooks
from tests.kernel.scene import HeaderGateway, open_limiter
from tests.memory_queue import MemoryStore
from tests.structure.symbols import find_symbols


def test_plain_request_is_described_in_ten_steps_through_ten_files_of_the_kernel() -> None:
    section = README.partition("## The way of a plain request")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. .*$", section, re.MULTILINE)
    files = {
        name.split(".")[1] for step in steps for name in find_symbols(step) if name.startswith("kernel.")
    }
    assert len(steps) == 10
    assert len(files) <= 10


def test_feature_of_the_readme_adds_a_header_and_counts() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 30
    gateway = HeaderGateway()

    async def main() -> None:
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"),
            gateway,
            open_limiter(),
            Options(RetryPolicy()),
            Journal(Metrics()),
            build_hooks=build_hooks,
        )
        for number, tenant in enumerate(("red", "blue", "red", "")):
            metadata = {"tenant": tenant} if tenant else {}
            store.add_member(encode_member(f"r-{number}", b"{}", 10**10, metadata=metadata), float(number))
        task = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(2)
        results = []
        while (popped := store.pop_result()) is not None:
            results.append(decode_result(popped))
        assert sorted(result.status_code or 0 for result in results) == [200] * 4
        (feature,) = dispatcher.context.hooks.lease_parts
        assert vars(feature)["counts"] == {"red": 2, "blue": 1}
        assert feature.leases == {}
        dispatcher.drain(1.0)
        await task

    run_in_virtual_time(main(), start=2.0)
    tenants = {name: headers.get("x-tenant") for name, headers in gateway.headers.items()}
    assert tenants == {"r-0": "red", "r-1": "blue", "r-2": "red", "r-3": None}
