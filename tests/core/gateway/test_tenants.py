"""A tenant that is refused whatever the pool has room for rests, and stops nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.tenants import (
    FIRST_REST_S,
    MAX_REST_S,
    MAX_TENANTS,
    MAX_TRIED_AT_ONCE,
    MIN_CLOSURES,
    TenantRefusals,
)


def closed(tenants: TenantRefusals, tenant: str, times: int, *, at: float = 0.0) -> float:
    """The tenant closes the gate so often, once per reading; returns when the last refusal came."""
    for _ in range(times):
        at += 1.0
        tenants.record_refusal(tenant, at, read_at=at - 0.5)
    return at


def test_tenant_rests_from_its_third_closure_in_a_row() -> None:
    tenants = TenantRefusals()
    told = [tenants.record_refusal("a", float(at), read_at=at - 0.5) for at in range(1, MIN_CLOSURES + 1)]
    assert told == [True] * (MIN_CLOSURES - 1) + [False]
    assert tenants.admit_request("a", float(MIN_CLOSURES)) == FIRST_REST_S


def test_refusals_under_one_reading_are_one_closure() -> None:
    """A limit of thirty requests is refused thirty times at once: that is one gate closed, not thirty."""
    tenants = TenantRefusals()
    assert all(tenants.record_refusal("a", 1.0 + number / 100, read_at=0.5) for number in range(30))
    assert tenants.admit_request("a", 2.0) == 0.0


def test_rest_doubles_up_to_its_most() -> None:
    tenants, rests = TenantRefusals(), []
    at = closed(tenants, "a", MIN_CLOSURES - 1)
    for _ in range(8):
        at = closed(tenants, "a", 1, at=at)
        rests.append(tenants.admit_request("a", at))
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0]
    closed(tenants, "a", 2000, at=at)  # nor does it overflow
    assert tenants.admit_request("a", at + 2000) == MAX_REST_S


def test_rest_counts_down() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES)
    assert tenants.admit_request("a", at + 0.25 * FIRST_REST_S) == pytest.approx(0.75 * FIRST_REST_S)


def test_after_its_rest_one_request_is_tried_and_the_others_wait() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES) + FIRST_REST_S
    assert [tenants.admit_request("a", at) for _ in range(3)] == [0.0, FIRST_REST_S, FIRST_REST_S]


def test_refused_trial_is_a_longer_rest() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES) + FIRST_REST_S
    assert tenants.admit_request("a", at) == 0.0
    assert tenants.record_refusal("a", at + 0.1, read_at=at) is False
    assert tenants.admit_request("a", at + 0.1) == 2 * FIRST_REST_S


def test_trial_that_says_nothing_lets_the_next_one_try() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES) + FIRST_REST_S
    assert tenants.admit_request("a", at) == 0.0
    tenants.end_trial("a")
    assert tenants.admit_request("a", at) == 0.0


def test_trial_that_is_never_heard_of_again_holds_the_others_no_longer_than_the_longest_rest() -> None:
    """It was cancelled, or its lease was lost: nobody tells, and nobody may starve for it."""
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES) + FIRST_REST_S
    assert tenants.admit_request("a", at) == 0.0
    assert tenants.admit_request("a", at + MAX_REST_S - 0.25) == 0.25
    assert tenants.admit_request("a", at + MAX_REST_S) == 0.0


def test_accepted_request_ends_the_rest_and_the_count() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES)
    tenants.record_acceptance("a", sent_at=at)
    assert tenants.admit_request("a", at) == 0.0
    assert tenants.record_refusal("a", at + 1, read_at=at) is True


def test_answer_to_what_was_sent_before_the_first_refusal_says_nothing() -> None:
    """Thousands were sent while the tenant had quota left; their answers come long after it ran out."""
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES)
    tenants.record_acceptance("a", sent_at=0.5)
    assert tenants.admit_request("a", at) == FIRST_REST_S


def test_others_do_not_rest_with_it() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES)
    assert tenants.admit_request("b", at) == 0.0
    assert tenants.record_refusal("b", at, read_at=at - 0.5) is True


def test_requests_without_a_tenant_never_rest_and_always_teach() -> None:
    tenants = TenantRefusals()
    for at in range(1, 50):
        assert tenants.record_refusal("", float(at), read_at=at - 0.5) is True
        assert tenants.admit_request("", float(at)) == 0.0
    tenants.record_acceptance("", 1.0)
    tenants.end_trial("")


def test_the_refused_rest_together_whatever_tenant_each_names() -> None:
    tenants = TenantRefusals()
    told = [
        tenants.record_refusal(f"t{at}", float(at), at - 0.5, was_refused=True)
        for at in range(1, MIN_CLOSURES + 1)
    ]
    assert told == [True] * (MIN_CLOSURES - 1) + [False]
    at = float(MIN_CLOSURES)
    assert (
        tenants.admit_request("another", at, was_refused=True)
        == tenants.admit_request("", at, was_refused=True)
        == FIRST_REST_S
    )
    assert tenants.admit_request("another", at) == tenants.admit_request("", at) == 0.0, "who never was goes"
    later = at + FIRST_REST_S
    assert [tenants.admit_request("", later, was_refused=True) for _ in range(2)] == [0.0, FIRST_REST_S], (
        "one is tried"
    )
    tenants.record_acceptance("", later, was_refused=True)
    assert tenants.admit_request("", later, was_refused=True) == 0.0


def test_a_trial_is_given_only_where_both_standings_allow_it() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a", MIN_CLOSURES)
    for number in range(MIN_CLOSURES + 2):
        tenants.record_refusal("", at + number, at + number - 0.5, was_refused=True)
    at += MIN_CLOSURES + 1
    assert tenants.admit_request("a", at, was_refused=True) > FIRST_REST_S, "the longer rest of the two"
    assert tenants.admit_request("a", at) == 0.0, "that took no trial of the tenant's"


def test_while_nothing_is_accepted_few_are_tried_at_a_time_and_nobody_teaches() -> None:
    tenants = TenantRefusals()
    told = [
        tenants.record_refusal("", float(at), at - 0.5, is_alone=True) for at in range(1, MIN_CLOSURES + 3)
    ]
    assert told == [True] * (MIN_CLOSURES - 1) + [False] * 3
    at_once = [tenants.max_tried_at_once]
    for sent_at in (0.5, 4.0):  # before the first refusal, and after it
        tenants.record_acceptance("", sent_at)
        at_once.append(tenants.max_tried_at_once)
    assert at_once == [MAX_TRIED_AT_ONCE, MAX_TRIED_AT_ONCE, None]
    assert tenants.record_refusal("", 9.0, 8.5, is_alone=True) is True


def test_what_still_runs_was_accepted() -> None:
    """Long requests in a pool that is smaller than it says: refusals among them teach."""
    tenants = TenantRefusals()
    for at in range(1, 20):
        assert tenants.record_refusal("", float(at), at - 0.5, is_alone=at % MIN_CLOSURES != 0) is True
    assert tenants.max_tried_at_once is None


def test_a_name_of_any_length_takes_no_more_room() -> None:
    tenants = TenantRefusals()
    at = closed(tenants, "a" * 100_000, MIN_CLOSURES)
    assert tenants.admit_request("a" * 100_000, at) == FIRST_REST_S
    assert tenants.admit_request("a" * 100_001, at) == 0.0
    assert all(len(name) < 200 for name in tenants._by_tenant)


def test_those_refused_longest_ago_are_forgotten_first_and_memory_is_bounded() -> None:
    """Names come from producers: any number of them."""
    tenants = TenantRefusals()
    at = closed(tenants, "old", MIN_CLOSURES)
    closed(tenants, "kept", MIN_CLOSURES)
    for number in range(MAX_TENANTS - 2):
        tenants.record_refusal(f"t{number}", at, read_at=at)
    tenants.record_refusal("kept", at, read_at=at - 0.5)  # again: no longer among the oldest
    assert tenants.admit_request("old", at) > 0
    for number in range(MAX_TENANTS - 1):
        tenants.record_refusal(f"u{number}", at, read_at=at)
    assert tenants.admit_request("kept", at) > 0
    assert tenants.admit_request("old", at) == 0.0
    assert len(tenants._by_tenant) == MAX_TENANTS


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
def test_whatever_happened_a_request_that_waits_as_told_goes_within_two_longest_rests(
    steps: list[tuple[str, str, float, float]],
) -> None:
    tenants, now = TenantRefusals(), 0.0
    for what, tenant, passed_s, ago_s in steps:
        now += passed_s
        if what == "refused":
            assert tenants.record_refusal(tenant, now, now - ago_s) or tenant
        elif what == "accepted":
            tenants.record_acceptance(tenant, now - ago_s)
        elif what == "ended":
            tenants.end_trial(tenant)
        else:
            assert 0.0 <= tenants.admit_request(tenant, now) <= MAX_REST_S
    for tenant in ("", "a", "b", "unseen"):
        for _ in range(3):  # each goes, and is never heard of again
            waited_s = 0.0
            while (rest_s := tenants.admit_request(tenant, now)) > 0:
                now, waited_s = now + rest_s, waited_s + rest_s
                assert waited_s <= 2 * MAX_REST_S


@given(STEPS)
def test_two_closures_between_acceptances_never_make_anybody_rest(
    steps: list[tuple[str, str, float, float]],
) -> None:
    tenants, now = TenantRefusals(), 0.0
    closures: dict[str, set[float]] = {}
    for _, tenant, passed_s, _ in steps:
        now += passed_s + 0.001
        if len(closures.setdefault(tenant, set())) == MIN_CLOSURES - 1:
            tenants.record_acceptance(tenant, now)
            closures[tenant].clear()
        assert tenants.record_refusal(tenant, now, now) is True
        closures[tenant].add(now)
        assert tenants.admit_request(tenant, now) == 0.0


def test_calm_is_where_nobody_has_been_refused_since_all_that_were_got_an_answer() -> None:
    """Then who was not refused goes, and what an answer says of it need not be told."""
    tenants = TenantRefusals()
    calm = [tenants.has_no_refusals]
    tenants.record_refusal("a", 1.0, read_at=0.5)
    calm.append(tenants.has_no_refusals)
    tenants.record_acceptance("a", 2.0)
    calm.append(tenants.has_no_refusals)
    tenants.record_refusal("", 3.0, read_at=2.5, is_alone=True)
    calm.append(tenants.has_no_refusals)
    assert calm == [True, False, True, False]
    tenants.record_acceptance("", 4.0)
    assert tenants.has_no_refusals
