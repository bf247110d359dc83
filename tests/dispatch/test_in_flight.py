"""What this process holds: leases and units, at the gateway or not, and what cutting one does to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dispatcher.dispatch.in_flight import Attempt, InFlightTable
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from tests.dispatch.scene import lease, request


async def for_ever() -> None:
    await asyncio.Event().wait()


def in_loop(check: Callable[[InFlightTable], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(InFlightTable())

    run_in_virtual_time(main())


def test_leases_and_units_are_counted_from_claim_to_end() -> None:
    async def check(holding: InFlightTable) -> None:
        light = holding.add_lease(lease(1), 0.0, is_probe=False)
        heavy = holding.add_lease(lease(2, units=3), 0.0, is_probe=False)
        holding.set_units(light, 2)
        assert (len(holding), holding.units, holding.running_units) == (2, 5, 0)
        assert light.lease.units == 2
        begun = Attempt("t", request(), [light, heavy])
        holding.start_attempt(begun)
        assert (holding.running_count, holding.running_units) == (2, 5)
        assert holding.list_at_gateway() == [light, heavy]
        holding.end_attempt(begun)
        holding.end_attempt(begun)
        assert (holding.running_count, holding.running_units) == (0, 0), "it came back once"
        assert (holding.units, holding.list_at_gateway()) == (5, [])
        assert holding.remove_lease("t-2") is heavy
        assert holding.remove_lease("t-2") is None
        assert (len(holding), holding.units) == (1, 2)

    in_loop(check)


def test_what_is_held_may_be_dropped_while_it_is_looked_through() -> None:
    async def check(holding: InFlightTable) -> None:
        for entry in (1, 2, 3):
            holding.add_lease(lease(entry), 0.0, is_probe=False)
        for held in holding:
            holding.remove_lease(held.lease.token)
        assert len(holding) == 0

    in_loop(check)


def test_exchange_is_cancelled_when_the_last_of_its_leases_is_cut() -> None:
    async def check(holding: InFlightTable) -> None:
        one, other = (holding.add_lease(lease(entry), 0.0, is_probe=False) for entry in (1, 2))
        holding.stop_waiting(one, "cancelled")
        assert one.stop_reason is None, "it is not at the gateway: there is nothing to cut"
        begun = Attempt("t", request(), [one, other], asyncio.ensure_future(for_ever()))
        holding.start_attempt(begun)
        task = begun.task
        assert task is not None
        holding.stop_waiting(one, "cancelled")
        holding.stop_waiting(one, "drain")
        assert str(one.stop_reason) == "cancelled", "the first word stands"
        assert task.cancelling() == 0, "the other waits"
        holding.stop_waiting(other, "lost")
        assert task.cancelling() == 1
        holding.end_attempt(begun)
        assert (begun.task, one.attempt) == (None, None)

    in_loop(check)


@pytest.mark.parametrize("event", ["last one ends", "one of two ends", "asked to look again", "nothing"])
def test_waiting_until_nothing_is_held(event: str) -> None:
    async def check(holding: InFlightTable) -> None:
        loop = asyncio.get_running_loop()
        await holding.wait_until_empty(60.0)
        assert loop.time() == 0.0, "nothing is held"
        for entry in range(2 if event == "one of two ends" else 1):
            holding.add_lease(lease(entry), 0.0, is_probe=False)
        if event == "asked to look again":
            loop.call_later(5.0, holding.request_recheck)
        elif event != "nothing":
            loop.call_later(5.0, holding.remove_lease, "t-0")
        await holding.wait_until_empty(60.0)
        ends_early = event in ("last one ends", "asked to look again")
        assert loop.time() == pytest.approx(5.0 if ends_early else 60.0)
        if len(holding):
            ended_at = loop.time()
            await holding.wait_until_empty(60.0)
            assert loop.time() == ended_at + 60.0, "what was asked for before is done"

    in_loop(check)
