"""The watch of the event loop lag on a real loop, and reading the CPU limit of a control group."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from dispatcher.common.loop_lag import STALL_S
from dispatcher.telemetry.loop_lag import CpuLimit, LoopLagWatch, read_cpu_limit
from tests.support import wait_until

STAT = "nr_periods 400\nnr_throttled 300\n"


def write_files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def self_file(tmp_path: Path) -> Path:
    return tmp_path / "self"


@pytest.fixture
def cgroup_root(tmp_path: Path) -> Path:
    return tmp_path / "groups"


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["by its name", "as the root of its namespace"])
def test_limit_of_cgroup_version_2_is_read(cgroup_root: Path, self_file: Path, is_namespaced: bool) -> None:
    self_file.write_text("0::/kubepods/pod1\n")
    folder = cgroup_root if is_namespaced else cgroup_root / "kubepods" / "pod1"
    write_files(folder, cpu__stat=f"usage_usec 7\n{STAT}throttled_usec 9\n", cpu__max="25000 100000\n")
    assert read_cpu_limit(cgroup_root, self_file) == CpuLimit(0.25, 400, 300)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("is_namespaced", [False, True], ids=["by its name", "as the root of its namespace"])
def test_limit_of_cgroup_version_1_is_read(
    cgroup_root: Path, self_file: Path, mount: str, is_namespaced: bool
) -> None:
    self_file.write_text(f"5:memory:/pod1\n4:{mount}:/pod1\n1:name=systemd:/\n0::/\n")
    write_files(
        cgroup_root / mount / ("" if is_namespaced else "pod1"),
        cpu__stat=f"{STAT}throttled_time 9\n",
        cpu__cfs_quota_us="50000\n",
        cpu__cfs_period_us="100000\n",
    )
    assert read_cpu_limit(cgroup_root, self_file) == CpuLimit(0.5, 400, 300)


def test_missing_limit_differs_from_unknown_limit(cgroup_root: Path, self_file: Path) -> None:
    assert read_cpu_limit(cgroup_root, self_file) is None
    self_file.write_text("0::/\n")
    assert read_cpu_limit(cgroup_root, self_file) is None
    write_files(cgroup_root, cpu__stat="usage_usec 7\n")  # the root group of a machine
    assert read_cpu_limit(cgroup_root, self_file) is None
    write_files(cgroup_root, cpu__stat=STAT, cpu__max="max 100000\n")
    assert read_cpu_limit(cgroup_root, self_file) == CpuLimit(None, 400, 300)


def test_limit_of_this_process_is_read_without_an_error() -> None:
    limit = read_cpu_limit()
    assert limit is None or limit.period_count >= limit.throttled_count >= 0


async def test_stall_of_the_loop_is_reported_once_with_its_length() -> None:
    problems: list[str | None] = []
    watch = LoopLagWatch(lambda: problems.append(watch.problem), check_interval_s=0.01)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.watch_loop())
        await wait_until(lambda: watch.lag.longest_lag_s > 0)
        assert watch.problem is None
        time.sleep(STALL_S + 0.1)  # noqa: ASYNC251 - this is the stall
        await wait_until(lambda: bool(problems))
        task.cancel()
    [sentence] = problems
    assert sentence is not None
    assert "too little CPU" in sentence
    assert f"at worst by {watch.lag.longest_lag_s:.1f} s" in sentence
    assert STALL_S <= watch.lag.longest_lag_s < watch.lag.total_lag_s + 1e-6
