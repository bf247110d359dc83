"""TLS: servers are verified by default, with the authority and certificate of the settings."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.requests.outcomes.outcome import Delivered, Failed, Unreachable
from tests.gateway.scripted_server import Connection, a_request, always, options, outcome, serving
from tests.support import wait_until

MakeGateway = Callable[..., HttpGateway]


class Authority:
    """A certificate authority and its certificates, as files."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def server(self, *, of: str = "127.0.0.1", demanding: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(of).configure_cert(context)
        if demanding:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_files(self) -> tuple[str, str]:
        issued = self._ca.issue_cert("dispatcher@example.test")
        certificate, key = self._folder / "client.pem", self._folder / "client.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        return str(certificate), str(key)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_certificate_of_the_configured_authority_is_accepted(
    gateway_to: MakeGateway, authority: Authority
) -> None:
    async with serving(always(), authority.server()) as server:
        gateway = gateway_to(server.url, tls={"ca_file": str(authority.file)})
        for _ in range(2):
            assert await outcome(gateway) == Delivered(200, b"{}")
        assert len(server.connections) == 1


@pytest.mark.parametrize("trouble", ["unknown authority", "wrong name", "not tls at all", "no such ca file"])
async def test_server_that_cannot_be_verified_is_unreachable_and_gets_no_request(
    gateway_to: MakeGateway, authority: Authority, trouble: str
) -> None:
    ca_file = "" if trouble == "unknown authority" else str(authority.file)
    if trouble == "no such ca file":
        ca_file += ".gone"
    tls = authority.server(of="elsewhere.example" if trouble == "wrong name" else "127.0.0.1")
    async with serving(always(), None if trouble == "not tls at all" else tls) as server:
        found = await outcome(gateway_to(server.url.replace("http:", "https:"), tls={"ca_file": ca_file}))
        assert isinstance(found, Unreachable), found
        assert not server.received


async def test_verification_can_be_switched_off(gateway_to: MakeGateway, authority: Authority) -> None:
    async with serving(always(), authority.server(of="elsewhere.example")) as server:
        gateway = gateway_to(server.url, tls={"insecure_skip_verify": True})
        assert isinstance(await outcome(gateway), Delivered)


@contextlib.contextmanager
def plain_tls_server(context: ssl.SSLContext) -> Iterator[str]:
    """Run a server without asyncio, which would close without the alert that explains a rejection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.settimeout(10)
                secured = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                try:
                    secured.do_handshake()
                    while b"hi" not in secured.recv(65536):
                        pass
                    secured.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    secured.close()
                except ssl.SSLError:
                    # The alert is sent. Closing now, with the request unread, would send a reset after it.
                    with socket.socket(fileno=secured.detach()) as refused:
                        refused.recv(65536)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


async def test_client_certificate_is_sent_if_the_gateway_asks_for_it(
    gateway_to: MakeGateway, authority: Authority
) -> None:
    certificate, key = authority.client_files()
    with plain_tls_server(authority.server(demanding=True)) as url:
        tls = {"ca_file": str(authority.file)}
        # TLS 1.3 rejects the client only after the connection is made, which is no failure of the request.
        found = await outcome(gateway_to(url, tls=tls))
        assert isinstance(found, Unreachable), found
        shown = gateway_to(url, tls={**tls, "cert_file": certificate, "key_file": key})
        assert isinstance(await outcome(shown), Delivered)


async def test_replaced_authority_applies_to_new_requests_only(
    gateway_to: MakeGateway, authority: Authority, tmp_path: Path
) -> None:
    async def script(connection: Connection) -> None:
        while True:
            received = await connection.receive()
            if received.headers["x-request-id"] == "slow":
                await connection.server.go_on.wait()
            await connection.answer()

    other = Authority(tmp_path, "other")
    async with serving(script, authority.server()) as server, serving(always(), other.server()) as renewed:
        gateway = gateway_to(server.url, tls={"ca_file": str(authority.file)})
        slow = asyncio.create_task(outcome(gateway, a_request(id="slow")))
        await wait_until(lambda: server.received)
        other.file.replace(authority.file)

        async def trusts_the_new_one_alone() -> bool:
            return isinstance(await outcome(gateway), Unreachable)

        await wait_until(trusts_the_new_one_alone)
        gateway.reconfigure(options(renewed.url, tls={"ca_file": str(authority.file)}))
        assert isinstance(await outcome(gateway), Delivered)
        server.go_on.set()
        assert isinstance(await slow, Delivered)


async def test_handshake_that_hangs_is_ended(gateway_to: MakeGateway) -> None:
    async def script(connection: Connection) -> None:
        await connection.wait_until_closed()

    async with serving(script) as server:
        found = await outcome(gateway_to(server.url.replace("http:", "https:")))
        assert isinstance(found, Unreachable)
        await wait_until(server.client_closed.is_set)


async def test_connection_cut_within_tls_is_a_failure(gateway_to: MakeGateway, authority: Authority) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        connection.reset()

    async with serving(script, authority.server()) as server:
        found = await outcome(gateway_to(server.url, tls={"ca_file": str(authority.file)}))
    assert isinstance(found, Failed)


async def test_cancelling_closes_the_connection_over_tls_too(
    gateway_to: MakeGateway, authority: Authority
) -> None:
    async def script(connection: Connection) -> None:
        await connection.receive()
        await connection.wait_until_closed()

    async with serving(script, authority.server()) as server:
        gateway = gateway_to(server.url, tls={"ca_file": str(authority.file)})
        task = asyncio.create_task(outcome(gateway))
        await wait_until(lambda: server.received)
        task.cancel()
        await wait_until(server.client_closed.is_set, 3.0, what="the server to see the connection closed")
