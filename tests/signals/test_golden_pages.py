"""Readings of the recorded pages of real endpoint pickers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.limit.budget import KvUse, Policy, Reading, Reason, Signal
from dispatcher.limit.picker_inference import FLUSH_LATE_FACTOR, FLUSH_S
from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.series import SERIES_NAMES, Family, PoolView, build_view
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.readings import PickerFacts, PollReadings, derive_readings
from tests.signals.expected_readings import (
    EXPECTED_READINGS,
    F_SYS_NEWEST_RELEASE,
    F_SYS_OLDER_RELEASES,
    POLICY,
)
from tests.signals.fakes import PAGES, read_page

OPENED_AT, CLOSED_AT = 100.0, 100.25
SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS


def read_views(*pages: str, pool: str = "qwen") -> tuple[PoolView, ...]:
    views = []
    for name in pages:
        page = PageParser(SERIES_NAMES)
        page.feed(read_page(name).encode())
        view = build_view(page.close(), pool, OPENED_AT, CLOSED_AT)
        assert isinstance(view, PoolView), view
        views.append(view)
    return tuple(views)


def derive_from_pages(*pages: str, use: str = "auto", policy: Policy = POLICY) -> PollReadings:
    return derive_readings(read_views(*pages), use, policy, "epp")


@pytest.mark.parametrize("name", EXPECTED_READINGS)
def test_recorded_page_gives_its_expected_reading(name: str) -> None:
    expected, verdict = EXPECTED_READINGS[name], derive_from_pages(name)
    expected_terms = {SATURATION: expected.saturation, REQUESTS: expected.requests}
    assert verdict.signals == tuple(signal for signal, terms in expected_terms.items() if terms is not None)
    assert verdict.unread == ()
    for reading in verdict.readings:
        terms = expected_terms[reading.signal]
        assert terms is not None
        assert (reading.f_sys, reading.f_epp) == pytest.approx(terms)
        assert reading.max_sys == 400
        assert (reading.opened_at, reading.closed_at) == (OPENED_AT, CLOSED_AT)
        assert reading.kv_use == KvUse(0.42, None, 4, OPENED_AT - FLUSH_S * FLUSH_LATE_FACTOR, CLOSED_AT)


def test_every_recorded_page_is_used() -> None:
    used_elsewhere = {
        "replica-a",
        "replica-b",
        "router-newest-empty-pool",
        "router-newest-frozen-averages",
    }
    assert {path.stem for path in PAGES.glob("*.txt")} == EXPECTED_READINGS.keys() | used_elsewhere


@pytest.mark.parametrize("name", ["router-newest-empty-pool", "router-newest-frozen-averages"])
@pytest.mark.parametrize("policy", [POLICY, Policy(max_sys=64)], ids=["counted", "configured"])
def test_pool_without_ready_endpoints_has_no_readings(name: str, policy: Policy) -> None:
    """The averages do not change and the saturation is 1 in such a pool, whatever its configured capacity
    is."""
    verdict = derive_from_pages(name, policy=policy)
    assert verdict.readings == ()
    assert [unread.reason for unread in verdict.unread] == [Reason.NO_ENDPOINTS]


def test_replicas_give_the_highest_saturation_and_the_sum_of_their_queues() -> None:
    """Queues and saturation belong to each replica; the averages of both describe the same pool."""
    saturation, requests = derive_from_pages("replica-a", "replica-b").readings
    assert (saturation.f_sys, saturation.f_epp) == (0.55, 15 / 400)
    assert requests.f_sys == pytest.approx(F_SYS_NEWEST_RELEASE)
    assert requests.f_epp == 15 / 400
    assert saturation.raw_values["llm_d_epp_flow_control_pool_saturation#1"] == 0.55


def test_requests_in_flight_are_summed_over_replicas() -> None:
    """Each replica counts only the requests that it sent."""
    (reading,) = derive_from_pages("gie-1.0-flow-control-off", "gie-1.0-flow-control-off").readings
    assert reading.f_sys == 2 * F_SYS_OLDER_RELEASES


@pytest.mark.parametrize(
    ("running", "waiting", "in_flight", "expected_count"),
    [
        ("0", "0", "3", 3),  # three requests on four endpoints, divided as integers
        ("30", "1", "126", 126),
        ("30.25", "1", "200", 200),  # the averages do not contain requests sent since the last flush
        ("30.25", "1", "100", 100),  # one sample does not show how old the averages are
    ],
)
def test_truncated_averages_do_not_hide_requests(
    running: str, waiting: str, in_flight: str, expected_count: float
) -> None:
    shown = {"running_requests": running, "average_queue_size": waiting, "request_running": in_flight}
    lines = [
        next((f"{line.rsplit(' ', 1)[0]} {value}" for name, value in shown.items() if name in line), line)
        if line[0] != "#"
        else line
        for line in read_page("router-newest-flow-control-off").splitlines()
    ]
    page = PageParser(SERIES_NAMES)
    page.feed("\n".join([*lines, ""]).encode())
    view = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, PoolView)
    (reading,) = derive_readings([view], "auto", POLICY, "epp").readings
    assert reading.f_sys * 400 == pytest.approx(expected_count)


@pytest.mark.parametrize(
    ("use", "signals"),
    [("saturation", {SATURATION}), ("requests", {REQUESTS}), ("both", {SATURATION, REQUESTS})],
)
def test_setting_use_selects_the_signals(use: str, signals: set[Signal]) -> None:
    verdict = derive_from_pages("router-newest-concurrency-detector", use=use)
    assert {reading.signal for reading in verdict.readings} == set(verdict.signals) == signals


def page_with_requests(requests: int, **changes: Any) -> PoolView:
    """Return a page of the concurrency detector (maxConcurrency 100, four endpoints) with this many requests
    in flight."""
    (view,) = read_views("router-newest-concurrency-detector")
    return replace(view, saturation=requests / 400, in_flight=float(requests), **changes)


def learn_from_requests(*requests: int) -> PickerFacts:
    facts = PickerFacts()
    for number, each in enumerate(requests):
        facts.learn_from_views([page_with_requests(each, closed_at=CLOSED_AT + 2 * number)])
    return facts


PROVING_REQUESTS = (100, 110, 120, 127, 135, 140, 127)


def test_only_a_proven_request_count_is_marked_as_one() -> None:
    """A utilization score does not show single requests, so their absence proves nothing."""
    is_count = {
        reading.signal: reading.is_request_count
        for reading in derive_from_pages("router-newest-flow-control-on").readings
    }
    assert is_count == {SATURATION: False, REQUESTS: True}
    verdict = derive_readings(
        [page_with_requests(140)], "auto", POLICY, "epp", learn_from_requests(*PROVING_REQUESTS, 140)
    )
    (expected_count,) = verdict.readings
    assert (expected_count.signal, expected_count.is_request_count, expected_count.f_sys) == (
        SATURATION,
        True,
        140 / 400,
    )
    assert verdict.detector == "counts requests, maxConcurrency 100"


def test_reading_says_how_many_items_it_may_count_beyond_calls() -> None:
    """The picker counts calls. Requests that the model servers count beyond these may be items of merged
    calls."""
    (expected_count,) = derive_readings(
        [page_with_requests(140)], "auto", POLICY, "epp", learn_from_requests(*PROVING_REQUESTS, 140)
    ).readings
    assert expected_count.items_beyond_calls == 0.0
    facts = PickerFacts()
    facts.outside.request_count = 12.0
    (view,) = read_views("router-newest-flow-control-off")
    (sent,) = derive_readings([view], "requests", POLICY, "epp", facts).readings
    assert sent.items_beyond_calls == 12.0
    of_servers = replace(view, in_flight=None, has_current_averages=True)
    (averaged,) = derive_readings([of_servers], "requests", POLICY, "vllm", facts).readings
    assert averaged.items_beyond_calls == math.inf


def test_name_of_a_detector_does_not_decide_its_kind() -> None:
    verdict = derive_from_pages("router-newest-misnamed-detector")
    assert set(verdict.signals) == {SATURATION, REQUESTS}
    assert verdict.detector == "utilization (high-concurrency-pool)"
    assert not any(reading.is_request_count for reading in verdict.readings if reading.signal is SATURATION)


@pytest.mark.parametrize(
    ("policy", "max_sys"), [(Policy(), 400), (Policy(per_endpoint=16), 64), (Policy(max_sys=80), 80)]
)
def test_request_count_is_relative_to_the_configured_capacity(policy: Policy, max_sys: float) -> None:
    """The picker divides by the capacity that it assumes; the operator may configure another one."""
    (reading,) = derive_readings(
        [page_with_requests(40)], "auto", policy, "epp", learn_from_requests(*PROVING_REQUESTS, 40)
    ).readings
    assert (reading.max_sys, reading.f_sys) == (max_sys, 40 / max_sys)


def test_request_counts_of_several_pickers_are_summed() -> None:
    """Each picker counts the requests that it sent."""
    facts = PickerFacts()
    for number, each in enumerate(PROVING_REQUESTS):
        at = CLOSED_AT + 2 * number
        facts.learn_from_views(
            [page_with_requests(each, closed_at=at), page_with_requests(each + 3, closed_at=at)]
        )
    (reading,) = derive_readings(
        [page_with_requests(40), page_with_requests(60)], "auto", POLICY, "epp", facts
    ).readings
    assert reading.f_sys == pytest.approx(100 / 400)


STANDBY = {
    "only build information": PoolView(OPENED_AT, CLOSED_AT),
    "zeros, and the saturation of an empty pool": PoolView(
        OPENED_AT, CLOSED_AT, saturation=1.0, queued=0, running=0, waiting=0, kv_cache=0, ready=0, in_flight=0
    ),
    "the averages of the pool": replace(page_with_requests(0), in_flight=None, queued=None),
}


@pytest.mark.parametrize("standby", STANDBY.values(), ids=STANDBY)
@pytest.mark.parametrize("use", ["auto", "saturation", "requests", "both"])
def test_standby_picker_does_not_change_the_readings(standby: PoolView, use: str) -> None:
    without_standby, with_standby = PickerFacts(), PickerFacts()
    for number, each in enumerate((*PROVING_REQUESTS, 140)):
        at = CLOSED_AT + 2 * number
        without_standby.learn_from_views([page_with_requests(each, closed_at=at)])
        with_standby.learn_from_views(
            [page_with_requests(each, closed_at=at), replace(standby, closed_at=at)]
        )
    assert (with_standby.count.k, with_standby.outside.request_count) == (
        without_standby.count.k,
        without_standby.outside.request_count,
    )
    expected = derive_readings([page_with_requests(140)], use, POLICY, "epp", without_standby)
    found = derive_readings([page_with_requests(140), standby], use, POLICY, "epp", with_standby)
    # The time of a flush is known only of a single picker.
    assert [replace(each, raw_values={}, kv_use=None) for each in found.readings] == [
        replace(each, raw_values={}, kv_use=None) for each in expected.readings
    ]
    assert (found.unread, found.signals, found.detector) == ((), expected.signals, expected.detector)


def test_no_endpoints_are_reported_if_all_pickers_see_none() -> None:
    empty = STANDBY["zeros, and the saturation of an empty pool"]
    assert [each.reason for each in derive_readings([empty, empty], "auto", POLICY, "epp").unread] == [
        Reason.NO_ENDPOINTS
    ]


def test_picker_with_requests_and_no_endpoint_is_not_a_standby() -> None:
    without_endpoints = replace(page_with_requests(3), ready=0.0)
    assert [
        each.reason
        for each in derive_readings(
            [page_with_requests(140), without_endpoints], "auto", POLICY, "epp"
        ).unread
    ] == [Reason.NO_ENDPOINTS]


def test_requests_are_read_as_well_if_several_pickers_may_count() -> None:
    """The highest of several counts is only a part of the running requests."""
    both = derive_readings([page_with_requests(140), page_with_requests(150)], "saturation", POLICY, "epp")
    assert [(each.signal, each.f_sys) for each in both.readings] == [
        (SATURATION, 150 / 400),
        (REQUESTS, pytest.approx(290 / 400)),
    ]
    assert derive_readings([page_with_requests(140)], "saturation", POLICY, "epp").signals == (SATURATION,)
    utilization_page = replace(page_with_requests(140), utilization_detectors=frozenset({"default"}))
    assert derive_readings([utilization_page, utilization_page], "saturation", POLICY, "epp").signals == (
        SATURATION,
    )
    without_counts = replace(page_with_requests(140), in_flight=None, running=None)
    assert derive_readings([without_counts, without_counts], "saturation", POLICY, "epp").signals == (
        SATURATION,
    )


def test_learned_capacity_is_forgotten_when_a_utilization_detector_appears() -> None:
    facts = learn_from_requests(*PROVING_REQUESTS)
    assert facts.count.k == 100
    facts.learn_from_views(read_views("router-newest-misnamed-detector"))
    assert facts.count.k is None


def page_with_stale_endpoints(endpoints: str) -> PoolView:
    """Return a page of the utilization detector with four ready endpoints, of which `endpoints` are stale."""
    text = read_page("router-newest-flow-control-on")
    before = 'stale_endpoints{detector="utilization-detector"} 0'
    assert before in text
    page = PageParser(SERIES_NAMES)
    page.feed(text.replace(before, f"{before[:-1]}{endpoints}").encode())
    view = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, PoolView)
    return view


@pytest.mark.parametrize(
    ("endpoints", "f_sys"),
    [("0", 0.4), ("1", 0.25 + 0.75 * 0.4), ("4", 1.0), ("5", 1.0), ("+Inf", 1.0)],
)
def test_stale_endpoints_count_as_full(endpoints: str, f_sys: float) -> None:
    """A picker may leave stale endpoints out of its saturation, which is then 0 when all are stale."""
    verdict = derive_readings([page_with_stale_endpoints(endpoints)], "saturation", POLICY, "epp")
    (reading,) = verdict.readings
    assert reading.f_sys == pytest.approx(f_sys)
    assert ("count as full" in verdict.detector) is (endpoints != "0")


@pytest.mark.parametrize("endpoints", ["NaN", "-1"])
def test_invalid_number_of_stale_endpoints_makes_the_saturation_nan(endpoints: str) -> None:
    (reading,) = derive_readings([page_with_stale_endpoints(endpoints)], "saturation", POLICY, "epp").readings
    assert math.isnan(reading.f_sys)


def test_saturation_above_1_is_not_lowered_by_stale_endpoints() -> None:
    full = replace(page_with_stale_endpoints("2"), saturation=3.0)
    (reading,) = derive_readings([full], "saturation", POLICY, "epp").readings
    assert reading.f_sys == 3.0


@pytest.mark.parametrize(
    ("policy", "f_sys"),
    [(Policy(max_sys=500), 0.2 + 0.8 * 0.4), (POLICY, 0.4)],
    ids=["capacity of all five endpoints", "capacity of four endpoints"],
)
def test_endpoints_that_only_kubernetes_knows_count_as_full(policy: Policy, f_sys: float) -> None:
    (page,) = read_views("router-newest-flow-control-on")
    (reading,) = derive_readings([page], "saturation", policy, "epp", endpoints=5).readings
    assert reading.f_sys == pytest.approx(f_sys)


@pytest.mark.parametrize(("endpoints", "k"), [(None, 200), (2, 200), (4, None)])
def test_pages_that_miss_endpoints_do_not_prove_a_capacity(endpoints: int | None, k: int | None) -> None:
    """The detector divides by four endpoints, but the page shows only two of them for a long time."""
    facts = PickerFacts()
    for number, each in enumerate((*PROVING_REQUESTS, 140)):
        facts.learn_from_views(
            [page_with_requests(each, ready=2.0, closed_at=CLOSED_AT + 2 * number)], endpoints
        )
    assert facts.count.k == k


def page_of_detectors(
    requests: int, stages: dict[str, float], detectors: dict[tuple[str, str], float], *utilization: str
) -> PoolView:
    """Return the page of a picker with the saturation of each stage, and of each detector and stage. The
    names of the utilization detectors follow."""
    prefix = "llm_d_epp_flow_control_"
    lines = [
        f'{prefix}detector_saturation{{detector="{name}",stage="{stage}"}} {value}'
        for (name, stage), value in detectors.items()
    ]
    lines += [f'{prefix}stale_endpoints{{detector="{name}"}} 0' for name in utilization]
    lines += [
        f'{prefix}pool_saturation{{inference_pool="qwen",stage="{stage}"}} {value}'
        for stage, value in {**stages, "effective": max(stages.values())}.items()
    ]
    recorded = read_page("router-newest-concurrency-detector").splitlines()
    lines += [line for line in recorded if not line.startswith(f"{prefix}pool_saturation")]
    page = PageParser(SERIES_NAMES)
    page.feed("\n".join([*lines, ""]).encode())
    view = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, PoolView)
    return replace(view, in_flight=float(requests))


def page_of_two_detectors(
    requests: int, other: float, *, kind: str = "utilization", tokens: float = 0.0
) -> PoolView:
    """Return a page with the maximum of the concurrency detector (maxConcurrency 100) and another one."""
    saturations = {"requests": requests / 400, kind: other}
    if tokens:
        saturations["tokens"] = tokens
    return page_of_detectors(
        requests,
        {"decode": max(saturations.values())},
        {(name, "decode"): value for name, value in saturations.items()},
        *((kind,) if kind == "utilization" else ()),
    )


def learn_from_pages(pages: list[PoolView]) -> PickerFacts:
    facts = PickerFacts()
    for number, each in enumerate(pages):
        facts.learn_from_views([replace(each, closed_at=CLOSED_AT + 2 * number)])
    return facts


@pytest.mark.parametrize("other", [0.01, 0.9], ids=["requests are higher", "other detector is higher"])
def test_counting_detector_is_found_among_several(other: float) -> None:
    pages = [page_of_two_detectors(each, other) for each in (*PROVING_REQUESTS, 140)]
    facts = learn_from_pages(pages)
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", facts)
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (100, "picker")
    assert verdict.detector == "the maximum of requests, utilization"
    is_count = {reading.signal: (reading.f_sys, reading.is_request_count) for reading in verdict.readings}
    # The maximum may stop being a request count at any moment, so requests are read as well.
    assert is_count == {SATURATION: (max(140 / 400, other), False), REQUESTS: (140 / 400, True)}


@pytest.mark.parametrize("tokens", [0.01, 0.9])
def test_several_detectors_prove_no_capacity_if_it_is_unknown_which_one_counts(tokens: float) -> None:
    """The pages would prove the k of the concurrency detector while its value is the larger one."""
    pages = [page_of_two_detectors(each, 0.02, tokens=tokens) for each in (*PROVING_REQUESTS, 140)]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", learn_from_pages(pages))
    assert (verdict.per_endpoint_source, verdict.signals) == ("search", (SATURATION, REQUESTS))
    pages = [page_of_two_detectors(each, tokens, kind="tokens") for each in (*PROVING_REQUESTS, 140)]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", learn_from_pages(pages))
    assert (verdict.per_endpoint_source, verdict.signals) == ("search", (SATURATION, REQUESTS))


def page_of_split_pool(requests: int) -> PoolView:
    """Return a page of two endpoints for prefill and two for decode. Only the latter count requests, with a
    maxConcurrency of 100."""
    queue, count = 0.01, requests / 200
    detectors = {("requests", "decode"): count, ("queue", "prefill"): queue}
    return page_of_detectors(requests, {"prefill": queue, "decode": count}, detectors, "queue")


def test_prefill_and_decode_endpoints_prove_no_capacity() -> None:
    """The page shows four ready endpoints, and the saturation that counts requests is that of two."""
    pages = [page_of_split_pool(each) for each in (*PROVING_REQUESTS, 140)]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", learn_from_pages(pages))
    assert (verdict.per_endpoint_source, verdict.signals) == ("search", (SATURATION, REQUESTS))
    assert verdict.detector == "the maximum of queue, requests, the larger of decode and prefill"


def test_one_detector_of_prefill_and_decode_endpoints_proves_no_capacity() -> None:
    pages = [
        page_of_detectors(each, {"prefill": 0.0, "decode": each / 200}, {})
        for each in (*PROVING_REQUESTS, 140)
    ]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", learn_from_pages(pages))
    assert (verdict.per_endpoint_source, verdict.signals) == ("search", (SATURATION, REQUESTS))


def test_learned_capacity_is_forgotten_when_a_second_stage_appears() -> None:
    facts = learn_from_requests(*PROVING_REQUESTS)
    assert facts.count.k == 100
    facts.learn_from_views([page_of_split_pool(140)])
    assert (facts.count.last_k, facts.count.per_endpoint_source) == (None, "search")


def test_detector_of_a_stage_without_endpoints_is_ignored() -> None:
    """It is not evaluated, so its last value stays on the page."""
    pages = [
        page_of_detectors(
            each,
            {"decode": each / 400},
            {("requests", "decode"): each / 400, ("tokens", "prefill"): 0.9, ("requests", ""): 1.0},
        )
        for each in (*PROVING_REQUESTS, 140)
    ]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", learn_from_pages(pages))
    assert verdict.detector == "counts requests, maxConcurrency 100"
    assert (verdict.per_endpoint, verdict.signals) == (100, (SATURATION,))


def test_detectors_without_stages_are_read() -> None:
    """Routers before the stages of detectors had no such label."""
    pages = [
        page_of_detectors(
            each,
            {"decode": each / 400},
            {("requests", ""): each / 400, ("queue", ""): 0.01},
            "queue",
        )
        for each in (*PROVING_REQUESTS, 140)
    ]
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", learn_from_pages(pages))
    assert (verdict.per_endpoint, verdict.detector) == (100, "the maximum of queue, requests")


def test_requests_are_read_as_well_if_several_pickers_show_a_maximum() -> None:
    """Each maximum contains only the requests that its own picker sent."""
    facts = learn_from_pages([page_of_two_detectors(each, 0.02, kind="tokens") for each in PROVING_REQUESTS])
    pages = [page_of_two_detectors(each, 0.02, kind="tokens") for each in (140, 150)]
    verdict = derive_readings(pages, "saturation", POLICY, "epp", facts)
    assert verdict.signals == (SATURATION, REQUESTS)


def page_at_address(
    requests: int, number: int, *, address: str = "a:9090", started_at: float | None = 1e9
) -> PoolView:
    return page_with_requests(
        requests, closed_at=CLOSED_AT + 2 * number, address=address, started_at=started_at
    )


@pytest.mark.parametrize(
    ("changes", "k"),
    [
        ({}, 100),
        ({"started_at": 1e9 + 1}, 100),  # the clock was adjusted
        ({"started_at": None}, 100),
        ({"started_at": 1e9 + 60}, None),
        ({"address": "b:9090"}, None),
    ],
)
def test_learned_capacity_is_forgotten_when_the_picker_is_replaced(
    changes: dict[str, Any], k: int | None
) -> None:
    """The next picker may have another configuration, which its pages prove only after a while."""
    facts = PickerFacts()
    for number, each in enumerate(PROVING_REQUESTS):
        facts.learn_from_views([page_at_address(each, number)])
    assert facts.count.k == 100
    after_reload = PickerFacts(facts.count, facts)
    after_reload.learn_from_views([page_at_address(0, 20, **changes)])
    assert (facts.count.k, facts.count.last_k) == (k, k)


def test_learned_capacity_survives_a_failed_scrape_of_one_picker() -> None:
    facts = PickerFacts()
    for number, each in enumerate(PROVING_REQUESTS):
        facts.learn_from_views(
            [page_at_address(each, number), page_at_address(each + 3, number, address="b:9090")]
        )
    facts.learn_from_views([page_at_address(50, 10)])
    facts.learn_from_views([page_at_address(60, 11), page_at_address(63, 11, address="b:9090")])
    assert facts.count.k == 100


@pytest.mark.parametrize("page", ["router-newest-flow-control-off", "router-newest-flow-control-on"])
@pytest.mark.parametrize(("policy", "max_sys"), [(Policy(), 32), (Policy(initial_per_endpoint=3), 12)])
def test_unknown_capacity_is_searched_for(page: str, policy: Policy, max_sys: float) -> None:
    verdict = derive_from_pages(page, policy=policy)
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (policy.initial_per_endpoint, "search")
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(max_sys, False)}


def test_capacity_is_unknown_before_the_first_request() -> None:
    """The first page with a request may show how many requests an endpoint runs at once."""
    idle = page_with_requests(0, running=0.0, waiting=0.0)
    verdict = derive_readings([idle], "auto", Policy(), "epp")
    assert verdict.per_endpoint_source == "search"
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(32, False)}


@pytest.mark.parametrize(
    ("policy", "learned", "source"),
    [
        (Policy(per_endpoint=100), (), "setting"),
        (Policy(max_sys=400), (), None),
        (Policy(), (140,), "suggestion"),
        (Policy(), PROVING_REQUESTS, "picker"),
    ],
)
def test_configured_or_learned_capacity_is_known(
    policy: Policy, learned: tuple[int, ...], source: str | None
) -> None:
    verdict = derive_readings(
        [page_with_requests(140)], "both", policy, "epp", learn_from_requests(*learned, 140)
    )
    assert verdict.per_endpoint_source == source
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(400, True)}


@pytest.mark.parametrize("policy", [Policy(per_endpoint=100), Policy(max_sys=400)])
def test_configured_capacity_is_where_the_search_starts_if_it_is_to_be_learned(policy: Policy) -> None:
    policy = replace(policy, learns_capacity=True)
    verdict = derive_readings([page_with_requests(140)], "both", policy, "epp", learn_from_requests(140))
    assert {(each.max_sys, each.is_capacity_known) for each in verdict.readings} == {(400, False)}


def test_k_above_the_default_of_the_picker_is_not_used_as_capacity() -> None:
    """The saturation is still proven to be a request count."""
    pages = [
        replace(page_with_requests(each, closed_at=CLOSED_AT + 2 * number), saturation=each / 1024)
        for number, each in enumerate((*PROVING_REQUESTS, 140))
    ]
    facts = PickerFacts()
    for each in pages:
        facts.learn_from_views([each])
    assert facts.count.k == 256
    verdict = derive_readings(pages[-1:], "auto", Policy(), "epp", facts)
    (reading,) = verdict.readings
    assert (verdict.per_endpoint, verdict.per_endpoint_source) == (8, "search")
    assert (reading.max_sys, reading.is_capacity_known) == (32, False)
    assert reading.is_request_count
    assert reading.f_sys * reading.max_sys == pytest.approx(140)


def test_requests_are_read_as_well_while_the_capacity_is_unknown() -> None:
    """A fraction of an unknown capacity limits nothing, so requests are read as well if possible."""
    page = replace(page_with_requests(140), utilization_detectors=frozenset({"default"}))
    search = derive_readings([page], "saturation", Policy(), "epp")
    assert search.signals == (SATURATION, REQUESTS)
    assert [reading.signal for reading in search.readings] == [SATURATION, REQUESTS]
    assert derive_readings([page], "saturation", POLICY, "epp").signals == (SATURATION,)
    without_counts = replace(page, in_flight=None, running=None)
    uncounted = derive_readings([without_counts], "saturation", Policy(), "epp")
    assert (uncounted.signals, uncounted.unread) == ((SATURATION,), ())
    own_query = replace(page, has_own_saturation=True)
    assert derive_readings([own_query], "saturation", Policy(), "prometheus").signals == (SATURATION,)


@pytest.mark.parametrize("use", ["saturation", "both"])
def test_saturation_without_flow_control_is_unreadable_with_a_hint(use: str) -> None:
    verdict = derive_from_pages("router-newest-flow-control-off", use=use)
    (unread,) = verdict.unread
    assert (unread.reason, unread.signal) == (Reason.UNREADABLE, SATURATION)
    assert "flow control is off" in unread.hint


def test_configured_capacity_replaces_the_counted_one() -> None:
    (saturation, requests) = derive_from_pages(
        "router-newest-flow-control-on", policy=Policy(max_sys=254)
    ).readings
    assert (saturation.max_sys, saturation.f_sys) == (254, 0.4)
    assert (requests.max_sys, requests.f_sys) == (254, 120 / 254)


def view_without_lines(page: str, *prefixes: str) -> PoolView:
    """Return the view of a recorded page without some of its lines."""
    lines = [line for line in read_page(page).splitlines(keepends=True) if not line.startswith(prefixes)]
    parsed = PageParser(SERIES_NAMES)
    parsed.feed("".join(lines).encode())
    view = build_view(parsed.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, PoolView)
    return view


@pytest.mark.parametrize(
    ("missing", "expected_name"),
    [
        (("llm_d_epp_average_running_requests",), "llm_d_epp_average_running_requests"),
        (("llm_d_epp_average_queue_size", "llm_d_epp_request_running"), "llm_d_epp_average_queue_size"),
        (("llm_d_epp_ready_endpoints",), "llm_d_epp_ready_endpoints"),
    ],
)
def test_missing_series_is_named(missing: tuple[str, ...], expected_name: str) -> None:
    view = view_without_lines("router-newest-flow-control-on", *missing, "llm_d_epp_request_running")
    verdict = derive_readings([view], "requests", POLICY, "epp")
    (unread,) = verdict.unread
    assert verdict.readings == ()
    assert unread.reason is Reason.UNREADABLE
    assert expected_name in unread.why
    assert unread.hint


def test_new_picker_without_averages_is_unreadable() -> None:
    """Before its first flush a picker shows no averages, and its requests in flight are only those since its
    start."""
    view = view_without_lines("router-newest-flow-control-off", "llm_d_epp_average")
    verdict = derive_readings([view], "auto", Policy(max_sys=400), "epp")
    assert verdict.readings == ()
    assert verdict.unread[0].reason is Reason.UNREADABLE


def test_replica_without_flow_control_makes_the_saturation_unreadable() -> None:
    """Without flow control, the load of that replica is unknown."""
    verdict = derive_from_pages("replica-a", "router-newest-flow-control-off", use="saturation")
    assert verdict.readings == ()
    assert verdict.unread[0].signal is SATURATION


def test_sums_that_overflow_raise_nothing() -> None:
    """Two replicas show nearly the largest float, or infinities of both signs."""
    for queued, running in ((1.2e308, 1.2e308), (float("inf"), float("inf"))):
        views = [page_with_requests(100, queued=queued, running=sign * running) for sign in (1, -1)]
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
def test_value_that_is_not_finite_stays_visible_in_the_readings(series: str, value: str) -> None:
    """The limiter rejects it as implausible; a sum or a maximum must not hide it."""
    lines = [
        f"{line.rsplit(' ', 1)[0]} {value}\n" if line.startswith(series) else f"{line}\n"
        for line in read_page("router-newest-flow-control-on").splitlines()
    ]
    page = PageParser(SERIES_NAMES)
    page.feed("".join(lines).encode())
    view = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, PoolView)
    readings: list[Reading] = list(derive_readings([view], "both", POLICY, "epp").readings)
    terms = [term for each in readings for term in (each.f_sys, each.f_epp, each.max_sys)]
    assert any(not float("-inf") < term < float("inf") for term in terms)


def test_page_of_another_program_is_a_failure() -> None:
    """The page of any program shows the start time of its process."""
    page = PageParser(SERIES_NAMES)
    page.feed(b"process_start_time_seconds 1.7e+09\n")
    view = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, ReadFailure)
    assert view.why == "none of the endpoint picker's series is there"


def test_page_of_another_pool_is_a_failure() -> None:
    page = PageParser(SERIES_NAMES)
    page.feed(read_page("router-newest-flow-control-on").encode())
    view = build_view(page.close(), "llama", OPENED_AT, CLOSED_AT)
    assert not isinstance(view, PoolView)
    assert "qwen" in view.why
    assert view.hint == "pool.name"


Counts = tuple[float | None, float, bool, tuple[float, float] | None]


def derive_counts(*views: PoolView) -> Counts:
    """Return the running and waiting requests, whether they are exact, and both at the last flush of the
    picker."""
    use = "requests" if views[0].running is not None else "saturation"
    (reading,) = derive_readings(views, use, Policy(max_sys=400), "epp").readings
    return reading.running, reading.waiting, reading.has_exact_counts, reading.averages


PAGE = PoolView(OPENED_AT, CLOSED_AT, running=12, waiting=2.5, ready=4, queued=0, in_flight=70)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        # No series shows how many of the sent requests wait in the model servers.
        ({}, (None, 0, True, (48, 10))),
        ({"waiting": 0, "queued": 6}, (None, 6, True, (48, 0))),
        ({"running": None, "saturation": 0.5}, (None, 0, True, None)),
        ({"running": None, "saturation": 0.5, "queued": 6}, (None, 6, True, None)),
        # Sent requests that do not wait in the servers are running.
        ({"server_queued": 0}, (70, 0, False, (48, 10))),
        ({"server_queued": 9}, (61, 9, False, (48, 10))),
        ({"server_queued": 9, "queued": 6}, (61, 15, False, (48, 10))),
        ({"server_queued": 9, "running": None, "saturation": 0.5}, (61, 9, False, None)),
        # The queues may be older than the answers to their requests.
        ({"server_queued": 75}, (0, 75, False, (48, 10))),
        # Without the requests in flight, the queues do not show how many requests run.
        ({"server_queued": 9, "in_flight": None}, (None, 0, True, (48, 10))),
        # The page of a model server shows the current values of both.
        ({"has_current_averages": True, "in_flight": None}, (48, 10, True, None)),
    ],
)
def test_running_and_waiting_requests_are_separated(changes: dict[str, Any], counts: Counts) -> None:
    assert derive_counts(replace(PAGE, **changes)) == counts


def test_replicas_share_the_pool_and_have_their_own_queues() -> None:
    """Each replica counts the requests that it sent and queues; the model servers and their queues are
    shared."""
    assert derive_counts(PAGE, replace(PAGE, running=11)) == (None, 0, True, (48, 10))
    waiting = replace(PAGE, waiting=0, queued=3)
    assert derive_counts(waiting, waiting) == (None, 6, True, (48, 0))
    shown = replace(waiting, server_queued=9)
    assert derive_counts(shown, replace(shown, server_queued=11)) == (140 - 11, 11 + 6, False, (48, 0))
    without_in_flight = replace(shown, in_flight=None)
    assert derive_counts(shown, without_in_flight) == (70 - 9, 9 + 6, False, (48, 0)), (
        "the series appears with the first request"
    )
    assert derive_counts(shown, waiting) == (None, 6, True, (48, 0)), "one replica does not show the queues"


def test_requests_that_bypass_the_picker_count_as_running() -> None:
    pages = [
        replace(PAGE, running=running, server_queued=9, closed_at=CLOSED_AT + 5 * number)
        for number, running in enumerate((25, 26, 27))  # 4 × 2.5 more wait at each flush
    ]
    facts = PickerFacts()
    for each in pages:
        facts.learn_from_views([each])
    assert facts.outside.request_count == 4 * 26 + 10 - 70
    (reading,) = derive_readings(pages[-1:], "requests", POLICY, "epp", facts).readings
    assert reading.running == 70 + facts.outside.request_count - 9


SERVER_QUEUES = {
    "newest": "llm_d_epp_per_endpoint_queue_size{model_server_endpoint",
    "older": "inference_pool_per_pod_queue_size{model_server_pod",
}


def page_with_server_queues(name: str, *queues: str | float) -> PoolView | ReadFailure:
    """Return the view of a recorded page whose model servers have these queues, under one name of the
    series."""
    lines = [
        line
        for line in read_page("router-newest-flow-control-off").splitlines()
        if "_queue_size{m" not in line
    ]
    lines += [f'{SERVER_QUEUES[name]}="pod-{at}",name="qwen"}} {queue}' for at, queue in enumerate(queues)]
    page = PageParser(SERIES_NAMES)
    page.feed("\n".join([*lines, ""]).encode())
    return build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)


@pytest.mark.parametrize("name", SERVER_QUEUES)
@pytest.mark.parametrize(
    ("queues", "queued"), [((), None), ((0,), 0), ((7, 2.5, 4), 13.5), ((7, -3, 4), 11), ((-3,), 0)]
)
def test_queues_of_the_model_servers_are_summed(
    name: str, queues: tuple[float, ...], queued: float | None
) -> None:
    view = page_with_server_queues(name, *queues)
    assert isinstance(view, PoolView)
    assert view.server_queued == queued
    shown = {series: value for series, value in view.raw.items() if "queue_size" in series}
    assert shown.get(SERVER_QUEUES[name].partition("{")[0]) == queued


def test_newer_of_two_names_of_one_series_is_used() -> None:
    """The page shows 1.5 for one server under the newer name, and 99 for each of two servers under the older
    one."""
    (view,) = read_views("router-0.9-flow-control-on")
    assert view.server_queued == 1.5


@pytest.mark.parametrize("queue", ["NaN", "+Inf"])
def test_queue_that_is_not_finite_stays_visible(queue: str) -> None:
    view = page_with_server_queues("newest", 3, queue)
    assert isinstance(view, PoolView)
    assert view.server_queued is not None
    assert not math.isfinite(view.server_queued)


def test_running_and_waiting_are_unknown_with_queries_of_the_operator() -> None:
    own_query = replace(PAGE, has_own_saturation=True, saturation=0.5, capacity=1e6)
    (reading,) = derive_readings(
        [replace(own_query, server_queued=9)], "saturation", POLICY, "prometheus"
    ).readings
    assert (reading.running, reading.averages) == (None, None)


# Requests that wait in one endpoint while another has room.


def read_page_with_queues(
    queues: list[float], *, ready: int, name: str = "llm_d_epp_per_endpoint_queue_size"
) -> PoolView:
    label = "model_server_pod" if name.startswith("inference") else "model_server_endpoint"
    lines = [
        f'{name}{{name="qwen",{label}="server-{number}"}} {queue}' for number, queue in enumerate(queues)
    ]
    lines += [
        f'llm_d_epp_ready_endpoints{{name="qwen"}} {ready}',
        'llm_d_epp_average_running_requests{name="qwen"} 10',
        'llm_d_epp_average_queue_size{name="qwen"} 1',
        'llm_d_epp_request_running{model_name="m"} 30',
    ]
    page = PageParser(SERIES_NAMES)
    page.feed(("\n".join(lines) + "\n").encode())
    view = build_view(page.close(), "qwen", OPENED_AT, CLOSED_AT)
    assert isinstance(view, PoolView)
    return view


def derive_evenness(view: PoolView) -> tuple[bool, bool]:
    (reading,) = derive_readings([view], "requests", Policy(max_sys=400), "epp").readings
    return reading.is_uneven, reading.are_averages_uneven


@pytest.mark.parametrize("name", Family.SERVER_QUEUES.value)
def test_requests_that_wait_in_one_endpoint_of_three_are_uneven(name: str) -> None:
    assert derive_evenness(read_page_with_queues([15, 0, 0], ready=3, name=name)) == (True, True)
    assert derive_evenness(read_page_with_queues([5, 4, 1], ready=3, name=name)) == (False, False)
    assert derive_evenness(read_page_with_queues([0, 0, 0], ready=3, name=name)) == (False, False)


def test_tenth_of_the_endpoints_may_have_room_in_an_even_backlog() -> None:
    assert derive_evenness(read_page_with_queues([0, *[3] * 9], ready=10)) == (False, False)
    assert derive_evenness(read_page_with_queues([0, 0, *[3] * 8], ready=10)) == (True, True)


def test_endpoint_whose_scrape_fails_does_not_count_as_one_with_room() -> None:
    """It keeps its last queue on the page, and is missing in the number of ready endpoints."""
    assert derive_evenness(read_page_with_queues([6, 5, 0], ready=2)) == (False, False)


def test_sum_of_the_queues_does_not_show_how_they_are_distributed() -> None:
    view = replace(read_page_with_queues([15], ready=3), endpoints_with_room=None)
    assert derive_evenness(view) == (False, False)


def test_endpoints_that_ran_different_numbers_at_the_flush_are_uneven() -> None:
    view = read_page_with_queues([], ready=3)
    assert derive_evenness(replace(view, running_deviation=4.5)) == (False, True)
    assert derive_evenness(replace(view, running_deviation=0.9)) == (False, False)
    just_full = read_page_with_queues([1, 1, 0], ready=3)
    assert derive_evenness(replace(just_full, running_deviation=0.3)) == (False, False)
    assert derive_evenness(replace(just_full, running_deviation=4.5)) == (True, True)
    waiting_everywhere = read_page_with_queues([4, 5, 3], ready=3)
    assert derive_evenness(replace(waiting_everywhere, running_deviation=4.5)) == (False, False), (
        "endpoints of different size are full"
    )


@pytest.mark.parametrize(
    ("changes", "endpoints"),
    [({}, 3), ({"ready": None}, 5), ({"has_current_averages": True}, None)],
    ids=["page", "kubernetes", "model servers"],
)
def test_reading_says_among_how_many_endpoints_a_picker_chooses(
    changes: dict[str, Any], endpoints: float | None
) -> None:
    view = replace(read_page_with_queues([0, 0, 0], ready=3), saturation=0.5, **changes)
    readings = derive_readings([view], "saturation", Policy(max_sys=400), "epp", endpoints=5).readings
    assert [each.picker_endpoints for each in readings] == [endpoints] * len(readings)
    assert readings


# Use of the KV memory.


def derive_kv_use(*views: PoolView, endpoints: int | None = None) -> KvUse | None:
    """Return the use of the KV memory, which is the same in the readings of all signals."""
    readings = derive_readings(views, "both", Policy(max_sys=400), "epp", endpoints=endpoints).readings
    assert len(readings) == 2
    first, second = readings
    assert first.kv_use is second.kv_use
    return first.kv_use


KV_PAGE = replace(PAGE, saturation=0.5, kv_cache=0.3)


def test_largest_kv_use_and_fewest_endpoints_of_several_pickers_count() -> None:
    """The averages of each picker are those of the whole pool, and each may be from its own last flush."""
    newer = replace(KV_PAGE, opened_at=OPENED_AT + 1, closed_at=CLOSED_AT + 1, kv_cache=0.4, ready=5)
    for views in ((KV_PAGE, newer), (newer, KV_PAGE)):
        assert derive_kv_use(*views) == KvUse(0.4, None, 4, OPENED_AT - 6.0, CLOSED_AT + 1)


def test_kv_use_is_unknown_unless_every_active_picker_shows_it() -> None:
    without_average = replace(KV_PAGE, kv_cache=None)
    assert derive_kv_use(without_average) is None
    assert derive_kv_use(KV_PAGE, without_average) is None
    standby = STANDBY["only build information"]
    assert derive_kv_use(KV_PAGE, standby) == derive_kv_use(KV_PAGE)


def test_kv_use_that_is_nan_stays_visible() -> None:
    kv_use = derive_kv_use(KV_PAGE, replace(KV_PAGE, kv_cache=math.nan))
    assert kv_use is not None
    assert math.isnan(kv_use.share)


@pytest.mark.parametrize(
    ("ready", "in_kubernetes", "endpoints"),
    [(4, 5, 4), (None, 5, 5), (None, None, None), (math.nan, 5, None), (math.inf, 5, None)],
)
def test_kv_use_has_the_ready_endpoints_of_the_page_or_else_of_kubernetes(
    ready: float | None, in_kubernetes: int | None, endpoints: float | None
) -> None:
    view = replace(KV_PAGE, ready=ready)
    readings = derive_readings(
        [view], "saturation", Policy(max_sys=400), "epp", endpoints=in_kubernetes
    ).readings
    kv_uses = [each.kv_use for each in readings]
    assert [each and each.endpoints for each in kv_uses] == [endpoints]


def test_kv_use_on_a_page_of_current_values_is_of_the_time_of_the_sample() -> None:
    view = replace(KV_PAGE, has_current_averages=True, kv_tokens=6e5)
    assert derive_kv_use(view) == KvUse(0.3, 6e5, 4, OPENED_AT, CLOSED_AT)


def test_smallest_size_of_the_kv_memory_counts_if_every_view_shows_one() -> None:
    for sizes, expected in (((6e5, 5e5), 5e5), ((6e5, None), None), ((None, 5e5), None)):
        kv_use = derive_kv_use(*(replace(KV_PAGE, kv_tokens=each) for each in sizes))
        assert kv_use is not None
        assert kv_use.capacity_tokens == expected
