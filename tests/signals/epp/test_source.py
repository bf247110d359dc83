"""Direct scrape against a server that does everything a network and an endpoint picker can do."""

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

from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.scrape import Targets
from tests.signals import fakes
from tests.signals.fakes import PLAIN, FakeEpp, answering, fake_epp, golden, raw_server, whole
from tests.support import free_port


@pytest.fixture
async def epp() -> AsyncIterator[FakeEpp]:
    async with fake_epp() as server:
        yield server


async def poll(*urls: str, **options: Any) -> tuple[PoolView, ...] | ReadFailure:
    """One poll of a source made for it."""
    targets = options.pop("targets", Targets(urls=urls))
    source = EppSource("qwen", targets, **{"timeout_s": fakes.PATIENT_S, **options})
    source.set_replicas(options.get("found"))
    try:
        return await source.poll()
    finally:
        await source.close()


async def unread(*urls: str, **options: Any) -> ReadFailure:
    seen = await poll(*urls, **options)
    assert isinstance(seen, ReadFailure), seen
    assert seen.reason is Reason.UNREADABLE
    return seen


async def view(*urls: str, **options: Any) -> PoolView:
    seen = await poll(*urls, **options)
    assert not isinstance(seen, ReadFailure), seen
    (only,) = seen
    return only


async def test_a_scrape_is_dated_from_its_start_to_its_end(epp: FakeEpp) -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()
    seen = await view(epp.url)
    assert before <= seen.opened_at <= epp.asked_at[0] <= seen.closed_at <= loop.time()
    assert (seen.saturation, seen.queued, seen.ready) == (0.4, 12, 4)
    assert (seen.address, seen.started_at) == (f"127.0.0.1:{epp.port}", 1.76386e9)


async def test_a_url_without_a_path_means_metrics(epp: FakeEpp) -> None:
    await view(epp.url)
    await view(f"{epp.url}/federate?match=x")
    assert [request.path_qs for request in epp.requests] == ["/metrics", "/federate?match=x"]


async def test_the_connection_is_kept_between_scrapes(epp: FakeEpp) -> None:
    source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=fakes.PATIENT_S)
    ports = set()
    for _ in range(3):
        assert not isinstance(await source.poll(), ReadFailure)
        ports.add(epp.requests[-1].transport.get_extra_info("peername"))  # type: ignore[union-attr]
    await source.close()
    assert len(ports) == 1


async def test_the_token_is_read_again_for_each_scrape(epp: FakeEpp, tmp_path: Path) -> None:
    token = tmp_path / "token"
    source = EppSource("qwen", Targets(urls=(epp.url,)), timeout_s=fakes.PATIENT_S, token_file=str(token))
    for text in ("first\n", "second"):
        token.write_text(text)
        assert not isinstance(await source.poll(), ReadFailure)
    await source.close()
    assert [request.headers["Authorization"] for request in epp.requests] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("text", [None, "", "two words", "line\nbreak", "ünicode"])
async def test_a_useless_token_file_is_not_sent(epp: FakeEpp, tmp_path: Path, text: str | None) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    seen = await unread(epp.url, token_file=str(token))
    assert str(token) in seen.why
    assert seen.hint == "signals.epp.token_file"
    assert not epp.requests


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "signals.epp.token_file"), (403, "token_file"), (404, "path"), (302, "urls"), (500, "")],
)
async def test_a_refusal_says_what_mends_it(epp: FakeEpp, status: int, hint: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(
            status=status, headers={"Location": f"{epp.url}/elsewhere"}, text=golden("replica-a")
        )

    epp.respond = refuse
    seen = await unread(epp.url)
    assert f"HTTP {status}" in seen.why
    assert hint in seen.hint
    assert len(epp.requests) == 1


async def test_with_a_token_a_403_names_the_role_to_add(epp: FakeEpp, tmp_path: Path) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=403)

    (tmp_path / "token").write_text("t")
    epp.respond = refuse
    assert "nonResourceURLs" in (await unread(epp.url, token_file=str(tmp_path / "token"))).hint


@pytest.mark.parametrize("kind", ["text", "openmetrics", "gzip", "chunked"])
async def test_every_form_of_the_page_reads_the_same(epp: FakeEpp, kind: str) -> None:
    page = golden("replica-a").encode()

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
    assert (await view(epp.url)).queued == 12


