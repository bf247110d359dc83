"""Direct scrape of an endpoint picker, against a server with the faults of networks and pickers."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from dispatcher.limit.budget import Reason
from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.scrape import Targets
from tests.signals import fakes
from tests.signals.fakes import (
    PLAIN_TEXT_HEAD,
    FakeEpp,
    answering,
    fake_epp,
    http_answer,
    raw_server,
    read_page,
)
from tests.support import free_port


@pytest.fixture
async def epp() -> AsyncIterator[FakeEpp]:
    async with fake_epp() as server:
        yield server


async def poll_once(*urls: str, **options: Any) -> tuple[PoolView, ...] | ReadFailure:
    """Poll a new source once."""
    targets = options.pop("targets", Targets(urls=urls))
    source = EppSource("qwen", targets, **{"timeout_s": fakes.ANSWER_TIMEOUT_S, **options})
    source.set_replicas(options.get("found"))
    try:
        return await source.poll()
    finally:
        await source.close()


async def poll_failure(*urls: str, **options: Any) -> ReadFailure:
    result = await poll_once(*urls, **options)
    assert isinstance(result, ReadFailure), result
    assert result.reason is Reason.UNREADABLE
    return result


async def poll_single_view(*urls: str, **options: Any) -> PoolView:
    result = await poll_once(*urls, **options)
    assert not isinstance(result, ReadFailure), result
    (single_view,) = result
    return single_view


async def test_view_is_dated_from_the_start_to_the_end_of_the_scrape(epp: FakeEpp) -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()
    result = await poll_single_view(epp.url)
    assert before <= result.opened_at <= epp.requested_at[0] <= result.closed_at <= loop.time()
    assert (result.saturation, result.queued, result.ready) == (0.4, 12, 4)
    assert (result.address, result.started_at) == (f"127.0.0.1:{epp.port}", 1.76386e9)


async def test_url_without_a_path_gets_the_path_metrics(epp: FakeEpp) -> None:
    await poll_single_view(epp.url)
    await poll_single_view(f"{epp.url}/federate?match=x")
    assert [request.path_qs for request in epp.requests] == ["/metrics", "/federate?match=x"]


async def test_connection_is_kept_between_scrapes(epp: FakeEpp) -> None:
    source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=fakes.ANSWER_TIMEOUT_S)
    ports = set()
    for _ in range(3):
        assert not isinstance(await source.poll(), ReadFailure)
        ports.add(epp.requests[-1].transport.get_extra_info("peername"))  # type: ignore[union-attr]
    await source.close()
    assert len(ports) == 1


async def test_token_file_is_read_for_each_scrape(epp: FakeEpp, tmp_path: Path) -> None:
    token = tmp_path / "token"
    source = EppSource(
        "qwen", Targets(urls=(epp.url,)), timeout_s=fakes.ANSWER_TIMEOUT_S, token_file=str(token)
    )
    for text in ("first\n", "second"):
        token.write_text(text)
        assert not isinstance(await source.poll(), ReadFailure)
    await source.close()
    assert [request.headers["Authorization"] for request in epp.requests] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("text", [None, "", "two words", "line\nbreak", "ünicode"])
async def test_unusable_token_file_is_a_failure_and_no_request_is_sent(
    epp: FakeEpp, tmp_path: Path, text: str | None
) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    result = await poll_failure(epp.url, token_file=str(token))
    assert str(token) in result.why
    assert result.hint == "signals.epp.token_file"
    assert not epp.requests


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "signals.epp.token_file"), (403, "token_file"), (404, "path"), (302, "urls"), (500, "")],
)
async def test_http_error_is_reported_with_a_hint(epp: FakeEpp, status: int, hint: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(
            status=status, headers={"Location": f"{epp.url}/elsewhere"}, text=read_page("replica-a")
        )

    epp.respond = refuse
    result = await poll_failure(epp.url)
    assert f"HTTP {status}" in result.why
    assert hint in result.hint
    assert len(epp.requests) == 1


async def test_403_with_a_token_names_the_role_to_add(epp: FakeEpp, tmp_path: Path) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=403)

    (tmp_path / "token").write_text("t")
    epp.respond = refuse
    assert "nonResourceURLs" in (await poll_failure(epp.url, token_file=str(tmp_path / "token"))).hint


@pytest.mark.parametrize("kind", ["text", "openmetrics", "gzip", "chunked"])
async def test_every_encoding_of_the_page_gives_the_same_view(epp: FakeEpp, kind: str) -> None:
    page = read_page("replica-a").encode()

    async def respond(request: web.Request) -> web.StreamResponse:
        if kind == "openmetrics":
            return web.Response(
                body=page + b"# EOF\n",
                headers={"Content-Type": "application/openmetrics-text; version=1.0.0; charset=utf-8"},
            )
        if kind == "gzip":
            return web.Response(body=gzip.compress(page), headers={"Content-Encoding": "gzip"})
        response = web.StreamResponse()
        if kind == "chunked":
            response.enable_chunked_encoding()
        await response.prepare(request)
        for at in range(0, len(page), 700):
            await response.write(page[at : at + 700])
        return response

    epp.respond = respond
    assert (await poll_single_view(epp.url)).queued == 12


SERVER_FAULTS = {
    "refused": (None, "refused"),
    "reset": (fakes.resetting, ""),
    "hanging": (fakes.hanging, "no whole answer within"),
    "never-ending": (fakes.dripping(PLAIN_TEXT_HEAD + b"\r\n", 0.1), "no whole answer within"),
    "not HTTP": (answering(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), ""),
    "cut short": (
        answering(PLAIN_TEXT_HEAD + b"Content-Length: 9999\r\n\r\nllm_d_epp_ready_endpoints 4\n"),
        "",
    ),
    "cut chunked": (
        answering(
            PLAIN_TEXT_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1d\r\nllm_d_epp_ready_endpoints 4\n\r\n"
        ),
        "",
    ),
    "cut within a line": (answering(http_answer(b"llm_d_epp_ready_endpoints 1")), "ends within a line"),
    "empty": (answering(http_answer(b"")), "none of the endpoint picker's series"),
    "web page": (
        answering(http_answer(b"<html>\n<h1>welcome</h1>\n</html>\n")),
        "none of the endpoint picker's series",
    ),
    "garbage": (answering(http_answer(bytes(range(256)) * 50)), ""),
    "not gzip": (answering(http_answer(b"hello", b"Content-Encoding: gzip")), "broken gzip"),
    "half gzip": (
        answering(
            http_answer(gzip.compress(b"llm_d_epp_ready_endpoints 4\n" * 99)[:-20], b"Content-Encoding: gzip")
        ),
        "ends too early",
    ),
    "brotli": (answering(http_answer(b"x", b"Content-Encoding: br")), "coding"),
    "broken labels": (answering(http_answer(b'llm_d_epp_ready_endpoints{name="qwen 4\n')), "malformed"),
    "another pool": (answering(http_answer(b'llm_d_epp_ready_endpoints{name="llama"} 4\n')), "pool llama"),
}


@pytest.mark.parametrize("fault", SERVER_FAULTS)
async def test_every_server_fault_is_a_failure_with_a_sentence(fault: str) -> None:
    handler, why = SERVER_FAULTS[fault]
    if handler is None:
        assert why in (await poll_failure(f"http://127.0.0.1:{free_port()}")).why
        return
    async with raw_server(handler) as port:
        result = await poll_failure(f"http://127.0.0.1:{port}", timeout_s=fakes.timeout_for(fault))
    assert result.why.startswith(f"127.0.0.1:{port}: ")
    assert len(result.why) > len(f"127.0.0.1:{port}: ")
    assert why in result.why


async def test_page_that_is_too_large_is_a_failure(epp: FakeEpp) -> None:
    """The limit applies to the plain and to the decompressed page: four kilobytes of gzip hold four
    megabytes."""
    page = b"noise 1\n" * 500_000
    packed = gzip.compress(page)

    async def respond(request: web.Request) -> web.Response:
        if request.path == "/plain":
            return web.Response(body=page)
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    epp.respond = respond
    for path in ("plain", "packed"):
        assert (
            "larger than 1000000 bytes"
            in (await poll_failure(f"{epp.url}/{path}", page_max_bytes=1_000_000)).why
        )


async def test_unreachable_replica_is_a_failure(epp: FakeEpp) -> None:
    """Requests that wait in that replica are unknown, whatever the others show."""
    result = await poll_failure(epp.url, f"http://127.0.0.1:{free_port()}")
    assert "refused" in result.why


async def test_page_with_only_build_information_is_an_idle_replica(epp: FakeEpp) -> None:
    """Such a replica waits to be elected leader. A page without even that is not a picker's."""
    async with fake_epp() as standby:
        standby.page = '# TYPE llm_d_epp_info gauge\nllm_d_epp_info{commit="1",build_ref="v1"} 1\n'
        result = await poll_once(epp.url, standby.url)
        assert not isinstance(result, ReadFailure)
        assert [each.is_idle for each in result] == [False, True]
        standby.page = "up 1\n"
        assert "none of the endpoint picker's series" in (await poll_failure(epp.url, standby.url)).why


