"""The rules of all lanes, as the loop asks them."""

from __future__ import annotations

from collections import Counter

from dispatcher.core.requests.lanes import Lane, choose_lane, count_losses
from dispatcher.dispatch.in_flight import InFlightTable
from dispatcher.dispatch.lanes import LaneRules
from dispatcher.dispatch.suspects import STARTUP_S
from dispatcher.ports import Lease, Settlement


def lease(token: str, lane: Lane | None = None) -> Lease:
    return Lease(
        1, token, b"", 0.0, deliveries=3, failed_attempts=0, refusals=0, deaths_as_suspect=0, lane=lane
    )


def ended(lanes: LaneRules, lane: Lane | None) -> bool:
    """Whether one that ends makes room."""
    its = lease("t", lane)
    return lanes.record_completion(its, Settlement(its, b"{}", ""))


def test_two_deaths_make_a_suspect_and_only_further_ones_are_blamed_on_it() -> None:
    assert [choose_lane(deaths) for deaths in range(4)] == [None, None, Lane.SUSPECTS, Lane.SUSPECTS]
    assert [count_losses(deaths) for deaths in range(5)] == [0, 0, 0, 1, 2]


def test_each_lane_has_its_room() -> None:
    lanes = LaneRules()
    assert lanes.compute_rooms(Counter(), now=0.0) == {Lane.SUSPECTS: 0}, "others wait, and it is young"
    assert lanes.record_claim(claimable_count=0), "nothing may be left but suspects"
    assert lanes.compute_rooms(Counter(), now=0.0) == {Lane.SUSPECTS: 1}
    assert not lanes.record_claim(claimable_count=0)
    assert lanes.compute_rooms(Counter({Lane.SUSPECTS: 1}), now=STARTUP_S) == {Lane.SUSPECTS: 0}


def test_only_what_ends_in_a_lane_makes_room_in_it() -> None:
    lanes = LaneRules()
    lanes.compute_rooms(Counter(), now=0.0)
    for _ in range(4):
        assert not ended(lanes, None)
    assert lanes.compute_rooms(Counter(), now=STARTUP_S) == {Lane.SUSPECTS: 1}
    for _ in range(2):
        assert ended(lanes, Lane.SUSPECTS)
    assert lanes.compute_rooms(Counter(), now=STARTUP_S) == {Lane.SUSPECTS: 2}


async def test_what_is_held_of_a_lane_is_counted_until_it_is_dropped() -> None:
    holding = InFlightTable()
    for token, lane in (("a", None), ("b", Lane.SUSPECTS), ("c", Lane.SUSPECTS)):
        holding.add_lease(lease(token, lane), 0.0, is_probe=False)
    assert holding.lane_counts == {Lane.SUSPECTS: 2}
    holding.remove_lease("a")
    holding.remove_lease("b")
    holding.remove_lease("b")
    assert holding.lane_counts[Lane.SUSPECTS] == 1
