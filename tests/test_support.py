"""Tests of the helpers in tests/support.py: they must not hide failures."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.support import (
    free_port,
    require_tool,
    running_process,
    spread_over_parts,
    wait_until,
    wait_until_sync,
)


def test_missing_tool_skips_the_test_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not installed"):
        require_tool("no-such-tool")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-tool is not installed"):
        require_tool("no-such-tool")


def test_installed_tool_is_found() -> None:
    assert require_tool("sh").endswith("/sh")


@pytest.mark.parametrize("name", ["go", "npm"])
def test_tool_that_builds_is_only_for_slow_tests(name: str) -> None:
    """Installed or not, so that no such test gets into `make test` on a machine without the tool."""
    with pytest.raises(pytest.fail.Exception, match="must be marked slow"):
        require_tool(name)


async def test_wait_until_returns_the_value_of_the_condition() -> None:
    ready: list[str] = []
    asyncio.get_running_loop().call_later(0.02, ready.append, "done")

    async def last() -> str | None:
        return ready[-1] if ready else None

    assert await wait_until(lambda: ready) == ["done"]
    assert await wait_until(last) == "done"


async def test_wait_until_fails_at_its_deadline_and_names_the_condition() -> None:
    with pytest.raises(pytest.fail.Exception, match="rain"):
        await wait_until(lambda: False, 0.02, what="rain")
    with pytest.raises(pytest.fail.Exception, match="snow"):
        wait_until_sync(lambda: False, 0.02, what="snow")


def test_every_second_part_begins_with_some_of_the_first() -> None:
    ordered = "".join(spread_over_parts("ABC", "012345678", 4))
    assert (ordered[:3], ordered[3:6], ordered[6:9], ordered[9:]) == ("AB0", "123", "C45", "678")


@pytest.mark.parametrize("part_count", [1, 2, 6, 8])
@pytest.mark.parametrize(("first", "others"), [(0, 1), (1, 0), (2, 5), (7, 0), (30, 3), (11, 900)])
def test_spreading_over_parts_keeps_each_value_once(first: int, others: int, part_count: int) -> None:
    ordered = spread_over_parts(range(first), range(first, first + others), part_count)
    assert sorted(ordered) == list(range(first + others))


def test_free_port_leaves_room_for_the_cluster_bus_port() -> None:
    assert 15_000 <= free_port() < 32_000


def test_running_process_is_killed_if_it_ignores_sigterm() -> None:
    ignore_sigterm = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = f"{ignore_sigterm}; print('up', flush=True); time.sleep(60)"
    with running_process(sys.executable, "-c", program, stop_s=0.2, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    assert process.returncode == -9
