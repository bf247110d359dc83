"""Findings of `check` about each source of the signals: series, values, ages and budget."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from dispatcher.check.finding import Finding
from dispatcher.check.readings import check_sources
from dispatcher.settings.model import BudgetSettings, Settings
from dispatcher.signals.sources import build_sources
from tests.signals.fakes import HEALTHY_VALUES, FakeEpp, fake_epp, fake_prometheus, read_page
from tests.support import free_port


def make_settings(**signals: Any) -> Settings:
    return Settings.model_validate(
        {"pool": {"name": "qwen"}, "gateway": {"url": "http://gateway"}, "signals": signals}
    )


def make_settings_with_capacity(**signals: Any) -> Settings:
    return make_settings(**signals).model_copy(update={"budget": BudgetSettings(per_endpoint=100)})


async def probe(make_settings: Settings, epp_addresses: tuple[str, ...] | None = None) -> list[Finding]:
    return await check_sources(make_settings, build_sources(make_settings), epp_addresses)


async def test_picker_may_have_a_certificate_of_a_private_authority(tmp_path: Path) -> None:
    authority, server = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with fake_epp(tls=server) as epp:
        url = f"https://localhost:{epp.port}"
        finding = find_finding(await probe(make_settings(epp={"urls": [url]})), "signals.epp")
        assert finding.level == "failed"
        trusting = make_settings(epp={"urls": [url], "tls": {"ca_file": str(tmp_path / "ca.pem")}})
        assert find_finding(await probe(trusting), "signals.epp").level == "ok"


def find_finding(findings: list[Finding], name: str) -> Finding:
    (match,) = [finding for finding in findings if finding.where == name]
    return match


async def probe_picker(epp: FakeEpp, **signals: Any) -> list[Finding]:
    return await probe(make_settings(epp={"urls": [epp.url]}, **signals))


async def test_series_values_and_budget_are_reported() -> None:
    async with fake_epp() as epp:
        findings = await probe(make_settings_with_capacity(epp={"urls": [epp.url]}))
    assert {finding.level for finding in findings} == {"ok"}
    assert "1 replica" in find_finding(findings, "signals.epp").what
    queue_size = find_finding(findings, "signals.epp llm_d_epp_flow_control_queue_size")
    assert re.match(r"12, \d\.\d s old", queue_size.what)
    # D = 1 − (0.4 + 12/400 + 0.05)
    assert "D 0.520, room for 208 more" in find_finding(findings, "signals.epp saturation").what
    assert "of 400 requests" in find_finding(findings, "signals.epp requests").what


async def test_kind_of_detector_is_derived_from_its_series_and_not_from_its_name() -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-misnamed-detector")
        findings = await probe_picker(epp)
    message = find_finding(findings, "signals.epp llm_d_epp_flow_control_stale_endpoints").what
    assert message == "utilization detector high-concurrency-pool: its saturation is no count"


@pytest.mark.parametrize(
    ("per_endpoint", "level", "message"),
    [
        ("auto", "ok", "auto: the picker's page suggests 100 requests per endpoint; not proven yet"),
        (100, "", ""),
        (64, "warning", "64, but the picker's page suggests 100 requests per endpoint; not proven yet"),
    ],
)
async def test_configured_capacity_is_compared_with_that_of_the_picker(
    per_endpoint: object, level: str, message: str
) -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-concurrency-detector")
        budget = {"per_endpoint": per_endpoint}
        given = make_settings(epp={"urls": [epp.url]}).model_copy(
            update={"budget": BudgetSettings.model_validate(budget)}
        )
        findings = [each for each in await probe(given) if each.where == "budget.per_endpoint"]
    assert [(each.level, each.what) for each in findings] == ([(level, message)] if message else [])


@pytest.mark.parametrize(
    ("budget", "queue", "message"),
    [
        ({"per_endpoint": 16}, "0", "121 requests run and none waits, more than the capacity of 64"),
        ({"per_endpoint": 16}, "1.5", ""),
        ({"per_endpoint": 32}, "0", ""),
        ({"per_endpoint": 16, "capacity": "learn"}, "0", ""),
    ],
)
async def test_capacity_below_what_runs_is_reported_if_none_waits(
    budget: dict[str, object], queue: str, message: str
) -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-concurrency-detector").replace("} 1.5", f"}} {queue}")
        given = make_settings(epp={"urls": [epp.url]}).model_copy(
            update={"budget": BudgetSettings.model_validate(budget)}
        )
        findings = [each for each in await probe(given) if each.where == "signals.epp capacity"]
    assert [(each.level, each.what) for each in findings] == ([("warning", message)] if message else [])


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("router-newest-latencies", "llm_d_epp_request_ttft_seconds, of realtime alone"),
        ("gie-1.5-latency-predictor", "inference_objective_request_ttft_seconds, of all requests"),
        ("gie-1.5-flow-control-on", "the endpoint picker shows no llm_d_epp_request_ttft_seconds"),
    ],
)
async def test_scope_of_the_latencies_is_reported(page: str, message: str) -> None:
    async with fake_epp() as epp:
        epp.page = read_page(page)
        given = make_settings(epp={"urls": [epp.url]})
        gateway = given.gateway.model_copy(update={"objective": "batch"})
        finding = find_finding(
            await probe(given.model_copy(update={"gateway": gateway})), "signals.epp latencies"
        )
    assert (finding.level, finding.what) == ("ok", message)


async def test_unknown_capacity_is_a_warning_with_a_hint() -> None:
    async with fake_epp() as epp:
        finding = find_finding(await probe_picker(epp), "budget.per_endpoint")
    assert finding.level == "warning"
    assert finding.what == "auto: not known, so it is searched for, starting at 8 requests per endpoint"
    assert "check --probe" in finding.hint


async def test_missing_series_are_reported_with_a_hint() -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-flow-control-off")
        findings = await probe_picker(epp, use="saturation")
    assert (
        "flow control is off"
        in find_finding(findings, "signals.epp llm_d_epp_flow_control_pool_saturation").what
    )
    unread = find_finding(findings, "signals.epp saturation")
    assert unread.level == "failed"
    assert "flow control is off" in unread.hint


async def test_every_source_is_tried_and_failures_are_explained() -> None:
    async with fake_prometheus() as prometheus:
        prometheus.add_target(HEALTHY_VALUES, age_s=3)
        findings = await probe(
            make_settings(
                epp={"urls": [f"http://127.0.0.1:{free_port()}"]},
                prometheus={"url": prometheus.url},
            )
        )
    assert find_finding(findings, "signals.epp").level == "failed"
    assert "refused" in find_finding(findings, "signals.epp").what
    assert find_finding(findings, "signals.prometheus").level == "ok"
    age = re.search(
        r", ([0-9.]+) s old", find_finding(findings, "signals.prometheus llm_d_epp_ready_endpoints").what
    )
    assert age is not None
    assert float(age[1]) >= 3.0
    assert find_finding(findings, "signals.prometheus saturation").level == "ok"


async def test_old_sample_fails() -> None:
    async with fake_prometheus() as prometheus:
        prometheus.add_target(HEALTHY_VALUES, age_s=90)
        findings = await probe(make_settings(source="prometheus", prometheus={"url": prometheus.url}))
    stale = find_finding(findings, "signals.prometheus stale")
    assert stale.level == "failed"
    assert stale.hint == "signals.max_age_s"


async def test_implausible_budget_fails() -> None:
    async with fake_epp() as epp:
        epp.page = epp.page.replace('stage="effective"} 0.4', 'stage="effective"} NaN')
        findings = await probe_picker(epp)
    assert find_finding(findings, "signals.epp saturation").level == "failed"
    assert find_finding(findings, "signals.epp requests").level == "ok"


async def test_several_replicas_are_listed_one_by_one() -> None:
    async with fake_epp() as one, fake_epp() as two:
        one.page, two.page = read_page("replica-a"), read_page("replica-b")
        findings = await probe(make_settings(epp={"urls": [one.url, two.url]}))
    assert find_finding(findings, "signals.epp[1] llm_d_epp_flow_control_pool_saturation").what.startswith(
        "0.55"
    )
    assert "F_SYS 0.550" in find_finding(findings, "signals.epp saturation").what


async def test_discovered_addresses_are_tried() -> None:
    async with fake_epp() as epp:
        findings = await probe(make_settings(epp={"port": epp.port}), ("127.0.0.1",))
    assert find_finding(findings, "signals.epp").level == "ok"


LOAD_LINE = 'llm_d_epp_inflight_requests{{endpoint_name="a",priority="{}",producer_name="load"}} {}\n'


@pytest.mark.parametrize(
    ("lines", "level", "message"),
    [
        ([], "ok", "not there, and not needed: the running requests are shown by priority"),
        (
            [LOAD_LINE.format(0, 90), LOAD_LINE.format(-10, 30)],
            "ok",
            "120 requests, 30 of them with a negative priority",
        ),
        ([LOAD_LINE.format(0, 20)], "warning", "not used: it counts 20 requests, and 120 are running"),
    ],
)
async def test_requests_in_flight_by_priority_are_reported(
    lines: list[str], level: str, message: str
) -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-flow-control-on") + "".join(lines)
        findings = await probe_picker(epp)
    found = find_finding(findings, "signals.epp llm_d_epp_inflight_requests")
    assert found.level == level
    assert found.what.startswith(message)


async def test_picker_without_priorities_is_reported() -> None:
    async with fake_epp() as epp:
        epp.page = read_page("gie-1.5-flow-control-on")
        findings = await probe_picker(epp)
    message = find_finding(findings, "signals.epp llm_d_epp_inflight_requests").what
    assert message.startswith("not there: the picker has no inflight-load-producer")


@pytest.mark.parametrize("objective", ["", "batch"])
async def test_batch_requests_without_an_objective_are_not_seen_apart(objective: str) -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-flow-control-on") + LOAD_LINE.format(0, 120)
        settings = make_settings(epp={"urls": [epp.url]})
        gateway = settings.gateway.model_copy(update={"objective": objective})
        findings = await probe(settings.model_copy(update={"gateway": gateway}))
    found = find_finding(findings, "signals.epp llm_d_epp_inflight_requests")
    assert ("gateway.objective" in found.what) is (not objective)
