"""Endpoints that the Kubernetes watch saw count for a bounded time, and are back soon: in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dispatcher.signals.kubernetes.mirror import (
    EARLY_FOR_S,
    HOLD_S,
    MAX_EARLY_PAUSE_S,
    MAX_LATE_PAUSE_S,
    MAX_UNSERVED_PAUSE_S,
    MAX_WATCH_S,
    SILENCE_S,
)
from tests.signals.apiserver import (
    OLD_POOLS,
    PODS,
    POOLS,
    ApiServer,
    old_pool,
    pod,
    pool,
)
from tests.signals.virtual import LOOK_S, Stage, run, stage


async def kill(server: ApiServer) -> None:
    await server.down()


async def freeze(server: ApiServer) -> None:
    server.freeze()


async def expire(server: ApiServer) -> None:
    server.tokens = set()


async def forbid(server: ApiServer) -> None:
    server.faults.rules = []


async def revive(server: ApiServer) -> None:
    """Undo any of these."""
    server.thaw()
    server.faults.rules = None
    server.tokens = {"t0"}
    if not server.running:
        await server.up()


LOSSES = {"killed": kill, "frozen": freeze, "token expired": expire, "rule removed": forbid}
WAYS = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES.keys())
REFUSED = pytest.mark.parametrize("lose", [expire, forbid], ids=["token expired", "rule removed"])


async def lost(on: Stage, lose: Callable[[ApiServer], Awaitable[None]]) -> float:
    """A change is seen, and the watch lost in this way at that moment. Return when."""
    await on.fine(3, 5.0)
    await on.pause(47.0)
    on.server.put(PODS, pod("p3"))
    await on.ready(4, 1.0)
    await lose(on.server)
    return on.now


class TestALostWatch:
    def test_whose_server_dies_bounds_for_the_stated_time(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                lost_at = await lost(on, kill)
                await on.until(lambda: on.seen.now.problems, 1.0)
                assert on.seen.now.ready == 4
                assert await on.ready(None, 2 * HOLD_S) == pytest.approx(lost_at + HOLD_S, abs=1.0)
                assert "no longer counts" in str(on.seen.now.problems)

        run(scenario())

    def test_whose_server_dies_bounds_as_long_where_nothing_had_changed(self, tmp_path: Path) -> None:
        """The watch ran until then: that its server was heard last a minute ago does not count."""

        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await on.pause(57.0)
                await kill(on.server)
                lost_at = on.now
                assert await on.ready(None, 2 * HOLD_S) == pytest.approx(lost_at + HOLD_S, abs=1.0)

        run(scenario())

    def test_whose_server_hangs_is_given_up_within_the_stated_time(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                lost_at = await lost(on, freeze)
                given_up_at = await on.ready(None, 2 * SILENCE_S)
                assert given_up_at - lost_at <= 85.0 + 1.0, "what the documentation says"
                assert "did not answer in time" in str(on.seen.now.problems)
                assert on.seen.now.outdated_since is not None
                assert on.seen.now.outdated_since <= lost_at

        run(scenario())

    @REFUSED
    def test_that_is_refused_is_true_to_its_end_and_bounds_for_the_stated_time_after_it(
        self, tmp_path: Path, lose: Callable[[ApiServer], Awaitable[None]]
    ) -> None:
        """The server goes on with the watches that run, and ends them as agreed."""

        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await lost(on, lose)
                await on.pause(100.0)
                on.server.put(PODS, pod("p4"))
                await on.ready(5, 1.0)
                problem_at = await on.until(lambda: on.seen.now.outdated_since is not None, MAX_WATCH_S)
                assert on.seen.now.ready == 5
                assert on.seen.now.problems
                # Pool and pods are watched by themselves: what was heard first of them is given up first.
                given_up_at = await on.ready(None, MAX_WATCH_S)
                assert given_up_at >= problem_at + HOLD_S - 1.0
                assert on.seen.now.outdated_since is not None
                assert given_up_at - on.seen.now.outdated_since == pytest.approx(HOLD_S, abs=2 * LOOK_S)

        run(scenario())

    @WAYS
    @pytest.mark.parametrize("away_s", [40.0, 200.0])
    def test_is_back_within_five_seconds_of_its_cause_mended(
        self, tmp_path: Path, lose: Callable[[ApiServer], Awaitable[None]], away_s: float
    ) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await lose(on.server)
                if lose in (expire, forbid):
                    on.server.cut()  # otherwise they run for minutes
                await on.pause(away_s)
                on.server.put(PODS, pod("p3"))
                await revive(on.server)
                await on.fine(4, 5.0)

        run(scenario())

    def test_is_asked_for_seldom_after_some_minutes_and_still_comes_back(self, tmp_path: Path) -> None:
        """Each refusal is a line in the cluster's audit log."""

        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                on.server.faults.rules = []
                on.server.cut()
                await on.pause(EARLY_FOR_S + MAX_LATE_PAUSE_S)
                on.server.requests.clear()
                await on.pause(300.0)
                # The pool in both versions, pods and slices; pauses are half of LATE_S at least.
                assert (
                    4 * (300 / MAX_LATE_PAUSE_S - 1)
                    <= len(on.server.requests)
                    <= 4 * (300 / (MAX_LATE_PAUSE_S / 2) + 1)
                )
                on.server.faults.rules = None
                await on.fine(3, MAX_LATE_PAUSE_S + 1.0)

        run(scenario())

    def test_is_never_asked_for_in_a_hurry(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await forbid(on.server)
                on.server.cut()
                await on.pause(10.0)
                on.server.requests.clear()
                await on.pause(100.0)
                per_collection = len(on.server.asked(PODS, watch=True))
                assert per_collection <= 100 / (MAX_EARLY_PAUSE_S / 2) + 1

        run(scenario())


class TestNewCredentials:
    """A pause ends when the files with the credentials change, however long it is."""

    def test_end_the_pause_at_once(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await expire(on.server)
                on.server.cut()
                await on.pause(EARLY_FOR_S + 60.0)
                on.server.tokens = {"t1"}
                on.server.put(PODS, pod("p3"))
                on.server.write_kubeconfig("t1")
                await on.fine(4, 2.0)

        run(scenario())

    def test_in_a_file_that_the_kubeconfig_names_do_as_well(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                on.server.write_kubeconfig(token_file="token")
                (tmp_path / "token").write_text("t0")
                await on.fine(3, 5.0)
                await expire(on.server)
                on.server.cut()
                await on.pause(EARLY_FOR_S + 60.0)
                on.server.tokens = {"another"}
                (tmp_path / "token").write_text("another")
                await on.fine(3, 2.0)
                assert on.server.requests[-1].token == "another"

        run(scenario())


async def served_by_the_older_api(on: Stage) -> None:
    """Have a pool of one pod in the older API alone, and two pods of the pool that the newer one gets."""
    on.server.faults.not_served = {POOLS}
    on.server.put(OLD_POOLS, old_pool())
    on.server.put(PODS, pod("p0"))
    on.server.put(PODS, pod("n0", app="newer"))
    on.server.put(PODS, pod("n1", app="newer"))
    await on.ready(1, 5.0)


class TestTheOlderApi:
    def test_is_not_asked_while_the_newer_has_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await on.pause(300.0)
                assert not [each for each in on.server.requests if each.collection == OLD_POOLS]

        run(scenario())

    def test_is_left_within_minutes_when_the_newer_gets_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path, pods=0) as on:
                await served_by_the_older_api(on)
                await on.pause(100.0)
                on.server.faults.not_served = set()
                on.server.put(POOLS, pool(app="newer"))
                await on.ready(2, MAX_UNSERVED_PAUSE_S + 1.0)
                await on.pause(1.0)
                on.server.requests.clear()
                await on.pause(100.0)
                assert not [each for each in on.server.requests if each.collection == OLD_POOLS]
                on.server.delete(POOLS, "qwen")
                await on.ready(1, 1.0)

        run(scenario())

    def test_that_loses_the_pool_has_the_newer_asked_at_once(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path, pods=0) as on:
                await served_by_the_older_api(on)
                await on.pause(1_000.0)
                on.server.faults.not_served = set()
                on.server.put(POOLS, pool(app="newer"))
                on.server.delete(OLD_POOLS, "qwen")
                await on.ready(2, 1.0)

        run(scenario())
