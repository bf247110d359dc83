"""What the histograms of a window say, and what is refused."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.realtime_impact import (
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


def cumulative(values: list[float], bounds: tuple[float, ...] = BOUNDS) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in values)) for bound in bounds}


def shown(
    ttft: Mapping[float, float] | None = None,
    tpot: Mapping[float, float] | None = None,
    *,
    replica: str = "a",
    **rest: Any,
) -> ReplicaHistograms:
    return ReplicaHistograms(replica, ttft, tpot, **{"series_name": "series", **rest})


class TestQuantile:
    def test_worked_example_as_prometheus_has_it(self) -> None:
        buckets = {0.1: 10.0, 0.5: 30.0, 1.0: 40.0, INF: 40.0}
        assert compute_quantile(buckets, 0.5) == pytest.approx(0.3)
        assert compute_quantile(buckets, 0.95) == pytest.approx(0.9)

    def test_in_the_last_bucket_it_is_that_one_s_lower_bound(self) -> None:
        assert compute_quantile({1.0: 1.0, INF: 10.0}, 0.95) == 1.0

    def test_of_nothing_there_is_none(self) -> None:
        assert compute_quantile({1.0: 0.0, INF: 0.0}, 0.5) is None
        assert compute_quantile({INF: 3.0}, 0.5) == 0.0

    @given(st.lists(st.floats(0.001, 4.9), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
    def test_law_it_lies_in_the_bucket_of_the_true_one(self, values: list[float], q: float) -> None:
        true = sorted(values)[math.ceil(q * len(values)) - 1]
        at = bisect.bisect_left(BOUNDS, true)
        low, high = (0.0, *BOUNDS)[at], BOUNDS[at]
        found = compute_quantile(cumulative(values), q)
        assert found is not None
        assert low <= found <= high


class TestFlaw:
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
    def test_what_is_no_histogram_is_refused_and_said(
        self, buckets: dict[Any, Any] | dict[Any, float] | dict[float, float]
    ) -> None:
        assert find_flaw(buckets)
        growth = HistogramGrowth()
        growth.add_histograms(0, [shown(cumulative([]))])
        growth.add_histograms(15, [shown(buckets)])
        found = growth.compute_impact(0.5, "epp")
        assert found.why_not == find_flaw(buckets)
        assert (found.ttft_p50_s, found.request_count, found.batch_share) == (None, 0, 0.5)

    def test_roundings_are_none(self) -> None:
        assert find_flaw({1.0: 3.0000000001, INF: 3.0}) == ""


class TestGrowth:
    def test_only_what_came_since_the_first_look_counts(self) -> None:
        growth = HistogramGrowth()
        old = [3.0] * 1000
        growth.add_histograms(0, [shown(cumulative(old), cumulative([]))])
        assert growth.compute_impact(None, "epp").request_count == 0
        assert "no request was answered" in growth.compute_impact(None, "epp").why_not
        growth.add_histograms(15, [shown(cumulative([*old, *[0.15] * 20]), cumulative([0.05] * 20))])
        found = growth.compute_impact(0.25, "epp")
        latencies = (found.ttft_p50_s, found.ttft_p95_s, found.tpot_p50_s, found.tpot_p95_s)
        assert latencies == pytest.approx((0.15, 0.195, 0.05, 0.095))
        assert found == RealtimeImpact(*latencies, "all", 20, 0.25, "epp: series", "")

    def test_what_is_older_than_the_window_counts_no_more(self) -> None:
        growth = HistogramGrowth()
        values: list[float] = []
        for look in range(60):
            values += [0.15 if look < 30 else 3.0] * 10
            growth.add_histograms(15.0 * look, [shown(cumulative(values))])
        found = growth.compute_impact(None, "epp")
        assert found.request_count == pytest.approx(10 * WINDOW_S / 15, abs=10)
        assert found.ttft_p50_s is not None
        assert found.ttft_p50_s > 1
        assert found.why_not.startswith("no time per output token")

    def test_a_picker_that_began_anew_counts_from_zero(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [shown(cumulative([3.0] * 50))])
        growth.add_histograms(15, [shown(cumulative([0.15] * 7))])
        found = growth.compute_impact(None, "epp")
        assert found.request_count == 7
        assert found.ttft_p95_s is not None
        assert found.ttft_p95_s < 0.2

    def test_replicas_add_up_and_a_new_one_s_past_does_not_count(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [shown(cumulative([3.0] * 50))])
        growth.add_histograms(
            15, [shown(cumulative([3.0] * 52)), shown(cumulative([0.15] * 900), replica="b")]
        )
        growth.add_histograms(
            30, [shown(cumulative([3.0] * 54)), shown(cumulative([0.15] * 906), replica="b")]
        )
        assert growth.compute_impact(None, "epp").request_count == 2 + 2 + 6

    def test_a_histogram_that_was_not_there_has_counted_from_zero(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [shown(cumulative([0.15] * 5))])
        growth.add_histograms(15, [shown(cumulative([0.15] * 5), cumulative([0.05] * 3))])
        assert growth.compute_impact(None, "epp").tpot_p50_s == pytest.approx(0.05)

    def test_a_page_s_first_request_ever_counts(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [ReplicaHistograms("a", why_not="there is no such series")])
        assert growth.compute_impact(None, "epp").why_not == "there is no such series"
        growth.add_histograms(15, [shown(cumulative([0.15]), scope="realtime")])
        assert (
            growth.compute_impact(None, "epp").request_count,
            growth.compute_impact(None, "epp").scope,
        ) == (1, "realtime")

    def test_what_cannot_be_read_for_a_while_is_counted_when_it_can_be_again(self) -> None:
        growth = HistogramGrowth()
        growth.add_histograms(0, [shown(cumulative([0.15] * 10))])
        growth.add_histograms(15, [ReplicaHistograms("a", why_not="a broken line", is_flawed=True)])
        assert growth.compute_impact(None, "epp").why_not == "a broken line"
        growth.add_histograms(30, [shown(cumulative([0.15] * 17))])
        assert growth.compute_impact(None, "epp").request_count == 7

    def test_realtime_alone_is_said_only_where_every_replica_says_it(self) -> None:
        growth = HistogramGrowth()
        for at in (0, 15):
            growth.add_histograms(at, [shown(cumulative([0.15] * at), scope="realtime")])
        assert growth.compute_impact(None, "epp").scope == "realtime"
        growth.add_histograms(
            30, [shown(cumulative([0.15] * 99), scope="realtime"), shown(cumulative([]), replica="b")]
        )
        assert growth.compute_impact(None, "epp").scope == "all"

    def test_buckets_of_replicas_that_do_not_fit_together_are_refused(self) -> None:
        growth = HistogramGrowth()
        for count in (0, 50):
            ours, theirs = cumulative([0.15] * count), cumulative([0.3] * count, (0.3, INF))
            growth.add_histograms(count, [shown(ours), shown(theirs, replica="b")])
        assert (
            growth.compute_impact(None, "epp").why_not == "the replicas' histograms have other buckets each"
        )

    def test_no_order_of_pages_raises(self) -> None:
        draw = random.Random(9)
        odd = (math.nan, INF, -INF, -3.0, 0.0, 5.0, 1e308)
        growth = HistogramGrowth()
        for at in range(2000):
            buckets = {
                draw.choice((*BOUNDS, math.nan, -1.0)): draw.choice(odd) for _ in range(draw.randrange(6))
            }
            growth.add_histograms(at, [shown(draw.choice([None, buckets, cumulative([0.1] * at)]))])
            found = growth.compute_impact(None, "epp")
            for value in (found.ttft_p50_s, found.ttft_p95_s, found.tpot_p50_s):
                assert value is None or math.isfinite(value)


class TestPrice:
    def test_of_a_whole_window_at_once(self) -> None:
        found = compute_impact(cumulative([0.15] * 10), None, "realtime", "prometheus", 0.4)
        assert (found.scope, found.request_count, found.source, found.batch_share) == (
            "realtime",
            10,
            "prometheus",
            0.4,
        )
        assert found.ttft_p50_s == pytest.approx(0.15)

    def test_no_requests_have_no_price_and_say_so(self) -> None:
        found = compute_impact(cumulative([]), cumulative([]), "realtime", "prometheus", None)
        assert found.why_not == "no realtime request was answered in the last 5 minutes"


class TestShares:
    def test_mean_of_the_window_whatever_the_pace_of_looks(self) -> None:
        shares = BatchShares()
        assert shares.mean_share is None
        for at in range(1000):
            shares.add_share(float(at), 0.1 if at < 850 else 0.5)
        assert shares.mean_share == pytest.approx((0.1 + 0.5) / 2, abs=0.02)

    def test_what_is_no_share_is_left_out(self) -> None:
        shares = BatchShares()
        for share in (None, math.nan, INF, 0.5):
            shares.add_share(0.0, share)
        assert shares.mean_share == 0.5
