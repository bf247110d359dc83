"""The model servers behind the gateway, called one by one to warm them up."""

from __future__ import annotations

from typing import Protocol

from dispatcher.requests.outcomes.outcome import Outcome


class ModelServers(Protocol):
    """Direct calls to single model servers, past the gateway and its endpoint picker."""

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        """Send one request to `endpoint` and return the outcome, at `deadline` (loop time) at the latest.

        `endpoint` is named as in `availability.Listing`. An endpoint with an unknown protocol is
        `Unreachable`, and the outcome says why. Failures of the network or of a server never raise: they are
        an `Outcome`. Cancelling the call closes the connection.

        The call is neither counted nor delayed here: the caller must respect the limit and the gate.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...