BROKEN = {
    "refused": (None, "refused"),
    "reset": (fakes.resetting, ""),
    "hanging": (fakes.hanging, "no whole answer within"),
    "never-ending": (fakes.dripping(PLAIN + b"\r\n", 0.1), "no whole answer within"),
    "not HTTP": (answering(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), ""),
    "cut short": (answering(PLAIN + b"Content-Length: 9999\r\n\r\nllm_d_epp_ready_endpoints 4\n"), ""),
    "cut chunked": (
        answering(PLAIN + b"Transfer-Encoding: chunked\r\n\r\n1d\r\nllm_d_epp_ready_endpoints 4\n\r\n"),
        "",
    ),
    "cut within a line": (answering(whole(b"llm_d_epp_ready_endpoints 1")), "ends within a line"),
    "empty": (answering(whole(b"")), "none of the endpoint picker's series"),
    "web page": (
        answering(whole(b"<html>\n<h1>welcome</h1>\n</html>\n")),
        "none of the endpoint picker's series",
    ),
    "garbage": (answering(whole(bytes(range(256)) * 50)), ""),
    "not gzip": (answering(whole(b"hello", b"Content-Encoding: gzip")), "broken gzip"),
    "half gzip": (
        answering(
            whole(gzip.compress(b"llm_d_epp_ready_endpoints 4\n" * 99)[:-20], b"Content-Encoding: gzip")
        ),
        "ends too early",
    ),
    "brotli": (answering(whole(b"x", b"Content-Encoding: br")), "coding"),
    "broken labels": (answering(whole(b'llm_d_epp_ready_endpoints{name="qwen 4\n')), "malformed"),
    "another pool": (answering(whole(b'llm_d_epp_ready_endpoints{name="llama"} 4\n')), "pool llama"),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_every_fault_of_a_server_is_a_sentence(fault: str) -> None:
    talk, why = BROKEN[fault]
    if talk is None:
        assert why in (await unread(f"http://127.0.0.1:{free_port()}")).why
        return
    async with raw_server(talk) as port:
        seen = await unread(f"http://127.0.0.1:{port}", timeout_s=fakes.patience_s(fault))
    assert seen.why.startswith(f"127.0.0.1:{port}: ")
    assert len(seen.why) > len(f"127.0.0.1:{port}: ")
    assert why in seen.why


async def test_a_page_may_not_outgrow_its_bound(epp: FakeEpp) -> None:
    """Neither as it is nor unpacked: four kilobytes of gzip hold four megabytes."""
    page = b"noise 1\n" * 500_000
    packed = gzip.compress(page)

    async def respond(request: web.Request) -> web.Response:
        if request.path == "/plain":
            return web.Response(body=page)
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    epp.respond = respond
    for path in ("plain", "packed"):
        assert (
            "larger than 1000000 bytes" in (await unread(f"{epp.url}/{path}", page_max_bytes=1_000_000)).why
        )


async def test_one_silent_replica_hides_its_queue(epp: FakeEpp) -> None:
    """Whatever the others say: what waits in it is not known."""
    seen = await unread(epp.url, f"http://127.0.0.1:{free_port()}")
    assert "refused" in seen.why


async def test_a_page_with_nothing_but_its_build_is_a_replica_that_shows_nothing(epp: FakeEpp) -> None:
    """One that waits to be elected leader; a page without even that is no picker's."""
    async with fake_epp() as standby:
        standby.page = '# TYPE llm_d_epp_info gauge\nllm_d_epp_info{commit="1",build_ref="v1"} 1\n'
        seen = await poll(epp.url, standby.url)
        assert not isinstance(seen, ReadFailure)
        assert [each.is_idle for each in seen] == [False, True]
        standby.page = "up 1\n"
        assert "none of the endpoint picker's series" in (await unread(epp.url, standby.url)).why


async def test_replicas_are_asked_at_the_same_time(epp: FakeEpp) -> None:
    """Each holds its answer back until the other has been asked."""
    both = asyncio.Event()

    async def respond(_: web.Request) -> web.Response:
        if len(epp.requests) == 2:
            both.set()
        await both.wait()
        return web.Response(text=epp.page)

    epp.respond = respond
    seen = await poll(f"{epp.url}/a", f"{epp.url}/b")
    assert not isinstance(seen, ReadFailure)
    assert len(seen) == 2


async def test_a_service_is_every_address_behind_its_name(epp: FakeEpp) -> None:
    seen = await view(targets=Targets(service="localhost", port=epp.port))
    assert seen.ready == 4
    assert [request.path for request in epp.requests] == ["/metrics"]


async def test_a_name_that_does_not_resolve_is_a_sentence() -> None:
    seen = await unread(targets=Targets(service="epp.invalid"))
    assert "epp.invalid" in seen.why
    assert seen.hint == "signals.epp.service"


async def test_what_the_watch_finds_is_asked_on_the_metrics_port(epp: FakeEpp) -> None:
    source = EppSource("qwen", Targets(port=epp.port), timeout_s=fakes.PATIENT_S)
    nothing = await source.poll()
    assert isinstance(nothing, ReadFailure)
    assert "signals.epp.urls" in nothing.hint
    source.set_replicas(("127.0.0.1", f"127.0.0.1:{epp.port}"))
    seen = await source.poll()
    assert not isinstance(seen, ReadFailure)
    assert len(seen) == 2
    source.set_replicas(())
    gone = await source.poll()
    await source.close()
    assert isinstance(gone, ReadFailure)
    assert "no ready pod" in gone.why


@pytest.mark.parametrize(
    "talk",
    [fakes.resetting, answering(b"SSH-2.0-x\r\n\r\n"), answering(PLAIN + b"Content-Length: 9\r\n\r\n")],
)
async def test_secrets_in_a_url_are_not_told(talk: Any) -> None:
    async with raw_server(talk) as port:
        seen = await unread(f"http://user:secret@127.0.0.1:{port}/?token=secret")
    assert "secret" not in seen.why


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999", "http://"])
async def test_a_url_that_is_none_is_a_sentence(url: str) -> None:
    assert (await unread(url)).why


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def test_tls_with_an_own_authority(authority: trustme.CA) -> None:
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    async with fake_epp(tls=server) as epp:
        by_name = Targets(service="localhost", port=epp.port, is_secure=True)
        assert (await view(targets=by_name, tls=client)).ready == 4
        assert (await view(f"https://localhost:{epp.port}", tls=client)).ready == 4
        assert "not trusted" in (await unread(targets=by_name)).why
        assert "not trusted" in (await unread(epp.url, tls=client)).why  # the certificate names no address
        assert (await unread(f"http://localhost:{epp.port}", tls=client)).why
