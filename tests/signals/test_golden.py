"""Pages of real endpoint pickers, each with the reading that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.budget import Policy, Reading, Reason, Signal
from dispatcher.signals.exposition import Page
from dispatcher.signals.series import NAMES, View, view
from dispatcher.signals.verdict import Lessons, Verdict, judge
from tests.signals.fakes import PAGES, golden
from tests.signals.goldens import GOLDEN, IN_FLIGHT, NEWEST, POLICY

OPENED_AT, CLOSED_AT = 100.0, 100.25
SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS


def seen(*pages: str, pool: str = "qwen") -> tuple[View, ...]:
    views = []
    for name in pages:
        page = Page(NAMES)
        page.feed(golden(name).encode())
        made = view(page.close(), pool, OPENED_AT, CLOSED_AT)
        assert isinstance(made, View), made
        views.append(made)
    return tuple(views)


def read(*pages: str, use: str = "auto", policy: Policy = POLICY) -> Verdict:
    return judge(seen(*pages), use, policy, "epp")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_real_page_gives_its_reading(name: str) -> None:
    expected, verdict = GOLDEN[name], read(name)
    wanted = {SATURATION: expected.saturation, REQUESTS: expected.requests}
    assert verdict.signals == tuple(signal for signal, terms in wanted.items() if terms is not None)
    assert verdict.unread == ()
    for reading in verdict.readings:
        terms = wanted[reading.signal]
        assert terms is not None
        assert (reading.f_sys, reading.f_epp) == pytest.approx(terms)
        assert reading.max_sys == 400
        assert (reading.opened_at, reading.closed_at) == (OPENED_AT, CLOSED_AT)


def test_every_golden_page_has_an_expectation() -> None:
    elsewhere = {"replica-a", "replica-b", "router-newest-empty-pool", "router-newest-frozen-averages"}
    assert {path.stem for path in PAGES.glob("*.txt")} == GOLDEN.keys() | elsewhere


@pytest.mark.parametrize("name", ["router-newest-empty-pool", "router-newest-frozen-averages"])
@pytest.mark.parametrize("policy", [POLICY, Policy(max_sys=64)], ids=["counted", "configured"])
def test_without_ready_endpoints_nothing_is_read(name: str, policy: Policy) -> None:
    """The averages freeze and the saturation reads 1, whatever the capacity is said to be."""
    verdict = read(name, policy=policy)
    assert verdict.readings == ()
    assert [unread.reason for unread in verdict.unread] == [Reason.NO_ENDPOINTS]


def test_replicas_are_the_fullest_saturation_the_whole_queue_and_one_pool() -> None:
    """Queues and saturation are each replica's own; the averages are the same pool in both their eyes."""
    saturation, requests = read("replica-a", "replica-b").readings
    assert (saturation.f_sys, saturation.f_epp) == (0.55, 15 / 400)
    assert requests.f_sys == pytest.approx(NEWEST)
    assert requests.f_epp == 15 / 400
    assert saturation.raw["llm_d_epp_flow_control_pool_saturation#1"] == 0.55


def test_requests_in_flight_add_up_over_replicas() -> None:
    """Each replica counts only what it sent itself."""
    (reading,) = read("gie-1.0-flow-control-off", "gie-1.0-flow-control-off").readings
    assert reading.f_sys == 2 * IN_FLIGHT


@pytest.mark.parametrize(
    ("running", "waiting", "in_flight", "counted"),
    [
        ("0", "0", "3", 3),  # three requests on four endpoints, divided as whole numbers are
        ("30", "1", "126", 126),
        ("30.25", "1", "200", 200),  # what has been sent since the last flush is not in the averages yet
        ("30.25", "1", "100", 100),  # how old they are one sample does not say
    ],
)
def test_truncated_averages_do_not_hide_requests(
    running: str, waiting: str, in_flight: str, counted: float
) -> None:
    shown = {"running_requests": running, "average_queue_size": waiting, "request_running": in_flight}
    lines = [
        next((f"{line.rsplit(' ', 1)[0]} {value}" for name, value in shown.items() if name in line), line)
        if line[0] != "#"
        else line
        for line in golden("router-newest-flow-control-off").splitlines()
    ]
    page = Page(NAMES)
    page.feed("\n".join([*lines, ""]).encode())
    made = view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, View)
    (reading,) = judge([made], "auto", POLICY, "epp").readings
    assert reading.f_sys * 400 == pytest.approx(counted)


