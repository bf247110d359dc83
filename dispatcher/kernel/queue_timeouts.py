"""Default timeouts by path, applied to claimed requests. A part of the first stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.common.patterns import RuleFinder
from dispatcher.kernel import completions
from dispatcher.requests.queue_timeouts import (
    DelayTimedOut,
    RejectTimedOut,
    TimeoutOptions,
    decide_after_wait,
    find_timeout,
)

if TYPE_CHECKING:
    from dispatcher.kernel.completions import Completion
    from dispatcher.kernel.context import KernelContext
    from dispatcher.queue.contract import Lease
    from dispatcher.requests.request import Request


class QueueTimeouts:
    """Timeouts of the rules of one process."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self.reconfigure()

    def reconfigure(self) -> None:
        options = self._context.options
        self._rules, self._default_path = options.of(TimeoutOptions).rules, options.default_path
        self._rule_by_path = RuleFinder(self._rules)

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
                self._context.timeout_counts["reject"] += 1
                return completions.build_deadline_error(lease, request, why)
            case DelayTimedOut(score):
                self._context.timeout_counts["delay"] += 1
                return completions.build_return(lease, new_score=score)
        return None
