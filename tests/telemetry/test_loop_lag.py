"""The watch on a real event loop, and what the control group tells of a CPU limit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from dispatcher.core.loop_lag import STALL_S
from dispatcher.telemetry.loop_lag import CpuLimit, LoopLagWatch, read_cpu_limit
from tests.support import wait_until

STAT = "nr_periods 400\nnr_throttled 300\n"


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "self"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "groups"


@pytest.mark.parametrize("inside", [False, True], ids=["by its name", "as the root of its container"])
def test_limit_of_version_2(groups: Path, own: Path, inside: bool) -> None:
    own.write_text("0::/kubepods/pod1\n")
    folder = groups if inside else groups / "kubepods" / "pod1"
    group(folder, cpu__stat=f"usage_usec 7\n{STAT}throttled_usec 9\n", cpu__max="25000 100000\n")
    assert read_cpu_limit(groups, own) == CpuLimit(0.25, 400, 300)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("inside", [False, True], ids=["by its name", "as the root of its container"])
def test_limit_of_version_1(groups: Path, own: Path, mount: str, inside: bool) -> None:
    own.write_text(f"5:memory:/pod1\n4:{mount}:/pod1\n1:name=systemd:/\n0::/\n")
    group(
        groups / mount / ("" if inside else "pod1"),
        cpu__stat=f"{STAT}throttled_time 9\n",
        cpu__cfs_quota_us="50000\n",
        cpu__cfs_period_us="100000\n",
    )
    assert read_cpu_limit(groups, own) == CpuLimit(0.5, 400, 300)


def test_no_limit_is_told_from_nothing_known(groups: Path, own: Path) -> None:
    assert read_cpu_limit(groups, own) is None
    own.write_text("0::/\n")
    assert read_cpu_limit(groups, own) is None
    group(groups, cpu__stat="usage_usec 7\n")  # the root of a machine
    assert read_cpu_limit(groups, own) is None
    group(groups, cpu__stat=STAT, cpu__max="max 100000\n")
    assert read_cpu_limit(groups, own) == CpuLimit(None, 400, 300)


def test_what_is_read_here_is_read_without_an_error() -> None:
    limit = read_cpu_limit()
    assert limit is None or limit.period_count >= limit.throttled_count >= 0


async def test_stall_of_the_loop_is_told_once_with_its_length() -> None:
    told: list[str | None] = []
    watch = LoopLagWatch(lambda: told.append(watch.problem), check_interval_s=0.01)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.watch_loop())
        await wait_until(lambda: watch.lag.longest_lag_s > 0)
        assert watch.problem is None
        time.sleep(STALL_S + 0.1)  # noqa: ASYNC251 - this is the stall
        await wait_until(lambda: bool(told))
        task.cancel()
    [sentence] = told
    assert sentence is not None
    assert "too little CPU" in sentence
    assert f"at worst by {watch.lag.longest_lag_s:.1f} s" in sentence
    assert STALL_S <= watch.lag.longest_lag_s < watch.lag.total_lag_s + 1e-6