async def test_replicas_are_scraped_at_the_same_time(epp: FakeEpp) -> None:
    """Each replica delays its answer until the other has been scraped."""
    both = asyncio.Event()

    async def respond(_: web.Request) -> web.Response:
        if len(epp.requests) == 2:
            both.set()
        await both.wait()
        return web.Response(text=epp.page)

    epp.respond = respond
    result = await poll_once(f"{epp.url}/a", f"{epp.url}/b")
    assert not isinstance(result, ReadFailure)
    assert len(result) == 2


async def test_each_address_of_a_service_is_scraped(epp: FakeEpp) -> None:
    result = await poll_single_view(targets=Targets(service="localhost", port=epp.port))
    assert result.ready == 4
    assert [request.path for request in epp.requests] == ["/metrics"]


async def test_service_name_that_does_not_resolve_is_a_failure_with_a_hint() -> None:
    result = await poll_failure(targets=Targets(service="epp.invalid"))
    assert "epp.invalid" in result.why
    assert result.hint == "signals.epp.service"


async def test_replicas_of_the_watch_are_scraped_at_the_metrics_port(epp: FakeEpp) -> None:
    source = EppSource("qwen", Targets(port=epp.port), timeout_s=fakes.ANSWER_TIMEOUT_S)
    nothing = await source.poll()
    assert isinstance(nothing, ReadFailure)
    assert "signals.epp.urls" in nothing.hint
    source.set_replicas(("127.0.0.1", f"127.0.0.1:{epp.port}"))
    result = await source.poll()
    assert not isinstance(result, ReadFailure)
    assert len(result) == 2
    source.set_replicas(())
    gone = await source.poll()
    await source.close()
    assert isinstance(gone, ReadFailure)
    assert "no ready pod" in gone.why


