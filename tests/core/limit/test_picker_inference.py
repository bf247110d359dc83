"""What successive pages of a picker teach: whether its saturation is a count, of what, and what it missed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit import picker_inference
from dispatcher.core.limit.picker_inference import (
    FLUSH_S,
    MAX_USUAL_PER_ENDPOINT,
    MIN_DISTINCT_LOADS,
    MIN_PAGES,
    PickerPage,
    UntrackedRequests,
    find_fitting_k,
)

FULL = list(range(0, 48, 5))


def page(requests: float, k: int = 16, ready: float = 3, race: float = 0) -> PickerPage:
    """A page of the concurrency detector; `race`: how far its other counter is ahead."""
    return PickerPage(requests / (ready * k), ready, requests + race)


class Count(picker_inference.ConcurrencyInference):
    """Handed a sample every two seconds, unless another time is given."""

    now = 0.0

    def learn_from_sample(
        self, pages: Sequence[PickerPage], at: float | None = None, *, can_prove: bool = True
    ) -> None:
        self.now = self.now + 2.0 if at is None else at
        super().learn_from_sample(pages, self.now, can_prove=can_prove)


def taught(pages: Sequence[PickerPage]) -> Count:
    count = Count()
    for each in pages:
        count.learn_from_sample([each])
    return count


class Servers:
    """Model servers under the utilization detector: its formula, and requests of different sizes."""

    def __init__(self, rand: random.Random, *, equal: bool) -> None:
        self.rand = rand
        self.pods = rand.randint(1, 4)
        self.slots = rand.choice([8, 16, 64])
        self.size = 0.9 / self.slots
        self.equal = equal

    def pages(self) -> Iterator[PickerPage]:
        while True:
            scores, total = [], 0
            for _ in range(self.pods):
                requests = self.rand.randint(0, self.slots + 6)
                running = min(requests, self.slots)
                kv = sum(self.size * (1 if self.equal else self.rand.uniform(0.3, 1)) for _ in range(running))
                scores.append(max((requests - running) / 5, kv / 0.8))
                total += requests
            yield PickerPage(sum(scores) / self.pods, self.pods, total)


@given(
    k=st.integers(1, 512),
    ready=st.integers(1, 40),
    fills=st.lists(st.integers(1, 500), min_size=MIN_PAGES, max_size=40, unique=True),
    races=st.lists(st.integers(-2, 2), min_size=40, max_size=40),
)
def test_the_pages_of_a_counting_detector_show_its_k(
    k: int, ready: int, fills: list[int], races: list[int]
) -> None:
    """Its two counters are not read at one moment: now and then one is ahead, which proves nothing."""
    count = Count()
    for fill, race in zip(fills, races, strict=False):
        count.learn_from_sample([page(fill, k, ready, max(race, -fill))])
        assert count.k in (None, k)
    for fill in (*fills, 501, 520):
        count.learn_from_sample([page(fill, k, ready)])
    assert count.k == k
    assert count.per_endpoint == (k if k <= MAX_USUAL_PER_ENDPOINT else None)


@given(seed=st.integers(), equal=st.booleans())
def test_a_pressure_score_is_never_taken_for_a_count(seed: int, equal: bool) -> None:
    """Not even where every request takes the same share of the cache."""
    count = Count()
    pages = Servers(random.Random(seed), equal=equal).pages()
    for _ in range(60):
        count.learn_from_sample([next(pages)])
        assert count.k is None


def test_a_cache_that_could_be_counted_in_requests_is_known_by_its_own_formula() -> None:
    """Equal requests of a hundredth of 0.8 of the cache look like a count with k = 100, page by page."""
    count = Count()
    for requests in (*FULL, *FULL):
        saturation = requests / 100 / 3
        count.learn_from_sample([PickerPage(saturation, 3, requests, pressure=saturation)])
    assert count.k is None


@pytest.mark.parametrize(
    "pages",
    [
        [page(20)] * 50,
        [page(fill) for fill in (20, 21) * 20],
        [page(fill) for fill in (20, 21, 22) * 20],
        [page(fill) for fill in range(MIN_PAGES - 1)],
        [page(0)] * 50,
    ],
    ids=["one fill", "two fills", "fills side by side", "too few pages", "idle"],
)
def test_too_little_is_not_believed(pages: list[PickerPage]) -> None:
    assert taught(pages).k is None


def test_the_same_sample_again_teaches_nothing() -> None:
    """Through Prometheus one scrape is seen several times."""
    count = Count()
    for fill in (10, 20, 30, 40):
        for _ in range(10):
            count.learn_from_sample([page(fill)])
    assert len({10, 20, 30, 40}) >= MIN_DISTINCT_LOADS
    assert count.k is None


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("every_s", [0.1, 0.5, 1.0])
def test_endpoints_that_came_since_the_last_flush_make_no_other_k(every_s: float, replicas: int) -> None:
    """From one pod to four: saturation is a share of four at once, the page shows one until its flush."""
    count, at, rand = Count(), 0.0, random.Random(1)
    while at < 30:
        at += every_s
        pods, shown = (1 if at < 15 else 4), (1 if at < 15 + FLUSH_S else 4)
        pages = []
        for _ in range(replicas):
            requests = rand.randint(1, 15)
            pages.append(PickerPage(requests / (16 * pods), shown, requests))
        count.learn_from_sample(pages, at)
        assert count.k in (None, 16)
        assert count.per_endpoint in (16, None)
    assert count.k == 16


@pytest.mark.parametrize(
    "contradiction",
    [
        [PickerPage(0.123456, 3, 20)],
        [page(20, k=32)],
        [page(20, race=10), page(21, race=10)],
        [PickerPage(float("nan"), 3, 20)],
    ],
    ids=["no whole number", "another k", "twice off by more than a race", "no number"],
)
def test_one_contradiction_ends_the_belief(contradiction: list[PickerPage]) -> None:
    count = taught([page(fill) for fill in FULL])
    assert count.k == 16
    for each in contradiction:
        count.learn_from_sample([each])
    assert count.k is None


def test_a_capacity_that_was_known_is_kept_until_another_is() -> None:
    """What ends the belief is no reason to send more."""
    count = taught([page(fill) for fill in FULL])
    count.learn_from_sample([PickerPage(0.123456, 3, 20)])
    assert (count.k, count.per_endpoint, count.per_endpoint_source) == (None, 16, "picker")
    for fill in (*FULL, 48):
        count.learn_from_sample([page(fill, k=32)])
    assert (count.k, count.per_endpoint) == (32, 32)


def tokens(requests: int, each: float) -> PickerPage:
    """Of a detector that counts tokens, a million per endpoint."""
    return PickerPage(requests * each / 3e6, 3, requests)


def test_tokens_in_flight_are_never_taken_for_the_capacity() -> None:
    """While all requests have 500 tokens, a detector that counts tokens shows 2,000 requests per endpoint."""
    count = Count()
    for fill in FULL:
        count.learn_from_sample([tokens(fill, 500)])
        assert (count.per_endpoint, count.per_endpoint_source) == (None, "search")
    proven = count.k
    count.learn_from_sample([tokens(20, 517.3)])
    assert (proven, count.k) == (2000, None)
    assert (count.per_endpoint, count.per_endpoint_source) == (None, "search")


@pytest.mark.parametrize(("k", "per_endpoint"), [(100, 100.0), (101, None), (256, None)])
def test_only_a_k_up_to_the_usual_most_is_taken_for_the_capacity(k: int, per_endpoint: float | None) -> None:
    """A larger k still proves that the saturation counts requests."""
    count = Count()
    for fill in FULL:
        count.learn_from_sample([page(fill, k)])
        assert count.per_endpoint in (None, per_endpoint)
    assert (count.k, count.per_endpoint) == (k, per_endpoint)
    assert count.per_endpoint_source == ("search" if per_endpoint is None else "picker")


def test_a_large_k_is_proven_again_after_endpoints_came() -> None:
    """The ready endpoints follow at the next flush: 4 endpoints count already while 3 are shown."""
    count = taught([page(fill, k=256) for fill in FULL])
    before = count.k
    for fill in (20, 25, 30):
        count.learn_from_sample([PickerPage(fill / (4 * 256), 3, fill)])
    assert (before, count.k) == (256, None)
    for fill in FULL:
        count.learn_from_sample([page(fill, k=256, ready=4)])
        assert (count.per_endpoint, count.per_endpoint_source) == (None, "search")
    assert count.k == 256


def test_a_count_that_is_one_of_several_detectors_is_taken_back_for_good() -> None:
    """Requests fill the pool first, then tokens do: the picker shows the larger of the two."""
    count = taught([page(fill) for fill in FULL])
    assert (count.per_endpoint, count.per_endpoint_source) == (16, "picker")
    for fill in range(10, 40):
        count.learn_from_sample([PickerPage(0.5 + fill / 97, 3, fill)])
    assert (count.per_endpoint, count.per_endpoint_source, count.is_mixed) == (None, "search", True)
    for fill in (*FULL, *FULL):
        count.learn_from_sample([page(fill)])
        assert (count.k, count.per_endpoint_source) == (None, "search"), (
            "until another picker teaches something"
        )
    count.forget_picker()
    for fill in FULL:
        count.learn_from_sample([page(fill)])
    assert (count.k, count.per_endpoint_source) == (16, "picker")


@pytest.mark.parametrize(
    "between",
    [page(20), PickerPage(0.123456, 3, 20), page(20, k=12)],
    ids=["a count", "less than the count", "another count"],
)
def test_endpoints_that_go_for_long_take_back_no_count(between: PickerPage) -> None:
    """An endpoint that goes stays on the page for up to five seconds, with the saturation above the count."""
    count = taught([page(fill) for fill in FULL])
    for fill in range(10, 40):
        count.learn_from_sample([PickerPage(fill / (2 * 16), 3, fill + 0.3)])
        count.learn_from_sample([PickerPage(fill / (2 * 16), 3, fill + 0.3)])
        count.learn_from_sample([between])
    assert (count.per_endpoint, count.is_mixed) == (16, False)


def test_pages_that_cannot_prove_a_k_can_contradict_one() -> None:
    """The detector divides by four endpoints but the page shows two, so the pages agree on twice the k."""
    count = Count()
    for fill in FULL:
        count.learn_from_sample([page(fill, k=32)], can_prove=False)
    assert (count.k, count.per_endpoint_source) == (None, "search")
    for fill in FULL:
        count.learn_from_sample([page(fill)])
    count.learn_from_sample([page(20, k=32)], can_prove=False)
    assert (count.k, count.per_endpoint) == (None, 16)


def test_a_score_that_fits_a_k_now_and_then_does_not_move_the_capacity_each_time() -> None:
    """Queues of 2 of 5 and 3 of 5 give round numbers that look like counts."""
    count = taught([page(20, k=32), PickerPage(0.123456, 3, 20)])
    for each in [page(20, k=7), page(20, k=9), PickerPage(0.123456, 3, 20), page(20, k=8)]:
        count.learn_from_sample([each])
        assert (count.per_endpoint, count.per_endpoint_source) == (None, "search")


def test_the_capacity_is_searched_for_until_a_page_suggests_one() -> None:
    def guessed(count: Count) -> tuple[float | None, str]:
        return count.per_endpoint, count.per_endpoint_source

    search = (None, "search")
    count = Count()
    assert guessed(count) == search, "no page was seen"
    count.learn_from_sample([page(0)])
    assert guessed(count) == search, "an idle page fits every k"
    count.learn_from_sample([page(5)])
    assert guessed(count) == (16, "suggestion"), "one page with requests shows it"
    count.learn_from_sample([PickerPage(0.123456, 3, 20)])
    assert guessed(count) == search, "the next page contradicts it"
    assert guessed(taught([page(5, k=100)])) == (100, "suggestion")
    assert guessed(taught([page(5, k=101)])) == search, "a k above the usual most may be of tokens"
    assert guessed(taught([page(5, k=3000)])) == search
    assert guessed(taught([PickerPage(0.123456, 3, 20)])) == search
    count = taught([page(5)])
    count.mark_not_a_count()
    assert guessed(count) == search, "the picker says that its saturation is no count"


def test_every_replica_must_agree() -> None:
    count = Count()
    for fill in FULL:
        count.learn_from_sample([page(fill, k=16), page(fill + 1, k=32)])
    assert count.k is None


@given(st.lists(st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 3), max_size=30))
def test_no_page_raises(pages: list[tuple[float, float, float]]) -> None:
    count = Count()
    for each in pages:
        count.learn_from_sample([PickerPage(*each)])
        assert count.per_endpoint is None or 0 < count.per_endpoint <= MAX_USUAL_PER_ENDPOINT
        assert (count.per_endpoint is None) == (count.per_endpoint_source == "search")


def test_one_page_that_fits() -> None:
    assert find_fitting_k(page(20)) == 16
    assert find_fitting_k(PickerPage(0.0, 3, 20)) is None
    assert find_fitting_k(PickerPage(0.4, 0, 20)) is None
    assert find_fitting_k(PickerPage(0.4, 4, 0)) is None
    assert find_fitting_k(PickerPage(0.4, 4, 127)) is None


def test_what_the_picker_did_not_send_is_what_the_averages_have_more() -> None:
    outside = UntrackedRequests()
    outside.learn_from_sample(0.0, 10.0, 10.0)
    assert outside.request_count == 0
    outside.learn_from_sample(1.0, 25.0, 12.0)  # a flush, between 0 and 1: it may have been ours for a moment
    assert outside.request_count == 0
    outside.learn_from_sample(6.0, 26.0, 10.0)
    assert outside.request_count == 13, "there at two flushes in a row"
    outside.learn_from_sample(7.0, 26.0, 3.0)  # the averages are as they were: ours ended since
    assert outside.request_count == 13
    outside.learn_from_sample(11.5, 4.0, 4.0)
    assert outside.request_count == 0


def test_what_a_predecessor_sent_counts_from_the_first_flush_on() -> None:
    """A picker that has just started shows no averages before it, and remembers nothing."""
    outside = UntrackedRequests()
    outside.learn_from_sample(0.0, None, 0.0)
    outside.learn_from_sample(5.0, 25.0, 5.0)
    assert outside.request_count == 20


def test_what_a_dispatcher_that_died_left_in_the_averages_is_not_taken_for_others_work() -> None:
    """Its successor sees them first: of up to five seconds ago, when its requests still ran."""
    outside = UntrackedRequests()
    for at in range(5):
        outside.learn_from_sample(float(at), 30.0, 0.0)
        assert outside.request_count == 0
    outside.learn_from_sample(5.0, 0.0, 0.0)
    assert outside.request_count == 0


def test_a_peak_between_two_samples_is_not_taken_for_others_work() -> None:
    """Requests of 0.2 s, seen once a second: a flush may see them all, and two samples in a row only some."""
    outside = UntrackedRequests()
    outside.learn_from_sample(0.0, 0.0, 0.0)
    outside.learn_from_sample(1.0, 30.0, 12.0)
    assert outside.request_count == 0
    for at in range(2, 6):
        outside.learn_from_sample(float(at), 30.0, 30.0)
        assert outside.request_count == 0


def test_a_fall_of_the_picker_s_own_count_is_not_taken_for_others_work() -> None:
    """A wave of requests ends: the averages still have it, from a flush before."""
    outside = UntrackedRequests()
    for at in range(5):
        outside.learn_from_sample(float(at), 45.0, 45.0)
    outside.learn_from_sample(5.0, 45.0, 0.0)
    outside.learn_from_sample(6.0, 45.0, 0.0)
    assert outside.request_count == 0


def test_averages_that_do_not_change_are_of_a_newer_flush_in_time() -> None:
    """45 of ours ended and 45 of others came: the next flush shows it, though the sum is the same."""
    outside = UntrackedRequests()
    for at in range(4):
        outside.learn_from_sample(float(at), 45.0, 45.0)
    for at in range(4, 12):
        outside.learn_from_sample(float(at), 45.0, 0.0)
    assert outside.request_count == 45


def test_without_averages_nothing_is_known_of_others() -> None:
    outside = UntrackedRequests()
    outside.learn_from_sample(0.0, 40.0, 10.0)
    outside.learn_from_sample(1.0, None, 10.0)
    assert outside.request_count == 0
    outside.learn_from_sample(2.0, float("nan"), 10.0)
    assert outside.request_count == 0


@given(
    sent=st.lists(st.integers(0, 60), min_size=2, max_size=60),
    others=st.integers(0, 40),
    every=st.floats(0.2, 2.0),
    phase=st.floats(0.0, 5.0),
)
def test_steady_others_are_never_counted_too_low_nor_ours_twice(
    sent: list[int], others: int, every: float, phase: float
) -> None:
    """From the second flush on, to what moved between two samples; a wave of ours adds nothing."""
    outside, average, flush_at, slack = UntrackedRequests(), float(sent[0] + others), phase, 0
    flushes = 0
    for number, count in enumerate(sent):
        at = number * every
        before = sent[number - 1] if number else count
        flushed, outside_before = flush_at <= at, average
        if flushed:  # just now
            average, flush_at = float(count + others), flush_at + 5.0 * (1 + (at - flush_at) // 5.0)
        outside.learn_from_sample(at, average, float(count))
        if number and flushed:
            flushes += average != outside_before
            slack = max(slack, before - count)
        if flushes >= 2:
            assert others - slack <= outside.request_count <= others + max(0, max(sent) - min(sent))
