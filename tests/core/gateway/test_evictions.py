"""Requests that were evicted wait longer each time."""

from __future__ import annotations

import pytest

from dispatcher.core.gateway import evictions
from dispatcher.core.gateway.evictions import Evictions
from dispatcher.core.gateway.outcome import RetryPolicy

POLICY = RetryPolicy(base_s=2.0, max_s=60.0)


@pytest.mark.parametrize(("rand", "share"), [(0.0, 0.5), (0.5, 0.75)])
def test_pause_doubles_with_each_eviction_up_to_the_longest(rand: float, share: float) -> None:
    evictions_of_requests = Evictions()
    pauses = [evictions_of_requests.record_eviction(1, POLICY, rand, None) for _ in range(7)]
    assert pauses == [share * each for each in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)]
    assert evictions_of_requests.record_eviction(2, POLICY, rand, None) == share * 2.0, (
        "another request starts with the shortest pause"
    )


def test_answered_request_starts_again_with_the_shortest_pause() -> None:
    evictions_of_requests = Evictions()
    evictions_of_requests.record_eviction(1, POLICY, 0.0, None)
    evictions_of_requests.forget_request(1)
    evictions_of_requests.forget_request(1)
    assert evictions_of_requests.record_eviction(1, POLICY, 0.0, None) == 1.0


@pytest.mark.parametrize(("asked_s", "waits_s"), [(0.5, 1.0), (7.0, 7.0), (86400.0, 60.0)])
def test_longer_retry_after_is_obeyed_up_to_the_maximum(asked_s: float, waits_s: float) -> None:
    assert Evictions().record_eviction(1, POLICY, 0.0, asked_s) == waits_s


def test_number_of_remembered_requests_is_bounded() -> None:
    evictions_of_requests = Evictions()
    for entry in range(evictions.MAX_REMEMBERED + 1):
        evictions_of_requests.record_eviction(entry, POLICY, 0.0, None)
    assert evictions_of_requests.record_eviction(0, POLICY, 0.0, None) == 1.0, "the oldest record was dropped"
    assert evictions_of_requests.record_eviction(evictions.MAX_REMEMBERED, POLICY, 0.0, None) == 2.0
