"""Implement `ports.ModelServers` over HTTP: calls that go straight to one model server, past the gateway.

The addresses and the credentials of the servers come from the code that asks them for their models. They
change with settings, endpoints and rotated files, so they are looked up for each call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol

from dispatcher import USER_AGENT
from dispatcher.core.gateway.outcome import Outcome, Refused, TooLate, Unreachable
from dispatcher.core.requests.routing import is_plain_path
from dispatcher.forward.exchange import exchange
from dispatcher.forward.transport import Prepared, Progress, Wire, Wires, running

_HEADERS = {
    "accept": "*/*",
    "accept-encoding": "identity",
    "content-type": "application/json",
    "user-agent": USER_AGENT,
}


class KnownServer(Protocol):
    """Address and credentials of one model server."""

    @property
    def base(self) -> str:
        """URL of the server without user and password. The path of a call is appended to it."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers with the credentials for the server."""
        ...

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context that verifies the server's certificate. `None` if the server speaks plain HTTP.

        It is the same object until settings or files change.
        """
        ...


class DirectServers:
    """Calls model servers directly.

    `find_server` returns the address and credentials of an endpoint, or the reason why they are not known.
    `limit_bytes` returns the largest size of an answer; a larger one is TooLarge.
    """

    def __init__(self, find: Callable[[str], KnownServer | str], limit_bytes: Callable[[], int]) -> None:
        self._find = find
        self._limit_bytes = limit_bytes
        self._wires = Wires()
        self._tls: ssl.SSLContext | None = None

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        """Send one call, as described in `ports.ModelServers`. A path that is not plain is Refused."""
        if not is_plain_path(path):
            return Refused(f"{path[:100]!r} is not a plain path")
        if deadline <= asyncio.get_running_loop().time():
            return TooLate()
        server = self._find(endpoint)
        if isinstance(server, str):
            return Unreachable(f"{endpoint}: {server}")
        wire = self._wire(server.tls)
        current = Progress()
        headers = _HEADERS | {name.lower(): value for name, value in server.headers.items()}
        running.set(current)
        wire.running += 1
        try:
            async with asyncio.timeout_at(deadline):
                prepared = Prepared(server.base + path, headers, body, current)
                outcome = await exchange(wire, prepared, current, self._limit_bytes(), who=endpoint)
        except TimeoutError:
            outcome = TooLate()
        finally:
            wire.running -= 1
            current.end()
        await self._wires.close_unused()
        return outcome

    async def aclose(self) -> None:
        """Close every connection."""
        await self._wires.aclose()

    def _wire(self, tls: ssl.SSLContext | None) -> Wire:
        wire = self._wires.current
        # Contexts are compared by identity: the same object means the same files. Calls that run on the old
        # transport end there.
        if wire is None or tls is not self._tls:
            self._tls = tls
            # The aiohttp transport requires a context, also where all servers speak plain HTTP.
            wire = self._wires.renew(tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return wire
