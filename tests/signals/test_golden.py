"""Pages of real endpoint pickers, each with the reading that follows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView, build_view
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.readings import PickerFacts, PollReadings, derive_readings
from tests.signals.fakes import PAGES, golden
from tests.signals.goldens import GOLDEN, IN_FLIGHT, NEWEST, POLICY

OPENED_AT, CLOSED_AT = 100.0, 100.25
SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS


def seen(*pages: str, pool: str = "qwen") -> tuple[PoolView, ...]:
    views = []
    for name in pages:
        page = PageParser(SERIES_NAMES)
        page.feed(golden(name).encode())
        made = build_view(page.close(), pool, OPENED_AT, CLOSED_AT)
        assert isinstance(made, PoolView), made
        views.append(made)
    return tuple(views)


def read(*pages: str, use: str = "auto", policy: Policy = POLICY) -> PollReadings:
    return derive_readings(seen(*pages), use, policy, "epp")


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
    assert saturation.raw_values["llm_d_epp_flow_control_pool_saturation#1"] == 0.55


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
    page = PageParser(SERIES_NAMES)
    page.feed("\n".join([*lines, ""]).encode())
    made = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, PoolView)
    (reading,) = derive_readings([made], "auto", POLICY, "epp").readings
    assert reading.f_sys * 400 == pytest.approx(counted)


@pytest.mark.parametrize(
    ("use", "signals"),
    [("saturation", {SATURATION}), ("requests", {REQUESTS}), ("both", {SATURATION, REQUESTS})],
)
def test_use_says_what_is_read(use: str, signals: set[Signal]) -> None:
    verdict = read("router-newest-concurrency-detector", use=use)
    assert {reading.signal for reading in verdict.readings} == set(verdict.signals) == signals


def filled(requests: int, **changed: Any) -> PoolView:
    """A page of the concurrency detector (maxConcurrency 100, four endpoints) with so many in flight."""
    (made,) = seen("router-newest-concurrency-detector")
    return replace(made, saturation=requests / 400, in_flight=float(requests), **changed)


def taught(*requests: int) -> PickerFacts:
    lessons = PickerFacts()
    for number, each in enumerate(requests):
        lessons.learn_from_views([filled(each, closed_at=CLOSED_AT + 2 * number)])
    return lessons


KNOWN = (100, 110, 120, 127, 135, 140, 127)


def test_only_a_true_count_is_exact() -> None:
    """A pressure score does not show our requests one by one: nothing is proved by their absence."""
    exact = {
        reading.signal: reading.is_request_count for reading in read("router-newest-flow-control-on").readings
    }
    assert exact == {SATURATION: False, REQUESTS: True}
    verdict = derive_readings([filled(140)], "auto", POLICY, "epp", taught(*KNOWN, 140))
    (counted,) = verdict.readings
    assert (counted.signal, counted.is_request_count, counted.f_sys) == (SATURATION, True, 140 / 400)
    assert verdict.detector == "counts requests, maxConcurrency 100"


def test_it_is_known_how_far_a_reading_counts_beyond_calls() -> None:
    """The picker counts calls. Requests that the model servers count beyond them may be items of calls."""
    (counted,) = derive_readings([filled(140)], "auto", POLICY, "epp", taught(*KNOWN, 140)).readings
    assert counted.items_beyond_calls == 0.0
    lessons = PickerFacts()
    lessons.outside.request_count = 12.0
    (made,) = seen("router-newest-flow-control-off")
    (sent,) = derive_readings([made], "requests", POLICY, "epp", lessons).readings
    assert sent.items_beyond_calls == 12.0
    of_servers = replace(made, in_flight=None, has_current_averages=True)
    (averaged,) = derive_readings([of_servers], "requests", POLICY, "vllm", lessons).readings
    assert averaged.items_beyond_calls == math.inf


def test_the_name_of_a_detector_is_not_its_kind() -> None:
    verdict = read("router-newest-misnamed-detector")
    assert set(verdict.signals) == {SATURATION, REQUESTS}
    assert verdict.detector == "utilization (high-concurrency-pool)"
    assert not any(reading.is_request_count for reading in verdict.readings if reading.signal is SATURATION)


@pytest.mark.parametrize(
    ("policy", "max_sys"), [(Policy(), 400), (Policy(per_endpoint=16), 64), (Policy(max_sys=80), 80)]
)
def test_a_count_is_a_share_of_the_capacity_that_is_set(policy: Policy, max_sys: float) -> None:
    """The picker's share is of what it takes for the capacity; the operator may know better."""
    (reading,) = derive_readings([filled(40)], "auto", policy, "epp", taught(*KNOWN, 40)).readings
    assert (reading.max_sys, reading.f_sys) == (max_sys, 40 / max_sys)


