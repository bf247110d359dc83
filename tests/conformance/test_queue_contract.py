"""Queue contract: what a producer or consumer without our client can rely on."""

from __future__ import annotations

import json

import pytest

from dispatcher.queue.contract import DeadLetter, Release, SettleStatus
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import QueueFullError, QueueUnavailableError, Submission
from tests.conformance.worlds import NOW, QUEUE, RESULTS, World, answer, claim, claim_fully, member

NASTY = {
    "64-bit integers": b'{"n":9007199254740993,"m":-9223372036854775808,"u":18446744073709551615}',
    "numbers as written": b'{"a":1.0,"b":1e2,"c":-0.0,"d":1E+400,"e":0.1000000000000000055}',
    "key order and repeated keys": b'{"z":1,"a":2,"z":3}',
    "white space": b'{ "a" :\t[ 1 ,\r\n 2 ] }',
    "escapes": rb'{"a":"\u0041\/\b\f\n\r\t\"\\ \ud83d\ude00 \ud800"}',
    "UTF-8": '{"a":"žluťoučký 😀 \u2028\ufeff"}'.encode(),
    "control and NUL escapes": rb'{"a":"\u0000\u001f\u007f"}',
    "looks like a script": b'{"a":"\'); redis.call(\'FLUSHALL\') --","b":"%d %s ${x} {0}"}',
    "looks like the protocol": b'{"a":"*1\\r\\n$8\\r\\nFLUSHALL\\r\\n"}',
    "deep": b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
    "empty": b"{}",
    "large": b'{"a":"' + b"x" * 700_000 + b'"}',
}


@pytest.mark.parametrize("payload", NASTY.values(), ids=NASTY)
async def test_payload_is_claimed_byte_for_byte(world: World, payload: bytes) -> None:
    raw = b'{"request_kind":"redis","data":{"id":"r-1","deadline":%d,"payload":%s}}' % (NOW + 60, payload)
    await world.zadd(NOW + 60, raw)
    [lease] = await claim(world.owner())
    assert lease.member == raw
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    assert request.payload == payload


@pytest.mark.parametrize("rubbish", [b"", b"\x00", b"\xff\xfe\x00\x80", b"not json", b"\r\n", b"%s%n"])
async def test_members_that_are_not_requests_are_claimed_unchanged(world: World, rubbish: bytes) -> None:
    await world.zadd(1, rubbish)
    [lease] = await claim(world.owner())
    assert (lease.member, lease.score) == (rubbish, 1.0)


async def test_first_claim_returns_a_request_without_history(world: World) -> None:
    await world.zadd(NOW + 0.25, member())
    [lease] = await claim(world.owner())
    assert lease.score == NOW + 0.25
    counted = (lease.deliveries, lease.failed_attempts, lease.refusals, lease.deaths_as_suspect)
    assert counted == (1, 0, 0, 0)


async def test_results_are_popped_from_the_default_list_in_order_of_completion(world: World) -> None:
    for number in range(3):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    await owner.settle([answer(leases[1], b"second")])
    await owner.settle([answer(leases[0], b"first"), answer(leases[2], b"third")])
    assert await world.pop_results() == [b"second", b"first", b"third"]


async def test_result_is_pushed_to_the_list_that_the_request_names(world: World) -> None:
    for number in range(4):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    names = ["tenant:{qwen}:a", "", "tenant:{qwen}:b", "tenant:{qwen}:a"]
    decisions = await owner.settle(
        [answer(lease, results=name) for lease, name in zip(leases, names, strict=True)]
    )
    assert decisions == [SettleStatus.DONE] * 4
    assert await world.pop_results("tenant:{qwen}:a") == [answer(leases[0]).result, answer(leases[3]).result]
    assert await world.pop_results("tenant:{qwen}:b") == [answer(leases[2]).result]
    assert await world.pop_results() == [answer(leases[1]).result]


async def test_result_can_have_any_bytes(world: World) -> None:
    await world.zadd(1, member())
    [lease] = await claim(owner := world.owner())
    result = bytes(range(256)) + b"x" * 500_000
    await owner.settle([answer(lease, result)])
    assert await world.pop_results() == [result]


@pytest.mark.parametrize(
    "name",
    [
        *(QUEUE, "batch:{qwen}:requests:leases", "batch:{qwen}:requests:anything", "a:{qwen}:string"),
        *("celery", "batch:{other}:results", "batch:{other}:requests", "batch:{other}:requests:paused"),
    ],
)
async def test_unusable_result_list_affects_only_its_own_request(world: World, name: str) -> None:
    await world.set_key("a:{qwen}:string", "not a list")
    for number in range(3):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    decisions = await owner.settle(
        [
            answer(leases[0], b'{"id":"r-0"}'),
            answer(leases[1], b'{"id":"r-1"}', name, request_id="r-1"),
            answer(leases[2], b'{"id":"r-2"}'),
        ]
    )
    assert decisions == [SettleStatus.DONE, SettleStatus.BAD_LIST, SettleStatus.DONE]
    results = {
        (result := json.loads(raw))["id"]: result.get("error_code") for raw in await world.pop_results()
    }
    assert results == {"r-0": None, "r-1": "INVALID_REQUEST", "r-2": None}
    assert list(await owner.find_invalid_result_lists([name, "a:{qwen}:new"])) == [name], (
        "known before it is sent"
    )
    counts = await owner.count_requests()
    assert (counts.pending, counts.leased) == (0, 0)


