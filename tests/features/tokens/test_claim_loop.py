"""A claim and its return never follow each other without end, whatever requests, readings and other
dispatchers do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.features.tokens import token_budget
from dispatcher.features.tokens.options import TokenOptions
from dispatcher.features.tokens.token_budget import RETRY_S, TokenBudget
from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.options import Options
from dispatcher.limit.budget import KvUse
from dispatcher.requests.outcomes.outcome import RetryPolicy
from tests.kernel.scene import lease, request

CAPACITY = 1_000
LIMIT = 16


class Owner:
    """One dispatcher that claims from a list of requests, without a loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, needs: list[int]) -> None:
        self.now = 0.0
        monkeypatch.setattr(token_budget, "loop_time", lambda: self.now)
        self.limiter = SimpleNamespace(
            kv_use=None, other_owners_units=0, bound_other_owners=lambda a, b: (0, 0)
        )
        options = TokenOptions(is_on=True, per_endpoint=CAPACITY, find_prompt=lambda payload: 1)
        context: Any = SimpleNamespace(
            limiter=self.limiter,
            options=Options(RetryPolicy(), of_features={TokenOptions: options}),
            hooks=SimpleNamespace(find_call_tokens=(self.find_tokens,)),
            complete=lambda completion: self.returned.append(completion.lease.token),
        )
        self.budget = TokenBudget(context)
        self.needs = dict(enumerate(needs))
        self.waiting = list(self.needs)
        self.running: list[str] = []
        self.returned: list[str] = []
        self.claimed_count = 0

    def find_tokens(self, token: str) -> tuple[int | None, int]:
        return self.needs[int(token.removeprefix("t-"))], 0

    def show(self, used: float) -> None:
        self.limiter.kv_use = KvUse(used, None, 1, self.now, self.now)

    def claim_until_done(self) -> int:
        """Claim as the loop does, until nothing more may be claimed. Return the number of claims."""
        claims = 0
        while self.waiting and len(self.running) < LIMIT:
            count = self.budget.plan_claim(LIMIT - len(self.running))
            if count < 1:
                break
            claims += 1
            assert claims < 1_000, "it goes on without end"
            claimed, self.waiting = self.waiting[:count], self.waiting[count:]
            self.claimed_count += len(claimed)
            requests = [
                ClaimedRequest(InFlightLease(lease(number), request=request()), request())
                for number in claimed
            ]
            for each in self.budget.apply(requests):
                self.running.append(each.entry.lease.token)
            self.waiting = [int(token.removeprefix("t-")) for token in self.returned] + self.waiting
            self.returned.clear()
        return claims

    def end(self, number: int) -> None:
        token = self.running.pop(number % len(self.running))
        self.budget.forget_lease(token)


def start(monkeypatch: pytest.MonkeyPatch, needs: list[int], used: float = 0.0) -> Owner:
    """Return an owner that has claimed what it can."""
    owner = Owner(monkeypatch, needs)
    owner.show(used)
    owner.claim_until_done()
    return owner


def test_claims_are_as_large_as_the_room_for_usual_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = start(monkeypatch, [300])
    assert [owner.budget.plan_claim(count) for count in (0, 1, 2, 3, 16)] == [0, 1, 2, 2, 2]
    owner.end(0)
    assert [owner.budget.plan_claim(count) for count in (1, 2, 3, 16)] == [1, 2, 3, 3]


def test_request_that_fits_exactly_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = start(monkeypatch, [475, 475, 1])
    assert len(owner.running) == 2
    owner.now += RETRY_S
    assert owner.claim_until_done() == 0, "there is no room at all"


def test_large_request_is_not_sent_alone_into_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, [10], used=0.95).running == []
    assert start(monkeypatch, [2_000], used=0.94).running == ["t-0"]


def test_requests_smaller_than_usual_are_claimed_one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = start(monkeypatch, [600, 10, 10, 10])
    for count in (2, 3, 4):
        assert len(owner.running) == count
        assert owner.claim_until_done() == 0
        if owner.waiting:
            assert owner.budget.problem.endswith(f"the next request needs about {owner.budget.needed:,.0f}")
        owner.now += RETRY_S
        owner.claim_until_done()


@pytest.mark.parametrize(
    ("share", "endpoints"), [(math.inf, 1), (math.nan, 1), (-0.1, 1), (0.5, 0), (0.5, math.inf), (0.5, None)]
)
def test_impossible_reading_starts_no_count(
    monkeypatch: pytest.MonkeyPatch, share: float, endpoints: float | None
) -> None:
    owner = Owner(monkeypatch, [])
    owner.limiter.kv_use = KvUse(share, None, endpoints, 0.0, 0.0)
    assert not owner.budget.apply_reading()
    owner.show(0.0)
    assert owner.budget.apply_reading()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("show"), st.floats(0, 1.2)),
        st.tuples(st.just("end"), st.integers(0, 100)),
        st.tuples(st.just("others"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.floats(0, 3)),
        st.tuples(st.just("wake"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=400)
@given(st.lists(st.integers(0, 1_500), max_size=30), STEPS)
def test_rounds_end_and_few_requests_return(needs: list[int], steps: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        owner = Owner(monkeypatch, needs)
        owner.show(0.0)
        for kind, value in steps:
            match kind:
                case "show":
                    owner.show(value)
                case "end" if owner.running:
                    owner.end(value)
                case "others":
                    owner.limiter.other_owners_units = value
                case "wait":
                    owner.now += value
            returned_before = owner.budget.returned_count
            claims = owner.claim_until_done()
            # One claim may have requests without room, and after it there is only room for a smaller one.
            assert claims <= 2 + len(needs)
            assert owner.budget.returned_count - returned_before <= LIMIT
            again = owner.budget.returned_count
            owner.claim_until_done()  # nothing has changed
            owner.claim_until_done()
            assert owner.budget.returned_count == again
        # In the end, every request is sent: there is no need that keeps others waiting for ever.
        owner.limiter.other_owners_units = 0
        for _ in range(3 * len(needs) + 3):
            owner.show(0.0)
            owner.now += RETRY_S
            owner.claim_until_done()
            while owner.running:
                owner.end(0)
        assert owner.waiting == []
        assert owner.budget.memory.reserved == 0
        assert owner.budget.leases == {}


@settings(max_examples=200)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.floats(0, 1))
def test_sent_requests_fit_into_the_memory(needs: list[int], used: float) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        owner = Owner(monkeypatch, needs)
        owner.show(used)
        owner.claim_until_done()
        sent = sum(owner.needs[int(token.removeprefix("t-"))] for token in owner.running)
        assert sent <= max(0.0, CAPACITY * (0.95 - used)) + 1e-6 or len(owner.running) == 1
