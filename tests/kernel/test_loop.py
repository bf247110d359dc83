"""The rounds of the loop: claims, flushes of completions, probes, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.admission import LARGE_MEMBER_BYTES
from dispatcher.kernel.loop import FLUSH_DELAY_S
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Reading, Reason, Signal
from dispatcher.limit.poll import Poll
from dispatcher.queue.contract import ClaimResult, DeadLetter, Permit, Settlement, SettleStatus
from dispatcher.requests.outcomes.judge import GatewayRecord
from dispatcher.requests.outcomes.outcome import Outcome, Overloaded, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import QueueUnavailableError, Submission
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.metrics import Metrics
from tests.kernel.scene import AnsweringGateway, Scene, UnreachableGateway, open_limiter, run_in_scene
from tests.memory_queue import MemoryStore
from tests.queue.factories import member

NO_ANSWER = QueueUnavailableError("Redis did not answer in time")


def lose_replies(scene: Scene, method_name: str, lost_count: int) -> list[str]:
    """Carry out the next calls but lose their replies. Return the nonces of these and one more call."""
    nonces: list[str] = []
    original = getattr(scene.queue, method_name)

    async def call(*args: object, **options: object) -> ClaimResult:
        result: ClaimResult = await original(*args, **options)
        nonces.append(next(str(argument) for argument in args if isinstance(argument, str)))
        if len(nonces) <= lost_count:
            raise NO_ANSWER
        delattr(scene.queue, method_name)
        return result

    setattr(scene.queue, method_name, call)
    return nonces


def test_claim_whose_reply_was_lost_is_repeated_with_the_same_nonce() -> None:
    async def check(scene: Scene) -> None:
        nonces = lose_replies(scene, "claim", 3)
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(5)
        assert len(nonces) == 4
        assert len(set(nonces)) == 1
        assert sorted(scene.gateway.sent) == ["r-1", "r-2"], "each is sent once"

    run_in_scene(check)


def test_each_claim_has_its_own_nonce() -> None:
    async def check(scene: Scene) -> None:
        nonces = lose_replies(scene, "claim", 0)
        await scene.submit("r-1")
        await asyncio.sleep(1)
        later_nonces = lose_replies(scene, "claim", 0)
        await scene.submit("r-2")
        await asyncio.sleep(1)
        assert len({*nonces, *later_nonces}) == 2
        assert scene.gateway.sent == ["r-1", "r-2"]

    run_in_scene(check)


def test_claims_leave_the_units_of_other_owners_free() -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 60.0
        scene.store.pool.add_owner_units("other", 4)
        await scene.submit(*(f"r-{number}" for number in range(20)))
        await asyncio.sleep(1)
        assert scene.dispatcher.get_allowance().limit == 9
        assert len(scene.gateway.sent) == scene.dispatcher.running_count == 5
        assert scene.dispatcher.get_allowance().reason is Reason.FULL

    run_in_scene(check)


def test_leases_that_are_not_sent_yet_count_in_the_next_claim() -> None:
    """Cancel markers are looked up between claim and sending, and a round may run meanwhile."""

    async def check(scene: Scene) -> None:
        max_counts: list[int] = []
        claim = scene.queue.claim

        async def record_claim(max_count: int, nonce: str, permit: Permit, **options: int) -> ClaimResult:
            max_counts.append(max_count)
            return await claim(max_count, nonce, permit, **options)

        scene.queue.claim = record_claim  # type: ignore[method-assign]
        scene.gateway.answer_after_s = 60.0
        scene.store.pool.add_owner_units("other", 2)
        await scene.submit("r-1", "r-2", "r-3")
        await asyncio.sleep(1.5)
        assert len(scene.gateway.sent) == 3
        await scene.submit("r-4")
        await asyncio.sleep(1.5)
        assert max(max_counts[-1:]) == 4, "9, less 2 of the other owner and 3 of this one"

    run_in_scene(check)


def test_requests_that_a_claim_left_are_claimed_without_a_wake_up() -> None:
    async def check(scene: Scene) -> None:
        checks_before = scene.queue.cancel_check_count
        await scene.submit(*(f"r-{number}" for number in range(90)))
        scene.queue._wake_event.clear()
        await asyncio.sleep(0.15)
        assert len(scene.gateway.sent) == 90, "ten claims, and one wake-up"
        assert scene.queue.cancel_check_count - checks_before <= 12

    run_in_scene(check)


@pytest.mark.parametrize("closed_by", ["pause", "drain"])
def test_gate_that_closes_after_a_claim_returns_the_claimed_request(closed_by: str) -> None:
    async def check(scene: Scene) -> None:
        check_cancelled = scene.queue.check_cancelled

        async def close_gate_meanwhile(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            if closed_by == "pause":
                scene.limiter.set_paused(True, 0.0)
            else:
                scene.dispatcher.drain(5.0)
            return await check_cancelled(requests)

        scene.queue.check_cancelled = close_gate_meanwhile  # type: ignore[method-assign]
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        assert scene.gateway.sent == []
        counts = scene.store.queue.count_requests()
        assert (counts.pending, counts.leased) == (1, 0)

    run_in_scene(check)


def test_leases_of_dead_owners_are_reclaimed_before_the_first_count() -> None:
    """Otherwise their lost leases would lower the limit until the second reading."""

    async def check(scene: Scene) -> None:
        order: list[str] = []
        for method_name in ("sweep", "claim", "count_requests"):

            def wrap(
                method_name: str, original: Callable[..., Awaitable[Any]]
            ) -> Callable[..., Awaitable[Any]]:
                async def call(*args: Any, **options: Any) -> Any:
                    order.append(method_name)
                    return await original(*args, **options)

                return call

            setattr(scene.queue, method_name, wrap(method_name, getattr(scene.queue, method_name)))
        await scene.submit("r-1")
        await asyncio.sleep(0.1)
        assert order[0] == "sweep"
        assert "claim" in order

    run_in_scene(check)


def test_reason_of_an_empty_claim_is_part_of_the_explanation() -> None:
    async def check(scene: Scene) -> None:
        scene.store.pool.shared_permit = Permit(limit=0, read_at=1.5, lost_units=0)
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        because = "a newer reading of another dispatcher leaves a limit of 0"
        assert scene.dispatcher.get_allowance().detail == because

    run_in_scene(check)


def test_completed_requests_are_replaced_immediately() -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 1.0
        await scene.submit(*(f"r-{number}" for number in range(45)))
        await asyncio.sleep(5.2)
        assert len(scene.gateway.sent) == 45
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 45

    run_in_scene(check)


# Flushing completions.


def test_results_are_kept_until_the_queue_accepts_them() -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 1.0
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(0.5)
        scene.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(20)
        assert scene.dispatcher.running_count == 0
        scene.store.outage_message = None
        await asyncio.sleep(2)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 2
        assert scene.store.queue.count_requests().leased == 0

    run_in_scene(check)


def test_only_the_result_that_was_not_written_is_settled_again() -> None:
    async def check(scene: Scene) -> None:
        settle = scene.queue.settle
        calls: list[list[str]] = []

        async def settle_all_but_one(settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
            calls.append([each.request_id for each in settlements])
            if len(calls) > 3:
                return await settle(settlements)
            others = [each for each in settlements if each.request_id != "r-1"]
            statuses = iter(await settle(others) if others else ())
            return [None if each.request_id == "r-1" else next(statuses) for each in settlements]

        scene.queue.settle = settle_all_but_one  # type: ignore[method-assign]
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(5)
        assert calls == [["r-1", "r-2"], ["r-1"], ["r-1"], ["r-1"]]
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 2

    run_in_scene(check)


def test_completions_of_one_kind_are_flushed_in_one_call() -> None:
    class PartlyRefusingGateway(AnsweringGateway):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            result = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            outcome: Outcome = Overloaded(429, "", is_out_of_capacity=False)
            return result if request.id < "r-3" else result.copy_with(outcome=outcome)

    async def check(scene: Scene) -> None:
        calls: list[tuple[str, int]] = []

        def count_calls(method_name: str) -> None:
            original = getattr(scene.queue, method_name)

            async def call(completions: Sequence[DeadLetter]) -> Sequence[SettleStatus]:
                calls.append((method_name, len(completions)))
                result: Sequence[SettleStatus] = await original(completions)
                return result

            setattr(scene.queue, method_name, call)

        for method_name in ("settle", "release", "move_to_dead_letters"):
            count_calls(method_name)
        scene.store.add_member(b"no member", 0.0)
        await scene.submit("r-1", "r-2", "r-3", "r-4")
        await asyncio.sleep(0.5)
        assert calls[:3] == [("settle", 2), ("release", 2), ("move_to_dead_letters", 1)]
        assert len(scene.store.queue.dead) == 1

    run_in_scene(check, PartlyRefusingGateway())


def test_completions_close_together_are_flushed_in_one_call_and_a_single_one_immediately() -> None:
    class StaggeredGateway(AnsweringGateway):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            self.answer_after_s = {"r-1": 1.0, "r-2": 1.0 + FLUSH_DELAY_S / 2, "r-3": 2.0}[request.id]
            return await super().forward(request, token=token, deadline=deadline, may_send=may_send)

    async def check(scene: Scene) -> None:
        settle = scene.queue.settle
        calls: list[tuple[int, float]] = []

        async def record_settle(settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
            calls.append((len(settlements), asyncio.get_running_loop().time() - started_at))
            return await settle(settlements)

        scene.queue.settle = record_settle  # type: ignore[method-assign]
        started_at = asyncio.get_running_loop().time()
        await scene.submit("r-1", "r-2", "r-3")
        await asyncio.sleep(3)
        (together, first_s), (alone, last_s) = calls
        assert (together, alone) == (2, 1)
        assert first_s == pytest.approx(1.0 + FLUSH_DELAY_S, abs=FLUSH_DELAY_S / 4)
        assert last_s == pytest.approx(2.0, abs=FLUSH_DELAY_S / 4), (
            "no other request runs that could end soon"
        )

    run_in_scene(check, StaggeredGateway())


def test_request_returned_unsent_is_claimed_again_without_a_wake_up() -> None:
    async def check(scene: Scene) -> None:
        check_cancelled = scene.queue.check_cancelled

        async def pause_meanwhile(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            del scene.queue.check_cancelled
            scene.limiter.set_paused(True, 0.0)
            return await check_cancelled(requests)

        scene.queue.check_cancelled = pause_meanwhile  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        await scene.submit("r-1")
        await asyncio.sleep(0.01)
        assert (scene.queue.claimed_count, scene.gateway.sent) == (1, [])
        scene.limiter.set_paused(False, 0.0)
        scene.dispatcher.wake_up()
        await asyncio.sleep(0.01)
        assert (scene.queue.claimed_count, scene.gateway.sent) == (2, ["r-1"])

    run_in_scene(check)


def test_large_member_is_not_kept_after_it_was_parsed() -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 1.0
        deadline = int(time.time()) + 10**6
        for name, size in (("small", 100), ("large", LARGE_MEMBER_BYTES)):
            member = encode_member(name, b'{"prompt":"%s"}' % (b"x" * size), deadline, token="t")
            await scene.store.submit([Submission(member, float(deadline), name, "t", deadline)])
        await asyncio.sleep(0.5)
        member_sizes = {
            entry.request.id: len(entry.lease.member)
            for entry in scene.dispatcher._in_flight
            if entry.request
        }
        assert member_sizes["large"] == 0 < member_sizes["small"]
        await asyncio.sleep(1)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 2

    run_in_scene(check)


# The gateway.


def test_reading_wakes_the_loop_even_if_the_queue_does_not_answer() -> None:
    async def check(scene: Scene) -> None:
        await asyncio.sleep(0.5)

        async def hang(*_: object) -> Any:
            await asyncio.sleep(60)

        scene.queue.share_state = hang  # type: ignore[method-assign, assignment]
        now = asyncio.get_running_loop().time()
        reading = Reading(Signal.REQUESTS, now - 0.1, now - 0.1, 0.5, 0.0, 10)
        scene.dispatcher.apply_poll(Poll(completed_at=now, signals=(Signal.REQUESTS,), readings=(reading,)))
        await asyncio.sleep(0.001)
        assert scene.dispatcher.last_round_at == now

    run_in_scene(check)


def test_reading_resizes_the_connection_pool_and_is_shared() -> None:
    async def check(scene: Scene) -> None:
        sizes: list[int] = []
        scene.gateway.resize_connection_pool = sizes.append  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.5)
        now = asyncio.get_running_loop().time()
        reading = Reading(Signal.REQUESTS, now - 0.1, now - 0.1, 0.5, 0.0, 10)
        scene.dispatcher.apply_poll(Poll(completed_at=now, signals=(Signal.REQUESTS,), readings=(reading,)))
        assert sizes == [4]
        await asyncio.sleep(0.001)
        assert scene.dispatcher.last_round_at == now
        assert scene.store.pool.shared_permit is not None
        assert scene.store.pool.shared_permit.limit == 4, "the other dispatchers get the new limit"

    run_in_scene(check)


def test_unreachable_gateway_gets_one_probe_at_a_time() -> None:
    gateway = UnreachableGateway()

    async def check(scene: Scene) -> None:
        await scene.submit(*(f"r-{number}" for number in range(20)))
        await asyncio.sleep(1)
        gateway.answer_after_s = 3.0
        max_running = 0
        for _ in range(200):
            await asyncio.sleep(0.1)
            max_running = max(max_running, scene.dispatcher.running_count)
        assert max_running == 1
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        gateway.is_unreachable, gateway.answer_after_s = False, 0.1
        await asyncio.sleep(90)
        assert len(scene.store.result_lists[scene.store.default_result_list]) == 20

    run_in_scene(check, gateway)


def test_probe_whose_reply_was_lost_is_repeated_with_the_same_nonce() -> None:
    """With another nonce it would find its own first probe running, which is never sent."""

    async def check(scene: Scene) -> None:
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        sent = len(scene.gateway.sent)
        nonces = lose_replies(scene, "claim_probe", 3)
        scene.gateway.answer_after_s = 10.0
        await asyncio.sleep(9)
        assert len(nonces) == 4
        assert len(set(nonces)) == 1
        assert len(scene.gateway.sent) == sent + 1
        later_nonces = lose_replies(scene, "claim_probe", 0)
        await asyncio.sleep(10)
        assert len({*nonces, *later_nonces}) == 2, "the next probe has another nonce"

    run_in_scene(check, UnreachableGateway())


def test_no_second_probe_is_claimed_while_one_runs() -> None:
    async def check(scene: Scene) -> None:
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(0.5)
        probe_nonces: list[str] = []
        probe = scene.queue.claim_probe

        async def record_probe(nonce: str, permit: Permit) -> ClaimResult:
            probe_nonces.append(nonce)
            return await probe(nonce, permit)

        scene.queue.claim_probe = record_probe  # type: ignore[method-assign]
        scene.gateway.answer_after_s = 25.0
        await asyncio.sleep(20)
        assert (len(probe_nonces), scene.dispatcher.running_count) == (1, 1)

    run_in_scene(check, UnreachableGateway())


# Turns, settings, drain.


class CountingDispatcher(Dispatcher):
    """Dispatcher that counts its turns."""

    turn_count = 0

    @property
    def last_round_at(self) -> float:
        return 0.0

    @last_round_at.setter
    def last_round_at(self, _at: float) -> None:
        self.turn_count += 1


def test_one_turn_flushes_completions_and_claims_the_next_requests() -> None:
    async def main() -> None:
        store, gateway = MemoryStore(clock=asyncio.get_running_loop().time), AnsweringGateway()
        gateway.answer_after_s = 0.25
        queue, journal = MemoryQueue(store, "a"), Journal(Metrics())
        dispatcher = CountingDispatcher(queue, gateway, open_limiter(), Options(RetryPolicy()), journal)
        task = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(0.5)
        for number in range(100):
            store.add_member(member(f"r-{number:03d}"), float(number))
        await asyncio.sleep(1.0)
        turns_before, sent_before = dispatcher.turn_count, len(gateway.sent)
        await asyncio.sleep(1.0)
        assert len(gateway.sent) - sent_before == 36
        assert dispatcher.turn_count - turns_before <= 10, (
            "four flushes of nine completions, and five other turns"
        )
        dispatcher.drain(1.0)
        await task

    run_in_virtual_time(main(), start=2.0)


def test_loop_turns_each_second_without_work() -> None:
    async def check(scene: Scene) -> None:
        for _ in range(30):
            await asyncio.sleep(1.0)
            assert asyncio.get_running_loop().time() - scene.dispatcher.last_round_at <= 1.0

    run_in_scene(check)


def test_observer_claims_nothing_despite_room_and_work() -> None:
    async def check(scene: Scene) -> None:
        await scene.submit("r-1")
        await asyncio.sleep(30)
        assert (scene.queue.claimed_count, scene.gateway.sent) == (0, [])
        assert scene.dispatcher.get_allowance().reason is Reason.OPEN
        assert scene.dispatcher.view.counts is not None
        assert scene.dispatcher.view.counts.pending == 1

    run_in_scene(check, options=Options(RetryPolicy(), observe=True))


def test_new_settings_apply_to_all_parts_and_a_new_address_is_unverified() -> None:
    async def check(scene: Scene) -> None:
        dispatcher = scene.dispatcher
        verified = dispatcher._judge._gateway_record = GatewayRecord(is_verified=True)
        changed = Options(RetryPolicy(max_attempts=2))
        dispatcher.reconfigure(changed)
        assert dispatcher._judge._gateway_record is verified
        assert dispatcher.context.options is changed
        dispatcher.reconfigure(replace(changed, gateway_url="http://elsewhere"))
        assert dispatcher._judge._gateway_record == GatewayRecord()

    run_in_scene(check)


@pytest.mark.parametrize(("within_s", "results"), [(30.0, 1), (2.0, 0)])
def test_drain_waits_for_running_requests_and_returns_those_that_take_too_long(
    within_s: float, results: int
) -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 10.0
        await scene.submit("r-1")
        await asyncio.sleep(1)
        started_at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(within_s)
        await scene.submit("r-2")
        await scene.wait_until_finished()
        assert asyncio.get_running_loop().time() - started_at == pytest.approx(min(within_s, 9.0), abs=0.2)
        assert scene.gateway.sent == ["r-1"], "no new request is sent"
        assert len(scene.store.result_lists.get(scene.store.default_result_list, ())) == results
        counts = scene.store.queue.count_requests()
        assert (counts.pending, counts.leased) == (2 - results, 0)

    run_in_scene(check)


def test_second_drain_with_less_time_ends_sooner() -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 100.0
        await scene.submit("r-1")
        await asyncio.sleep(1)
        started_at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(60.0)
        await asyncio.sleep(1)
        scene.dispatcher.drain(0.0)
        scene.dispatcher.drain(60.0)
        await scene.wait_until_finished()
        assert asyncio.get_running_loop().time() - started_at < 1.5

    run_in_scene(check)


def test_drain_without_a_queue_ends_and_logs_the_leases_left_behind() -> None:
    async def check(scene: Scene) -> None:
        scene.gateway.answer_after_s = 1.0
        await scene.submit("r-1")
        await asyncio.sleep(0.5)
        scene.store.outage_message = "Redis refuses connections"
        started_at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(5.0)
        await scene.wait_until_finished()
        assert asyncio.get_running_loop().time() - started_at == pytest.approx(15.0, abs=1.1)
        assert [fields for event, fields in scene.events if event is Event.LEASES_LEFT_BEHIND] == [
            {"leases": 1}
        ]

    run_in_scene(check)


def test_permit_of_a_claim_has_the_current_limit() -> None:
    async def check(scene: Scene) -> None:
        permits: list[Permit] = []
        claim = scene.queue.claim

        async def record_claim(max_count: int, nonce: str, permit: Permit, **options: int) -> ClaimResult:
            permits.append(permit)
            return await claim(max_count, nonce, permit, **options)

        scene.queue.claim = record_claim  # type: ignore[method-assign]
        await scene.submit("r-1")
        await asyncio.sleep(0.1)
        assert {(permit.limit, permit.read_at, permit.lost_units) for permit in permits} == {(9, 1.0, 0)}

    run_in_scene(check)
