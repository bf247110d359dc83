"""Server faults (full, read-only, unreachable, foreign keys): each step happens as a whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import redis.asyncio

from dispatcher.features.models.queue.waiting import ModelWait, ReturnedRequests
from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.queue.contract import DeadLetter, Lease, Release, Settlement, SettleStatus
from dispatcher.queue.lua_files import LUA_FEATURES
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.requests.submission import QueueUnavailableError, Submission
from dispatcher.telemetry.events import Event, divert_events
from tests.queue.factories import (
    NAMES,
    STARTED,
    OwnerAndAdmin,
    answer,
    claim,
    claim_one,
    claim_started,
    ids,
    member,
    queues,
    start_requests,
    submission,
)
from tests.queue.key_checks import assert_drained, assert_only_known_keys
from tests.queue.servers import Server, server
from tests.support import wait_until

Fill = Callable[[], Awaitable[None]]


@pytest.fixture
async def queue(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a") as (one,):
        yield one
    await assert_only_known_keys(client, NAMES, "elsewhere")


async def dump(client: redis.asyncio.Redis) -> dict[bytes, bytes | None]:
    """Return every lasting key with its value, to check that nothing changed."""
    lasting = [key async for key in client.scan_iter() if await client.pttl(key) == -1]
    return {key: await client.dump(key) for key in lasting}


@pytest.fixture
async def server_filler(client: redis.asyncio.Redis) -> AsyncIterator[Fill]:
    """Yield a function that fills the server, so that it rejects writes that may grow."""

    async def fill() -> None:
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", max(1, used // 2))

    yield fill
    await client.config_set("maxmemory", 0)


async def test_full_server_rejects_a_submission_as_a_whole(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, server_filler: Fill
) -> None:
    await server_filler()
    with pytest.raises(QueueUnavailableError, match="out of memory"):
        await queue.submit([submission("r-1"), submission("r-2")])
    assert (await queue.count_requests()).pending == 0


async def test_requests_of_a_full_server_can_be_completed(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, server_filler: Fill
) -> None:
    """Otherwise no request could ever leave the queue."""
    await queue.submit([submission(f"r-{number}") for number in range(6)])
    early = await claim(queue, 2)
    await server_filler()
    late = await claim(queue, 4)
    assert (await queue.renew([*early.leases, *late.leases])).lost_entry_ids == []
    first, second, third, fourth = late.leases
    assert await queue.settle([answer(lease) for lease in early.leases]) == [SettleStatus.DONE] * 2
    assert await queue.release([Release(first), Release(second, delay_s=0.001)]) == [SettleStatus.DONE] * 2
    assert await queue.move_to_dead_letters([DeadLetter(answer(third), "why")]) == [SettleStatus.DONE]
    assert await queue.settle([answer(fourth)]) == [SettleStatus.DONE]
    await wait_until(lambda: sweep_overdue(queue))
    again = await claim(queue)
    assert await queue.settle([answer(lease) for lease in again.leases]) == [SettleStatus.DONE] * 2
    assert await client.llen(NAMES.result_list) == 6


async def sweep_overdue(queue: RedisQueue) -> bool:
    await queue.sweep()
    return (await queue.count_requests()).delayed == 0


async def test_read_only_replica_changes_nothing_and_says_so(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1"), submission("r-2")])
    lease = await claim_one(queue)
    before = await dump(client)
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    await client.config_set("replica-serve-stale-data", "yes")
    try:
        for act in (
            lambda: queue.submit([submission("r-3")]),
            lambda: claim(queue),
            lambda: queue.renew([lease]),
            lambda: queue.settle([answer(lease)]),
            lambda: queue.release([Release(lease)]),
            lambda: queue.move_to_dead_letters([DeadLetter(answer(lease), "why")]),
            lambda: queue.sweep(),
        ):
            with pytest.raises(QueueUnavailableError, match="replica"):
                await act()
        assert await dump(client) == before
    finally:
        await client.execute_command("REPLICAOF", "NO", "ONE")
    assert await queue.settle([answer(lease)]) == [SettleStatus.DONE]


async def test_foreign_key_under_a_queue_name_stops_each_step_before_its_first_write(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1"), submission("r-2")])
    lease = await claim_one(queue)
    await client.set(f"{NAMES.queue_prefix}:returned", "someone's")
    before = await dump(client)
    for act in (lambda: claim(queue), lambda: queue.release([Release(lease)]), lambda: queue.sweep()):
        with pytest.raises(QueueUnavailableError, match="returned holds a string, not a zset"):
            await act()
    assert await dump(client) == before
    await client.delete(f"{NAMES.queue_prefix}:returned")
    assert await queue.release([Release(lease)]) == [SettleStatus.DONE]


@pytest.mark.parametrize("key", [suffix for suffix, _ in LUA_FEATURES["models"].keys.values()])
async def test_foreign_key_of_the_model_lane_stops_steps_that_write_there(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, key: str
) -> None:
    await queue.submit([submission(f"r-{number}", 1_700_000_000) for number in range(3)])
    first, second, third = (await claim(queue)).leases
    await queue.release([Release(first, extra=ModelWait("m"))])
    (late,) = await queue.find_overdue(9)
    at = f"{NAMES.queue_prefix}:{key}"
    await client.rename(at, "aside")
    await client.set(at, "someone's")
    before = await dump(client)
    steps = [
        lambda: queue.release([Release(second), Release(third, extra=ModelWait("m"))]),
        lambda: queue.return_waiting_for_models(["m"]),
        lambda: queue.settle_unleased([(late, answer(first))]),
    ]
    for act in steps:
        with pytest.raises(QueueUnavailableError, match=f"{key} holds a string, not a zset"):
            await act()
    assert await dump(client) == before
    assert await queue.release([Release(second)]) == [SettleStatus.DONE], "its request has no model lane"
    await client.rename("aside", at)
    assert await queue.return_waiting_for_models(["m"]) == ReturnedRequests(1, 0)


@pytest.mark.parametrize(
    "name",
    [
        *("batch:{pool}:requests", "batch:{pool}:requests:leases", "batch:{pool}:requests:made-up"),
        *("request-active:r-9", "request-cancel:r-9", "a-string", "x" * 5000, "\ud800"),
    ],
)
async def test_hostile_list_name_affects_only_its_request(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, name: str
) -> None:
    await client.set("a-string", "kept", ex=60)
    await queue.submit([submission("r-1"), submission("r-2"), submission("r-3")])
    leases = (await claim(queue)).leases
    assert list(await queue.find_invalid_result_lists(["elsewhere", name])) == [name], (
        "known before the request is sent"
    )
    said = await queue.settle([answer(leases[0], "elsewhere"), answer(leases[1], name), answer(leases[2])])
    assert said == [SettleStatus.DONE, SettleStatus.BAD_LIST, SettleStatus.DONE]
    assert await client.llen("elsewhere") == 1
    results = [msgspec.json.decode(one) for one in await client.lrange(NAMES.result_list, 0, -1)]
    assert {one["id"]: one.get("error_code") for one in results} == {"r-2": "INVALID_REQUEST", "r-3": None}
    assert await client.get("a-string") == b"kept"
    assert (await queue.count_requests()).leased == 0


@pytest.mark.parametrize(
    ("had_s", "has_s"),
    [
        pytest.param(None, 600, id="created by the push"),
        pytest.param(-1, -1, id="foreign, without a lifetime"),
        pytest.param(60, 600, id="ours, about to expire"),
        pytest.param(6000, 6000, id="foreign, with a longer lifetime"),
    ],
)
async def test_push_does_not_shorten_the_lifetime_of_a_list(
    any_server: Server, client: redis.asyncio.Redis, had_s: int | None, has_s: int
) -> None:
    if had_s is not None:
        await client.lpush("elsewhere", "another's")
    if had_s is not None and had_s > 0:
        await client.expire("elsewhere", had_s)
    async with queues(any_server.url, "a", result_ttl_s=600) as (queue,):
        await queue.submit([submission("r-1")])
        await queue.settle([answer(await claim_one(queue), "elsewhere")])
    assert await client.llen("elsewhere") == (1 if had_s is None else 2)
    assert await client.ttl("elsewhere") in (has_s, has_s - 1)


async def test_valid_list_is_checked_once_and_invalid_one_each_time(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    run = queue.backend.scripts.run

    async def counted(name: str, arguments: Any, **options: Any) -> Any:
        asked.append((name, arguments["lists"]))
        return await run(name, arguments, **options)

    monkeypatch.setattr(queue.backend.scripts, "run", counted)
    await client.set("a-string", "kept")
    for _ in range(3):
        assert await queue.find_invalid_result_lists([]) == {}
        refused = await queue.find_invalid_result_lists(["a", "b", "a-string", NAMES.queue])
        assert set(refused) == {"a-string", NAMES.queue}
    assert asked == [
        ("check_result_lists", [b"a", b"b", b"a-string"]),
        *[("check_result_lists", [b"a-string"])] * 2,
    ]
    await client.delete("a-string")
    assert await queue.find_invalid_result_lists(["a-string"]) == {}


async def test_unreachable_server_rejects_no_result_list() -> None:
    async with queues("redis://127.0.0.1:1", "a", attempt_timeout_s=0.1) as (queue,):
        assert list(await queue.find_invalid_result_lists(["a", NAMES.queue])) == [NAMES.queue]


async def test_dead_letter_with_a_hostile_list_is_still_dead(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1")])
    lease = await claim_one(queue)
    said = await queue.move_to_dead_letters([DeadLetter(answer(lease, "batch:{pool}:requests"), "no use")])
    assert said == [SettleStatus.BAD_LIST]
    (dead,) = await queue.list_dead(10)
    assert dead.reason == "no use"
    assert b"INVALID_REQUEST" in cast("bytes", await client.lindex(NAMES.result_list, 0))


async def test_default_list_of_the_wrong_type_keeps_the_request(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """A result that no consumer can read would break the promise of exactly one result."""
    await client.hset(NAMES.result_list, "a", "hash")
    await queue.submit([submission("r-1"), submission("r-2")])
    own, other = (await claim(queue)).leases
    assert await queue.settle([answer(own), answer(other, "elsewhere")]) == [None, SettleStatus.DONE]
    with pytest.raises(QueueUnavailableError, match="is not a list"):
        await queue.settle([answer(own)])
    assert (await queue.count_requests()).leased == 1
    assert await client.llen("elsewhere") == 1
    await client.delete(NAMES.result_list)
    assert await queue.settle([answer(own)]) == [SettleStatus.DONE]


async def test_scripts_are_loaded_again_after_a_flush(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1")])
    await client.script_flush()
    lease = await claim_one(queue)
    await client.script_flush()
    assert await queue.settle([answer(lease)]) == [SettleStatus.DONE]


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:1/0", "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/mymaster"],
)
async def test_unreachable_server_raises_an_explained_error(url: str) -> None:
    queue = OwnerAndAdmin(connect(url), NAMES, "a")
    try:
        for act in (
            queue.sweep,
            queue.count_requests,
            lambda: claim(queue),
            lambda: queue.check_cancelled([("r-1", "t")]),
        ):
            with pytest.raises(QueueUnavailableError, match="cannot be reached"):
                await act()
        assert queue.unix_now() > 1_700_000_000
    finally:
        await queue.aclose()


async def test_frozen_server_ends_a_call_with_a_timeout(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    """The server is stopped (SIGSTOP): connected, and silent."""
    queue = OwnerAndAdmin(connect(any_server.url, response_timeout_s=0.3), NAMES, "a", attempt_timeout_s=0.4)
    try:
        await queue.submit([submission("r-1")])
        with any_server.frozen():
            started = asyncio.get_running_loop().time()
            with pytest.raises(QueueUnavailableError, match="in time"):
                await queue.count_requests()
            assert asyncio.get_running_loop().time() - started < 5
        assert (await queue.count_requests()).pending == 1
    finally:
        await queue.aclose()


async def test_repeated_settlement_after_a_lost_reply_returns_done(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """The server settled, and the connection broke before the reply: the repeated call returns done, not
    lost."""
    await queue.submit([submission("r-1")])
    lease = await claim_one(queue)
    act = queue.backend.scripts.client.execute_command
    drops = iter([True])

    async def cut(*args: object) -> object:
        reply = await act(*args)
        if next(drops, False):
            raise redis.ConnectionError("cut")
        return reply

    queue.backend.scripts.client.execute_command = cut
    assert await queue.settle([answer(lease)]) == [SettleStatus.DONE]
    assert await client.llen(NAMES.result_list) == 1


async def test_repeated_submission_after_a_lost_reply_adds_nothing(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """A dispatcher may have claimed the request before the repeated call."""
    act = queue.backend.scripts.client.execute_command
    drops = iter([True])

    async def cut(*args: object) -> object:
        reply = await act(*args)
        if args[0] in ("EVAL", "EVALSHA") and next(drops, False):
            async with queues(
                f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}", "b"
            ) as (b,):
                assert len((await claim(b)).leases) == 1
            raise redis.ConnectionError("cut")
        return reply

    queue.backend.scripts.client.execute_command = cut
    assert await queue.submit([submission("r-1")]) == 1
    counts = await queue.count_requests()
    assert (counts.pending, counts.leased) == (0, 1)


CANNOT = "The user executing the script can't run this command or subcommand"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(
            f"Error running script (call to f_c8): @user_script:55: @user_script: 55: {CANNOT}", id="6.2"
        ),
        pytest.param(f"{CANNOT} script: a2e6, on @user_script:1.", id="7.0"),
        pytest.param(
            "ACL failure in script: User u has no permissions to run 'hdel' script: on @user_script:3.",
            id="valkey",
        ),
    ],
)
async def test_permission_error_inside_a_script_is_explained_for_every_server(said: str) -> None:
    """Each server has its own message. Redis 6.2 cannot be asked for permissions before a step."""

    async def refuses() -> None:
        raise redis.ResponseError(said)

    scripts = ScriptRunner(connect("redis://127.0.0.1:1"))
    with pytest.raises(QueueUnavailableError, match="does not permit this user") as caught:
        await scripts.call_with_retries(refuses)
    assert "@user_script" not in str(caught.value)
    await scripts.client.aclose()


async def test_password_database_and_restricted_user_work(tmp_path: Path) -> None:
    """The user has permissions for the keys of the queue and for the granted result lists only."""
    with server("redis", tmp_path, password="secret") as running, running.client() as admin:
        admin.execute_command(
            *(
                "ACL",
                "SETUSER",
                "batch",
                "on",
                ">word",
                "~*{pool}*",
                "~request-active:*",
                "~request-cancel:*",
            ),
            *("&*{pool}*", "-@all", "+@read", "+@write", "+@scripting", "+@connection", "+@pubsub", "+time"),
            *("-@dangerous", "-@admin"),
        )
        url = f"redis://batch:word@127.0.0.1:{running.port}/3"
        async with queues(url, "a") as (queue,):
            await queue.submit([submission("r-1", token="t"), submission("r-2")])
            assert await queue.cancel_request("r-1")
            leases = (await claim(queue)).leases
            said = await queue.settle([answer(leases[0], token="t"), answer(leases[1], "not-granted")])
            assert said == [SettleStatus.DONE, SettleStatus.BAD_LIST]
            await asyncio.wait_for(woken_by(queue, submission("r-3")), 5)
            assert (await queue.count_requests()).pending == 1
        with running.client(db=3) as third:
            assert third.llen(NAMES.result_list) == 2
        queue_admin = RedisQueueAdmin(connect(f"redis://batch:wrong@127.0.0.1:{running.port}/0"), NAMES)
        with pytest.raises(QueueUnavailableError, match="password"):
            await queue_admin.count_requests()
        await queue_admin.aclose()
        other = RedisQueueAdmin(connect(url), type(NAMES)("elsewhere", "elsewhere-results"))
        with pytest.raises(QueueUnavailableError, match="permit"):
            await other.count_requests()
        await other.aclose()


async def woken_by(queue: OwnerAndAdmin, work: Submission) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(queue.wait_for_work())
        await queue.submit([work])
        await waiting


async def test_restart_with_an_append_only_file_keeps_every_location(
    tmp_path: Path, any_server: Server
) -> None:
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with server(any_server.engine, tmp_path, *options) as running:
        async with queues(running.url, "a") as (queue,):
            await queue.submit([submission(f"r-{number}") for number in range(8)])
            leases = (await claim(queue, 5)).leases
            await queue.settle([answer(leases[0])])
            await queue.release([Release(leases[1]), Release(leases[2], delay_s=60)])
            await queue.move_to_dead_letters([DeadLetter(answer(leases[3]), "why")])
            before = await queue.count_requests()
            running.kill()
            with pytest.raises(QueueUnavailableError):
                await queue.count_requests()
            running.start()
            assert await queue.count_requests() == before
            assert await queue.settle([answer(leases[4])]) == [SettleStatus.DONE]


async def test_invalid_members_are_claimed_and_block_no_others(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """Members that are not requests are claimed like others, and the dispatcher answers or dead-letters
    them."""
    large = member("large") + b" " * (15 * 2**20)
    poison = [b"", b"\xff\xfe", b"[]", b'{"data":{"id":""}}', b"\x00" * 40, large]
    await client.zadd(NAMES.queue, dict.fromkeys(poison, 5) | {member("fine"): 5})
    seen = []
    while leases := (await claim(queue)).leases:
        seen += [lease.member for lease in leases]
        assert len(leases) == 1 or sum(map(len, [lease.member for lease in leases])) <= 2**20
        await queue.move_to_dead_letters(
            [DeadLetter(answer_nothing(lease), "unreadable") for lease in leases]
        )
    assert seen == sorted([*poison, member_of(seen, "fine")])
    dead: list[DeadRequest] = []
    while found := await queue.list_dead(100, dead[-1].entry_id if dead else 0):
        dead += found
    assert [one.member for one in dead] == seen
    assert await client.llen(NAMES.result_list) == 0
    assert await queue.purge_dead() == len(seen)
    await assert_drained(client, NAMES)


def answer_nothing(lease: Lease) -> Settlement:
    return Settlement(lease, b"", "")


def member_of(members: list[bytes], request_id: str) -> bytes:
    return next(one for one in members if f'"{request_id}"'.encode() in one)


async def test_members_with_one_score_are_claimed_in_order_of_their_bytes(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    members = [member(f"r-{number}", 2_000_000_000) for number in range(1000)]
    await client.zadd(NAMES.queue, dict.fromkeys(members, 7.5))
    held = (await claim(queue, 600)).leases
    await queue.release([Release(lease) for lease in held[::3]])
    rest = [*held[::3], *(await claim(queue)).leases]
    served = (await claim(queue)).leases
    assert served == []
    again = await queue.release([Release(lease) for lease in rest[200:]])
    assert set(again) == {SettleStatus.DONE}
    order = [lease.member for lease in (await claim(queue)).leases]
    assert order == sorted(order)
    assert ids(order)


async def test_lease_named_twice_in_one_call_ends_once(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1"), submission("r-2")])
    first, second = (await claim(queue)).leases
    assert await queue.release([Release(first), Release(first)]) == [SettleStatus.DONE, SettleStatus.LOST]
    assert await queue.settle([answer(second), answer(second)]) == [SettleStatus.DONE, SettleStatus.LOST]
    assert await client.llen(NAMES.result_list) == 1
    counts = (await queue.renew([])).lease_counts
    assert (counts.live_units, counts.other_owners_units) == (0, 0)


async def test_dead_requests_beyond_dead_max_are_dropped_oldest_first_and_reported(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    reply: list[tuple[Event, int]] = []
    async with queues(any_server.url, "a", dead_max=3) as (queue,):
        await queue.submit([submission(f"r-{number}", 2_000_000_000 + number) for number in range(5)])
        with divert_events(lambda event, fields: reply.append((event, fields["count"]))):
            for number in range(5):
                await queue.move_to_dead_letters(
                    [DeadLetter(answer(await claim_one(queue)), f"reason {number}")]
                )
        assert [dead.reason for dead in await queue.list_dead(10)] == ["reason 2", "reason 3", "reason 4"]
        assert reply == [(Event.DEAD_DROPPED, 1)] * 2
        assert await queue.purge_dead() == 3
    assert await client.llen(NAMES.result_list) == 5
    await client.delete(NAMES.result_list)
    await assert_drained(client, NAMES)


async def test_requeued_request_leaves_nothing_among_the_dead(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1")])
    lease = await claim_one(queue)
    await queue.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    assert await queue.requeue_dead([lease.entry_id], 4_000_000_000) == 1
    await queue.settle([answer(await claim_one(queue))])
    await client.delete(NAMES.result_list)
    await assert_drained(client, NAMES)


@pytest.mark.parametrize("key", [suffix for suffix, _ in LUA_FEATURES["slices"].keys.values()])
async def test_foreign_key_of_progress_stops_steps_before_their_first_write(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, key: str
) -> None:
    await start_requests(queue, "r-1", "r-2", "r-3")
    dead, running = await claim_started(queue, 2)
    await queue.move_to_dead_letters([DeadLetter(answer(dead), "why")])
    await queue.submit([submission("plain", 3_000_000_000)])
    (plain,) = (await claim(queue, max_per_lane={})).leases
    at = f"{NAMES.queue_prefix}:{key}"
    await client.rename(at, "aside")
    await client.set(at, "someone's")
    before = await dump(client)
    steps: list[Any] = [
        lambda: claim(queue, max_per_lane=STARTED),
        lambda: queue.release([Release(running)]),
        lambda: queue.release([Release(plain, progress=b"p")]),
        lambda: queue.sweep(),
        lambda: queue.requeue_dead([dead.entry_id], 4_000_000_000),
        lambda: queue.return_waiting_for_models(["m"]),
    ]
    for act in steps:
        with pytest.raises(QueueUnavailableError, match=f"{key} holds a string, not a"):
            await act()
    assert await dump(client) == before
    assert await queue.release([Release(plain)]) == [SettleStatus.DONE], "its request has no progress"
    assert await queue.settle([answer(running)]) == [SettleStatus.DONE]
    await client.rename("aside", at)
    assert len(await claim_started(queue)) == 2


async def test_lost_progress_lets_the_request_start_again(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await start_requests(queue, "r-1")
    await client.delete(NAMES.progress_key)
    await queue.sweep()
    (lease,) = await claim_started(queue)
    assert lease.progress == b""
    assert await queue.settle([answer(lease)]) == [SettleStatus.DONE]


async def test_dropped_dead_request_loses_its_progress(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    async with queues(any_server.url, "a", dead_max=1) as (queue,):
        await start_requests(queue, "r-1", "r-2")
        for lease in await claim_started(queue):
            await queue.move_to_dead_letters([DeadLetter(answer(lease), "why")])
        (kept,) = await queue.list_dead(9)
    assert await client.hkeys(NAMES.progress_key) == [b"%d" % kept.entry_id]