def test_counts_of_several_pickers_add_up() -> None:
    """Each counts what it sent itself."""
    lessons = PickerFacts()
    for number, each in enumerate(KNOWN):
        at = CLOSED_AT + 2 * number
        lessons.learn_from_views([filled(each, closed_at=at), filled(each + 3, closed_at=at)])
    (reading,) = derive_readings([filled(40), filled(60)], "auto", POLICY, "epp", lessons).readings
    assert reading.f_sys == pytest.approx(100 / 400)


STANDBY = {
    "nothing but its build": PoolView(OPENED_AT, CLOSED_AT),
    "zeros, and the saturation of an empty pool": PoolView(
        OPENED_AT, CLOSED_AT, saturation=1.0, queued=0, running=0, waiting=0, kv_cache=0, ready=0, in_flight=0
    ),
    "the pool as the leader sees it": replace(filled(0), in_flight=None, queued=None),
}


@pytest.mark.parametrize("standby", STANDBY.values(), ids=STANDBY)
@pytest.mark.parametrize("use", ["auto", "saturation", "requests", "both"])
def test_a_picker_that_waits_to_be_elected_does_not_matter(standby: PoolView, use: str) -> None:
    alone, beside = PickerFacts(), PickerFacts()
    for number, each in enumerate((*KNOWN, 140)):
        at = CLOSED_AT + 2 * number
        alone.learn_from_views([filled(each, closed_at=at)])
        beside.learn_from_views([filled(each, closed_at=at), replace(standby, closed_at=at)])
    assert (beside.count.k, beside.outside.request_count) == (alone.count.k, alone.outside.request_count)
    expected = derive_readings([filled(140)], use, POLICY, "epp", alone)
    found = derive_readings([filled(140), standby], use, POLICY, "epp", beside)
    assert [replace(each, raw_values={}) for each in found.readings] == [
        replace(each, raw_values={}) for each in expected.readings
    ]
    assert (found.unread, found.signals, found.detector) == ((), expected.signals, expected.detector)


def test_pickers_that_all_see_no_endpoint_are_believed() -> None:
    empty = STANDBY["zeros, and the saturation of an empty pool"]
    assert [each.reason for each in derive_readings([empty, empty], "auto", POLICY, "epp").unread] == [
        Reason.NO_ENDPOINTS
    ]


def test_a_picker_that_sees_no_endpoint_and_has_requests_is_no_standby() -> None:
    odd = replace(filled(3), ready=0.0)
    assert [each.reason for each in derive_readings([filled(140), odd], "auto", POLICY, "epp").unread] == [
        Reason.NO_ENDPOINTS
    ]


def test_several_saturations_of_unknown_kind_have_requests_counted_beside_them() -> None:
    """The fullest of several counts is but a part of what runs."""
    both = derive_readings([filled(140), filled(150)], "saturation", POLICY, "epp")
    assert [(each.signal, each.f_sys) for each in both.readings] == [
        (SATURATION, 150 / 400),
        (REQUESTS, pytest.approx(290 / 400)),
    ]
    assert derive_readings([filled(140)], "saturation", POLICY, "epp").signals == (SATURATION,)
    scored = replace(filled(140), utilization_detectors=frozenset({"default"}))
    assert derive_readings([scored, scored], "saturation", POLICY, "epp").signals == (SATURATION,)
    blind = replace(filled(140), in_flight=None, running=None)
    assert derive_readings([blind, blind], "saturation", POLICY, "epp").signals == (SATURATION,)


def test_a_utilization_detector_ends_what_was_learned() -> None:
    lessons = taught(*KNOWN)
    assert lessons.count.k == 100
    lessons.learn_from_views(seen("router-newest-misnamed-detector"))
    assert lessons.count.k is None


def stale(endpoints: str) -> PoolView:
    """Return a page of the utilization detector with four ready endpoints, of which `endpoints` are stale."""
    text = golden("router-newest-flow-control-on")
    before = 'stale_endpoints{detector="utilization-detector"} 0'
    assert before in text
    page = PageParser(SERIES_NAMES)
    page.feed(text.replace(before, f"{before[:-1]}{endpoints}").encode())
    made = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, PoolView)
    return made


