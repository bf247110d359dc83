"""Requests that were evicted wait longer each time."""

from __future__ import annotations

import pytest

from dispatcher.core.gateway import evictions
from dispatcher.core.gateway.evictions import Evictions
from dispatcher.core.gateway.outcome import RetryPolicy

POLICY = RetryPolicy(base_s=2.0, max_s=60.0)


@pytest.mark.parametrize(("rand", "share"), [(0.0, 0.5), (0.5, 0.75)])
def test_pause_doubles_with_each_eviction_up_to_the_longest(rand: float, share: float) -> None:
    counted = Evictions()
    pauses = [counted.record_eviction(1, POLICY, rand, None) for _ in range(7)]
    assert pauses == [share * each for each in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)]
    assert counted.record_eviction(2, POLICY, rand, None) == share * 2.0, "another request begins anew"


def test_answered_request_begins_anew() -> None:
    counted = Evictions()
    counted.record_eviction(1, POLICY, 0.0, None)
    counted.forget_request(1)
    counted.forget_request(1)
    assert counted.record_eviction(1, POLICY, 0.0, None) == 1.0


@pytest.mark.parametrize(("asked_s", "waits_s"), [(0.5, 1.0), (7.0, 7.0), (86400.0, 60.0)])
def test_longer_retry_after_is_kept_to(asked_s: float, waits_s: float) -> None:
    assert Evictions().record_eviction(1, POLICY, 0.0, asked_s) == waits_s


def test_number_of_remembered_requests_is_bounded() -> None:
    counted = Evictions()
    for entry in range(evictions.MAX_REMEMBERED + 1):
        counted.record_eviction(entry, POLICY, 0.0, None)
    assert counted.record_eviction(0, POLICY, 0.0, None) == 1.0, "the oldest was forgotten"
    assert counted.record_eviction(evictions.MAX_REMEMBERED, POLICY, 0.0, None) == 2.0
