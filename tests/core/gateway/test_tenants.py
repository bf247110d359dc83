"""A tenant that is refused whatever the pool has room for rests, and stops nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.tenants import KEPT, REST_FIRST_S, REST_FROM, REST_MOST_S, SIFTED, Tenants


def closed(tenants: Tenants, tenant: str, times: int, *, at: float = 0.0) -> float:
    """The tenant closes the gate so often, once per reading; returns when the last refusal came."""
    for _ in range(times):
        at += 1.0
        tenants.refused(tenant, at, read_at=at - 0.5)
    return at


def test_tenant_rests_from_its_third_closure_in_a_row() -> None:
    tenants = Tenants()
    told = [tenants.refused("a", float(at), read_at=at - 0.5) for at in range(1, REST_FROM + 1)]
    assert told == [True] * (REST_FROM - 1) + [False]
    assert tenants.rest_s("a", float(REST_FROM)) == REST_FIRST_S


def test_refusals_under_one_reading_are_one_closure() -> None:
    """A limit of thirty requests is refused thirty times at once: that is one gate closed, not thirty."""
    tenants = Tenants()
    assert all(tenants.refused("a", 1.0 + number / 100, read_at=0.5) for number in range(30))
    assert tenants.rest_s("a", 2.0) == 0.0


def test_rest_doubles_up_to_its_most() -> None:
    tenants, rests = Tenants(), []
    at = closed(tenants, "a", REST_FROM - 1)
    for _ in range(8):
        at = closed(tenants, "a", 1, at=at)
        rests.append(tenants.rest_s("a", at))
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0]
    closed(tenants, "a", 2000, at=at)  # nor does it overflow
    assert tenants.rest_s("a", at + 2000) == REST_MOST_S


def test_rest_counts_down() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM)
    assert tenants.rest_s("a", at + 0.25 * REST_FIRST_S) == pytest.approx(0.75 * REST_FIRST_S)


def test_after_its_rest_one_request_is_tried_and_the_others_wait() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM) + REST_FIRST_S
    assert [tenants.rest_s("a", at) for _ in range(3)] == [0.0, REST_FIRST_S, REST_FIRST_S]


def test_refused_trial_is_a_longer_rest() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM) + REST_FIRST_S
    assert tenants.rest_s("a", at) == 0.0
    assert tenants.refused("a", at + 0.1, read_at=at) is False
    assert tenants.rest_s("a", at + 0.1) == 2 * REST_FIRST_S


def test_trial_that_says_nothing_lets_the_next_one_try() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM) + REST_FIRST_S
    assert tenants.rest_s("a", at) == 0.0
    tenants.ended("a")
    assert tenants.rest_s("a", at) == 0.0


def test_trial_that_is_never_heard_of_again_holds_the_others_no_longer_than_the_longest_rest() -> None:
    """It was cancelled, or its lease was lost: nobody tells, and nobody may starve for it."""
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM) + REST_FIRST_S
    assert tenants.rest_s("a", at) == 0.0
    assert tenants.rest_s("a", at + REST_MOST_S - 0.25) == 0.25
    assert tenants.rest_s("a", at + REST_MOST_S) == 0.0


def test_accepted_request_ends_the_rest_and_the_count() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM)
    tenants.accepted("a", sent_at=at)
    assert tenants.rest_s("a", at) == 0.0
    assert tenants.refused("a", at + 1, read_at=at) is True


def test_answer_to_what_was_sent_before_the_first_refusal_says_nothing() -> None:
    """Thousands were sent while the tenant had quota left; their answers come long after it ran out."""
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM)
    tenants.accepted("a", sent_at=0.5)
    assert tenants.rest_s("a", at) == REST_FIRST_S


def test_others_do_not_rest_with_it() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM)
    assert tenants.rest_s("b", at) == 0.0
    assert tenants.refused("b", at, read_at=at - 0.5) is True


def test_requests_without_a_tenant_never_rest_and_always_teach() -> None:
    tenants = Tenants()
    for at in range(1, 50):
        assert tenants.refused("", float(at), read_at=at - 0.5) is True
        assert tenants.rest_s("", float(at)) == 0.0
    tenants.accepted("", 1.0)
    tenants.ended("")


def test_the_refused_rest_together_whatever_tenant_each_names() -> None:
    tenants = Tenants()
    told = [tenants.refused(f"t{at}", float(at), at - 0.5, again=True) for at in range(1, REST_FROM + 1)]
    assert told == [True] * (REST_FROM - 1) + [False]
    at = float(REST_FROM)
    assert tenants.rest_s("another", at, again=True) == tenants.rest_s("", at, again=True) == REST_FIRST_S
    assert tenants.rest_s("another", at) == tenants.rest_s("", at) == 0.0, "who never was goes"
    later = at + REST_FIRST_S
    assert [tenants.rest_s("", later, again=True) for _ in range(2)] == [0.0, REST_FIRST_S], "one is tried"
    tenants.accepted("", later, again=True)
    assert tenants.rest_s("", later, again=True) == 0.0


def test_a_trial_is_given_only_where_both_standings_allow_it() -> None:
    tenants = Tenants()
    at = closed(tenants, "a", REST_FROM)
    for number in range(REST_FROM + 2):
        tenants.refused("", at + number, at + number - 0.5, again=True)
    at += REST_FROM + 1
    assert tenants.rest_s("a", at, again=True) > REST_FIRST_S, "the longer rest of the two"
    assert tenants.rest_s("a", at) == 0.0, "that took no trial of the tenant's"


def test_while_nothing_is_accepted_few_are_tried_at_a_time_and_nobody_teaches() -> None:
    tenants = Tenants()
    told = [tenants.refused("", float(at), at - 0.5, alone=True) for at in range(1, REST_FROM + 3)]
    assert told == [True] * (REST_FROM - 1) + [False] * 3
    at_once = [tenants.at_once]
    for sent_at in (0.5, 4.0):  # before the first refusal, and after it
        tenants.accepted("", sent_at)
        at_once.append(tenants.at_once)
    assert at_once == [SIFTED, SIFTED, None]
    assert tenants.refused("", 9.0, 8.5, alone=True) is True


def test_what_still_runs_was_accepted() -> None:
    """Long requests in a pool that is smaller than it says: refusals among them teach."""
    tenants = Tenants()
    for at in range(1, 20):
        assert tenants.refused("", float(at), at - 0.5, alone=at % REST_FROM != 0) is True
    assert tenants.at_once is None


def test_a_name_of_any_length_takes_no_more_room() -> None:
    tenants = Tenants()
    at = closed(tenants, "a" * 100_000, REST_FROM)
    assert tenants.rest_s("a" * 100_000, at) == REST_FIRST_S
    assert tenants.rest_s("a" * 100_001, at) == 0.0
    assert all(len(name) < 200 for name in tenants._standing)


def test_those_refused_longest_ago_are_forgotten_first_and_memory_is_bounded() -> None:
    """Names come from producers: any number of them."""
    tenants = Tenants()
    at = closed(tenants, "old", REST_FROM)
    closed(tenants, "kept", REST_FROM)
    for number in range(KEPT - 2):
        tenants.refused(f"t{number}", at, read_at=at)
    tenants.refused("kept", at, read_at=at - 0.5)  # again: no longer among the oldest
    assert tenants.rest_s("old", at) > 0
    for number in range(KEPT - 1):
        tenants.refused(f"u{number}", at, read_at=at)
    assert tenants.rest_s("kept", at) > 0
    assert tenants.rest_s("old", at) == 0.0
    assert len(tenants._standing) == KEPT


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
    tenants, now = Tenants(), 0.0
    for what, tenant, passed_s, ago_s in steps:
        now += passed_s
        if what == "refused":
            assert tenants.refused(tenant, now, now - ago_s) or tenant
        elif what == "accepted":
            tenants.accepted(tenant, now - ago_s)
        elif what == "ended":
            tenants.ended(tenant)
        else:
            assert 0.0 <= tenants.rest_s(tenant, now) <= REST_MOST_S
    for tenant in ("", "a", "b", "unseen"):
        for _ in range(3):  # each goes, and is never heard of again
            waited_s = 0.0
            while (rest_s := tenants.rest_s(tenant, now)) > 0:
                now, waited_s = now + rest_s, waited_s + rest_s
                assert waited_s <= 2 * REST_MOST_S


@given(STEPS)
def test_two_closures_between_acceptances_never_make_anybody_rest(
    steps: list[tuple[str, str, float, float]],
) -> None:
    tenants, now = Tenants(), 0.0
    closures: dict[str, set[float]] = {}
    for _, tenant, passed_s, _ in steps:
        now += passed_s + 0.001
        if len(closures.setdefault(tenant, set())) == REST_FROM - 1:
            tenants.accepted(tenant, now)
            closures[tenant].clear()
        assert tenants.refused(tenant, now, now) is True
        closures[tenant].add(now)
        assert tenants.rest_s(tenant, now) == 0.0


def test_calm_is_where_nobody_has_been_refused_since_all_that_were_got_an_answer() -> None:
    """Then who was not refused goes, and what an answer says of it need not be told."""
    tenants = Tenants()
    calm = [tenants.calm]
    tenants.refused("a", 1.0, read_at=0.5)
    calm.append(tenants.calm)
    tenants.accepted("a", 2.0)
    calm.append(tenants.calm)
    tenants.refused("", 3.0, read_at=2.5, alone=True)
    calm.append(tenants.calm)
    assert calm == [True, False, True, False]
    tenants.accepted("", 4.0)
    assert tenants.calm
