"""`ports.ModelServers` over HTTP: a call straight to one model server, past the gateway and its picker.

Where the servers are, and what they are shown, is known to whoever asks them for their models; it changes
with settings, endpoints and rotated files, so it is asked for each call.
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
    """How to speak to one model server."""

    @property
    def base(self) -> str:
        """Its URL, to which a path is appended; without user and password."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What it is shown beside the request: credentials."""
        ...

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How its certificate is verified; None: it speaks plain HTTP. The same object as long as nothing
        has changed."""
        ...


class DirectServers:
    """`find`: how to speak to an endpoint now, or why that is not known. `limit_bytes`: an answer that is
    larger is TooLarge."""

    def __init__(self, find: Callable[[str], KnownServer | str], limit_bytes: Callable[[], int]) -> None:
        self._find = find
        self._limit_bytes = limit_bytes
        self._wires = Wires()
        self._tls: ssl.SSLContext | None = None

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        """As `ports.ModelServers` has it. A path that is not plain is Refused."""
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
        if wire is None or tls is not self._tls:
            self._tls = tls
            # The transport asks for one; where all is plain HTTP none is used.
            wire = self._wires.renew(tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return wire
