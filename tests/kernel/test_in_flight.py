"""The in-flight table: its leases and units, and the effect of stopping a lease on the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dispatcher.kernel.in_flight import Attempt, InFlightTable
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from tests.kernel.scene import lease, request


async def wait_forever() -> None:
    await asyncio.Event().wait()


def run_with_table(check: Callable[[InFlightTable], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(InFlightTable())

    run_in_virtual_time(main())


def test_leases_and_units_are_counted_from_claim_to_end() -> None:
    async def check(table: InFlightTable) -> None:
        light = table.add_lease(lease(1), 0.0, is_probe=False)
        heavy = table.add_lease(lease(2, units=3), 0.0, is_probe=False)
        table.set_units(light, 2)
        assert (len(table), table.units, table.running_units) == (2, 5, 0)
        assert light.lease.units == 2
        attempt = Attempt("t", request(), [light, heavy])
        table.start_attempt(attempt)
        assert (table.running_count, table.running_units) == (2, 5)
        assert table.list_at_gateway() == [light, heavy]
        table.end_attempt(attempt)
        table.end_attempt(attempt)
        assert (table.running_count, table.running_units) == (0, 0), "the attempt is subtracted only once"
        assert (table.units, table.list_at_gateway()) == (5, [])
        assert table.remove_lease("t-2") is heavy
        assert table.remove_lease("t-2") is None
        assert (len(table), table.units) == (1, 2)

    run_with_table(check)


def test_leases_can_be_removed_during_iteration() -> None:
    async def check(table: InFlightTable) -> None:
        for entry_id in (1, 2, 3):
            table.add_lease(lease(entry_id), 0.0, is_probe=False)
        for entry in table:
            table.remove_lease(entry.lease.token)
        assert len(table) == 0

    run_with_table(check)


def test_attempt_is_cancelled_when_its_last_lease_stops_waiting() -> None:
    async def check(table: InFlightTable) -> None:
        first, second = (table.add_lease(lease(entry_id), 0.0, is_probe=False) for entry_id in (1, 2))
        table.stop_waiting(first, "cancelled")
        assert first.stop_reason is None, "the lease is not at the gateway, so there is nothing to stop"
        attempt = Attempt("t", request(), [first, second], asyncio.ensure_future(wait_forever()))
        table.start_attempt(attempt)
        task = attempt.task
        assert task is not None
        table.stop_waiting(first, "cancelled")
        table.stop_waiting(first, "drain")
        assert str(first.stop_reason) == "cancelled", "the first reason wins"
        assert task.cancelling() == 0, "the other lease still waits for the answer"
        table.stop_waiting(second, "lost")
        assert task.cancelling() == 1
        table.end_attempt(attempt)
        assert (attempt.task, first.attempt) == (None, None)

    run_with_table(check)


def test_lease_can_be_stopped_while_it_is_in_a_batch_group_and_not_after_it_left() -> None:
    async def check(table: InFlightTable) -> None:
        waiting, sent = (table.add_lease(lease(entry_id), 0.0) for entry_id in (1, 2))
        for entry in (waiting, sent):
            table.enter_batch_group(entry)
        table.stop_waiting(waiting, "cancelled")
        assert waiting.stop_reason == "cancelled"
        assert waiting in table.list_in_work(), "the group still has to complete it"
        table.leave_batch_group([waiting, sent])
        table.stop_waiting(sent, "cancelled")
        assert sent.stop_reason is None, "nothing is left to stop until the attempt starts"
        assert table.list_in_work() == []

    run_with_table(check)


@pytest.mark.parametrize("event", ["last lease ends", "one of two leases ends", "recheck", "nothing"])
def test_wait_until_empty_ends_by_last_lease_recheck_or_timeout(event: str) -> None:
    async def check(table: InFlightTable) -> None:
        loop = asyncio.get_running_loop()
        await table.wait_until_empty(60.0)
        assert loop.time() == 0.0, "an empty table needs no wait"
        for entry_id in range(2 if event == "one of two leases ends" else 1):
            table.add_lease(lease(entry_id), 0.0, is_probe=False)
        if event == "recheck":
            loop.call_later(5.0, table.request_recheck)
        elif event != "nothing":
            loop.call_later(5.0, table.remove_lease, "t-0")
        await table.wait_until_empty(60.0)
        ends_early = event in ("last lease ends", "recheck")
        assert loop.time() == pytest.approx(5.0 if ends_early else 60.0)
        if len(table):
            ended_at = loop.time()
            await table.wait_until_empty(60.0)
            assert loop.time() == ended_at + 60.0, "an earlier recheck does not end a later wait"

    run_with_table(check)
