"""The scripts of sequences against the rules in core/sequences/rules.py: any interleaving, step by step.

As in test_queue_model.py every step is done in Redis and in memory, and must say the same. After each, what
is known of every sequence is compared, and a ledger that knows of neither holds single flight: of a sequence
nothing goes while another request of it goes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.sequences.decisions import SequenceTerms, TurnEnd, TurnGranted, TurnRejected, TurnWaits
from dispatcher.core.sequences.turns import OnError, SequenceSnapshot, Turn
from dispatcher.ports import DeadLetter, Release, Settlement
from tests.properties.twins import NAMES, OWNERS, UNLEASED, Bench, Held, Twins, alike, open_bench
from tests.queue.aging import age_memory, age_redis

NEVER, PAST = 4 * 10**9, 1000
TERMS = SequenceTerms(max_idle_s=1000, max_age_s=5000, max_waiting=8, gap_s=500)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench() as found:
        yield found


class SequenceModel(Twins):
    """What producers, owners, operators and time do to a few sequences."""

    owners = st.integers(0, OWNERS - 1)
    lost = st.integers(0, 9).map(lambda number: number == 0)
    names = st.sampled_from(["a", "b", "ü"])

    def __init__(self) -> None:
        super().__init__()
        self.terms = TERMS
        self.goes: dict[str, int] = {}
        """By sequence: the entry that goes."""
        self.refused: set[str] = set()

    turns = st.fixed_dictionaries(
        {
            "id": st.sampled_from(["a", "a", "b", "ü"]),
            "index": st.one_of(st.none(), st.none(), st.integers(0, 5)),
            "last": st.integers(0, 7).map(lambda number: number == 0),
            "reset": st.integers(0, 5).map(lambda number: number == 0),
            "on_error": st.sampled_from([None, None, "continue", "abort", "hold", "hold"]),
            "secret": st.sampled_from([None] * 7 + ["that of another producer"]),
        }
    )

    @rule(turns=st.lists(turns, min_size=1, max_size=5), late=st.integers(0, 3).map(lambda n: n == 0))
    def submit(self, turns: list[dict[str, Any]], late: bool) -> None:
        for turn in turns:
            self.serial += 1
            fields = {"id": f"r-{self.serial}", "deadline": NEVER, "payload": {}, "sequence": turn}
            # Most requests were submitted after any cancel, some before, and some do not say when.
            fields["created"] = {0: PAST, 4: None}.get(self.serial % 7, NEVER)
            member = json.dumps({"request_kind": "redis", "data": fields}).encode()
            self.add_line(float(PAST if late else NEVER - 10 + self.serial % 3), member)

    @rule(turns=st.lists(turns, min_size=1, max_size=5), owner=owners)
    def submit_and_take(self, turns: list[dict[str, Any]], owner: int) -> None:
        self.submit(turns, False)
        self.take(owner, 6, False, False)

    @initialize(
        max_active=st.sampled_from([None, None, 1]), refuse=st.booleans(), on_error=st.sampled_from(OnError)
    )
    def configure(self, max_active: int | None, refuse: bool, on_error: OnError) -> None:
        self.terms = replace(TERMS, max_active=max_active, refuse_after_end=refuse, on_error=on_error)

    @rule(
        max_active=st.sampled_from([None, 1, 2]),
        refuse=st.booleans(),
        on_error=st.sampled_from([*OnError, OnError.ABORT]),
        most=st.sampled_from([0, 1, 4, 8, 8]),
    )
    def reconfigure(self, max_active: int | None, refuse: bool, on_error: OnError, most: int) -> None:
        self.terms = replace(
            TERMS, max_active=max_active, refuse_after_end=refuse, on_error=on_error, max_waiting=most
        )

    @rule(owner=owners, most=st.integers(1, 9), lose=lost, again=st.integers(0, 3).map(lambda n: n == 0))
    def take(self, owner: int, most: int, lose: bool, again: bool) -> None:
        """Claim, and line up what is of a sequence."""
        self.serial += 1
        nonce, permit = f"n-{self.serial}", self.permit(owner, 100)
        real, twin = self.both(owner, lambda queue, _: queue.claim(most, nonce, permit))
        assert real.claimable_count == twin.claimable_count
        pairs = [Held(*both) for both in zip(real.leases, twin.leases, strict=True)]
        for held in pairs:
            alike(held.real, held.twin)
        self.claim_turns(owner, pairs, lose)
        if again:
            self.claim_turns(owner, [held for held in self.known[owner] if held.real.member], False)

    def claim_turns(self, owner: int, pairs: Sequence[Held], lose: bool) -> None:
        turns: list[list[Any]] = [[], []]
        mine, kept = [], []
        for held in pairs:
            turn = turn_of(held.real.member)
            if turn is None:
                kept.append(held)
                continue
            mine.append((held, turn))
            turns[0].append((held.real, turn))
            turns[1].append((held.twin, turn))

        async def ask(queue: Any, which: int) -> Any:
            if lose and which:  # its reply is lost: what was barred is judged anew
                await queue.claim_turns(turns[which], self.terms)
            return await queue.claim_turns(turns[which], self.terms)

        real, twin = self.both(owner, ask, lose)
        self.same_facts(owner, real, twin)
        assert list(real.decisions) == list(twin.decisions)
        counts, twins = self.both(owner, lambda queue, _: queue.count_requests())
        assert counts.sequences == twins.sequences
        for (held, turn), verdict in zip(mine, real.decisions, strict=True):
            entry = held.real.entry_id
            self.seen[type(verdict).__name__] += 1
            if isinstance(verdict, TurnWaits):
                self.known[owner] = [one for one in self.known[owner] if one is not held]
                continue
            if isinstance(verdict, TurnGranted):
                assert self.goes.get(turn.id, entry) == entry, "two of one sequence go at once"
                self.goes[turn.id] = entry
            else:
                assert isinstance(verdict, TurnRejected)
                self.seen[verdict.code] += 1
                self.refused.add(held.real.token)
            kept.append(held)
        self.known[owner] += [held for held in kept if held not in self.known[owner]]

    def stopped(self, entry: int) -> None:
        for name, goes in list(self.goes.items()):
            if goes == entry:
                del self.goes[name]

    def pick(self, owner: int, data: st.DataObject) -> Held | None:
        refused = [held for held in self.known[owner] if held.real.token in self.refused]
        going = [held for held in self.known[owner] if held.real.entry_id in self.goes.values()]
        pool = data.draw(st.sampled_from([refused, going, going])) or [
            *self.known[owner],
            *self.ended[-2:],
        ]
        return data.draw(st.sampled_from(pool)) if pool else None

    def drop(self, owner: int, held: Held) -> None:
        self.known[owner] = [one for one in self.known[owner] if one is not held]
        self.ended.append(held)

    ends = st.builds(
        lambda failed, token, carry: (failed, token, carry),
        st.integers(0, 2).map(lambda number: number == 0),
        st.sampled_from([None, None, "", "token"]),
        st.sampled_from([None, None, b"", b"\x00carry\xff"]),
    )

    @rule(data=st.data(), owner=owners, end=ends, bury=st.integers(0, 4), lose=lost)
    def settle(self, data: st.DataObject, owner: int, end: tuple[Any, ...], bury: int, lose: bool) -> None:
        held = self.pick(owner, data)
        if held is not None:
            self.end(owner, held, end, bury=bury == 0, lose=lose, told=data.draw(st.integers(0, 5)) > 0)

    @rule(data=st.data(), owner=owners, most=st.integers(1, 9), rounds=st.integers(1, 3))
    def work(self, data: st.DataObject, owner: int, most: int, rounds: int) -> None:
        """Take, and end what goes."""
        for _ in range(rounds):
            self.take(owner, most, False, False)
            for held in self.known[owner]:
                if held.real.entry_id in self.goes.values() or held.real.token in self.refused:
                    self.end(owner, held, data.draw(self.ends), bury=False, lose=False, told=True)

    def end(
        self, owner: int, held: Held, end: tuple[Any, ...], *, bury: bool, lose: bool, told: bool
    ) -> None:
        turn, (failed, token, carry) = turn_of(held.real.member), end
        left = None
        if turn is not None and told and held.real.token not in self.refused:
            left = TurnEnd(
                turn, has_failed=failed, cause="it: failed", sticky_token=token, conversation=carry
            )
        result = b"%d" % held.real.entry_id
        ends = [Settlement(lease, result, "", turn_end=left) for lease in (held.real, held.twin)]
        if bury:
            burials = [DeadLetter(one, "why") for one in ends]
            real, twin = self.both(owner, lambda queue, at: queue.move_to_dead_letters([burials[at]]), lose)
        else:
            real, twin = self.both(owner, lambda queue, at: queue.settle([ends[at]]), lose)
        assert list(real) == list(twin)
        if real[0] == "done":
            self.written[NAMES.result_list, result] += 1
            self.finished += not bury
            self.stopped(held.real.entry_id)
            self.seen["failed"] += left is not None and left.has_failed
        self.drop(owner, held)

    @rule(data=st.data(), owner=owners, end=ends, limit=st.sampled_from([0, 1, 2, 3, 100, 100]), lose=lost)
    def settle_and_claim_next(
        self, data: st.DataObject, owner: int, end: tuple[Any, ...], limit: int, lose: bool
    ) -> None:
        """End some that go, by an owner that takes what comes next."""
        going = [held for held in self.known[owner] if held.real.entry_id in self.goes.values()]
        if going:
            ended = data.draw(st.lists(st.sampled_from(going), min_size=1, unique_by=id))
            self.end_and_take(owner, ended, end, limit, lose)

    @rule(
        data=st.data(),
        turns=st.lists(turns, min_size=1, max_size=5),
        owner=owners,
        limit=st.sampled_from([1, 2, 100, 100]),
        rounds=st.integers(1, 3),
        lose=st.integers(0, 2).map(lambda number: number == 0),
    )
    def work_on(
        self,
        data: st.DataObject,
        turns: list[dict[str, Any]],
        owner: int,
        limit: int,
        rounds: int,
        lose: bool,
    ) -> None:
        """Take all that there is, and end what goes, over and over."""
        self.submit_and_take(turns, owner)
        self.take(owner, 9, False, False)
        for _ in range(rounds):
            if going := [held for held in self.known[owner] if held.real.entry_id in self.goes.values()]:
                self.end_and_take(owner, going, data.draw(self.ends), limit, lose)

    @rule(data=st.data(), owner=owners, name=names, lose=st.booleans())
    def work_on_one(self, data: st.DataObject, owner: int, name: str, lose: bool) -> None:
        """The same of one sequence that has more to come: chance alone seldom hands on what is told again."""
        turn = {"id": name, "index": None, "last": False, "reset": False, "on_error": "continue"}
        self.work_on(data, [turn] * 3, owner, 100, 1, lose)

    @rule(turn=turns, owner=owners)
    def one_comes_too_late(self, turn: dict[str, Any], owner: int) -> None:
        self.submit([turn], True)
        self.settle_unleased(owner, False, False)

    @rule(owner=owners, name=names, verb=st.sampled_from(["release", "release", "abort"]))
    def fail_one_and_decide(self, owner: int, name: str, verb: str) -> None:
        """One that stops at an error does, and somebody decides: by chance alone both seldom meet."""
        turn = {"id": name, "index": None, "last": False, "reset": False, "on_error": "hold"}
        self.submit_and_take([turn] * 2, owner)
        if going := [held for held in self.known[owner] if held.real.entry_id == self.goes.get(name)]:
            self.end_and_take(owner, going, (True, None, None), 100, False)
        if name in self.held():
            self.decide(owner, name, verb)

    def end_and_take(
        self, owner: int, ended: Sequence[Held], end: tuple[Any, ...], limit: int, lose: bool
    ) -> None:
        sides: list[list[Settlement]] = [[], []]
        for held in ended:
            turn = turn_of(held.real.member)
            assert turn is not None
            failed, token, carry = end
            left = TurnEnd(
                turn, has_failed=failed, cause="it: failed", sticky_token=token, conversation=carry
            )
            for side, lease in zip(sides, (held.real, held.twin), strict=True):
                side.append(Settlement(lease, b"%d" % lease.entry_id, "", turn_end=left))
        self.serial += 1
        nonce, permit = f"n-{self.serial}", self.permit(owner, limit)
        real, twin = self.both(
            owner, lambda queue, at: queue.settle_and_claim_next(sides[at], nonce, permit), lose
        )
        assert list(real.statuses) == list(twin.statuses)
        for held, answer in zip(ended, real.statuses, strict=True):
            if answer == "done":
                self.written[NAMES.result_list, b"%d" % held.real.entry_id] += 1
                self.finished += 1
                self.stopped(held.real.entry_id)
            self.drop(owner, held)
        if real.claim_result is None:  # the next claim tells
            real, twin = self.both(owner, lambda queue, _: queue.claim(9, nonce, permit))
            self.same_facts(owner, real, twin)
            # What was handed over is in no order, so that what tells of it again is in none.
            leases = (sorted(one.leases, key=lambda lease: lease.entry_id) for one in (real, twin))
            pairs = [Held(*both) for both in zip(*leases, strict=True)]
            self.claim_turns(owner, pairs, False)
            self.seen["told again"] += len(pairs)
            return
        self.same_facts(owner, real.claim_result, twin.claim_result)
        assert real.claim_result.claimable_count == twin.claim_result.claimable_count
        found, twins = (
            sorted(
                zip(one.claim_result.leases, one.granted_turns, strict=True),
                key=lambda each: each[0].entry_id,
            )
            for one in (real, twin)
        )
        for (real_lease, goes), (twin_lease, twin_goes) in zip(found, twins, strict=True):
            held = Held(real_lease, twin_lease)
            alike(held.real, held.twin)
            assert goes == twin_goes
            turn = turn_of(held.real.member)
            assert turn is not None
            assert self.goes.get(turn.id, held.real.entry_id) == held.real.entry_id, "two of one sequence go"
            self.goes[turn.id] = held.real.entry_id
            self.known[owner].append(held)
            self.seen["handed over"] += 1
        waits = real.claim_result.claimable_count > 0
        self.seen["not handed over"] += waits

    @rule(data=st.data(), owner=owners, delay_s=st.sampled_from([0.0, 1000.0]), lose=lost)
    def release(self, data: st.DataObject, owner: int, delay_s: float, lose: bool) -> None:
        held = self.pick(owner, data)
        if held is not None:
            sides = [Release(lease, delay_s=delay_s) for lease in (held.real, held.twin)]
            real, twin = self.both(owner, lambda queue, at: queue.release([sides[at]]), lose)
            assert list(real) == list(twin)
            self.drop(owner, held)

    @rule(owner=owners, killed=owners)
    def owner_is_killed(self, owner: int, killed: int) -> None:
        self.knows.ended = {f"owner-{killed}"} - {f"owner-{owner}"}
        self.sweep(owner)
        self.knows.ended = set()
        if killed != owner:
            self.ended.extend(self.known[killed])
            self.known[killed] = []

    @rule(owner=owners)
    def sweep(self, owner: int) -> None:
        real, twin = self.both(owner, lambda queue, _: queue.sweep())
        assert (real.reclaimed_count, real.due_count, real.turn_count) == (
            twin.reclaimed_count,
            twin.due_count,
            twin.turn_count,
        )
        self.seen["turns by time"] += real.turn_count

    @rule(owner=owners, seconds=st.sampled_from([600.0, 600.0, 600.0, 1100.0, 6000.0]))
    def time_passes(self, owner: int, seconds: float) -> None:
        age_redis(self.bench.raw, NAMES, seconds)
        age_memory(self.store, seconds)
        self.sweep(owner)

    @rule(owner=owners)
    def delays_pass(self, owner: int) -> None:
        key = f"{NAMES.queue_prefix}:delayed"
        if delayed := self.bench.raw.zrange(key, 0, -1):
            self.bench.raw.zadd(key, dict.fromkeys(delayed, 0.0), xx=True)
        self.store.queue.delayed.shift_keys(-(10.0**6))
        self.sweep(owner)

    @rule(owner=owners, lose=lost, failing=st.booleans())
    def settle_unleased(self, owner: int, lose: bool, failing: bool) -> None:
        found: list[dict[Any, Any]] = [{}, {}]

        async def look(queue: Any, which: int) -> None:
            for _ in range(6):
                for one in await queue.find_overdue(20):
                    found[which][one.member] = one

        self.both(owner, look)
        assert found[0].keys() == found[1].keys()
        names = sorted(found[0])
        self.answer(owner, [[side[name] for name in names] for side in found], b"late", lose, failing)

    @rule(owner=owners, most=st.integers(1, 5), lose=lost)
    def serve_the_unserved(self, owner: int, most: int, lose: bool) -> None:
        real, twin = self.both(owner, lambda queue, _: queue.find_remaining_requests(most))
        assert [(one.request.member, one.error_code, one.message) for one in real] == [
            (one.request.member, one.error_code, one.message) for one in twin
        ]
        self.seen["unserved"] += len(real)
        self.answer(owner, [[one.request for one in side] for side in (real, twin)], b"over", lose, True)

    def answer(
        self, owner: int, sides: Sequence[Sequence[Any]], why: bytes, lose: bool, failing: bool
    ) -> None:
        items: list[list[Any]] = [[], []]
        for which, side in enumerate(sides):
            for item in side:
                turn = turn_of(item.member)
                left = None if turn is None else TurnEnd(turn, has_failed=failing, cause="too late")
                items[which].append((item, Settlement(UNLEASED, why, "", turn_end=left)))
        before = dict(self.goes)
        real, twin = self.both(owner, lambda queue, at: queue.settle_unleased(items[at]), lose)
        assert real == twin == len(items[0])
        for entry in before.values():
            if entry not in self.store.queue.entries:
                self.stopped(entry)
        self.written[NAMES.result_list, why] += real
        self.finished += real
        self.seen[f"expired {why!r}"] += real

    @precondition(lambda self: self.held())
    @rule(owner=owners)
    def release_what_is_held(self, owner: int) -> None:
        self.decide(owner, self.held()[0], "release")

    @precondition(lambda self: self.over())
    @rule(owner=owners)
    def forget_what_is_over(self, owner: int) -> None:
        self.decide(owner, self.over()[0], "forget")

    @precondition(lambda self: self.in_line())
    @rule(owner=owners, verb=st.sampled_from(["abort", "cancel"]))
    def give_up_what_waits(self, owner: int, verb: str) -> None:
        self.decide(owner, self.in_line()[0], verb)

    def in_line(self) -> list[str]:
        known = self.store.queue.sequences.records.values()
        return [one.id for one in known if one.waiting_count and one.status in ("open", "held")]

    def over(self) -> list[str]:
        known = self.store.queue.sequences.records.values()
        return [one.id for one in known if one.next_request is None and not one.waiting_count]

    def held(self) -> list[str]:
        return [one.id for one in self.store.queue.sequences.records.values() if one.status == "held"]

    @rule(owner=owners, name=names, verb=st.sampled_from(["release", "abort", "cancel", "forget"]))
    def decide(self, owner: int, name: str, verb: str) -> None:
        async def act(queue: Any, which: int) -> Any:
            desk = (queue, self.store)[which]
            if verb == "abort":
                return await desk.abort_sequence(name, "an operator: gave it up")
            return await getattr(desk, f"{verb}_sequence")(name)

        real, twin = self.both(owner, act)
        assert real == twin
        self.seen[verb] += bool(real)

    @precondition(lambda self: self.store.queue.dead)
    @rule(owner=owners)
    def purge(self, owner: int) -> None:
        dead = len(self.store.queue.dead)
        self.both(owner, lambda queue, at: (queue, self.store)[at].purge_dead())
        self.finished += dead

    def compare(self, found: dict[str, Any]) -> None:
        super().compare(found)
        self.sequences_are_known_alike()
        self.lines_hold_what_waits_and_nothing_else(found)

    def sequences_are_known_alike(self) -> None:
        loop = self.bench.loops[0]

        async def look(desk: Any) -> tuple[object, list[SequenceSnapshot | None]]:
            return (await desk.count_requests()).sequence_counters, [
                await desk.get_sequence(name) for name in ("a", "b", "ü")
            ]

        (news, real), (news_of_twin, twin) = (
            loop.run_until_complete(look(desk)) for desk in (self.real[0], self.store)
        )
        assert news == news_of_twin
        self.seen.update(f"news {what}" for what in NEWS if getattr(news, what))
        assert [timeless(one) for one in real] == [timeless(one) for one in twin]
        for one, other in zip(real, twin, strict=True):
            if one is not None and other is not None:
                times = (one.began_at or 0, one.last_active_at, one.gap_since or 0)
                others = (other.began_at or 0, other.last_active_at, other.gap_since or 0)
                assert times == pytest.approx(others, abs=self.error_s)
                self.seen[f"{one.status}"] += 1
                self.seen["lives"] += one.run_count > 1
                self.seen["gaps"] += one.gap_since is not None

    def lines_hold_what_waits_and_nothing_else(self, found: dict[str, Any]) -> None:
        waiting = {int(seat[-16:]) for seat, _ in found["sequenced"]}
        line = [name[34:] for name, _ in found["sequences:turns"]]
        assert waiting == {int(name) for name in line if not name.startswith(b"-")}
        mine = self.store.queue
        assert waiting == {entry.id for entry in mine.entries.values() if entry.waits_for_turn}
        passed = sum(name.startswith(b"-") for name in line)
        over = len(found["sequences:closed-runs"])
        assert over == len(mine.sequences.closed_runs)
        if not over:
            in_line = sum(one.item_count for one in mine.sequences.records.values())
            assert passed == in_line - len(waiting)
        assert {name.decode() for name in found["sequences"]} - {""} == set(mine.sequences.records)
        carried = {name.decode() for name in found["sequences:conversations"]}
        assert carried == {name for name, one in mine.sequences.records.items() if one.conversation}


def timeless(one: SequenceSnapshot | None) -> SequenceSnapshot | None:
    return None if one is None else replace(one, began_at=None, last_active_at=0.0, gap_since=None)


def turn_of(member: bytes) -> Turn | None:
    request = parse_member(member)
    return request.sequence if isinstance(request, Request) else None


NEWS = ("held", "released", "aborted", "cancelled", "gaps")
"""Not those of idle and age: they are seldom here, and a conformance test has them."""
HAPPENS = (
    *(f"news {what}" for what in NEWS),
    *(
        "TurnGranted",
        "TurnWaits",
        "TurnRejected",
        "SEQUENCE_FULL",
        "SEQUENCE_INDEX",
        "SEQUENCE_ABORTED",
        "SEQUENCE_ENDED",
    ),
    *("failed", "turns by time", "unserved", "expired b'late'", "expired b'over'", "release", "abort"),
    *("cancel", "forget", "open", "parked", "held", "aborted", "ended", "lives", "gaps", "replies lost"),
    *("handed over", "not handed over", "told again", "SEQUENCE_DENIED", "CANCELLED"),
)


def run(bench: Bench, examples: int, steps: int, *, derandomize: bool) -> None:
    machine: Any = type("BoundModel", (SequenceModel,), {"bench": bench, "seen": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            derandomize=derandomize,
            phases=[Phase.generate] if derandomize else [Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert {what for what in HAPPENS if not machine.seen[what]} == set(), machine.seen


@pytest.mark.timeout(300)
def test_scripts_of_sequences_do_what_the_twin_does(bench: Bench) -> None:
    run(bench, examples=80, steps=40, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_scripts_of_sequences_do_what_the_twin_does_at_length(bench: Bench) -> None:
    run(bench, examples=1000, steps=100, derandomize=False)
