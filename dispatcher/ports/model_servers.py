"""The model servers behind the gateway, each by itself, as who warms them up sees them."""

from __future__ import annotations

from typing import Protocol

from dispatcher.core.gateway.outcome import Outcome


class ModelServers(Protocol):
    """One call straight to one model server, past the gateway and its picker."""

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        """Try once, until `deadline` (loop time). `endpoint`: as `core.models.availability.Listing` names it.

        Never raises for what a network or a server can do: that is an Outcome. An endpoint of which it is not
        known how to speak to it is Unreachable, and why says so. Nobody else counts the call, nor holds it
        back: whoever makes it has seen to the limit and the gate. Cancelling it closes the connection.
        """
        ...
