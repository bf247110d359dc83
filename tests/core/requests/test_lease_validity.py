"""What may be sent of what is held, however long its process stood still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.lease_validity import LeaseValidity

LEASE_S, TIMEOUT_S = 30.0, 5.0


def test_lease_holds_while_its_owner_is_heard_of_and_it_is_renewed() -> None:
    tenure = LeaseValidity(LEASE_S, TIMEOUT_S)
    assert not tenure.is_certainly_held(0.0, 0.0), "nothing was heard of it yet"
    for at in range(100):
        tenure.record_contact(float(at), at + 0.1)
        assert tenure.is_certainly_held(at - 29.0, at + 0.9) is (
            at >= 29
        )  # nothing is confirmed before the first call
    assert tenure.is_certainly_held(99.0, 103.9)
    assert not tenure.is_certainly_held(99.0, 104.0)


def test_lease_whose_time_ran_out_is_not_ours_though_we_are_heard_of() -> None:
    tenure = LeaseValidity(LEASE_S, TIMEOUT_S)
    for at in range(31):
        tenure.record_contact(float(at), at + 0.1)
    assert tenure.is_certainly_held(0.5, 30.4)
    assert not tenure.is_certainly_held(0.5, 30.5)


def test_call_that_may_have_been_carried_out_too_late_breaks_it_too() -> None:
    tenure = LeaseValidity(LEASE_S, TIMEOUT_S)
    tenure.record_contact(0.0, 0.1)
    tenure.record_contact(3.0, 5.0)
    assert not tenure.is_certainly_held(0.0, 5.0)
    assert tenure.is_certainly_held(3.0, 7.9)


def test_being_heard_of_again_gives_back_nothing_that_was_held_before_a_silence() -> None:
    tenure = LeaseValidity(LEASE_S, TIMEOUT_S)
    tenure.record_contact(0.0, 0.1)
    tenure.record_contact(5.0, 5.1)
    assert not tenure.is_certainly_held(4.9, 5.1)
    assert tenure.is_certainly_held(5.0, 5.1)
    tenure.record_contact(2.0, 5.1)  # asked before it, and answered after
    assert not tenure.is_certainly_held(2.0, 5.1)


@pytest.mark.parametrize("now", [0.0, 29.9])
def test_without_a_timeout_of_owners_only_the_lease_s_time_counts(now: float) -> None:
    assert LeaseValidity(LEASE_S, 0.0).is_certainly_held(0.0, now)
    assert not LeaseValidity(LEASE_S, 0.0).is_certainly_held(0.0, LEASE_S)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "renew", "stop"]),
            st.floats(0, 8),  # seconds until the next step
            st.floats(0, 2),  # on the way there
            st.floats(0, 2),  # on the way back
        ),
        max_size=40,
    )
)
def test_what_the_queue_gave_to_others_is_never_held(steps: list[tuple[str, float, float, float]]) -> None:
    """A queue that takes back at the very moment when it may, seen by an owner that stops anywhere."""
    tenure = LeaseValidity(LEASE_S, TIMEOUT_S)
    now, silent_at, ends_at, lost_at = 0.0, TIMEOUT_S, LEASE_S, float("inf")
    tenure.record_contact(now, now)
    confirmed_at = now
    for what, pause_s, there_s, back_s in steps:
        now += pause_s
        if what == "stop":
            continue
        asked_at, now = now, now + there_s
        if lost_at == float("inf") and now >= min(silent_at, ends_at):
            lost_at = min(silent_at, ends_at)
        silent_at = now + TIMEOUT_S
        if what == "renew" and lost_at == float("inf"):
            ends_at = now + LEASE_S
        now += back_s
        tenure.record_contact(asked_at, now)
        if what == "renew" and lost_at == float("inf"):
            confirmed_at = asked_at
        taken_at = min(lost_at, silent_at, ends_at)
        for later_s in (0.0, 1.0, 4.0, 20.0):
            if tenure.is_certainly_held(confirmed_at, now + later_s):
                assert now + later_s < taken_at
