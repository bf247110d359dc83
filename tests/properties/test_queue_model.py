"""The scripts compared with the queue in memory, for any interleaving of steps by several owners.

Each step runs on both queues and must return the same. After each step, the keys in Redis are compared with
the state of the memory queue (the twin), and with counts that are independent of both. Each owner runs on an
event loop whose clock is far from those of the others. Time does not pass by itself here, because leases and
delays are far longer than a run. Steps move it, on the documented keys in Redis and on the same values in
memory.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dispatcher.features.models.counts import ModelCounts
from dispatcher.features.models.queue.calls import ModelCalls
from dispatcher.features.models.queue.waiting import LANE, ModelWait
from dispatcher.queue.contract import ClaimResult, DeadLetter, Overload, Permit, Release, Settlement
from dispatcher.requests.lanes import Lane, rank_in_queue
from dispatcher.requests.result import encode_answer
from dispatcher.requests.submission import Submission
from tests.properties import queue_oracle
from tests.properties.queue_comparison import (
    LEASE_S,
    NAMES,
    OWNERS,
    RESULT_LISTS,
    SCORE_BAND,
    TICK_FIELDS,
    UNLEASED,
    Connections,
    LeasePair,
    QueueComparison,
    assert_same_lease,
    open_connections,
    run_model,
)


@pytest.fixture(scope="module")
def connections() -> Iterator[Connections]:
    with open_connections() as opened:
        yield opened


MODELS = ("a", "ab", "ä\0")


class QueueModel(QueueComparison):
    """All steps of owners, producers, operators and time."""

    owners = st.integers(0, OWNERS - 1)
    reply_losses = st.integers(0, 19).map(lambda number: number == 0)
    lags = st.sampled_from([0, 0, 0, 0, 3, 7])
    limits = st.sampled_from([0, 1, 2, 4, 6, 8, 12, 16])
    members = st.one_of(st.sampled_from([b"0", b"1", b"2", b"3"]), st.binary(max_size=2))
    scores = st.one_of(
        st.sampled_from([4.0e9, 4.0e9 + 1, 4.0e9 + 0.5]),
        st.sampled_from([0.0, -5.0, 0.5, 1e12, float("inf"), float("-inf"), 1_700_000_000.25]),
        st.builds(
            lambda priority, at: float(priority * SCORE_BAND + at),
            st.integers(0, 2),
            st.sampled_from([1000, 4 * 10**9]),
        ),
    )

    @rule(score=scores, member=members)
    def add_foreign(self, score: float, member: bytes) -> None:
        self.add_foreign_request(score, member)

    @precondition(lambda self: self.store.queue.entries)
    @rule(data=st.data())
    def add_identical_member(self, data: st.DataObject) -> None:
        """Add a member that is identical to one that was claimed before."""
        entry = self.store.queue.entries[data.draw(st.sampled_from(sorted(self.store.queue.entries)))]
        self.add_foreign_request(entry.score, entry.member)

    @rule(
        owner=owners,
        number=st.integers(0, 2),
        deadline=st.sampled_from([1000, 4 * 10**9]),
        lose_reply=reply_losses,
    )
    def submit(self, owner: int, number: int, deadline: int, lose_reply: bool) -> None:
        self.serial_number += 1
        request = {"id": f"r-{number}", "deadline": deadline, "payload": {"n": self.serial_number}}
        token = f"t-{self.serial_number}"
        member = {"internal": {"request_token": token}, "request_kind": "redis", "data": request}
        raw = json.dumps(member).encode()
        submission = Submission(raw, deadline, f"r-{number}", token, 4 * 10**9)
        real, twin = self.run_on_both(
            owner, lambda queue, which: (queue, self.store)[which].submit([submission]), lose_reply
        )
        assert real == twin
        self.accepted_count += twin

    def record_claim(self, owner: int, real: ClaimResult, twin: ClaimResult) -> None:
        assert len(real.leases) == len(twin.leases)
        for one, other in zip(real.leases, twin.leases, strict=True):
            assert_same_lease(one, other)
        assert real.claimable_count == twin.claimable_count
        self.assert_same_facts(owner, real, twin)
        self.event_counts["leases"] += len(real.leases)
        self.event_counts["suspects"] += sum(lease.deliveries > 2 for lease in real.leases)
        self.event_counts["counted losses"] += sum(lease.deaths_as_suspect > 0 for lease in real.leases)
        self.event_counts["claimed with progress"] += sum(lease.progress != b"" for lease in real.leases)
        self.event_counts["probes"] += real.shared.probing_owner is not None
        known = {pair.real.token for pair in self.held_leases[owner]}
        self.held_leases[owner] += [
            LeasePair(one, other)
            for one, other in zip(real.leases, twin.leases, strict=True)
            if one.token not in known
        ]

    @rule(
        owner=owners,
        max_count=st.integers(0, 6),
        limit=limits,
        lag=lags,
        suspects=st.integers(0, 2),
        lose_reply=reply_losses,
        assumed_units=st.sampled_from([0, 1, 1, 1, 2, 4]),
        max_blocked=st.sampled_from([0, 0, 1, 16]),
        started=st.sampled_from([0, 1, 9, 9]),
    )
    def claim(
        self,
        owner: int,
        max_count: int,
        limit: int,
        lag: int,
        suspects: int,
        lose_reply: bool,
        assumed_units: int = 1,
        max_blocked: int = 0,
        started: int = 9,
    ) -> None:
        self.serial_number += 1
        lanes = {Lane.SUSPECTS: suspects, Lane.STARTED: started}
        nonce = f"n-{self.serial_number}"
        self.nonces[owner] = (nonce, False)
        permit = self.make_permit(owner, limit, lag)
        real, twin = self.run_on_both(
            owner,
            lambda queue, _: queue.claim(
                max_count,
                nonce,
                permit,
                max_per_lane=lanes,
                assumed_units=assumed_units,
                max_blocked=max_blocked,
            ),
            lose_reply,
        )
        self.record_claim(owner, real, twin)
        assert real.blocked_entry_id == twin.blocked_entry_id
        if real.leases:
            assert len(real.leases) <= max_count
            assert real.lease_counts.live_units <= limit
            assert real.lease_counts.live_units <= real.shared.limit
            assert not real.shared.is_paused
            order = [
                (rank_in_queue(lease.score, lease.lane), lease.score, lease.member) for lease in real.leases
            ]
            assert order == sorted(order)

    @rule(owner=owners, lose_reply=reply_losses)
    def repeat_claim(self, owner: int, lose_reply: bool) -> None:
        """Repeat the last claim, as a caller does that got no reply in time."""
        nonce, probing = self.nonces[owner]
        if not nonce:
            return
        before = self.sum_redis_units()
        permit = self.make_permit(owner, 8)
        if probing:
            real, twin = self.run_on_both(
                owner, lambda queue, _: queue.claim_probe(nonce, permit), lose_reply
            )
        else:
            real, twin = self.run_on_both(owner, lambda queue, _: queue.claim(5, nonce, permit), lose_reply)
        self.record_claim(owner, real, twin)
        assert real.lease_counts.live_units == before

    @rule(owner=owners, limit=limits, lose_reply=reply_losses)
    def claim_probe(self, owner: int, limit: int, lose_reply: bool) -> None:
        self.serial_number += 1
        permit = self.make_permit(owner, limit)
        nonce = f"n-{self.serial_number}"
        self.nonces[owner] = (nonce, True)
        real, twin = self.run_on_both(owner, lambda queue, _: queue.claim_probe(nonce, permit), lose_reply)
        self.record_claim(owner, real, twin)
        assert not real.leases or real.lease_counts.live_units <= limit

    def pick_leases(self, owner: int, data: st.DataObject, max_count: int = 4) -> list[LeasePair]:
        """Return some leases that the owner holds or assumes to hold, or ended ones, each once."""
        if not self.held_leases[owner]:
            self.claim(owner, 4, data.draw(self.limits), 0, 2, False)
        candidates = self.held_leases[owner] + self.ended_leases[-2:]
        if not candidates:
            return []
        at = st.lists(st.integers(0, len(candidates) - 1), min_size=1, max_size=max_count, unique=True)
        return [candidates[number] for number in data.draw(at)]

    def forget_leases(self, owner: int, pairs: Sequence[LeasePair]) -> None:
        self.held_leases[owner] = [one for one in self.held_leases[owner] if one not in pairs]
        self.ended_leases += [one for one in pairs if one not in self.ended_leases]

    def make_settlement(self, pair: LeasePair, name: str, which: int, request: tuple[str, str]) -> Settlement:
        self.serial_number += which
        result = encode_answer(request[0] or "r", 200, b"%d" % pair.real.entry_id)
        return Settlement((pair.real, pair.twin)[which], result, name, *request)

    @rule(data=st.data(), owner=owners, lose_reply=reply_losses, dead_letter=st.booleans())
    def settle(self, data: st.DataObject, owner: int, lose_reply: bool, dead_letter: bool) -> None:
        """Settle some requests or move them to the dead-letter set. Ended requests stay ended."""
        chosen = sorted(self.pick_leases(owner, data), key=lambda pair: pair.real.entry_id)
        lists = [data.draw(st.sampled_from((*RESULT_LISTS, RESULT_LISTS[-1]))) for _ in chosen]
        requests = [_parse_request(pair.real.member) for pair in chosen]
        ends = [
            [
                self.make_settlement(pair, name, which, request)
                for pair, name, request in zip(chosen, lists, requests, strict=True)
            ]
            for which in (0, 1)
        ]
        if dead_letter:
            dead_letters = [[DeadLetter(end, "why") for end in side] for side in ends]
            real, twin = self.run_on_both(
                owner, lambda queue, which: queue.move_to_dead_letters(dead_letters[which]), lose_reply
            )
        else:
            real, twin = self.run_on_both(owner, lambda queue, which: queue.settle(ends[which]), lose_reply)
        assert list(real) == list(twin)
        for status, end in zip(real, ends[0], strict=True):
            self.event_counts[f"{status} {dead_letter=}"] += 1
            if status == "done":
                self.written_results[end.result_list or NAMES.result_list, end.result] += 1
            if status != "lost" and not dead_letter:
                self.finished_count += 1
        self.forget_leases(owner, chosen)

    @rule(
        data=st.data(),
        owner=owners,
        lose_reply=reply_losses,
        claims_again=st.booleans(),
        limit=limits,
        lag=lags,
    )
    def release(
        self, data: st.DataObject, owner: int, lose_reply: bool, claims_again: bool, limit: int, lag: int
    ) -> None:
        flags: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
            {
                "delay_s": st.sampled_from([0.0, 1000.0]),
                "is_failed_attempt": st.booleans(),
                "is_refusal": st.booleans(),
                "is_undelivered": st.booleans(),
                "last_attempt": st.sampled_from(["", "reset", "ä"]),
                "extra": st.sampled_from([None] * 5 + [ModelWait(model) for model in MODELS]),
                "progress": st.sampled_from([None, None, None, b"", b"a", b"\0" * 70_000]),
            }
        )
        chosen = self.pick_leases(owner, data)
        flags_by_lease = [data.draw(flags) for _ in chosen]
        self.event_counts["delayed"] += sum(each["delay_s"] > 0 for each in flags_by_lease)
        self.event_counts["waiting for model"] += sum(each["extra"] is not None for each in flags_by_lease)
        self.event_counts["progress stored"] += sum(bool(each["progress"]) for each in flags_by_lease)
        releases = [
            [
                Release((pair.real, pair.twin)[which], **each)
                for pair, each in zip(chosen, flags_by_lease, strict=True)
            ]
            for which in (0, 1)
        ]
        if claims_again:
            self.release_and_claim_again(
                owner, chosen, releases, self.make_permit(owner, limit, lag), lose_reply
            )
            return
        real, twin = self.run_on_both(owner, lambda queue, which: queue.release(releases[which]), lose_reply)
        assert list(real) == list(twin)
        self.forget_leases(owner, chosen)

    def release_and_claim_again(
        self,
        owner: int,
        chosen: Sequence[LeasePair],
        releases: Sequence[Sequence[Release]],
        permit: Permit,
        lose_reply: bool = False,
    ) -> None:
        self.serial_number += 1
        nonce, before = f"n-{self.serial_number}", self.sum_redis_units()
        real, twin = self.run_on_both(
            owner,
            lambda queue, which: queue.release_and_claim_again(releases[which], nonce, permit),
            lose_reply,
        )
        assert list(real.statuses) == list(twin.statuses)
        self.forget_leases(owner, chosen)
        claimed = twin.claim_result
        # The queue remembers the nonce only if it has claimed something. After a lost reply, a claim with the
        # nonce returns the leases.
        self.nonces[owner] = (nonce if claimed is not None and claimed.leases else "", False)
        if real.claim_result is not None and claimed is not None:
            self.record_claim(owner, real.claim_result, claimed)
            self.event_counts["claimed again"] += len(claimed.leases)
            assert real.claim_result.lease_counts.live_units <= max(before, permit.limit)
        else:
            assert lose_reply or real.claim_result is claimed is None

    @rule(owner=owners, number=st.integers(0, 2))
    def delay_until_due(self, owner: int, number: int) -> None:
        """Delay some requests until they are due, which random steps alone do rarely."""
        self.submit(owner, number, 4 * 10**9, False)
        self.claim(owner, 6, 16, 0, 2, False)
        chosen = self.held_leases[owner][-4:]
        sides = [[Release(pair.real, delay_s=1000.0) for pair in chosen]]
        sides.append([Release(pair.twin, delay_s=1000.0) for pair in chosen])
        real, twin = self.run_on_both(owner, lambda queue, which: queue.release(sides[which]))
        assert list(real) == list(twin)
        self.event_counts["delayed"] += len(chosen)
        self.forget_leases(owner, chosen)
        self.pass_all_delays(owner)

    @rule(
        owner=owners,
        number=st.integers(0, 2),
        deadline=st.sampled_from([1000, 4 * 10**9]),
        model=st.sampled_from(MODELS),
        next_step=st.sampled_from(["", "cancel", "expire"]),
    )
    def wait_for_model(self, owner: int, number: int, deadline: int, model: str, next_step: str) -> None:
        """Let some requests wait for their model, then cancel or expire them."""
        self.submit(owner, number, deadline, False)
        self.claim(owner, 6, 16, 0, 2, False)
        chosen = self.held_leases[owner][-4:]
        sides = [
            [Release((pair.real, pair.twin)[which], extra=ModelWait(model)) for pair in chosen]
            for which in (0, 1)
        ]
        real, twin = self.run_on_both(owner, lambda queue, which: queue.release(sides[which]))
        assert list(real) == list(twin)
        self.forget_leases(owner, chosen)
        self.event_counts["waiting for model"] += len(chosen)
        if next_step == "cancel":
            self.cancel_request(owner, number)
            self.sweep(owner, False)
        elif next_step == "expire":
            self.settle_unleased(owner, False)

    @rule(
        owner=owners,
        number=st.integers(0, 2),
        deadline=st.sampled_from([1000, 4 * 10**9]),
        next_step=st.sampled_from(["", "again", "expire", "dead-letter", "requeue"]),
    )
    def start_requests(self, owner: int, number: int, deadline: int, next_step: str) -> None:
        """Store progress of some requests, then claim them again, in the same step or in another one. Or
        expire them, or accept them again from the dead-letter set."""
        self.submit(owner, number, deadline, False)
        self.claim(owner, 6, 16, 0, 2, False)
        chosen = self.held_leases[owner][-4:]
        sides = [
            [Release((pair.real, pair.twin)[which], progress=b"part") for pair in chosen] for which in (0, 1)
        ]
        if next_step == "again":
            self.release_and_claim_again(owner, chosen, sides, self.make_permit(owner, 16))
            return
        real, twin = self.run_on_both(owner, lambda queue, which: queue.release(sides[which]))
        assert list(real) == list(twin)
        self.forget_leases(owner, chosen)
        self.event_counts["progress stored"] += len(chosen)
        if next_step == "expire":
            self.settle_unleased(owner, False)
            return
        self.claim(owner, 6, 16, 0, 2, False)
        if next_step not in ("dead-letter", "requeue") or not (started := self.held_leases[owner][-2:]):
            return
        started.sort(key=lambda pair: pair.real.entry_id)
        ends = [
            [DeadLetter(Settlement((pair.real, pair.twin)[which], b"", ""), "why") for pair in started]
            for which in (0, 1)
        ]
        real, twin = self.run_on_both(owner, lambda queue, which: queue.move_to_dead_letters(ends[which]))
        assert list(real) == list(twin)
        self.forget_leases(owner, started)
        if next_step == "requeue":
            self.end_dead_requests(owner, [pair.real.entry_id for pair in started], purge=False)

    @rule(
        owner=owners,
        models=st.lists(st.sampled_from((*MODELS, "unknown")), max_size=3),
        lose_reply=reply_losses,
    )
    def return_waiting_for_models(self, owner: int, models: list[str], lose_reply: bool) -> None:
        """Return requests whose models are served. After a lost reply, the repeated call finds none left."""
        waiting_before = self.store.queue.count_requests().of(ModelCounts).waiting
        real, twin = self.run_on_both(
            owner, lambda queue, _: queue.open_calls(ModelCalls).return_waiting_for_models(models), lose_reply
        )
        assert real == twin or (
            lose_reply and (real.returned_count, real.remaining_count) == (0, twin.remaining_count)
        )
        assert (
            self.store.queue.count_requests().of(ModelCounts).waiting == waiting_before - twin.returned_count
        )
        self.event_counts["returned"] += twin.returned_count

    @rule(data=st.data(), owner=owners, limit=limits, lag=lags, lose_reply=reply_losses)
    def set_lease_units(
        self, data: st.DataObject, owner: int, limit: int, lag: int, lose_reply: bool
    ) -> None:
        """Set the units of some requests after parsing. Requests that are too heavy may be returned."""
        chosen = self.pick_leases(owner, data)
        units = [data.draw(st.integers(0, 8)) for _ in chosen]
        sides = [
            [((pair.real, pair.twin)[which], each) for pair, each in zip(chosen, units, strict=True)]
            for which in (0, 1)
        ]
        permit, before = self.make_permit(owner, limit, lag), self.sum_redis_units()
        real, twin = self.run_on_both(
            owner, lambda queue, which: queue.set_lease_units(sides[which], permit), lose_reply
        )
        assert real.fits == twin.fits
        self.assert_same_facts(owner, real, twin)
        assert real.lease_counts.live_units <= max(before, limit)
        self.event_counts["units set"] += sum(real.fits)
        self.event_counts["too heavy"] += len(chosen) - sum(real.fits)
        self.forget_leases(owner, [pair for pair, fits in zip(chosen, real.fits, strict=True) if not fits])

    @rule(owner=owners, lose_reply=reply_losses)
    def renew(self, owner: int, lose_reply: bool) -> None:
        pairs = self.held_leases[owner] + self.ended_leases[-3:]
        sides = [[pair.real for pair in pairs], [pair.twin for pair in pairs]]
        real, twin = self.run_on_both(owner, lambda queue, which: queue.renew(sides[which]), lose_reply)
        assert sorted(real.lost_entry_ids) == sorted(twin.lost_entry_ids)
        self.assert_same_facts(owner, real, twin)
        self.forget_leases(
            owner, [pair for pair in self.held_leases[owner] if pair.real.entry_id in real.lost_entry_ids]
        )

    @rule(owner=owners, limit=limits, lag=lags, lose_reply=reply_losses)
    def share_state(self, owner: int, limit: int, lag: int, lose_reply: bool) -> None:
        permit = self.make_permit(owner, limit, lag)
        real, twin = self.run_on_both(owner, lambda queue, _: queue.share_state(permit, None), lose_reply)
        self.assert_same_facts(owner, real, twin)

    @rule(
        owner=owners,
        limit=limits,
        lag=lags,
        retry_after_s=st.sampled_from([0.0, 0.0, 9000.0]),
        is_out_of_capacity=st.booleans(),
        in_flight=st.integers(0, 9),
        lose_reply=reply_losses,
    )
    def overload(
        self,
        owner: int,
        limit: int,
        lag: int,
        retry_after_s: float,
        is_out_of_capacity: bool,
        in_flight: int,
        lose_reply: bool,
    ) -> None:
        permit = self.make_permit(owner, limit, lag)
        at = self.make_distinct_time(owner, lag)
        overload = Overload(at, at + retry_after_s, is_out_of_capacity, in_flight)
        real, twin = self.run_on_both(owner, lambda queue, _: queue.share_state(permit, overload), lose_reply)
        self.assert_same_facts(owner, real, twin)

    @precondition(lambda self: any(self.held_leases))
    @rule(owner=owners)
    def crash_owner(self, owner: int) -> None:
        """Restart the owner, which forgets its leases, under the same name."""
        self.forget_leases(owner, self.held_leases[owner])
        self.nonces[owner] = ("", False)

    @rule(data=st.data(), owner=owners, sweep_around=st.booleans())
    def expire_some_leases(self, data: st.DataObject, owner: int, sweep_around: bool) -> None:
        if sweep_around:
            self.sweep(owner, False)
        if entries := sorted(self.store.pool.leases):
            self._expire_leases(data.draw(st.lists(st.sampled_from(entries), min_size=1, unique=True)))
            if sweep_around:
                self.sweep(owner, False)

    @rule(owner=owners, times=st.integers(1, 4), limit=limits)
    def owners_keep_dying(self, owner: int, times: int, limit: int) -> None:
        for _ in range(times):
            self.sweep(owner, False)
            self.third_of_a_lease_passes()
            self.claim(owner, 3, limit, 0, 2, False)
            self.forget_leases(owner, self.held_leases[owner])
            self._expire_leases(sorted(self.store.pool.leases))
            self.sweep(owner, False)

    def _expire_leases(self, entries: Sequence[int]) -> None:
        key = f"{NAMES.queue_prefix}:leases"
        for entry in entries:
            lease = self.store.pool.leases[entry]
            lease.expires_at = 0.0
            heapq.heappush(self.store.pool.expiries, (0.0, entry))
            units = lease.entry.units
            weight = {0: "*00", 1: ""}.get(units, f"*{units}")
            name = f"{entry}{weight}:{lease.owner}"
            assert self.connections.raw.zscore(key, name) is not None
            self.connections.raw.zadd(key, {name: 0.0}, xx=True)

    @rule(owner=owners)
    def pass_all_delays(self, owner: int) -> None:
        key = f"{NAMES.queue_prefix}:delayed"
        if delayed := self.connections.raw.zrange(key, 0, -1):
            self.connections.raw.zadd(key, dict.fromkeys(delayed, 0.0), xx=True)
        heap = self.store.queue.delayed.heap
        self.store.queue.delayed.heap = [(0.0, *item[1:]) for item in heap]
        heapq.heapify(self.store.queue.delayed.heap)
        self.sweep(owner, False)

    @rule()
    def retry_after_passes(self) -> None:
        if self.store.pool.overload is not None:
            self.store.pool.overload = replace(
                self.store.pool.overload, retry_at=self.store.pool.overload.refused_at
            )
            control = f"{NAMES.queue_prefix}:control"
            self.connections.raw.hset(
                control, "overload_until", self.connections.raw.hget(control, "overload_at")
            )

    @rule()
    def redis_is_away_for_longer_than_a_lease(self) -> None:
        self.swept_ago_s = 2 * LEASE_S
        self._expire_leases(sorted(self.store.pool.leases))

    @rule()
    def third_of_a_lease_passes(self) -> None:
        """Move the times until which no lease expires and no owner is silent."""
        self.store.pool.no_expiry_until -= LEASE_S / 3 + 1
        self._move_control("quiet_until", -LEASE_S / 3 - 1)
        self.store.pool.no_silence_until -= LEASE_S + 1
        self._move_control("heartbeats_quiet_until", -LEASE_S - 1)

    @rule(owner=owners, silent=st.sets(owners, min_size=1), third_of_lease_passes=st.booleans())
    def owners_fall_silent(self, owner: int, silent: set[int], third_of_lease_passes: bool) -> None:
        """Let owners be presumed dead, although some of them run on."""
        if third_of_lease_passes:
            self.sweep(owner, False)
            self.third_of_a_lease_passes()
        for name in (f"owner-{number}" for number in silent):
            if name in self.store.pool.heartbeats:
                self.store.pool.heartbeats[name] = 0.0
            self.connections.raw.zadd(f"{NAMES.queue_prefix}:heartbeats", {name: 0.0}, xx=True)
        before = self.store.pool.lost_units
        self.sweep(owner, False)
        self.event_counts["lost by silent owners"] += self.store.pool.lost_units - before

    @rule(owner=owners, ended=st.sets(owners, min_size=1))
    def owners_certainly_end(self, owner: int, ended: set[int]) -> None:
        """Let owners certainly end. Their successors have the same names."""
        self.dead_owner_detector.owners = {f"owner-{number}" for number in ended}
        before = self.store.pool.lost_units
        self.sweep(owner, False)
        self.event_counts["lost by ended owners"] += self.store.pool.lost_units - before
        self.dead_owner_detector.owners = set()
        for number in ended - {owner}:
            self.crash_owner(number)

    def _move_control(self, field: str, seconds: float) -> None:
        key = f"{NAMES.queue_prefix}:control"
        if (at := self.connections.raw.hget(key, field)) is not None:
            self.connections.raw.hset(key, field, f"{float(at) + seconds:.6f}")

    @rule(owner=owners, seconds=st.sampled_from([5000.0, 200_000.0]))
    def clock_steps_back(self, owner: int, seconds: float) -> None:
        """Step the clock back: times in Redis are moved ahead, and in memory the clock itself is stepped."""
        clock, prefix = self.store.pool.clock, NAMES.queue_prefix
        self.store.pool.clock = lambda: clock() - seconds
        self.store.pool.unix_origin += seconds
        for key in ("leases", "delayed", "heartbeats"):
            for name in self.connections.raw.zrange(f"{prefix}:{key}", 0, -1):
                self.connections.raw.zincrby(f"{prefix}:{key}", seconds, name)
        shared = ("read_at", "overload_at", "overload_until")
        known = {field: self.connections.raw.hget(f"{prefix}:control", field) for field in shared}
        for field in (*shared, "quiet_until", "heartbeats_quiet_until", "probe_waits", *TICK_FIELDS):
            self._move_control(field, seconds)
        permit, overload = self.store.pool.shared_permit, self.store.pool.overload
        self.renew(owner, False)
        real, twin = self.sweep_both(owner)
        assert (real.reclaimed_count, real.due_count, real.lost_units) == (
            twin.reclaimed_count,
            twin.due_count,
            twin.lost_units,
        )
        self.event_counts["clock stepped back"] += 1
        # After a step, shared times count as now. They are restored, because no time in this model is now.
        if permit is not None:
            self.store.pool.shared_permit = permit.copy_with(read_at=permit.read_at - seconds)
        if overload is not None and self.store.pool.overload is not None:
            at, until = overload.refused_at - seconds, overload.retry_at - seconds
            self.store.pool.overload = replace(self.store.pool.overload, refused_at=at, retry_at=until)
        if kept := {field: at for field, at in known.items() if at is not None}:
            self.connections.raw.hset(f"{prefix}:control", mapping=kept)

    swept_ago_s = 0.0
    """Assumed time since the last sweep, as the real time depends on the speed of the machine."""

    @rule(owner=owners, lose_reply=reply_losses)
    def sweep(self, owner: int, lose_reply: bool) -> None:
        if self.store.pool.swept_at is not None:
            self.store.pool.swept_at = self.store.pool.clock() - self.swept_ago_s
            ticks = dict.fromkeys(TICK_FIELDS, f"{time.time() - self.swept_ago_s:.6f}")
            self.connections.raw.hset(f"{NAMES.queue_prefix}:control", mapping=ticks)
        self.swept_ago_s = 0.0
        real, twin = self.sweep_both(owner)
        assert (real.reclaimed_count, real.due_count, real.lost_units) == (
            twin.reclaimed_count,
            twin.due_count,
            twin.lost_units,
        )
        assert real.freed_count == twin.freed_count
        self.event_counts["cancelled"] += real.freed_count
        self.event_counts["reclaimed"] += real.reclaimed_count
        self.event_counts["due"] += real.due_count
        assert (real.next_due_at is None) == (twin.next_due_at is None)

    @rule(owner=owners, probing=st.booleans())
    def pause_and_resume(self, owner: int, probing: bool) -> None:
        self.run_on_both(owner, lambda queue, which: (queue, self.store)[which].pause("me", "why"))
        if probing:
            self.claim_probe(owner, 100, False)
        else:
            self.claim(owner, 6, 16, 0, 1, False)
        self.run_on_both(owner, lambda queue, which: (queue, self.store)[which].resume())

    @rule(owner=owners, lose_reply=reply_losses)
    def settle_unleased(self, owner: int, lose_reply: bool) -> None:
        """Expire all overdue requests in as many calls as needed. Repeating the calls does nothing."""
        overdue: list[dict[tuple[str, bytes], Any]] = [{}, {}]

        async def read_overdue(queue: Any, which: int) -> None:
            for _ in range(6):
                for one in await queue.find_overdue(20):
                    overdue[which][one.location, one.member] = one

        self.run_on_both(owner, read_overdue)
        real, twin = (list(side.values()) for side in overdue)
        entries_by_location = {entry.location_token: entry for entry in self.store.queue.entries.values()}
        self.event_counts["expired waiting for model"] += sum(
            entry.closed_lane == LANE
            for one in twin
            if (entry := entries_by_location.get(one.location)) is not None
        )
        assert {(one.member, one.progress) for one in real} == {(one.member, one.progress) for one in twin}
        self.event_counts["expired with progress"] += sum(one.progress != b"" for one in twin)
        items = [[(one, Settlement(UNLEASED, b"gone", "")) for one in side] for side in (real, twin)]
        done = self.run_on_both(owner, lambda queue, which: queue.settle_unleased(items[which]), lose_reply)
        assert done[0] == done[1]
        self.written_results[NAMES.result_list, b"gone"] += done[0]
        self.finished_count += done[0]
        self.event_counts["expired"] += done[0]
        assert self.run_on_both(owner, lambda queue, which: queue.settle_unleased(items[which])) == (0, 0)

    @precondition(lambda self: self.store.queue.dead)
    @rule(data=st.data(), owner=owners, purge=st.booleans(), lose_reply=reply_losses)
    def purge_or_requeue_dead(self, data: st.DataObject, owner: int, purge: bool, lose_reply: bool) -> None:
        entries = data.draw(st.lists(st.sampled_from([*self.store.queue.dead, 10**6]), unique=True))
        self.end_dead_requests(owner, entries, purge=purge, lose_reply=lose_reply)

    def end_dead_requests(
        self, owner: int, entries: Sequence[int], *, purge: bool, lose_reply: bool = False
    ) -> None:
        """Purge or requeue dead requests."""
        dead = self.store.queue.count_requests().dead
        pending = self.store.queue.count_requests().pending
        if purge:
            real, twin = self.run_on_both(
                owner,
                lambda queue, which: (
                    queue_oracle.purge_dead(self.store.queue, entries) if which else queue.purge_dead(entries)
                ),
                lose_reply,
            )
        else:
            dead_entries = [found[0] for entry in entries if (found := self.store.queue.dead.get(entry))]
            self.event_counts["requeued with progress"] += sum(one.progress != b"" for one in dead_entries)
            real, twin = self.run_on_both(
                owner,
                lambda queue, which: (
                    queue_oracle.requeue_dead(self.store.queue, entries, 4 * 10**9)
                    if which
                    else queue.requeue_dead(entries, 4 * 10**9)
                ),
            )
        assert real == twin or (lose_reply and purge)
        assert self.store.queue.count_requests().dead == dead - twin
        # A request that is requeued next to an identical pending member merges with it.
        self.finished_count += (
            dead
            + pending
            - self.store.queue.count_requests().dead
            - self.store.queue.count_requests().pending
        )

    @rule(owner=owners, number=st.integers(0, 2))
    def cancel_request(self, owner: int, number: int) -> None:
        real, twin = self.run_on_both(
            owner, lambda queue, which: (queue, self.store)[which].cancel_request(f"r-{number}")
        )
        assert real == twin


@cache
def _parse_request(member: bytes) -> tuple[str, str]:
    """Return id and token of a member of our client. Other members are a few bytes here and have none."""
    try:
        fields = json.loads(member)
        return fields["data"]["id"], fields["internal"]["request_token"]
    except (ValueError, TypeError, KeyError):
        return "", ""


EXPECTED_EVENTS = (
    *("leases", "suspects", "counted losses", "probes", "delayed", "reclaimed", "due", "expired"),
    *("replies lost", "done dead_letter=False", "done dead_letter=True", "lost dead_letter=False"),
    *("bad-list dead_letter=False", "lost by silent owners", "lost by ended owners", "clock stepped back"),
    *("units set", "too heavy", "waiting for model", "returned", "cancelled", "expired waiting for model"),
    *("progress stored", "claimed with progress", "claimed again", "expired with progress"),
    "requeued with progress",
)


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.timeout(300)
def test_scripts_agree_with_the_memory_queue(connections: Connections) -> None:
    run_model(QueueModel, connections, EXPECTED_EVENTS, examples=130, steps=40)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_scripts_agree_with_the_memory_queue_in_long_runs(connections: Connections) -> None:
    run_model(QueueModel, connections, EXPECTED_EVENTS, examples=1000, steps=100, is_long=True)
