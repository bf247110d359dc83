"""A request is blamed for intermediary errors only if other requests are answered in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.intermediary_errors import (
    FREE_CHARGES,
    MAX_DELAY_S,
    MAX_RECORDS,
    MIN_REST_S,
    REST_PER_SECOND,
    SLOW_ANSWER_S,
    IntermediaryErrors,
)
from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.gateway.reachability import MAX_PROBE_PAUSE_OTHERS_S

T0 = 1000.0
POLICY = RetryPolicy(base_s=2.0, max_s=60.0)


def record_errors_with_answers_between(
    errors: IntermediaryErrors, times: int, entry: int = 1
) -> Iterator[bool]:
    for n in range(times):
        yield errors.record_error(entry, T0 + n)
        errors.record_answer(99, sent_at=T0 + n + 0.5)


def test_request_is_blamed_after_many_errors_that_are_followed_by_answers_to_others() -> None:
    assert list(record_errors_with_answers_between(IntermediaryErrors(), 8)) == [False] * (
        FREE_CHARGES + 1
    ) + [True] * (7 - FREE_CHARGES)


def test_no_request_is_blamed_while_no_request_gets_through() -> None:
    errors = IntermediaryErrors()
    errors.record_answer(99, sent_at=T0 - 0.1)
    assert not any(errors.record_error(1, T0 + n) for n in range(1000))


def test_answer_to_a_request_sent_before_the_error_does_not_count() -> None:
    errors = IntermediaryErrors()
    for n in range(100):
        assert not errors.record_error(1, T0 + n)
        errors.record_answer(99, sent_at=T0 + n - 0.1)


def test_own_answer_clears_the_record_of_a_request() -> None:
    errors = IntermediaryErrors()
    list(record_errors_with_answers_between(errors, FREE_CHARGES + 1))
    errors.record_answer(1, sent_at=T0 + 50)
    assert not errors.record_error(1, T0 + 51)


def test_request_is_retried_at_once_and_then_with_doubling_delay() -> None:
    errors, found = IntermediaryErrors(), []
    for n in range(8):
        errors.record_error(1, T0 + n)
        found.append(errors.compute_retry_delay_s(1, 0.003, POLICY))
    assert found == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("took_s", "again_s"), [(SLOW_ANSWER_S, SLOW_ANSWER_S), (15.0, 15.0), (600.0, MAX_DELAY_S)]
)
def test_request_waits_as_long_as_its_slow_error_held_a_slot(took_s: float, again_s: float) -> None:
    errors = IntermediaryErrors()
    errors.record_error(1, T0)
    assert errors.compute_retry_delay_s(1, took_s, POLICY) == again_s


def test_rest_grows_with_the_outage_while_the_delay_in_the_queue_is_bounded() -> None:
    errors = IntermediaryErrors()
    for n in range(100):
        errors.record_error(1, T0 + n)
        rest_s = errors.set_aside(1, T0 + n, since=T0, time_left_s=1e6)
        assert rest_s == min(MAX_DELAY_S, max(MIN_REST_S, REST_PER_SECOND * n))
    assert errors.compute_rest_s(1, T0 + 99 + MAX_DELAY_S) == MAX_DELAY_S
    assert errors.compute_rest_s(1, T0 + 99 + 99 * REST_PER_SECOND) == 0
    assert errors.compute_rest_s(2, T0) == 0


def test_time_in_which_another_replica_probed_does_not_lengthen_the_rest() -> None:
    errors = IntermediaryErrors()
    errors.record_error(1, T0)
    assert errors.set_aside(1, T0, since=T0 - 100, time_left_s=1e6) == MIN_REST_S


@given(st.floats(-10, 1e6), st.floats(0, 1e6))
def test_rest_never_exceeds_half_of_the_time_left(left_s: float, away_s: float) -> None:
    errors = IntermediaryErrors()
    errors.record_error(1, T0)
    rest_s = errors.set_aside(1, T0, since=T0 - away_s, time_left_s=left_s)
    assert 0 <= rest_s <= max(0.0, left_s) / 2 + 1e-6


def test_number_of_records_is_bounded() -> None:
    errors = IntermediaryErrors()
    for entry in range(MAX_RECORDS + 10):
        errors.record_error(entry, T0)
    assert len(errors._records) == MAX_RECORDS


@pytest.mark.parametrize("failing_count", [10, 50, 200, 1000])
def test_request_behind_any_number_of_failing_requests_is_probed(failing_count: int) -> None:
    """Each probe is the first request of the queue that does not rest, and fails quickly."""
    errors, at, probes = IntermediaryErrors(), T0, 0
    while True:
        entry = next(each for each in range(failing_count + 1) if not errors.compute_rest_s(each, at))
        probes += 1
        if entry == failing_count:
            break
        errors.record_error(entry, at)
        errors.set_aside(entry, at, since=T0, time_left_s=1e9)
        at += MAX_PROBE_PAUSE_OTHERS_S
    assert probes <= failing_count * 1.5 + 3


times = st.floats(0, 1000)


@given(
    st.lists(st.tuples(times, st.integers(0, 3), st.booleans(), st.floats(0, 20)), max_size=200), st.data()
)
def test_common_outages_never_blame_a_request_and_single_failures_always_do(
    attempts: list[tuple[float, int, bool, float]], data: st.DataObject
) -> None:
    """Sound requests get errors in fewer than FREE_CHARGES outages only, a failing request always."""
    boundaries = sorted(data.draw(st.lists(times, max_size=2 * FREE_CHARGES, unique=True)))
    outages = list(zip(boundaries[::2], boundaries[1::2], strict=False))

    def is_outage(at: float) -> bool:
        return any(start <= at <= end for start, end in outages)

    errors = IntermediaryErrors()
    for at, entry, _, took_s in sorted(attempts):
        # An answer comes only while there is a gateway, to a request that was sent to it.
        if is_outage(at):
            assert not errors.record_error(entry, at)
        elif not is_outage(at - took_s):
            errors.record_answer(100 + entry, at - took_s)
    for n in range(FREE_CHARGES + 1):
        errors.record_error(50, 2000.0 + n)
        errors.record_answer(100, 2000.5 + n)
    assert errors.record_error(50, 2000.0 + FREE_CHARGES + 1)
