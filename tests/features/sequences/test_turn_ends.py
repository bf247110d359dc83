"""The end of a turn (`TurnEnd`) that each kind of ended request leaves to its sequence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dispatcher.features.sequences.completions import build_turn_rejection, end_turn
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import Turn
from dispatcher.kernel import completions
from dispatcher.kernel.completions import Completion
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks
from dispatcher.queue.contract import UnleasedRequest
from dispatcher.requests.outcomes.outcome import Delivered, Failed, FailureKind, Outcome, RetryPolicy
from dispatcher.requests.request import Rejection
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import lease, request

TURN = Turn("chat", 3)
OF_SEQUENCE, PLAIN = request(extra=TURN), request()


def end(completion: Completion) -> object:
    """Return what the queue is told to do with the sequence."""
    shared: Any = SimpleNamespace(wake=asyncio.Event())
    context = KernelContext(shared, shared, shared, shared, shared, hooks=Hooks(end_request=(end_turn,)))
    context.complete(completion)
    (ended,) = context.pending
    assert type(ended) is type(completion)
    return completions.get_extra(ended)


def complete(outcome: Outcome, **changes: Any) -> Completion:
    ended = request(extra=TURN, **changes)
    return completions.build_completion(lease(), ended, outcome, 0.0, RetryPolicy(max_attempts=1), 0.5)


def failed(why: str) -> TurnEnd:
    return TurnEnd(TURN, has_failed=True, cause=f"request r-1 has failed: {why}")


@pytest.mark.parametrize(
    ("completion", "left"),
    [
        pytest.param(complete(Delivered(200, b"{}")), TurnEnd(TURN), id="answered"),
        pytest.param(complete(Delivered(400, b"{}")), failed("the gateway answered 400"), id="answered 400"),
        pytest.param(
            complete(Failed("no route", kind=FailureKind.ERROR_STATUS, status=500)),
            failed("RETRIES_EXHAUSTED: no answer after 1 attempt, the last: no route"),
            id="dead letter",
        ),
        pytest.param(
            completions.build_cancellation(lease(), OF_SEQUENCE),
            failed("CANCELLED: cancelled"),
            id="cancelled",
        ),
        pytest.param(
            completions.build_deadline_error(lease(), OF_SEQUENCE),
            failed("DEADLINE_EXCEEDED: deadline exceeded"),
            id="past its deadline",
        ),
        pytest.param(
            completions.build_rejection(
                lease(), Rejection(ErrorCode.TOO_LARGE, "too large", "r-1", extra=TURN)
            ),
            failed("TOO_LARGE: too large"),
            id="too large",
        ),
        pytest.param(
            build_turn_rejection(lease(), OF_SEQUENCE, ErrorCode.SEQUENCE_ABORTED, "it was aborted"),
            None,
            id="rejected by its sequence",
        ),
        pytest.param(completions.build_return(lease()), None, id="returned to the queue"),
        pytest.param(completions.build_cancellation(lease(), PLAIN), None, id="of no sequence"),
    ],
)
def test_what_the_end_of_a_request_leaves_to_its_sequence(
    completion: Completion, left: TurnEnd | None
) -> None:
    assert end(completion) == left


def test_cause_of_a_failed_turn_is_shortened() -> None:
    left = end(completions.build_error(lease(), OF_SEQUENCE, ErrorCode.INVALID_REQUEST, "x" * 1000))
    assert cast(TurnEnd, left).cause.startswith("request r-1 has failed: INVALID_REQUEST: xxx")
    assert len(cast(TurnEnd, left).cause) <= 300


def test_overdue_request_ends_its_turn() -> None:
    overdue = UnleasedRequest("1", b"member")
    settlement = end_turn(completions.build_overdue_error(overdue, OF_SEQUENCE))
    assert settlement.extra == failed("DEADLINE_EXCEEDED: deadline exceeded")
