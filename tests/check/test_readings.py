"""What `check` says of each source of the signals: series, values, ages, and the budget that follows."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from dispatcher.check.finding import Finding
from dispatcher.check.readings import check_sources
from dispatcher.settings import BudgetSettings, Settings
from dispatcher.signals.sources import build_sources
from tests.signals.fakes import GOOD, FakeEpp, fake_epp, fake_prometheus, golden
from tests.support import free_port


def settings(**signals: Any) -> Settings:
    return Settings.model_validate(
        {"pool": {"name": "qwen"}, "gateway": {"url": "http://gateway"}, "signals": signals}
    )


def of_known_capacity(**signals: Any) -> Settings:
    return settings(**signals).model_copy(update={"budget": BudgetSettings(per_endpoint=100)})


async def probe(settings: Settings, epp_addresses: tuple[str, ...] | None = None) -> list[Finding]:
    return await check_sources(settings, build_sources(settings), epp_addresses)


async def test_an_own_authority_for_the_endpoint_picker(tmp_path: Path) -> None:
    authority, server = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with fake_epp(tls=server) as epp:
        url = f"https://localhost:{epp.port}"
        (told,) = [f for f in await probe(settings(epp={"urls": [url]})) if f.where == "signals.epp"]
        assert told.level == "failed"
        trusting = settings(epp={"urls": [url], "tls": {"ca_file": str(tmp_path / "ca.pem")}})
        (told,) = [f for f in await probe(trusting) if f.where == "signals.epp"]
        assert told.level == "ok"


def find(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.where == name]
    return found


async def findings_of(epp: FakeEpp, **signals: Any) -> list[Finding]:
    return await probe(settings(epp={"urls": [epp.url]}, **signals))


async def test_a_probe_tells_series_values_and_the_budget_that_follows() -> None:
    async with fake_epp() as epp:
        found = await probe(of_known_capacity(epp={"urls": [epp.url]}))
    assert {finding.level for finding in found} == {"ok"}
    assert "1 replica" in find(found, "signals.epp").what
    assert find(found, "signals.epp llm_d_epp_flow_control_queue_size").what.startswith("12, 0.0 s old")
    # D = 1 − (0.4 + 12/400 + 0.05)
    assert "D 0.520, room for 208 more" in find(found, "signals.epp saturation").what
    assert "of 400 requests" in find(found, "signals.epp requests").what


async def test_a_detector_is_what_its_series_says_and_not_its_name() -> None:
    async with fake_epp() as epp:
        epp.page = golden("router-newest-misnamed-detector")
        found = await findings_of(epp)
    told = find(found, "signals.epp llm_d_epp_flow_control_stale_endpoints").what
    assert told == "utilization detector high-concurrency-pool: its saturation is no count"


@pytest.mark.parametrize(
    ("per_endpoint", "level", "told"),
    [
        ("auto", "ok", "auto: the picker's page suggests 100 requests per endpoint; not proven yet"),
        (100, "", ""),
        (64, "warning", "64, but the picker's page suggests 100 requests per endpoint; not proven yet"),
    ],
)
async def test_what_the_picker_counts_with_is_compared(per_endpoint: object, level: str, told: str) -> None:
    async with fake_epp() as epp:
        epp.page = golden("router-newest-concurrency-detector")
        budget = {"per_endpoint": per_endpoint}
        wanted = settings(epp={"urls": [epp.url]}).model_copy(
            update={"budget": BudgetSettings.model_validate(budget)}
        )
        found = [each for each in await probe(wanted) if each.where == "budget.per_endpoint"]
    assert [(each.level, each.what) for each in found] == ([(level, told)] if told else [])


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("router-newest-latencies", "llm_d_epp_request_ttft_seconds, of realtime alone"),
        ("gie-1.5-latency-predictor", "inference_objective_request_ttft_seconds, of all requests"),
        ("gie-1.5-flow-control-on", "the endpoint picker shows no llm_d_epp_request_ttft_seconds"),
    ],
)
async def test_whose_latencies_can_be_shown_is_told(page: str, told: str) -> None:
    async with fake_epp() as epp:
        epp.page = golden(page)
        wanted = settings(epp={"urls": [epp.url]})
        marked = wanted.gateway.model_copy(update={"objective": "batch"})
        found = find(await probe(wanted.model_copy(update={"gateway": marked})), "signals.epp latencies")
    assert (found.level, found.what) == ("ok", told)


async def test_capacity_that_nobody_names_is_a_warning_with_what_to_do() -> None:
    async with fake_epp() as epp:
        told = find(await findings_of(epp), "budget.per_endpoint")
    assert told.level == "warning"
    assert told.what == "auto: not known, so it is searched for, starting at 8 requests per endpoint"
    assert "check --probe" in told.hint


async def test_what_is_missing_is_named_with_what_mends_it() -> None:
    async with fake_epp() as epp:
        epp.page = golden("router-newest-flow-control-off")
        found = await findings_of(epp, use="saturation")
    assert "flow control is off" in find(found, "signals.epp llm_d_epp_flow_control_pool_saturation").what
    unread = find(found, "signals.epp saturation")
    assert unread.level == "failed"
    assert "flow control is off" in unread.hint


async def test_every_source_is_tried_and_those_that_fail_say_why() -> None:
    async with fake_prometheus() as prometheus:
        prometheus.show(GOOD, age_s=3)
        found = await probe(
            settings(
                epp={"urls": [f"http://127.0.0.1:{free_port()}"]},
                prometheus={"url": prometheus.url},
            )
        )
    assert find(found, "signals.epp").level == "failed"
    assert "refused" in find(found, "signals.epp").what
    assert find(found, "signals.prometheus").level == "ok"
    age = re.search(r", ([0-9.]+) s old", find(found, "signals.prometheus llm_d_epp_ready_endpoints").what)
    assert age is not None
    assert float(age[1]) >= 3.0
    assert find(found, "signals.prometheus saturation").level == "ok"


async def test_an_old_sample_is_found_out() -> None:
    async with fake_prometheus() as prometheus:
        prometheus.show(GOOD, age_s=90)
        found = await probe(settings(source="prometheus", prometheus={"url": prometheus.url}))
    stale = find(found, "signals.prometheus stale")
    assert stale.level == "failed"
    assert stale.hint == "signals.max_age_s"


async def test_a_budget_that_is_not_believed_is_not_fine() -> None:
    async with fake_epp() as epp:
        epp.page = epp.page.replace('stage="effective"} 0.4', 'stage="effective"} NaN')
        found = await findings_of(epp)
    assert find(found, "signals.epp saturation").level == "failed"
    assert find(found, "signals.epp requests").level == "ok"


async def test_several_replicas_are_listed_one_by_one() -> None:
    async with fake_epp() as one, fake_epp() as two:
        one.page, two.page = golden("replica-a"), golden("replica-b")
        found = await probe(settings(epp={"urls": [one.url, two.url]}))
    assert find(found, "signals.epp[1] llm_d_epp_flow_control_pool_saturation").what.startswith("0.55")
    assert "F_SYS 0.550" in find(found, "signals.epp saturation").what


async def test_discovered_addresses_are_tried() -> None:
    async with fake_epp() as epp:
        found = await probe(settings(epp={"port": epp.port}), ("127.0.0.1",))
    assert find(found, "signals.epp").level == "ok"
