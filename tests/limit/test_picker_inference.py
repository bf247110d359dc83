"""Inference from pages of a picker: whether its saturation is a count of requests, and untracked requests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit import picker_inference
from dispatcher.limit.picker_inference import (
    FLUSH_LATE_FACTOR,
    FLUSH_S,
    MAX_USUAL_PER_ENDPOINT,
    MIN_DISTINCT_LOADS,
    MIN_PAGES,
    KnownPickers,
    PickerPage,
    UntrackedRequests,
    find_fitting_k,
    is_same_count,
)

LOADS = list(range(0, 48, 5))


def make_page(requests: float, k: int = 16, ready: float = 3, counter_lead: float = 0) -> PickerPage:
    """Return a page of the concurrency detector whose other counter is ahead by `counter_lead`."""
    return PickerPage(requests / (ready * k), ready, requests + counter_lead)


class SteppedInference(picker_inference.ConcurrencyInference):
    """Inference that gets a sample every two seconds, unless another time is given."""

    now = 0.0

    def learn_from_sample(
        self, pages: Sequence[PickerPage], at: float | None = None, *, can_prove: bool = True
    ) -> None:
        self.now = self.now + 2.0 if at is None else at
        super().learn_from_sample(pages, self.now, can_prove=can_prove)


def learn_pages(pages: Sequence[PickerPage]) -> SteppedInference:
    inference = SteppedInference()
    for page in pages:
        inference.learn_from_sample([page])
    return inference


class UtilizationServers:
    """Model servers under the utilization detector: its formula, with requests of different sizes."""

    def __init__(self, random_numbers: random.Random, *, are_requests_equal: bool) -> None:
        self.random_numbers = random_numbers
        self.endpoint_count = random_numbers.randint(1, 4)
        self.slot_count = random_numbers.choice([8, 16, 64])
        self.request_share = 0.9 / self.slot_count
        self.are_requests_equal = are_requests_equal

    def generate_pages(self) -> Iterator[PickerPage]:
        while True:
            scores, total = [], 0
            for _ in range(self.endpoint_count):
                requests = self.random_numbers.randint(0, self.slot_count + 6)
                running = min(requests, self.slot_count)
                kv = sum(
                    self.request_share
                    * (1 if self.are_requests_equal else self.random_numbers.uniform(0.3, 1))
                    for _ in range(running)
                )
                scores.append(max((requests - running) / 5, kv / 0.8))
                total += requests
            yield PickerPage(sum(scores) / self.endpoint_count, self.endpoint_count, total)


@given(
    k=st.integers(1, 512),
    ready=st.integers(1, 40),
    loads=st.lists(st.integers(1, 500), min_size=MIN_PAGES, max_size=40, unique=True),
    counter_leads=st.lists(st.integers(-2, 2), min_size=40, max_size=40),
)
def test_k_of_a_counting_detector_is_inferred(
    k: int, ready: int, loads: list[int], counter_leads: list[int]
) -> None:
    """The two counters are not read at one moment, so one is sometimes ahead. Such a page proves nothing."""
    inference = SteppedInference()
    for load, counter_lead in zip(loads, counter_leads, strict=False):
        inference.learn_from_sample([make_page(load, k, ready, max(counter_lead, -load))])
        assert inference.k in (None, k)
    for load in (*loads, 501, 520):
        inference.learn_from_sample([make_page(load, k, ready)])
    assert inference.k == k
    assert inference.per_endpoint == (k if k <= MAX_USUAL_PER_ENDPOINT else None)


@given(seed=st.integers(), are_requests_equal=st.booleans())
def test_pressure_score_is_never_mistaken_for_a_count(seed: int, are_requests_equal: bool) -> None:
    """This holds even if every request takes the same share of the cache."""
    inference = SteppedInference()
    pages = UtilizationServers(random.Random(seed), are_requests_equal=are_requests_equal).generate_pages()
    for _ in range(60):
        inference.learn_from_sample([next(pages)])
        assert inference.k is None


def test_saturation_equal_to_the_pressure_of_the_cache_is_not_a_count() -> None:
    """Equal requests of a hundredth of 0.8 of the cache look like a count with k = 100, page by page."""
    inference = SteppedInference()
    for requests in (*LOADS, *LOADS):
        saturation = requests / 100 / 3
        inference.learn_from_sample([PickerPage(saturation, 3, requests, pressure=saturation)])
    assert inference.k is None


@pytest.mark.parametrize(
    "pages",
    [
        [make_page(20)] * 50,
        [make_page(load) for load in (20, 21) * 20],
        [make_page(load) for load in (20, 21, 22) * 20],
        [make_page(load) for load in range(MIN_PAGES - 1)],
        [make_page(0)] * 50,
    ],
    ids=["one load", "two loads", "consecutive loads", "too few pages", "idle"],
)
def test_k_is_not_inferred_from_too_few_different_pages(pages: list[PickerPage]) -> None:
    assert learn_pages(pages).k is None


def test_repeated_sample_counts_once() -> None:
    """With Prometheus, the same scrape is read several times."""
    inference = SteppedInference()
    for load in (10, 20, 30, 40):
        for _ in range(10):
            inference.learn_from_sample([make_page(load)])
    assert len({10, 20, 30, 40}) >= MIN_DISTINCT_LOADS
    assert inference.k is None


def test_six_pages_with_four_different_loads_prove_k() -> None:
    """Picker and Prometheus may show each load several times."""
    loads = (10, 11, 12, 13, 10, 11)
    assert (len(loads), len(set(loads))) == (MIN_PAGES, MIN_DISTINCT_LOADS)
    assert learn_pages([make_page(load) for load in loads]).k == 16
    assert learn_pages([make_page(load) for load in loads[:-1]]).k is None


def test_pages_that_agree_no_longer_than_one_flush_may_take_do_not_prove_k() -> None:
    inference = SteppedInference()
    for at in range(8):
        inference.learn_from_sample([make_page(10 + at)], float(at))
        assert inference.k == (None if at <= FLUSH_LATE_FACTOR * FLUSH_S else 16)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("interval_s", [0.1, 0.5, 1.0])
def test_new_endpoints_since_the_last_flush_do_not_change_k(interval_s: float, replicas: int) -> None:
    """The pool grows from one endpoint to four, which count in the saturation at once.

    The page shows one endpoint until its next flush.
    """
    inference, at, random_numbers = SteppedInference(), 0.0, random.Random(1)
    while at < 30:
        at += interval_s
        endpoints, shown_endpoints = (1 if at < 15 else 4), (1 if at < 15 + FLUSH_S else 4)
        pages = []
        for _ in range(replicas):
            requests = random_numbers.randint(1, 15)
            pages.append(PickerPage(requests / (16 * endpoints), shown_endpoints, requests))
        inference.learn_from_sample(pages, at)
        assert inference.k in (None, 16)
        assert inference.per_endpoint in (16, None)
    assert inference.k == 16


@pytest.mark.parametrize(
    "contradiction",
    [
        [PickerPage(0.123456, 3, 20)],
        [make_page(20, k=32)],
        [make_page(20, counter_lead=10), make_page(21, counter_lead=10)],
        [PickerPage(float("nan"), 3, 20)],
        [PickerPage(0.123456, 3, 0)],
    ],
    ids=["not a whole number", "another k", "counter twice too far ahead", "not a number", "none in flight"],
)
def test_contradicting_page_invalidates_k(contradiction: list[PickerPage]) -> None:
    inference = learn_pages([make_page(load) for load in LOADS])
    assert inference.k == 16
    for page in contradiction:
        inference.learn_from_sample([page])
    assert inference.k is None


@pytest.mark.parametrize(("counted", "in_flight"), [(10, 12), (12, 10), (92, 100), (108, 100)])
def test_k_is_kept_while_its_two_counters_differ_by_two_or_a_tenth(counted: int, in_flight: int) -> None:
    """The picker does not change both at the same moment."""
    inference = learn_pages([make_page(load) for load in LOADS])
    page = PickerPage(counted / (4 * 16), 4, in_flight)
    for _ in range(20):
        inference.learn_from_sample([page])
        inference.learn_from_sample([page, page])
    assert (inference.k, inference.per_endpoint, inference.is_mixed) == (16, 16, False)


def test_k_is_kept_if_the_saturation_of_many_requests_is_rounded() -> None:
    inference = learn_pages([make_page(load) for load in LOADS])
    for load in (300_001, 300_007):
        inference.learn_from_sample([PickerPage(round(load / (3 * 16), 3), 3, load)])
    assert inference.k == 16


def test_known_capacity_is_kept_until_another_one_is_inferred() -> None:
    """A contradiction is no reason to send more."""
    inference = learn_pages([make_page(load) for load in LOADS])
    inference.learn_from_sample([PickerPage(0.123456, 3, 20)])
    assert (inference.k, inference.per_endpoint, inference.per_endpoint_source) == (None, 16, "picker")
    for load in (*LOADS, 48):
        inference.learn_from_sample([make_page(load, k=32)])
    assert (inference.k, inference.per_endpoint) == (32, 32)


def make_token_page(requests: int, tokens_per_request: float) -> PickerPage:
    """Return a page of a detector that counts tokens, a million per endpoint."""
    return PickerPage(requests * tokens_per_request / 3e6, 3, requests)


def test_count_of_tokens_is_never_taken_for_the_capacity() -> None:
    """While all requests have 500 tokens, a detector that counts tokens shows 2,000 requests per endpoint."""
    inference = SteppedInference()
    for load in LOADS:
        inference.learn_from_sample([make_token_page(load, 500)])
        assert (inference.per_endpoint, inference.per_endpoint_source) == (None, "search")
    proven_k = inference.k
    inference.learn_from_sample([make_token_page(20, 517.3)])
    assert (proven_k, inference.k) == (2000, None)
    assert (inference.per_endpoint, inference.per_endpoint_source) == (None, "search")


@pytest.mark.parametrize(("k", "per_endpoint"), [(100, 100.0), (101, None), (256, None)])
def test_k_above_the_usual_maximum_is_not_taken_for_the_capacity(k: int, per_endpoint: float | None) -> None:
    """A larger k still proves that the saturation counts requests."""
    inference = SteppedInference()
    for load in LOADS:
        inference.learn_from_sample([make_page(load, k)])
        assert inference.per_endpoint in (None, per_endpoint)
    assert (inference.k, inference.per_endpoint) == (k, per_endpoint)
    assert inference.per_endpoint_source == ("search" if per_endpoint is None else "picker")


def test_large_k_is_proven_again_after_new_endpoints() -> None:
    """Until the next flush the page shows 3 endpoints, while 4 already count in the saturation."""
    inference = learn_pages([make_page(load, k=256) for load in LOADS])
    previous_k = inference.k
    for load in (20, 25, 30):
        inference.learn_from_sample([PickerPage(load / (4 * 256), 3, load)])
    assert (previous_k, inference.k) == (256, None)
    for load in LOADS:
        inference.learn_from_sample([make_page(load, k=256, ready=4)])
        assert (inference.per_endpoint, inference.per_endpoint_source) == (None, "search")
    assert inference.k == 256


def test_k_is_withdrawn_for_good_if_the_picker_mixes_several_detectors() -> None:
    """The picker shows the larger of two counts: first that of requests, then that of tokens."""
    inference = learn_pages([make_page(load) for load in LOADS])
    assert (inference.per_endpoint, inference.per_endpoint_source) == (16, "picker")
    for load in range(10, 40):
        inference.learn_from_sample([PickerPage(0.5 + load / 97, 3, load)])
    assert (inference.per_endpoint, inference.per_endpoint_source, inference.is_mixed) == (
        None,
        "search",
        True,
    )
    for load in (*LOADS, *LOADS):
        inference.learn_from_sample([make_page(load)])
        assert (inference.k, inference.per_endpoint_source) == (None, "search"), (
            "k stays withdrawn until the picker is forgotten"
        )
    inference.forget_picker()
    for load in LOADS:
        inference.learn_from_sample([make_page(load)])
    assert (inference.k, inference.per_endpoint_source) == (16, "picker")


def learn_excess(times: Iterable[float]) -> SteppedInference:
    """Return an inference that had proven a k, and then saw more than that k explains at these times."""
    inference = learn_pages([make_page(load) for load in LOADS])
    for number, at in enumerate(times):
        inference.learn_from_sample([PickerPage(0.9 + number / 97, 3, 10 + number)], at)
    assert inference.k is None
    return inference


@pytest.mark.parametrize(
    ("times", "is_withdrawn"),
    [
        ([100, 105, 110, 115, 120, 125, 130], False),
        ([100, 105, 110, 115, 120, 125, 130, 131], True),
        ([100, 127, 128, 129, 131], False),
        ([100, 127, 128, 129, 131, 132], True),
    ],
    ids=["30 s", "more than 30 s", "five pages", "six pages"],
)
def test_k_is_withdrawn_after_six_pages_and_more_than_30_s_above_the_count(
    times: list[float], is_withdrawn: bool
) -> None:
    inference = learn_excess(times)
    assert inference.is_mixed is is_withdrawn
    assert inference.per_endpoint == (None if is_withdrawn else 16)


@pytest.mark.parametrize(
    "between",
    [make_page(20), PickerPage(0.123456, 3, 20), make_page(20, k=12)],
    ids=["a count", "less than the count", "another count"],
)
def test_endpoints_that_leave_slowly_do_not_withdraw_k(between: PickerPage) -> None:
    """An endpoint that leaves stays on the page for up to 5 s, so the saturation is above the count."""
    inference = learn_pages([make_page(load) for load in LOADS])
    for load in range(10, 40):
        inference.learn_from_sample([PickerPage(load / (2 * 16), 3, load + 0.3)])
        inference.learn_from_sample([PickerPage(load / (2 * 16), 3, load + 0.3)])
        inference.learn_from_sample([between])
    assert (inference.per_endpoint, inference.is_mixed) == (16, False)


def test_page_that_cannot_prove_k_can_contradict_it() -> None:
    """The detector divides by four endpoints but the page shows two, so the pages agree on twice the k."""
    inference = SteppedInference()
    for load in LOADS:
        inference.learn_from_sample([make_page(load, k=32)], can_prove=False)
    assert (inference.k, inference.per_endpoint_source) == (None, "search")
    for load in LOADS:
        inference.learn_from_sample([make_page(load)])
    inference.learn_from_sample([make_page(20, k=32)], can_prove=False)
    assert (inference.k, inference.per_endpoint) == (None, 16)


def test_score_that_sometimes_fits_a_k_does_not_change_the_capacity() -> None:
    """Queues of 2 of 5 and 3 of 5 give round numbers that look like counts."""
    inference = learn_pages([make_page(20, k=32), PickerPage(0.123456, 3, 20)])
    for page in [make_page(20, k=7), make_page(20, k=9), PickerPage(0.123456, 3, 20), make_page(20, k=8)]:
        inference.learn_from_sample([page])
        assert (inference.per_endpoint, inference.per_endpoint_source) == (None, "search")


def test_capacity_is_searched_for_until_a_page_suggests_one() -> None:
    def get_capacity(inference: SteppedInference) -> tuple[float | None, str]:
        return inference.per_endpoint, inference.per_endpoint_source

    search = (None, "search")
    inference = SteppedInference()
    assert get_capacity(inference) == search, "there was no page yet"
    inference.learn_from_sample([make_page(0)])
    assert get_capacity(inference) == search, "an idle page fits every k"
    inference.learn_from_sample([make_page(5)])
    assert get_capacity(inference) == (16, "suggestion"), "one page with requests suggests the capacity"
    inference.learn_from_sample([PickerPage(0.123456, 3, 20)])
    assert get_capacity(inference) == search, "the next page contradicts it"
    assert get_capacity(learn_pages([make_page(5, k=100)])) == (100, "suggestion")
    assert get_capacity(learn_pages([make_page(5, k=101)])) == search, (
        "a k above the usual maximum may count tokens"
    )
    assert get_capacity(learn_pages([make_page(5, k=3000)])) == search
    assert get_capacity(learn_pages([PickerPage(0.123456, 3, 20)])) == search
    assert get_capacity(learn_pages([PickerPage(0.123456, 3, 20), make_page(5)])) == search, (
        "a page that fits no k shows that another one fits by chance"
    )
    inference = learn_pages([make_page(5)])
    inference.mark_not_a_count()
    assert get_capacity(inference) == search, "the picker reports that its saturation is not a count"


def test_k_is_not_inferred_if_replicas_disagree() -> None:
    inference = SteppedInference()
    for load in LOADS:
        inference.learn_from_sample([make_page(load, k=16), make_page(load + 1, k=32)])
    assert inference.k is None


@given(st.lists(st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 3), max_size=30))
def test_any_page_is_accepted_without_an_error(pages: list[tuple[float, float, float]]) -> None:
    inference = SteppedInference()
    for page in pages:
        inference.learn_from_sample([PickerPage(*page)])
        assert inference.per_endpoint is None or 0 < inference.per_endpoint <= MAX_USUAL_PER_ENDPOINT
        assert (inference.per_endpoint is None) == (inference.per_endpoint_source == "search")


def test_fitting_k_of_one_page() -> None:
    assert find_fitting_k(make_page(20)) == 16
    assert find_fitting_k(PickerPage(0.0, 3, 20)) is None
    assert find_fitting_k(PickerPage(0.4, 0, 20)) is None
    assert find_fitting_k(PickerPage(0.4, 4, 0)) is None
    assert find_fitting_k(PickerPage(0.4, 4, 127)) is None


def test_first_replicas_of_the_picker_are_no_restart_and_later_ones_are() -> None:
    pickers = KnownPickers()
    assert not pickers.detect_restart({"a": 100.0, "b": None})
    assert not pickers.detect_restart({"a": 100.0, "b": 200.0}), "the page of b shows its start only now"
    assert not pickers.detect_restart({"a": 105.0, "b": 200.0}), "the clock of the host was set"
    assert not pickers.detect_restart({"a": 105.0, "b": None})
    assert not pickers.detect_restart({"b": 200.0})
    assert not pickers.detect_restart({"a": 105.0}), "a is not new, because only its scrape had failed"
    assert pickers.detect_restart({"a": 110.1})
    assert pickers.detect_restart({"a": 110.1, "b": 200.0}), "b is not known since the restart of a"
    assert pickers.detect_restart({"c": None})


def test_untracked_requests_are_those_in_the_averages_beyond_the_picker_s_own_count() -> None:
    untracked = UntrackedRequests()
    untracked.learn_from_sample(0.0, 10.0, 10.0)
    assert untracked.request_count == 0
    untracked.learn_from_sample(1.0, 25.0, 12.0)  # a flush between 0 and 1 may have contained ours
    assert untracked.request_count == 0
    untracked.learn_from_sample(6.0, 26.0, 10.0)
    assert untracked.request_count == 13, "13 requests were there at two flushes in a row"
    untracked.learn_from_sample(7.0, 26.0, 3.0)  # the averages are unchanged, and ours have ended since
    assert untracked.request_count == 13
    untracked.learn_from_sample(11.5, 4.0, 4.0)
    assert untracked.request_count == 0


def test_requests_of_the_previous_picker_count_from_the_first_flush_on() -> None:
    """A picker that has just started shows no averages before its first flush."""
    untracked = UntrackedRequests()
    untracked.learn_from_sample(0.0, None, 0.0)
    untracked.learn_from_sample(5.0, 25.0, 5.0)
    assert untracked.request_count == 20


def test_old_averages_at_the_first_sample_are_not_counted_as_untracked_requests() -> None:
    """The averages may still contain requests of a dispatcher that died up to five seconds ago."""
    untracked = UntrackedRequests()
    for at in range(5):
        untracked.learn_from_sample(float(at), 30.0, 0.0)
        assert untracked.request_count == 0
    untracked.learn_from_sample(5.0, 0.0, 0.0)
    assert untracked.request_count == 0


def test_peak_between_two_samples_is_not_counted_as_untracked_requests() -> None:
    """Requests take 0.2 s and samples are 1 s apart, so a flush may contain more than the samples around."""
    untracked = UntrackedRequests()
    untracked.learn_from_sample(0.0, 0.0, 0.0)
    untracked.learn_from_sample(1.0, 30.0, 12.0)
    assert untracked.request_count == 0
    for at in range(2, 6):
        untracked.learn_from_sample(float(at), 30.0, 30.0)
        assert untracked.request_count == 0


def test_falling_count_of_the_picker_is_not_counted_as_untracked_requests() -> None:
    """Many requests end at once, and the averages of the previous flush still contain them."""
    untracked = UntrackedRequests()
    for at in range(5):
        untracked.learn_from_sample(float(at), 45.0, 45.0)
    untracked.learn_from_sample(5.0, 45.0, 0.0)
    untracked.learn_from_sample(6.0, 45.0, 0.0)
    assert untracked.request_count == 0


def test_unchanged_averages_count_as_a_newer_flush_after_a_while() -> None:
    """45 tracked requests ended and 45 others came, so the next flush shows the same sum."""
    untracked = UntrackedRequests()
    for at in range(4):
        untracked.learn_from_sample(float(at), 45.0, 45.0)
    for at in range(4, 12):
        untracked.learn_from_sample(float(at), 45.0, 0.0)
    assert untracked.request_count == 45


@pytest.mark.parametrize(
    ("samples", "untracked_requests"),
    [
        ([(0, 0), (6, 0)], 0),
        ([(0, 0), (6.5, 0)], 45),
        ([(0, 45), (1, 0), (6.5, 0)], 0),
        ([(0, 45), (1, 0), (7, 0)], 45),
        ([(0, 0), (5, 45), (6.5, 0)], 0),
        ([(0, 0), (5, 5), (6.5, 10)], 35),
    ],
    ids=["6 s", "more than 6 s", "tracked then", "tracked before", "tracked lately", "some tracked"],
)
def test_unchanged_averages_count_beyond_the_largest_count_of_the_last_six_seconds(
    samples: list[tuple[float, float]], untracked_requests: float
) -> None:
    untracked = UntrackedRequests()
    for at, in_flight in samples:
        untracked.learn_from_sample(at, 45.0, in_flight)
    assert untracked.request_count == untracked_requests


def test_untracked_requests_are_zero_without_averages() -> None:
    untracked = UntrackedRequests()
    untracked.learn_from_sample(0.0, 40.0, 10.0)
    untracked.learn_from_sample(1.0, None, 10.0)
    assert untracked.request_count == 0
    untracked.learn_from_sample(2.0, float("nan"), 10.0)
    assert untracked.request_count == 0


@given(
    sent=st.lists(st.integers(0, 60), min_size=2, max_size=60),
    others=st.integers(0, 40),
    interval_s=st.floats(0.2, 2.0),
    phase=st.floats(0.0, 5.0),
)
def test_steady_untracked_requests_are_counted_within_bounds(
    sent: list[int], others: int, interval_s: float, phase: float
) -> None:
    """The count is right from the second flush on, up to the change between two samples."""
    untracked, average, flush_at, slack = UntrackedRequests(), float(sent[0] + others), phase, 0
    flushes = 0
    for number, count in enumerate(sent):
        at = number * interval_s
        previous_count = sent[number - 1] if number else count
        flushed, previous_average = flush_at <= at, average
        if flushed:  # there was a flush since the previous sample
            average, flush_at = float(count + others), flush_at + 5.0 * (1 + (at - flush_at) // 5.0)
        untracked.learn_from_sample(at, average, float(count))
        if number and flushed:
            flushes += average != previous_average
            slack = max(slack, previous_count - count)
        if flushes >= 2:
            assert others - slack <= untracked.request_count <= others + max(0, max(sent) - min(sent))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [(0.0, 2.0, True), (0.0, 3.0, False), (100.0, 90.0, True), (90.0, 100.0, True), (100.0, 89.0, False)],
)
def test_counters_of_one_page_may_differ_a_little(one: float, other: float, is_same: bool) -> None:
    assert is_same_count(one, other) is is_same
