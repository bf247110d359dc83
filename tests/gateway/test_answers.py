"""Answers are read completely in every form, within the limit, and classified."""

from __future__ import annotations

import asyncio
import gzip
import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    Outcome,
    Overloaded,
    TooLarge,
)
from tests.gateway.scripted_server import Connection, Script, a_request, always, forward, outcome, serving
from tests.overload_bodies import SGLANG_OVERLOADED
from tests.support import wait_until

MakeGateway = Callable[..., HttpGateway]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"body": b'{"a":1}'}, Delivered(200, b'{"a":1}')),
        ({"body": b"", "status": "204 No Content"}, Delivered(204, b"")),
        ({"body": b"\xff\x00not text"}, Delivered(200, b"\xff\x00not text")),
        ({"body": b"bad", "status": "422 Unprocessable"}, Delivered(422, b"bad")),
        (
            {"status": "429 Too Many", "headers": "X-LLM-D-Request-Dropped-Reason: evicted; x\r\n"},
            Evicted(429, "evicted; x"),
        ),
        (
            {"body": SGLANG_OVERLOADED, "status": "503 Busy", "headers": "retry-after: 3\r\n"},
            Overloaded(503, "server-full", is_out_of_capacity=True, retry_after_s=3.0),
        ),
        (
            {
                "body": b"data: " + SGLANG_OVERLOADED + b"\n\n",
                "headers": "content-type: text/event-stream\r\n",
            },
            Overloaded(200, "server-full", is_out_of_capacity=True),
        ),
        (
            {"body": b"", "status": "503 Busy", "headers": "retry-after: 3\r\n"},
            Failed("the gateway answered 503", 503, b"", is_intermediary_error=True, retry_after_s=3.0),
        ),
        (
            {"body": b"", "status": "404 Not Found"},
            Failed(
                "the gateway answered 404 with an empty body: it has no such route",
                404,
                is_intermediary_error=True,
                kind=FailureKind.NO_ROUTE,
            ),
        ),
    ],
)
async def test_answer_has_the_outcome_that_the_core_decides(
    gateway_to: MakeGateway, answer: dict[str, Any], expected: Outcome
) -> None:
    async with serving(always(**answer)) as server:
        assert await outcome(gateway_to(server.url)) == expected


async def test_redirect_is_not_followed(gateway_to: MakeGateway) -> None:
    async with serving(always()) as elsewhere:
        location = f"location: {elsewhere.url}/v1/completions\r\n"
        async with serving(always(status="307 Temporary Redirect", headers=location)) as server:
            found = await outcome(gateway_to(server.url))
        assert isinstance(found, Failed)
        assert found.kind is FailureKind.REDIRECT
        assert elsewhere.url in found.why
        assert not elsewhere.connections


async def test_times_of_sending_and_of_the_end_are_reported(gateway_to: MakeGateway) -> None:
    now = asyncio.get_running_loop().time
    async with serving(always()) as server:
        gateway = gateway_to(server.url)
        before = now()
        forwarded = await forward(gateway)
        assert before <= forwarded.sent_at <= forwarded.ended_at <= now()


async def test_stream_of_events_in_slow_pieces_is_read_completely(gateway_to: MakeGateway) -> None:
    events = [f'data: {{"text":"{n} 🙂"}}\n\n'.encode() for n in range(50)] + [b"data: [DONE]\n\n"]

    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for event in events:
            for piece in (event[:7], event[7:]):  # some pieces end inside a character
                connection.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await connection.writer.drain()
                await asyncio.sleep(0)
        connection.writer.write(b"0\r\n\r\n")
        await connection.wait_until_closed()

    async with serving(script) as server:
        assert await outcome(gateway_to(server.url)) == Delivered(200, b"".join(events))


async def test_body_that_ends_with_its_connection_is_read_completely(gateway_to: MakeGateway) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 100_000)
        await connection.writer.drain()

    async with serving(script) as server:
        assert await outcome(gateway_to(server.url)) == Delivered(200, b"x" * 100_000)


async def test_sixteen_megabytes_are_sent_and_received(gateway_to: MakeGateway) -> None:
    body = os.urandom(16 << 20)
    async with serving(always(body=body)) as server:
        payload = b'{"a":"' + b"x" * (16 << 20) + b'"}'
        assert await outcome(gateway_to(server.url), a_request(payload)) == Delivered(200, body)
    assert server.received[0].body == payload


BODY = b'{"text":"' + b"abc " * 5000 + b'"}'