@pytest.mark.parametrize(
    ("endpoints", "f_sys"),
    [("0", 0.4), ("1", 0.25 + 0.75 * 0.4), ("4", 1.0), ("5", 1.0), ("+Inf", 1.0)],
)
def test_stale_endpoints_are_no_room(endpoints: str, f_sys: float) -> None:
    """A picker may leave stale endpoints out of its saturation, which is then 0 when all are stale."""
    verdict = derive_readings([stale(endpoints)], "saturation", POLICY, "epp")
    (reading,) = verdict.readings
    assert reading.f_sys == pytest.approx(f_sys)
    assert ("count as full" in verdict.detector) is (endpoints != "0")


@pytest.mark.parametrize("endpoints", ["NaN", "-1"])
def test_a_number_of_stale_endpoints_that_cannot_be_reaches_the_limiter(endpoints: str) -> None:
    (reading,) = derive_readings([stale(endpoints)], "saturation", POLICY, "epp").readings
    assert math.isnan(reading.f_sys)


def test_a_saturation_above_1_is_not_lowered_by_stale_endpoints() -> None:
    full = replace(stale("2"), saturation=3.0)
    (reading,) = derive_readings([full], "saturation", POLICY, "epp").readings
    assert reading.f_sys == 3.0


@pytest.mark.parametrize(
    ("policy", "f_sys"),
    [(Policy(max_sys=500), 0.2 + 0.8 * 0.4), (POLICY, 0.4)],
    ids=["the capacity is of all five", "the capacity is of the four"],
)
def test_endpoints_that_kubernetes_alone_sees_are_no_room(policy: Policy, f_sys: float) -> None:
    (page,) = seen("router-newest-flow-control-on")
    (reading,) = derive_readings([page], "saturation", policy, "epp", endpoints=5).readings
    assert reading.f_sys == pytest.approx(f_sys)


@pytest.mark.parametrize(("endpoints", "k"), [(None, 200), (2, 200), (4, None)])
def test_pages_without_all_endpoints_prove_no_capacity(endpoints: int | None, k: int | None) -> None:
    """The detector divides by four endpoints, but the page shows two of them for a long time."""
    lessons = PickerFacts()
    for number, each in enumerate((*KNOWN, 140)):
        lessons.learn_from_views([filled(each, ready=2.0, closed_at=CLOSED_AT + 2 * number)], endpoints)
    assert lessons.count.k == k


def composite(requests: int, other: float, *, kind: str = "utilization", tokens: float = 0.0) -> PoolView:
    """Return a page with the maximum of the concurrency detector (maxConcurrency 100) and another one."""
    saturations = {"requests": requests / 400, kind: other}
    if tokens:
        saturations["tokens"] = tokens
    lines = [
        f'llm_d_epp_flow_control_detector_saturation{{detector="{name}",stage="{stage}"}} {value}'
        for name, value in saturations.items()
        for stage, value in (("prefill", 0), ("decode", value))
    ]
    if kind == "utilization":
        lines.append(f'llm_d_epp_flow_control_stale_endpoints{{detector="{kind}"}} 0')
    page = PageParser(SERIES_NAMES)
    page.feed("\n".join([golden("router-newest-concurrency-detector").strip(), *lines, ""]).encode())
    made = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, PoolView)
    return replace(made, saturation=max(saturations.values()), in_flight=float(requests))


def taught_by(pages: list[PoolView]) -> PickerFacts:
    lessons = PickerFacts()
    for number, each in enumerate(pages):
        lessons.learn_from_views([replace(each, closed_at=CLOSED_AT + 2 * number)])
    return lessons


@pytest.mark.parametrize("other", [0.01, 0.9], ids=["requests dominate", "the other dominates"])
def test_of_several_detectors_the_one_that_counts_is_read_by_itself(other: float) -> None:
    pages = [composite(each, other) for each in (*KNOWN, 140)]
    lessons = taught_by(pages)
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", lessons)
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (100, "picker")
    assert verdict.detector == "the maximum of requests, utilization"
    exact = {reading.signal: (reading.f_sys, reading.is_request_count) for reading in verdict.readings}
    # The maximum may stop being a count at any moment, so requests are counted beside it.
    assert exact == {SATURATION: (max(140 / 400, other), False), REQUESTS: (140 / 400, True)}


