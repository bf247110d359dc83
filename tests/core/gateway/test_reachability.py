"""Whether there is a gateway: an endpoint that died among several is none that is away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.reachability import (
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


def bare(reach: Reachability, at: float, *connected: float, took_s: float = QUICK_S) -> bool:
    return reach.record_intermediary_error(at, at - took_s, "the gateway answered 503", connected)


def closed(at: float = T0) -> Reachability:
    reach = Reachability()
    assert [bare(reach, at) for _ in range(ERRORS_IN_A_ROW)] == [False, False, True]
    return reach


def test_three_in_a_row_and_nobody_who_got_through() -> None:
    assert closed().outage is not None


def test_who_was_sent_before_and_runs_on_proves_nothing() -> None:
    """The endpoint picker is dead; what it had routed finishes."""
    reach = Reachability()
    assert [bare(reach, T0 + n / 100, T0 - 5, T0 - 1) for n in range(3)] == [False, False, True]
    assert not reach.check_connections(T0 + 1, [T0 - 5, T0 - 1])


def test_those_that_were_sent_along_with_the_first_show_it_too() -> None:
    """A burst goes to three endpoints, of which one is dead."""
    reach = Reachability()
    assert [reach.record_intermediary_error(T0 + QUICK_S, T0, "503", [T0] * 30) for _ in range(15)][-1]
    assert not reach.check_connections(T0 + 0.2, [T0] * 30)
    assert reach.check_connections(T0 + 0.26, [T0] * 30)
    assert reach.outage is None


def test_one_that_was_sent_later_and_stays_connected_got_through() -> None:
    reach = Reachability()
    bare(reach, T0)
    bare(reach, T0 + 0.1, T0 + 0.01)
    assert not bare(reach, T0 + 0.3, T0 + 0.01)
    for n in range(20):  # and so do others, all the time
        at = T0 + 0.32 + n * 0.03
        assert not bare(reach, at, at - 0.29)


def test_it_must_stay_longer_than_the_bare_answers_take() -> None:
    """A picker that hangs lets everybody wait for the gateway's own time-out."""
    reach = Reachability()
    verdicts = [bare(reach, T0 + n, T0 + n - 0.4, took_s=0.5) for n in range(3)]
    assert verdicts == [False, False, True]
    assert reach.required_connected_s == CONNECTED_FACTOR * 0.5


@pytest.mark.parametrize("took_s", [MAX_PROBE_PAUSE_S, 15.0])
def test_bare_answers_that_take_their_time_close_nothing(took_s: float) -> None:
    """One request after the other that takes so long would keep all others waiting."""
    reach = Reachability()
    assert not any(bare(reach, T0 + n, took_s=took_s) for n in range(20))
    assert reach.required_connected_s == CONNECTED_S


def test_probes_come_faster_where_something_answers_and_another_request_may_be_tried() -> None:
    def pauses(reach: Reachability, *, others: bool) -> list[float]:
        found, at = [], T0
        for _ in range(6):
            reach.record_probe(at, has_other_requests=others)
            assert reach.outage is not None
            found.append(round(reach.outage.next_probe_at - at, 3))
            at = reach.outage.next_probe_at
        return found

    refused = Reachability()
    refused.record_connection_failure(T0, "refused")
    slowly = [0.1, 0.2, 0.4, 0.8, MAX_PROBE_PAUSE_S, MAX_PROBE_PAUSE_S]
    assert pauses(refused, others=True) == slowly
    assert pauses(closed(), others=False) == slowly
    assert pauses(closed(), others=True) == [0.1] + [MAX_PROBE_PAUSE_OTHERS_S] * 5


@pytest.mark.parametrize("later_s", [0.01, SUCCESS_MEMORY_S - 1])
def test_a_dead_endpoint_is_remembered_and_buys_half_a_second(later_s: float) -> None:
    """Then the gateway itself may have gone."""
    reach, at = Reachability(), T0 + later_s
    bare(reach, T0)
    assert not reach.record_success(T0, sent_at=T0)
    for n in range(10):
        assert not bare(reach, at + n * MIXED_ERRORS_S / 10)
    assert bare(reach, at + MIXED_ERRORS_S + 0.01)


