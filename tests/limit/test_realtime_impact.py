"""Impact on realtime requests, computed from histograms of a window."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.realtime_impact import (
    WINDOW_S,
    BatchShares,
    HistogramGrowth,
    RealtimeImpact,
    ReplicaHistograms,
    compute_impact,
    compute_quantile,
    find_flaw,
)

INF = math.inf
BOUNDS = (0.1, 0.2, 0.4, 1.0, 5.0, INF)


def count_cumulative(values: list[float], bounds: tuple[float, ...] = BOUNDS) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in values)) for bound in bounds}


def make_histograms(
    ttft: Mapping[float, float] | None = None,
    tpot: Mapping[float, float] | None = None,
    *,
    replica: str = "a",
    **rest: Any,
) -> ReplicaHistograms:
    return ReplicaHistograms(replica, ttft, tpot, **{"series_name": "series", **rest})


class TestComputeQuantile:
    def test_quantile_equals_that_of_prometheus(self) -> None:
        buckets = {0.1: 10.0, 0.5: 30.0, 1.0: 40.0, INF: 40.0}
        assert compute_quantile(buckets, 0.5) == pytest.approx(0.3)
        assert compute_quantile(buckets, 0.95) == pytest.approx(0.9)

    def test_quantile_in_the_last_bucket_is_its_lower_bound(self) -> None:
        assert compute_quantile({1.0: 1.0, INF: 10.0}, 0.95) == 1.0

    def test_quantile_of_an_empty_histogram_is_none(self) -> None:
        assert compute_quantile({1.0: 0.0, INF: 0.0}, 0.5) is None
        assert compute_quantile({INF: 3.0}, 0.5) == 0.0

    @given(st.lists(st.floats(0.001, 4.9), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
    def test_quantile_is_in_the_bucket_of_the_exact_one(self, values: list[float], quantile: float) -> None:
        exact = sorted(values)[math.ceil(quantile * len(values)) - 1]
        at = bisect.bisect_left(BOUNDS, exact)
        low, high = (0.0, *BOUNDS)[at], BOUNDS[at]
        quantile_s = compute_quantile(count_cumulative(values), quantile)
        assert quantile_s is not None
        assert low <= quantile_s <= high


class TestFindFlaw:
    @pytest.mark.parametrize(
        "buckets",
        [
            {},
            {1.0: 3.0},
            {1.0: 3.0, math.nan: 1.0, INF: 3.0},
            {1.0: math.nan, INF: 3.0},
            {1.0: -1.0, INF: 3.0},
            {1.0: 3.0, INF: INF},
            {1.0: 5.0, 2.0: 3.0, INF: 6.0},
        ],
    )
    def test_invalid_histogram_is_rejected_with_the_reason(
        self, buckets: dict[Any, Any] | dict[Any, float] | dict[float, float]
    ) -> None:
        assert find_flaw(buckets)
        growth = HistogramGrowth()
        growth.add_histograms(0, [make_histograms(count_cumulative([]))])
        growth.add_histograms(15, [make_histograms(buckets)])
        impact = growth.compute_impact(0.5, "epp")
        assert impact.why_not == find_flaw(buckets)
        assert (impact.ttft_p50_s, impact.request_count, impact.batch_share) == (None, 0, 0.5)

    def test_rounding_error_is_not_a_flaw(self) -> None:
        assert find_flaw({1.0: 3.0000000001, INF: 3.0}) == ""


class TestHistogramGrowth:
    def test_requests_from_before_the_first_page_do_not_count(self) -> None:
        growth = HistogramGrowth()
        old_values = [3.0] * 1000
        growth.add_histograms(0, [make_histograms(count_cumulative(old_values), count_cumulative([]))])
        assert growth.compute_impact(None, "epp").request_count == 0
        assert "no request was answered" in growth.compute_impact(None, "epp").why_not
        growth.add_histograms(
            15,
            [make_histograms(count_cumulative([*old_values, *[0.15] * 20]), count_cumulative([0.05] * 20))],
        )
        impact = growth.compute_impact(0.25, "epp")
        latencies = (impact.ttft_p50_s, impact.ttft_p95_s, impact.tpot_p50_s, impact.tpot_p95_s)
        assert latencies == pytest.approx((0.15, 0.195, 0.05, 0.095))
        assert impact == RealtimeImpact(*latencies, "all", 20, 0.25, "epp: series", "")

    def test_requests_older_than_the_window_do_not_count(self) -> None:
        growth = HistogramGrowth()
        values: list[float] = []
        for number in range(60):
            values += [0.15 if number < 30 else 3.0] * 10
            growth.add_histograms(15.0 * number, [make_histograms(count_cumulative(values))])
        impact = growth.compute_impact(None, "epp")
        assert impact.request_count == pytest.approx(10 * WINDOW_S / 15, abs=10)
        assert impact.ttft_p50_s is not None
        assert impact.ttft_p50_s > 1
        assert impact.why_not.startswith("no time per output token")

    def test_growth_of_several_steps_within_the_window_is_added_up(self) -> None:
        growth = HistogramGrowth(window_s=10.0)
        for at, count in ((0.0, 5.0), (1.0, 7.0), (6.0, 10.0), (11.0, 14.0)):
            growth.add_histograms(at, [make_histograms({1.0: count, INF: count})])
        assert growth.compute_impact(None, "picker").request_count == (7 - 5) + (10 - 7) + (14 - 10)
        growth.add_histograms(11.5, [make_histograms({1.0: 14.0, INF: 14.0})])
        assert growth.compute_impact(None, "picker").request_count == (10 - 7) + (14 - 10)

    def test_replica_without_requests_may_show_its_last_bucket_only(self) -> None:
        growth = HistogramGrowth()
        for at, count in ((0.0, 1.0), (1.0, 3.0)):
            idle = make_histograms({INF: 0.0}, replica="b")
            growth.add_histograms(at, [make_histograms({1.0: count, INF: count}), idle])
        assert growth.compute_impact(None, "picker").request_count == 2

    def test_restarted_picker_counts_from_zero(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [make_histograms(count_cumulative([3.0] * 50))])
        growth.add_histograms(15, [make_histograms(count_cumulative([0.15] * 7))])
        impact = growth.compute_impact(None, "epp")
        assert impact.request_count == 7
        assert impact.ttft_p95_s is not None
        assert impact.ttft_p95_s < 0.2

    def test_replicas_are_added_without_requests_from_before_a_new_one(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [make_histograms(count_cumulative([3.0] * 50))])
        growth.add_histograms(
            15,
            [
                make_histograms(count_cumulative([3.0] * 52)),
                make_histograms(count_cumulative([0.15] * 900), replica="b"),
            ],
        )
        growth.add_histograms(
            30,
            [
                make_histograms(count_cumulative([3.0] * 54)),
                make_histograms(count_cumulative([0.15] * 906), replica="b"),
            ],
        )
        assert growth.compute_impact(None, "epp").request_count == 2 + 2 + 6

    def test_histogram_that_appears_later_counts_from_zero(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [make_histograms(count_cumulative([0.15] * 5))])
        growth.add_histograms(
            15, [make_histograms(count_cumulative([0.15] * 5), count_cumulative([0.05] * 3))]
        )
        assert growth.compute_impact(None, "epp").tpot_p50_s == pytest.approx(0.05)

    def test_first_request_of_a_page_counts(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [ReplicaHistograms("a", why_not="there is no such series")])
        assert growth.compute_impact(None, "epp").why_not == "there is no such series"
        growth.add_histograms(15, [make_histograms(count_cumulative([0.15]), scope="realtime")])
        assert (
            growth.compute_impact(None, "epp").request_count,
            growth.compute_impact(None, "epp").scope,
        ) == (1, "realtime")

    def test_requests_during_unreadable_pages_are_counted_later(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [make_histograms(count_cumulative([0.15] * 10))])
        growth.add_histograms(15, [ReplicaHistograms("a", why_not="a broken line", is_flawed=True)])
        assert growth.compute_impact(None, "epp").why_not == "a broken line"
        growth.add_histograms(30, [make_histograms(count_cumulative([0.15] * 17))])
        assert growth.compute_impact(None, "epp").request_count == 7

    def test_scope_is_realtime_only_if_it_is_so_on_every_replica(self) -> None:
        growth = HistogramGrowth()
        for at in (0, 15):
            growth.add_histograms(at, [make_histograms(count_cumulative([0.15] * at), scope="realtime")])
        assert growth.compute_impact(None, "epp").scope == "realtime"
        growth.add_histograms(
            30,
            [
                make_histograms(count_cumulative([0.15] * 99), scope="realtime"),
                make_histograms(count_cumulative([]), replica="b"),
            ],
        )
        assert growth.compute_impact(None, "epp").scope == "all"

    def test_replicas_with_different_buckets_are_rejected(self) -> None:
        growth = HistogramGrowth()
        for count in (0, 50):
            first, second = count_cumulative([0.15] * count), count_cumulative([0.3] * count, (0.3, INF))
            growth.add_histograms(count, [make_histograms(first), make_histograms(second, replica="b")])
        assert (
            growth.compute_impact(None, "epp").why_not == "the replicas' histograms have other buckets each"
        )

    def test_any_sequence_of_pages_is_accepted_without_an_error(self) -> None:
        random_numbers = random.Random(9)
        unusual_values = (math.nan, INF, -INF, -3.0, 0.0, 5.0, 1e308)
        growth = HistogramGrowth()
        for at in range(2000):
            buckets = {
                random_numbers.choice((*BOUNDS, math.nan, -1.0)): random_numbers.choice(unusual_values)
                for _ in range(random_numbers.randrange(6))
            }
            growth.add_histograms(
                at, [make_histograms(random_numbers.choice([None, buckets, count_cumulative([0.1] * at)]))]
            )
            impact = growth.compute_impact(None, "epp")
            for value in (impact.ttft_p50_s, impact.ttft_p95_s, impact.tpot_p50_s):
                assert value is None or math.isfinite(value)


class TestComputeImpact:
    def test_impact_of_a_whole_window(self) -> None:
        impact = compute_impact(count_cumulative([0.15] * 10), None, "realtime", "prometheus", 0.4)
        assert (impact.scope, impact.request_count, impact.source, impact.batch_share) == (
            "realtime",
            10,
            "prometheus",
            0.4,
        )
        assert impact.ttft_p50_s == pytest.approx(0.15)

    def test_impact_without_requests_says_why_there_is_none(self) -> None:
        impact = compute_impact(count_cumulative([]), count_cumulative([]), "realtime", "prometheus", None)
        assert impact.why_not == "no realtime request was answered in the last 5 minutes"


class TestBatchShares:
    def test_mean_share_covers_the_window(self) -> None:
        shares = BatchShares()
        assert shares.mean_share is None
        for at in range(1000):
            shares.add_share(float(at), 0.1 if at < 850 else 0.5)
        assert shares.mean_share == pytest.approx((0.1 + 0.5) / 2, abs=0.02)

    def test_invalid_shares_are_ignored(self) -> None:
        shares = BatchShares()
        for share in (None, math.nan, INF, 0.5):
            shares.add_share(0.0, share)
        assert shares.mean_share == 0.5

    def test_shares_within_five_seconds_are_averaged_first(self) -> None:
        shares = BatchShares()
        for at, share in ((1000.0, 0.25), (1004.5, 0.75), (1005.0, 1.0)):
            shares.add_share(at, share)
        assert shares.mean_share == (0.5 + 1.0) / 2

    def test_shares_older_than_the_window_do_not_count(self) -> None:
        shares = BatchShares(window_s=10.0)
        for at, share in ((1000.0, 0.25), (1010.0, 0.75)):
            shares.add_share(at, share)
        assert shares.mean_share == (0.25 + 0.75) / 2
        shares.add_share(1015.0, 0.25)
        assert shares.mean_share == (0.75 + 0.25) / 2