@pytest.mark.parametrize("tokens", [0.01, 0.9])
def test_of_several_detectors_nothing_is_proven_where_it_is_not_known_which_counts(tokens: float) -> None:
    """The pages of the concurrency detector would prove its k while it is the larger one."""
    pages = [composite(each, 0.02, tokens=tokens) for each in (*KNOWN, 140)]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", taught_by(pages))
    assert (verdict.per_endpoint_source, verdict.signals) == ("search", (SATURATION, REQUESTS))
    pages = [composite(each, tokens, kind="tokens") for each in (*KNOWN, 140)]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", taught_by(pages))
    assert (verdict.per_endpoint_source, verdict.signals) == ("search", (SATURATION, REQUESTS))


def test_maxima_of_several_pickers_have_requests_counted_beside_them() -> None:
    """Each maximum covers only the requests that its own picker sent."""
    lessons = taught_by([composite(each, 0.02, kind="tokens") for each in KNOWN])
    pages = [composite(each, 0.02, kind="tokens") for each in (140, 150)]
    verdict = derive_readings(pages, "saturation", POLICY, "epp", lessons)
    assert verdict.signals == (SATURATION, REQUESTS)


def at_address(
    requests: int, number: int, *, address: str = "a:9090", started_at: float | None = 1e9
) -> PoolView:
    return filled(requests, closed_at=CLOSED_AT + 2 * number, address=address, started_at=started_at)


@pytest.mark.parametrize(
    ("changed", "k"),
    [
        ({}, 100),
        ({"started_at": 1e9 + 1}, 100),  # the clock was set
        ({"started_at": None}, 100),
        ({"started_at": 1e9 + 60}, None),
        ({"address": "b:9090"}, None),
    ],
)
def test_what_a_picker_taught_is_forgotten_with_it(changed: dict[str, Any], k: int | None) -> None:
    """The next picker may be configured differently, which its pages show only after a while."""
    lessons = PickerFacts()
    for number, each in enumerate(KNOWN):
        lessons.learn_from_views([at_address(each, number)])
    assert lessons.count.k == 100
    after_reload = PickerFacts(lessons.count, lessons)
    after_reload.learn_from_views([at_address(0, 20, **changed)])
    assert (lessons.count.k, lessons.count.last_k) == (k, k)


def test_a_picker_that_is_back_after_a_scrape_that_failed_is_the_same() -> None:
    lessons = PickerFacts()
    for number, each in enumerate(KNOWN):
        lessons.learn_from_views([at_address(each, number), at_address(each + 3, number, address="b:9090")])
    lessons.learn_from_views([at_address(50, 10)])
    lessons.learn_from_views([at_address(60, 11), at_address(63, 11, address="b:9090")])
    assert lessons.count.k == 100


@pytest.mark.parametrize("page", ["router-newest-flow-control-off", "router-newest-flow-control-on"])
@pytest.mark.parametrize(("policy", "max_sys"), [(Policy(), 32), (Policy(initial_per_endpoint=3), 12)])
def test_a_capacity_that_nobody_names_is_searched_for(page: str, policy: Policy, max_sys: float) -> None:
    verdict = read(page, policy=policy)
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (policy.initial_per_endpoint, "search")
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(max_sys, False)}


def test_before_any_request_was_seen_the_capacity_is_not_known() -> None:
    """The first page with a request may show what an endpoint runs at once."""
    idle = filled(0, running=0.0, waiting=0.0)
    verdict = derive_readings([idle], "auto", Policy(), "epp")
    assert verdict.per_endpoint_source == "search"
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(32, False)}


@pytest.mark.parametrize(
    ("policy", "learned", "said_by"),
    [
        (Policy(per_endpoint=100), (), "setting"),
        (Policy(max_sys=400), (), None),
        (Policy(), (140,), "suggestion"),
        (Policy(), KNOWN, "picker"),
    ],
)
def test_a_capacity_that_somebody_names_is_known(
    policy: Policy, learned: tuple[int, ...], said_by: str | None
) -> None:
    verdict = derive_readings([filled(140)], "both", policy, "epp", taught(*learned, 140))
    assert verdict.per_endpoint_source == said_by
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(400, True)}


def test_a_k_above_the_picker_s_default_is_not_taken_for_the_capacity() -> None:
    """The saturation is proven to be a count all the same, so that it is exact."""
    pages = [
        replace(filled(each, closed_at=CLOSED_AT + 2 * number), saturation=each / 1024)
        for number, each in enumerate((*KNOWN, 140))
    ]
    lessons = PickerFacts()
    for each in pages:
        lessons.learn_from_views([each])
    assert lessons.count.k == 256
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", lessons)
    (reading,) = verdict.readings
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (8, "search")
    assert (reading.max_sys, reading.is_capacity_known) == (32, False)
    assert reading.is_request_count
    assert reading.f_sys * reading.max_sys == pytest.approx(140)


