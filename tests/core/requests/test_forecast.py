"""What a line comes to: who misses its deadline, counted one by one and by spans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.forecast import (
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
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.score import compute_score
from tests.core.limit.late import late_one_by_one

NOW = 1_764_000_000.0


def a_line(
    spans: Sequence[QueueSpan] = (), *, now: float = NOW, settled: int = 0, leased: int = 0, **rest: Any
) -> QueueSnapshot:
    return QueueSnapshot(now, spans, rest.get("heads", ()), settled, leased, rest.get("replicas", ()), 0)


class TestAtRisk:
    @given(
        slacks=st.lists(st.integers(-100, 2000), max_size=300).map(sorted),
        rate=st.floats(0.01, 50),
        service_s=st.sampled_from([0.0, 0.5, 7.0, 60.0]),
    )
    def test_law_counting_by_deadline_is_counting_one_by_one(
        self, slacks: list[int], rate: float, service_s: float
    ) -> None:
        spans, _ = summarize_requests([(NOW + slack, b"%05d" % at) for at, slack in enumerate(slacks)])
        assert count_at_risk(spans, NOW, rate, service_s) == late_one_by_one(slacks, rate, service_s)

    def test_all_in_time_where_the_rate_suffices(self) -> None:
        assert count_at_risk([QueueSpan(100, NOW + 50, NOW + 51)], NOW, rate=2.0, service_s=0.0) == 0
        assert count_at_risk([QueueSpan(100, NOW + 50, NOW + 51)], NOW, rate=1.0, service_s=0.0) == 50
        assert count_at_risk([QueueSpan(100, NOW + 50, NOW + 51)], NOW, rate=1.0, service_s=10.0) == 60

    def test_what_is_lost_ahead_counts_as_if_it_were_served(self) -> None:
        bursts = [QueueSpan(1000, NOW + 60, NOW + 61), QueueSpan(1000, NOW + 120, NOW + 121)]
        assert count_at_risk(bursts, NOW, rate=10.0, service_s=0.0) == 400 + 800

    @given(
        count=st.integers(1, 500),
        width_s=st.integers(2, 5000),
        slack=st.integers(-500, 500),
        rate=st.floats(0.01, 50),
        ahead=st.integers(0, 300),
    )
    def test_law_an_even_span_is_its_requests_spread_evenly(
        self, count: int, width_s: int, slack: int, rate: float, ahead: int
    ) -> None:
        each = [slack + width_s * (at + 0.5) / count for at in range(count)]
        found = count_at_risk(
            [QueueSpan(ahead), QueueSpan(count, NOW + slack, NOW + slack + width_s)], NOW, rate, 3.0
        )
        exact = late_one_by_one([math.inf] * ahead + each, rate, 3.0)
        assert abs(found - exact) <= 1

    def test_without_service_all_deadlines_are_missed(self) -> None:
        assert (
            count_at_risk([QueueSpan(7, NOW + 50, NOW + 51), QueueSpan(3)], NOW, rate=0.0, service_s=0.0) == 7
        )

    def test_requests_whose_scores_tell_nothing_take_their_turn_and_are_not_counted(self) -> None:
        assert (
            count_at_risk([QueueSpan(40), QueueSpan(10, NOW + 45, NOW + 46)], NOW, rate=1.0, service_s=0.0)
            == 5
        )


class TestLook:
    def test_a_rate_that_is_not_known_leaves_at_risk_open(self) -> None:
        found = compute_forecast(a_line([QueueSpan(5, NOW + 10, NOW + 11)]), None, 0.0)
        assert found.at_risk is None
        assert found.service_rate is None

    def test_an_empty_line_has_nobody_at_risk_whatever_the_rate(self) -> None:
        assert compute_forecast(a_line(), None, 0.0) == QueueForecast(None, None, 0, None, 0.0)

    def test_slack_is_the_earliest_deadline_s_and_negative_when_it_is_past(self) -> None:
        heads = [FirstRequest(b"", NOW + 50), FirstRequest(b"", NOW - 3), FirstRequest(b"", None)]
        assert compute_forecast(a_line([QueueSpan(3)], heads=heads), 1.0, 0.0).earliest_deadline_s == -3

    def test_age_is_the_oldest_head_s(self) -> None:
        heads = [FirstRequest(b'{"data":{"created":%d}}' % (NOW - age)) for age in (5, 70, 20)] + [
            FirstRequest(b"?")
        ]
        assert compute_forecast(a_line([QueueSpan(4)], heads=heads), 1.0, 0.0).oldest_pending_age_s == 70
        assert (
            compute_forecast(
                a_line([QueueSpan(1)], heads=[FirstRequest(b"?")]), 1.0, 0.0
            ).oldest_pending_age_s
            is None
        )

    def test_replicas_are_handed_on(self) -> None:
        replicas = [Replica("a", 3, 0.5)]
        assert compute_forecast(a_line(replicas=replicas), 1.0, 0.0).replicas == tuple(replicas)


class TestServed:
    def feed(self, served: ServiceRateMeter, *rows: tuple[float, int, int, int]) -> None:
        for at, settled, pending, leased in rows:
            spans = [QueueSpan(pending)] if pending else []
            served.record_snapshot(a_line(spans, now=NOW + at, settled=settled, leased=leased))

    def test_steady_service_is_its_own_rate_at_once(self) -> None:
        served = ServiceRateMeter()
        assert served.rate_per_s is None
        self.feed(served, (0, 100, 50, 8), (5, 120, 40, 8))
        assert served.rate_per_s == pytest.approx(4.0)
        assert served.service_s == pytest.approx(2.0)

    def test_newer_service_counts_for_more(self) -> None:
        served = ServiceRateMeter()
        rows = [(5.0 * k, 20 * k, 900, 4) for k in range(25)]
        rows += [(120 + 5.0 * k, 480 + 5 * k, 900, 4) for k in range(1, 49)]
        self.feed(served, *rows)
        assert 1.0 < (served.rate_per_s or 0) < 1.5

    def test_an_empty_line_does_not_lower_the_rate(self) -> None:
        served = ServiceRateMeter()
        self.feed(served, (0, 0, 50, 8), (5, 20, 40, 8), *[(5.0 * k, 20, 0, 0) for k in range(2, 50)])
        assert served.rate_per_s == pytest.approx(4.0)

    def test_what_is_served_of_an_empty_line_faster_than_the_mean_raises_it(self) -> None:
        served = ServiceRateMeter()
        self.feed(served, (0, 0, 50, 8), (5, 20, 40, 8), (10, 70, 0, 0))
        assert (served.rate_per_s or 0) > 4

    def test_a_closed_gate_takes_the_rate_down_to_nothing(self) -> None:
        served = ServiceRateMeter()
        self.feed(served, *[(5.0 * k, 7, 50, 0) for k in range(5)])
        assert (served.rate_per_s, served.service_s) == (None, 0)
        self.feed(served, *[(5.0 * k, 7, 50, 0) for k in range(5, 20)])
        assert (served.rate_per_s, served.service_s) == (0, 0)

    @pytest.mark.parametrize("again", [(4.0, 30, 50, 8), (10.0, 3, 50, 8), (500.0, 30, 50, 8)])
    def test_a_clock_or_counter_that_began_anew_says_nothing(
        self, again: tuple[float, int, int, int]
    ) -> None:
        served = ServiceRateMeter()
        self.feed(served, (0, 0, 50, 8), (5, 20, 40, 8), again)
        assert served.rate_per_s == pytest.approx(4.0)


class TestCreated:
    def test_our_own_members_say_it_at_their_beginning(self) -> None:
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
    def test_of_any_producer_what_stands_before_the_payload(self, start: bytes, created: int | None) -> None:
        assert parse_created(start) == created


class TestTold:
    @pytest.mark.parametrize(
        "score", [-1.0, 0.0, 5.0, 999_999_999.0, 10.0**12, math.inf, -math.inf, 3e11 + 2]
    )
    def test_scores_that_are_no_deadlines_tell_none(self, score: Any) -> None:
        assert decode_score(score) is None

    def test_our_own_tell_priority_and_deadline(self) -> None:
        assert decode_score(compute_score(int(NOW))) == (0, NOW)
        assert decode_score(compute_score(int(NOW), 9)) == (9, NOW)

    def test_heads_are_one_for_each_priority_told_ones_first(self) -> None:
        _, heads = summarize_requests(
            [
                (compute_score(int(NOW), 3), b"b"),
                (compute_score(int(NOW), 1), b"a"),
                (1e11 + 1, b"u"),
                (-1, b"m"),
            ]
        )
        assert [(head.member_start, head.deadline) for head in heads] == [
            (b"m", None),
            (b"a", NOW),
            (b"b", NOW),
        ]
