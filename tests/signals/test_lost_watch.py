"""A lost Kubernetes watch: how long its endpoints still count, and how soon it recovers. In virtual time."""

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
from tests.signals.virtual_time import CHECK_INTERVAL_S, RunningWatch, run_in_virtual_time, run_watch


async def kill_server(server: ApiServer) -> None:
    await server.stop()


async def freeze_server(server: ApiServer) -> None:
    server.freeze()


async def expire_token(server: ApiServer) -> None:
    server.tokens = set()


async def forbid_everything(server: ApiServer) -> None:
    server.faults.rules = []


async def repair_server(server: ApiServer) -> None:
    """Undo each of the causes above."""
    server.thaw()
    server.faults.rules = None
    server.tokens = {"t0"}
    if not server.running:
        await server.start()


LOSS_CAUSES = {
    "killed": kill_server,
    "frozen": freeze_server,
    "token expired": expire_token,
    "rule removed": forbid_everything,
}
each_loss_cause = pytest.mark.parametrize("cause_loss", LOSS_CAUSES.values(), ids=LOSS_CAUSES.keys())
each_refusal = pytest.mark.parametrize(
    "cause_loss", [expire_token, forbid_everything], ids=["token expired", "rule removed"]
)


async def lose_watch(watch: RunningWatch, cause_loss: Callable[[ApiServer], Awaitable[None]]) -> float:
    """Wait until a change is visible, cause the loss at that moment, and return its time."""
    await watch.wait_until_complete(3, 5.0)
    await watch.pause(47.0)
    watch.server.put(PODS, pod("p3"))
    await watch.wait_for_ready(4, 1.0)
    await cause_loss(watch.server)
    return watch.now


