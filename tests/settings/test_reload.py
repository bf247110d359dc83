"""A running dispatcher takes a new configuration whole, or not at all, however the file was replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dispatcher.settings import (
    Problem,
    ReloadRejection,
    Settings,
    parse_settings,
    reload_settings,
    watch_config,
)
from dispatcher.settings.effective import describe_changes
from tests.kubelet import mount, swap
from tests.support import wait_until

MINIMAL = "gateway: {url: http://gw}\n"
OTHER = "gateway: {url: http://gw}\nbudget: {reserve: 0.2}\n"


def settings(text: str = MINIMAL) -> Settings:
    found = parse_settings(text, {})
    assert isinstance(found, Settings)
    return found


def test_what_takes_effect_at_once_is_taken() -> None:
    text = """
gateway: {url: http://gw, timeout_s: 5, headers: {a: b}, token_file: /t, objective: batch}
budget: {reserve: 0.2}
signals: {interval_s: 2, use: requests, vllm: {urls: ["http://a:8000"]}}
retry: {max_attempts: 2}
shutdown: {drain_s: 9}
log: {level: debug}
"""
    new = reload_settings(settings(), text, {})
    assert new == settings(text)


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
def test_what_needs_a_restart_refuses_the_whole_file(text: str, paths: list[str]) -> None:
    refusal = reload_settings(settings(), text, {}, name="new.yaml")
    assert refusal == ReloadRejection(tuple(f"new.yaml: {path}: needs a restart to change" for path in paths))


def test_refusal_shows_no_secret() -> None:
    old = settings(MINIMAL + "queue: {url: 'redis://:sesame@h'}")
    refusal = reload_settings(old, MINIMAL + "queue: {url: 'redis://:open@h'}", {})
    assert isinstance(refusal, ReloadRejection)
    assert str(refusal) == "config.yaml: queue.url: needs a restart to change"


def test_wrong_file_is_refused_with_all_its_problems() -> None:
    refusal = reload_settings(settings(), "gateway: {url: http://gw, pat: /}\nlog: {level: x}", {})
    assert isinstance(refusal, ReloadRejection)
    assert len(refusal.reasons) == 2


def test_environment_still_wins_after_a_reload() -> None:
    new = reload_settings(settings(), OTHER, {"BATCH_DISPATCHER__BUDGET__RESERVE": "0.3"})
    assert isinstance(new, Settings)
    assert new.budget.reserve == 0.3


@asynccontextmanager
async def watched(path: Path, known: str) -> AsyncIterator[list[str | Problem]]:
    """What `watch` yields, as it comes."""
    seen: list[str | Problem] = []

    async def collect() -> None:
        async for found in watch_config(path, known):
            seen.append(found)  # noqa: PERF401 -- seen as it comes, not at the end

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(collect())
        yield seen
        task.cancel()


async def test_mounted_configmap_is_followed_through_its_symlink_swaps(tmp_path: Path) -> None:
    path = mount(tmp_path / "etc", MINIMAL)
    async with watched(path, MINIMAL) as seen:
        swap(path.parent, OTHER)
        await wait_until(lambda: seen == [OTHER])
        swap(path.parent, MINIMAL)
        await wait_until(lambda: seen == [OTHER, MINIMAL])


async def test_editors_rename_and_replace_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watched(path, MINIMAL) as seen:
        path.rename(tmp_path / "config.yaml~")
        (tmp_path / ".config.yaml.swp").write_text(OTHER)
        (tmp_path / ".config.yaml.swp").rename(path)
        await wait_until(lambda: seen == [OTHER])


async def test_file_written_in_pieces_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watched(path, MINIMAL) as seen:
        with path.open("w") as file:
            for piece in (OTHER[:10], OTHER[10:30], OTHER[30:]):
                file.write(piece)
                file.flush()
                await asyncio.sleep(0.03)  # an editor at work, not a wait: any pause below QUIET_S will do
        await wait_until(lambda: seen)
        assert seen == [OTHER]


async def test_change_between_the_first_read_and_the_watch_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OTHER)
    async with watched(path, MINIMAL) as seen:
        await wait_until(lambda: seen == [OTHER])


async def test_touching_the_file_or_its_neighbours_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watched(path, MINIMAL) as seen:
        path.touch()
        (tmp_path / "other").write_text("x")
        path.write_text(MINIMAL)
        path.write_text(OTHER)
        await wait_until(lambda: seen)
    assert seen == [OTHER]


@pytest.mark.parametrize("how", ["missing", "empty"])
async def test_file_that_is_briefly_gone_is_waited_for_and_one_that_stays_gone_is_told(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)

    def take_away() -> None:
        path.unlink() if how == "missing" else path.write_text("")

    async with watched(path, MINIMAL) as seen:
        take_away()
        path.write_text(OTHER)
        await wait_until(lambda: seen == [OTHER])
        take_away()
        gone_at = time.monotonic()
        await wait_until(lambda: len(seen) == 2)
        assert time.monotonic() - gone_at >= 1.0
        assert isinstance(seen[1], Problem)
        path.write_text(OTHER)
        await wait_until(
            lambda: seen[2:] == [OTHER], what="the same text again, so that the fault can be cleared"
        )


async def test_directory_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "later" / "config.yaml"
    async with watched(path, MINIMAL) as seen:
        await wait_until(lambda: seen)
        assert isinstance(seen[0], Problem)
        path.parent.mkdir()
        path.write_text(OTHER)
        await wait_until(lambda: seen[1:] == [OTHER])


async def test_without_events_from_the_kernel_the_file_is_polled(
    tmp_path: Path,
) -> None:
    """A link into a directory that nobody watches: only looking helps."""
    target = tmp_path / "elsewhere" / "config.yaml"
    target.parent.mkdir()
    target.write_text(MINIMAL)
    link = tmp_path / "etc" / "config.yaml"
    link.parent.mkdir()
    link.symlink_to(target)
    async with watched(link, MINIMAL) as seen:
        await asyncio.to_thread(target.write_text, OTHER)
        await wait_until(lambda: seen == [OTHER])


async def test_a_file_that_was_empty_at_the_start_is_a_problem_only_once_it_was_not(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\n")
    async with watched(path, "\n") as seen:
        await asyncio.to_thread(path.write_text, MINIMAL)
        await wait_until(lambda: seen == [MINIMAL])
        await asyncio.to_thread(path.write_text, "")
        await wait_until(lambda: len(seen) == 2)
    assert str(seen[1]) == "config.yaml: is empty"


def test_a_reload_tells_what_it_changed_and_no_secret() -> None:
    old = settings(MINIMAL + "budget: {max_in_flight: 3}\nsignals: {prometheus: {url: 'http://u:one@p'}}")
    new = settings(OTHER + "signals: {prometheus: {url: 'http://u:two@p'}}")
    assert describe_changes(old, new) == [
        "signals.prometheus.url: another secret",
        "budget.reserve: 0.05 → 0.2",
        "budget.max_in_flight: 3 → null",
    ]


async def test_watching_ends_promptly_when_it_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    async with watched(path, MINIMAL) as seen:
        path.write_text(OTHER)
        await wait_until(lambda: seen)
        ending_at = time.monotonic()
    assert time.monotonic() - ending_at < 5
