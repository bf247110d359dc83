"""Requests whose owners keep dying: the deadly one is found, those that stood beside it are not blamed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.requests.lanes import Lane
from dispatcher.dispatch.completions import build_return
from dispatcher.dispatch.suspects import STARTUP_S, SuspectRule
from dispatcher.ports import Lease, Release, Settlement

INNOCENT_MOST = RetryPolicy().max_deliveries
SUSPECT = Lease(
    1, "t", b"", 0.0, deliveries=3, failed_attempts=0, refusals=0, deaths_as_suspect=0, lane=Lane.SUSPECTS
)
ENDED = Settlement(SUSPECT, b"{}", "")


def alone() -> SuspectRule:
    """A process that has seen that nothing else waits."""
    made = SuspectRule()
    assert made.compute_room(0, now=0.0) == 0
    assert made.record_claim(claimable_count=0), "ask again: nothing but suspects may be left"
    return made


@given(st.integers(1, 200), st.data())
def test_the_deadly_one_dies_alone_and_nobody_else_is_blamed_to_death(
    length: int, data: st.DataObject
) -> None:
    """Whatever the order in which they end: a process takes suspects from the front of the line, dies when
    the deadly one's time has come, and the next process begins anew."""
    deadly = data.draw(st.integers(0, length - 1), "deadly")
    random = data.draw(st.randoms(use_true_random=False), "order")
    line, losses = list(range(length)), Counter[int]()
    while losses[deadly] <= INNOCENT_MOST:
        process = alone()
        running: list[int] = []
        while True:
            room = process.compute_room(len(running), now=1.0)
            waiting = [one for one in line if one not in running]
            running += waiting[:room]
            picked = random.choice(running)
            if picked == deadly:
                break
            running.remove(picked)
            line.remove(picked)
            process.record_completion(ENDED)
        losses.update(running)
    assert max((count for one, count in losses.items() if one != deadly), default=0) <= INNOCENT_MOST


def test_a_young_process_takes_no_suspects_while_others_wait() -> None:
    process = SuspectRule()
    assert process.compute_room(0, now=0.0) == 0
    assert not process.record_claim(claimable_count=40)
    assert process.compute_room(0, now=STARTUP_S - 0.1) == 0
    assert process.compute_room(0, now=STARTUP_S) == 1
    assert not process.record_claim(claimable_count=0), "they were allowed: there is nothing to ask again for"


def test_each_two_that_end_make_room_for_one_more() -> None:
    process = alone()
    room = []
    for _ in range(7):
        room.append(process.compute_room(0, now=0.0))
        assert process.record_completion(ENDED)
    assert room == [1, 1, 2, 2, 3, 3, 4]
    assert process.compute_room(3, now=0.0) == 1
    assert process.compute_room(9, now=0.0) == 0


def test_what_was_given_back_untouched_proves_nothing() -> None:
    process = alone()
    for _ in range(4):
        assert process.record_completion(build_return(SUSPECT))
    assert process.compute_room(0, now=0.0) == 1
    for _ in range(2):
        process.record_completion(Release(SUSPECT, delay_s=2.0, is_failed_attempt=True))
    assert process.compute_room(0, now=0.0) == 2, "a failed try has not killed us"
