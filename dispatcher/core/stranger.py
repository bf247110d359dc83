"""Whether what answers at gateway.url has shown that it is an inference gateway. Pure.

Any web server answers something. Until one request was answered as only a gateway does (2xx, or a refusal
with a drop reason), "there is no such thing here" is taken for what it looks like at a wrong address: no
gateway, and no request's fault. Once one was, such an answer is that request's own.
"""

from __future__ import annotations

from dataclasses import replace

from dispatcher.core.outcome import Delivered, Evicted, Failed, Outcome, Overloaded, TooLarge

NOT_HERE = (403, 404, 405, 501)
"""What a server answers, beside redirects, that has nothing at this path, or takes no POST there."""
_DOUBT = (
    ", and none of our requests with 2xx yet: it may be no inference gateway; look at gateway.url and "
    "gateway.path, or at the model that the requests name"
)
_NOT_ALLOWED = (
    ", and none of our requests with 2xx yet: it may not allow what our credentials ask for; look at "
    "gateway.token_file, or at gateway.url and gateway.path"
)


class Stranger:
    """One address, from the first request on."""

    def __init__(self) -> None:
        self.known = False

    def judged(self, outcome: Outcome) -> Outcome:
        """The outcome as it counts, by what is known of who gave it."""
        match outcome:
            case Delivered(status=status) | TooLarge(status=status) if 200 <= status < 300:
                self.known = True
            case Overloaded(reason=str(reason)) | Evicted(reason=str(reason)) if reason:
                self.known = True
            case Failed(bare=True):
                pass  # it says that itself
            case Delivered(status=status, body=body) if not self.known and status in NOT_HERE:
                doubt = _NOT_ALLOWED if status == 403 else _DOUBT
                return Failed(f"a server answered {status}{doubt}", status, body, bare=True)
            case Failed(status=int(status)) if not self.known and (status in NOT_HERE or status < 400):
                return replace(outcome, why=outcome.why + _DOUBT, bare=True)
        return outcome