def test_saturation_alone_is_not_enough_while_the_capacity_is_not_known() -> None:
    """A share of an unknown capacity bounds nothing, so requests are counted as well where possible."""
    page = replace(filled(140), utilization_detectors=frozenset({"default"}))
    unknown = derive_readings([page], "saturation", Policy(), "epp")
    assert unknown.signals == (SATURATION, REQUESTS)
    assert [reading.signal for reading in unknown.readings] == [SATURATION, REQUESTS]
    assert derive_readings([page], "saturation", POLICY, "epp").signals == (SATURATION,)
    blind = replace(page, in_flight=None, running=None)
    uncounted = derive_readings([blind], "saturation", Policy(), "epp")
    assert (uncounted.signals, uncounted.unread) == ((SATURATION,), ())
    own = replace(page, has_own_saturation=True)
    assert derive_readings([own], "saturation", Policy(), "prometheus").signals == (SATURATION,)


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


def drop(page: str, *prefixes: str) -> PoolView:
    """The view of a golden page without some of its lines."""
    lines = [line for line in golden(page).splitlines(keepends=True) if not line.startswith(prefixes)]
    parsed = PageParser(SERIES_NAMES)
    parsed.feed("".join(lines).encode())
    made = build_view(parsed.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, PoolView)
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
    verdict = derive_readings([made], "requests", POLICY, "epp")
    (unread,) = verdict.unread
    assert verdict.readings == ()
    assert unread.reason is Reason.UNREADABLE
    assert named in unread.why
    assert unread.hint


def test_a_picker_that_has_just_started_is_not_taken_for_an_old_one() -> None:
    """Before its first flush it shows no averages, and counts in flight only what it sent since its start."""
    made = drop("router-newest-flow-control-off", "llm_d_epp_average")
    verdict = derive_readings([made], "auto", Policy(max_sys=400), "epp")
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
            for reading in derive_readings(views, use, POLICY, "epp").readings:
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
    page = PageParser(SERIES_NAMES)
    page.feed("".join(lines).encode())
    made = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, PoolView)
    readings: list[Reading] = list(derive_readings([made], "both", POLICY, "epp").readings)
    terms = [term for each in readings for term in (each.f_sys, each.f_epp, each.max_sys)]
    assert any(not float("-inf") < term < float("inf") for term in terms)


def test_a_page_of_any_program_is_no_pickers() -> None:
    """The page of any program shows the start time of its process."""
    page = PageParser(SERIES_NAMES)
    page.feed(b"process_start_time_seconds 1.7e+09\n")
    made = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(made, ReadFailure)
    assert made.why == "none of the endpoint picker's series is there"


def test_another_pools_page_is_refused() -> None:
    page = PageParser(SERIES_NAMES)
    page.feed(golden("router-newest-flow-control-on").encode())
    made = build_view(page.close(), "llama", OPENED_AT, CLOSED_AT)
    assert not isinstance(made, PoolView)
    assert "qwen" in made.why
    assert made.hint == "pool.name"


Counts = tuple[float | None, float, bool, tuple[float, float] | None]


def apart(*views: PoolView) -> Counts:
    """What ran, what waited, whether both were counted together, and both at the picker's last flush."""
    use = "requests" if views[0].running is not None else "saturation"
    (reading,) = derive_readings(views, use, Policy(max_sys=400), "epp").readings
    return reading.running, reading.waiting, reading.has_exact_counts, reading.averages


PAGE = PoolView(OPENED_AT, CLOSED_AT, running=12, waiting=2.5, ready=4, queued=0, in_flight=70)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        # Nobody shows how many of those that were sent wait in the model servers.
        ({}, (None, 0, True, (48, 10))),
        ({"waiting": 0, "queued": 6}, (None, 6, True, (48, 0))),
        ({"running": None, "saturation": 0.5}, (None, 0, True, None)),
        ({"running": None, "saturation": 0.5, "queued": 6}, (None, 6, True, None)),
        # What the picker sent and what does not wait in the servers runs.
        ({"server_queued": 0}, (70, 0, False, (48, 10))),
        ({"server_queued": 9}, (61, 9, False, (48, 10))),
        ({"server_queued": 9, "queued": 6}, (61, 15, False, (48, 10))),
        ({"server_queued": 9, "running": None, "saturation": 0.5}, (61, 9, False, None)),
        # The queues may be of before the requests left them and were answered.
        ({"server_queued": 75}, (0, 75, False, (48, 10))),
        # Without its count of requests in flight the queues alone do not say what runs.
        ({"server_queued": 9, "in_flight": None}, (None, 0, True, (48, 10))),
        # A model server's own page shows both as of now.
        ({"has_current_averages": True, "in_flight": None}, (48, 10, True, None)),
    ],
)
def test_running_requests_are_told_apart_from_waiting_ones(changes: dict[str, Any], counts: Counts) -> None:
    assert apart(replace(PAGE, **changes)) == counts


