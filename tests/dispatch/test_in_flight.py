"""What this process holds: leases and units, at the gateway or not, and what cutting one does to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dispatcher.dispatch.in_flight import Holding, Try
from dispatcher.lab.simulation.virtual_loop import run
from tests.dispatch.scene import lease, request


async def for_ever() -> None:
    await asyncio.Event().wait()


def in_loop(check: Callable[[Holding], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(Holding())

    run(main())


def test_leases_and_units_are_counted_from_claim_to_end() -> None:
    async def check(holding: Holding) -> None:
        light = holding.add(lease(1), 0.0, probe=False)
        heavy = holding.add(lease(2, units=3), 0.0, probe=False)
        holding.weighs(light, 2)
        assert (len(holding), holding.units, holding.running_units) == (2, 5, 0)
        assert light.lease.units == 2
        begun = Try("t", request(), [light, heavy])
        holding.started(begun)
        assert (holding.running, holding.running_units) == (2, 5)
        assert holding.at_gateway() == [light, heavy]
        holding.back(begun)
        holding.back(begun)
        assert (holding.running, holding.running_units) == (0, 0), "it came back once"
        assert (holding.units, holding.at_gateway()) == (5, [])
        assert holding.drop("t-2") is heavy
        assert holding.drop("t-2") is None
        assert (len(holding), holding.units) == (1, 2)

    in_loop(check)


def test_what_is_held_may_be_dropped_while_it_is_looked_through() -> None:
    async def check(holding: Holding) -> None:
        for entry in (1, 2, 3):
            holding.add(lease(entry), 0.0, probe=False)
        for held in holding:
            holding.drop(held.lease.token)
        assert len(holding) == 0

    in_loop(check)


def test_exchange_is_cancelled_when_the_last_of_its_leases_is_cut() -> None:
    async def check(holding: Holding) -> None:
        one, other = (holding.add(lease(entry), 0.0, probe=False) for entry in (1, 2))
        holding.cut(one, "cancelled")
        assert one.cut is None, "it is not at the gateway: there is nothing to cut"
        begun = Try("t", request(), [one, other], asyncio.ensure_future(for_ever()))
        holding.started(begun)
        task = begun.task
        assert task is not None
        holding.cut(one, "cancelled")
        holding.cut(one, "drain")
        assert str(one.cut) == "cancelled", "the first word stands"
        assert task.cancelling() == 0, "the other waits"
        holding.cut(other, "lost")
        assert task.cancelling() == 1
        holding.back(begun)
        assert (begun.task, one.rides) == (None, None)

    in_loop(check)


@pytest.mark.parametrize("event", ["last one ends", "one of two ends", "asked to look again", "nothing"])
def test_waiting_until_nothing_is_held(event: str) -> None:
    async def check(holding: Holding) -> None:
        loop = asyncio.get_running_loop()
        await holding.emptied(60.0)
        assert loop.time() == 0.0, "nothing is held"
        for entry in range(2 if event == "one of two ends" else 1):
            holding.add(lease(entry), 0.0, probe=False)
        if event == "asked to look again":
            loop.call_later(5.0, holding.recheck)
        elif event != "nothing":
            loop.call_later(5.0, holding.drop, "t-0")
        await holding.emptied(60.0)
        ends_early = event in ("last one ends", "asked to look again")
        assert loop.time() == pytest.approx(5.0 if ends_early else 60.0)
        if len(holding):
            ended_at = loop.time()
            await holding.emptied(60.0)
            assert loop.time() == ended_at + 60.0, "what was asked for before is done"

    in_loop(check)
