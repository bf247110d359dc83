"""What goes wrong with a peer is told in the same words, whichever client library met it."""

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

from dispatcher.core.network_errors import describe_error, describe_error_with_address, is_connection_refused
from tests.support import free_port

Ask = Callable[[str], Awaitable[Any]]


async def by_asyncio(url: str) -> None:
    address = httpx.URL(url)
    tls = ssl.create_default_context() if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    try:
        await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.transport.abort()


async def by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url):
        pass


async def by_requests(url: str) -> None:
    await asyncio.to_thread(requests.get, url, timeout=5)


async def error_of(ask: Ask, url: str) -> Exception:
    try:
        await ask(url)
    except Exception as error:
        return error
    raise AssertionError("it was answered")


CLIENTS = [by_asyncio, by_aiohttp, by_requests]


@pytest.mark.parametrize("ask", CLIENTS)
async def test_a_refused_connection(ask: Ask) -> None:
    error = await error_of(ask, f"http://127.0.0.1:{free_port()}")
    assert describe_error(error) == "connection refused"


async def test_several_addresses_of_a_name_have_one_reason() -> None:
    assert (
        describe_error(await error_of(by_asyncio, f"http://localhost:{free_port()}")) == "connection refused"
    )


@pytest.mark.parametrize("ask", CLIENTS)
async def test_a_name_that_nobody_knows(ask: Ask) -> None:
    error = await error_of(ask, "http://no-such-host.invalid:80")
    assert describe_error(error).startswith("the name cannot be resolved (")


@pytest.mark.parametrize("ask", CLIENTS)
async def test_a_certificate_of_an_authority_that_nobody_knows(ask: Ask) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(tls)

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        error = await error_of(ask, f"https://localhost:{port}/")
    assert describe_error(error) == "its certificate is not trusted: unable to get local issuer certificate"


async def test_what_is_no_http_is_told_without_the_url_that_may_hold_secrets() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        error = await error_of(by_aiohttp, f"http://127.0.0.1:{port}/?token=sesame")
    assert describe_error(error).startswith("the answer is not HTTP")
    assert "sesame" not in describe_error(error)


async def test_an_address_stands_before_it_where_the_error_names_one() -> None:
    port = free_port()
    error = await error_of(by_aiohttp, f"http://127.0.0.1:{port}")
    assert describe_error_with_address(error) == f"127.0.0.1:{port}: connection refused"
    assert describe_error_with_address(OSError("some")) == "some"


@pytest.mark.parametrize(
    ("error", "told"),
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
def test_other_errors(error: Exception, told: str) -> None:
    assert describe_error(error) == told


def test_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        (tmp_path / "none").read_text()
    assert describe_error(raised.value) == f"{tmp_path / 'none'}: no such file or directory"


def test_errors_that_cause_each_other_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert describe_error(one) == "one"


REFUSED = "[Errno 111] Connect call failed"


@pytest.mark.parametrize(
    ("error", "nobody"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (OSError(f"Multiple exceptions: {REFUSED} ('::1', 1), {REFUSED} ('127.0.0.1', 1)"), True),
        (OSError(f"Multiple exceptions: {REFUSED} ('::1', 1), [Errno 113] no route"), False),
        (ConnectionResetError(104, "reset"), False),
        (TimeoutError(), False),
        (socket.gaierror(-2, "unknown"), False),
        (ssl.SSLError(1, "handshake"), False),
        (ValueError("[Errno 111] is only a word here"), False),
    ],
)
def test_nobody_listens_only_where_every_address_has_refused(error: Exception, nobody: bool) -> None:
    assert is_connection_refused(error) is nobody
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert is_connection_refused(wrapped) is nobody
