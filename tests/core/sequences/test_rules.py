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
from dispatcher.core.sequences.decisions import Barred, Goes, SequenceNews, SequenceTerms, TurnEnd, Waits
from dispatcher.core.sequences.rules import Sequences
from dispatcher.core.sequences.runs import CancelMark
from dispatcher.core.sequences.turns import LIVES_MOST, LOOK_S, UNPARK_MOST, OnError, SequenceStatus, Turn

TERMS = SequenceTerms(max_idle_s=100, max_age_s=1000, max_waiting=5, gap_s=60)
UNMARKED = CancelMark(at=0, until=0)


class World:
    """Sequences, the entries that are there, and what becomes of each."""

    def __init__(self, terms: SequenceTerms = TERMS) -> None:
        self.rules = Sequences()
        self.rules.tell(terms)
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

    def line_up(self, entry: int) -> Goes | Waits | Barred:
        turn = self.turns[entry]
        self.claimable.discard(entry)
        verdict = self.rules.line_up(entry, float(entry), turn, self.now)
        if isinstance(verdict, Goes):
            assert self.going.setdefault(turn.id, entry) == entry, "one at a time"
        elif isinstance(verdict, Barred):
            del self.turns[entry]
        self.moved()
        return verdict

    def moved(self) -> None:
        for entry in self.rules.moved():
            assert entry not in self.claimable
            self.claimable.add(entry)

    def end(self, entry: int, *, failed: bool = False, told: bool = True, **left: str) -> None:
        turn = self.turns.pop(entry)
        self.claimable.discard(entry)
        if self.going.get(turn.id) == entry:
            del self.going[turn.id]
        end = TurnEnd(turn, failed=failed, cause="it broke" if failed else "", **left)  # type: ignore[arg-type]
        self.rules.end(entry, end if told else None, self.now)
        self.moved()

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.rules.sweep(self.now, self.turns.__contains__)
        self.moved()

    def send(self, *indexes: int | None) -> list[Goes | Waits | Barred]:
        """Requests of one sequence come and are lined up."""
        return [self.line_up(self.come("s", index)) for index in indexes]

    @property
    def status(self) -> SequenceStatus | None:
        one = self.rules.known.get("s")
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
        assert world.rules.known["s"].done == done, "a life that is old ends with what runs"


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
    assert [type(one) for one in world.send(0, 1, 2, 3, 4, 5, 6)] == [Goes, *[Waits] * 5, Barred]
    world.end(3)
    assert world.send(6) == [Barred(ErrorCode.SEQUENCE_FULL, "5 requests of its sequence wait already")]
    world.end(1)
    assert world.claimable == {2}
    assert world.send(6) == [Waits()]


def test_resets_behind_each_other_have_an_end() -> None:
    world = World(SequenceTerms(max_waiting=10_000))
    world.send(0)
    said = [world.line_up(world.come("s", reset=True)) for _ in range(LIVES_MOST)]
    assert [type(one) for one in said] == [Waits] * (LIVES_MOST - 1) + [Barred]


def test_where_none_may_wait_one_may_go() -> None:
    world = World(SequenceTerms(max_waiting=0, max_active=1))
    assert [type(one) for one in world.send(1, 0, 1)] == [Barred, Goes, Barred]
    assert type(world.line_up(world.come("other"))) is Barred
    assert set(world.rules.known) == {"s"}


def test_many_that_wait_begin_some_at_a_time() -> None:
    world = World(SequenceTerms(max_active=1))
    world.line_up(world.come("first"))
    for number in range(UNPARK_MOST + 5):
        world.line_up(world.come(f"s-{number}"))
    world.rules.tell(SequenceTerms())
    world.sweep()
    assert len(world.claimable) == UNPARK_MOST
    world.sweep()
    assert len(world.claimable) == UNPARK_MOST + 5


def test_the_best_of_those_that_wait_begins_first() -> None:
    world = World(SequenceTerms(max_active=1))
    world.line_up(world.come("runs"))
    for score, name in ((5.0, "b"), (4.0, "c"), (9.0, "a"), (1.0, "b")):
        world.rules.line_up(world.come(name), score, Turn(name), world.now)
    world.claimable.clear()
    world.rules.cancel("c", UNMARKED, world.now)
    world.end(1)
    world.sweep(TERMS.max_idle_s * 6)
    assert [world.turns[entry].id for entry in world.claimable] == ["b"]


def test_a_head_that_is_gone_is_noticed() -> None:
    world = World()
    world.send(0, 1)
    del world.turns[1]
    world.sweep(LOOK_S - 1)
    assert world.claimable == set()
    world.sweep(1)
    assert world.claimable == {2}


