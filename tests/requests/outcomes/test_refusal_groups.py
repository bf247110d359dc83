"""A group of requests that is refused regardless of free capacity rests, and delays no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.outcomes.refusal_groups import (
    FIRST_REST_S,
    MAX_GROUPS,
    MAX_REST_S,
    MAX_TRIED_AT_ONCE,
    MIN_CLOSURES,
    RefusalGroups,
)


def close_gate(groups: RefusalGroups, fairness_id: str, times: int, *, at: float = 0.0) -> float:
    """Let the group close the gate this often, once per reading. Return the time of the last refusal."""
    for _ in range(times):
        at += 1.0
        groups.record_refusal(fairness_id, at, read_at=at - 0.5)
    return at


def test_group_rests_from_its_third_closure_in_a_row() -> None:
    groups = RefusalGroups()
    informative = [
        groups.record_refusal("a", float(at), read_at=at - 0.5) for at in range(1, MIN_CLOSURES + 1)
    ]
    assert informative == [True] * (MIN_CLOSURES - 1) + [False]
    assert groups.admit_request("a", float(MIN_CLOSURES)) == FIRST_REST_S


def test_refusals_under_one_reading_are_one_closure() -> None:
    """Thirty requests that are refused at once close the gate once."""
    groups = RefusalGroups()
    assert all(groups.record_refusal("a", 1.0 + number / 100, read_at=0.5) for number in range(30))
    assert groups.admit_request("a", 2.0) == 0.0


def test_rest_doubles_up_to_its_maximum() -> None:
    groups, rests = RefusalGroups(), []
    at = close_gate(groups, "a", MIN_CLOSURES - 1)
    for _ in range(8):
        at = close_gate(groups, "a", 1, at=at)
        rests.append(groups.admit_request("a", at))
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0]
    close_gate(groups, "a", 2000, at=at)  # many closures do not overflow
    assert groups.admit_request("a", at + 2000) == MAX_REST_S


def test_rest_counts_down() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES)
    assert groups.admit_request("a", at + 0.25 * FIRST_REST_S) == pytest.approx(0.75 * FIRST_REST_S)


def test_one_request_is_tried_after_the_rest_while_the_others_wait() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES) + FIRST_REST_S
    assert [groups.admit_request("a", at) for _ in range(3)] == [0.0, FIRST_REST_S, FIRST_REST_S]


def test_refused_trial_doubles_the_rest() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES) + FIRST_REST_S
    assert groups.admit_request("a", at) == 0.0
    assert groups.record_refusal("a", at + 0.1, read_at=at) is False
    assert groups.admit_request("a", at + 0.1) == 2 * FIRST_REST_S


def test_trial_without_a_verdict_lets_the_next_request_try() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES) + FIRST_REST_S
    assert groups.admit_request("a", at) == 0.0
    groups.end_trial("a")
    assert groups.admit_request("a", at) == 0.0


def test_trial_that_never_ends_delays_the_others_for_the_longest_rest_only() -> None:
    """A request that was cancelled, or whose lease was lost, never ends its trial."""
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES) + FIRST_REST_S
    assert groups.admit_request("a", at) == 0.0
    assert groups.admit_request("a", at + MAX_REST_S - 0.25) == 0.25
    assert groups.admit_request("a", at + MAX_REST_S) == 0.0


def test_accepted_request_ends_the_rest_and_the_count() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES)
    groups.record_acceptance("a", sent_at=at)
    assert groups.admit_request("a", at) == 0.0
    assert groups.record_refusal("a", at + 1, read_at=at) is True


def test_answer_to_a_request_sent_before_the_first_refusal_does_not_end_the_rest() -> None:
    """Answers to requests that were sent before the quota was used up arrive long after."""
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES)
    groups.record_acceptance("a", sent_at=0.5)
    assert groups.admit_request("a", at) == FIRST_REST_S


def test_answer_to_a_request_sent_at_the_first_refusal_ends_the_rest() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES)
    groups.record_acceptance("a", sent_at=1.0)
    assert groups.admit_request("a", at) == 0.0
    for _ in range(MIN_CLOSURES):
        at += 1.0
        groups.record_refusal("", at, at - 0.5, was_refused=True)
    groups.record_acceptance("", sent_at=at)
    assert groups.admit_request("", at, was_refused=True) == FIRST_REST_S, "that request was never refused"
    groups.record_acceptance("", sent_at=at - MIN_CLOSURES + 1, was_refused=True)
    assert groups.admit_request("", at, was_refused=True) == 0.0


def test_few_requests_are_tried_from_the_third_refusal_in_a_row_of_a_request_alone() -> None:
    groups, tried = RefusalGroups(), []
    for at in range(1, MIN_CLOSURES + 1):
        groups.record_refusal("", float(at), at - 0.5, is_alone=True)
        tried.append(groups.max_tried_at_once)
    assert tried == [None] * (MIN_CLOSURES - 1) + [MAX_TRIED_AT_ONCE]
    groups.record_acceptance("", sent_at=0.9)
    assert groups.max_tried_at_once == MAX_TRIED_AT_ONCE
    groups.record_acceptance("", sent_at=1.0)
    assert groups.max_tried_at_once is None


def test_other_groups_do_not_rest() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES)
    assert groups.admit_request("b", at) == 0.0
    assert groups.record_refusal("b", at, read_at=at - 0.5) is True


def test_requests_without_a_fairness_id_never_rest_and_always_count_for_the_capacity() -> None:
    groups = RefusalGroups()
    for at in range(1, 50):
        assert groups.record_refusal("", float(at), read_at=at - 0.5) is True
        assert groups.admit_request("", float(at)) == 0.0
    groups.record_acceptance("", 1.0)
    groups.end_trial("")


def test_refused_requests_rest_together_whatever_fairness_id_each_has() -> None:
    groups = RefusalGroups()
    informative = [
        groups.record_refusal(f"t{at}", float(at), at - 0.5, was_refused=True)
        for at in range(1, MIN_CLOSURES + 1)
    ]
    assert informative == [True] * (MIN_CLOSURES - 1) + [False]
    at = float(MIN_CLOSURES)
    assert (
        groups.admit_request("another", at, was_refused=True)
        == groups.admit_request("", at, was_refused=True)
        == FIRST_REST_S
    )
    assert groups.admit_request("another", at) == groups.admit_request("", at) == 0.0, (
        "a request that was never refused is admitted"
    )
    later = at + FIRST_REST_S
    assert [groups.admit_request("", later, was_refused=True) for _ in range(2)] == [0.0, FIRST_REST_S], (
        "only one request is tried"
    )
    groups.record_acceptance("", later, was_refused=True)
    assert groups.admit_request("", later, was_refused=True) == 0.0


def test_trial_is_granted_only_if_both_groups_of_the_request_allow_it() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a", MIN_CLOSURES)
    for number in range(MIN_CLOSURES + 2):
        groups.record_refusal("", at + number, at + number - 0.5, was_refused=True)
    at += MIN_CLOSURES + 1
    assert groups.admit_request("a", at, was_refused=True) > FIRST_REST_S, (
        "the longer rest of both groups applies"
    )
    assert groups.admit_request("a", at) == 0.0, "the trial of the group is still available"


def test_few_requests_are_tried_at_a_time_while_none_is_accepted() -> None:
    groups = RefusalGroups()
    informative = [
        groups.record_refusal("", float(at), at - 0.5, is_alone=True) for at in range(1, MIN_CLOSURES + 3)
    ]
    assert informative == [True] * (MIN_CLOSURES - 1) + [False] * 3
    max_tried = [groups.max_tried_at_once]
    for sent_at in (0.5, 4.0):  # before the first refusal, and after it
        groups.record_acceptance("", sent_at)
        max_tried.append(groups.max_tried_at_once)
    assert max_tried == [MAX_TRIED_AT_ONCE, MAX_TRIED_AT_ONCE, None]
    assert groups.record_refusal("", 9.0, 8.5, is_alone=True) is True


def test_refusal_counts_for_the_capacity_while_other_requests_run() -> None:
    """Long requests run in a pool that is smaller than configured."""
    groups = RefusalGroups()
    for at in range(1, 20):
        assert groups.record_refusal("", float(at), at - 0.5, is_alone=at % MIN_CLOSURES != 0) is True
    assert groups.max_tried_at_once is None


def test_long_fairness_id_is_stored_in_bounded_space() -> None:
    groups = RefusalGroups()
    at = close_gate(groups, "a" * 100_000, MIN_CLOSURES)
    assert groups.admit_request("a" * 100_000, at) == FIRST_REST_S
    assert groups.admit_request("a" * 100_001, at) == 0.0
    assert all(len(name) < 200 for name in groups._by_fairness_id)


def test_fairness_id_refused_longest_ago_is_forgotten_first() -> None:
    """Producers choose the names, so their number is not bounded."""
    groups = RefusalGroups()
    at = close_gate(groups, "old", MIN_CLOSURES)
    close_gate(groups, "kept", MIN_CLOSURES)
    for number in range(MAX_GROUPS - 2):
        groups.record_refusal(f"t{number}", at, read_at=at)
    groups.record_refusal("kept", at, read_at=at - 0.5)  # refused again, so it is not among the oldest
    assert groups.admit_request("old", at) > 0
    for number in range(MAX_GROUPS - 1):
        groups.record_refusal(f"u{number}", at, read_at=at)
    assert groups.admit_request("kept", at) > 0
    assert groups.admit_request("old", at) == 0.0
    assert len(groups._by_fairness_id) == MAX_GROUPS


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["refused", "refused", "asked", "asked", "ended", "accepted"]),
        st.sampled_from(["a", "b", ""]),
        st.floats(0.001, 30.0),
        st.sampled_from([0.0, 40.0]),
    ),
    max_size=80,
)


@given(STEPS)
def test_request_that_obeys_its_rests_is_sent_within_two_longest_rests(
    steps: list[tuple[str, str, float, float]],
) -> None:
    groups, now = RefusalGroups(), 0.0
    for step, fairness_id, passed_s, ago_s in steps:
        now += passed_s
        if step == "refused":
            assert groups.record_refusal(fairness_id, now, now - ago_s) or fairness_id
        elif step == "accepted":
            groups.record_acceptance(fairness_id, now - ago_s)
        elif step == "ended":
            groups.end_trial(fairness_id)
        else:
            assert 0.0 <= groups.admit_request(fairness_id, now) <= MAX_REST_S
    for fairness_id in ("", "a", "b", "unseen"):
        for _ in range(3):  # each is admitted, and its trial never ends
            waited_s = 0.0
            while (rest_s := groups.admit_request(fairness_id, now)) > 0:
                now, waited_s = now + rest_s, waited_s + rest_s
                assert waited_s <= 2 * MAX_REST_S


@given(STEPS)
def test_group_with_two_closures_between_acceptances_never_rests(
    steps: list[tuple[str, str, float, float]],
) -> None:
    groups, now = RefusalGroups(), 0.0
    closures: dict[str, set[float]] = {}
    for _, fairness_id, passed_s, _ in steps:
        now += passed_s + 0.001
        if len(closures.setdefault(fairness_id, set())) == MIN_CLOSURES - 1:
            groups.record_acceptance(fairness_id, now)
            closures[fairness_id].clear()
        assert groups.record_refusal(fairness_id, now, now) is True
        closures[fairness_id].add(now)
        assert groups.admit_request(fairness_id, now) == 0.0


def test_refusals_are_over_when_every_refused_group_was_accepted_again() -> None:
    """Then every request is admitted, and answers need not be recorded."""
    groups = RefusalGroups()
    has_no_refusals_after = [groups.has_no_refusals]
    groups.record_refusal("a", 1.0, read_at=0.5)
    has_no_refusals_after.append(groups.has_no_refusals)
    groups.record_acceptance("a", 2.0)
    has_no_refusals_after.append(groups.has_no_refusals)
    groups.record_refusal("", 3.0, read_at=2.5, is_alone=True)
    has_no_refusals_after.append(groups.has_no_refusals)
    assert has_no_refusals_after == [True, False, True, False]
    groups.record_acceptance("", 4.0)
    assert groups.has_no_refusals
