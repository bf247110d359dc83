"""Calls over HTTP that go straight to one model server, past the gateway.

The addresses and the credentials of the servers come from the code that asks them for their models. They
change with settings, endpoints and rotated files, so they are looked up for each call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dispatcher import USER_AGENT
from dispatcher.gateway.exchange import send_and_read
from dispatcher.gateway.transport import (
    AttemptProgress,
    PreparedRequest,
    Transport,
    TransportRotation,
)
from dispatcher.requests.outcomes.outcome import Outcome, Refused, TooLate, Unreachable
from dispatcher.requests.routing import is_plain_path

_HEADERS = {
    "accept": "*/*",
    "accept-encoding": "identity",
    "content-type": "application/json",
    "user-agent": USER_AGENT,
}


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Address and credentials of one model server."""

    base_url: str
    """URL of the server without user and password. The path of a call is appended to it."""
    headers: Mapping[str, str] = field(repr=False)
    """Headers with the credentials for the server."""
    tls: ssl.SSLContext | None
    """TLS context that verifies the server's certificate, the same object until settings or files change.
    `None` if the server speaks plain HTTP."""


class DirectServers:
    """Calls model servers directly.

    `find_server` returns the address and credentials of an endpoint, or the reason why they are not known.
    `limit_bytes` returns the largest size of an answer; a larger one is TooLarge.
    """

    def __init__(
        self, find_server: Callable[[str], ServerAccess | str], limit_bytes: Callable[[], int]
    ) -> None:
        self._find_server = find_server
        self._limit_bytes = limit_bytes
        self._transports = TransportRotation()
        self._tls: ssl.SSLContext | None = None

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        """Send one request to an endpoint and return the outcome, at `deadline` (loop time) at the latest.

        Failures of the network or of a server never raise: they are an outcome. An endpoint that is not known
        is Unreachable, and a path that is not plain is Refused. Cancelling the call closes the connection.
        The caller must respect the limit and the gate.
        """
        if not is_plain_path(path):
            return Refused(f"{path[:100]!r} is not a plain path")
        if deadline <= asyncio.get_running_loop().time():
            return TooLate()
        server = self._find_server(endpoint)
        if isinstance(server, str):
            return Unreachable(f"{endpoint}: {server}")
        transport = self._choose_transport(server.tls)
        progress = AttemptProgress()
        headers = _HEADERS | {name.lower(): value for name, value in server.headers.items()}
        transport.running_count += 1
        try:
            async with asyncio.timeout_at(deadline):
                prepared = PreparedRequest(server.base_url + path, headers, body)
                outcome = await send_and_read(
                    transport, prepared, progress, self._limit_bytes(), peer=endpoint
                )
        except TimeoutError:
            outcome = TooLate()
        finally:
            transport.running_count -= 1
            progress.forbid_sending()
        await self._transports.close_unused()
        return outcome

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transports.aclose()

    def _choose_transport(self, tls: ssl.SSLContext | None) -> Transport:
        transport = self._transports.current
        # Contexts are compared by identity: the same object means the same files. Calls that run on the old
        # transport end there.
        if transport is None or tls is not self._tls:
            self._tls = tls
            # The aiohttp transport requires a context, also where all servers speak plain HTTP.
            transport = self._transports.replace_current(tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return transport
