"""Rules of sequences in virtual time: no request is stuck for ever, and none runs out of order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.features.sequences.decisions import (
    SequenceCounters,
    SequenceTerms,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import (
    OnError,
    SequenceStatus,
    Turn,
)
from tests.features.memory_queue.sequence_rules import SequenceTable
from tests.features.memory_queue.sequence_runs import CancelMark

TERMS = SequenceTerms(max_idle_s=100, max_age_s=1000, max_waiting=5, gap_s=60)
UNMARKED = CancelMark(cancelled_at=0, expires_at=0)


class Sequences:
    """Sequence table with the entries of a queue and the state of each."""

    def __init__(self, terms: SequenceTerms = TERMS) -> None:
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

    def end_request(
        self, entry: int, *, failed: bool = False, with_turn_end: bool = True, **session: str
    ) -> None:
        turn = self.turns.pop(entry)
        self.claimable.discard(entry)
        if self.in_flight.get(turn.id) == entry:
            del self.in_flight[turn.id]
        end = TurnEnd(turn, has_failed=failed, cause="it broke" if failed else "", **session)  # type: ignore[arg-type]
        self.table.end_request(entry, end if with_turn_end else None, self.now)
        self.collect_ready_entries()

    def sweep(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.table.sweep_due(self.now)
        self.collect_ready_entries()

    def submit_and_claim(self, *indexes: int | None) -> list[TurnGranted | TurnWaits | TurnRejected]:
        """Add requests of one sequence and claim their turns."""
        return [self.claim_turn(self.add_request("s", index)) for index in indexes]

    @property
    def status(self) -> SequenceStatus | None:
        record = self.table.records.get("s")
        return None if record is None else record.status


def test_times_run_out_exactly_when_configured() -> None:
    for passed_s, status in ((99.9, SequenceStatus.OPEN), (100.0, None)):
        sequences = Sequences()
        sequences.submit_and_claim(0)
        sequences.end_request(1)
        sequences.sweep(passed_s)
        assert sequences.status is status
    for passed_s, claimable in ((59.9, set[int]()), (60.0, {1})):
        sequences = Sequences()
        sequences.submit_and_claim(1)
        sequences.sweep(passed_s)
        assert sequences.claimable == claimable
    for passed_s, ended_count in ((999.9, 1), (1000.0, 0)):
        sequences = Sequences()
        sequences.submit_and_claim(0, 1)
        sequences.now = passed_s
        sequences.end_request(1)
        assert sequences.table.records["s"].ended_count == ended_count, (
            "an old run ends with the request in flight"
        )


def test_sequence_that_waits_in_a_gap_is_not_idle_but_ages() -> None:
    sequences = Sequences(SequenceTerms(max_idle_s=10, max_age_s=1000, gap_s=10_000))
    sequences.submit_and_claim(0, 2)
    sequences.end_request(1)
    sequences.sweep(999)
    assert sequences.claimable == set()
    sequences.sweep(1)
    assert sequences.claimable == {2}, "the waiting request begins the next run"


def test_request_of_a_forgotten_sequence_can_claim_its_turn_anew() -> None:
    sequences = Sequences()
    sequences.submit_and_claim(0)
    sequences.table.records.clear()
    assert sequences.claim_turn(1) == TurnGranted(0, "", b"", True)


def test_end_of_a_request_of_a_forgotten_sequence_is_ignored() -> None:
    sequences = Sequences()
    sequences.submit_and_claim(0)
    sequences.table.records.clear()
    sequences.end_request(1)
    assert not sequences.table.records


def test_snapshot_of_a_sequence_shows_its_state() -> None:
    sequences = Sequences()
    sequences.submit_and_claim(0, 2, 3, 4)
    sequences.end_request(3)
    snapshot = sequences.table.records["s"].make_snapshot(1)
    assert (
        snapshot.expected_index,
        snapshot.next_entry,
        snapshot.waiting_count,
        snapshot.run_count,
        snapshot.waiting_requests,
    ) == (1, 1, 2, 1, [(2, 2)])
    assert (snapshot.began_at, snapshot.gap_since, snapshot.has_token, snapshot.conversation_bytes) == (
        0.0,
        None,
        False,
        0,
    )


def test_release_and_cancel_of_an_unknown_or_ended_sequence_do_nothing() -> None:
    sequences = Sequences()
    assert not sequences.table.release_sequence("s", 0.0)
    assert sequences.table.cancel_sequence("s", UNMARKED, 0.0) is None
    sequences.submit_and_claim(0)
    sequences.end_request(1, failed=True)
    assert sequences.table.cancel_sequence("s", UNMARKED, 0.0) is None, "the sequence is aborted already"


def test_request_that_ended_before_its_turn_is_recorded_only_if_others_would_wait_for_it() -> None:
    table_without_terms = SequenceTable()
    table_without_terms.end_request(1, TurnEnd(Turn("s", 0), has_failed=True), 0.0)
    assert not table_without_terms.records, "the table has no settings yet"
    sequences = Sequences(SequenceTerms(max_active=1))
    sequences.end_request(sequences.add_request("s"))
    assert sequences.status is None, "no request waits for it"
    sequences.end_request(sequences.add_request("s", 0))
    assert [type(decision) for decision in sequences.submit_and_claim(0, 1)] == [TurnRejected, TurnGranted]
    sequences.end_request(sequences.add_request("t", 0))
    assert "t" not in sequences.table.records, "there is no room for a further sequence"
    (next_entry,) = sequences.in_flight.values()
    sequences.end_request(next_entry)
    sequences.end_request(sequences.add_request("s", 1), failed=True)
    states = [sequences.status]
    sequences.end_request(sequences.add_request("s"), failed=True)
    states.append(sequences.status)
    assert states == [SequenceStatus.OPEN, SequenceStatus.ABORTED], (
        "the first of both has an index that has passed already"
    )


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
    """History that checks every sequence at each sweep. It loses no request, because a check would notice."""

    def lose_next_request(self) -> None:
        """Do nothing."""

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


def test_forgotten_sequence_leaves_no_state() -> None:
    sequences = Sequences()
    assert sequences.table.forget_sequence("s", 0.0) is None
    for index in (0, 2):
        sequences.claim_turn(sequences.add_request("s", index, on_error=OnError.HOLD))
    assert sequences.table.forget_sequence("s", 0.0) is False, "one request runs and one waits"
    sequences.end_request(1, failed=True)
    assert sequences.table.forget_sequence("s", 0.0) is False, "one request waits"
    sequences.end_request(2)
    assert sequences.table.records["s"].item_count == 1, "the index of the ended request has passed"
    assert sequences.table.forget_sequence("s", 0.0) is True
    assert (sequences.table.records, sequences.table.slots, sequences.table.closed_runs) == ({}, {}, {})
    assert sequences.table.status_counts[SequenceStatus.HELD] == 0
    assert isinstance(sequences.claim_turn(sequences.add_request("s", 0)), TurnGranted)


def test_each_event_is_counted_once() -> None:
    sequences = Sequences(replace(TERMS, refuse_after_end=True))
    sequences.submit_and_claim(0, 2)
    sequences.end_request(1)
    sequences.sweep(59)
    assert sequences.table.counters == SequenceCounters()
    sequences.sweep(1)
    sequences.sweep(60)
    assert sequences.table.counters == SequenceCounters(gaps=1)
    sequences.end_request(2)
    sequences.sweep(99)
    assert sequences.table.counters.idle == 0
    sequences.sweep(1)
    assert sequences.table.records["s"].status is SequenceStatus.ENDED
    sequences.sweep(500)
    assert sequences.table.records == {}, "the ended sequence is forgotten without being counted"
    assert sequences.table.counters == SequenceCounters(gaps=1, idle=1)
    sequences.claim_turn(old_entry := sequences.add_request("old"))
    sequences.sweep(1000)
    sequences.end_request(old_entry)
    assert sequences.table.counters == SequenceCounters(gaps=1, idle=1, aged=1)
