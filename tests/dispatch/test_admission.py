"""Which claimed request is sent, and how the lease of another ends instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.result import ErrorCode
from dispatcher.dispatch.admission import EARLY_RULES, SEND_RULES, AdmissionCase, apply_rules, parse_lease
from dispatcher.dispatch.completions import Completion
from dispatcher.ports import DeadLetter, Lease, Release, Settlement
from tests.queue.made import member

LEASE = Lease(
    entry_id=1,
    token="t",
    member=b"",
    score=0.0,
    deliveries=1,
    failed_attempts=0,
    refusals=0,
    deaths_as_suspect=0,
)
REQUEST = Request(id="r-1", deadline=1000, payload=b"{}")
RULES = (*EARLY_RULES, *SEND_RULES)


def case(**changes: Any) -> AdmissionCase:
    found = AdmissionCase(LEASE, REQUEST, unix_now=0.0, retry_policy=RetryPolicy(max_deliveries=5))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def code_of(ending: Completion | None) -> str:
    if isinstance(ending, Settlement):
        return ending.result_class
    return {DeadLetter: "buried", Release: "given back"}.get(type(ending), "sent")


OBJECTIONS: dict[str, Callable[[AdmissionCase], AdmissionCase]] = {
    "buried": lambda c: replace(c, lease=c.lease.copy_with(deaths_as_suspect=6)),
    ErrorCode.DEADLINE_EXCEEDED: lambda c: replace(c, unix_now=1000.0),
    ErrorCode.CANCELLED: lambda c: replace(c, is_cancelled=True),
    ErrorCode.INVALID_REQUEST: lambda c: replace(c, result_list_problem="it is a string"),
    "given back": lambda c: replace(c, can_send=False),
}
"""In the order of the rules."""


def test_request_that_nothing_is_said_against_is_sent() -> None:
    assert apply_rules(case(), RULES) is None


@pytest.mark.parametrize("code", OBJECTIONS)
def test_each_objection_ends_the_lease_its_way(code: str) -> None:
    assert code_of(apply_rules(OBJECTIONS[code](case()), RULES)) == code


def test_first_objection_decides() -> None:
    order = list(OBJECTIONS)
    for earlier, later in itertools.combinations(order, 2):
        both = OBJECTIONS[earlier](OBJECTIONS[later](case()))
        assert code_of(apply_rules(both, RULES)) == earlier


@pytest.mark.parametrize("doubt", [{"is_cancelled": None}, {"can_send": False}, {"is_lease_valid": False}])
def test_what_is_not_sure_is_given_back_untouched(doubt: dict[str, Any]) -> None:
    ending = apply_rules(case(**doubt), RULES)
    assert ending == Release(LEASE, delay_s=0.0, is_undelivered=True)


def test_tenant_at_rest_holds_its_request_for_so_long() -> None:
    assert apply_rules(case(get_rest_s=lambda: 3.0), RULES) == Release(
        LEASE, delay_s=3.0, is_undelivered=True
    )


@pytest.mark.parametrize("code", OBJECTIONS)
def test_who_does_not_go_is_not_counted_as_gone_for_its_tenant(code: str) -> None:
    def asked() -> float:
        raise AssertionError("asked whether it goes, though it does not")

    assert apply_rules(OBJECTIONS[code](case(get_rest_s=asked)), RULES) is not None


def test_member_is_parsed_or_its_lease_ends() -> None:
    good = parse_lease(LEASE.copy_with(member=member("r-1")), 10**6)
    assert isinstance(good, Request)
    assert good.id == "r-1"
    unnamed = parse_lease(LEASE.copy_with(member=b"no member"), 10**6)
    assert isinstance(unnamed, DeadLetter)
    large = parse_lease(LEASE.copy_with(member=member("r-2")), 1)
    assert isinstance(large, Settlement)
    assert (large.request_id, large.result_class) == ("r-2", ErrorCode.TOO_LARGE)
