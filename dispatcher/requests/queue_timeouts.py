"""Default timeouts by path: how long a request may wait in the queue if its rule says so.

The time counts from the submission of the request. A request has its own deadline besides, and the earlier of
the two applies. A timeout is looked at when the request is claimed, so a request that nobody claims only ends
by its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dispatcher.common.patterns import RuleFinder
from dispatcher.requests.request import Request
from dispatcher.requests.score import PRIORITIES, compute_score
from dispatcher.requests.submission_time import parse_submission_time


class TimeoutAction(StrEnum):
    REJECT = "reject"
    """The request ends as DEADLINE_EXCEEDED."""
    DELAY = "delay"
    """The request moves to the lowest priority of the queue, once."""


@dataclass(frozen=True, slots=True)
class RuleTimeout:
    """Timeout of the requests that one rule matches."""

    setting: str
    """Name of the setting, for messages."""
    paths: tuple[str, ...]
    """Path patterns. The first rule with a pattern that matches a path applies."""
    timeout_s: float | None
    """`None` if requests of this rule have no default timeout."""
    action: TimeoutAction = TimeoutAction.REJECT


@dataclass(frozen=True, slots=True)
class TimeoutOptions:
    """Timeouts of all rules, in the order of the settings."""

    rules: Sequence[RuleTimeout] = ()
    """Empty if no rule has a timeout."""


@dataclass(frozen=True, slots=True)
class RejectTimedOut:
    """The request is answered DEADLINE_EXCEEDED."""

    why: str
    """One sentence without a full stop that names the setting."""


@dataclass(frozen=True, slots=True)
class DelayTimedOut:
    """The request returns to the queue under this score."""

    score: float


def find_timeout(rules: RuleFinder[RuleTimeout], path: str) -> RuleTimeout | None:
    """Return the timeout for requests to a path. `None` if there is none."""
    rule = rules.find_rule(path)
    return None if rule is None or rule.timeout_s is None else rule


def decide_after_wait(
    rule: RuleTimeout, request: Request, score: float, unix_now: float
) -> RejectTimedOut | DelayTimedOut | None:
    """Return whether a claimed request is rejected or delayed because it has waited too long. `None` if it
    is sent as usual. `score` is its current score in the queue."""
    submitted_at = parse_submission_time(request.created, request.token)
    if rule.timeout_s is None or not submitted_at:
        return None
    waited_s = unix_now - submitted_at
    if waited_s <= rule.timeout_s:
        return None
    if rule.action is TimeoutAction.REJECT:
        why = f"claimed {waited_s:.1f} s after its submission, and {rule.setting} is {rule.timeout_s:g} s"
        return RejectTimedOut(why)
    # Others may wait for the end of this request.
    if request.extra is not None:
        return None
    # The score shows that a request was moved before, so that it is moved only once, whichever process claims
    # it. Other producers may use scores beyond those of all priorities.
    last_score = compute_score(request.deadline, PRIORITIES[-1])
    return DelayTimedOut(last_score) if score < last_score else None