def gzipped(data: bytes, level: int = 9) -> bytes:
    return gzip.compress(data, level, mtime=0)


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzipped(BODY)),
        ("GZIP", gzipped(BODY)),
        ("x-gzip", gzipped(BODY)),
        ("gzip", gzipped(BODY[:100]) + gzipped(BODY[100:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", bare_deflate(BODY)),
        ("deflate, gzip", gzipped(zlib.compress(BODY))),
        ("identity", BODY),
        ("", BODY),
    ],
    ids=["gzip", "upper", "x", "members", "zlib", "bare", "twice", "identity", "empty"],
)
async def test_compressed_body_is_decompressed_although_it_was_not_requested(
    gateway_to: MakeGateway, encoding: str, packed: bytes
) -> None:
    async with serving(always(body=packed, headers=f"content-encoding: {encoding}\r\n")) as server:
        assert await outcome(gateway_to(server.url)) == Delivered(200, BODY)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzipped(BODY)[:-12]),
        ("gzip", BODY),
        ("gzip", gzipped(BODY) + b"junk"),
        ("deflate", BODY),
        ("br", b"whatever"),
        ("zstd", b"whatever"),
    ],
    ids=["cut", "not gzip", "junk after it", "not deflate", "br", "zstd"],
)
async def test_compressed_body_that_cannot_be_decompressed_is_a_failure(
    gateway_to: MakeGateway, encoding: str, packed: bytes
) -> None:
    async with serving(always(body=packed, headers=f"content-encoding: {encoding}\r\n")) as server:
        found = await outcome(gateway_to(server.url))
    assert isinstance(found, Failed)
    assert "content-encoding" in found.why


LIMIT = 100_000
BOMB = gzipped(b"x" * (16 << 20), 1)


def chunked(total: int | None) -> Script:
    """Return a script that sends a body without a length. It never ends if `total` is None."""

    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while total is None or sent < total:
                size = 1000 if total is None else min(1000, total - sent)
                connection.writer.write(b"%x\r\n%b\r\n" % (size, b"x" * size))
                await connection.writer.drain()
                sent += size
            connection.writer.write(b"0\r\n\r\n")
        finally:
            await connection.wait_until_closed()

    return script


@pytest.mark.parametrize(
    ("script", "fits"),
    [
        (always(body=b"x" * LIMIT), True),
        (always(body=b"x" * (LIMIT + 1)), False),
        (always(body=b"x" * (LIMIT + 1), status="500 Internal"), False),
        (chunked(LIMIT), True),
        (chunked(LIMIT + 1), False),
        (chunked(None), False),
        (always(body=gzipped(b"x" * LIMIT), headers="content-encoding: gzip\r\n"), True),
        (always(body=gzipped(b"x" * (LIMIT + 1)), headers="content-encoding: gzip\r\n"), False),
        (always(body=BOMB, headers="content-encoding: gzip\r\n"), False),
        (
            always(
                body=b"".join(gzipped(b"x" * LIMIT) for _ in range(3)),
                headers="content-encoding: gzip\r\n",
            ),
            False,
        ),
    ],
    ids=[
        "length",
        "length+1",
        "error",
        "chunked",
        "chunked+1",
        "endless",
        "gzip",
        "gzip+1",
        "bomb",
        "members",
    ],
)
async def test_answer_larger_than_the_limit_is_too_large(
    gateway_to: MakeGateway, script: Script, fits: bool
) -> None:
    async with serving(script) as server:
        found = await outcome(gateway_to(server.url, max_response_bytes=LIMIT))
    if fits:
        assert found == Delivered(200, b"x" * LIMIT)
    else:
        assert isinstance(found, TooLarge)
        assert found.limit_bytes == LIMIT


async def test_answer_announced_as_too_large_is_not_read(gateway_to: MakeGateway) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\nx")
        await connection.wait_until_closed()

    async with serving(script) as server:
        assert await outcome(gateway_to(server.url)) == TooLarge(200, 33554432)
        await wait_until(server.client_closed.is_set, what="the connection to be closed")


async def test_connection_is_kept_after_a_complete_answer_only(
    gateway_to: MakeGateway,
) -> None:
    answers = [b"x" * 10, b"x" * (8 << 20), b"x" * 10, b"x" * 10]

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            await connection.answer(answers.pop(0))

    async with serving(script) as server:
        gateway = gateway_to(server.url, max_response_bytes=10)
        found = [await outcome(gateway) for _ in range(4)]
    assert [type(each) for each in found] == [Delivered, TooLarge, Delivered, Delivered]
    assert len(server.connections) == 2