@pytest.mark.parametrize(
    ("use", "signals"),
    [("saturation", {SATURATION}), ("requests", {REQUESTS}), ("both", {SATURATION, REQUESTS})],
)
def test_use_says_what_is_read(use: str, signals: set[Signal]) -> None:
    verdict = read("router-newest-concurrency-detector", use=use)
    assert {reading.signal for reading in verdict.readings} == set(verdict.signals) == signals


def filled(requests: int, **changed: Any) -> View:
    """A page of the concurrency detector (maxConcurrency 100, four endpoints) with so many in flight."""
    (made,) = seen("router-newest-concurrency-detector")
    return replace(made, saturation=requests / 400, in_flight=float(requests), **changed)


def taught(*requests: int) -> Lessons:
    lessons = Lessons()
    for number, each in enumerate(requests):
        lessons.learn([filled(each, closed_at=CLOSED_AT + 2 * number)])
    return lessons


KNOWN = (100, 110, 120, 127, 135, 140, 127)


def test_only_a_true_count_is_exact() -> None:
    """A pressure score does not show our requests one by one: nothing is proved by their absence."""
    exact = {reading.signal: reading.exact for reading in read("router-newest-flow-control-on").readings}
    assert exact == {SATURATION: False, REQUESTS: True}
    verdict = judge([filled(140)], "auto", POLICY, "epp", taught(*KNOWN, 140))
    (counted,) = verdict.readings
    assert (counted.signal, counted.exact, counted.f_sys) == (SATURATION, True, 140 / 400)
    assert verdict.detector == "counts requests, maxConcurrency 100"


def test_the_name_of_a_detector_is_not_its_kind() -> None:
    verdict = read("router-newest-misnamed-detector")
    assert set(verdict.signals) == {SATURATION, REQUESTS}
    assert verdict.detector == "utilization (high-concurrency-pool)"
    assert not any(reading.exact for reading in verdict.readings if reading.signal is SATURATION)


@pytest.mark.parametrize(
    ("policy", "max_sys"), [(Policy(), 400), (Policy(per_endpoint=16), 64), (Policy(max_sys=80), 80)]
)
def test_a_count_is_a_share_of_the_capacity_that_is_set(policy: Policy, max_sys: float) -> None:
    """The picker's share is of what it takes for the capacity; the operator may know better."""
    (reading,) = judge([filled(40)], "auto", policy, "epp", taught(*KNOWN, 40)).readings
    assert (reading.max_sys, reading.f_sys) == (max_sys, 40 / max_sys)


def test_counts_of_several_pickers_add_up() -> None:
    """Each counts what it sent itself."""
    lessons = Lessons()
    for number, each in enumerate(KNOWN):
        at = CLOSED_AT + 2 * number
        lessons.learn([filled(each, closed_at=at), filled(each + 3, closed_at=at)])
    (reading,) = judge([filled(40), filled(60)], "auto", POLICY, "epp", lessons).readings
    assert reading.f_sys == pytest.approx(100 / 400)


STANDBY = {
    "nothing but its build": View(OPENED_AT, CLOSED_AT),
    "zeros, and the saturation of an empty pool": View(
        OPENED_AT, CLOSED_AT, saturation=1.0, queued=0, running=0, waiting=0, kv_cache=0, ready=0, in_flight=0
    ),
    "the pool as the leader sees it": replace(filled(0), in_flight=None, queued=None),
}


@pytest.mark.parametrize("standby", STANDBY.values(), ids=STANDBY)
@pytest.mark.parametrize("use", ["auto", "saturation", "requests", "both"])
def test_a_picker_that_waits_to_be_elected_does_not_matter(standby: View, use: str) -> None:
    alone, beside = Lessons(), Lessons()
    for number, each in enumerate((*KNOWN, 140)):
        at = CLOSED_AT + 2 * number
        alone.learn([filled(each, closed_at=at)])
        beside.learn([filled(each, closed_at=at), replace(standby, closed_at=at)])
    assert (beside.count.k, beside.outside.requests) == (alone.count.k, alone.outside.requests)
    expected = judge([filled(140)], use, POLICY, "epp", alone)
    found = judge([filled(140), standby], use, POLICY, "epp", beside)
    assert [replace(each, raw={}) for each in found.readings] == [
        replace(each, raw={}) for each in expected.readings
    ]
    assert (found.unread, found.signals, found.detector) == ((), expected.signals, expected.detector)


