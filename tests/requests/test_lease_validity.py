"""A lease counts as held only while no other owner can have taken it, even if the process was suspended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.lease_validity import LeaseValidity

LEASE_S, TIMEOUT_S = 30.0, 5.0


def test_lease_is_held_while_its_owner_has_contact_and_the_lease_has_not_expired() -> None:
    validity = LeaseValidity(LEASE_S, TIMEOUT_S)
    assert not validity.is_certainly_held(0.0, 0.0), "the owner has had no contact yet"
    for at in range(100):
        validity.record_contact(float(at), at + 0.1)
        assert validity.is_certainly_held(at - 29.0, at + 0.9) is (
            at >= 29
        )  # nothing is confirmed before the first call
    assert validity.is_certainly_held(99.0, 103.9)
    assert not validity.is_certainly_held(99.0, 104.0)


def test_expired_lease_is_not_held_although_its_owner_has_contact() -> None:
    validity = LeaseValidity(LEASE_S, TIMEOUT_S)
    for at in range(31):
        validity.record_contact(float(at), at + 0.1)
    assert validity.is_certainly_held(0.5, 30.4)
    assert not validity.is_certainly_held(0.5, 30.5)


def test_call_that_may_have_been_executed_too_late_ends_the_unbroken_contact() -> None:
    validity = LeaseValidity(LEASE_S, TIMEOUT_S)
    validity.record_contact(0.0, 0.1)
    validity.record_contact(3.0, 5.0)
    assert not validity.is_certainly_held(0.0, 5.0)
    assert validity.is_certainly_held(3.0, 7.9)


def test_renewed_contact_does_not_restore_leases_from_before_a_gap() -> None:
    validity = LeaseValidity(LEASE_S, TIMEOUT_S)
    validity.record_contact(0.0, 0.1)
    validity.record_contact(5.0, 5.1)
    assert not validity.is_certainly_held(4.9, 5.1)
    assert validity.is_certainly_held(5.0, 5.1)
    validity.record_contact(2.0, 5.1)  # sent before the previous call, and answered after it
    assert not validity.is_certainly_held(2.0, 5.1)


@pytest.mark.parametrize("now", [0.0, 29.9])
def test_without_an_owner_timeout_only_the_lease_time_counts(now: float) -> None:
    assert LeaseValidity(LEASE_S, 0.0).is_certainly_held(0.0, now)
    assert not LeaseValidity(LEASE_S, 0.0).is_certainly_held(0.0, LEASE_S)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "renew", "stop"]),
            st.floats(0, 8),  # seconds until the step
            st.floats(0, 2),  # transit time of the call
            st.floats(0, 2),  # transit time of its answer
        ),
        max_size=40,
    )
)
def test_reclaimed_lease_is_never_held(steps: list[tuple[str, float, float, float]]) -> None:
    """The queue reclaims the lease at the earliest permitted moment. The owner may stop before any step."""
    validity = LeaseValidity(LEASE_S, TIMEOUT_S)
    now, silent_at, ends_at, lost_at = 0.0, TIMEOUT_S, LEASE_S, float("inf")
    validity.record_contact(now, now)
    confirmed_at = now
    for step, pause_s, request_s, answer_s in steps:
        now += pause_s
        if step == "stop":
            continue
        asked_at, now = now, now + request_s
        if lost_at == float("inf") and now >= min(silent_at, ends_at):
            lost_at = min(silent_at, ends_at)
        silent_at = now + TIMEOUT_S
        if step == "renew" and lost_at == float("inf"):
            ends_at = now + LEASE_S
        now += answer_s
        validity.record_contact(asked_at, now)
        if step == "renew" and lost_at == float("inf"):
            confirmed_at = asked_at
        reclaimed_at = min(lost_at, silent_at, ends_at)
        for later_s in (0.0, 1.0, 4.0, 20.0):
            if validity.is_certainly_held(confirmed_at, now + later_s):
                assert now + later_s < reclaimed_at
