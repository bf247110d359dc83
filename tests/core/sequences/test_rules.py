"""The rules of sequences in virtual time: nothing is stuck for ever, and nothing goes out of its order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import (
    SequenceCounters,
    SequenceTerms,
    TurnEnd,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.core.sequences.rules import SequenceTable
from dispatcher.core.sequences.runs import CancelMark
from dispatcher.core.sequences.turns import (
    MAX_RUNS,
    MAX_UNPARKED_PER_STEP,
    TURN_CHECK_INTERVAL_S,
    OnError,
    SequenceStatus,
    Turn,
)

TERMS = SequenceTerms(max_idle_s=100, max_age_s=1000, max_waiting=5, gap_s=60)
UNMARKED = CancelMark(cancelled_at=0, expires_at=0)


class World:
    """Sequences, the entries that are there, and what becomes of each."""

    def __init__(self, terms: SequenceTerms = TERMS) -> None:
        self.rules = SequenceTable()
        self.rules.set_terms(terms)
        self.now = 0.0
        self.turns: dict[int, Turn] = {}
        """Of entries that have not ended."""
        self.claimable: set[int] = set()
        self.going: dict[str, int] = {}
        self.entries = 0

    def come(self, name: str, index: int | None = None, **fields: object) -> int:
        self.entries += 1
        self.turns[self.entries] = Turn(name, index, **fields)  # type: ignore[arg-type]
        self.claimable.add(self.entries)
        return self.entries

    def claim_turns(self, entry: int) -> TurnGranted | TurnWaits | TurnRejected:
        turn = self.turns[entry]
        self.claimable.discard(entry)
        verdict = self.rules.claim_turn(entry, float(entry), turn, self.now)
        if isinstance(verdict, TurnGranted):
            assert self.going.setdefault(turn.id, entry) == entry, "one at a time"
        elif isinstance(verdict, TurnRejected):
            del self.turns[entry]
        self.moved()
        return verdict

    def moved(self) -> None:
        for entry in self.rules.take_ready_entries():
            assert entry not in self.claimable
            self.claimable.add(entry)

    def end(self, entry: int, *, failed: bool = False, told: bool = True, **left: str) -> None:
        turn = self.turns.pop(entry)
        self.claimable.discard(entry)
        if self.going.get(turn.id) == entry:
            del self.going[turn.id]
        end = TurnEnd(turn, has_failed=failed, cause="it broke" if failed else "", **left)  # type: ignore[arg-type]
        self.rules.end_request(entry, end if told else None, self.now)
        self.moved()

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.rules.sweep_due(self.now, self.turns.__contains__)
        self.moved()

    def send(self, *indexes: int | None) -> list[TurnGranted | TurnWaits | TurnRejected]:
        """Requests of one sequence come and are lined up."""
        return [self.claim_turns(self.come("s", index)) for index in indexes]

    @property
    def status(self) -> SequenceStatus | None:
        one = self.rules.records.get("s")
        return None if one is None else one.status


def test_time_is_up_to_the_second_and_no_sooner() -> None:
    for passes_s, left in ((99.9, SequenceStatus.OPEN), (100.0, None)):
        world = World()
        world.send(0)
        world.end(1)
        world.sweep(passes_s)
        assert world.status is left
    for passes_s, claimable in ((59.9, set[int]()), (60.0, {1})):
        world = World()
        world.send(1)
        world.sweep(passes_s)
        assert world.claimable == claimable
    for passes_s, done in ((999.9, 1), (1000.0, 0)):
        world = World()
        world.send(0, 1)
        world.now = passes_s
        world.end(1)
        assert world.rules.records["s"].ended_count == done, "a life that is old ends with what runs"


def test_waiting_in_a_gap_is_not_idle_but_grows_old() -> None:
    world = World(SequenceTerms(max_idle_s=10, max_age_s=1000, gap_s=10_000))
    world.send(0, 2)
    world.end(1)
    world.sweep(999)
    assert world.claimable == set()
    world.sweep(1)
    assert world.claimable == {2}, "it begins the next life"


def test_no_more_wait_than_may_and_those_that_have_passed_are_among_them() -> None:
    world = World()
    assert [type(one) for one in world.send(0, 1, 2, 3, 4, 5, 6)] == [
        TurnGranted,
        *[TurnWaits] * 5,
        TurnRejected,
    ]
    world.end(3)
    assert world.send(6) == [TurnRejected(ErrorCode.SEQUENCE_FULL, "5 requests of its sequence wait already")]
    world.end(1)
    assert world.claimable == {2}
    assert world.send(6) == [TurnWaits()]


def test_resets_behind_each_other_have_an_end() -> None:
    world = World(SequenceTerms(max_waiting=10_000))
    world.send(0)
    said = [world.claim_turns(world.come("s", reset=True)) for _ in range(MAX_RUNS)]
    assert [type(one) for one in said] == [TurnWaits] * (MAX_RUNS - 1) + [TurnRejected]


def test_where_none_may_wait_one_may_go() -> None:
    world = World(SequenceTerms(max_waiting=0, max_active=1))
    assert [type(one) for one in world.send(1, 0, 1)] == [TurnRejected, TurnGranted, TurnRejected]
    assert type(world.claim_turns(world.come("other"))) is TurnRejected
    assert set(world.rules.records) == {"s"}


def test_many_that_wait_begin_some_at_a_time() -> None:
    world = World(SequenceTerms(max_active=1))
    world.claim_turns(world.come("first"))
    for number in range(MAX_UNPARKED_PER_STEP + 5):
        world.claim_turns(world.come(f"s-{number}"))
    world.rules.set_terms(SequenceTerms())
    world.sweep()
    assert len(world.claimable) == MAX_UNPARKED_PER_STEP
    world.sweep()
    assert len(world.claimable) == MAX_UNPARKED_PER_STEP + 5


def test_the_best_of_those_that_wait_begins_first() -> None:
    world = World(SequenceTerms(max_active=1))
    world.claim_turns(world.come("runs"))
    for score, name in ((5.0, "b"), (4.0, "c"), (9.0, "a"), (1.0, "b")):
        world.rules.claim_turn(world.come(name), score, Turn(name), world.now)
    world.claimable.clear()
    world.rules.cancel_sequence("c", UNMARKED, world.now)
    world.end(1)
    world.sweep(TERMS.max_idle_s * 6)
    assert [world.turns[entry].id for entry in world.claimable] == ["b"]


def test_a_head_that_is_gone_is_noticed() -> None:
    world = World()
    world.send(0, 1)
    del world.turns[1]
    world.sweep(TURN_CHECK_INTERVAL_S - 1)
    assert world.claimable == set()
    world.sweep(1)
    assert world.claimable == {2}


def test_a_failure_is_remembered_as_long_as_others_come() -> None:
    world = World()
    world.send(0)
    world.end(1, failed=True)
    for _ in range(5):
        world.sweep(90)
        assert world.send(1) == [TurnRejected(ErrorCode.SEQUENCE_ABORTED, "it broke")]
    world.sweep(100)
    assert world.status is None


def test_an_operator_gives_up_what_runs_and_a_reset_goes_behind_it() -> None:
    world = World()
    world.send(0, 1)
    assert world.rules.abort_sequence("s", "no use", world.now)
    assert type(world.claim_turns(world.come("s", reset=True))) is TurnWaits
    assert not world.claimable, "what runs has not ended"
    assert isinstance(world.claim_turns(1), TurnGranted), "it may try again"
    world.end(1, failed=True, sticky_token="old")
    assert world.claimable == {3}
    assert world.claim_turns(3) == TurnGranted(0, "", b"", True)
    assert [entry for entry, _, _ in world.rules.iterate_remaining()] == [2]


def test_what_is_held_goes_on_behind_what_passed_meanwhile() -> None:
    world = World()
    world.claim_turns(world.come("s", 0, on_error=OnError.HOLD))
    world.send(1, 2)
    world.claim_turns(world.come("s", reset=True))
    world.end(1, failed=True)
    assert world.status is SequenceStatus.HELD
    world.end(2, failed=True)
    assert world.rules.records["s"].item_count == 2, "what has passed takes no room"
    assert world.claimable == set()
    assert world.rules.release_sequence("s", world.now)
    world.moved()
    assert world.claimable == {3}


def test_a_reset_goes_on_where_the_life_before_it_is_given_up() -> None:
    world = World()
    world.claim_turns(world.come("s", 0, on_error=OnError.HOLD))
    world.claim_turns(world.come("s", reset=True))
    world.end(1, failed=True)
    assert world.rules.abort_sequence("s", "no use", world.now)
    world.moved()
    assert world.status is SequenceStatus.OPEN
    assert world.claimable == {2}


def test_one_whose_sequence_was_forgotten_is_lined_up_anew() -> None:
    world = World()
    world.send(0)
    world.rules.records.clear()
    assert world.claim_turns(1) == TurnGranted(0, "", b"", True)


def test_the_end_of_one_whose_sequence_was_forgotten_is_nothing_to_it() -> None:
    world = World()
    world.send(0)
    world.rules.records.clear()
    world.end(1)
    assert not world.rules.records


def test_an_operator_sees_what_is_known() -> None:
    world = World()
    world.send(0, 2, 3, 4)
    world.end(3)
    seen = world.rules.records["s"].make_snapshot(1)
    assert (
        seen.expected_index,
        seen.next_entry,
        seen.waiting_count,
        seen.run_count,
        seen.waiting_requests,
    ) == (1, 1, 2, 1, [(2, 2)])
    assert (seen.began_at, seen.gap_since, seen.has_token, seen.conversation_bytes) == (0.0, None, False, 0)


def test_what_is_due_follows_a_clock_that_steps_back() -> None:
    world = World()
    world.now = 10_000
    world.send(0, 2)
    world.end(1)
    world.now = 0
    world.rules.shift_checks(-10_000)
    world.sweep(60)
    assert world.claimable == set(), "as if it had been missing since then"
    world.sweep(60)
    assert world.claimable == {2}


def test_nothing_to_decide() -> None:
    world = World()
    assert not world.rules.release_sequence("s", 0.0)
    assert world.rules.cancel_sequence("s", UNMARKED, 0.0) is None
    world.send(0)
    world.end(1, failed=True)
    assert world.rules.cancel_sequence("s", UNMARKED, 0.0) is None, "it is over"


def test_what_ended_before_it_was_lined_up_is_noted_where_somebody_would_wait() -> None:
    unknown = SequenceTable()
    unknown.end_request(1, TurnEnd(Turn("s", 0), has_failed=True), 0.0)
    assert not unknown.records, "no terms were told"
    world = World(SequenceTerms(max_active=1))
    world.end(world.come("s"))
    assert world.status is None, "nobody waits for it"
    world.end(world.come("s", 0))
    assert [type(one) for one in world.send(0, 1)] == [TurnRejected, TurnGranted]
    world.end(world.come("t", 0))
    assert "t" not in world.rules.records, "there is no room for it"
    (head,) = world.going.values()
    world.end(head)
    world.end(world.come("s", 1), failed=True)
    states = [world.status]
    world.end(world.come("s"), failed=True)
    states.append(world.status)
    assert states == [SequenceStatus.OPEN, SequenceStatus.ABORTED], "the index of the first was there"


class Life(World):
    """Whatever may happen to a few sequences."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        choose = self.dice.choice
        terms = SequenceTerms(
            max_idle_s=100,
            max_age_s=choose((200, 1000)),
            max_active=choose((None, None, 1, 2)),
            max_waiting=choose((0, 2, 5, 50)),
            on_error=choose(tuple(OnError)),
            gap_s=60,
            refuse_after_end=choose((True, False)),
        )
        super().__init__(terms)
        self.leased: set[int] = set()
        self.went: list[tuple[str, int]] = []

    def live(self, steps: int) -> None:
        acts: list[Callable[[], None]] = [self.submit, self.work, self.work, self.work, self.finish]
        acts += [self.finish, self.settle_unleased, self.decide, self.pass_time, self.answer, self.lose]
        for _ in range(steps):
            self.dice.choice(acts)()
            self.leased &= self.turns.keys()

    def submit(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            self.come(
                self.dice.choice("abc"),
                self.dice.choice((None, 0, 1, 2, 3, 7)),
                last=self.dice.random() < 0.1,
                reset=self.dice.random() < 0.1,
                on_error=self.dice.choice((None, None, *OnError)),
            )

    def work(self) -> None:
        if self.claimable:
            entry = self.dice.choice(sorted(self.claimable))
            verdict = self.claim_turns(entry)
            if isinstance(verdict, TurnGranted):
                self.leased.add(entry)

    def finish(self) -> None:
        if self.leased:
            entry = self.dice.choice(sorted(self.leased))
            if self.dice.random() < 0.2:  # given back
                self.claimable.add(entry)
            else:
                self.end(entry, failed=self.dice.random() < 0.3, told=self.dice.random() < 0.9)
            self.leased.discard(entry)

    def settle_unleased(self) -> None:
        unleased = sorted(self.turns.keys() - self.leased)
        if unleased:
            self.end(self.dice.choice(unleased), failed=self.dice.random() < 0.7)

    def lose(self) -> None:
        """An older version ends one."""
        if self.leased and self.dice.random() < 0.2:
            entry = self.dice.choice(sorted(self.leased))
            self.leased.discard(entry)
            turn = self.turns.pop(entry)
            self.claimable.discard(entry)
            if self.going.get(turn.id) == entry:
                del self.going[turn.id]

    def answer(self) -> None:
        for entry, _, _ in list(self.rules.iterate_remaining()):
            if self.dice.random() < 0.5:
                self.end(entry)

    def decide(self) -> None:
        name = self.dice.choice("abc")
        if self.dice.random() < 0.5:
            self.rules.release_sequence(name, self.now)
        elif self.dice.random() < 0.3:
            self.rules.abort_sequence(name, "no use", self.now)
        elif self.dice.random() < 0.3:
            self.rules.cancel_sequence(name, UNMARKED, self.now)
        self.moved()

    def pass_time(self) -> None:
        self.sweep(self.dice.choice((0.1, 10, 61, 300)))

    def work_off(self) -> None:
        """No more comes; each is worked on as it may be claimed, and an operator releases what is held."""
        for _ in range(2000):
            if not self.turns:
                return
            for entry in [*sorted(self.leased & self.turns.keys()), *sorted(self.claimable)]:
                if entry in self.turns and (
                    entry in self.leased or isinstance(self.claim_turns(entry), TurnGranted)
                ):
                    self.end(entry)
            self.leased.clear()
            for entry, _, _ in list(self.rules.iterate_remaining()):
                self.end(entry)
            for name in list(self.rules.records):
                self.rules.release_sequence(name, self.now)
            self.moved()
            self.sweep(10)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 300))
