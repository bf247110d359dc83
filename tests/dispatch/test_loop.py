"""The turns of the loop: what is claimed and how often, what is handed in, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import Outcome, Overloaded, RetryPolicy, Unreachable
from dispatcher.core.limit.budget import Reading, Reason, Signal
from dispatcher.core.limit.poll import Poll
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.dispatch.loop import FLUSH_DELAY_S, LARGE_MEMBER_BYTES
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import (
    AttemptResult,
    ClaimResult,
    DeadLetter,
    Permit,
    QueueUnavailableError,
    Settlement,
    SettleStatus,
    Submission,
)
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.scene import Answers, Scene, open_limiter, perform
from tests.queue.made import member

AWAY = QueueUnavailableError("Redis did not answer in time")


def replies_lost(scene: Scene, what: str, times: int) -> list[str]:
    """The next so many calls are carried out, and nobody hears of it. Their nonces, and of one more."""
    nonces: list[str] = []
    carried_out = getattr(scene.queue, what)

    async def call(*args: object, **how: object) -> ClaimResult:
        told: ClaimResult = await carried_out(*args, **how)
        nonces.append(next(str(each) for each in args if isinstance(each, str)))
        if len(nonces) <= times:
            raise AWAY
        delattr(scene.queue, what)
        return told

    setattr(scene.queue, what, call)
    return nonces


def test_claim_whose_reply_was_lost_is_repeated_under_its_name() -> None:
    async def scene_of(scene: Scene) -> None:
        nonces = replies_lost(scene, "claim", 3)
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(5)
        assert len(nonces) == 4
        assert len(set(nonces)) == 1
        assert sorted(scene.gateway.sent) == ["r-1", "r-2"], "each once"

    perform(scene_of)


def test_each_claim_has_a_name_of_its_own() -> None:
    async def scene_of(scene: Scene) -> None:
        nonces = replies_lost(scene, "claim", 0)
        await scene.submit("r-1")
        await asyncio.sleep(1)
        more = replies_lost(scene, "claim", 0)
        await scene.submit("r-2")
        await asyncio.sleep(1)
        assert len({*nonces, *more}) == 2
        assert scene.gateway.sent == ["r-1", "r-2"]

    perform(scene_of)


def test_no_more_is_claimed_than_the_limit_leaves() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 60.0
        scene.store.pool.add_owner_units("other", 4)
        await scene.submit(*(f"r-{number}" for number in range(20)))
        await asyncio.sleep(1)
        assert scene.dispatcher.get_allowance().limit == 9
        assert len(scene.gateway.sent) == scene.dispatcher.running_count == 5
        assert scene.dispatcher.get_allowance().reason is Reason.FULL

    perform(scene_of)


def test_what_is_held_and_not_sent_yet_takes_its_place() -> None:
    """Between claim and send its cancel marker is looked up: a turn that comes meanwhile must count it."""

    async def scene_of(scene: Scene) -> None:
        free: list[int] = []
        claim = scene.queue.claim

        async def seen(max_count: int, nonce: str, permit: Permit, **how: int) -> ClaimResult:
            free.append(max_count)
            return await claim(max_count, nonce, permit, **how)

        scene.queue.claim = seen  # type: ignore[method-assign]
        scene.gateway.takes_s = 60.0
        scene.store.pool.add_owner_units("other", 2)
        await scene.submit("r-1", "r-2", "r-3")
        await asyncio.sleep(1.5)
        assert len(scene.gateway.sent) == 3
        await scene.submit("r-4")
        await asyncio.sleep(1.5)
        assert max(free[-1:]) == 4, "of 9: what another holds and the three here"

    perform(scene_of)


def test_work_that_a_claim_left_is_claimed_without_waiting_for_a_wake_up() -> None:
    async def scene_of(scene: Scene) -> None:
        counts = scene.queue.looked_up
        await scene.submit(*(f"r-{number}" for number in range(90)))
        scene.queue._wake_event.clear()
        await asyncio.sleep(0.15)
        assert len(scene.gateway.sent) == 90, "ten turns, and one wake-up"
        assert scene.queue.looked_up - counts <= 12

    perform(scene_of)


@pytest.mark.parametrize("what", ["paused", "drained"])
def test_gate_that_closes_between_claim_and_send_holds_for_what_was_claimed(what: str) -> None:
    async def scene_of(scene: Scene) -> None:
        looked_up = scene.queue.check_cancelled

        async def meanwhile(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            if what == "paused":
                scene.limiter.set_paused(True, 0.0)
            else:
                scene.dispatcher.drain(5.0)
            return await looked_up(requests)

        scene.queue.check_cancelled = meanwhile  # type: ignore[method-assign]
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        assert scene.gateway.sent == []
        counts = scene.store.queue.count_requests()
        assert (counts.pending, counts.leased) == (1, 0)

    perform(scene_of)


def test_what_dead_owners_left_is_taken_over_before_anything_is_counted() -> None:
    """Else what they lost would lower the limit until a second reading."""

    async def scene_of(scene: Scene) -> None:
        order: list[str] = []
        for what in ("sweep", "claim", "count_requests"):

            def noted(what: str, carried_out: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
                async def call(*args: Any, **how: Any) -> Any:
                    order.append(what)
                    return await carried_out(*args, **how)

                return call

            setattr(scene.queue, what, noted(what, getattr(scene.queue, what)))
        await scene.submit("r-1")
        await asyncio.sleep(0.1)
        assert order[0] == "sweep"
        assert "claim" in order

    perform(scene_of)


def test_claim_that_got_nothing_says_why_in_the_sentence() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.store.pool.shared_permit = Permit(limit=0, read_at=1.5, lost_units=0)
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        because = "a newer reading of another dispatcher leaves a limit of 0"
        assert scene.dispatcher.get_allowance().detail == because

    perform(scene_of)


def test_completions_are_replaced_at_once() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 1.0
        await scene.submit(*(f"r-{number}" for number in range(45)))
        await asyncio.sleep(5.2)
        assert len(scene.gateway.sent) == 45
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 45

    perform(scene_of)


# Handing in.


def test_results_wait_here_until_the_queue_takes_them() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 1.0
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(0.5)
        scene.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(20)
        assert scene.dispatcher.running_count == 0
        scene.store.outage_message = None
        await asyncio.sleep(2)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 2
        assert scene.store.queue.count_requests().leased == 0

    perform(scene_of)


def test_result_that_finds_no_place_alone_is_handed_in_again_alone() -> None:
    async def scene_of(scene: Scene) -> None:
        settle = scene.queue.settle
        calls: list[list[str]] = []

        async def picky(settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
            calls.append([each.request_id for each in settlements])
            if len(calls) > 3:
                return await settle(settlements)
            others = [each for each in settlements if each.request_id != "r-1"]
            told = iter(await settle(others) if others else ())
            return [None if each.request_id == "r-1" else next(told) for each in settlements]

        scene.queue.settle = picky  # type: ignore[method-assign]
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(5)
        assert calls == [["r-1", "r-2"], ["r-1"], ["r-1"], ["r-1"]]
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 2

    perform(scene_of)


def test_each_way_to_end_is_one_call_for_all_that_end_so() -> None:
    class Mixed(Answers):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            told = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            outcome: Outcome = Overloaded(429, "", is_out_of_capacity=False)
            return told if request.id < "r-3" else told.copy_with(outcome=outcome)

    async def scene_of(scene: Scene) -> None:
        calls: list[tuple[str, int]] = []

        def counted(what: str) -> None:
            carried_out = getattr(scene.queue, what)

            async def call(several: Sequence[DeadLetter]) -> Sequence[SettleStatus]:
                calls.append((what, len(several)))
                told: Sequence[SettleStatus] = await carried_out(several)
                return told

            setattr(scene.queue, what, call)

        for what in ("settle", "release", "move_to_dead_letters"):
            counted(what)
        scene.store.add_member(b"no member", 0.0)
        await scene.submit("r-1", "r-2", "r-3", "r-4")
        await asyncio.sleep(0.5)
        assert calls[:3] == [("settle", 2), ("release", 2), ("move_to_dead_letters", 1)]
        assert len(await scene.store.list_dead(9)) == 1

    perform(scene_of, Mixed())


def test_what_ends_close_together_is_handed_in_together_and_what_ends_alone_at_once() -> None:
    class Staggered(Answers):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            self.takes_s = {"r-1": 1.0, "r-2": 1.0 + FLUSH_DELAY_S / 2, "r-3": 2.0}[request.id]
            return await super().forward(request, token=token, deadline=deadline, may_send=may_send)

    async def scene_of(scene: Scene) -> None:
        settle = scene.queue.settle
        calls: list[tuple[int, float]] = []

        async def seen(settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
            calls.append((len(settlements), asyncio.get_running_loop().time() - began))
            return await settle(settlements)

        scene.queue.settle = seen  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        await scene.submit("r-1", "r-2", "r-3")
        await asyncio.sleep(3)
        (together, first_s), (alone, last_s) = calls
        assert (together, alone) == (2, 1)
        assert first_s == pytest.approx(1.0 + FLUSH_DELAY_S, abs=FLUSH_DELAY_S / 4)
        assert last_s == pytest.approx(2.0, abs=FLUSH_DELAY_S / 4), "nothing runs that could end soon"

    perform(scene_of, Staggered())


def test_what_was_given_back_at_once_is_claimed_again_without_a_wake_up() -> None:
    async def scene_of(scene: Scene) -> None:
        looked_up = scene.queue.check_cancelled

        async def meanwhile(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            del scene.queue.check_cancelled
            scene.limiter.set_paused(True, 0.0)
            return await looked_up(requests)

        scene.queue.check_cancelled = meanwhile  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        await scene.submit("r-1")
        await asyncio.sleep(0.01)
        assert (scene.queue.record_claim, scene.gateway.sent) == (1, [])
        scene.limiter.set_paused(False, 0.0)
        scene.dispatcher.wake_up()
        await asyncio.sleep(0.01)
        assert (scene.queue.record_claim, scene.gateway.sent) == (2, ["r-1"])

    perform(scene_of)


def test_large_member_is_not_kept_beside_its_request() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 1.0
        until = int(time.time()) + 10**6
        for name, size in (("small", 100), ("large", LARGE_MEMBER_BYTES)):
            member = encode_member(name, b'{"prompt":"%s"}' % (b"x" * size), until, token="t")
            await scene.store.submit([Submission(member, float(until), name, "t", until)])
        await asyncio.sleep(0.5)
        kept = {
            held.request.id: len(held.lease.member) for held in scene.dispatcher._in_flight if held.request
        }
        assert kept["large"] == 0 < kept["small"]
        await asyncio.sleep(1)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 2

    perform(scene_of)


# The gateway.


def test_reading_wakes_the_loop_though_the_queue_does_not_answer() -> None:
    async def scene_of(scene: Scene) -> None:
        await asyncio.sleep(0.5)

        async def hangs(*_: object) -> Any:
            await asyncio.sleep(60)

        scene.queue.share_state = hangs  # type: ignore[method-assign, assignment]
        now = asyncio.get_running_loop().time()
        reading = Reading(Signal.REQUESTS, now - 0.1, now - 0.1, 0.5, 0.0, 10)
        scene.dispatcher.apply_poll(Poll(completed_at=now, signals=(Signal.REQUESTS,), readings=(reading,)))
        await asyncio.sleep(0.001)
        assert scene.dispatcher.last_turn_at == now

    perform(scene_of)


def test_reading_changes_how_many_connections_are_kept_and_wakes_the_loop() -> None:
    async def scene_of(scene: Scene) -> None:
        sizes: list[int] = []
        scene.gateway.resize_connection_pool = sizes.append  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.5)
        now = asyncio.get_running_loop().time()
        reading = Reading(Signal.REQUESTS, now - 0.1, now - 0.1, 0.5, 0.0, 10)
        scene.dispatcher.apply_poll(Poll(completed_at=now, signals=(Signal.REQUESTS,), readings=(reading,)))
        assert sizes == [4]
        await asyncio.sleep(0.001)
        assert scene.dispatcher.last_turn_at == now
        assert scene.store.pool.shared_permit is not None
        assert scene.store.pool.shared_permit.limit == 4, "and the others are told"

    perform(scene_of)


def test_one_probe_at_a_time_finds_out_whether_the_gateway_is_back() -> None:
    class Away(Answers):
        away = True

        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            told = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            return told.copy_with(outcome=Unreachable("no connection")) if self.away else told

    gateway = Away()

    async def scene_of(scene: Scene) -> None:
        await scene.submit(*(f"r-{number}" for number in range(20)))
        await asyncio.sleep(1)
        gateway.takes_s = 3.0
        most = 0
        for _ in range(200):
            await asyncio.sleep(0.1)
            most = max(most, scene.dispatcher.running_count)
        assert most == 1
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        gateway.away, gateway.takes_s = False, 0.1
        await asyncio.sleep(90)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 20

    perform(scene_of, gateway)


class Gone(Answers):
    """There is no gateway; who asks learns it after so long."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        told = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        return told.copy_with(outcome=Unreachable("no connection"))


