"""Requests whose owners die repeatedly: the deadly one is found, and the others are not blamed for it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.kernel.completions import build_return
from dispatcher.kernel.suspects import STARTUP_S, SuspectRule
from dispatcher.queue.contract import Lease, Release, Settlement
from dispatcher.requests.lanes import Lane
from dispatcher.requests.outcomes.outcome import RetryPolicy

MAX_LOSSES_OF_HARMLESS = RetryPolicy().max_deliveries
SUSPECT = Lease(
    1, "t", b"", 0.0, deliveries=3, failed_attempts=0, refusals=0, deaths_as_suspect=0, lane=Lane.SUSPECTS
)
COMPLETION = Settlement(SUSPECT, b"{}", "")


def build_rule_without_other_work() -> SuspectRule:
    """Return the rule of a process that has seen that no other work waits."""
    rule = SuspectRule()
    assert rule.compute_room(0, now=0.0) == 0
    assert rule.record_claim(claimable_count=0), "claim again, because only suspects may be left"
    return rule


@given(st.integers(1, 200), st.data())
def test_deadly_request_is_found_and_no_other_request_reaches_the_maximum_of_losses(
    length: int, data: st.DataObject
) -> None:
    """Suspects end in any order. A process claims them from the front of the queue and dies when the deadly
    one would end; the next process starts without experience."""
    deadly = data.draw(st.integers(0, length - 1), "deadly")
    random = data.draw(st.randoms(use_true_random=False), "order")
    queue, losses = list(range(length)), Counter[int]()
    while losses[deadly] <= MAX_LOSSES_OF_HARMLESS:
        rule = build_rule_without_other_work()
        running: list[int] = []
        while True:
            room = rule.compute_room(len(running), now=1.0)
            waiting = [suspect for suspect in queue if suspect not in running]
            running += waiting[:room]
            ended = random.choice(running)
            if ended == deadly:
                break
            running.remove(ended)
            queue.remove(ended)
            rule.record_completion(COMPLETION)
        losses.update(running)
    assert (
        max((losses_of_one for suspect, losses_of_one in losses.items() if suspect != deadly), default=0)
        <= MAX_LOSSES_OF_HARMLESS
    )


def test_process_that_just_started_claims_no_suspects_while_other_work_waits() -> None:
    rule = SuspectRule()
    assert rule.compute_room(0, now=0.0) == 0
    assert not rule.record_claim(claimable_count=40)
    assert rule.compute_room(0, now=STARTUP_S - 0.1) == 0
    assert rule.compute_room(0, now=STARTUP_S) == 1
    assert not rule.record_claim(claimable_count=0), "suspects had room, so there is no reason to claim again"


def test_each_two_completed_suspects_make_room_for_one_more() -> None:
    rule = build_rule_without_other_work()
    room = []
    for _ in range(7):
        room.append(rule.compute_room(0, now=0.0))
        assert rule.record_completion(COMPLETION)
    assert room == [1, 1, 2, 2, 3, 3, 4]
    assert rule.compute_room(3, now=0.0) == 1
    assert rule.compute_room(9, now=0.0) == 0


def test_suspect_returned_without_an_attempt_does_not_count_as_survived() -> None:
    rule = build_rule_without_other_work()
    for _ in range(4):
        assert rule.record_completion(build_return(SUSPECT))
    assert rule.compute_room(0, now=0.0) == 1
    for _ in range(2):
        rule.record_completion(Release(SUSPECT, delay_s=2.0, is_failed_attempt=True))
    assert rule.compute_room(0, now=0.0) == 2, "a failed attempt has not killed the process"