def test_it_is_not_remembered_for_ever() -> None:
    reach = Reachability()
    bare(reach, T0)
    reach.record_success(T0, sent_at=T0)
    assert [bare(reach, T0 + SUCCESS_MEMORY_S + 1) for _ in range(ERRORS_IN_A_ROW)][-1]


def test_a_probe_shows_soon_that_quick_bare_answers_are_over() -> None:
    reach = closed()
    assert reach.required_connected_s == MIN_CONNECTED_S
    assert not reach.record_success(T0 + 1, sent_at=T0 - 1)
    assert reach.record_success(T0 + 1, sent_at=T0 + 0.2)
    assert reach.outage is None


def test_without_any_connection_it_takes_longer() -> None:
    reach = Reachability()
    bare(reach, T0)
    reach.record_connection_failure(T0 + 1, "refused")
    assert reach.required_connected_s == CONNECTED_S


def test_after_a_probe_got_through_the_next_bare_answers_close_nothing_at_once() -> None:
    """The dead endpoint is still among the others."""
    reach = closed()
    reach.record_success(T0 + 0.5, sent_at=T0 + 0.2)
    assert not any(bare(reach, T0 + 0.51 + n / 1000) for n in range(10))


@pytest.mark.parametrize("dead_of_three", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_with_dead_endpoints_among_three_it_pauses_once_and_not_for_long(
    dead_of_three: int, seed: int
) -> None:
    """45 slots, answers after 1.3 s, dead endpoints that say so in 3 ms: ten seconds of it."""
    rand, reach = random.Random(seed), Reachability()
    running = [T0 - rand.uniform(0, 1.3) for _ in range(45)]
    closed_s, closures, at = 0.0, 0, T0
    probe: float | None = None
    while at < T0 + 10:
        at += 0.003
        for sent_at in [each for each in running if each <= at - 1.3]:
            running.remove(sent_at)
            reach.record_success(at, sent_at)
        closed = reach.outage is not None
        if closed:
            closed_s += 0.003
            reach.check_connections(at, running)
            if reach.outage is None:
                continue
            if probe is not None and at - probe >= reach.required_connected_s:
                reach.record_success(at, probe)
                running.append(probe)
                probe = None
            elif probe is None and at >= reach.outage.next_probe_at:
                reach.record_probe(at)
                if rand.random() * 3 < dead_of_three:
                    bare(reach, at, *running)
                else:
                    probe = at
            continue
        for _ in range(45 - len(running)):
            if rand.random() * 3 >= dead_of_three:
                running.append(at)  # sent with the others, whose answers come QUICK_S later
            elif bare(reach, at, *running):
                closures += 1
                break
    assert closures <= 1
    assert closed_s <= 0.5


@given(
    st.lists(
        st.tuples(st.sampled_from(["bare", "reached", "unreachable", "probed"]), *[st.floats(0, 100)] * 3),
        max_size=60,
    )
)
def test_no_order_of_events_raises_and_only_a_later_request_reopens(
    events: list[tuple[str, float, float, float]],
) -> None:
    reach = Reachability()
    for what, at, sent_at, since in events:
        before = reach.outage
        match what:
            case "bare":
                assert reach.record_intermediary_error(at, sent_at, "empty", [since]) == (
                    reach.outage is not None
                )
                assert before is None or reach.outage is None or reach.outage.since == before.since
            case "reached":
                reach.record_success(at, sent_at)
                assert reach.outage is None or before is None or sent_at < before.since
            case "unreachable":
                reach.record_connection_failure(at, "refused")
                assert reach.outage is not None
            case _:
                reach.record_probe(at)
        assert reach.required_connected_s >= MIN_CONNECTED_S
