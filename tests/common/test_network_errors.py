"""Network errors are described in the same words, whichever client library raised them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import trustme

from dispatcher.common.network_errors import (
    describe_error,
    describe_error_with_address,
    is_connection_refused,
    is_connection_reset,
)
from tests.support import free_port

Client = Callable[[str], Awaitable[Any]]


async def connect_with_asyncio(url: str) -> None:
    address = httpx.URL(url)
    tls = ssl.create_default_context() if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    try:
        await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.transport.abort()


async def get_with_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url):
        pass


async def get_with_requests(url: str) -> None:
    await asyncio.to_thread(requests.get, url, timeout=5)


async def catch_error(client: Client, url: str) -> Exception:
    try:
        await client(url)
    except Exception as error:
        return error
    raise AssertionError("the request was answered")


CLIENTS = [connect_with_asyncio, get_with_aiohttp, get_with_requests]


@pytest.mark.parametrize("client", CLIENTS)
async def test_refused_connection_is_described_alike_for_each_client(client: Client) -> None:
    error = await catch_error(client, f"http://127.0.0.1:{free_port()}")
    assert describe_error(error) == "connection refused"


async def test_error_of_several_addresses_shows_one_reason() -> None:
    assert (
        describe_error(await catch_error(connect_with_asyncio, f"http://localhost:{free_port()}"))
        == "connection refused"
    )


@pytest.mark.parametrize("client", CLIENTS)
async def test_unknown_host_name_is_described_alike_for_each_client(client: Client) -> None:
    error = await catch_error(client, "http://no-such-host.invalid:80")
    assert describe_error(error).startswith("the name cannot be resolved (")


@pytest.mark.parametrize("client", CLIENTS)
async def test_certificate_of_unknown_authority_is_described_alike_for_each_client(client: Client) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(tls)

    async def close_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close_connection, "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await catch_error(client, f"https://localhost:{port}/")
    assert describe_error(error) == "its certificate is not trusted: unable to get local issuer certificate"


async def test_answer_that_is_not_http_is_described_without_the_url() -> None:
    async def answer_like_ssh(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_like_ssh, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await catch_error(get_with_aiohttp, f"http://127.0.0.1:{port}/?token=sesame")
    assert describe_error(error).startswith("the answer is not HTTP")
    assert "sesame" not in describe_error(error)


async def test_description_begins_with_the_address_if_the_error_names_one() -> None:
    port = free_port()
    error = await catch_error(get_with_aiohttp, f"http://127.0.0.1:{port}")
    assert describe_error_with_address(error) == f"127.0.0.1:{port}: connection refused"
    assert describe_error_with_address(OSError("some")) == "some"


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (TimeoutError(), "no answer in time"),
        (asyncio.IncompleteReadError(b"", None), "the connection was closed"),
        (
            socket.gaierror(-2, "Name or service not known"),
            "the name cannot be resolved (Name or service not known)",
        ),
        (ValueError("one\n  line"), "one line"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 1000), "x" * 200),
    ],
)
def test_other_errors_are_described_in_one_line(error: Exception, description: str) -> None:
    assert describe_error(error) == description


def test_error_of_a_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        (tmp_path / "none").read_text()
    assert describe_error(raised.value) == f"{tmp_path / 'none'}: no such file or directory"


def test_errors_that_cause_each_other_are_followed_only_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert describe_error(one) == "one"


REFUSED_TEXT = "[Errno 111] Connect call failed"


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (OSError(f"Multiple exceptions: {REFUSED_TEXT} ('::1', 1), {REFUSED_TEXT} ('127.0.0.1', 1)"), True),
        (OSError(f"Multiple exceptions: {REFUSED_TEXT} ('::1', 1), [Errno 113] no route"), False),
        (ConnectionResetError(104, "reset"), False),
        (TimeoutError(), False),
        (socket.gaierror(-2, "unknown"), False),
        (ssl.SSLError(1, "handshake"), False),
        (ValueError("[Errno 111] is only a word here"), False),
    ],
)
def test_connection_counts_as_refused_only_if_every_address_refused_it(
    error: Exception, refused: bool
) -> None:
    assert is_connection_refused(error) is refused
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert is_connection_refused(wrapped) is refused


@pytest.mark.parametrize(
    ("error", "is_reset"),
    [
        (ConnectionResetError("Connection lost"), True),
        (aiohttp.ClientOSError(104, "Connection reset by peer"), True),
        (ConnectionRefusedError(111, "refused"), False),
        (aiohttp.ServerDisconnectedError(), False),
        (ValueError("connection reset by peer"), False),
    ],
)
def test_connection_counts_as_reset_only_if_the_system_says_so(error: Exception, is_reset: bool) -> None:
    assert is_connection_reset(error) is is_reset
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert is_connection_reset(wrapped) is is_reset
