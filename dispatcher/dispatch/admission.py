"""Whether a claimed request is sent: the first rule that objects decides. Pure.

    by itself    what its member and its history say, before anything is asked of the queue
    to send      what was asked of the queue meanwhile, and what is known of the pool and of its tenant now

A rule is a function of a `Case`: None, or how the lease ends instead. A new rule is a row in its table; the
order is that of what the person who waits for the result should be told, and a lease that is only given back
comes last, because that may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dispatcher.core.gateway.outcome import RetryPolicy, after_losses
from dispatcher.core.requests.request import Rejection, Request, parse
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Ending
from dispatcher.ports import Lease


@dataclass(slots=True)
class Case:
    """A claimed request, and what is known about it."""

    lease: Lease
    request: Request
    unix_now: float
    retry: RetryPolicy
    cancelled: bool | None = False
    """None: that cannot be known now."""
    unfit: str | None = None
    """Why its result may not go to the list that it names."""
    may_send: bool = True
    """The gate is open, or it is a probe; nobody stops the process."""
    ours: bool = True
    """Its lease is surely still ours."""
    without_model: Callable[[], Ending | None] = lambda: None
    """How it ends or is put off, for its model is not served; None: it is, as far as anybody knows."""
    rest_s: Callable[[], float] = lambda: 0.0
    """How long its tenant rests. Asked last: whoever does not rest goes, and is counted as gone."""


Rule = Callable[[Case], Ending | None]


def admit(lease: Lease, max_payload_bytes: int) -> Request | Ending:
    """The request that a member is; or, where it is none, how its lease ends."""
    parsed = parse(lease.member, max_payload_bytes=max_payload_bytes)
    return completions.rejected(lease, parsed) if isinstance(parsed, Rejection) else parsed


def judge(case: Case, rules: Sequence[Rule]) -> Ending | None:
    """The first objection; None: there is none."""
    for rule in rules:
        ending = rule(case)
        if ending is not None:
            return ending
    return None


def _deadly(case: Case) -> Ending | None:
    verdict = after_losses(case.lease.losses, case.retry)
    return None if verdict is None else completions.deadly(case.lease, case.request, verdict)


def _expired(case: Case) -> Ending | None:
    return completions.expired(case.lease, case.request) if case.request.deadline <= case.unix_now else None


def _cancelled(case: Case) -> Ending | None:
    return completions.cancelled(case.lease, case.request) if case.cancelled else None


def _unlisted(case: Case) -> Ending | None:
    return None if case.unfit is None else completions.unlisted(case.lease, case.request, case.unfit)


def _without_model(case: Case) -> Ending | None:
    return case.without_model()


def _not_now(case: Case) -> Ending | None:
    sure = case.cancelled is not None and case.may_send and case.ours
    return None if sure else completions.returned(case.lease)


def _at_rest(case: Case) -> Ending | None:
    rest_s = case.rest_s()
    return completions.returned(case.lease, after_s=rest_s) if rest_s > 0 else None


BY_ITSELF: Sequence[Rule] = (_deadly, _expired)
TO_SEND: Sequence[Rule] = (_cancelled, _unlisted, _without_model, _not_now, _at_rest)
