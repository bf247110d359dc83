"""Lookups of single requests: each is found at its location, whoever wrote it, and nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dispatcher.features.models.queue import waiting
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.sequences import turns
from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.turns import Turn
from dispatcher.queue.admin_contract import QueueAdmin
from dispatcher.queue.contract import DeadLetter, Release
from dispatcher.requests.found_request import FoundRequest, LookupPage, RequestLocation, encode_spellings
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.conformance.worlds import NOW, RESULTS, World, answer, claim, member, permit, sequences

pytestmark = pytest.mark.server
W = RequestLocation
LATER = NOW + 360_000


async def read_all_pages(read_page: object) -> Sequence[FoundRequest]:
    """Return the requests of all pages of a lookup."""
    found: list[FoundRequest] = []
    after = ""
    while True:
        page: LookupPage = await read_page(after)  # type: ignore[operator]
        found += page.requests
        if not page.after:
            return found
        after = page.after


async def search_all(desk: QueueAdmin, *words: str, entries_only: bool = False) -> list[FoundRequest]:
    spelt = [encode_spellings(word) for word in words]
    found = await read_all_pages(lambda after: desk.search_requests(spelt, after, entries_only=entries_only))
    return sorted(found, key=lambda each: (each.score, each.member, each.entry))


async def list_ids(world: World, state: str) -> list[FoundRequest]:
    return list(await read_all_pages(lambda after: world.queue_admin.list_requests(state, 2, after)))


async def find_near(world: World, request_id: str) -> list[FoundRequest]:
    return list(await read_all_pages(lambda after: world.queue_admin.find_by_id(request_id, after)))


def submission(request_id: str, score: float = LATER) -> Submission:
    token = f"token-of-{request_id}"
    made = encode_member(request_id, b'{"prompt": "hi"}', LATER, token=token)
    return Submission(made, score, request_id, token, LATER)


async def submit_to_every_location(world: World) -> dict[str, str]:
    """Submit one request to each location. Return their ids by location."""
    owner = world.owner("owner-1")
    names: dict[str, str] = {state: f"is-{state}" for state in (*W, turns.LANE, waiting.LANE)}
    order = (
        *(W.SUSPECT, W.DEAD, W.DELAYED, W.RETURNED, W.LEASED, turns.LANE),
        *(waiting.LANE, W.STARTED),
    )
    for at, state in enumerate(order):
        await world.queue_admin.submit([submission(names[state], NOW + 100_000 + at)])
    for _ in range(2):
        (suspect,) = await claim(owner, 1)
        await world.lose_leases(owner, suspect)
    suspect, dead, delayed, returned, leased, second, awaiting, started = await claim(owner)
    await sequences(owner).claim_turns([(leased, Turn("s")), (second, Turn("s"))], SequenceTerms())
    await owner.move_to_dead_letters([DeadLetter(answer(dead), "it broke")])
    await owner.set_lease_units([(delayed, 3)], permit())
    await owner.release([Release(suspect), Release(delayed, 100.0, is_failed_attempt=True, is_refusal=True)])
    await owner.release([Release(returned), Release(awaiting, extra=ModelWait("absent"))])
    await owner.release([Release(started, progress=b"part 1")])
    await world.queue_admin.submit([submission(names[W.PENDING])])
    return names


@pytest.mark.features
async def test_each_request_is_listed_at_its_location_with_its_state(world: World) -> None:
    names = await submit_to_every_location(world)
    for state, name in names.items():
        (found,) = set(await search_all(world.queue_admin, name))
        assert (found.location, name.encode() in found.member) == (state, True)
        assert [each.location for each in await list_ids(world, state)] == [state]
    (suspect,) = await list_ids(world, W.SUSPECT)
    (delayed,) = await list_ids(world, W.DELAYED)
    (leased,) = await list_ids(world, W.LEASED)
    (dead,) = await list_ids(world, W.DEAD)
    (pending,) = await list_ids(world, W.PENDING)
    (awaiting,) = await list_ids(world, waiting.LANE)
    assert (awaiting.missing_model, suspect.missing_model) == ("absent", "")
    assert (suspect.deaths, leased.owner, dead.reason, pending.entry) == (2, "owner-1", "it broke", 0)
    assert (delayed.attempts, delayed.refusals, delayed.units) == (1, 1, 3)
    now = world.owner("other").unix_now()
    assert delayed.at == pytest.approx(now + 100, abs=30)
    assert leased.at == pytest.approx(now + 30, abs=30)
    assert dead.at == pytest.approx(now, abs=30)
    assert min(each.entry for each in (suspect, delayed, leased, dead)) > 0


@pytest.mark.features
async def test_requests_of_our_client_and_leased_requests_are_found_by_id(world: World) -> None:
    await submit_to_every_location(world)
    await world.queue_admin.submit([submission("mine", 3 * 10**11 + LATER)])
    assert [each.location for each in await find_near(world, "mine")] == [W.PENDING]
    await world.zadd(5, member("theirs"))
    (theirs,) = await claim(world.owner(), 1, started=0)
    assert theirs.score == 5
    assert [(each.entry, each.location) for each in await find_near(world, "theirs")] == [
        (theirs.entry_id, W.LEASED)
    ]
    assert await find_near(world, "nobody") == []


async def test_search_returns_only_requests_that_contain_every_term(world: World) -> None:
    await world.zadd(1, member("a", metadata={"x": "1"}))
    await world.zadd(2, member("b", metadata={"x": "1"}))
    (found,) = await search_all(world.queue_admin, "x", "b")
    assert b'"b"' in found.member
    assert await search_all(world.queue_admin, "x", "none") == []
    assert len(await search_all(world.queue_admin)) == 2
    await claim(world.owner(), 1)
    assert [each.location for each in await search_all(world.queue_admin, entries_only=True)] == [W.LEASED]


@pytest.mark.parametrize("name", ["grün", "a<b>&c", "a/b", 'say "hi"', "back\\slash", "line\nend"])
async def test_id_is_found_in_every_json_spelling(world: World, name: str) -> None:
    ours = encode_member(name, b"{}", LATER)
    go = ours.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    slashed = ours.replace(b"/", b"\\/")
    members = {ours, member(name), go, slashed}
    for at, each in enumerate(members):
        await world.zadd(at, each)
    assert {each.member for each in await search_all(world.queue_admin, name)} == members


async def test_pages_contain_each_request_once_and_in_order(world: World) -> None:
    await world.queue_admin.submit([submission(f"r-{at:03}", NOW + at) for at in range(700)])
    found = await read_all_pages(lambda after: world.queue_admin.list_requests(W.PENDING, 300, after))
    assert [each.score for each in found] == [NOW + at for at in range(700)]
    walked = await search_all(world.queue_admin)
    assert {each.member for each in walked} == {each.member for each in found}


async def test_count_ahead_is_the_number_of_requests_before_one(world: World) -> None:
    owner = world.owner()
    await world.queue_admin.submit([submission(f"r-{at}", NOW + at) for at in range(5)])
    leases = await claim(owner, 2)
    await owner.release([Release(leases[1])])
    for place, name in enumerate(["r-1", "r-2", "r-3", "r-4"]):
        (found,) = set(await search_all(world.queue_admin, name))
        assert await world.queue_admin.count_ahead(found) == place
    (leased,) = await list_ids(world, W.LEASED)
    (returned,) = await list_ids(world, W.RETURNED)
    assert await world.queue_admin.count_ahead(leased) is None
    await claim(owner, 1)
    assert await world.queue_admin.count_ahead(returned) is None


async def test_results_are_read_oldest_first_and_taken_one_by_one(world: World) -> None:
    owner = world.owner()
    for at in range(5):
        await world.zadd(at, member(f"r-{at}"))
        (lease,) = await claim(owner, 1)
        await owner.settle([answer(lease, b"result %d" % at)])
    assert await world.queue_admin.read_results(RESULTS, 3) == [b"result 0", b"result 1", b"result 2"]
    assert await world.queue_admin.read_results(RESULTS, 9, 3) == [b"result 3", b"result 4"]
    assert await world.queue_admin.take_result(RESULTS, b"result 1")
    assert not await world.queue_admin.take_result(RESULTS, b"result 1")
    assert await world.pop_results() == [b"result 0", b"result 2", b"result 3", b"result 4"]
    assert await world.queue_admin.read_results(RESULTS, 9) == []
    assert await world.queue_admin.read_results("batch-results:nobody", 9) == []
    await world.set_key("batch-results:no-list", "x")
    assert await world.queue_admin.read_results("batch-results:no-list", 9) == []


@pytest.mark.features
async def test_restored_request_keeps_its_location_and_is_restored_once(world: World) -> None:
    names = await submit_to_every_location(world)
    (second,) = await list_ids(world, turns.LANE)
    anew = (W.LEASED, turns.LANE, waiting.LANE, W.STARTED)
    before = {state: await list_ids(world, state) for state in W if state not in anew}
    found = [one for each in before.values() for one in each]
    far = world.open_other_queue("batch:{qwen}:other")
    assert await far.queue_admin.restore_requests("there", found) == 5
    assert await far.queue_admin.restore_requests("there", found) == 0
    for state, (one,) in before.items():
        (copied,) = await list_ids(far, state)
        assert (copied.member, copied.score) == (one.member, one.score)
        assert (copied.attempts, copied.refusals, copied.deaths) == (one.attempts, one.refusals, one.deaths)
        assert (copied.deliveries, copied.units, copied.reason) == (one.deliveries, one.units, one.reason)
        assert (copied.at or 0) == pytest.approx(one.at or 0, abs=0.001)
    counts = await far.queue_admin.count_requests()
    assert (counts.pending, counts.delayed, counts.dead) == (3, 1, 1)
    assert await far.queue_admin.cancel_request(names[W.PENDING])
    assert not await far.queue_admin.cancel_request(names[W.DEAD])
    leases = await claim(far.owner("owner-2"))
    assert {lease.member for lease in leases} == {
        one.member for state in (W.PENDING, W.RETURNED, W.SUSPECT) for one in before[state]
    }
    await far.owner("owner-2").settle([answer(lease) for lease in leases])
    assert await far.queue_admin.restore_requests("there", found) == 0, (
        "although they have ended in this queue"
    )
    assert await far.queue_admin.restore_requests("there", [second]) == 1
    (copied,) = await list_ids(far, W.RETURNED)
    assert copied.member == second.member, "it claims a new turn, because its sequence was not copied"