def test_probe_whose_reply_was_lost_is_repeated_under_its_name() -> None:
    """Under another one it would find a probe that runs: its own, which nobody sends."""

    async def scene_of(scene: Scene) -> None:
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        sent = len(scene.gateway.sent)
        nonces = replies_lost(scene, "claim_probe", 3)
        scene.gateway.takes_s = 10.0
        await asyncio.sleep(9)
        assert len(nonces) == 4
        assert len(set(nonces)) == 1
        assert len(scene.gateway.sent) == sent + 1
        more = replies_lost(scene, "claim_probe", 0)
        await asyncio.sleep(10)
        assert len({*nonces, *more}) == 2, "the next has another name"

    perform(scene_of, Gone())


def test_while_a_probe_runs_the_queue_is_not_asked_for_another() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(0.5)
        asked: list[str] = []
        probe = scene.queue.claim_probe

        async def seen(nonce: str, permit: Permit) -> ClaimResult:
            asked.append(nonce)
            return await probe(nonce, permit)

        scene.queue.claim_probe = seen  # type: ignore[method-assign]
        scene.gateway.takes_s = 25.0
        await asyncio.sleep(20)
        assert (len(asked), scene.dispatcher.running_count) == (1, 1)

    perform(scene_of, Gone())


# Turning, settings, the end.