def test_replicas_of_the_picker_see_one_pool_and_have_queues_of_their_own() -> None:
    """Each counts what it sent and what waits in it; the model servers and their queues are the same ones."""
    assert apart(PAGE, replace(PAGE, running=11)) == (None, 0, True, (48, 10))
    waits = replace(PAGE, waiting=0, queued=3)
    assert apart(waits, waits) == (None, 6, True, (48, 0))
    shown = replace(waits, server_queued=9)
    assert apart(shown, replace(shown, server_queued=11)) == (140 - 11, 11 + 6, False, (48, 0))
    unsent = replace(shown, in_flight=None)
    assert apart(shown, unsent) == (70 - 9, 9 + 6, False, (48, 0)), (
        "the series is made with the first request"
    )
    assert apart(shown, waits) == (None, 6, True, (48, 0)), "one replica does not show the queues"


def test_requests_that_came_past_the_picker_run_as_well() -> None:
    pages = [
        replace(PAGE, running=running, server_queued=9, closed_at=CLOSED_AT + 5 * number)
        for number, running in enumerate((25, 26, 27))  # 4 × 2.5 more wait at each flush
    ]
    lessons = PickerFacts()
    for each in pages:
        lessons.learn_from_views([each])
    assert lessons.outside.request_count == 4 * 26 + 10 - 70
    (reading,) = derive_readings(pages[-1:], "requests", POLICY, "epp", lessons).readings
    assert reading.running == 70 + lessons.outside.request_count - 9


SERVER_QUEUES = {
    "newest": "llm_d_epp_per_endpoint_queue_size{model_server_endpoint",
    "older": "inference_pool_per_pod_queue_size{model_server_pod",
}


def with_server_queues(name: str, *queues: str | float) -> PoolView | ReadFailure:
    """A golden page whose model servers have these queues under one of the names of the series."""
    lines = [
        line for line in golden("router-newest-flow-control-off").splitlines() if "_queue_size{m" not in line
    ]
    lines += [f'{SERVER_QUEUES[name]}="pod-{at}",name="qwen"}} {queue}' for at, queue in enumerate(queues)]
    page = PageParser(SERIES_NAMES)
    page.feed("\n".join([*lines, ""]).encode())
    return build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)


@pytest.mark.parametrize("name", SERVER_QUEUES)
@pytest.mark.parametrize(
    ("queues", "queued"), [((), None), ((0,), 0), ((7, 2.5, 4), 13.5), ((7, -3, 4), 11), ((-3,), 0)]
)
def test_queues_of_the_model_servers_add_up(
    name: str, queues: tuple[float, ...], queued: float | None
) -> None:
    made = with_server_queues(name, *queues)
    assert isinstance(made, PoolView)
    assert made.server_queued == queued
    shown = {series: value for series, value in made.raw.items() if "queue_size" in series}
    assert shown.get(SERVER_QUEUES[name].partition("{")[0]) == queued


def test_of_two_names_of_one_series_the_newer_counts() -> None:
    """The page shows 1.5 for a server under the newer name, and 99 for each of two under the older one."""
    (made,) = seen("router-0.9-flow-control-on")
    assert made.server_queued == 1.5


@pytest.mark.parametrize("queue", ["NaN", "+Inf"])
def test_a_queue_that_is_no_finite_number_is_not_hidden(queue: str) -> None:
    made = with_server_queues("newest", 3, queue)
    assert isinstance(made, PoolView)
    assert made.server_queued is not None
    assert not math.isfinite(made.server_queued)


def test_nothing_is_told_apart_where_the_operator_asks_for_quantities_of_his_own() -> None:
    own = replace(PAGE, has_own_saturation=True, saturation=0.5, capacity=1e6)
    (reading,) = derive_readings([replace(own, server_queued=9)], "saturation", POLICY, "prometheus").readings
    assert (reading.running, reading.averages) == (None, None)
