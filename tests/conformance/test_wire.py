"""The wire shape: what a producer or consumer that knows nothing but the contract can rely on."""

from __future__ import annotations

import json

import pytest

from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import decode_result
from dispatcher.core.requests.submission import QueueFullError
from dispatcher.ports import DeadLetter, QueueUnavailableError, Release, SettleStatus, Submission
from tests.conformance.worlds import NOW, QUEUE, RESULTS, World, answer, claim, full_claim, member

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
async def test_payload_comes_out_byte_for_byte(world: World, payload: bytes) -> None:
    raw = b'{"request_kind":"redis","data":{"id":"r-1","deadline":%d,"payload":%s}}' % (NOW + 60, payload)
    await world.zadd(NOW + 60, raw)
    [lease] = await claim(world.owner())
    assert lease.member == raw
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    assert request.payload == payload


@pytest.mark.parametrize("rubbish", [b"", b"\x00", b"\xff\xfe\x00\x80", b"not json", b"\r\n", b"%s%n"])
async def test_members_that_are_no_requests_are_claimed_as_they_are(world: World, rubbish: bytes) -> None:
    await world.zadd(1, rubbish)
    [lease] = await claim(world.owner())
    assert (lease.member, lease.score) == (rubbish, 1.0)


async def test_first_claim_tells_a_request_that_nothing_has_happened_to(world: World) -> None:
    await world.zadd(NOW + 0.25, member())
    [lease] = await claim(world.owner())
    assert lease.score == NOW + 0.25
    counted = (lease.deliveries, lease.failed_attempts, lease.refusals, lease.deaths_as_suspect)
    assert counted == (1, 0, 0, 0)


async def test_result_is_popped_from_the_default_list_in_the_order_of_finishing(world: World) -> None:
    for number in range(3):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    await owner.settle([answer(leases[1], b"second")])
    await owner.settle([answer(leases[0], b"first"), answer(leases[2], b"third")])
    assert await world.results() == [b"second", b"first", b"third"]


async def test_result_goes_to_the_list_that_the_request_names(world: World) -> None:
    for number in range(4):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    names = ["tenant:{qwen}:a", "", "tenant:{qwen}:b", "tenant:{qwen}:a"]
    said = await owner.settle(
        [answer(lease, results=name) for lease, name in zip(leases, names, strict=True)]
    )
    assert said == [SettleStatus.DONE] * 4
    assert await world.results("tenant:{qwen}:a") == [answer(leases[0]).result, answer(leases[3]).result]
    assert await world.results("tenant:{qwen}:b") == [answer(leases[2]).result]
    assert await world.results() == [answer(leases[1]).result]


async def test_result_may_be_any_bytes(world: World) -> None:
    await world.zadd(1, member())
    [lease] = await claim(owner := world.owner())
    result = bytes(range(256)) + b"x" * 500_000
    await owner.settle([answer(lease, result)])
    assert await world.results() == [result]


@pytest.mark.parametrize(
    "name",
    [
        *(QUEUE, "batch:{qwen}:requests:leases", "batch:{qwen}:requests:anything", "a:{qwen}:string"),
        *("celery", "batch:{other}:results", "batch:{other}:requests", "batch:{other}:requests:paused"),
    ],
)
async def test_list_that_cannot_take_a_result_costs_that_request_alone(world: World, name: str) -> None:
    await world.set_key("a:{qwen}:string", "not a list")
    for number in range(3):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    said = await owner.settle(
        [
            answer(leases[0], b'{"id":"r-0"}'),
            answer(leases[1], b'{"id":"r-1"}', name, request_id="r-1"),
            answer(leases[2], b'{"id":"r-2"}'),
        ]
    )
    assert said == [SettleStatus.DONE, SettleStatus.BAD_LIST, SettleStatus.DONE]
    results = {(result := json.loads(raw))["id"]: result.get("error_code") for raw in await world.results()}
    assert results == {"r-0": None, "r-1": "INVALID_REQUEST", "r-2": None}
    assert list(await owner.find_invalid_result_lists([name, "a:{qwen}:new"])) == [name], (
        "known before it is sent"
    )
    counts = await owner.count_requests()
    assert (counts.pending, counts.leased) == (0, 0)


