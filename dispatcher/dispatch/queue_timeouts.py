"""Default timeouts of batching rules, applied to claimed requests. A part of the first stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.core.patterns import RuleFinder
from dispatcher.core.requests.queue_timeouts import (
    DelayTimedOut,
    RejectTimedOut,
    decide_after_wait,
    find_timeout,
)
from dispatcher.dispatch import completions

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.options import Options
    from dispatcher.ports import Lease


class QueueTimeouts:
    """Timeouts of the rules of one process."""

    def __init__(self, options: Options) -> None:
        self.counts: dict[str, int] = dict.fromkeys(("reject", "delay"), 0)
        """Number of requests that were claimed after the timeout of their rule, by what happened to them."""
        self.reconfigure(options)

    def reconfigure(self, options: Options) -> None:
        self._rules, self._default_path = options.rule_timeouts, options.default_path
        self._rule_by_path = RuleFinder(options.rule_timeouts)

    @property
    def is_empty(self) -> bool:
        """True if no rule has a timeout."""
        return not self._rules

    def check_wait(self, lease: Lease, request: Request, unix_now: float) -> Completion | None:
        """Return the completion of a request that has waited too long. `None` if it continues."""
        rule = find_timeout(self._rule_by_path, request.endpoint or self._default_path)
        if rule is None:
            return None
        match decide_after_wait(rule, request, lease.score, unix_now):
            case RejectTimedOut(why):
                self.counts["reject"] += 1
                return completions.build_deadline_error(lease, request, why)
            case DelayTimedOut(score):
                self.counts["delay"] += 1
                return completions.build_return(lease, new_score=score)
        return None
