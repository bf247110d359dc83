"""Rules of sequences in virtual time: no request is stuck for ever, and none runs out of order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.features.sequences.decisions import SequenceTerms, TurnGranted, TurnRejected, TurnWaits
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, Turn
from tests.features.memory_queue.sequence_rules import SequenceTable
from tests.features.memory_queue.sequence_runs import CancelMark

UNMARKED = CancelMark(cancelled_at=0, expires_at=0)


class Sequences:
    """Sequence table with the entries of a queue and the state of each."""

    def __init__(self, terms: SequenceTerms) -> None:
        self.table = SequenceTable()
        self.table.set_terms(terms)
        self.now = 0.0
        self.turns: dict[int, Turn] = {}
        """Turns of the entries that have not ended."""
        self.claimable: set[int] = set()
        self.in_flight: dict[str, int] = {}
        self.entry_count = 0

    def add_request(self, name: str, index: int | None = None, **fields: object) -> int:
        self.entry_count += 1
        self.turns[self.entry_count] = Turn(name, index, **fields)  # type: ignore[arg-type]
        self.claimable.add(self.entry_count)
        return self.entry_count

    def claim_turn(self, entry: int) -> TurnGranted | TurnWaits | TurnRejected:
        turn = self.turns[entry]
        self.claimable.discard(entry)
        decision = self.table.claim_turn(entry, float(entry), turn, self.now)
        if isinstance(decision, TurnGranted):
            assert self.in_flight.setdefault(turn.id, entry) == entry, (
                "two requests of a sequence run at once"
            )
        elif isinstance(decision, TurnRejected):
            del self.turns[entry]
        self.collect_ready_entries()
        return decision

    def collect_ready_entries(self) -> None:
        for entry in self.table.take_ready_entries():
            assert entry not in self.claimable
            self.claimable.add(entry)

    def end_request(self, entry: int, *, failed: bool = False, with_turn_end: bool = True) -> None:
        turn = self.turns.pop(entry)
        self.claimable.discard(entry)
        if self.in_flight.get(turn.id) == entry:
            del self.in_flight[turn.id]
        end = TurnEnd(turn, has_failed=failed, cause="it broke" if failed else "")
        self.table.end_request(entry, end if with_turn_end else None, self.now)
        self.collect_ready_entries()

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.table.sweep_due(self.now)
        self.collect_ready_entries()


class RandomHistory(Sequences):
    """Random events in a few sequences."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        choose = self.rng.choice
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

    def run_steps(self, steps: int) -> None:
        actions: list[Callable[[], None]] = [
            self.submit,
            self.claim_one,
            self.claim_one,
            self.claim_one,
            self.finish_one,
        ]
        actions += [
            self.finish_one,
            self.settle_unleased,
            self.decide_as_operator,
            self.pass_time,
            self.answer_remaining,
        ]
        for _ in range(steps):
            self.rng.choice(actions)()
            self.leased &= self.turns.keys()

    def submit(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.add_request(
                self.rng.choice("abc"),
                self.rng.choice((None, 0, 1, 2, 3, 7)),
                last=self.rng.random() < 0.1,
                reset=self.rng.random() < 0.1,
                on_error=self.rng.choice((None, None, *OnError)),
            )

    def claim_one(self) -> None:
        if self.claimable:
            entry = self.rng.choice(sorted(self.claimable))
            decision = self.claim_turn(entry)
            if isinstance(decision, TurnGranted):
                self.leased.add(entry)

    def finish_one(self) -> None:
        if self.leased:
            entry = self.rng.choice(sorted(self.leased))
            if self.rng.random() < 0.2:  # released
                self.claimable.add(entry)
            else:
                self.end_request(entry, failed=self.rng.random() < 0.3, with_turn_end=self.rng.random() < 0.9)
            self.leased.discard(entry)

    def settle_unleased(self) -> None:
        unleased = sorted(self.turns.keys() - self.leased)
        if unleased:
            self.end_request(self.rng.choice(unleased), failed=self.rng.random() < 0.7)

    def answer_remaining(self) -> None:
        for entry, _, _ in list(self.table.iterate_remaining()):
            if self.rng.random() < 0.5:
                self.end_request(entry)

    def decide_as_operator(self) -> None:
        name = self.rng.choice("abc")
        if self.rng.random() < 0.5:
            self.table.release_sequence(name, self.now)
        elif self.rng.random() < 0.3:
            self.table.abort_sequence(name, "no use", self.now)
        elif self.rng.random() < 0.3:
            self.table.cancel_sequence(name, UNMARKED, self.now)
        self.collect_ready_entries()

    def pass_time(self) -> None:
        self.sweep(self.rng.choice((0.1, 10, 61, 300)))

    def finish_all(self) -> None:
        """Finish all requests without adding any, and release held sequences."""
        for _ in range(2000):
            if not self.turns:
                return
            for entry in [*sorted(self.leased & self.turns.keys()), *sorted(self.claimable)]:
                if entry in self.turns and (
                    entry in self.leased or isinstance(self.claim_turn(entry), TurnGranted)
                ):
                    self.end_request(entry)
            self.leased.clear()
            for entry, _, _ in list(self.table.iterate_remaining()):
                self.end_request(entry)
            for name in list(self.table.records):
                self.table.release_sequence(name, self.now)
            self.collect_ready_entries()
            self.sweep(10)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 300))
def test_every_request_is_answered_and_forgotten_in_every_history(seed: int, steps: int) -> None:
    history = RandomHistory(seed)
    history.run_steps(steps)
    history.finish_all()
    assert history.turns == {}, "each request was answered"
    for _ in range(20):
        history.sweep(10_000)
    assert history.table.records == {}, "all sequences are forgotten"
    assert not history.table.slots
    assert not history.table.closed_runs
    assert +history.table.status_counts == {}, "no sequence is counted in any status"


class EagerHistory(RandomHistory):
    """History that checks every sequence at each sweep."""

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        for record in self.table.records.values():
            if record.check_at is None or record.check_at > self.now:
                record.check_at = self.now
                heapq.heappush(self.table._checks, (self.now, record.id.encode()))
        super().sweep()


class TimelyHistory(EagerHistory):
    """History that checks sequences when they are due."""

    def sweep(self, after_s: float = 0.0) -> None:
        Sequences.sweep(self, after_s)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 300))
def test_check_that_comes_too_early_changes_nothing(seed: int, steps: int) -> None:
    """In Redis, checks stay scheduled when they are replaced, so most of them come too early."""
    timely, eager = TimelyHistory(seed), EagerHistory(seed)
    for _ in range(steps):
        for history in (timely, eager):
            history.run_steps(1)
            history.sweep()
        assert timely.table.records == eager.table.records
        assert timely.table.counters == eager.table.counters
        assert timely.claimable == eager.claimable