def test_a_failure_is_remembered_as_long_as_others_come() -> None:
    world = World()
    world.send(0)
    world.end(1, failed=True)
    for _ in range(5):
        world.sweep(90)
        assert world.send(1) == [Barred(ErrorCode.SEQUENCE_ABORTED, "it broke")]
    world.sweep(100)
    assert world.status is None


def test_an_operator_gives_up_what_runs_and_a_reset_goes_behind_it() -> None:
    world = World()
    world.send(0, 1)
    assert world.rules.abort("s", "no use", world.now)
    assert type(world.line_up(world.come("s", reset=True))) is Waits
    assert not world.claimable, "what runs has not ended"
    assert isinstance(world.line_up(1), Goes), "it may try again"
    world.end(1, failed=True, token="old")
    assert world.claimable == {3}
    assert world.line_up(3) == Goes(0, "", b"", True)
    assert [entry for entry, _, _ in world.rules.unserved()] == [2]


def test_what_is_held_goes_on_behind_what_passed_meanwhile() -> None:
    world = World()
    world.line_up(world.come("s", 0, on_error=OnError.HOLD))
    world.send(1, 2)
    world.line_up(world.come("s", reset=True))
    world.end(1, failed=True)
    assert world.status is SequenceStatus.HELD
    world.end(2, failed=True)
    assert world.rules.known["s"].in_line == 2, "what has passed takes no room"
    assert world.claimable == set()
    assert world.rules.release("s", world.now)
    world.moved()
    assert world.claimable == {3}


def test_a_reset_goes_on_where_the_life_before_it_is_given_up() -> None:
    world = World()
    world.line_up(world.come("s", 0, on_error=OnError.HOLD))
    world.line_up(world.come("s", reset=True))
    world.end(1, failed=True)
    assert world.rules.abort("s", "no use", world.now)
    world.moved()
    assert world.status is SequenceStatus.OPEN
    assert world.claimable == {2}


def test_one_whose_sequence_was_forgotten_is_lined_up_anew() -> None:
    world = World()
    world.send(0)
    world.rules.known.clear()
    assert world.line_up(1) == Goes(0, "", b"", True)


def test_the_end_of_one_whose_sequence_was_forgotten_is_nothing_to_it() -> None:
    world = World()
    world.send(0)
    world.rules.known.clear()
    world.end(1)
    assert not world.rules.known


def test_an_operator_sees_what_is_known() -> None:
    world = World()
    world.send(0, 2, 3, 4)
    world.end(3)
    seen = world.rules.known["s"].seen(1)
    assert (seen.next, seen.head, seen.waiting, seen.lives, seen.line) == (1, 1, 2, 1, [(2, 2)])
    assert (seen.began_at, seen.gap_since, seen.has_token, seen.carry_bytes) == (0.0, None, False, 0)


def test_what_is_due_follows_a_clock_that_steps_back() -> None:
    world = World()
    world.now = 10_000
    world.send(0, 2)
    world.end(1)
    world.now = 0
    world.rules.step_back(-10_000)
    world.sweep(60)
    assert world.claimable == set(), "as if it had been missing since then"
    world.sweep(60)
    assert world.claimable == {2}


def test_nothing_to_decide() -> None:
    world = World()
    assert not world.rules.release("s", 0.0)
    assert world.rules.cancel("s", UNMARKED, 0.0) is None
    world.send(0)
    world.end(1, failed=True)
    assert world.rules.cancel("s", UNMARKED, 0.0) is None, "it is over"