def test_pickers_that_all_see_no_endpoint_are_believed() -> None:
    empty = STANDBY["zeros, and the saturation of an empty pool"]
    assert [each.reason for each in judge([empty, empty], "auto", POLICY, "epp").unread] == [
        Reason.NO_ENDPOINTS
    ]


def test_a_picker_that_sees_no_endpoint_and_has_requests_is_no_standby() -> None:
    odd = replace(filled(3), ready=0.0)
    assert [each.reason for each in judge([filled(140), odd], "auto", POLICY, "epp").unread] == [
        Reason.NO_ENDPOINTS
    ]


def test_several_saturations_of_unknown_kind_have_requests_counted_beside_them() -> None:
    """The fullest of several counts is but a part of what runs."""
    both = judge([filled(140), filled(150)], "saturation", POLICY, "epp")
    assert [(each.signal, each.f_sys) for each in both.readings] == [
        (SATURATION, 150 / 400),
        (REQUESTS, pytest.approx(290 / 400)),
    ]
    assert judge([filled(140)], "saturation", POLICY, "epp").signals == (SATURATION,)
    scored = replace(filled(140), utilization=frozenset({"default"}))
    assert judge([scored, scored], "saturation", POLICY, "epp").signals == (SATURATION,)
    blind = replace(filled(140), in_flight=None, running=None)
    assert judge([blind, blind], "saturation", POLICY, "epp").signals == (SATURATION,)


def test_a_utilization_detector_ends_what_was_learned() -> None:
    lessons = taught(*KNOWN)
    assert lessons.count.k == 100
    lessons.learn(seen("router-newest-misnamed-detector"))
    assert lessons.count.k is None


@pytest.mark.parametrize("page", ["router-newest-flow-control-off", "router-newest-flow-control-on"])
def test_where_no_count_can_be_learned_the_pickers_default_is_assumed(page: str) -> None:
    assert {reading.max_sys for reading in read(page, policy=Policy()).readings} == {400}


def test_before_any_request_was_seen_little_is_assumed() -> None:
    """The first page that shows one may show what an endpoint takes: until then a burst would be a guess."""
    idle = filled(0, running=0.0, waiting=0.0)
    assert {reading.max_sys for reading in judge([idle], "auto", Policy(), "epp").readings} == {32}


@pytest.mark.parametrize("use", ["saturation", "both"])
def test_saturation_without_flow_control_is_unreadable_and_says_so(use: str) -> None:
    verdict = read("router-newest-flow-control-off", use=use)
    (unread,) = verdict.unread
    assert (unread.reason, unread.signal) == (Reason.UNREADABLE, SATURATION)
    assert "flow control is off" in unread.hint


def test_the_configured_capacity_stands_for_the_counted_one() -> None:
    (saturation, requests) = read("router-newest-flow-control-on", policy=Policy(max_sys=254)).readings
    assert (saturation.max_sys, saturation.f_sys) == (254, 0.4)
    assert (requests.max_sys, requests.f_sys) == (254, 120 / 254)


def drop(page: str, *prefixes: str) -> View:
    """The view of a golden page without some of its lines."""
    lines = [line for line in golden(page).splitlines(keepends=True) if not line.startswith(prefixes)]
    parsed = Page(NAMES)
    parsed.feed("".join(lines).encode())
    made = view(parsed.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, View)
    return made


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (("llm_d_epp_average_running_requests",), "llm_d_epp_average_running_requests"),
        (("llm_d_epp_average_queue_size", "llm_d_epp_request_running"), "llm_d_epp_average_queue_size"),
        (("llm_d_epp_ready_endpoints",), "llm_d_epp_ready_endpoints"),
    ],
)
def test_a_missing_series_is_named(missing: tuple[str, ...], named: str) -> None:
    made = drop("router-newest-flow-control-on", *missing, "llm_d_epp_request_running")
    verdict = judge([made], "requests", POLICY, "epp")
    (unread,) = verdict.unread
    assert verdict.readings == ()
    assert unread.reason is Reason.UNREADABLE
    assert named in unread.why
    assert unread.hint