async def test_results_stay_leased_while_the_default_list_is_unusable(world: World) -> None:
    await world.set_key(RESULTS, "not a list")
    for number in range(3):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    ends = [answer(leases[0], results="a:{qwen}:list"), answer(leases[1]), answer(leases[2])]
    assert list(await owner.settle(ends)) == [SettleStatus.DONE, None, None]
    with pytest.raises(QueueUnavailableError, match="results cannot be delivered"):
        await owner.settle(ends[1:])
    assert await world.pop_results("a:{qwen}:list") == [ends[0].result]
    assert (await owner.count_requests()).leased == 2
    await world.delete_key(RESULTS)
    assert list(await owner.settle(ends)) == [SettleStatus.LOST, SettleStatus.DONE, SettleStatus.DONE]
    assert await world.pop_results() == [ends[1].result, ends[2].result]


async def test_dead_letter_with_an_unusable_list_is_still_dead(world: World) -> None:
    await world.zadd(1, member("r-7"))
    [lease] = await claim(owner := world.owner())
    dead_letter = DeadLetter(answer(lease, results=QUEUE, request_id="r-7"), "too often")
    assert await owner.move_to_dead_letters([dead_letter]) == [SettleStatus.BAD_LIST]
    [result] = await world.pop_results()
    assert (decode_result(result).id, decode_result(result).error_code) == ("r-7", "INVALID_REQUEST")
    assert (await owner.count_requests()).dead == 1


def submit_request(request_id: str, token: str, until: int = NOW + 60) -> Submission:
    return Submission(member(request_id, token=token), until, request_id, token, until)


async def test_submitted_request_is_active_until_it_is_finished(world: World) -> None:
    assert await world.queue_admin.submit([submit_request("r-1", "t1")]) == 1
    [lease] = await claim(owner := world.owner())
    assert await world.queue_admin.cancel_request("r-1", "t1")
    await owner.settle([answer(lease, request_id="r-1", request_token="t1")])
    assert await owner.check_cancelled([("r-1", "t1")]) == [False], "its marker was deleted with it"
    assert not await world.queue_admin.cancel_request("r-1", "t1")
    assert not await world.queue_admin.cancel_request("r-1")


async def test_two_requests_with_one_id_are_cancelled_by_their_own_tokens(world: World) -> None:
    """If two tenants use one id, neither can cancel the request of the other, nor revoke its cancel."""
    await world.queue_admin.submit([submit_request("r-1", "alice")])
    assert await world.queue_admin.cancel_request("r-1", "alice")
    await world.queue_admin.submit([submit_request("r-1", "bob", NOW + 90)])
    owner, asked = world.owner(), [("r-1", "alice"), ("r-1", "bob")]
    assert await owner.check_cancelled(asked) == [True, False]
    assert not await world.queue_admin.cancel_request("r-1", "mallory")
    assert await owner.check_cancelled(asked) == [True, False]
    alices, _ = await claim(owner)
    await owner.settle([answer(alices, request_id="r-1", request_token="alice")])
    assert not await world.queue_admin.cancel_request("r-1", "alice")
    assert await world.queue_admin.cancel_request("r-1"), "an id without a token means all of them"
    assert await owner.check_cancelled(asked) == [False, True]


@pytest.mark.server
async def test_marker_of_llm_d_cancels_only_the_request_with_its_token(world: World) -> None:
    """The marker is named by the id for all queues, so a cancel here must not cancel a request of another
    queue."""
    await world.set_key("request-active:r-1", "theirs")
    await world.set_key("request-cancel:r-1", "another's")
    await world.queue_admin.submit([submit_request("r-1", "ours")])
    assert await world.queue_admin.cancel_request("r-1", "theirs")
    owner = world.owner()
    asked = [("r-1", "theirs"), ("r-1", "ours"), ("r-1", "another's")]
    assert await owner.check_cancelled(asked) == [True, False, True]
    assert await world.get_key("request-cancel:r-1") == "another's"
    assert await world.get_key("request-active:r-1") == "theirs"


@pytest.mark.server
async def test_finished_request_does_not_affect_a_newer_one_with_its_id(world: World) -> None:
    await world.zadd(1, member("r-1", token="old"))
    [lease] = await claim(owner := world.owner())
    await world.set_key("request-active:r-1", "new")
    await world.set_key("request-cancel:r-1", "new")
    await owner.settle([answer(lease, request_id="r-1", request_token="old")])
    assert await world.get_key("request-active:r-1") == "new"
    assert await owner.check_cancelled([("r-1", "new"), ("r-1", "old")]) == [True, False]


async def test_identical_pending_member_is_the_same_request(world: World) -> None:
    submission = Submission(member(), NOW + 60)
    assert await world.queue_admin.submit([submission, submission]) == 1
    assert await world.queue_admin.submit([submission]) == 0
    assert len(await claim(world.owner())) == 1


