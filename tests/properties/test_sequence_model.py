"""The scripts of sequences compared with sequence_rules.py of the memory queue, in any interleaving of steps.

As in test_queue_model.py, each step runs in Redis and in memory and must return the same. After each step,
the state of every sequence is compared. Independently of both, a record of the requests in flight checks that
only one request of a sequence runs at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec import structs

from dispatcher.features.sequences.decisions import (
    SequenceCounters,
    SequenceCounts,
    SequenceOverride,
    SequenceTerms,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.queue.calls import SequenceCalls
from dispatcher.features.sequences.queue.steps import decode_granted_turn
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import LANE, OnError, SequenceSnapshot, SequenceStatus, Turn
from dispatcher.queue.contract import DeadLetter, Release, Settlement
from dispatcher.requests.model_names import parse_model
from dispatcher.requests.request import Request, parse_member
from tests.properties import queue_oracle
from tests.properties.queue_comparison import (
    NAMES,
    OWNERS,
    UNLEASED,
    Connections,
    LeasePair,
    QueueComparison,
    assert_same_lease,
    open_connections,
    run_model,
)
from tests.queue.time_shifts import age_sequences_in_memory, age_sequences_in_redis

NEVER, PAST = 4 * 10**9, 1000
TERMS = SequenceTerms(max_idle_s=1000, max_age_s=5000, max_waiting=8, gap_s=500)
OVERRIDES = (
    SequenceOverride("limited-*", max_active=1),
    SequenceOverride("patient", max_idle_s=4000, max_active=1),
    SequenceOverride("*", max_idle_s=500),
)
MODELS = ("", "limited-a", "limited-b", "patient", "another")


@pytest.fixture(scope="module")
def connections() -> Iterator[Connections]:
    with open_connections() as opened:
        yield opened


class SequenceModel(QueueComparison):
    """Steps of producers, owners, operators and time on a few sequences."""

    owners = st.integers(0, OWNERS - 1)
    reply_losses = st.integers(0, 9).map(lambda number: number == 0)
    names = st.sampled_from(["a", "b", "ü"])

    def __init__(self) -> None:
        super().__init__()
        self.terms = TERMS
        self.in_flight: dict[str, int] = {}
        """Entry in flight of each sequence."""
        self.rejected_tokens: set[str] = set()
        self.last_statuses: dict[str, SequenceStatus] = {}

    turns = st.fixed_dictionaries(
        {
            "id": st.sampled_from(["a", "a", "b", "ü"]),
            "index": st.one_of(st.none(), st.none(), st.integers(0, 5)),
            "last": st.integers(0, 7).map(lambda number: number == 0),
            "reset": st.integers(0, 5).map(lambda number: number == 0),
            "on_error": st.sampled_from([None, None, "continue", "abort", "hold", "hold"]),
            "secret": st.sampled_from([None] * 7 + ["the secret of another producer"]),
            "model": st.sampled_from(MODELS),
        }
    )

    @rule(turns=st.lists(turns, min_size=1, max_size=5), is_late=st.integers(0, 3).map(lambda n: n == 0))
    def submit(self, turns: list[dict[str, Any]], is_late: bool) -> None:
        for turn in turns:
            self.serial_number += 1
            place = {name: value for name, value in turn.items() if name != "model"}
            payload = {"model": turn.get("model", "")}
            fields = {
                "id": f"r-{self.serial_number}",
                "deadline": NEVER,
                "payload": payload,
                "sequence": place,
            }
            # Most requests were submitted after any cancel, some before, and some at an unknown time.
            fields["created"] = {0: PAST, 4: None}.get(self.serial_number % 7, NEVER)
            member = json.dumps({"request_kind": "redis", "data": fields}).encode()
            self.add_foreign_request(float(PAST if is_late else NEVER - 10 + self.serial_number % 3), member)

    @rule(turns=st.lists(turns, min_size=1, max_size=5), owner=owners)
    def submit_and_claim(self, turns: list[dict[str, Any]], owner: int) -> None:
        self.submit(turns, False)
        self.claim_and_check_turns(owner, 6, False, False)

    @initialize(
        max_active=st.sampled_from([None, None, 1]),
        refuse_after_end=st.booleans(),
        on_error=st.sampled_from(OnError),
        overrides=st.sampled_from([(), OVERRIDES, OVERRIDES[:2]]),
    )
    def configure(
        self,
        max_active: int | None,
        refuse_after_end: bool,
        on_error: OnError,
        overrides: tuple[SequenceOverride, ...],
    ) -> None:
        self.terms = replace(
            TERMS,
            max_active=max_active,
            refuse_after_end=refuse_after_end,
            on_error=on_error,
            overrides=overrides,
        )

    @rule(
        max_active=st.sampled_from([None, 1, 2]),
        refuse_after_end=st.booleans(),
        on_error=st.sampled_from([*OnError, OnError.ABORT]),
        max_waiting=st.sampled_from([0, 1, 4, 8, 8]),
        overrides=st.sampled_from([(), OVERRIDES, OVERRIDES, OVERRIDES[1:]]),
    )
    def reconfigure(
        self,
        max_active: int | None,
        refuse_after_end: bool,
        on_error: OnError,
        max_waiting: int,
        overrides: tuple[SequenceOverride, ...],
    ) -> None:
        self.terms = replace(
            TERMS,
            max_active=max_active,
            refuse_after_end=refuse_after_end,
            on_error=on_error,
            max_waiting=max_waiting,
            overrides=overrides,
        )

    @rule(
        owner=owners,
        max_count=st.integers(1, 9),
        lose_reply=reply_losses,
        repeat=st.integers(0, 3).map(lambda n: n == 0),
    )
    def claim_and_check_turns(self, owner: int, max_count: int, lose_reply: bool, repeat: bool) -> None:
        """Claim requests, and check the turns of those that belong to a sequence."""
        self.serial_number += 1
        nonce, permit = f"n-{self.serial_number}", self.make_permit(owner, 100)
        real, twin = self.run_on_both(owner, lambda queue, _: queue.claim(max_count, nonce, permit))
        assert real.claimable_count == twin.claimable_count
        pairs = [LeasePair(*leases) for leases in zip(real.leases, twin.leases, strict=True)]
        for pair in pairs:
            assert_same_lease(pair.real, pair.twin)
        self.claim_turns(owner, pairs, lose_reply)
        if repeat:
            self.claim_turns(owner, [pair for pair in self.held_leases[owner] if pair.real.member], False)

    def claim_turns(self, owner: int, pairs: Sequence[LeasePair], lose_reply: bool) -> None:
        turns: list[list[Any]] = [[], []]
        pairs_with_turn, kept = [], []
        for pair in pairs:
            turn = parse_turn(pair.real.member, self.terms)
            if turn is None:
                kept.append(pair)
                continue
            pairs_with_turn.append((pair, turn))
            turns[0].append((pair.real, turn))
            turns[1].append((pair.twin, turn))

        async def ask_queue(queue: Any, which: int) -> Any:
            if lose_reply and which:  # the reply is lost, so rejected requests are checked anew
                await queue.open_calls(SequenceCalls).claim_turns(turns[which], self.terms)
            return await queue.open_calls(SequenceCalls).claim_turns(turns[which], self.terms)

        real, twin = self.run_on_both(owner, ask_queue, lose_reply)
        self.assert_same_facts(owner, real, twin)
        assert list(real.decisions) == list(twin.decisions)
        counts, twins = self.run_on_both(owner, lambda queue, _: queue.count_requests())
        assert counts.of(SequenceCounts) == twins.of(SequenceCounts)
        for (pair, turn), decision in zip(pairs_with_turn, real.decisions, strict=True):
            entry = pair.real.entry_id
            self.event_counts[type(decision).__name__] += 1
            if isinstance(decision, TurnWaits):
                self.held_leases[owner] = [one for one in self.held_leases[owner] if one is not pair]
                continue
            if isinstance(decision, TurnGranted):
                assert self.in_flight.get(turn.id, entry) == entry, "two requests of a sequence run at once"
                self.in_flight[turn.id] = entry
            else:
                assert isinstance(decision, TurnRejected)
                self.event_counts[decision.code] += 1
                self.rejected_tokens.add(pair.real.token)
            kept.append(pair)
        self.held_leases[owner] += [pair for pair in kept if pair not in self.held_leases[owner]]

    def mark_ended(self, entry: int) -> None:
        for name, in_flight in list(self.in_flight.items()):
            if in_flight == entry:
                del self.in_flight[name]

    def pick_lease(self, owner: int, data: st.DataObject) -> LeasePair | None:
        rejected = [pair for pair in self.held_leases[owner] if pair.real.token in self.rejected_tokens]
        running = [pair for pair in self.held_leases[owner] if pair.real.entry_id in self.in_flight.values()]
        candidates = data.draw(st.sampled_from([rejected, running, running])) or [
            *self.held_leases[owner],
            *self.ended_leases[-2:],
        ]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    def forget_lease(self, owner: int, pair: LeasePair) -> None:
        self.held_leases[owner] = [one for one in self.held_leases[owner] if one is not pair]
        self.ended_leases.append(pair)

    ends = st.builds(
        lambda failed, token, conversation: (failed, token, conversation),
        st.integers(0, 2).map(lambda number: number == 0),
        st.sampled_from([None, None, "", "token"]),
        st.sampled_from([None, None, b"", b"\x00carry\xff"]),
    )

    @rule(data=st.data(), owner=owners, end=ends, dead_letter=st.integers(0, 4), lose_reply=reply_losses)
    def settle(
        self, data: st.DataObject, owner: int, end: tuple[Any, ...], dead_letter: int, lose_reply: bool
    ) -> None:
        pair = self.pick_lease(owner, data)
        if pair is not None:
            self.settle_lease(
                owner,
                pair,
                end,
                dead_letter=dead_letter == 0,
                lose_reply=lose_reply,
                with_turn_end=data.draw(st.integers(0, 5)) > 0,
            )

    @rule(data=st.data(), owner=owners, max_count=st.integers(1, 9), rounds=st.integers(1, 3))
    def claim_and_settle(self, data: st.DataObject, owner: int, max_count: int, rounds: int) -> None:
        """Claim requests, and settle those in flight."""
        for _ in range(rounds):
            self.claim_and_check_turns(owner, max_count, False, False)
            for pair in self.held_leases[owner]:
                if pair.real.entry_id in self.in_flight.values() or pair.real.token in self.rejected_tokens:
                    self.settle_lease(
                        owner,
                        pair,
                        data.draw(self.ends),
                        dead_letter=False,
                        lose_reply=False,
                        with_turn_end=True,
                    )

    def settle_lease(
        self,
        owner: int,
        pair: LeasePair,
        end: tuple[Any, ...],
        *,
        dead_letter: bool,
        lose_reply: bool,
        with_turn_end: bool,
    ) -> None:
        turn, (failed, token, conversation) = parse_turn(pair.real.member, self.terms), end
        turn_end = None
        if turn is not None and with_turn_end and pair.real.token not in self.rejected_tokens:
            turn_end = TurnEnd(
                turn, has_failed=failed, cause="it: failed", sticky_token=token, conversation=conversation
            )
        result = b"%d" % pair.real.entry_id
        ends = [Settlement(lease, result, "", extra=turn_end) for lease in (pair.real, pair.twin)]
        if dead_letter:
            dead_letters = [DeadLetter(one, "why") for one in ends]
            real, twin = self.run_on_both(
                owner, lambda queue, at: queue.move_to_dead_letters([dead_letters[at]]), lose_reply
            )
        else:
            real, twin = self.run_on_both(owner, lambda queue, at: queue.settle([ends[at]]), lose_reply)
        assert list(real) == list(twin)
        if real[0] == "done":
            self.written_results[NAMES.result_list, result] += 1
            self.finished_count += not dead_letter
            self.mark_ended(pair.real.entry_id)
            self.event_counts["failed"] += turn_end is not None and turn_end.has_failed
        self.forget_lease(owner, pair)

    @rule(
        data=st.data(),
        owner=owners,
        end=ends,
        limit=st.sampled_from([0, 1, 2, 3, 100, 100]),
        lose_reply=reply_losses,
    )
    def settle_and_claim_next(
        self, data: st.DataObject, owner: int, end: tuple[Any, ...], limit: int, lose_reply: bool
    ) -> None:
        """Settle some requests in flight and claim the next ones of their sequences."""
        running = [pair for pair in self.held_leases[owner] if pair.real.entry_id in self.in_flight.values()]
        if running:
            ended = data.draw(st.lists(st.sampled_from(running), min_size=1, unique_by=id))
            self.settle_and_claim(owner, ended, end, limit, lose_reply)

    @rule(
        data=st.data(),
        turns=st.lists(turns, min_size=1, max_size=5),
        owner=owners,
        limit=st.sampled_from([1, 2, 100, 100]),
        rounds=st.integers(1, 3),
        lose_reply=st.integers(0, 2).map(lambda number: number == 0),
    )
    def settle_and_claim_repeatedly(
        self,
        data: st.DataObject,
        turns: list[dict[str, Any]],
        owner: int,
        limit: int,
        rounds: int,
        lose_reply: bool,
    ) -> None:
        """Claim all requests, then settle those in flight and claim the next ones, several times."""
        self.submit_and_claim(turns, owner)
        self.claim_and_check_turns(owner, 9, False, False)
        for _ in range(rounds):
            if running := [
                pair for pair in self.held_leases[owner] if pair.real.entry_id in self.in_flight.values()
            ]:
                self.settle_and_claim(owner, running, data.draw(self.ends), limit, lose_reply)

    @rule(data=st.data(), owner=owners, name=names, lose_reply=st.booleans())
    def settle_and_claim_one_sequence(
        self, data: st.DataObject, owner: int, name: str, lose_reply: bool
    ) -> None:
        """Do the same for one sequence with further requests, which random steps rarely repeat."""
        turn = {"id": name, "index": None, "last": False, "reset": False, "on_error": "continue"}
        self.settle_and_claim_repeatedly(data, [turn] * 3, owner, 100, 1, lose_reply)

    @rule(turn=turns, owner=owners)
    def expire_one(self, turn: dict[str, Any], owner: int) -> None:
        self.submit([turn], True)
        self.settle_unleased(owner, False, False)

    @rule(owner=owners, name=names, index=st.integers(1, 5))
    def skip_missing_index(self, owner: int, name: str, index: int) -> None:
        """Submit a request with a later index, and wait longer than the requests behind a gap do."""
        self.submit_and_claim([{"id": name, "index": index}], owner)
        self.time_passes(owner, 600.0)

    @rule(owner=owners, name=names, action=st.sampled_from(["release", "release", "abort"]))
    def fail_one_and_decide(self, owner: int, name: str, action: str) -> None:
        """Fail a request of a sequence that is held on errors, then decide about it."""
        turn = {"id": name, "index": None, "last": False, "reset": False, "on_error": "hold"}
        self.submit_and_claim([turn] * 2, owner)
        if running := [
            pair for pair in self.held_leases[owner] if pair.real.entry_id == self.in_flight.get(name)
        ]:
            self.settle_and_claim(owner, running, (True, None, None), 100, False)
        if name in self.list_held():
            self.decide_as_operator(owner, name, action)

    def settle_and_claim(
        self, owner: int, ended: Sequence[LeasePair], end: tuple[Any, ...], limit: int, lose_reply: bool
    ) -> None:
        sides: list[list[Settlement]] = [[], []]
        for pair in ended:
            turn = parse_turn(pair.real.member, self.terms)
            assert turn is not None
            failed, token, conversation = end
            turn_end = TurnEnd(
                turn, has_failed=failed, cause="it: failed", sticky_token=token, conversation=conversation
            )
            for side, lease in zip(sides, (pair.real, pair.twin), strict=True):
                side.append(Settlement(lease, b"%d" % lease.entry_id, "", extra=turn_end))
        self.serial_number += 1
        nonce, permit = f"n-{self.serial_number}", self.make_permit(owner, limit)
        real, twin = self.run_on_both(
            owner, lambda queue, at: queue.settle_and_claim_next(sides[at], nonce, permit), lose_reply
        )
        assert list(real.statuses) == list(twin.statuses)
        for pair, answer in zip(ended, real.statuses, strict=True):
            if answer == "done":
                self.written_results[NAMES.result_list, b"%d" % pair.real.entry_id] += 1
                self.finished_count += 1
                self.mark_ended(pair.real.entry_id)
            self.forget_lease(owner, pair)
        if real.claim_result is None:  # the next claim returns these requests
            real, twin = self.run_on_both(owner, lambda queue, _: queue.claim(9, nonce, permit))
            self.assert_same_facts(owner, real, twin)
            # Requests that were claimed next are in no order, even if they are returned again.
            leases = (sorted(one.leases, key=lambda lease: lease.entry_id) for one in (real, twin))
            pairs = [LeasePair(*lease_pair) for lease_pair in zip(*leases, strict=True)]
            self.claim_turns(owner, pairs, False)
            self.event_counts["claimed next again"] += len(pairs)
            return
        self.assert_same_facts(owner, real.claim_result, twin.claim_result)
        assert real.claim_result.claimable_count == twin.claim_result.claimable_count
        real_claims, twin_claims = (
            sorted(
                zip(
                    one.claim_result.leases, [decode_granted_turn(*each) for each in one.extras], strict=True
                ),
                key=lambda each: each[0].entry_id,
            )
            for one in (real, twin)
        )
        for (real_lease, granted), (twin_lease, twin_granted) in zip(real_claims, twin_claims, strict=True):
            pair = LeasePair(real_lease, twin_lease)
            assert_same_lease(pair.real, pair.twin)
            assert granted == twin_granted
            turn = parse_turn(pair.real.member, self.terms)
            assert turn is not None
            assert self.in_flight.get(turn.id, pair.real.entry_id) == pair.real.entry_id, (
                "two requests of a sequence run at once"
            )
            self.in_flight[turn.id] = pair.real.entry_id
            self.held_leases[owner].append(pair)
            self.event_counts["claimed next"] += 1
        has_claimable = real.claim_result.claimable_count > 0
        self.event_counts["not claimed next"] += has_claimable

    @rule(data=st.data(), owner=owners, delay_s=st.sampled_from([0.0, 1000.0]), lose_reply=reply_losses)
    def release(self, data: st.DataObject, owner: int, delay_s: float, lose_reply: bool) -> None:
        pair = self.pick_lease(owner, data)
        if pair is not None:
            sides = [Release(lease, delay_s=delay_s) for lease in (pair.real, pair.twin)]
            real, twin = self.run_on_both(owner, lambda queue, at: queue.release([sides[at]]), lose_reply)
            assert list(real) == list(twin)
            self.forget_lease(owner, pair)

    @rule(owner=owners, killed=owners)
    def owner_is_killed(self, owner: int, killed: int) -> None:
        self.dead_owner_detector.owners = {f"owner-{killed}"} - {f"owner-{owner}"}
        self.sweep(owner)
        self.dead_owner_detector.owners = set()
        if killed != owner:
            self.ended_leases.extend(self.held_leases[killed])
            self.held_leases[killed] = []

    @rule(owner=owners)
    def sweep(self, owner: int) -> None:
        real, twin = self.sweep_both(owner)
        assert (real.reclaimed_count, real.due_count, real.freed_count) == (
            twin.reclaimed_count,
            twin.due_count,
            twin.freed_count,
        )
        self.event_counts["turns by time"] += real.freed_count
        self.check_nothing_waits_without_reason()

    def check_nothing_waits_without_reason(self) -> None:
        """Check that no sequence stays parked after a sweep while there is room for it."""
        sequences = self.store.queue.sequences
        terms, counts = sequences.terms, self.store.queue.count_requests().of(SequenceCounts)
        if terms.max_active is not None and counts.active >= terms.max_active:
            return
        for each in counts.overrides:
            max_active = terms.get_max_active(each.match)
            assert not each.parked or (max_active is not None and each.active >= max_active), each
        assert counts.parked == sum(each.parked for each in counts.overrides)

    @rule(owner=owners, seconds=st.sampled_from([600.0, 600.0, 600.0, 1100.0, 6000.0]))
    def time_passes(self, owner: int, seconds: float) -> None:
        age_sequences_in_redis(self.connections.raw, NAMES, seconds)
        age_sequences_in_memory(self.store, seconds)
        self.sweep(owner)

    @rule(owner=owners)
    def delays_pass(self, owner: int) -> None:
        key = f"{NAMES.queue_prefix}:delayed"
        if delayed := self.connections.raw.zrange(key, 0, -1):
            self.connections.raw.zadd(key, dict.fromkeys(delayed, 0.0), xx=True)
        self.store.queue.delayed.shift_keys(-(10.0**6))
        self.sweep(owner)

    @rule(owner=owners, lose_reply=reply_losses, failing=st.booleans())
    def settle_unleased(self, owner: int, lose_reply: bool, failing: bool) -> None:
        overdue: list[dict[Any, Any]] = [{}, {}]

        async def read_overdue(queue: Any, which: int) -> None:
            for _ in range(6):
                for one in await queue.find_overdue(20):
                    overdue[which][one.member] = one

        self.run_on_both(owner, read_overdue)
        assert overdue[0].keys() == overdue[1].keys()
        names = sorted(overdue[0])
        self.settle_unleased_requests(
            owner, [[side[name] for name in names] for side in overdue], b"late", lose_reply, failing
        )

    @rule(owner=owners, max_count=st.integers(1, 5), lose_reply=reply_losses)
    def answer_remaining(self, owner: int, max_count: int, lose_reply: bool) -> None:
        real, twin = self.run_on_both(
            owner, lambda queue, _: queue.open_calls(SequenceCalls).find_remaining_requests(max_count)
        )
        assert [(one.request.member, one.error_code, one.message) for one in real] == [
            (one.request.member, one.error_code, one.message) for one in twin
        ]
        self.event_counts["remaining"] += len(real)
        self.settle_unleased_requests(
            owner, [[one.request for one in side] for side in (real, twin)], b"over", lose_reply, True
        )

    def settle_unleased_requests(
        self, owner: int, sides: Sequence[Sequence[Any]], why: bytes, lose_reply: bool, failing: bool
    ) -> None:
        items: list[list[Any]] = [[], []]
        for which, side in enumerate(sides):
            for item in side:
                turn = parse_turn(item.member, self.terms)
                turn_end = None if turn is None else TurnEnd(turn, has_failed=failing, cause="too late")
                items[which].append((item, Settlement(UNLEASED, why, "", extra=turn_end)))
        before = dict(self.in_flight)
        real, twin = self.run_on_both(owner, lambda queue, at: queue.settle_unleased(items[at]), lose_reply)
        assert real == twin == len(items[0])
        for entry in before.values():
            if entry not in self.store.queue.entries:
                self.mark_ended(entry)
        self.written_results[NAMES.result_list, why] += real
        self.finished_count += real
        self.event_counts[f"expired {why!r}"] += real

    @precondition(lambda self: self.list_held())
    @rule(owner=owners)
    def release_held(self, owner: int) -> None:
        self.decide_as_operator(owner, self.list_held()[0], "release")

    @precondition(lambda self: self.list_ended())
    @rule(owner=owners)
    def forget_ended(self, owner: int) -> None:
        self.decide_as_operator(owner, self.list_ended()[0], "forget")

    @precondition(lambda self: self.list_waiting())
    @rule(owner=owners, action=st.sampled_from(["abort", "cancel"]))
    def abort_or_cancel_waiting(self, owner: int, action: str) -> None:
        self.decide_as_operator(owner, self.list_waiting()[0], action)

    def list_waiting(self) -> list[str]:
        known = self.store.queue.sequences.records.values()
        return [one.id for one in known if one.waiting_count and one.status in ("open", "held")]

    def list_ended(self) -> list[str]:
        known = self.store.queue.sequences.records.values()
        return [one.id for one in known if one.next_request is None and not one.waiting_count]

    def list_held(self) -> list[str]:
        return [one.id for one in self.store.queue.sequences.records.values() if one.status == "held"]

    @rule(owner=owners, name=names, action=st.sampled_from(["release", "abort", "cancel", "forget"]))
    def decide_as_operator(self, owner: int, name: str, action: str) -> None:
        async def run_action(queue: Any, which: int) -> Any:
            admin: Any = (queue, self.store)[which]
            if action == "abort":
                return await open_sequences(admin).abort_sequence(name, "an operator: aborted it")
            return await getattr(admin, f"{action}_sequence")(name)

        real, twin = self.run_on_both(owner, run_action)
        assert real == twin
        self.event_counts[action] += bool(real)

    @precondition(lambda self: self.store.queue.dead)
    @rule(owner=owners)
    def purge(self, owner: int) -> None:
        dead = list(self.store.queue.dead)
        real, twin = self.run_on_both(
            owner,
            lambda queue, at: queue_oracle.purge_dead(self.store.queue, dead) if at else queue.purge_dead(),
        )
        assert real == twin == len(dead)
        self.finished_count += len(dead)

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        self.check_sequences_agree()
        self.check_waiting_turns(state)

    def check_sequences_agree(self) -> None:
        loop = self.connections.loops[0]

        async def read_sequences(admin: Any) -> tuple[object, list[SequenceSnapshot | None]]:
            return (await admin.count_requests()).of(SequenceCounters), [
                await open_sequences(admin).get_sequence(name) for name in ("a", "b", "ü")
            ]

        (counters, real), (twin_counters, twin) = (
            loop.run_until_complete(read_sequences(admin)) for admin in (self.real[0], self.store)
        )
        assert counters == twin_counters
        self.event_counts.update(f"counter {event}" for event in COUNTERS if getattr(counters, event))
        assert [remove_times(one) for one in real] == [remove_times(one) for one in twin]
        for one, other in zip(real, twin, strict=True):
            if one is not None and other is not None:
                times = (one.began_at or 0, one.last_active_at, one.gap_since or 0)
                others = (other.began_at or 0, other.last_active_at, other.gap_since or 0)
                assert times == pytest.approx(others, abs=self.time_error_s)
                self.event_counts[f"{one.status}"] += 1
                self.event_counts["several runs"] += one.run_count > 1
                self.event_counts["gaps"] += one.gap_since is not None
                self.event_counts[f"{one.status} with {one.override!r}"] += 1
                if one.status == "parked" and self.last_statuses.get(one.id) in ("open", "held"):
                    self.event_counts["parked again by a reset"] += 1
        self.last_statuses = {one.id: one.status for one in real if one is not None}

    def check_waiting_turns(self, state: dict[str, Any]) -> None:
        waiting = {int(name[-16:]) for name, _ in state["sequenced"]}
        turn_names = [name[34:] for name, _ in state["sequences:turns"]]
        assert waiting == {int(name) for name in turn_names if not name.startswith(b"-")}
        queue = self.store.queue
        assert waiting == {entry.id for entry in queue.entries.values() if entry.closed_lane == LANE}
        passed_count = sum(name.startswith(b"-") for name in turn_names)
        closed_count = len(state["sequences:closed-runs"])
        assert closed_count == len(queue.sequences.closed_runs)
        if not closed_count:
            item_count = sum(one.item_count for one in queue.sequences.records.values())
            assert passed_count == item_count - len(waiting)
        assert {name.decode() for name in state["sequences"]} - {""} == set(queue.sequences.records)
        with_conversation = {name.decode() for name in state["sequences:conversations"]}
        assert with_conversation == {
            name for name, one in queue.sequences.records.items() if one.conversation
        }


def remove_times(one: SequenceSnapshot | None) -> SequenceSnapshot | None:
    return None if one is None else replace(one, began_at=None, last_active_at=0.0, gap_since=None)


def parse_turn(member: bytes, terms: SequenceTerms = TERMS) -> Turn | None:
    """Return the turn of a member, with the override for its model."""
    request = parse_member(member)
    if not isinstance(request, Request) or request.extra is None:
        return None
    turn: Turn = request.extra
    return structs.replace(turn, override=terms.match_override(parse_model(request.payload)))


COUNTERS = ("held", "released", "aborted", "cancelled", "gaps")
"""Counters that must change. A conformance test covers idle and aged sequences, which are rare here."""
EXPECTED_EVENTS = (
    *(f"counter {event}" for event in COUNTERS),
    *(
        "TurnGranted",
        "TurnWaits",
        "TurnRejected",
        "SEQUENCE_FULL",
        "SEQUENCE_INDEX",
        "SEQUENCE_ABORTED",
        "SEQUENCE_ENDED",
    ),
    *("failed", "turns by time", "remaining", "expired b'late'", "expired b'over'", "release", "abort"),
    *(
        "cancel",
        "forget",
        "open",
        "parked",
        "held",
        "aborted",
        "ended",
        "several runs",
        "gaps",
        "replies lost",
    ),
    *("claimed next", "not claimed next", "claimed next again", "SEQUENCE_DENIED", "CANCELLED"),
    *("open with 'patient'", "parked with 'limited-*'", "parked with ''"),
    "parked again by a reset",
)


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.timeout(300)
def test_sequence_scripts_agree_with_the_memory_queue(connections: Connections) -> None:
    run_model(SequenceModel, connections, EXPECTED_EVENTS, examples=80, steps=40)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_sequence_scripts_agree_with_the_memory_queue_in_long_runs(connections: Connections) -> None:
    run_model(SequenceModel, connections, EXPECTED_EVENTS, examples=1000, steps=100, is_long=True)