def test_a_picker_that_has_just_started_is_not_taken_for_an_old_one() -> None:
    """Before its first flush it shows no averages, and counts in flight only what it sent since its start."""
    made = drop("router-newest-flow-control-off", "llm_d_epp_average")
    verdict = judge([made], "auto", Policy(max_sys=400), "epp")
    assert verdict.readings == ()
    assert verdict.unread[0].reason is Reason.UNREADABLE


def test_a_replica_without_the_others_series_is_not_overlooked() -> None:
    """One replica still without flow control hides how full it is."""
    verdict = read("replica-a", "router-newest-flow-control-off", use="saturation")
    assert verdict.readings == ()
    assert verdict.unread[0].signal is SATURATION


def test_sums_beyond_all_numbers_raise_nothing() -> None:
    """Two replicas that each show nearly the largest number, or infinities of both signs."""
    for queued, running in ((1.2e308, 1.2e308), (float("inf"), float("inf"))):
        views = [filled(100, queued=queued, running=sign * running) for sign in (1, -1)]
        for use in ("auto", "requests", "saturation"):
            for reading in judge(views, use, POLICY, "epp").readings:
                assert not float("-inf") < reading.f_epp < float("inf")


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
@pytest.mark.parametrize(
    "series",
    [
        "llm_d_epp_flow_control_pool_saturation",
        "llm_d_epp_flow_control_queue_size",
        "llm_d_epp_average_running_requests",
        "llm_d_epp_ready_endpoints",
    ],
)
def test_what_is_not_a_finite_number_reaches_the_limiter_as_such(series: str, value: str) -> None:
    """It refuses it as implausible; a sum or a maximum must not swallow it."""
    lines = [
        f"{line.rsplit(' ', 1)[0]} {value}\n" if line.startswith(series) else f"{line}\n"
        for line in golden("router-newest-flow-control-on").splitlines()
    ]
    page = Page(NAMES)
    page.feed("".join(lines).encode())
    made = view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, View)
    readings: list[Reading] = list(judge([made], "both", POLICY, "epp").readings)
    terms = [term for each in readings for term in (each.f_sys, each.f_epp, each.max_sys)]
    assert any(not float("-inf") < term < float("inf") for term in terms)


def test_another_pools_page_is_refused() -> None:
    page = Page(NAMES)
    page.feed(golden("router-newest-flow-control-on").encode())
    made = view(page.close(), "llama", OPENED_AT, CLOSED_AT)
    assert not isinstance(made, View)
    assert "qwen" in made.why
    assert made.hint == "pool.name"


def apart(*views: View) -> tuple[float | None, float, bool]:
    """What ran while so many waited, and whether that was at the last flush."""
    use = "requests" if views[0].running is not None else "saturation"
    (reading,) = judge(views, use, Policy(max_sys=400), "epp").readings
    return reading.running, reading.waiting, reading.flushed


PAGE = View(OPENED_AT, CLOSED_AT, running=12, waiting=2.5, ready=4, queued=0, in_flight=70)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, (48, 10, True)),
        ({"waiting": 0}, (48, 0, True)),
        # What waits in the picker now waits beside what it sent by now, not beside an average of before.
        ({"waiting": 0, "queued": 6}, (70, 6, False)),
        ({"queued": 6}, (48, 10, True)),
        ({"running": 30, "queued": 6}, (70, 6, False)),
        ({"running": None, "saturation": 0.5}, (None, 0, False)),
        ({"running": None, "saturation": 0.5, "queued": 6}, (70, 6, False)),
    ],
)
def test_what_runs_and_what_waits_are_of_one_moment(
    changes: dict[str, float | None], told: tuple[float | None, float, bool]
) -> None:
    assert apart(replace(PAGE, **changes)) == told  # type: ignore[arg-type]


def test_replicas_of_the_picker_see_one_pool_and_have_queues_of_their_own() -> None:
    assert apart(PAGE, replace(PAGE, running=11)) == (48, 10, True)
    waits = replace(PAGE, waiting=0, queued=3)
    assert apart(waits, waits) == (140, 6, False)


def test_nothing_is_told_apart_where_the_operator_asks_for_quantities_of_his_own() -> None:
    own = replace(PAGE, own=True, saturation=0.5, capacity=1e6)
    (reading,) = judge([own], "saturation", POLICY, "prometheus").readings
    assert reading.running is None
