"""The real scripts against the queue in memory: any interleaving of steps by several owners, step by step.

Every step is done to both, and must say the same; after each, what lies in Redis is compared with what the
twin holds, and with a ledger that knows nothing of either. Each owner runs on an event loop whose clock
stands far apart from the others'. Time does not pass by itself here (leases and delays are far longer than a
run): it is moved by hand, on the documented keys in Redis and on what stands for them in memory.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from dispatcher.core.requests.lanes import Lane
from dispatcher.core.requests.result import encode_answer
from dispatcher.ports import (
    ClaimResult,
    DeadLetter,
    Overload,
    Release,
    Settlement,
    Submission,
)
from tests.properties.twins import (
    BAND,
    LEASE_S,
    LISTS,
    NAMES,
    OWNERS,
    TICKS,
    UNLEASED,
    Bench,
    Held,
    Twins,
    alike,
    open_bench,
)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench() as found:
        yield found


MODELS = ("a", "ab", "ä\0")


class QueueModel(Twins):
    """The steps: everything that owners, producers, operators and time do."""

    owners = st.integers(0, OWNERS - 1)
    lost = st.integers(0, 19).map(lambda number: number == 0)
    lags = st.sampled_from([0, 0, 0, 0, 3, 7])
    limits = st.sampled_from([0, 1, 2, 4, 6, 8, 12, 16])
    members = st.one_of(st.sampled_from([b"0", b"1", b"2", b"3"]), st.binary(max_size=2))
    scores = st.one_of(
        st.sampled_from([4.0e9, 4.0e9 + 1, 4.0e9 + 0.5]),
        st.sampled_from([0.0, -5.0, 0.5, 1e12, float("inf"), float("-inf"), 1_700_000_000.25]),
        st.builds(
            lambda band, at: float(band * BAND + at), st.integers(0, 2), st.sampled_from([1000, 4 * 10**9])
        ),
    )

    @rule(score=scores, member=members)
    def zadd(self, score: float, member: bytes) -> None:
        self.add_line(score, member)

    @precondition(lambda self: self.store.queue.entries)
    @rule(data=st.data())
    def zadd_again(self, data: st.DataObject) -> None:
        """A member identical to one that was claimed before."""
        entry = self.store.queue.entries[data.draw(st.sampled_from(sorted(self.store.queue.entries)))]
        self.add_line(entry.score, entry.member)

    @rule(owner=owners, number=st.integers(0, 2), deadline=st.sampled_from([1000, 4 * 10**9]), lose=lost)
    def submit(self, owner: int, number: int, deadline: int, lose: bool) -> None:
        self.serial += 1
        request = {"id": f"r-{number}", "deadline": deadline, "payload": {"n": self.serial}}
        token = f"t-{self.serial}"
        member = {"internal": {"request_token": token}, "request_kind": "redis", "data": request}
        raw = json.dumps(member).encode()
        submission = Submission(raw, deadline, f"r-{number}", token, 4 * 10**9)
        real, twin = self.both(
            owner, lambda queue, which: (queue, self.store)[which].submit([submission]), lose
        )
        assert real == twin
        self.accepted += twin

    def record_claim(self, owner: int, real: ClaimResult, twin: ClaimResult) -> None:
        assert len(real.leases) == len(twin.leases)
        for one, other in zip(real.leases, twin.leases, strict=True):
            alike(one, other)
        assert real.claimable_count == twin.claimable_count
        self.same_facts(owner, real, twin)
        self.seen["leases"] += len(real.leases)
        self.seen["suspects"] += sum(lease.deliveries > 2 for lease in real.leases)
        self.seen["counted losses"] += sum(lease.deaths_as_suspect > 0 for lease in real.leases)
        self.seen["probes"] += real.shared.probing_owner is not None
        known = {held.real.token for held in self.known[owner]}
        self.known[owner] += [
            Held(one, other)
            for one, other in zip(real.leases, twin.leases, strict=True)
            if one.token not in known
        ]

    @rule(
        owner=owners,
        max_count=st.integers(0, 6),
        limit=limits,
        lag=lags,
        suspects=st.integers(0, 2),
        lose=lost,
        assumed_units=st.sampled_from([0, 1, 1, 1, 2, 4]),
    )
    def claim(
        self,
        owner: int,
        max_count: int,
        limit: int,
        lag: int,
        suspects: int,
        lose: bool,
        assumed_units: int = 1,
    ) -> None:
        self.serial += 1
        nonce = f"n-{self.serial}"
        self.nonces[owner] = (nonce, False)
        permit = self.permit(owner, limit, lag)
        real, twin = self.both(
            owner,
            lambda queue, _: queue.claim(
                max_count, nonce, permit, max_per_lane={Lane.SUSPECTS: suspects}, assumed_units=assumed_units
            ),
            lose,
        )
        self.record_claim(owner, real, twin)
        if real.leases:
            assert len(real.leases) <= max_count
            assert real.lease_counts.live_units <= limit
            assert real.lease_counts.live_units <= real.shared.limit
            assert not real.shared.is_paused
            order = [(lease.score, lease.member) for lease in real.leases]
            assert order == sorted(order)

    @rule(owner=owners, lose=lost)
    def claim_again(self, owner: int, lose: bool) -> None:
        """The reply to the last claim was lost, its time-out passed, and the caller repeats it."""
        nonce, probing = self.nonces[owner]
        if not nonce:
            return
        before = self.real_units()
        permit = self.permit(owner, 8)
        if probing:
            real, twin = self.both(owner, lambda queue, _: queue.claim_probe(nonce, permit), lose)
        else:
            real, twin = self.both(owner, lambda queue, _: queue.claim(5, nonce, permit), lose)
        self.record_claim(owner, real, twin)
        assert real.lease_counts.live_units == before

    @rule(owner=owners, limit=limits, lose=lost)
    def claim_probe(self, owner: int, limit: int, lose: bool) -> None:
        self.serial += 1
        permit = self.permit(owner, limit)
        nonce = f"n-{self.serial}"
        self.nonces[owner] = (nonce, True)
        real, twin = self.both(owner, lambda queue, _: queue.claim_probe(nonce, permit), lose)
        self.record_claim(owner, real, twin)
        assert not real.leases or real.lease_counts.live_units <= limit

    def pick(self, owner: int, data: st.DataObject, most: int = 4) -> list[Held]:
        """Some leases the owner holds or thinks it holds, or ended ones, each once."""
        if not self.known[owner]:
            self.claim(owner, 4, data.draw(self.limits), 0, 2, False)
        pool = self.known[owner] + self.ended[-2:]
        if not pool:
            return []
        at = st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=most, unique=True)
        return [pool[number] for number in data.draw(at)]

    def drop(self, owner: int, held: Sequence[Held]) -> None:
        self.known[owner] = [one for one in self.known[owner] if one not in held]
        self.ended += [one for one in held if one not in self.ended]

    def end(self, held: Held, name: str, which: int, request: tuple[str, str]) -> Settlement:
        self.serial += which
        result = encode_answer(request[0] or "r", 200, b"%d" % held.real.entry_id)
        return Settlement((held.real, held.twin)[which], result, name, *request)

    @rule(data=st.data(), owner=owners, lose=lost, bury=st.booleans())
    def settle(self, data: st.DataObject, owner: int, lose: bool, bury: bool) -> None:
        """Answer some, or bury them. What ended before stays ended."""
        chosen = sorted(self.pick(owner, data), key=lambda held: held.real.entry_id)
        lists = [data.draw(st.sampled_from((*LISTS, LISTS[-1]))) for _ in chosen]
        requests = [_request_of(held.real.member) for held in chosen]
        ends = [
            [
                self.end(held, name, which, request)
                for held, name, request in zip(chosen, lists, requests, strict=True)
            ]
            for which in (0, 1)
        ]
        if bury:
            burials = [[DeadLetter(end, "why") for end in side] for side in ends]
            real, twin = self.both(
                owner, lambda queue, which: queue.move_to_dead_letters(burials[which]), lose
            )
        else:
            real, twin = self.both(owner, lambda queue, which: queue.settle(ends[which]), lose)
        assert list(real) == list(twin)
        for said, end in zip(real, ends[0], strict=True):
            self.seen[f"{said} {bury=}"] += 1
            if said == "done":
                self.written[end.result_list or NAMES.result_list, end.result] += 1
            if said != "lost" and not bury:
                self.finished += 1
        self.drop(owner, chosen)

    @rule(data=st.data(), owner=owners, lose=lost)
    def release(self, data: st.DataObject, owner: int, lose: bool) -> None:
        flags: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
            {
                "delay_s": st.sampled_from([0.0, 1000.0]),
                "is_failed_attempt": st.booleans(),
                "is_refusal": st.booleans(),
                "is_undelivered": st.booleans(),
                "last_attempt": st.sampled_from(["", "reset", "ä"]),
                "missing_model": st.sampled_from(["", "", "", "", "", *MODELS]),
            }
        )
        chosen = self.pick(owner, data)
        said = [data.draw(flags) for _ in chosen]
        self.seen["delayed"] += sum(each["delay_s"] > 0 for each in said)
        self.seen["awaiting"] += sum(each["missing_model"] != "" for each in said)
        releases = [
            [Release((held.real, held.twin)[which], **each) for held, each in zip(chosen, said, strict=True)]
            for which in (0, 1)
        ]
        real, twin = self.both(owner, lambda queue, which: queue.release(releases[which]), lose)
        assert list(real) == list(twin)
        self.drop(owner, chosen)

    @rule(owner=owners, number=st.integers(0, 2))
    def some_wait_until_they_are_due(self, owner: int, number: int) -> None:
        """By chance alone a delay that passes seldom meets one that has begun."""
        self.submit(owner, number, 4 * 10**9, False)
        self.claim(owner, 6, 16, 0, 2, False)
        chosen = self.known[owner][-4:]
        sides = [[Release(held.real, delay_s=1000.0) for held in chosen]]
        sides.append([Release(held.twin, delay_s=1000.0) for held in chosen])
        real, twin = self.both(owner, lambda queue, which: queue.release(sides[which]))
        assert list(real) == list(twin)
        self.seen["delayed"] += len(chosen)
        self.drop(owner, chosen)
        self.all_delays_pass(owner)

    @rule(
        owner=owners,
        number=st.integers(0, 2),
        deadline=st.sampled_from([1000, 4 * 10**9]),
        model=st.sampled_from(MODELS),
        then=st.sampled_from(["", "cancel", "expire"]),
    )
    def put_off(self, owner: int, number: int, deadline: int, model: str, then: str) -> None:
        """Some wait for their model, and are cancelled meanwhile, or too late."""
        self.submit(owner, number, deadline, False)
        self.claim(owner, 6, 16, 0, 2, False)
        chosen = self.known[owner][-4:]
        sides = [
            [Release((held.real, held.twin)[which], missing_model=model) for held in chosen]
            for which in (0, 1)
        ]
        real, twin = self.both(owner, lambda queue, which: queue.release(sides[which]))
        assert list(real) == list(twin)
        self.drop(owner, chosen)
        self.seen["awaiting"] += len(chosen)
        if then == "cancel":
            self.cancel_request(owner, number)
            self.sweep(owner, False)
        elif then == "expire":
            self.settle_unleased(owner, False)

    @rule(owner=owners, models=st.lists(st.sampled_from((*MODELS, "none's")), max_size=3), lose=lost)
    def return_waiting_for_models(self, owner: int, models: list[str], lose: bool) -> None:
        """Models are served. Without a reply to the first call the second one finds nothing left."""
        waited = self.store.queue.count_requests().waiting_for_model
        real, twin = self.both(owner, lambda queue, _: queue.return_waiting_for_models(models), lose)
        assert real == twin or (
            lose and (real.returned_count, real.remaining_count) == (0, twin.remaining_count)
        )
        assert self.store.queue.count_requests().waiting_for_model == waited - twin.returned_count
        self.seen["recalled"] += twin.returned_count

    @rule(data=st.data(), owner=owners, limit=limits, lag=lags, lose=lost)
    def set_lease_units(self, data: st.DataObject, owner: int, limit: int, lag: int, lose: bool) -> None:
        """Some requests were read: heavier or lighter than they were taken for. Heavy ones may go back."""
        chosen = self.pick(owner, data)
        units = [data.draw(st.integers(0, 8)) for _ in chosen]
        sides = [
            [((held.real, held.twin)[which], each) for held, each in zip(chosen, units, strict=True)]
            for which in (0, 1)
        ]
        permit, before = self.permit(owner, limit, lag), self.real_units()
        real, twin = self.both(owner, lambda queue, which: queue.set_lease_units(sides[which], permit), lose)
        assert real.fits == twin.fits
        self.same_facts(owner, real, twin)
        assert real.lease_counts.live_units <= max(before, limit)
        self.seen["weighed"] += sum(real.fits)
        self.seen["too heavy"] += len(chosen) - sum(real.fits)
        self.drop(owner, [held for held, fits in zip(chosen, real.fits, strict=True) if not fits])

    @rule(owner=owners, lose=lost)
    def renew(self, owner: int, lose: bool) -> None:
        mine = self.known[owner] + self.ended[-3:]
        sides = [[held.real for held in mine], [held.twin for held in mine]]
        real, twin = self.both(owner, lambda queue, which: queue.renew(sides[which]), lose)
        assert sorted(real.lost_entry_ids) == sorted(twin.lost_entry_ids)
        self.same_facts(owner, real, twin)
        self.drop(owner, [held for held in self.known[owner] if held.real.entry_id in real.lost_entry_ids])

    @rule(owner=owners, limit=limits, lag=lags, lose=lost)
    def share_state(self, owner: int, limit: int, lag: int, lose: bool) -> None:
        permit = self.permit(owner, limit, lag)
        real, twin = self.both(owner, lambda queue, _: queue.share_state(permit, None), lose)
        self.same_facts(owner, real, twin)

    @rule(
        owner=owners,
        limit=limits,
        lag=lags,
        lasts_s=st.sampled_from([0.0, 0.0, 9000.0]),
        capacity=st.booleans(),
        in_flight=st.integers(0, 9),
        lose=lost,
    )
    def overload(
        self, owner: int, limit: int, lag: int, lasts_s: float, capacity: bool, in_flight: int, lose: bool
    ) -> None:
        permit = self.permit(owner, limit, lag)
        at = self.when(owner, lag)
        told = Overload(at, at + lasts_s, capacity, in_flight)
        real, twin = self.both(owner, lambda queue, _: queue.share_state(permit, told), lose)
        self.same_facts(owner, real, twin)

    @precondition(lambda self: any(self.known))
    @rule(owner=owners)
    def crash(self, owner: int) -> None:
        """The process is gone, and what it knew; its successor has its name."""
        self.drop(owner, self.known[owner])
        self.nonces[owner] = ("", False)

    @rule(data=st.data(), owner=owners, swept=st.booleans())
    def time_of_some_leases_runs_out(self, data: st.DataObject, owner: int, swept: bool) -> None:
        if swept:
            self.sweep(owner, False)
        if held := sorted(self.store.pool.leases):
            self._run_out(data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True)))
            if swept:
                self.sweep(owner, False)

    @rule(owner=owners, times=st.integers(1, 4), limit=limits)
    def owners_keep_dying(self, owner: int, times: int, limit: int) -> None:
        for _ in range(times):
            self.sweep(owner, False)
            self.third_of_a_lease_passes()
            self.claim(owner, 3, limit, 0, 2, False)
            self.drop(owner, self.known[owner])
            self._run_out(sorted(self.store.pool.leases))
            self.sweep(owner, False)

    def _run_out(self, entries: Sequence[int]) -> None:
        key = f"{NAMES.queue_prefix}:leases"
        for entry in entries:
            held = self.store.pool.leases[entry]
            held.expires_at = 0.0
            heapq.heappush(self.store.pool.expiries, (0.0, entry))
            units = held.entry.units
            weight = {0: "*00", 1: ""}.get(units, f"*{units}")
            name = f"{entry}{weight}:{held.owner}"
            assert self.bench.raw.zscore(key, name) is not None
            self.bench.raw.zadd(key, {name: 0.0}, xx=True)

    @rule(owner=owners)
    def all_delays_pass(self, owner: int) -> None:
        key = f"{NAMES.queue_prefix}:delayed"
        if delayed := self.bench.raw.zrange(key, 0, -1):
            self.bench.raw.zadd(key, dict.fromkeys(delayed, 0.0), xx=True)
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
            self.bench.raw.hset(control, "overload_until", self.bench.raw.hget(control, "overload_at"))

    @rule()
    def redis_is_away_for_longer_than_a_lease(self) -> None:
        self.swept_ago_s = 2 * LEASE_S
        self._run_out(sorted(self.store.pool.leases))

    @rule()
    def third_of_a_lease_passes(self) -> None:
        """And so whatever time is quiet for the beats, by which no owner falls silent here."""
        self.store.pool.no_expiry_until -= LEASE_S / 3 + 1
        self._move_control("quiet_until", -LEASE_S / 3 - 1)
        self.store.pool.no_silence_until -= LEASE_S + 1
        self._move_control("heartbeats_quiet_until", -LEASE_S - 1)

    @rule(owner=owners, silent=st.sets(owners, min_size=1), passes=st.booleans())
    def owners_fall_silent(self, owner: int, silent: set[int], passes: bool) -> None:
        """They are taken for dead, and some of them do not know it."""
        if passes:
            self.sweep(owner, False)
            self.third_of_a_lease_passes()
        for name in (f"owner-{number}" for number in silent):
            if name in self.store.pool.heartbeats:
                self.store.pool.heartbeats[name] = 0.0
            self.bench.raw.zadd(f"{NAMES.queue_prefix}:heartbeats", {name: 0.0}, xx=True)
        before = self.store.pool.lost_units
        self.sweep(owner, False)
        self.seen["of silent owners"] += self.store.pool.lost_units - before

    @rule(owner=owners, gone=st.sets(owners, min_size=1))
    def owners_are_proven_gone(self, owner: int, gone: set[int]) -> None:
        """Whatever is known of them else; their successors have their names."""
        self.knows.ended = {f"owner-{number}" for number in gone}
        before = self.store.pool.lost_units
        self.sweep(owner, False)
        self.seen["of owners proven gone"] += self.store.pool.lost_units - before
        self.knows.ended = set()
        for number in gone - {owner}:
            self.crash(number)

    def _move_control(self, field: str, seconds: float) -> None:
        key = f"{NAMES.queue_prefix}:control"
        if (at := self.bench.raw.hget(key, field)) is not None:
            self.bench.raw.hset(key, field, f"{float(at) + seconds:.6f}")

    @rule(owner=owners, seconds=st.sampled_from([5000.0, 200_000.0]))
    def clock_steps_back(self, owner: int, seconds: float) -> None:
        """What Redis keeps lies ahead by then; the twin's own clock does step."""
        clock, prefix = self.store.pool.clock, NAMES.queue_prefix
        self.store.pool.clock = lambda: clock() - seconds
        self.store.pool.unix_origin += seconds
        for key in ("leases", "delayed", "heartbeats"):
            for name in self.bench.raw.zrange(f"{prefix}:{key}", 0, -1):
                self.bench.raw.zincrby(f"{prefix}:{key}", seconds, name)
        shared = ("read_at", "overload_at", "overload_until")
        known = {field: self.bench.raw.hget(f"{prefix}:control", field) for field in shared}
        for field in (*shared, "quiet_until", "heartbeats_quiet_until", "probe_waits", *TICKS):
            self._move_control(field, seconds)
        permit, overload = self.store.pool.shared_permit, self.store.pool.overload
        self.renew(owner, False)
        real, twin = self.both(owner, lambda queue, _: queue.sweep())
        assert (real.reclaimed_count, real.due_count, real.lost_units) == (
            twin.reclaimed_count,
            twin.due_count,
            twin.lost_units,
        )
        self.seen["steps back"] += 1
        # What was shared is of now. No moment here ever is: it goes back to its own.
        if permit is not None:
            self.store.pool.shared_permit = permit.copy_with(read_at=permit.read_at - seconds)
        if overload is not None and self.store.pool.overload is not None:
            at, until = overload.refused_at - seconds, overload.retry_at - seconds
            self.store.pool.overload = replace(self.store.pool.overload, refused_at=at, retry_at=until)
        if kept := {field: at for field, at in known.items() if at is not None}:
            self.bench.raw.hset(f"{prefix}:control", mapping=kept)

    swept_ago_s = 0.0
    """How long the last sweep is taken to be ago: how long this process was, is nothing to compare by."""

    @rule(owner=owners, lose=lost)
    def sweep(self, owner: int, lose: bool) -> None:
        if self.store.pool.swept_at is not None:
            self.store.pool.swept_at = self.store.queue.swept_at = self.store.pool.clock() - self.swept_ago_s
            ticks = dict.fromkeys(TICKS, f"{time.time() - self.swept_ago_s:.6f}")
            self.bench.raw.hset(f"{NAMES.queue_prefix}:control", mapping=ticks)
        self.swept_ago_s = 0.0
        real, twin = self.both(owner, lambda queue, _: queue.sweep())
        assert (real.reclaimed_count, real.due_count, real.lost_units) == (
            twin.reclaimed_count,
            twin.due_count,
            twin.lost_units,
        )
        assert real.cancelled_count == twin.cancelled_count
        self.seen["revoked"] += real.cancelled_count
        self.seen["reclaimed"] += real.reclaimed_count
        self.seen["due"] += real.due_count
        assert (real.next_due_at is None) == (twin.next_due_at is None)

    @rule(owner=owners, probing=st.booleans())
    def pause_and_resume(self, owner: int, probing: bool) -> None:
        self.both(owner, lambda queue, which: (queue, self.store)[which].pause("me", "why"))
        if probing:
            self.claim_probe(owner, 100, False)
        else:
            self.claim(owner, 6, 16, 0, 1, False)
        self.both(owner, lambda queue, which: (queue, self.store)[which].resume())

    @rule(owner=owners, lose=lost)
    def settle_unleased(self, owner: int, lose: bool) -> None:
        """Whatever both call expired, in as many calls as that takes; and again, which does nothing."""
        found: list[dict[tuple[str, bytes], Any]] = [{}, {}]

        async def look(queue: Any, which: int) -> None:
            for _ in range(6):
                for one in await queue.find_overdue(20):
                    found[which][one.location, one.member] = one

        self.both(owner, look)
        real, twin = (list(side.values()) for side in found)
        lying = {entry.location_token: entry for entry in self.store.queue.entries.values()}
        self.seen["expired awaiting"] += sum(
            entry.missing_model != "" for one in twin if (entry := lying.get(one.location)) is not None
        )
        assert {one.member for one in real} == {one.member for one in twin}
        items = [[(one, Settlement(UNLEASED, b"gone", "")) for one in side] for side in (real, twin)]
        done = self.both(owner, lambda queue, which: queue.settle_unleased(items[which]), lose)
        assert done[0] == done[1]
        self.written[NAMES.result_list, b"gone"] += done[0]
        self.finished += done[0]
        self.seen["expired"] += done[0]
        assert self.both(owner, lambda queue, which: queue.settle_unleased(items[which])) == (0, 0)

    @precondition(lambda self: self.store.queue.dead)
    @rule(data=st.data(), owner=owners, purge=st.booleans(), lose=lost)
    def decide_about_the_dead(self, data: st.DataObject, owner: int, purge: bool, lose: bool) -> None:
        entries = data.draw(st.lists(st.sampled_from([*self.store.queue.dead, 10**6]), unique=True))
        dead = self.store.queue.count_requests().dead
        pending = self.store.queue.count_requests().pending
        if purge:
            real, twin = self.both(
                owner, lambda queue, which: (queue, self.store)[which].purge_dead(entries), lose
            )
        else:
            real, twin = self.both(
                owner, lambda queue, which: (queue, self.store)[which].requeue_dead(entries, 4 * 10**9)
            )
        assert real == twin or (lose and purge)
        assert self.store.queue.count_requests().dead == dead - twin
        # Requeued into an identical pending member, it is that same request.
        self.finished += (
            dead
            + pending
            - self.store.queue.count_requests().dead
            - self.store.queue.count_requests().pending
        )

    @rule(owner=owners, number=st.integers(0, 2))
    def cancel_request(self, owner: int, number: int) -> None:
        real, twin = self.both(
            owner, lambda queue, which: (queue, self.store)[which].cancel_request(f"r-{number}")
        )
        assert real == twin


