"""The rules of all lanes, as the loop asks them."""

from __future__ import annotations

from collections import Counter

from dispatcher.core.requests.lanes import Lane, lane_of, losses_of
from dispatcher.dispatch.in_flight import Holding
from dispatcher.dispatch.lanes import Lanes
from dispatcher.dispatch.suspects import YOUNG_S
from dispatcher.ports import Lease, Settlement


def lease(token: str, lane: Lane | None = None) -> Lease:
    return Lease(1, token, b"", 0.0, deliveries=3, attempts=0, refusals=0, losses=0, lane=lane)


def ended(lanes: Lanes, lane: Lane | None) -> bool:
    """Whether one that ends makes room."""
    its = lease("t", lane)
    return lanes.ended(its, Settlement(its, b"{}", ""))


def test_two_deaths_make_a_suspect_and_only_further_ones_are_blamed_on_it() -> None:
    assert [lane_of(deaths) for deaths in range(4)] == [None, None, Lane.SUSPECTS, Lane.SUSPECTS]
    assert [losses_of(deaths) for deaths in range(5)] == [0, 0, 0, 1, 2]


def test_each_lane_has_its_room() -> None:
    lanes = Lanes()
    assert lanes.room(Counter(), now=0.0) == {Lane.SUSPECTS: 0}, "others wait, and it is young"
    assert lanes.claimed(waiting=0), "nothing may be left but suspects"
    assert lanes.room(Counter(), now=0.0) == {Lane.SUSPECTS: 1}
    assert not lanes.claimed(waiting=0)
    assert lanes.room(Counter({Lane.SUSPECTS: 1}), now=YOUNG_S) == {Lane.SUSPECTS: 0}


def test_only_what_ends_in_a_lane_makes_room_in_it() -> None:
    lanes = Lanes()
    lanes.room(Counter(), now=0.0)
    for _ in range(4):
        assert not ended(lanes, None)
    assert lanes.room(Counter(), now=YOUNG_S) == {Lane.SUSPECTS: 1}
    for _ in range(2):
        assert ended(lanes, Lane.SUSPECTS)
    assert lanes.room(Counter(), now=YOUNG_S) == {Lane.SUSPECTS: 2}


async def test_what_is_held_of_a_lane_is_counted_until_it_is_dropped() -> None:
    holding = Holding()
    for token, lane in (("a", None), ("b", Lane.SUSPECTS), ("c", Lane.SUSPECTS)):
        holding.add(lease(token, lane), 0.0, probe=False)
    assert holding.in_lanes == {Lane.SUSPECTS: 2}
    holding.drop("a")
    holding.drop("b")
    holding.drop("b")
    assert holding.in_lanes[Lane.SUSPECTS] == 1