class TestLostWatch:
    def test_endpoints_count_for_the_hold_time_after_the_server_dies(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                lost_at = await lose_watch(watch, kill_server)
                await watch.wait_until(lambda: watch.recorder.latest.problems, 1.0)
                assert watch.recorder.latest.ready == 4
                assert await watch.wait_for_ready(None, 2 * HOLD_S) == pytest.approx(
                    lost_at + HOLD_S, abs=1.0
                )
                assert "no longer counts" in str(watch.recorder.latest.problems)

        run_in_virtual_time(scenario())

    def test_hold_time_begins_at_the_loss_although_nothing_had_changed_before(self, tmp_path: Path) -> None:
        """The watch ran until the loss, so it does not matter that the last event is a minute old."""

        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await watch.wait_until_complete(3, 5.0)
                await watch.pause(57.0)
                await kill_server(watch.server)
                lost_at = watch.now
                assert await watch.wait_for_ready(None, 2 * HOLD_S) == pytest.approx(
                    lost_at + HOLD_S, abs=1.0
                )

        run_in_virtual_time(scenario())

    def test_endpoints_of_a_hanging_server_stop_counting_within_the_documented_time(
        self, tmp_path: Path
    ) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                lost_at = await lose_watch(watch, freeze_server)
                stopped_counting_at = await watch.wait_for_ready(None, 2 * SILENCE_S)
                assert stopped_counting_at - lost_at <= 85.0 + 1.0, "the time that the documentation states"
                assert "did not answer in time" in str(watch.recorder.latest.problems)
                assert watch.recorder.latest.outdated_since is not None
                assert watch.recorder.latest.outdated_since <= lost_at

        run_in_virtual_time(scenario())

    @pytest.mark.slow
    @each_refusal
    def test_refused_watch_is_current_until_its_end_and_its_endpoints_count_for_the_hold_time_after_that(
        self, tmp_path: Path, cause_loss: Callable[[ApiServer], Awaitable[None]]
    ) -> None:
        """The server continues running watches, and ends them at the requested time."""

        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await lose_watch(watch, cause_loss)
                await watch.pause(100.0)
                watch.server.put(PODS, pod("p4"))
                await watch.wait_for_ready(5, 1.0)
                problem_at = await watch.wait_until(
                    lambda: watch.recorder.latest.outdated_since is not None, MAX_WATCH_S
                )
                assert watch.recorder.latest.ready == 5
                assert watch.recorder.latest.problems
                # Pool and pods have separate watches. The one with the oldest information stops counting
                # first.
                stopped_counting_at = await watch.wait_for_ready(None, MAX_WATCH_S)
                assert stopped_counting_at >= problem_at + HOLD_S - 1.0
                assert watch.recorder.latest.outdated_since is not None
                assert stopped_counting_at - watch.recorder.latest.outdated_since == pytest.approx(
                    HOLD_S, abs=2 * CHECK_INTERVAL_S
                )

        run_in_virtual_time(scenario())

    @pytest.mark.slow
    @each_loss_cause
    @pytest.mark.parametrize("outage_s", [40.0, 200.0])
    def test_watch_recovers_within_five_seconds_of_the_repair(
        self, tmp_path: Path, cause_loss: Callable[[ApiServer], Awaitable[None]], outage_s: float
    ) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await watch.wait_until_complete(3, 5.0)
                await cause_loss(watch.server)
                if cause_loss in (expire_token, forbid_everything):
                    watch.server.cut_watches()  # otherwise the watches go on for minutes
                await watch.pause(outage_s)
                watch.server.put(PODS, pod("p3"))
                await repair_server(watch.server)
                await watch.wait_until_complete(4, 5.0)

        run_in_virtual_time(scenario())

    @pytest.mark.slow
    def test_retries_become_rare_after_some_minutes_and_the_watch_still_recovers(
        self, tmp_path: Path
    ) -> None:
        """Each refused request adds a line to the audit log of the cluster."""

        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await watch.wait_until_complete(3, 5.0)
                watch.server.faults.rules = []
                watch.server.cut_watches()
                await watch.pause(EARLY_FOR_S + MAX_LATE_PAUSE_S)
                watch.server.requests.clear()
                await watch.pause(300.0)
                # Pool in both versions, pods and slices. A pause is at least half of MAX_LATE_PAUSE_S.
                assert (
                    4 * (300 / MAX_LATE_PAUSE_S - 1)
                    <= len(watch.server.requests)
                    <= 4 * (300 / (MAX_LATE_PAUSE_S / 2) + 1)
                )
                watch.server.faults.rules = None
                await watch.wait_until_complete(3, MAX_LATE_PAUSE_S + 1.0)

        run_in_virtual_time(scenario())

    def test_early_retries_keep_their_pauses(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await watch.wait_until_complete(3, 5.0)
                await forbid_everything(watch.server)
                watch.server.cut_watches()
                await watch.pause(10.0)
                watch.server.requests.clear()
                await watch.pause(100.0)
                request_count = len(watch.server.requests_for(PODS, watch=True))
                assert request_count <= 100 / (MAX_EARLY_PAUSE_S / 2) + 1

        run_in_virtual_time(scenario())


class TestNewCredentials:
    """A pause between retries ends when a file with the credentials changes."""

    def test_changed_kubeconfig_ends_the_pause_at_once(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await watch.wait_until_complete(3, 5.0)
                await expire_token(watch.server)
                watch.server.cut_watches()
                await watch.pause(EARLY_FOR_S + 60.0)
                watch.server.tokens = {"t1"}
                watch.server.put(PODS, pod("p3"))
                watch.server.write_kubeconfig("t1")
                await watch.wait_until_complete(4, 2.0)

        run_in_virtual_time(scenario())

    def test_changed_token_file_of_the_kubeconfig_ends_the_pause_at_once(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                watch.server.write_kubeconfig(token_file="token")
                (tmp_path / "token").write_text("t0")
                await watch.wait_until_complete(3, 5.0)
                await expire_token(watch.server)
                watch.server.cut_watches()
                await watch.pause(EARLY_FOR_S + 60.0)
                watch.server.tokens = {"another"}
                (tmp_path / "token").write_text("another")
                await watch.wait_until_complete(3, 2.0)
                assert watch.server.requests[-1].token == "another"

        run_in_virtual_time(scenario())


async def serve_pool_by_older_api_only(watch: RunningWatch) -> None:
    """Serve a pool of one pod by the older API only, and add two pods for the pool that the newer API gets
    later."""
    watch.server.faults.not_served = {POOLS}
    watch.server.put(OLD_POOLS, old_pool())
    watch.server.put(PODS, pod("p0"))
    watch.server.put(PODS, pod("n0", app="newer"))
    watch.server.put(PODS, pod("n1", app="newer"))
    await watch.wait_for_ready(1, 5.0)


class TestOlderApi:
    def test_older_api_is_not_requested_while_the_newer_has_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as watch:
                await watch.wait_until_complete(3, 5.0)
                await watch.pause(300.0)
                assert not [each for each in watch.server.requests if each.collection == OLD_POOLS]

        run_in_virtual_time(scenario())

    def test_newer_api_is_used_within_minutes_once_it_has_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path, pods=0) as watch:
                await serve_pool_by_older_api_only(watch)
                await watch.pause(100.0)
                watch.server.faults.not_served = set()
                watch.server.put(POOLS, pool(app="newer"))
                await watch.wait_for_ready(2, MAX_UNSERVED_PAUSE_S + 1.0)
                await watch.pause(1.0)
                watch.server.requests.clear()
                await watch.pause(100.0)
                assert not [each for each in watch.server.requests if each.collection == OLD_POOLS]
                watch.server.delete(POOLS, "qwen")
                await watch.wait_for_ready(1, 1.0)

        run_in_virtual_time(scenario())

    def test_newer_api_is_requested_at_once_when_the_older_loses_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path, pods=0) as watch:
                await serve_pool_by_older_api_only(watch)
                await watch.pause(1_000.0)
                watch.server.faults.not_served = set()
                watch.server.put(POOLS, pool(app="newer"))
                watch.server.delete(OLD_POOLS, "qwen")
                await watch.wait_for_ready(2, 1.0)

        run_in_virtual_time(scenario())