@pytest.mark.parametrize(
    "handler",
    [
        fakes.resetting,
        answering(b"SSH-2.0-x\r\n\r\n"),
        answering(PLAIN_TEXT_HEAD + b"Content-Length: 9\r\n\r\n"),
    ],
)
async def test_secrets_of_a_url_are_not_in_the_failure(handler: Any) -> None:
    async with raw_server(handler) as port:
        result = await poll_failure(f"http://user:secret@127.0.0.1:{port}/?token=secret")
    assert "secret" not in result.why


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999", "http://"])
async def test_invalid_url_is_a_failure_with_a_sentence(url: str) -> None:
    assert (await poll_failure(url)).why


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def test_tls_with_a_private_authority(authority: trustme.CA) -> None:
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    async with fake_epp(tls=server) as epp:
        by_name = Targets(service="localhost", port=epp.port, is_secure=True)
        assert (await poll_single_view(targets=by_name, tls=client)).ready == 4
        assert (await poll_single_view(f"https://localhost:{epp.port}", tls=client)).ready == 4
        assert "not trusted" in (await poll_failure(targets=by_name)).why
        assert (
            "not trusted" in (await poll_failure(epp.url, tls=client)).why
        )  # the certificate does not name the address
        assert (await poll_failure(f"http://localhost:{epp.port}", tls=client)).why
