"""The queue of callers of a batched function counts its waiting callers, whatever the order of cancellations
and batches."""

from __future__ import annotations

from concurrent.futures import Future
from contextvars import Context
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batched.waiting import CallerQueue, CallTerms, Waiter
from dispatcher.common.grouping import GroupingRule, WaitingItem

NEVER = GroupingRule(max_size=100, max_delay_s=1000.0)


def create_queue() -> CallerQueue[int, int]:
    return CallerQueue(CallTerms("f", NEVER, 1000, 1, True, Context()))


def create_waiter(number: int) -> Waiter[int, int]:
    return Waiter(number, WaitingItem(1, 0.0), Future[int](), None)


def test_cancelled_waiter_is_removed_once_although_it_leaves_later() -> None:
    """A cancelled task runs the code that leaves the queue one step later."""
    queue = create_queue()
    first, second, third = (create_waiter(number) for number in range(3))
    queue.add_waiter(first)
    queue.add_waiter(second)
    first.future.cancel()
    second.future.cancel()
    queue.remove_waiter(first)
    queue.take_batch(1.0, is_quiet=False, has_room=True)
    queue.remove_waiter(second)
    assert len(queue) == 0
    queue.add_waiter(third)
    assert len(queue) == 1
    assert queue.flushes_when_quiet


@given(st.lists(st.tuples(st.sampled_from(["join", "cancel", "leave", "take batch"]), st.integers(0, 7))))
def test_length_counts_the_waiters_that_have_not_left(steps: list[tuple[str, int]]) -> None:
    queue, waiting, leaving = create_queue(), list[Any](), list[Any]()
    for step, index in steps:
        if step == "join":
            waiting.append(create_waiter(index))
            queue.add_waiter(waiting[-1])
        elif step == "cancel" and waiting:
            cancelled = waiting.pop(index % len(waiting))
            cancelled.future.cancel()
            leaving.append(cancelled)
        elif step == "leave" and leaving:
            queue.remove_waiter(leaving.pop(index % len(leaving)))
        elif step == "take batch":
            queue.take_batch(1.0, is_quiet=False, has_room=True)
        assert len(waiting) <= len(queue) <= len(waiting) + len(leaving)
    for each in leaving:
        queue.remove_waiter(each)
    assert len(queue) == len(waiting)
