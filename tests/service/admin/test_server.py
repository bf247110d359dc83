"""The admin port over real sockets: access, live feed, limits and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dispatcher.service.admin import AdminLimits
from dispatcher.service.admin.host_check import is_own_host
from dispatcher.service.admin.stream import MAX_STREAMS
from dispatcher.telemetry.events import Event
from tests.service.admin.stage import Stage, load_settings, write_token
from tests.support import wait_until

PAGE = ("/", "/page.css", "/page.js", "/features.js", "/icon.svg")
DATA = ("/metrics", "/status", "/events")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


class Reader:
    """A client of /events."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.last_id = ""

    async def handle_next(self) -> tuple[str, Any]:
        """Return kind and data of the next message."""
        lines: dict[str, str] = {}
        async with asyncio.timeout(10):
            while "event" not in lines:
                block = await self.answer.content.readuntil(b"\n\n")
                lines = dict(line.split(": ", 1) for line in block.decode().strip().splitlines())
        self.last_id = lines.get("id", self.last_id)
        return lines["event"], json.loads(lines["data"])

    async def until(self, kind: str) -> Any:
        while True:
            found, data = await self.handle_next()
            if found == kind:
                return data


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_every_response_has_security_headers(http: aiohttp.ClientSession) -> None:
    async with Stage().open() as url:
        for path in (*PAGE, *DATA, "/livez", "/readyz", "/nothing"):
            async with http.get(url + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert answer.headers["Cache-Control"] == "no-store"
                assert answer.headers["Server"] == "batch-dispatcher", "no versions"
                assert "Access-Control-Allow-Origin" not in answer.headers


OWN_HOSTS = [
    "127.0.0.1:8080",
    "10.1.2.3",
    "[::1]:8080",
    "[fd00::1]",
    "localhost",
    "LOCALHOST:8080",
    "dispatcher:8080",
    "batch-dispatcher.batch.svc:8080",
    "batch-dispatcher.batch.svc.cluster.local.",
    "10-1-2-3.batch.pod.cluster.local",
    "host.docker.internal:8080",
    "batch.example.com",
    "a.ops.example.com:443",
    "",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:8080",
    "localhost.evil.example.",
    "svc.evil.example",
    "batch.example.com.evil.example",
    "1.2.3.4.5",
    "[::1].evil.example",
]


@pytest.mark.parametrize(
    ("host", "is_own"), [*((each, True) for each in OWN_HOSTS), *((each, False) for each in FOREIGN_HOSTS)]
)
def test_host_that_a_stranger_can_own_is_not_accepted(host: str, is_own: bool) -> None:
    assert is_own_host(host, ("batch.example.com", "*.ops.example.com")) is is_own


@pytest.mark.parametrize("path", [*PAGE, *DATA, "/livez"])
async def test_request_for_another_host_is_refused_unless_a_token_is_needed(
    path: str, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The page of a stranger whose name resolves to this port has no token, but needs none otherwise."""
    for token_file, expected in (("", 403), (write_token(tmp_path, "s"), 401 if path in DATA else 200)):
        async with (
            Stage(token_file=token_file).open() as url,
            http.get(url + path, headers={"Host": "evil.example"}) as answer,
        ):
            assert answer.status == expected


async def test_response_to_invalid_http_reveals_no_versions() -> None:
    async with Stage().open() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nbroken\r\n\r\n")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert b"\r\nServer: batch-dispatcher\r\n" in head


async def test_page_is_small_and_refers_to_no_other_origin(http: aiohttp.ClientSession) -> None:
    async with Stage().open() as url:
        bodies = [await (await http.get(url + path)).text() for path in PAGE]
    assert sum(len(body.encode()) for body in bodies) < 64_000
    for body in bodies:
        assert "//" not in body.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert "<style" not in bodies[0]
    assert " style=" not in bodies[0]
    assert re.search(r"\son\w+\s*=", bodies[0]) is None


async def test_page_and_probes_are_public_and_data_requires_the_token(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    stage = Stage(token_file=write_token(tmp_path, "s3cret\n"))
    async with stage.open() as url:
        for path in (*PAGE, "/livez", "/readyz"):
            assert (await http.get(url + path)).status == 200
        for path in (*DATA, "/nothing"):
            for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": "Basic s3cret"}):
                answer = await http.get(url + path, headers=headers)
                assert (answer.status, await answer.text()) == (401, "a bearer token is needed\n"), path
        for path in DATA:
            assert (await http.get(url + path, headers=bearer("s3cret"))).status == 200
        assert len(stage.feed._streams) == 1


async def test_rotated_token_applies_at_once_even_if_it_is_no_text(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    stage = Stage(token_file=write_token(tmp_path, "old"))
    async with stage.open() as url:
        write_token(tmp_path, "new")
        assert (await http.get(f"{url}/status", headers=bearer("old"))).status == 401
        assert (await http.get(f"{url}/status", headers=bearer("new"))).status == 200
        (tmp_path / "token").write_bytes(b"\xff\xfe\x00")
        assert (await http.get(f"{url}/status", headers=bearer("new"))).status == 401
        assert (
            await said(url, b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n") == 401
        )
        (tmp_path / "token").unlink()
        answer = await http.get(f"{url}/status", headers=bearer("new"))
        assert answer.status == 503
        assert "admin.token_file" in await answer.text()


async def test_token_file_that_is_a_pipe_does_not_block(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    async with Stage(token_file=str(tmp_path / "token")).open() as url:
        answer = await http.get(f"{url}/status", headers=bearer("any"))
        assert answer.status == 503
        assert "admin.token_file cannot be read: it is not a regular file" in await answer.text()
        assert (await http.get(f"{url}/livez")).status == 200


async def test_empty_token_file_denies_access(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with Stage(token_file=write_token(tmp_path, "\n")).open() as url:
        assert (await http.get(f"{url}/status", headers=bearer(""))).status == 401


async def test_feed_continues_where_a_reader_stopped(http: aiohttp.ClientSession) -> None:
    stage = Stage()
    stage.advance_second("open")
    async with stage.open() as url:
        async with http.get(f"{url}/events") as answer:
            assert answer.content_type == "text/event-stream"
            reader = Reader(answer)
            assert (await reader.until("history"))["samples"]["reason"] == ["open"]
            await reader.until("dead")
            stage.advance_second("no-room")
            assert (await reader.until("status"))["reason"] == "no-room"
            stage.feed.record_event(Event.GATE, {"reason": "no-room"})
            assert (await reader.until("event"))["event"] == "gate"
        stage.advance_second("stale")
        async with http.get(f"{url}/events", headers={"Last-Event-ID": reader.last_id}) as answer:
            missed = await Reader(answer).until("history")
    assert (missed["complete"], missed["samples"]["reason"], missed["events"]) == (False, ["stale"], [])


async def test_reader_gets_the_complete_history_of_a_restarted_process(http: aiohttp.ClientSession) -> None:
    before = Stage()
    async with before.open() as url, http.get(f"{url}/events") as answer:
        reader = Reader(answer)
        before.advance_second()
        await reader.until("sample")
    after = Stage(now=before.now + 5)
    after.advance_second("starting")
    async with (
        after.open() as url,
        http.get(f"{url}/events", headers={"Last-Event-ID": reader.last_id}) as answer,
    ):
        told = await Reader(answer).until("history")
    assert (told["complete"], told["samples"]["reason"]) == (True, ["starting"])


async def test_reload_sends_the_settings_with_secrets_masked(http: aiohttp.ClientSession) -> None:
    stage = Stage()
    async with stage.open() as url, http.get(f"{url}/events") as answer:
        reader = Reader(answer)
        await reader.until("settings")
        stage.settings = load_settings("gateway: {url: 'http://u:hunter2@gw'}\nbudget: {reserve: 0.1}\n")
        stage.advance_second(config_generation=2)
        told = await reader.until("settings")
    assert told["settings"]["budget"]["reserve"] == 0.1
    assert "hunter2" not in json.dumps(told)


async def test_too_many_streams_are_refused_with_a_message(http: aiohttp.ClientSession) -> None:
    stage = Stage()
    connector = aiohttp.TCPConnector(limit=0)
    async with stage.open() as url, aiohttp.ClientSession(connector=connector) as many:
        answers = [await many.get(f"{url}/events") for _ in range(MAX_STREAMS)]
        async with http.get(f"{url}/events") as refused:
            assert refused.status == 503
            assert "32 pages" in await refused.text()
        assert (await http.get(f"{url}/status")).status == 200
        answers[0].close()

        async def room() -> bool:
            stage.advance_second()
            async with http.get(f"{url}/events") as answer:
                return answer.status == 200

        await wait_until(room, what="the place of the closed stream")
        for answer in answers:
            answer.close()


async def test_stream_ends_when_its_token_becomes_invalid(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    stage = Stage(token_file=write_token(tmp_path, "old"), limits=AdminLimits(heartbeat_s=0.05))
    async with stage.open() as url, http.get(f"{url}/events", headers=bearer("old")) as answer:
        await Reader(answer).until("status")
        assert await answer.content.readuntil(b": still here\n\n")
        write_token(tmp_path, "new")
        assert await answer.content.read() is not None
        assert len(stage.feed._streams) == 0


async def test_reader_that_reads_nothing_is_dropped() -> None:
    stage = Stage(limits=AdminLimits(write_timeout_s=0.2))
    async with stage.open() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, limit=1024)
        writer.write(f"GET /events HTTP/1.1\r\nHost: {url}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")

        def flooded() -> bool:
            for _ in range(20):
                stage.feed.record_event(Event.INTERNAL_ERROR, {f"f{n}": "x" * 100 for n in range(30)})
            stage.advance_second(explanation="y" * 100_000)
            return len(stage.feed._streams) == 0

        await wait_until(flooded, what="the reader to be dropped")
        writer.close()


async def test_open_streams_do_not_delay_the_shutdown(http: aiohttp.ClientSession) -> None:
    stage = Stage()
    async with stage.open() as url:
        answers = [await http.get(f"{url}/events") for _ in range(5)]
        stuck_reader, stuck = await asyncio.open_connection("127.0.0.1", stage.port, limit=1024)
        stuck.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        await stuck_reader.readuntil(b"\r\n\r\n")
    for answer in answers:
        assert (await answer.content.read()).endswith(b"\n\n"), "the stream is complete, so it was not cut"
    stuck.close()


async def test_stuck_reader_does_not_delay_the_shutdown() -> None:
    stage = Stage()
    loop = asyncio.get_running_loop()
    async with stage.open():
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, limit=1024)
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(30):  # more than all buffers in between can store
            stage.advance_second(explanation="y" * 300_000)
            await asyncio.sleep(0)
        assert len(stage.feed._streams) == 1
        began = loop.time()
    assert loop.time() - began < 30, "the server waits for SHUTDOWN_S, and aiohttp for 60 s by default"
    writer.close()


async def said(url: str, raw: bytes) -> int:
    """Return the status of the response to these bytes."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    async with asyncio.timeout(5):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_admin_port_accepts_no_changes(http: aiohttp.ClientSession, method: str) -> None:
    async with Stage().open() as url:
        for path in (*PAGE, *DATA, "/livez", "/readyz"):
            async with http.request(method, url + path, data=b"{}") as answer:
                assert answer.status == 405, path


async def test_invalid_http_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with Stage().open() as url:
        with caplog.at_level(logging.DEBUG):
            assert await said(url, b"GET / HTTP/1.1\r\nHost: x\r\nbroken\r\n\r\n") == 400
            assert await said(url, b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n") == 400
            assert await said(url, b"GET /" + b"z" * 20_000 + b" HTTP/1.1\r\n\r\n") == 400
            assert await said(url, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5_000 + b"\r\n") == 400
        assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_incomplete_requests_do_not_occupy_connections() -> None:
    async with Stage(limits=AdminLimits(request_timeout_s=0.3)).open() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /livez HTTP/1.1\r\nX: ")
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_last_file_descriptors_are_not_used_for_admin_connections(http: aiohttp.ClientSession) -> None:
    """Each connection costs this process two descriptors: the client's and the server's."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Stage(limits=AdminLimits(reserved_descriptors=40)).open() as url:
        assert (await http.get(f"{url}/livez")).status == 200
        with socket.socket() as lowest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 80, before[1]))
        try:
            strangers = [
                await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(30)
            ]
            await wait_until(
                lambda: sum(reader.at_eof() for reader, _ in strangers) >= 10, what="some to be closed"
            )
            with contextlib.ExitStack() as files:
                for _ in range(20):
                    files.enter_context(socket.socket())
            for _, writer in strangers:
                writer.close()
            assert (await http.get(f"{url}/livez")).status == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_connections_are_bounded_and_idle_ones_are_closed_first(
    http: aiohttp.ClientSession,
) -> None:
    stage = Stage()
    async with stage.open() as url, http.get(f"{url}/events") as live:
        streaming = Reader(live)
        await streaming.until("status")
        idle = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(150)]
        for _, writer in idle:
            writer.write(b"GET /livez HTTP/1.1\r\nX: ")
        assert (await http.get(f"{url}/livez")).status == 200

        def closed() -> int:
            return sum(reader.at_eof() for reader, _ in idle)

        await wait_until(lambda: closed() > 150 - AdminLimits().max_connections, 5, what="the oldest to go")
        stage.advance_second("stale")
        assert (await streaming.until("status"))["reason"] == "stale", "a stream that is read is not idle"
        for _, writer in idle:
            writer.close()
