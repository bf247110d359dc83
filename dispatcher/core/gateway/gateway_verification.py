"""Verification that the server at gateway.url is an inference gateway.

Any web server answers something. Until one request was answered as only a gateway does (2xx, or a refusal
with a drop reason), a response that means "not found here" is taken as a sign of a wrong address: no gateway,
and not the fault of the request. After that, such a response is the answer to its request.

Two kinds of 404 always concern the request:

    names its model    an error body as only model servers write it, for a model that they do not serve
    empty              Envoy has no route for the request, but has one for another path or model: the newest
                       recent 2xx was for another one, and that one got no empty 404 since
"""

from __future__ import annotations

from dataclasses import replace

from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    Outcome,
    Overloaded,
    TooLarge,
)
from dispatcher.core.models.names import parse_model, says_no_model

NOT_FOUND_STATUSES = (403, 404, 405, 501)
"""Statuses, besides redirects, of a server that has nothing at this path, or does not accept POST there."""
ROUTE_MEMORY_S = 300.0
"""Maximum age of a 2xx that shows that the gateway has routes: as long as the attempts of a request usually
take."""
_MAY_BE_NO_GATEWAY = (
    ", and none of our requests with 2xx yet: it may be no inference gateway; look at gateway.url and "
    "gateway.path, or at the model that the requests name"
)
_NOT_ALLOWED = (
    ", and none of our requests with 2xx yet: it may not allow what our credentials ask for; look at "
    "gateway.token_file, or at gateway.url and gateway.path"
)


class GatewayVerification:
    """Whether one address has answered like an inference gateway, from the first request on."""

    def __init__(self) -> None:
        self.is_verified = False
        self._last_routed: tuple[float, str, bytes] | None = None
        """Time, path and body of the last request that was answered with 2xx. `None` if there was none, or if
        a request for the same path and model got an empty 404 since."""

    def judge_outcome(
        self, outcome: Outcome, path: str = "", payload: bytes = b"", at: float = 0.0
    ) -> Outcome:
        """Return the outcome as it counts, given what is known of the server that answered at `at`.

        `path` and `payload` are those of the request.
        """
        match outcome:
            case Delivered(status=status) | TooLarge(status=status) if 200 <= status < 300:
                self.is_verified = True
                self._last_routed = at, path, payload
            case Overloaded(reason=str(reason)) | Evicted(reason=str(reason)) if reason:
                self.is_verified = True
            case Failed(status=404, is_intermediary_error=True):
                return self._judge_missing_route(outcome, path, payload, at)
            case Failed(is_intermediary_error=True):
                pass  # already marked as an intermediary error
            case Delivered(status=404, body=body) if says_no_model(404, body, parse_model(payload)):
                pass  # a model server wrote it, so the gateway works
            case Delivered(status=status, body=body) if not self.is_verified and status in NOT_FOUND_STATUSES:
                doubt = _NOT_ALLOWED if status == 403 else _MAY_BE_NO_GATEWAY
                return Failed(
                    f"a server answered {status}{doubt}",
                    status,
                    body,
                    is_intermediary_error=True,
                    kind=FailureKind.MAYBE_NO_GATEWAY,
                )
            case Failed(status=int(status)) if not self.is_verified and (
                status in NOT_FOUND_STATUSES or status < 400
            ):
                return replace(
                    outcome,
                    why=outcome.why + _MAY_BE_NO_GATEWAY,
                    is_intermediary_error=True,
                    kind=FailureKind.MAYBE_NO_GATEWAY,
                )
        return outcome

    def _judge_missing_route(self, outcome: Failed, path: str, payload: bytes, at: float) -> Failed:
        """Return an empty 404 as a failure of its request alone if another path or model has a route."""
        if self._last_routed is None or at - self._last_routed[0] > ROUTE_MEMORY_S:
            return outcome
        _, routed_path, routed_payload = self._last_routed
        if (routed_path, parse_model(routed_payload)) == (path, parse_model(payload)):
            self._last_routed = None
            return outcome
        return replace(outcome, why=f"{outcome.why}, and others have one", is_intermediary_error=False)
