"""A picker that knows its endpoints by their last scrape sends all requests between two scrapes to one."""

from __future__ import annotations

from collections import Counter

from dispatcher.lab.standin.scorer import StaleScorer


def send_requests(
    scorer: StaleScorer, loads: list[float], count: int, from_s: float, every_s: float
) -> list[float]:
    loads = [*loads]
    for number in range(count):
        scorer.record_loads(from_s + number * every_s, loads)
        loads[scorer.choose_endpoint(range(len(loads)))] += 1
    return loads


def test_burst_goes_to_the_endpoint_that_was_least_loaded() -> None:
    assert send_requests(StaleScorer(0.05), [6, 5, 3], 28, 0.01, 0.0) == [6, 5, 31]


def test_requests_that_come_one_by_one_are_spread() -> None:
    loads = send_requests(StaleScorer(0.05), [6, 5, 3], 28, 0.01, 0.05 / 3)
    assert max(loads) - min(loads) <= 3


def test_equal_endpoints_are_chosen_at_random() -> None:
    scorer = StaleScorer(0.05)
    scorer.record_loads(0.0, [1, 0, 0])
    chosen = Counter(scorer.choose_endpoint(range(3)) for _ in range(100))
    assert set(chosen) == {1, 2}


def test_endpoint_that_was_added_is_known_at_once() -> None:
    scorer = StaleScorer(3600.0)
    scorer.record_loads(1.0, [4, 4])
    scorer.record_loads(1.1, [4, 4, 0])
    assert scorer.choose_endpoint(range(3)) == 2