@cache
def _request_of(member: bytes) -> tuple[str, str]:
    """Id and token of a member of ours; a foreign one here is a few bytes and has none."""
    try:
        fields = json.loads(member)
        return fields["data"]["id"], fields["internal"]["request_token"]
    except (ValueError, TypeError, KeyError):
        return "", ""


HAPPENS = (
    *("leases", "suspects", "counted losses", "probes", "delayed", "reclaimed", "due", "expired"),
    *("replies lost", "done bury=False", "done bury=True", "lost bury=False", "bad-list bury=False"),
    *("of silent owners", "of owners proven gone", "steps back", "weighed", "too heavy"),
    *("awaiting", "recalled", "revoked", "expired awaiting"),
)


def run(bench: Bench, examples: int, steps: int, *, derandomize: bool) -> None:
    machine: Any = type("BoundModel", (QueueModel,), {"bench": bench, "seen": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            derandomize=derandomize,
            # Shrinking takes minutes: the long form does it.
            phases=[Phase.generate] if derandomize else [Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert {what for what in HAPPENS if not machine.seen[what]} == set(), machine.seen


@pytest.mark.timeout(300)
def test_scripts_do_what_the_twin_does(bench: Bench) -> None:
    run(bench, examples=130, steps=40, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_scripts_do_what_the_twin_does_at_length(bench: Bench) -> None:
    run(bench, examples=1000, steps=100, derandomize=False)
