"""What `check` says of Kubernetes, through the real client, of an API server that fails as real ones do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dispatcher.check.finding import Finding
from dispatcher.check.kubernetes import TIMEOUT_S, build_lookup
from dispatcher.settings import Settings
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


async def look(access: ClusterAccess, *, service: str = "", timeout_s: float = TIMEOUT_S) -> list[Finding]:
    settings = Settings.model_validate(
        {
            "pool": {"name": "qwen", "namespace": "default"},
            "gateway": {"url": "http://gateway"},
            "signals": {"epp": {"service": service}},
        }
    )
    findings, _ = await build_lookup(settings, access=access, timeout_s=timeout_s)()
    return findings


async def test_of_a_server_that_is_away_no_word_of_tls(server: ApiServer) -> None:
    port = free_port()
    config = server.kubeconfig.read_text().replace(server.url, f"http://127.0.0.1:{port}")
    server.kubeconfig.write_text(config)
    (found,) = await look(access(server))
    assert found.what == f"the Kubernetes API cannot be reached: 127.0.0.1:{port}: connection refused"


async def test_of_a_server_that_wants_tls(tmp_path: Path) -> None:
    answer = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
    async with raw_server(answering(answer)) as port, ApiServer().serve(tmp_path) as server:
        config = server.kubeconfig.read_text().replace(server.url, f"http://127.0.0.1:{port}")
        server.kubeconfig.write_text(config)
        (found,) = await look(access(server))
    assert "answered 400 (Client sent an HTTP request to an HTTPS server.)" in found.what
    assert found.hint.endswith("the server's address, http or https")


@pytest.mark.parametrize("both", [False, True])
async def test_of_a_kubeconfig_that_is_not_there(tmp_path: Path, both: bool) -> None:
    named = [tmp_path / "none", *([tmp_path / "nor-this"] if both else [])]
    nowhere = ClusterAccess(environ={"KUBECONFIG": ":".join(map(str, named))}, service_account=tmp_path)
    (found,) = await look(nowhere)
    assert found.what == f"kubeconfig {':'.join(map(str, named))} cannot be used: no such file"
    assert found.hint == "the environment variable KUBECONFIG, which names it"


async def test_of_a_pool_that_is_fine(server: ApiServer) -> None:
    populate(server, 2)
    found = await look(access(server))
    assert [(each.level, each.what) for each in found] == [
        ("ok", "2 ready endpoints"),
        ("ok", "replicas: 10.0.0.1"),
    ]


async def test_of_a_missing_right(server: ApiServer) -> None:
    server.faults.forbidden = {POOLS}
    (found,) = await look(access(server))
    assert found.level == "failed"
    assert found.hint.startswith("the Role there: it needs the rule apiGroups")


async def test_of_no_rights_at_all_every_rule_at_once(server: ApiServer) -> None:
    populate(server, 2)
    server.faults.rules = []
    found = await look(access(server))
    assert [each.what for each in found if each.level == "failed"] == [
        "not allowed to list inferencepools in namespace default",
        "not allowed to list pods in namespace default",
        "not allowed to list endpointslices in namespace default",
    ]
    await follows_the_hints(server, found, rounds=1)


async def test_of_a_right_to_list_alone_every_rule_at_once(server: ApiServer) -> None:
    populate(server, 2)
    server.faults.forbidden = {f"watch {each}" for each in (POOLS, PODS, SLICES)}
    found = await look(access(server))
    assert [each.what for each in found if each.level == "failed"] == [
        "not allowed to watch inferencepools in namespace default",
        "not allowed to watch pods in namespace default",
        "not allowed to watch endpointslices in namespace default",
    ]


async def test_of_no_rights_with_the_older_api(server: ApiServer) -> None:
    server.faults.rules, server.faults.not_served = [], {POOLS}
    server.put(OLD_POOLS, old_pool())
    server.put(PODS, pod("p0"))
    server.put(SLICES, endpoint_slice("x", "qwen-epp", "10.0.0.1"))
    found = await look(access(server))
    await follows_the_hints(server, found, rounds=1)


async def test_of_no_rights_where_the_picker_is_named(server: ApiServer) -> None:
    populate(server, 2)
    server.faults.rules = []
    found = await look(access(server), service="epp")
    assert len(found) == 2
    assert not server.asked(SLICES, watch=False)


async def follows_the_hints(server: ApiServer, found: list[Finding], rounds: int) -> None:
    """Who adds the rules that the hints name is done after so many rounds."""
    rules = server.faults.rules
    assert rules is not None
    for _ in range(rounds):
        for each in found:
            for rule in re.findall(r"the rule (apiGroups: .*?, verbs: \[.*?\])", each.hint):
                rules.append(msgspec.yaml.decode(f"{{{rule}}}"))
        found = await look(access(server))
    assert [each for each in found if each.level == "failed"] == []


async def test_says_nothing_to_the_log(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.faults.forbidden = {POOLS}
    await look(access(server))
    assert "kubernetes-problem" not in "".join(capsys.readouterr())


async def test_of_a_pool_that_is_not_there_and_a_missing_right(server: ApiServer) -> None:
    server.faults.forbidden = {PODS}
    found = await look(access(server))
    assert [each.what for each in found] == [
        "0 ready endpoints",
        "InferencePool default/qwen does not exist",
        "not allowed to list pods in namespace default",
    ]


async def test_of_a_pool_without_pods(server: ApiServer) -> None:
    populate(server, 0)
    found = await look(access(server), service="epp")
    assert [(each.level, each.what) for each in found] == [("failed", "0 ready endpoints")]


async def test_of_a_server_that_does_not_answer(server: ApiServer) -> None:
    server.faults.mute = True
    (found,) = await look(access(server), timeout_s=0.3)
    assert found.level == "failed"
    assert "did not answer within 0.3 s" in found.what


async def test_of_no_cluster(tmp_path: Path) -> None:
    nowhere = ClusterAccess(environ={}, service_account=tmp_path)
    (found,) = await look(nowhere)
    assert found.level == "ok"
    assert "signals.epp.urls" in found.hint