@example(486703748, 51)  # a sequence ends while the same sweep looks at another one
def test_no_history_leaves_a_request_for_ever(seed: int, steps: int) -> None:
    life = Life(seed)
    life.live(steps)
    life.work_off()
    assert life.turns == {}, "each was answered"
    for _ in range(20):
        life.sweep(10_000)
    assert life.rules.records == {}, "and all is forgotten"
    assert not life.rules.slots
    assert not life.rules.closed_runs
    assert +life.rules.status_counts == {}, "none is alive, held or aborted"


class Restless(Life):
    """Looks at every sequence whenever it looks at any. It loses no head: a look would notice."""

    def lose(self) -> None:
        """No older version ends any."""

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        for one in self.rules.records.values():
            if one.check_at is None or one.check_at > self.now:
                one.check_at = self.now
                heapq.heappush(self.rules._checks, (self.now, one.id.encode()))
        super().sweep()


class Patient(Restless):
    """Looks when it is time."""

    def sweep(self, after_s: float = 0.0) -> None:
        World.sweep(self, after_s)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 300))
def test_a_look_that_comes_too_soon_changes_nothing(seed: int, steps: int) -> None:
    """Redis keeps the looks that it has: most of them come too soon."""
    patient, restless = Patient(seed), Restless(seed)
    for _ in range(steps):
        for life in (patient, restless):
            life.live(1)
            life.sweep()
        known, same = (
            {name: repr(replace(one, check_at=None)) for name, one in life.rules.records.items()}
            for life in (patient, restless)
        )
        assert known == same
        assert patient.rules.counters == restless.rules.counters
        assert patient.claimable == restless.claimable