async def test_results_without_a_place_stay_with_their_leases_until_there_is_one(world: World) -> None:
    await world.set_key(RESULTS, "not a list")
    for number in range(3):
        await world.zadd(number, member(f"r-{number}"))
    leases = await claim(owner := world.owner())
    ends = [answer(leases[0], results="a:{qwen}:list"), answer(leases[1]), answer(leases[2])]
    assert list(await owner.settle(ends)) == [SettleStatus.DONE, None, None]
    with pytest.raises(QueueUnavailableError, match="results cannot be delivered"):
        await owner.settle(ends[1:])
    assert await world.results("a:{qwen}:list") == [ends[0].result]
    assert (await owner.count_requests()).leased == 2
    await world.delete_key(RESULTS)
    assert list(await owner.settle(ends)) == [SettleStatus.LOST, SettleStatus.DONE, SettleStatus.DONE]
    assert await world.results() == [ends[1].result, ends[2].result]


async def test_burial_whose_list_cannot_take_its_result_is_dead_all_the_same(world: World) -> None:
    await world.zadd(1, member("r-7"))
    [lease] = await claim(owner := world.owner())
    burial = DeadLetter(answer(lease, results=QUEUE, request_id="r-7"), "too often")
    assert await owner.move_to_dead_letters([burial]) == [SettleStatus.BAD_LIST]
    [result] = await world.results()
    assert (decode_result(result).id, decode_result(result).error_code) == ("r-7", "INVALID_REQUEST")
    assert (await owner.count_requests()).dead == 1


def submitted(request_id: str, token: str, until: int = NOW + 60) -> Submission:
    return Submission(member(request_id, token=token), until, request_id, token, until)


async def test_submitted_request_is_active_until_it_is_finished(world: World) -> None:
    assert await world.desk.submit([submitted("r-1", "t1")]) == 1
    [lease] = await claim(owner := world.owner())
    assert await world.desk.cancel_request("r-1", "t1")
    await owner.settle([answer(lease, request_id="r-1", request_token="t1")])
    assert await owner.check_cancelled([("r-1", "t1")]) == [False], "its marker has gone with it"
    assert not await world.desk.cancel_request("r-1", "t1")
    assert not await world.desk.cancel_request("r-1")


async def test_two_requests_of_one_id_are_cancelled_each_by_its_own_token(world: World) -> None:
    """Two tenants hit on one id: neither can cancel the other's, nor take back its cancellation."""
    await world.desk.submit([submitted("r-1", "alice")])
    assert await world.desk.cancel_request("r-1", "alice")
    await world.desk.submit([submitted("r-1", "bob", NOW + 90)])
    owner, asked = world.owner(), [("r-1", "alice"), ("r-1", "bob")]
    assert await owner.check_cancelled(asked) == [True, False]
    assert not await world.desk.cancel_request("r-1", "mallory")
    assert await owner.check_cancelled(asked) == [True, False]
    alices, _ = await claim(owner)
    await owner.settle([answer(alices, request_id="r-1", request_token="alice")])
    assert not await world.desk.cancel_request("r-1", "alice")
    assert await world.desk.cancel_request("r-1"), "who names the id alone means all of them"
    assert await owner.check_cancelled(asked) == [False, True]


async def test_a_marker_of_llm_ds_producers_is_theirs_and_this_queue_s_alone(world: World) -> None:
    """It stands under the id, for all queues: cancelling here must not cancel the other queue's request."""
    await world.set_key("request-active:r-1", "theirs")
    await world.set_key("request-cancel:r-1", "another's")
    await world.desk.submit([submitted("r-1", "ours")])
    assert await world.desk.cancel_request("r-1", "theirs")
    owner = world.owner()
    asked = [("r-1", "theirs"), ("r-1", "ours"), ("r-1", "another's")]
    assert await owner.check_cancelled(asked) == [True, False, True]
    assert await world.get_key("request-cancel:r-1") == "another's"
    assert await world.get_key("request-active:r-1") == "theirs"


async def test_finished_request_leaves_a_newer_one_of_its_id_alone(world: World) -> None:
    await world.zadd(1, member("r-1", token="old"))
    [lease] = await claim(owner := world.owner())
    await world.set_key("request-active:r-1", "new")
    await world.set_key("request-cancel:r-1", "new")
    await owner.settle([answer(lease, request_id="r-1", request_token="old")])
    assert await world.get_key("request-active:r-1") == "new"
    assert await owner.check_cancelled([("r-1", "new"), ("r-1", "old")]) == [True, False]


