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

from dispatcher.core.gateway.outcome import Delivered, Evicted, Failed, Outcome, Overloaded, TooLarge
from dispatcher.core.models.names import model_of, says_no_model

NOT_HERE = (403, 404, 405, 501)
"""Statuses, besides redirects, of a server that has nothing at this path, or does not accept POST there."""
LATELY_S = 300.0
"""Maximum age of a 2xx that shows that the gateway has routes: as long as the attempts of a request usually
take."""
_DOUBT = (
    ", and none of our requests with 2xx yet: it may be no inference gateway; look at gateway.url and "
    "gateway.path, or at the model that the requests name"
)
_NOT_ALLOWED = (
    ", and none of our requests with 2xx yet: it may not allow what our credentials ask for; look at "
    "gateway.token_file, or at gateway.url and gateway.path"
)


class Stranger:
    """Verification state of one address, from the first request on."""

    def __init__(self) -> None:
        self.known = False
        self._routed: tuple[float, str, bytes] | None = None
        """Time, path and body of the last request that was answered with 2xx. `None` if there was none, or if
        a request for the same path and model got an empty 404 since."""

    def judged(self, outcome: Outcome, path: str = "", payload: bytes = b"", at: float = 0.0) -> Outcome:
        """Return the outcome as it counts, given what is known of the server that answered at `at`.

        `path` and `payload` are those of the request.
        """
        match outcome:
            case Delivered(status=status) | TooLarge(status=status) if 200 <= status < 300:
                self.known = True
                self._routed = at, path, payload
            case Overloaded(reason=str(reason)) | Evicted(reason=str(reason)) if reason:
                self.known = True
            case Failed(status=404, bare=True):
                return self._without_route(outcome, path, payload, at)
            case Failed(bare=True):
                pass  # already marked as an intermediary error
            case Delivered(status=404, body=body) if says_no_model(404, body, model_of(payload)):
                pass  # a model server wrote it, so the gateway works
            case Delivered(status=status, body=body) if not self.known and status in NOT_HERE:
                doubt = _NOT_ALLOWED if status == 403 else _DOUBT
                return Failed(f"a server answered {status}{doubt}", status, body, bare=True)
            case Failed(status=int(status)) if not self.known and (status in NOT_HERE or status < 400):
                return replace(outcome, why=outcome.why + _DOUBT, bare=True)
        return outcome

    def _without_route(self, outcome: Failed, path: str, payload: bytes, at: float) -> Failed:
        """Return an empty 404 as a failure of its request alone if another path or model has a route."""
        if self._routed is None or at - self._routed[0] > LATELY_S:
            return outcome
        _, routed_path, routed_payload = self._routed
        if (routed_path, model_of(routed_payload)) == (path, model_of(payload)):
            self._routed = None
            return outcome
        return replace(outcome, why=f"{outcome.why}, and others have one", bare=False)
