"""Requests in flight by priority, as the picker's in-flight-load producer shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.in_flight_load import NAME, SERIES, sum_in_flight_load
from dispatcher.signals.epp.series import SERIES_NAMES, InFlightLoad, PoolView, build_view
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.readings import PickerFacts, count_batch_requests, derive_readings
from tests.signals.fakes import read_page

POLICY = Policy(per_endpoint=100)


def format_line(value: float | str, priority: str = "0", endpoint: str = "a", producer: str = "load") -> str:
    labels = f'endpoint_name="{endpoint}",fairness_id="x",namespace="llm",priority="{priority}"'
    return f'{NAME}{{{labels},producer_name="{producer}"}} {value}'


def read_load(*lines: str, series_count: int = SERIES.max_samples) -> InFlightLoad | None:
    series = replace(SERIES, max_samples=series_count)
    page = PageParser(SERIES_NAMES, optional=(series,))
    page.feed("".join(f"{line}\n" for line in lines).encode())
    page.close()
    return sum_in_flight_load(page.optional[series].samples, page.optional[series].problem)


def read_view(*lines: str, page: str = "router-newest-flow-control-on", without: str = "-") -> PoolView:
    """Return the view of a recorded page with more lines, and without those that start with `without`."""
    recorded = [line for line in read_page(page).splitlines() if not line.startswith(without)]
    parser = PageParser(SERIES_NAMES, optional=(SERIES,))
    parser.feed("".join(f"{line}\n" for line in (*recorded, *lines)).encode())
    view = build_view(parser.close(), "qwen", 1.0, 1.0)
    assert not isinstance(view, ReadFailure)
    found = parser.optional[SERIES]
    return replace(view, load=sum_in_flight_load(found.samples, found.problem))


def get_requests_reading(*views: PoolView) -> Reading:
    (reading,) = derive_readings(views, "requests", POLICY, "epp").readings
    assert reading.signal is Signal.REQUESTS
    return reading


def test_all_endpoints_and_priorities_are_added() -> None:
    lines = format_line(5), format_line(3, "-10"), format_line(4, "-10", "b"), format_line(1, "7", "b")
    assert read_load(*lines) == InFlightLoad(13, 7, "load")


def test_page_without_the_series_has_no_load() -> None:
    assert read_load() is None


def test_request_that_ended_after_its_endpoint_was_removed_does_not_reduce_the_sum() -> None:
    assert read_load(format_line(5), format_line(-1, "-10", "gone")) == InFlightLoad(5, 0, "load")


def test_only_one_of_several_producers_counts() -> None:
    lines = [format_line(5, producer="b"), format_line(6, "-1", producer="a"), format_line(1, producer="a")]
    assert read_load(*lines) == InFlightLoad(7, 6, "a")


def test_older_series_without_priorities_shows_no_batch_requests() -> None:
    assert read_load(f'{NAME}{{endpoint_name="a",namespace="llm",producer_name="load"}} 4') == InFlightLoad(
        4, None, "load"
    )


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_value_that_is_not_finite_makes_the_load_unusable(value: str) -> None:
    load = read_load(format_line(5), format_line(value, "-10"), format_line(3, producer="other"))
    assert load is not None
    assert load.problem == "a value that is not a finite number"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            [format_line(1, endpoint=str(number)) for number in range(4)],
            "more than 3 series of requests in flight",
        ),
        ([format_line("many")], "not a number"),
    ],
)
def test_load_that_cannot_be_read_says_why(lines: list[str], problem: str) -> None:
    load = read_load(*lines, series_count=3)
    assert load is not None
    assert problem in load.problem


def test_batch_requests_in_flight_and_in_the_queue_bound_those_in_the_reading() -> None:
    """The recorded page shows 120 running requests and 12 queued ones, 4 of them with a negative priority."""
    view = read_view(format_line(100), format_line(20, "-10"))
    assert count_batch_requests([view]) == (24, "")
    reading = get_requests_reading(view)
    assert reading.load == pytest.approx(132)
    assert reading.max_batch_requests == 24


def test_requests_that_came_another_way_may_be_batch_requests() -> None:
    facts = PickerFacts()
    facts.outside.request_count = 5
    view = read_view(format_line(100), format_line(20, "-10"))
    (reading,) = derive_readings([view], "requests", POLICY, "epp", facts).readings
    assert reading.load == pytest.approx(132 + 5)
    assert reading.max_batch_requests == 24 + 5


def test_load_stands_for_running_requests_that_are_not_shown() -> None:
    view = read_view(format_line(60), format_line(20, "-10"), without="llm_d_epp_request_running")
    reading = get_requests_reading(view)
    assert reading.load == pytest.approx(92)
    assert reading.max_batch_requests == 24
    assert (reading.opened_at, reading.closed_at) == (1.0, 1.0)


def test_averages_count_if_the_load_cannot_be_used() -> None:
    view = read_view(format_line("NaN"), without="llm_d_epp_request_running")
    reading = get_requests_reading(view)
    assert reading.load == pytest.approx(127 + 12)
    assert reading.max_batch_requests is None


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([format_line(60), format_line(20, "-10")], "it counts 80 requests, and 120 are running"),
        ([format_line(200), format_line(40, "-10")], "it counts 240 requests, and 120 are running"),
        ([format_line("NaN")], "a value that is not a finite number"),
        ([f'{NAME}{{endpoint_name="a"}} 120'], "it shows no priorities; newer routers do"),
    ],
)
def test_running_requests_are_used_if_the_load_is_not_plausible(lines: list[str], problem: str) -> None:
    """The recorded page shows only running requests with priority 0."""
    view = read_view(*lines)
    assert count_batch_requests([view]) == (4, problem)
    assert get_requests_reading(view).load == pytest.approx(132)


def test_load_is_not_used_with_prefill_and_decode() -> None:
    view = read_view(format_line(120), page="router-newest-prefill-decode")
    assert count_batch_requests([view])[1] == "a request counts once for each stage (prefill, decode)"
    alone = replace(view, in_flight=None, batch_in_flight=None)
    assert (alone.sent, count_batch_requests([alone])[0]) == (None, None)


def test_loads_of_several_pickers_are_added() -> None:
    views = [read_view(format_line(118), format_line(2, "-10")), read_view(format_line(120, "-10"))]
    assert count_batch_requests(views) == (2 + 120 + 8, "")


def test_pickers_that_each_show_the_load_of_all_are_not_used() -> None:
    view = read_view(format_line(120), format_line(120, "-10"))
    assert count_batch_requests([view, view]) == (8, "it counts 240 requests, and 120 are running")


def test_picker_without_requests_adds_nothing() -> None:
    views = [read_view(format_line(100), format_line(20, "-10")), PoolView(1.0, 1.0, ready=4, batch_queued=0)]
    assert count_batch_requests(views) == (24, "")


def test_priorities_that_are_missing_on_one_page_show_nothing() -> None:
    view = read_view()
    assert count_batch_requests([view]) == (4, "")
    assert count_batch_requests([view, replace(view, batch_in_flight=None)]) == (None, "")
    assert count_batch_requests([replace(view, batch_queued=None)]) == (None, "")
    assert count_batch_requests([PoolView(1.0, 1.0, ready=4, batch_queued=0)]) == (None, "")


def test_reading_that_may_count_items_shows_no_batch_requests() -> None:
    """A pressure score and averages say nothing about calls."""
    view = read_view(format_line(100), format_line(20, "-10"))
    (saturation,) = derive_readings([view], "saturation", Policy(max_sys=400), "epp").readings
    assert saturation.max_batch_requests is None