def test_a_gap_before_what_has_passed_ends_in_its_time() -> None:
    """With nobody behind it, too: of what its failure ends, all that comes is told; others have its place."""
    for passes_s, status, other in (
        (59.9, SequenceStatus.OPEN, TurnWaits),
        (60.0, SequenceStatus.ABORTED, TurnGranted),
    ):
        world = World(replace(TERMS, max_active=1))
        world.send(0)
        world.end(world.come("s", 2), failed=True)
        world.end(1)
        world.sweep(passes_s)
        assert world.status is status
        assert type(world.claim_turns(world.come("other"))) is other


@pytest.mark.parametrize("count", [500])
def test_a_long_line_goes_in_its_order(count: int) -> None:
    world, dice = World(SequenceTerms(max_waiting=count)), Random(1)
    indexes = list(range(count))
    dice.shuffle(indexes)
    for index in indexes:
        entry = world.come("s", index)
        world.claim_turns(entry)
    order = []
    while world.going or world.claimable:
        for entry in list(world.claimable):
            world.claim_turns(entry)
        (entry,) = world.going.values()
        order.append(world.turns[entry].index)
        world.end(entry)
    assert order == list(range(count))


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    world = World()
    assert world.rules.forget_sequence("s", 0.0) is None
    for index in (0, 2):
        world.claim_turns(world.come("s", index, on_error=OnError.HOLD))
    assert world.rules.forget_sequence("s", 0.0) is False, "one goes, and one waits"
    world.end(1, failed=True)
    assert world.rules.forget_sequence("s", 0.0) is False, "one waits"
    world.end(2)
    assert world.rules.records["s"].item_count == 1, "its index has passed"
    assert world.rules.forget_sequence("s", 0.0) is True
    assert (world.rules.records, world.rules.slots, world.rules.closed_runs) == ({}, {}, {})
    assert world.rules.status_counts[SequenceStatus.HELD] == 0
    assert isinstance(world.claim_turns(world.come("s", 0)), TurnGranted)


def test_what_happens_is_counted_once() -> None:
    world = World(replace(TERMS, refuse_after_end=True))
    world.send(0, 2)
    world.end(1)
    world.sweep(59)
    assert world.rules.counters == SequenceCounters()
    world.sweep(1)
    world.sweep(60)
    assert world.rules.counters == SequenceCounters(gaps=1)
    world.end(2)
    world.sweep(99)
    assert world.rules.counters.idle == 0
    world.sweep(1)
    assert world.rules.records["s"].status is SequenceStatus.ENDED
    world.sweep(500)
    assert world.rules.records == {}, "that it had ended is forgotten, which nobody is told"
    assert world.rules.counters == SequenceCounters(gaps=1, idle=1)
    world.claim_turns(old := world.come("old"))
    world.sweep(1000)
    world.end(old)
    assert world.rules.counters == SequenceCounters(gaps=1, idle=1, aged=1)