async def test_identical_member_that_is_pending_is_the_same_request(world: World) -> None:
    submission = Submission(member(), NOW + 60)
    assert await world.desk.submit([submission, submission]) == 1
    assert await world.desk.submit([submission]) == 0
    assert len(await claim(world.owner())) == 1


async def test_identical_member_submitted_while_the_first_runs_is_another_request(world: World) -> None:
    owner = world.owner()
    await world.zadd(5, member())
    [first] = await claim(owner)
    await world.zadd(5, member())
    [second] = await claim(owner)
    assert first.entry_id != second.entry_id
    assert await owner.settle([answer(first), answer(second)]) == [SettleStatus.DONE] * 2
    assert len(await world.results()) == 2


async def test_cancel_by_marker_as_any_program_sets_it(world: World) -> None:
    await world.zadd(1, member("r-1", token="t1"))
    owner = world.owner()
    asked = [("r-1", "t1"), ("r-1", "t2"), ("r-2", "t1"), ("r-1", "")]
    assert await owner.check_cancelled(asked) == [False] * 4
    await world.set_key("request-cancel:r-1", "t1")
    assert await owner.check_cancelled(asked) == [True, False, False, False]


async def test_cancel_at_the_desk_hits_the_active_request_only(world: World) -> None:
    await world.desk.submit([Submission(member("r-1", token="t1"), NOW + 60, "r-1", "t1", NOW + 60)])
    assert not await world.desk.cancel_request("r-1", "another")
    assert not await world.desk.cancel_request("r-2")
    owner = world.owner()
    assert await owner.check_cancelled([("r-1", "t1")]) == [False]
    assert await world.desk.cancel_request("r-1")
    assert await owner.check_cancelled([("r-1", "t1")]) == [True]


async def test_a_request_is_cancelled_by_its_token_alone_without_having_been_marked(world: World) -> None:
    """As any program can: who has the token needs to know nothing else."""
    await world.zadd(1, member("r-1", token="t1"))
    await world.set_key(f"{QUEUE}:cancel:r-1:t1", "t1")
    asked = [("r-1", "t1"), ("r-1", "t2"), ("r-2", "t1")]
    assert await world.owner().check_cancelled(asked) == [True, False, False]


async def test_claim_stops_before_a_megabyte_of_members(world: World) -> None:
    sizes = [600_000, 500_000, 100, 2_000_000, 100]
    for number, size in enumerate(sizes):
        await world.zadd(number, b"%d" % number + b"x" * (size - 1))
    owner = world.owner()
    taken = []
    while (claimed := await full_claim(owner)).leases:
        taken.append([len(lease.member) for lease in claimed.leases])
    assert taken == [[600_000], [500_000, 100], [2_000_000], [100]]


async def test_hand_written_request_is_answered_as_the_contract_shows(world: World) -> None:
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
    return [Submission(member(f"s-{at}"), NOW + 600) for at in range(first, first + count)]


async def test_submission_past_what_may_be_pending_is_refused_whole_until_fewer_wait(world: World) -> None:
    owner = world.owner(max_pending=5)
    assert await world.desk.submit(submissions(6)) == 6, "no dispatcher has said how many may wait"
    await owner.sweep()
    with pytest.raises(QueueFullError, match=r"6 requests wait, and queue\.max_pending is 5"):
        await world.desk.submit(submissions(1, 6))
    leases = await claim(owner, 3)
    with pytest.raises(QueueFullError, match="3 requests wait"):
        await world.desk.submit(submissions(3, 6))
    assert (await world.desk.count_requests()).pending == 3
    assert await world.desk.submit(submissions(2, 6)) == 2
    await owner.release([Release(leases[0], 600.0)])
    with pytest.raises(QueueFullError, match="6 requests wait"):  # one of them is delayed
        await world.desk.submit(submissions(1, 8))


async def test_who_calls_zadd_is_not_held_to_what_may_be_pending_and_spoils_nothing(world: World) -> None:
    owner = world.owner(max_pending=1)
    await owner.sweep()
    for at in range(3):
        await world.zadd(NOW + 600, member(f"r-{at}"))
    assert len(await claim(owner)) == 3
    assert await world.desk.submit(submissions(1)) == 1


async def test_limit_of_what_may_be_pending_goes_with_the_setting(world: World) -> None:
    await world.owner("a", max_pending=1).sweep()
    with pytest.raises(QueueFullError):
        await world.desk.submit(submissions(2))
    await world.owner("b").sweep()
    assert await world.desk.submit(submissions(2)) == 2
