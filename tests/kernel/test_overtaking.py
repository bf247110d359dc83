"""How long lighter requests may overtake one that waits for room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.kernel.overtaking import MAX_KNOWN_REQUESTS, MAX_OVERTAKEN_S, MAX_PASSED_BLOCKED, Overtaking

MEAN_S = 2.0


def test_request_is_overtaken_for_the_mean_duration_after_it_was_seen_first() -> None:
    overtaking = Overtaking()
    assert overtaking.count_passable(0.0, MEAN_S) == MAX_PASSED_BLOCKED
    assert overtaking.record_claim(7, 10.0)
    assert overtaking.count_passable(11.75, MEAN_S) == MAX_PASSED_BLOCKED
    assert overtaking.count_passable(12.0, MEAN_S) == 0


def test_request_is_not_overtaken_before_a_duration_is_known() -> None:
    assert Overtaking().count_passable(0.0, 0.0) == 0


def test_request_is_overtaken_for_a_minute_at_most() -> None:
    overtaking = Overtaking()
    overtaking.record_claim(7, 0.0)
    assert overtaking.count_passable(MAX_OVERTAKEN_S - 1, 1000.0) == MAX_PASSED_BLOCKED
    assert overtaking.count_passable(MAX_OVERTAKEN_S, 1000.0) == 0


def test_claim_that_comes_to_no_request_without_room_changes_nothing() -> None:
    overtaking = Overtaking()
    overtaking.record_claim(7, 0.0)
    assert not overtaking.record_claim(None, 5.0)
    assert overtaking.count_passable(5.0, MEAN_S) == 0


def test_next_request_that_waits_is_overtaken_as_well() -> None:
    overtaking = Overtaking()
    overtaking.record_claim(7, 0.0)
    assert overtaking.record_claim(8, 5.0)
    assert not overtaking.record_claim(8, 5.5)
    assert overtaking.count_passable(6.0, MEAN_S) == MAX_PASSED_BLOCKED


def test_request_that_waits_again_behind_a_better_one_keeps_its_time() -> None:
    overtaking = Overtaking()
    for entry_id, at in ((7, 0.0), (8, 1.0), (7, 3.0)):
        overtaking.record_claim(entry_id, at)
    assert overtaking.count_passable(3.0, MEAN_S) == 0


def test_only_the_newest_requests_are_remembered() -> None:
    overtaking = Overtaking()
    for entry_id in range(MAX_KNOWN_REQUESTS + 1):
        overtaking.record_claim(entry_id, 0.0)
    for entry_id, count in ((1, 0), (0, MAX_PASSED_BLOCKED)):
        overtaking.record_claim(entry_id, 10.0)
        assert overtaking.count_passable(10.0, MEAN_S) == count


@given(
    claims=st.lists(
        st.tuples(st.floats(0.01, 3.0), st.sampled_from([None, 1, 1, 1, 2, 3]), st.floats(0.0, 100.0)),
        max_size=60,
    )
)
def test_law_first_request_is_overtaken_for_no_longer_than_a_mean_duration(
    claims: list[tuple[float, int | None, float]],
) -> None:
    """Requests that wait before it in between do not prolong the time."""
    overtaking, seen_at, first, at = Overtaking(), dict[int, float](), None, 0.0
    for passed_s, blocked, mean_s in claims:
        at += passed_s
        if first is not None and at - seen_at[first] >= min(mean_s, MAX_OVERTAKEN_S):
            assert overtaking.count_passable(at, mean_s) == 0
        overtaking.record_claim(blocked, at)
        if blocked is not None:
            seen_at.setdefault(blocked, at)
            first = blocked