def test_what_ended_before_it_was_lined_up_is_noted_where_somebody_would_wait() -> None:
    unknown = Sequences()
    unknown.end(1, TurnEnd(Turn("s", 0), failed=True), 0.0)
    assert not unknown.known, "no terms were told"
    world = World(SequenceTerms(max_active=1))
    world.end(world.come("s"))
    assert world.status is None, "nobody waits for it"
    world.end(world.come("s", 0))
    assert [type(one) for one in world.send(0, 1)] == [Barred, Goes]
    world.end(world.come("t", 0))
    assert "t" not in world.rules.known, "there is no room for it"
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
        acts += [self.finish, self.expire, self.decide, self.pass_time, self.answer, self.lose]
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
            verdict = self.line_up(entry)
            if isinstance(verdict, Goes):
                self.leased.add(entry)

    def finish(self) -> None:
        if self.leased:
            entry = self.dice.choice(sorted(self.leased))
            if self.dice.random() < 0.2:  # given back
                self.claimable.add(entry)
            else:
                self.end(entry, failed=self.dice.random() < 0.3, told=self.dice.random() < 0.9)
            self.leased.discard(entry)

    def expire(self) -> None:
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
        for entry, _, _ in list(self.rules.unserved()):
            if self.dice.random() < 0.5:
                self.end(entry)

    def decide(self) -> None:
        name = self.dice.choice("abc")
        if self.dice.random() < 0.5:
            self.rules.release(name, self.now)
        elif self.dice.random() < 0.3:
            self.rules.abort(name, "no use", self.now)
        elif self.dice.random() < 0.3:
            self.rules.cancel(name, UNMARKED, self.now)
        self.moved()

    def pass_time(self) -> None:
        self.sweep(self.dice.choice((0.1, 10, 61, 300)))

    def work_off(self) -> None:
        """No more comes; each is worked on as it may be claimed, and an operator releases what is held."""
        for _ in range(2000):
            if not self.turns:
                return
            for entry in [*sorted(self.leased & self.turns.keys()), *sorted(self.claimable)]:
                if entry in self.turns and (entry in self.leased or isinstance(self.line_up(entry), Goes)):
                    self.end(entry)
            self.leased.clear()
            for entry, _, _ in list(self.rules.unserved()):
                self.end(entry)
            for name in list(self.rules.known):
                self.rules.release(name, self.now)
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
    assert life.rules.known == {}, "and all is forgotten"
    assert not life.rules.seats
    assert not life.rules.over
    assert +life.rules.count == {}, "none is alive, held or aborted"


class Restless(Life):
    """Looks at every sequence whenever it looks at any. It loses no head: a look would notice."""

    def lose(self) -> None:
        """No older version ends any."""

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        for one in self.rules.known.values():
            if one.due_at is None or one.due_at > self.now:
                one.due_at = self.now
                heapq.heappush(self.rules._due, (self.now, one.id.encode()))
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
            {name: repr(replace(one, due_at=None)) for name, one in life.rules.known.items()}
            for life in (patient, restless)
        )
        assert known == same
        assert patient.rules.news == restless.rules.news
        assert patient.claimable == restless.claimable


def test_a_gap_before_what_has_passed_ends_in_its_time() -> None:
    """With nobody behind it, too: of what its failure ends, all that comes is told; others have its place."""
    for passes_s, status, other in ((59.9, SequenceStatus.OPEN, Waits), (60.0, SequenceStatus.ABORTED, Goes)):
        world = World(replace(TERMS, max_active=1))
        world.send(0)
        world.end(world.come("s", 2), failed=True)
        world.end(1)
        world.sweep(passes_s)
        assert world.status is status
        assert type(world.line_up(world.come("other"))) is other


@pytest.mark.parametrize("count", [500])
def test_a_long_line_goes_in_its_order(count: int) -> None:
    world, dice = World(SequenceTerms(max_waiting=count)), Random(1)
    indexes = list(range(count))
    dice.shuffle(indexes)
    for index in indexes:
        entry = world.come("s", index)
        world.line_up(entry)
    order = []
    while world.going or world.claimable:
        for entry in list(world.claimable):
            world.line_up(entry)
        (entry,) = world.going.values()
        order.append(world.turns[entry].index)
        world.end(entry)
    assert order == list(range(count))


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    world = World()
    assert world.rules.forget("s", 0.0) is None
    for index in (0, 2):
        world.line_up(world.come("s", index, on_error=OnError.HOLD))
    assert world.rules.forget("s", 0.0) is False, "one goes, and one waits"
    world.end(1, failed=True)
    assert world.rules.forget("s", 0.0) is False, "one waits"
    world.end(2)
    assert world.rules.known["s"].in_line == 1, "its index has passed"
    assert world.rules.forget("s", 0.0) is True
    assert (world.rules.known, world.rules.seats, world.rules.over) == ({}, {}, {})
    assert world.rules.count[SequenceStatus.HELD] == 0
    assert isinstance(world.line_up(world.come("s", 0)), Goes)


def test_what_happens_is_counted_once() -> None:
    world = World(replace(TERMS, refuse_after_end=True))
    world.send(0, 2)
    world.end(1)
    world.sweep(59)
    assert world.rules.news == SequenceNews()
    world.sweep(1)
    world.sweep(60)
    assert world.rules.news == SequenceNews(gaps=1)
    world.end(2)
    world.sweep(99)
    assert world.rules.news.idle == 0
    world.sweep(1)
    assert world.rules.known["s"].status is SequenceStatus.ENDED
    world.sweep(500)
    assert world.rules.known == {}, "that it had ended is forgotten, which nobody is told"
    assert world.rules.news == SequenceNews(gaps=1, idle=1)
    world.line_up(old := world.come("old"))
    world.sweep(1000)
    world.end(old)
    assert world.rules.news == SequenceNews(gaps=1, idle=1, aged=1)
