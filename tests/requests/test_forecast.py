"""Forecast of a queue: requests that miss their deadlines, the rate of service, and the first requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.forecast import (
    FirstRequest,
    QueueForecast,
    QueueSnapshot,
    QueueSpan,
    Replica,
    ServiceRateMeter,
    compute_forecast,
    count_at_risk,
    decode_score,
    parse_created,
    summarize_requests,
)
from dispatcher.requests.request import encode_member
from dispatcher.requests.score import EARLIEST_DEADLINE, compute_score
from tests.requests.late_requests import count_late_one_by_one

NOW = 1_764_000_000.0


def make_snapshot(
    spans: Sequence[QueueSpan] = (), *, now: float = NOW, settled: int = 0, leased: int = 0, **rest: Any
) -> QueueSnapshot:
    return QueueSnapshot(
        now, spans, rest.get("first_requests", ()), settled, leased, rest.get("replicas", ()), 0
    )


class TestCountAtRisk:
    @given(
        slacks=st.lists(st.integers(-100, 2000), max_size=300).map(sorted),
        rate=st.floats(0.01, 50),
        service_s=st.sampled_from([0.0, 0.5, 7.0, 60.0]),
    )
    def test_count_by_spans_equals_the_count_one_by_one(
        self, slacks: list[int], rate: float, service_s: float
    ) -> None:
        spans, _ = summarize_requests([(NOW + slack, b"%05d" % at) for at, slack in enumerate(slacks)])
        assert count_at_risk(spans, NOW, rate, service_s) == count_late_one_by_one(slacks, rate, service_s)

    def test_no_request_is_at_risk_if_the_rate_suffices(self) -> None:
        assert count_at_risk([QueueSpan(100, NOW + 50, NOW + 51)], NOW, rate=2.0, service_s=0.0) == 0
        assert count_at_risk([QueueSpan(100, NOW + 50, NOW + 51)], NOW, rate=1.0, service_s=0.0) == 50
        assert count_at_risk([QueueSpan(100, NOW + 50, NOW + 51)], NOW, rate=1.0, service_s=10.0) == 60

    def test_requests_ahead_that_miss_their_deadlines_count_as_served(self) -> None:
        bursts = [QueueSpan(1000, NOW + 60, NOW + 61), QueueSpan(1000, NOW + 120, NOW + 121)]
        assert count_at_risk(bursts, NOW, rate=10.0, service_s=0.0) == 400 + 800

    @given(
        count=st.integers(1, 500),
        width_s=st.integers(2, 5000),
        slack=st.integers(-500, 500),
        rate=st.floats(0.01, 50),
        ahead=st.integers(0, 300),
    )
    def test_deadlines_of_a_span_are_assumed_to_be_evenly_distributed(
        self, count: int, width_s: int, slack: int, rate: float, ahead: int
    ) -> None:
        each = [slack + width_s * (at + 0.5) / count for at in range(count)]
        found = count_at_risk(
            [QueueSpan(ahead), QueueSpan(count, NOW + slack, NOW + slack + width_s)], NOW, rate, 3.0
        )
        exact = count_late_one_by_one([math.inf] * ahead + each, rate, 3.0)
        assert abs(found - exact) <= 1

    @pytest.mark.parametrize(("rate", "at_risk"), [(0.38, 1), (0.41, 0), (0.2, 2)])
    def test_deadlines_of_a_span_lie_in_the_middle_of_equal_parts(self, rate: float, at_risk: int) -> None:
        """Two deadlines within ten seconds are those in 2.5 s and in 7.5 s."""
        assert count_at_risk([QueueSpan(2, NOW, NOW + 10)], NOW, rate, 0.0) == at_risk

    def test_all_deadlines_are_at_risk_at_a_rate_of_zero(self) -> None:
        assert (
            count_at_risk([QueueSpan(7, NOW + 50, NOW + 51), QueueSpan(3)], NOW, rate=0.0, service_s=0.0) == 7
        )

    def test_requests_without_a_deadline_in_their_score_take_time_but_are_not_counted(self) -> None:
        assert (
            count_at_risk([QueueSpan(40), QueueSpan(10, NOW + 45, NOW + 46)], NOW, rate=1.0, service_s=0.0)
            == 5
        )


class TestComputeForecast:
    def test_at_risk_is_unknown_if_the_rate_is_unknown(self) -> None:
        found = compute_forecast(make_snapshot([QueueSpan(5, NOW + 10, NOW + 11)]), None, 0.0)
        assert found.at_risk is None
        assert found.service_rate is None

    def test_empty_queue_has_no_request_at_risk_at_any_rate(self) -> None:
        assert compute_forecast(make_snapshot(), None, 0.0) == QueueForecast(None, None, 0, None, 0.0)

    def test_time_to_the_earliest_deadline_is_negative_if_it_has_passed(self) -> None:
        first_requests = [FirstRequest(b"", NOW + 50), FirstRequest(b"", NOW - 3), FirstRequest(b"", None)]
        assert (
            compute_forecast(
                make_snapshot([QueueSpan(3)], first_requests=first_requests), 1.0, 0.0
            ).earliest_deadline_s
            == -3
        )

    def test_age_is_that_of_the_oldest_first_request(self) -> None:
        first_requests = [FirstRequest(b'{"data":{"created":%d}}' % (NOW - age)) for age in (5, 70, 20)] + [
            FirstRequest(b"?")
        ]
        assert (
            compute_forecast(
                make_snapshot([QueueSpan(4)], first_requests=first_requests), 1.0, 0.0
            ).oldest_pending_age_s
            == 70
        )
        assert (
            compute_forecast(
                make_snapshot([QueueSpan(1)], first_requests=[FirstRequest(b"?")]), 1.0, 0.0
            ).oldest_pending_age_s
            is None
        )

    def test_forecast_contains_the_replicas_of_the_snapshot(self) -> None:
        replicas = [Replica("a", 3, 0.5)]
        assert compute_forecast(make_snapshot(replicas=replicas), 1.0, 0.0).replicas == tuple(replicas)


class TestServiceRateMeter:
    def record_rows(self, meter: ServiceRateMeter, *rows: tuple[float, int, int, int]) -> None:
        for at, settled, pending, leased in rows:
            spans = [QueueSpan(pending)] if pending else []
            meter.record_snapshot(make_snapshot(spans, now=NOW + at, settled=settled, leased=leased))

    def test_steady_rate_is_known_after_two_snapshots(self) -> None:
        meter = ServiceRateMeter()
        assert meter.rate_per_s is None
        self.record_rows(meter, (0, 100, 50, 8), (5, 120, 40, 8))
        assert meter.rate_per_s == pytest.approx(4.0)
        assert meter.service_s == pytest.approx(2.0)

    def test_newer_intervals_have_more_weight(self) -> None:
        meter = ServiceRateMeter()
        rows = [(5.0 * k, 20 * k, 900, 4) for k in range(25)]
        rows += [(120 + 5.0 * k, 480 + 5 * k, 900, 4) for k in range(1, 49)]
        self.record_rows(meter, *rows)
        assert 1.0 < (meter.rate_per_s or 0) < 1.5

    def test_empty_queue_does_not_lower_the_rate(self) -> None:
        meter = ServiceRateMeter()
        self.record_rows(meter, (0, 0, 50, 8), (5, 20, 40, 8), *[(5.0 * k, 20, 0, 0) for k in range(2, 50)])
        assert meter.rate_per_s == pytest.approx(4.0)

    def test_faster_service_of_an_empty_queue_raises_the_rate(self) -> None:
        meter = ServiceRateMeter()
        self.record_rows(meter, (0, 0, 50, 8), (5, 20, 40, 8), (10, 70, 0, 0))
        assert (meter.rate_per_s or 0) > 4

    def test_slower_service_is_ignored_if_no_request_waited_at_either_end(self) -> None:
        meter = ServiceRateMeter()
        self.record_rows(
            meter, (0, 0, 50, 8), (5, 20, 40, 8), (10, 25, 0, 8), (15, 26, 10, 8), (20, 30, 0, 8)
        )
        assert meter.rate_per_s == pytest.approx(4.0)

    def test_same_rate_of_an_empty_queue_does_not_change_the_duration_of_leases(self) -> None:
        meter = ServiceRateMeter()
        self.record_rows(meter, (0, 0, 50, 8), (5, 20, 40, 8), (10, 40, 0, 100))
        assert meter.service_s == pytest.approx(2.0)

    def test_interval_of_a_minute_shows_the_rate(self) -> None:
        meter = ServiceRateMeter()
        self.record_rows(meter, (0, 7, 50, 0), (59, 7, 50, 0))
        assert meter.rate_per_s is None
        meter = ServiceRateMeter()
        self.record_rows(meter, (0, 7, 50, 0), (60, 7, 50, 0))
        assert meter.rate_per_s == 0

    def test_rate_is_zero_after_a_minute_without_service(self) -> None:
        meter = ServiceRateMeter()
        self.record_rows(meter, *[(5.0 * k, 7, 50, 0) for k in range(5)])
        assert (meter.rate_per_s, meter.service_s) == (None, 0)
        self.record_rows(meter, *[(5.0 * k, 7, 50, 0) for k in range(5, 20)])
        assert (meter.rate_per_s, meter.service_s) == (0, 0)

    @pytest.mark.parametrize(
        "row", [(4.0, 30, 50, 8), (5.0, 30, 50, 8), (10.0, 3, 50, 8), (500.0, 30, 50, 8)]
    )
    def test_interval_in_which_clock_or_counter_was_reset_is_ignored(
        self, row: tuple[float, int, int, int]
    ) -> None:
        meter = ServiceRateMeter()
        self.record_rows(meter, (0, 0, 50, 8), (5, 20, 40, 8), row)
        assert meter.rate_per_s == pytest.approx(4.0)


class TestParseCreated:
    def test_creation_time_is_at_the_beginning_of_members_of_our_client(self) -> None:
        member = encode_member("r", {"model": "m", "created": 5}, int(NOW) + 9, token="t", created=int(NOW))
        assert parse_created(member) == parse_created(member[:512]) == NOW

    @pytest.mark.parametrize(
        ("start", "created"),
        [
            (b'{"data":{"id":"r","created":1764000000,"payload":{', 1_764_000_000),
            (b'{"data":{"created" : 17 , "id":"\\"created\\":5"', 17),
            (b'{"data":{"payload":{"created":99},"created":12}', None),
            (b'{"internal":{"labels":{"created":"5"}},"data":{"created":0}', None),
            (b'{"data":{"created":123456789012345', None),
            (b"\xff\x00 not JSON", None),
        ],
    )
    def test_creation_time_is_read_only_before_the_payload(self, start: bytes, created: int | None) -> None:
        assert parse_created(start) == created


class TestScores:
    @pytest.mark.parametrize(
        "score", [-1.0, 0.0, 5.0, 999_999_999.0, 10.0**12, math.inf, -math.inf, 3e11 + 2]
    )
    def test_score_without_a_deadline_is_not_decoded(self, score: Any) -> None:
        assert decode_score(score) is None

    def test_score_with_the_earliest_deadline_is_decoded(self) -> None:
        assert decode_score(EARLIEST_DEADLINE - 1) is None
        assert decode_score(EARLIEST_DEADLINE) == (0, EARLIEST_DEADLINE)

    def test_requests_with_equal_deadlines_are_one_span(self) -> None:
        score = compute_score(int(NOW), 2)
        spans, first_requests = summarize_requests([(score, b"b"), (1.0, b"c"), (score, b"a"), (score, b"b")])
        assert spans == [QueueSpan(1), QueueSpan(3, NOW, NOW + 1)]
        assert first_requests == [FirstRequest(b"c"), FirstRequest(b"a", NOW)]

    def test_scores_outside_all_priorities_have_one_first_request_on_each_side(self) -> None:
        _, first_requests = summarize_requests(
            [(-5e11, b"b"), (-9e11, b"a"), (50e11, b"c"), (60e11, b"d"), (math.inf, b"e"), (2e11, b"f")]
        )
        assert [head.member_start for head in first_requests] == [b"a", b"f", b"c"]

    def test_score_of_our_client_contains_priority_and_deadline(self) -> None:
        assert decode_score(compute_score(int(NOW))) == (0, NOW)
        assert decode_score(compute_score(int(NOW), 9)) == (9, NOW)

    def test_each_priority_has_one_first_request_preferably_with_a_deadline(self) -> None:
        _, first_requests = summarize_requests(
            [
                (compute_score(int(NOW), 3), b"b"),
                (compute_score(int(NOW), 1), b"a"),
                (1e11 + 1, b"u"),
                (-1, b"m"),
            ]
        )
        assert [(head.member_start, head.deadline) for head in first_requests] == [
            (b"m", None),
            (b"a", NOW),
            (b"b", NOW),
        ]