class Turning(Dispatcher):
    """It counts its turns."""

    turns = 0

    @property
    def last_turn_at(self) -> float:
        return 0.0

    @last_turn_at.setter
    def last_turn_at(self, _at: float) -> None:
        self.turns += 1


def test_completion_takes_one_turn_that_hands_in_and_claims() -> None:
    async def main() -> None:
        store, gateway = MemoryStore(clock=asyncio.get_running_loop().time), Answers()
        gateway.takes_s = 0.25
        queue, journal = MemoryQueue(store, "a"), Journal(Metrics())
        dispatcher = Turning(queue, gateway, open_limiter(), Options(RetryPolicy()), journal)
        task = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(0.5)
        for number in range(100):
            store.add_member(member(f"r-{number:03d}"), float(number))
        await asyncio.sleep(1.0)
        before, sent = dispatcher.turns, len(gateway.sent)
        await asyncio.sleep(1.0)
        assert len(gateway.sent) - sent == 36
        assert dispatcher.turns - before <= 10, "four completions of nine, and five looks at the queue"
        dispatcher.drain(1.0)
        await task

    run_in_virtual_time(main(), start=2.0)


def test_loop_turns_each_second_though_nothing_happens() -> None:
    async def scene_of(scene: Scene) -> None:
        for _ in range(30):
            await asyncio.sleep(1.0)
            assert asyncio.get_running_loop().time() - scene.dispatcher.last_turn_at <= 1.0

    perform(scene_of)


