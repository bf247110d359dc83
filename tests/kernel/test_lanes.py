"""The rules of all lanes, as the loop uses them."""

from __future__ import annotations

from collections import Counter

from dispatcher.kernel.in_flight import InFlightTable
from dispatcher.kernel.lanes import LaneRules
from dispatcher.kernel.suspects import STARTUP_S
from dispatcher.queue.contract import Lease, Settlement
from dispatcher.requests.lanes import Lane, choose_lane, count_losses


def build_lease(token: str, lane: Lane | None = None) -> Lease:
    return Lease(
        1, token, b"", 0.0, deliveries=3, failed_attempts=0, refusals=0, deaths_as_suspect=0, lane=lane
    )


def record_completion(lanes: LaneRules, lane: Lane | None) -> bool:
    """Record a completion in the lane. Return True if that makes room."""
    lease = build_lease("t", lane)
    return lanes.record_completion(lease, Settlement(lease, b"{}", ""))


def compute_suspect_room(lanes: LaneRules, lane_counts: Counter[Lane], now: float) -> int:
    return lanes.compute_rooms(lane_counts, now)[Lane.SUSPECTS]


def test_request_is_a_suspect_after_two_deaths_and_only_later_deaths_count_as_losses() -> None:
    assert [choose_lane(deaths) for deaths in range(4)] == [None, None, Lane.SUSPECTS, Lane.SUSPECTS]
    started = [choose_lane(deaths, has_progress=True) for deaths in range(3)]
    assert started == [Lane.STARTED, Lane.STARTED, Lane.SUSPECTS]
    assert [count_losses(deaths) for deaths in range(5)] == [0, 0, 0, 1, 2]


def test_suspects_have_room_when_no_other_work_waits() -> None:
    lanes = LaneRules()
    assert compute_suspect_room(lanes, Counter(), 0.0) == 0, (
        "other work may wait, and the process has just started"
    )
    assert lanes.record_claim(claimable_count=0), "claim again, because only suspects may be left"
    assert compute_suspect_room(lanes, Counter(), 0.0) == 1
    assert not lanes.record_claim(claimable_count=0)
    assert compute_suspect_room(lanes, Counter({Lane.SUSPECTS: 1}), STARTUP_S) == 0


def test_only_a_completion_in_the_lane_makes_room_in_it() -> None:
    lanes = LaneRules()
    lanes.compute_rooms(Counter(), now=0.0)
    for _ in range(4):
        assert not record_completion(lanes, None)
    assert compute_suspect_room(lanes, Counter(), STARTUP_S) == 1
    for _ in range(2):
        assert record_completion(lanes, Lane.SUSPECTS)
    assert compute_suspect_room(lanes, Counter(), STARTUP_S) == 2


def test_started_requests_have_room_however_many_run() -> None:
    lanes = LaneRules()
    for number in (0, 5_000):
        assert lanes.compute_rooms(Counter({Lane.STARTED: number}), now=0.0)[Lane.STARTED] > 1_000
    assert not record_completion(lanes, Lane.STARTED), "its end makes no more room in the lane"


async def test_leases_of_a_lane_are_counted_until_they_are_removed() -> None:
    table = InFlightTable()
    for token, lane in (("a", None), ("b", Lane.SUSPECTS), ("c", Lane.SUSPECTS)):
        table.add_lease(build_lease(token, lane), 0.0, is_probe=False)
    assert table.lane_counts == {Lane.SUSPECTS: 2}
    table.remove_lease("a")
    table.remove_lease("b")
    table.remove_lease("b")
    assert table.lane_counts[Lane.SUSPECTS] == 1
