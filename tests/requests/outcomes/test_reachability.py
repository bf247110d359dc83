"""An outage of the gateway is told apart from a dead endpoint among several."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.outcomes.reachability import (
    CONNECTED_FACTOR,
    CONNECTED_S,
    ERRORS_IN_A_ROW,
    MAX_PROBE_PAUSE_OTHERS_S,
    MAX_PROBE_PAUSE_S,
    MIN_CONNECTED_S,
    MIXED_ERRORS_S,
    SUCCESS_MEMORY_S,
    Reachability,
)

T0 = 1000.0
QUICK_S = 0.003


def record_error(reachability: Reachability, at: float, *connected: float, took_s: float = QUICK_S) -> bool:
    return reachability.record_intermediary_error(at, at - took_s, "the gateway answered 503", connected)


def make_unreachable(at: float = T0) -> Reachability:
    reachability = Reachability()
    assert [record_error(reachability, at) for _ in range(ERRORS_IN_A_ROW)] == [False, False, True]
    return reachability


def test_three_errors_in_a_row_without_another_success_mean_unreachable() -> None:
    assert make_unreachable().outage is not None


def test_requests_sent_before_the_errors_do_not_prove_that_the_gateway_is_reachable() -> None:
    """The endpoint picker is dead, and the requests that it had routed finish."""
    reachability = Reachability()
    assert [record_error(reachability, T0 + n / 100, T0 - 5, T0 - 1) for n in range(3)] == [
        False,
        False,
        True,
    ]
    assert not reachability.check_connections(T0 + 1, [T0 - 5, T0 - 1])


def test_connected_requests_sent_with_the_first_error_prove_that_the_gateway_is_reachable() -> None:
    """Requests are sent to three endpoints at once, of which one is dead."""
    reachability = Reachability()
    assert [reachability.record_intermediary_error(T0 + QUICK_S, T0, "503", [T0] * 30) for _ in range(15)][-1]
    assert not reachability.check_connections(T0 + 0.2, [T0] * 30)
    assert reachability.check_connections(T0 + 0.25, [T0] * 30)
    assert reachability.outage is None


def test_request_sent_later_that_stays_connected_counts_as_success() -> None:
    reachability = Reachability()
    record_error(reachability, T0)
    record_error(reachability, T0 + 0.1, T0 + 0.01)
    assert not record_error(reachability, T0 + 0.3, T0 + 0.01)
    for n in range(20):  # other requests stay connected as well
        at = T0 + 0.32 + n * 0.03
        assert not record_error(reachability, at, at - 0.29)


def test_request_must_stay_connected_longer_than_the_errors_take() -> None:
    """If the picker hangs, every request waits for the timeout of the gateway."""
    reachability = Reachability()
    results = [record_error(reachability, T0 + n, T0 + n - 0.4, took_s=0.5) for n in range(3)]
    assert results == [False, False, True]
    assert reachability.required_connected_s == CONNECTED_FACTOR * 0.5


def test_quickest_error_determines_how_long_a_request_must_stay_connected() -> None:
    reachability = Reachability()
    for n, took_s in enumerate((0.5, 0.25, 0.375)):
        record_error(reachability, T0 + n, took_s=took_s)
    assert reachability.required_connected_s == CONNECTED_FACTOR * 0.25


def test_request_sent_with_the_first_error_that_is_answered_ends_the_row_of_errors() -> None:
    for sent_at, is_unreachable in ((T0, False), (T0 - 0.01, True)):
        reachability = Reachability()
        for at in (T0 + 0.125, T0 + 0.25):
            record_error(reachability, at, took_s=0.125)
        reachability.record_success(T0 + 0.3, sent_at)
        assert record_error(reachability, T0 + 0.375, took_s=0.125) is is_unreachable


@pytest.mark.parametrize("took_s", [MAX_PROBE_PAUSE_S, 15.0])
def test_slow_intermediary_errors_never_mean_unreachable(took_s: float) -> None:
    """Single probes that take so long would delay all other requests."""
    reachability = Reachability()
    assert not any(record_error(reachability, T0 + n, took_s=took_s) for n in range(20))
    assert reachability.required_connected_s == CONNECTED_S


def test_probes_follow_faster_if_something_answers_and_other_requests_wait() -> None:
    def list_probe_pauses(reachability: Reachability, *, others: bool) -> list[float]:
        found, at = [], T0
        for _ in range(6):
            reachability.record_probe(at, has_other_requests=others)
            assert reachability.outage is not None
            found.append(round(reachability.outage.next_probe_at - at, 3))
            at = reachability.outage.next_probe_at
        return found

    refused = Reachability()
    refused.record_connection_failure(T0, "refused")
    slow_pauses = [0.1, 0.2, 0.4, 0.8, MAX_PROBE_PAUSE_S, MAX_PROBE_PAUSE_S]
    assert list_probe_pauses(refused, others=True) == slow_pauses
    assert list_probe_pauses(make_unreachable(), others=False) == slow_pauses
    assert list_probe_pauses(make_unreachable(), others=True) == [0.1] + [MAX_PROBE_PAUSE_OTHERS_S] * 5


@pytest.mark.parametrize("later_s", [0.01, SUCCESS_MEMORY_S - 1])
def test_errors_next_to_a_success_mean_unreachable_only_after_half_a_second(later_s: float) -> None:
    """After that the gateway itself may be unreachable."""
    reachability, at = Reachability(), T0 + later_s
    record_error(reachability, T0)
    assert not reachability.record_success(T0, sent_at=T0)
    for n in range(10):
        assert not record_error(reachability, at + n * MIXED_ERRORS_S / 10)
    assert record_error(reachability, at + MIXED_ERRORS_S + 0.01)


def test_success_is_forgotten_after_a_while() -> None:
    reachability = Reachability()
    record_error(reachability, T0)
    reachability.record_success(T0, sent_at=T0)
    assert [record_error(reachability, T0 + SUCCESS_MEMORY_S + 1) for _ in range(ERRORS_IN_A_ROW)][-1]


def test_short_connection_of_a_probe_ends_an_outage_of_quick_errors() -> None:
    reachability = make_unreachable()
    assert reachability.required_connected_s == MIN_CONNECTED_S
    assert not reachability.record_success(T0 + 1, sent_at=T0 - 1)
    assert reachability.record_success(T0 + 1, sent_at=T0 + 0.2)
    assert reachability.outage is None


def test_probe_must_stay_connected_longer_after_a_connection_failure() -> None:
    reachability = Reachability()
    record_error(reachability, T0)
    reachability.record_connection_failure(T0 + 1, "refused")
    assert reachability.required_connected_s == CONNECTED_S


def test_errors_right_after_a_successful_probe_do_not_mean_unreachable() -> None:
    """The dead endpoint still gets requests."""
    reachability = make_unreachable()
    reachability.record_success(T0 + 0.5, sent_at=T0 + 0.2)
    assert not any(record_error(reachability, T0 + 0.51 + n / 1000) for n in range(10))


@pytest.mark.parametrize("dead_count", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_dead_endpoints_among_three_cause_at_most_one_short_outage(dead_count: int, seed: int) -> None:
    """Simulate ten seconds with 45 slots, answers after 1.3 s, and errors of dead endpoints after 3 ms."""
    rand, reachability = random.Random(seed), Reachability()
    running = [T0 - rand.uniform(0, 1.3) for _ in range(45)]
    closed_s, closures, at = 0.0, 0, T0
    probe: float | None = None
    while at < T0 + 10:
        at += 0.003
        for sent_at in [each for each in running if each <= at - 1.3]:
            running.remove(sent_at)
            reachability.record_success(at, sent_at)
        make_unreachable = reachability.outage is not None
        if make_unreachable:
            closed_s += 0.003
            reachability.check_connections(at, running)
            if reachability.outage is None:
                continue
            if probe is not None and at - probe >= reachability.required_connected_s:
                reachability.record_success(at, probe)
                running.append(probe)
                probe = None
            elif probe is None and at >= reachability.outage.next_probe_at:
                reachability.record_probe(at)
                if rand.random() * 3 < dead_count:
                    record_error(reachability, at, *running)
                else:
                    probe = at
            continue
        for _ in range(45 - len(running)):
            if rand.random() * 3 >= dead_count:
                running.append(at)  # sent together with the failing requests, whose errors come QUICK_S later
            elif record_error(reachability, at, *running):
                closures += 1
                break
    assert closures <= 1
    assert closed_s <= 0.5


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["error", "success", "connection failure", "probe"]), *[st.floats(0, 100)] * 3
        ),
        max_size=60,
    )
)
def test_only_a_success_of_a_later_request_ends_an_outage_in_any_order_of_events(
    events: list[tuple[str, float, float, float]],
) -> None:
    reachability = Reachability()
    for event, at, sent_at, since in events:
        before = reachability.outage
        match event:
            case "error":
                assert reachability.record_intermediary_error(at, sent_at, "empty", [since]) == (
                    reachability.outage is not None
                )
                assert (
                    before is None or reachability.outage is None or reachability.outage.since == before.since
                )
            case "success":
                reachability.record_success(at, sent_at)
                assert reachability.outage is None or before is None or sent_at < before.since
            case "connection failure":
                reachability.record_connection_failure(at, "refused")
                assert reachability.outage is not None
            case _:
                reachability.record_probe(at)
        assert reachability.required_connected_s >= MIN_CONNECTED_S