def test_observer_claims_nothing_though_there_is_room_and_work() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.submit("r-1")
        await asyncio.sleep(30)
        assert (scene.queue.record_claim, scene.gateway.sent) == (0, [])
        assert scene.dispatcher.get_allowance().reason is Reason.OPEN
        assert scene.dispatcher.view.counts is not None
        assert scene.dispatcher.view.counts.pending == 1

    perform(scene_of, options=Options(RetryPolicy(), observe=True))


def test_other_settings_hold_for_all_parts_and_another_address_is_a_stranger_again() -> None:
    async def scene_of(scene: Scene) -> None:
        dispatcher = scene.dispatcher
        known = dispatcher._runner.unverified_gateway
        changed = Options(RetryPolicy(max_attempts=2), lease_s=60.0, owner_timeout_s=9.0)
        dispatcher.reconfigure(changed)
        assert dispatcher._runner.unverified_gateway is known
        assert dispatcher._runner.options is dispatcher._maintenance.options is changed
        tenure = dispatcher._access.lease_validity
        assert (tenure.lease_s, tenure.owner_timeout_s) == (60.0, 9.0)
        dispatcher.reconfigure(replace(changed, gateway_url="http://elsewhere"))
        assert dispatcher._runner.unverified_gateway is not known

    perform(scene_of)