async def test_identical_member_submitted_while_the_first_one_runs_is_another_request(world: World) -> None:
    owner = world.owner()
    await world.zadd(5, member())
    [first] = await claim(owner)
    await world.zadd(5, member())
    [second] = await claim(owner)
    assert first.entry_id != second.entry_id
    assert await owner.settle([answer(first), answer(second)]) == [SettleStatus.DONE] * 2
    assert len(await world.pop_results()) == 2


@pytest.mark.server
async def test_any_program_can_cancel_by_a_marker(world: World) -> None:
    await world.zadd(1, member("r-1", token="t1"))
    owner = world.owner()
    asked = [("r-1", "t1"), ("r-1", "t2"), ("r-2", "t1"), ("r-1", "")]
    assert await owner.check_cancelled(asked) == [False] * 4
    await world.set_key("request-cancel:r-1", "t1")
    assert await owner.check_cancelled(asked) == [True, False, False, False]


async def test_cancel_by_the_queue_admin_covers_only_active_requests(world: World) -> None:
    await world.queue_admin.submit([Submission(member("r-1", token="t1"), NOW + 60, "r-1", "t1", NOW + 60)])
    assert not await world.queue_admin.cancel_request("r-1", "another")
    assert not await world.queue_admin.cancel_request("r-2")
    owner = world.owner()
    assert await owner.check_cancelled([("r-1", "t1")]) == [False]
    assert await world.queue_admin.cancel_request("r-1")
    assert await owner.check_cancelled([("r-1", "t1")]) == [True]


async def test_request_without_an_active_marker_is_cancelled_by_its_token(world: World) -> None:
    """Any program that has the token can do this."""
    await world.zadd(1, member("r-1", token="t1"))
    await world.set_key(f"{QUEUE}:cancel:r-1:t1", "t1")
    asked = [("r-1", "t1"), ("r-1", "t2"), ("r-2", "t1")]
    assert await world.owner().check_cancelled(asked) == [True, False, False]


@pytest.mark.server
async def test_claim_stops_before_a_megabyte_of_members(world: World) -> None:
    sizes = [600_000, 500_000, 100, 2_000_000, 100]
    for number, size in enumerate(sizes):
        await world.zadd(number, b"%d" % number + b"x" * (size - 1))
    owner = world.owner()
    taken = []
    while (claimed := await claim_fully(owner)).leases:
        taken.append([len(lease.member) for lease in claimed.leases])
    assert taken == [[600_000], [500_000, 100], [2_000_000], [100]]


async def test_hand_written_request_gets_the_documented_result(world: World) -> None:
    written = {
        "internal": {"retry_count": 0, "request_token": "0f", "result_queue_name": RESULTS},
        "request_kind": "redis",
        "data": {"id": "r-1", "created": 1764044000, "deadline": NOW + 60, "payload": {"model": "m"}},
    }
    await world.zadd(NOW + 60, json.dumps(written).encode())
    [lease] = await claim(owner := world.owner())
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    await owner.settle([answer(lease, b'{"id":"r-1","status_code":200,"payload":"{}"}', request.results)])
    popped = await world.rpop()
    assert popped is not None
    assert json.loads(popped) == {"id": "r-1", "status_code": 200, "payload": "{}"}


def submissions(count: int, first: int = 0) -> list[Submission]:
    return [Submission(member(f"s-{at}"), NOW + 60_000) for at in range(first, first + count)]


@pytest.mark.server
async def test_submission_beyond_max_pending_is_rejected_as_a_whole(world: World) -> None:
    owner = world.owner(max_pending=5)
    assert await world.queue_admin.submit(submissions(6)) == 6, "no dispatcher has stored a limit"
    await owner.sweep()
    with pytest.raises(QueueFullError, match=r"6 requests wait, and queue\.max_pending is 5"):
        await world.queue_admin.submit(submissions(1, 6))
    leases = await claim(owner, 3)
    with pytest.raises(QueueFullError, match="3 requests wait"):
        await world.queue_admin.submit(submissions(3, 6))
    assert (await world.queue_admin.count_requests()).pending == 3
    assert await world.queue_admin.submit(submissions(2, 6)) == 2
    await owner.release([Release(leases[0], 600.0)])
    with pytest.raises(QueueFullError, match="6 requests wait"):  # one of them is delayed
        await world.queue_admin.submit(submissions(1, 8))


@pytest.mark.server
async def test_zadd_is_not_limited_by_max_pending(world: World) -> None:
    owner = world.owner(max_pending=1)
    await owner.sweep()
    for at in range(3):
        await world.zadd(NOW + 60_000, member(f"r-{at}"))
    assert len(await claim(owner)) == 3
    assert await world.queue_admin.submit(submissions(1)) == 1


@pytest.mark.server
async def test_max_pending_follows_the_setting(world: World) -> None:
    await world.owner("a", max_pending=1).sweep()
    with pytest.raises(QueueFullError):
        await world.queue_admin.submit(submissions(2))
    await world.owner("b").sweep()
    assert await world.queue_admin.submit(submissions(2)) == 2
