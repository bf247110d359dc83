"""Findings of `check` about Kubernetes, with the real client and an API server that fails like real ones."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dispatcher.check.finding import Finding
from dispatcher.check.kubernetes import TIMEOUT_S, build_lookup
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from tests.signals.apiserver import (
    OLD_POOLS,
    PODS,
    POOLS,
    SLICES,
    ApiServer,
    access,
    endpoint_slice,
    old_pool,
    pod,
    populate,
)
from tests.signals.fakes import answering, raw_server
from tests.support import free_port


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer().serve(tmp_path) as server:
        yield server


async def look_up(access: ClusterAccess, *, service: str = "", timeout_s: float = TIMEOUT_S) -> list[Finding]:
    settings = Settings.model_validate(
        {
            "pool": {"name": "qwen", "namespace": "default"},
            "gateway": {"url": "http://gateway"},
            "signals": {"epp": {"service": service}},
        }
    )
    findings, _ = await build_lookup(settings, access=access, timeout_s=timeout_s)()
    return findings


async def test_unreachable_api_server_is_reported_without_mention_of_tls(server: ApiServer) -> None:
    port = free_port()
    config = server.kubeconfig.read_text().replace(server.url, f"http://127.0.0.1:{port}")
    server.kubeconfig.write_text(config)
    (finding,) = await look_up(access(server))
    assert finding.what == f"the Kubernetes API cannot be reached: 127.0.0.1:{port}: connection refused"


async def test_api_server_that_requires_tls_is_reported(tmp_path: Path) -> None:
    answer = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
    async with raw_server(answering(answer)) as port, ApiServer().serve(tmp_path) as server:
        config = server.kubeconfig.read_text().replace(server.url, f"http://127.0.0.1:{port}")
        server.kubeconfig.write_text(config)
        (finding,) = await look_up(access(server))
    assert "answered 400 (Client sent an HTTP request to an HTTPS server.)" in finding.what
    assert finding.hint.endswith("the server's address, http or https")


@pytest.mark.parametrize("has_two_paths", [False, True])
async def test_missing_kubeconfig_is_reported(tmp_path: Path, has_two_paths: bool) -> None:
    paths = [tmp_path / "none", *([tmp_path / "nor-this"] if has_two_paths else [])]
    no_cluster = ClusterAccess(environ={"KUBECONFIG": ":".join(map(str, paths))}, service_account=tmp_path)
    (finding,) = await look_up(no_cluster)
    assert finding.what == f"kubeconfig {':'.join(map(str, paths))} cannot be used: no such file"
    assert finding.hint == "the environment variable KUBECONFIG, which names it"


async def test_healthy_pool_is_reported_with_endpoints_and_replicas(server: ApiServer) -> None:
    populate(server, 2)
    findings = await look_up(access(server))
    assert [(each.level, each.what) for each in findings] == [
        ("ok", "2 ready endpoints"),
        ("ok", "replicas: 10.0.0.1"),
    ]


async def test_missing_permission_is_reported_with_the_rule(server: ApiServer) -> None:
    server.faults.forbidden = {POOLS}
    (finding,) = await look_up(access(server))
    assert finding.level == "failed"
    assert finding.hint.startswith("the Role there: it needs the rule apiGroups")


async def test_all_missing_permissions_are_reported_at_once(server: ApiServer) -> None:
    populate(server, 2)
    server.faults.rules = []
    findings = await look_up(access(server))
    assert [each.what for each in findings if each.level == "failed"] == [
        "not allowed to list inferencepools in namespace default",
        "not allowed to list pods in namespace default",
        "not allowed to list endpointslices in namespace default",
    ]
    await add_rules_of_hints(server, findings, rounds=1)


async def test_all_missing_watch_permissions_are_reported_at_once(server: ApiServer) -> None:
    populate(server, 2)
    server.faults.forbidden = {f"watch {each}" for each in (POOLS, PODS, SLICES)}
    findings = await look_up(access(server))
    assert [each.what for each in findings if each.level == "failed"] == [
        "not allowed to watch inferencepools in namespace default",
        "not allowed to watch pods in namespace default",
        "not allowed to watch endpointslices in namespace default",
    ]


async def test_missing_permissions_for_the_older_api_are_reported(server: ApiServer) -> None:
    server.faults.rules, server.faults.not_served = [], {POOLS}
    server.put(OLD_POOLS, old_pool())
    server.put(PODS, pod("p0"))
    server.put(SLICES, endpoint_slice("x", "qwen-epp", "10.0.0.1"))
    findings = await look_up(access(server))
    await add_rules_of_hints(server, findings, rounds=1)


async def test_slices_are_not_needed_if_the_picker_service_is_configured(server: ApiServer) -> None:
    populate(server, 2)
    server.faults.rules = []
    findings = await look_up(access(server), service="epp")
    assert len(findings) == 2
    assert not server.requests_for(SLICES, watch=False)


async def add_rules_of_hints(server: ApiServer, findings: list[Finding], rounds: int) -> None:
    """Add the rules that the hints name. Nothing may fail after this number of rounds."""
    rules = server.faults.rules
    assert rules is not None
    for _ in range(rounds):
        for each in findings:
            for rule in re.findall(r"the rule (apiGroups: .*?, verbs: \[.*?\])", each.hint):
                rules.append(msgspec.yaml.decode(f"{{{rule}}}"))
        findings = await look_up(access(server))
    assert [each for each in findings if each.level == "failed"] == []


async def test_lookup_logs_nothing(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.faults.forbidden = {POOLS}
    await look_up(access(server))
    assert "kubernetes-problem" not in "".join(capsys.readouterr())


async def test_missing_pool_and_missing_permission_are_both_reported(server: ApiServer) -> None:
    server.faults.forbidden = {PODS}
    findings = await look_up(access(server))
    assert [each.what for each in findings] == [
        "0 ready endpoints",
        "InferencePool default/qwen does not exist",
        "not allowed to list pods in namespace default",
    ]


async def test_pool_without_pods_fails(server: ApiServer) -> None:
    populate(server, 0)
    findings = await look_up(access(server), service="epp")
    assert [(each.level, each.what) for each in findings] == [("failed", "0 ready endpoints")]


async def test_api_server_that_does_not_answer_fails(server: ApiServer) -> None:
    server.faults.no_answers = True
    (finding,) = await look_up(access(server), timeout_s=0.3)
    assert finding.level == "failed"
    assert "did not answer within 0.3 s" in finding.what


async def test_lookup_without_cluster_is_ok(tmp_path: Path) -> None:
    no_cluster = ClusterAccess(environ={}, service_account=tmp_path)
    (finding,) = await look_up(no_cluster)
    assert finding.level == "ok"
    assert "signals.epp.urls" in finding.hint