@pytest.mark.parametrize(("within_s", "results"), [(30.0, 1), (2.0, 0)])
def test_drain_lets_what_runs_finish_in_time_and_gives_back_the_rest(within_s: float, results: int) -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 10.0
        await scene.submit("r-1")
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        scene.dispatcher.drain(within_s)
        await scene.submit("r-2")
        await scene.record_completion()
        assert asyncio.get_running_loop().time() - began == pytest.approx(min(within_s, 9.0), abs=0.2)
        assert scene.gateway.sent == ["r-1"], "nothing new"
        assert len(scene.store.result_lists.get(scene.store.default_result_list, ())) == results
        counts = scene.store.queue.count_requests()
        assert (counts.pending, counts.leased) == (2 - results, 0)

    perform(scene_of)


def test_second_drain_with_less_time_ends_sooner() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 100.0
        await scene.submit("r-1")
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        scene.dispatcher.drain(60.0)
        await asyncio.sleep(1)
        scene.dispatcher.drain(0.0)
        scene.dispatcher.drain(60.0)
        await scene.record_completion()
        assert asyncio.get_running_loop().time() - began < 1.5

    perform(scene_of)


def test_process_that_cannot_hand_in_gives_up_and_says_what_it_leaves() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = 1.0
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        scene.store.outage_message = "Redis refuses connections"
        began = asyncio.get_running_loop().time()
        scene.dispatcher.drain(5.0)
        await scene.record_completion()
        assert asyncio.get_running_loop().time() - began == pytest.approx(15.0, abs=1.1)
        assert [fields for event, fields in scene.events if event is Event.LEASES_LEFT_BEHIND] == [
            {"leases": 1}
        ]

    perform(scene_of)


def test_permit_of_a_claim_is_the_limit_of_now() -> None:
    async def scene_of(scene: Scene) -> None:
        permits: list[Permit] = []
        claim = scene.queue.claim

        async def seen(max_count: int, nonce: str, permit: Permit, **how: int) -> ClaimResult:
            permits.append(permit)
            return await claim(max_count, nonce, permit, **how)

        scene.queue.claim = seen  # type: ignore[method-assign]
        await scene.submit("r-1")
        await asyncio.sleep(0.1)
        assert {(permit.limit, permit.read_at, permit.lost_units) for permit in permits} == {(9, 1.0, 0)}

    perform(scene_of)
