"""Admission of claimed requests: which are admitted, and how the lease of each other one ends."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.kernel.admission import LARGE_MEMBER_BYTES, Admission, check_request
from dispatcher.kernel.claimed_request import ClaimedLeases
from dispatcher.kernel.completions import Completion, get_lease
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.in_flight import InFlightTable
from dispatcher.kernel.journal import Journal
from dispatcher.kernel.options import Options
from dispatcher.kernel.queue_access import QueueAccess
from dispatcher.kernel.queue_timeouts import QueueTimeouts
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.queue.contract import DeadLetter, Lease, Permit, Settlement
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import Request
from dispatcher.telemetry.metrics import Metrics
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import AnsweringGateway, lease, open_limiter, request
from tests.memory_queue import MemoryStore
from tests.queue.factories import member

POLICY = RetryPolicy(max_deliveries=5)
PERMIT = Permit(10, read_at=1.0, lost_units=0)


def test_valid_request_in_time_is_admitted() -> None:
    admitted = request()
    assert check_request(lease(), admitted, 0.0, POLICY) is admitted


def test_request_whose_owners_died_too_often_becomes_a_dead_letter() -> None:
    assert isinstance(check_request(lease(deaths_as_suspect=6), request(), 0.0, POLICY), DeadLetter)


def test_request_past_its_deadline_ends_with_that_error() -> None:
    completion = check_request(lease(), request(deadline=1000), 1000.0, POLICY)
    assert isinstance(completion, Settlement)
    assert completion.result_class == ErrorCode.DEADLINE_EXCEEDED


def test_deaths_count_before_the_deadline() -> None:
    completion = check_request(lease(deaths_as_suspect=6), request(deadline=1000), 1000.0, POLICY)
    assert isinstance(completion, DeadLetter)


def admit(
    *leases: Lease, max_payload_bytes: int = 10**6
) -> tuple[list[Request], list[Completion], InFlightTable]:
    """Return the admitted requests, the completions of the others, and the table."""

    async def main() -> tuple[list[Request], list[Completion], InFlightTable]:
        queue = MemoryQueue(MemoryStore(clock=asyncio.get_running_loop().time), "a")
        limiter, clock = open_limiter(), asyncio.get_running_loop().time
        options = Options(POLICY, max_payload_bytes=max_payload_bytes)
        access = QueueAccess(queue, limiter, LeaseValidity(30.0, 5.0), clock)
        context = KernelContext(access, limiter, AnsweringGateway(), Journal(Metrics()), options)
        table, completed = context.in_flight, context.pending
        admission = Admission(context, QueueTimeouts(context))
        entries = table.add_leases(leases, 7.0)
        admitted = admission.admit_leases(ClaimedLeases(leases, 7.0, PERMIT), entries)
        assert all(claimed.entry in table for claimed in admitted)
        return [claimed.request for claimed in admitted], completed, table

    return run_in_virtual_time(main())


def test_members_are_parsed_and_every_lease_is_in_the_table() -> None:
    admitted, completed, table = admit(
        lease(1, member=member("r-1", 10**10)),
        lease(2, member=b"no member"),
        lease(3, member=member("r-3", 10**10)),
    )
    assert [each.id for each in admitted] == ["r-1", "r-3"]
    assert [get_lease(each).entry_id for each in completed] == [2]
    assert isinstance(completed[0], DeadLetter)
    assert len(table) == 3


def test_payload_above_the_limit_is_rejected() -> None:
    admitted, completed, _ = admit(lease(2, member=member("r-2", 10**10)), max_payload_bytes=1)
    assert admitted == []
    assert isinstance(completed[0], Settlement)
    assert (completed[0].request_id, completed[0].result_class) == ("r-2", ErrorCode.TOO_LARGE)


@pytest.mark.parametrize("extra_bytes", [0, 1])
def test_large_member_is_not_kept_beside_its_request(extra_bytes: int) -> None:
    valid = member("r-1", 10**10)
    padded = valid[:-1] + b" " * (LARGE_MEMBER_BYTES + extra_bytes - len(valid)) + valid[-1:]
    _, _, table = admit(lease(1, member=padded))
    (entry,) = table
    assert (entry.lease.member == b"") == bool(extra_bytes)
