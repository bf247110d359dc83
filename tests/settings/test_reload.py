"""Reload of the configuration: which changes are accepted, and how a replaced file is noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dispatcher.settings.effective import describe_changes
from dispatcher.settings.load import ReloadRejection, parse_settings, reload_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.watch import watch_config
from dispatcher.settings.yaml_source import Problem
from tests.kubelet import mount_file, replace_file
from tests.support import wait_until

MINIMAL = "gateway: {url: http://gw}\n"
OTHER = "gateway: {url: http://gw}\nbudget: {reserve: 0.2}\n"


def parse_valid(text: str = MINIMAL) -> Settings:
    found = parse_settings(text, {})
    assert isinstance(found, Settings)
    return found


def test_settings_that_take_effect_at_once_are_reloaded() -> None:
    text = """
gateway: {url: http://gw, timeout_s: 5, headers: {a: b}, token_file: /t, objective: batch}
budget: {reserve: 0.2}
signals: {interval_s: 2, use: requests, vllm: {urls: ["http://a:8000"]}}
retry: {max_attempts: 2}
shutdown: {drain_s: 9}
log: {level: debug}
"""
    new = reload_settings(parse_valid(), text, {})
    assert new == parse_valid(text)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("gateway: {url: http://other}", ["gateway.url"]),
        (MINIMAL + "pool: {name: b}", ["pool.name"]),
        (MINIMAL + "queue: {name: b, lease_s: 9}", ["queue.name", "queue.lease_s"]),
        (MINIMAL + "queue: {owner_timeout_s: 9}", ["queue.owner_timeout_s"]),
        (MINIMAL + "admin: {port: 1}", ["admin.port"]),
        (MINIMAL + "tracing: {sample_ratio: 0.5}", ["tracing.sample_ratio"]),
        ("gateway: {url: http://other}\nbudget: {reserve: 0.5}", ["gateway.url"]),
    ],
)
def test_setting_that_needs_a_restart_makes_the_whole_file_rejected(text: str, paths: list[str]) -> None:
    rejection = reload_settings(parse_valid(), text, {}, name="new.yaml")
    assert rejection == ReloadRejection(
        tuple(f"new.yaml: {path}: needs a restart to change" for path in paths)
    )


def test_rejection_contains_no_secret() -> None:
    old = parse_valid(MINIMAL + "queue: {url: 'redis://:sesame@h'}")
    rejection = reload_settings(old, MINIMAL + "queue: {url: 'redis://:open@h'}", {})
    assert isinstance(rejection, ReloadRejection)
    assert str(rejection) == "config.yaml: queue.url: needs a restart to change"


def test_invalid_file_is_rejected_with_all_its_problems() -> None:
    rejection = reload_settings(parse_valid(), "gateway: {url: http://gw, pat: /}\nlog: {level: x}", {})
    assert isinstance(rejection, ReloadRejection)
    assert len(rejection.reasons) == 2


def test_environment_still_overrides_the_file_after_a_reload() -> None:
    new = reload_settings(parse_valid(), OTHER, {"BATCH_DISPATCHER__BUDGET__RESERVE": "0.3"})
    assert isinstance(new, Settings)
    assert new.budget.reserve == 0.3


@asynccontextmanager
async def watch_file(path: Path, known_text: str) -> AsyncIterator[list[str | Problem]]:
    """Collect what `watch_config` yields."""
    yielded: list[str | Problem] = []

    async def collect() -> None:
        async for found in watch_config(path, known_text):
            yielded.append(found)  # noqa: PERF401 -- the test reads the list while it grows

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(collect())
        yield yielded
        task.cancel()


async def test_update_of_a_mounted_configmap_is_noticed(tmp_path: Path) -> None:
    path = mount_file(tmp_path / "etc", MINIMAL)
    async with watch_file(path, MINIMAL) as yielded:
        replace_file(path.parent, OTHER)
        await wait_until(lambda: yielded == [OTHER])
        replace_file(path.parent, MINIMAL)
        await wait_until(lambda: yielded == [OTHER, MINIMAL])


async def test_replacement_of_the_file_by_an_editor_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watch_file(path, MINIMAL) as yielded:
        path.rename(tmp_path / "config.yaml~")
        (tmp_path / ".config.yaml.swp").write_text(OTHER)
        (tmp_path / ".config.yaml.swp").rename(path)
        await wait_until(lambda: yielded == [OTHER])


async def test_file_written_in_pieces_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watch_file(path, MINIMAL) as yielded:
        with path.open("w") as file:
            for piece in (OTHER[:10], OTHER[10:30], OTHER[30:]):
                file.write(piece)
                file.flush()
                await asyncio.sleep(0.03)  # simulates an editor: any pause below QUIET_S will do
        await wait_until(lambda: yielded)
        assert yielded == [OTHER]


async def test_change_between_the_first_read_and_the_watch_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OTHER)
    async with watch_file(path, MINIMAL) as yielded:
        await wait_until(lambda: yielded == [OTHER])


async def test_touching_the_file_or_other_files_is_not_a_change(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watch_file(path, MINIMAL) as yielded:
        path.touch()
        (tmp_path / "other").write_text("x")
        path.write_text(MINIMAL)
        path.write_text(OTHER)
        await wait_until(lambda: yielded)
    assert yielded == [OTHER]


@pytest.mark.parametrize("how", ["missing", "empty"])
async def test_file_that_is_missing_or_empty_is_reported_only_after_a_while(tmp_path: Path, how: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)

    def remove_content() -> None:
        path.unlink() if how == "missing" else path.write_text("")

    async with watch_file(path, MINIMAL) as yielded:
        remove_content()
        path.write_text(OTHER)
        await wait_until(lambda: yielded == [OTHER])
        remove_content()
        removed_at = time.monotonic()
        await wait_until(lambda: len(yielded) == 2)
        assert time.monotonic() - removed_at >= 1.0
        assert isinstance(yielded[1], Problem)
        path.write_text(OTHER)
        await wait_until(
            lambda: yielded[2:] == [OTHER], what="the same text again, so that the fault can be cleared"
        )


async def test_file_is_read_once_its_directory_exists(tmp_path: Path) -> None:
    path = tmp_path / "later" / "config.yaml"
    async with watch_file(path, MINIMAL) as yielded:
        await wait_until(lambda: yielded)
        assert isinstance(yielded[0], Problem)
        path.parent.mkdir()
        path.write_text(OTHER)
        await wait_until(lambda: yielded[1:] == [OTHER])


async def test_without_events_from_the_kernel_the_file_is_polled(
    tmp_path: Path,
) -> None:
    """The link points into a directory that is not watched."""
    target = tmp_path / "elsewhere" / "config.yaml"
    target.parent.mkdir()
    target.write_text(MINIMAL)
    link = tmp_path / "etc" / "config.yaml"
    link.parent.mkdir()
    link.symlink_to(target)
    async with watch_file(link, MINIMAL) as yielded:
        await asyncio.to_thread(target.write_text, OTHER)
        await wait_until(lambda: yielded == [OTHER])


async def test_file_that_was_empty_from_the_start_is_not_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\n")
    async with watch_file(path, "\n") as yielded:
        await asyncio.to_thread(path.write_text, MINIMAL)
        await wait_until(lambda: yielded == [MINIMAL])
        await asyncio.to_thread(path.write_text, "")
        await wait_until(lambda: len(yielded) == 2)
    assert str(yielded[1]) == "config.yaml: is empty"


def test_changes_of_a_reload_are_described_without_secrets() -> None:
    old = parse_valid(MINIMAL + "budget: {max_in_flight: 3}\nsignals: {prometheus: {url: 'http://u:one@p'}}")
    new = parse_valid(OTHER + "signals: {prometheus: {url: 'http://u:two@p'}}")
    assert describe_changes(old, new) == [
        "signals.prometheus.url: another secret",
        "budget.reserve: 0.05 → 0.2",
        "budget.max_in_flight: 3 → null",
    ]


async def test_watching_ends_promptly_when_it_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watch_file(path, MINIMAL) as yielded:
        path.write_text(OTHER)
        await wait_until(lambda: yielded)
        cancelled_at = time.monotonic()
    assert time.monotonic() - cancelled_at < 5
