"""Use of the KV memory as the averages of endpoint pickers show it."""

from __future__ import annotations

import math

import pytest

from dispatcher.limit.budget import KvUse
from dispatcher.limit.picker_inference import FLUSH_LATE_FACTOR, FLUSH_S
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.readings import PickerFacts

FLUSH = FLUSH_S * FLUSH_LATE_FACTOR


def view(at: float, share: float | None, ready: float | None = 4.0) -> PoolView:
    return PoolView(at, at + 0.1, kv_cache=share, ready=ready, in_flight=1.0)


def learn(facts: PickerFacts, *views: PoolView) -> KvUse | None:
    facts.learn_from_views(views)
    return facts.kv_use


def test_pages_without_the_average_show_no_use() -> None:
    assert learn(PickerFacts(), view(10, None)) is None


def test_first_average_may_be_of_any_time_since_the_flush_before() -> None:
    assert learn(PickerFacts(), view(10, 0.4)) == KvUse(0.4, None, 4.0, 10 - FLUSH, 10.1)


def test_flush_was_between_two_polls_with_different_averages() -> None:
    facts = PickerFacts()
    learn(facts, view(10, 0.4))
    assert learn(facts, view(11, 0.5)) == KvUse(0.5, None, 4.0, 10, 11.1)


def test_sample_stands_until_the_next_flush_is_due() -> None:
    facts = PickerFacts()
    learn(facts, view(10, 0.4))
    known = learn(facts, view(11, 0.5))
    for at in (12, 13, 14, 15, 16):
        assert learn(facts, view(at, 0.5)) is known
    # The next flush has happened and brought the same average.
    assert learn(facts, view(18, 0.5)) == KvUse(0.5, None, 4.0, 18 - FLUSH, 18.1)
    # Another endpoint, too, shows that there was a flush.
    assert learn(facts, view(19, 0.5, ready=5.0)) == KvUse(0.5, None, 5.0, 18, 19.1)


def test_window_after_a_gap_is_not_longer_than_a_flush() -> None:
    facts = PickerFacts()
    learn(facts, view(10, 0.4))
    assert learn(facts, view(60, 0.5)) == KvUse(0.5, None, 4.0, 60 - FLUSH, 60.1)


def test_several_pickers_flush_at_their_own_times_and_the_largest_average_counts() -> None:
    facts = PickerFacts()
    learn(facts, view(10, 0.4), view(10, 0.3))
    expected = KvUse(0.6, None, 3.0, 11 - FLUSH, 11.1)
    assert learn(facts, view(11, 0.5), view(11, 0.6, ready=3.0)) == expected


def test_average_that_is_no_number_stays_one() -> None:
    use = learn(PickerFacts(), view(10, math.nan))
    assert use is not None
    assert math.isnan(use.share)


@pytest.mark.parametrize("ready", [None, 4.0])
def test_number_of_endpoints_may_be_unknown(ready: float | None) -> None:
    use = learn(PickerFacts(), view(10, 0.4, ready))
    assert use is not None
    assert use.endpoints == ready
