"""Ends of requests other than an answer: dead-letter set, passed deadline, and requeueing."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from dispatcher.queue.contract import DeadLetter, Lease, Release, Settlement, SettleStatus, UnleasedRequest
from dispatcher.requests.found_request import RequestLocation
from dispatcher.requests.oversize import cut_member
from dispatcher.requests.request import Rejection, parse_member
from dispatcher.requests.result import decode_result
from tests.conformance.worlds import NOW, World, answer, claim, member, permit
from tests.support import wait_until

UNLEASED = Lease(0, "", b"", 0, 0, 0, 0, 0)
BAND = 10**11


def make_dead_letter(expired: UnleasedRequest) -> tuple[UnleasedRequest, Settlement]:
    return expired, Settlement(UNLEASED, b'{"id":"gone"}', "")


async def find_all_overdue(world: World, expected: set[bytes]) -> set[bytes]:
    """Return what repeated calls find until everything expected was found."""
    owner = world.owner()
    found: set[bytes] = set()

    async def enough() -> bool:
        found.update(one.member for one in await owner.find_overdue(4))
        return found >= expected

    await wait_until(enough)
    for _ in range(10):
        await enough()
    return found


@pytest.mark.server
async def test_dead_request_keeps_its_reason_and_its_result_is_written(world: World) -> None:
    await world.zadd(NOW + 5, member("r-1"))
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.release([Release(lease, is_failed_attempt=True, is_refusal=True)])
    [lease] = await claim(owner)
    dead_letter = DeadLetter(answer(lease, b'{"id":"r-1"}'), "8 tries failed: 500")
    assert await owner.move_to_dead_letters([dead_letter]) == [SettleStatus.DONE]
    assert await owner.move_to_dead_letters([dead_letter]) == [SettleStatus.LOST]
    assert await world.pop_results() == [b'{"id":"r-1"}']
    [dead] = await world.queue_admin.list_dead(10)
    assert (dead.entry_id, dead.member, dead.score) == (lease.entry_id, member("r-1"), NOW + 5)
    assert dead.reason == "8 tries failed: 500"
    assert dead.died_at == pytest.approx(owner.unix_now(), abs=30)
    assert (dead.deliveries, dead.failed_attempts, dead.refusals, dead.deaths_as_suspect) == (2, 1, 1, 0)
    [found] = (await world.queue_admin.list_requests(RequestLocation.DEAD, 10)).requests
    assert found.attempts == 1
    counts = await owner.count_requests()
    assert (counts.pending, counts.leased, counts.delayed, counts.dead) == (0, 0, 0, 1)


@pytest.mark.server
async def test_dead_letter_after_a_failed_attempt_counts_the_attempt(world: World) -> None:
    await world.zadd(NOW + 5, member("r-1"))
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.release([Release(lease, is_failed_attempt=True)])
    [lease] = await claim(owner)
    await owner.move_to_dead_letters(
        [DeadLetter(answer(lease), "the gateway answered 500", is_failed_attempt=True)]
    )
    [dead] = await world.queue_admin.list_dead(10)
    assert dead.failed_attempts == 2
    [found] = (await world.queue_admin.list_requests(RequestLocation.DEAD, 10)).requests
    assert found.attempts == 2


@pytest.mark.server
async def test_request_without_a_readable_id_becomes_dead_without_a_result(world: World) -> None:
    await world.zadd(1, b"\xffrubbish")
    owner = world.owner()
    [lease] = await claim(owner)
    assert await owner.move_to_dead_letters([DeadLetter(answer(lease, b""), "not JSON")]) == [
        SettleStatus.DONE
    ]
    assert await world.pop_results() == []
    [dead] = await world.queue_admin.list_dead(10)
    assert dead.member == b"\xffrubbish"


@pytest.mark.server
async def test_member_that_is_too_long_is_leased_cut_to_its_beginning(world: World) -> None:
    """The search for overdue requests skips it as well."""
    too_long = member("r-1", deadline=NOW - 5, payload={"prompt": "x" * (17 << 20)})
    await world.zadd(NOW - 5, too_long)
    await world.zadd(NOW + 360_000, member("r-2"))
    owner = world.owner()
    assert not [found for _ in range(3) for found in await owner.find_overdue(4)]
    [first], [second] = await claim(owner), await claim(owner)
    assert first.member == cut_member(too_long)
    assert second.member == member("r-2")
    assert await owner.release([Release(first)]) == [SettleStatus.DONE]
    [again] = await claim(owner)
    assert again.member == cut_member(too_long)
    reply = parse_member(again.member)
    assert isinstance(reply, Rejection)
    assert (reply.id, reply.code) == ("r-1", "TOO_LARGE")


@pytest.mark.server
async def test_dead_requests_are_listed_page_by_page(world: World) -> None:
    for number in range(5):
        await world.zadd(number, member(f"r-{number}"))
    owner = world.owner()
    leases = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease, b""), "why") for lease in leases])
    first = await world.queue_admin.list_dead(3)
    second = await world.queue_admin.list_dead(3, after=first[-1].entry_id)
    assert [dead.entry_id for dead in [*first, *second]] == [lease.entry_id for lease in leases]
    assert await world.queue_admin.list_dead(3, after=second[-1].entry_id) == []


@pytest.mark.server
async def test_newest_dead_requests_are_listed_first(world: World) -> None:
    assert await world.queue_admin.list_newest_dead(3) == []
    for number in range(5):
        await world.zadd(number, member(f"r-{number}"))
    owner = world.owner()
    leases = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease, b""), "why") for lease in leases])
    assert [dead.entry_id for dead in await world.queue_admin.list_newest_dead(3)] == [
        lease.entry_id for lease in reversed(leases[-3:])
    ]
    assert len(await world.queue_admin.list_newest_dead(9)) == 5


@pytest.mark.server
async def test_requeued_request_is_a_new_request_with_a_new_deadline_and_the_old_priority(
    world: World,
) -> None:
    await world.zadd(3 * BAND + NOW - 5, member("r-1", deadline=NOW - 5, payload={"a": [1.5]}, x="y"))
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease, b'{"id":"r-1"}'), "why")])
    assert await world.queue_admin.requeue_dead([lease.entry_id, 4711], NOW + 50_000) == 1
    assert (await owner.count_requests()).dead == 0
    [again] = await claim(owner)
    assert again.score == 3 * BAND + NOW + 50_000
    data = json.loads(again.member)["data"]
    assert (data["id"], data["deadline"], data["payload"]) == ("r-1", NOW + 50_000, {"a": [1.5]})
    assert (again.deliveries, again.failed_attempts, again.deaths_as_suspect) == (1, 0, 0)
    assert again.entry_id != lease.entry_id


@pytest.mark.server
async def test_dead_request_that_two_operators_requeue_at_once_is_requeued_once(world: World) -> None:
    await world.zadd(NOW - 5, member("r-1"))
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    requeues = [world.queue_admin.requeue_dead([lease.entry_id], NOW + 50_000) for _ in range(2)]
    assert sorted(await asyncio.gather(*requeues)) == [0, 1]
    counts = await owner.count_requests()
    assert (counts.pending, counts.dead) == (1, 0)


@pytest.mark.server
async def test_unreadable_dead_request_cannot_be_requeued(world: World) -> None:
    await world.zadd(1, b"rubbish")
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease, b""), "not JSON")])
    assert await world.queue_admin.requeue_dead([lease.entry_id], NOW + 50_000) == 0
    assert (await owner.count_requests()).dead == 1


@pytest.mark.server
async def test_purged_dead_requests_are_deleted(world: World) -> None:
    for number in range(4):
        await world.zadd(number, member(f"r-{number}"))
    owner = world.owner()
    leases = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease, b""), "why") for lease in leases])
    assert await world.queue_admin.purge_dead([leases[1].entry_id, 4711]) == 1
    assert [dead.entry_id for dead in await world.queue_admin.list_dead(9)] == [
        leases[n].entry_id for n in (0, 2, 3)
    ]
    assert await world.queue_admin.purge_dead() == 3
    assert (await owner.count_requests()).dead == 0


async def test_overdue_requests_are_found_in_every_priority_and_location(world: World) -> None:
    owner = world.owner()
    past, future = NOW - 10, int(time.time()) + 1000
    for name in (b"returned", b"delayed", b"leased"):
        await world.zadd(past - 5, name)
    leases = {lease.member: lease for lease in await claim(owner)}
    await owner.release([Release(leases[b"returned"]), Release(leases[b"delayed"], delay_s=500)])
    for priority in (0, 3, 9):
        await world.zadd(priority * BAND + past, b"past %d" % priority)
        await world.zadd(priority * BAND + future, b"future %d" % priority)
    expected = {b"returned", b"delayed", b"past 0", b"past 3", b"past 9"}
    assert await find_all_overdue(world, expected) == expected


async def test_overdue_request_has_the_outcome_of_its_last_attempt(world: World) -> None:
    owner = world.owner()
    for number, name in enumerate((b"returned", b"delayed", b"untried", b"heavy", b"uncounted")):
        await world.zadd(NOW - 10 + number, name)
    leases = {lease.member: lease for lease in await claim(owner)}
    await owner.set_lease_units([(leases[b"heavy"], 3)], permit(100))
    await owner.release(
        [
            Release(leases[b"returned"], is_refusal=True, last_attempt="refused"),
            Release(leases[b"delayed"], delay_s=500, is_failed_attempt=True, last_attempt="reset"),
            Release(leases[b"untried"]),
            Release(leases[b"heavy"], last_attempt="no room"),
            Release(leases[b"uncounted"], delay_s=500, is_undelivered=True, last_attempt="no connection"),
        ]
    )
    await world.zadd(NOW - 5, b"never claimed")
    reply: dict[bytes, tuple[str, int, int]] = {}

    async def found() -> bool:
        over = await owner.find_overdue(10)
        reply.update({one.member: (one.last_attempt, one.failed_attempts, one.refusals) for one in over})
        return len(reply) == 6

    await wait_until(found)
    assert reply == {
        b"returned": ("refused", 0, 1),
        b"delayed": ("reset", 1, 0),
        b"untried": ("", 0, 0),
        b"heavy": ("no room", 0, 0),
        b"uncounted": ("no connection", 0, 0),
        b"never claimed": ("", 0, 0),
    }


async def test_overdue_suspects_are_found(world: World) -> None:
    owner = world.owner()
    await world.zadd(NOW - 5, b"suspect")
    for _ in range(2):
        await world.lose_leases(owner, *await claim(owner))
    assert await find_all_overdue(world, {b"suspect"}) == {b"suspect"}


async def test_overdue_request_gets_its_result_once(world: World) -> None:
    owner = world.owner()
    for number in range(3):
        await world.zadd(NOW - 10 + number, member(f"r-{number}"))
    found = await owner.find_overdue(10)
    assert len(found) == 3
    ends = [make_dead_letter(one) for one in found]
    assert await owner.settle_unleased([*ends, ends[0]]) == 3
    assert len(await world.pop_results()) == 3
    assert await owner.settle_unleased(ends) == 0
    assert await world.pop_results() == []
    assert (await owner.count_requests()).pending == 0


@pytest.mark.parametrize("moved", ["claimed", "claimed and returned", "settled"])
async def test_request_that_moved_after_it_was_found_is_not_settled(world: World, moved: str) -> None:
    owner = world.owner()
    await world.zadd(NOW - 10, member())
    [lease] = await claim(owner)
    await owner.release([Release(lease)])
    [found] = await owner.find_overdue(10)
    [lease] = await claim(owner)
    if moved == "claimed and returned":
        await owner.release([Release(lease)])
    elif moved == "settled":
        await owner.settle([answer(lease, b"answered")])
    assert await owner.settle_unleased([make_dead_letter(found)]) == 0
    assert await world.pop_results() == ([b"answered"] if moved == "settled" else [])


async def test_scores_without_a_deadline_do_not_hide_overdue_requests(world: World) -> None:
    owner = world.owner()
    for number in range(30):
        await world.zadd(number, b"score is a rank %02d" % number)
    await world.zadd(NOW - 1, b"really expired")

    async def found() -> bool:
        return b"really expired" in {one.member for one in await owner.find_overdue(7)}

    await wait_until(found)


async def test_result_of_an_overdue_request_goes_to_the_list_that_it_names(world: World) -> None:
    owner = world.owner()
    await world.zadd(NOW - 10, member("r-1"))
    await world.zadd(NOW - 9, member("r-2"))
    first, second = await owner.find_overdue(10)
    done = await owner.settle_unleased(
        [
            (first, Settlement(UNLEASED, b"mine", "a:{qwen}:list")),
            (second, Settlement(UNLEASED, b'{"id":"r-2"}', "batch:{qwen}:requests", "r-2")),
        ]
    )
    assert done == 2
    assert await world.pop_results("a:{qwen}:list") == [b"mine"]
    [result] = await world.pop_results()
    assert (decode_result(result).id, decode_result(result).error_code) == ("r-2", "INVALID_REQUEST")
