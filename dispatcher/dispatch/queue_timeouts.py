"""Default timeouts of batching rules, applied to claimed requests. A part of the first stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.core.requests.queue_timeouts import (
    DelayTimedOut,
    RejectTimedOut,
    RuleTimeout,
    decide_after_wait,
    find_timeout,
)
from dispatcher.dispatch import completions

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.options import Options
    from dispatcher.ports import Lease

MAX_PATHS = 1000
"""Maximum number of paths whose rule is remembered."""


class QueueTimeouts:
    """Timeouts of the rules of one process."""

    def __init__(self, options: Options) -> None:
        self.counts: dict[str, int] = dict.fromkeys(("reject", "delay"), 0)
        """Number of requests that were claimed after the timeout of their rule, by what happened to them."""
        self.reconfigure(options)

    def reconfigure(self, options: Options) -> None:
        self._rules, self._default_path = options.rule_timeouts, options.default_path
        self._rule_by_path: dict[str, RuleTimeout | None] = {}

    @property
    def is_empty(self) -> bool:
        """True if no rule has a timeout."""
        return not self._rules

    def check_wait(self, lease: Lease, request: Request, unix_now: float) -> Completion | None:
        """Return the completion of a request that has waited too long. `None` if it continues."""
        rule = self._find_rule(request.endpoint or self._default_path)
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

    def _find_rule(self, path: str) -> RuleTimeout | None:
        try:
            return self._rule_by_path[path]
        except KeyError:
            pass
        # Paths come from producers, so their number must be bounded.
        if len(self._rule_by_path) >= MAX_PATHS:
            self._rule_by_path.clear()
        found = self._rule_by_path[path] = find_timeout(self._rules, path)
        return found
