"""Who waits in the line of `batched` is counted, however those who give up and those who look take turns."""

from __future__ import annotations

from concurrent.futures import Future
from contextvars import Context
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batched.waiting import CallerQueue, CallTerms, Waiter
from dispatcher.core.merging.grouping import GroupingRule, WaitingItem

NEVER = GroupingRule(max_size=100, max_delay_s=1000.0)


def line() -> CallerQueue[int, int]:
    return CallerQueue(CallTerms("f", NEVER, inf, 1, True, Context()))


def waiter(number: int) -> Waiter[int, int]:
    return Waiter(number, WaitingItem(1, 0.0), Future[int](), None)


def test_who_gave_up_is_taken_out_once_though_it_leaves_later() -> None:
    """A task is cancelled at once, and runs the code that leaves the line a step later."""
    gathering = line()
    first, second, third = (waiter(number) for number in range(3))
    gathering.add_waiter(first)
    gathering.add_waiter(second)
    first.future.cancel()
    second.future.cancel()
    gathering.remove_waiter(first)
    gathering.take_batch(1.0, is_quiet=False)
    gathering.remove_waiter(second)
    assert len(gathering) == 0
    gathering.add_waiter(third)
    assert len(gathering) == 1
    assert gathering.flushes_when_quiet


@given(st.lists(st.tuples(st.sampled_from(["join", "give up", "leave", "look"]), st.integers(0, 7))))
def test_the_count_is_that_of_those_who_have_not_left(steps: list[tuple[str, int]]) -> None:
    gathering, waiting, leaving = line(), list[Any](), list[Any]()
    for step, which in steps:
        if step == "join":
            waiting.append(waiter(which))
            gathering.add_waiter(waiting[-1])
        elif step == "give up" and waiting:
            one = waiting.pop(which % len(waiting))
            one.future.cancel()
            leaving.append(one)
        elif step == "leave" and leaving:
            gathering.remove_waiter(leaving.pop(which % len(leaving)))
        elif step == "look":
            gathering.take_batch(1.0, is_quiet=False)
        assert len(waiting) <= len(gathering) <= len(waiting) + len(leaving)
    for each in leaving:
        gathering.remove_waiter(each)
    assert len(gathering) == len(waiting)
