"""The tests' own tools must not pass where they should fail."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.support import free_port, require_tool, running, wait_until, wait_until_sync


def test_missing_tool_skips_on_a_laptop_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not installed"):
        require_tool("no-such-tool")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-tool is not installed"):
        require_tool("no-such-tool")


def test_present_tool_is_found_by_path() -> None:
    assert require_tool("sh").endswith("/sh")


async def test_wait_until_returns_what_it_waited_for() -> None:
    ready: list[str] = []
    asyncio.get_running_loop().call_later(0.02, ready.append, "done")

    async def last() -> str | None:
        return ready[-1] if ready else None

    assert await wait_until(lambda: ready) == ["done"]
    assert await wait_until(last) == "done"


async def test_wait_until_fails_at_its_deadline_and_names_what_was_missing() -> None:
    with pytest.raises(pytest.fail.Exception, match="rain"):
        await wait_until(lambda: False, 0.02, what="rain")
    with pytest.raises(pytest.fail.Exception, match="snow"):
        wait_until_sync(lambda: False, 0.02, what="snow")


def test_free_port_can_be_bound_and_so_can_the_cluster_bus_above_it() -> None:
    assert 15_000 <= free_port() < 32_000


def test_running_stops_its_child_even_one_that_ignores_sigterm() -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stubborn = f"{ignore}; print('up', flush=True); time.sleep(60)"
    with running(sys.executable, "-c", stubborn, stop_s=0.2, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    assert process.returncode == -9
