"""The permissions of docs/explanation/security.md suffice, each is used, and a missing one is reported and
does no harm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from redis.exceptions import NoPermissionError

from dispatcher.client import BatchClient, Item, NoResultError, QueueUnreachableError
from dispatcher.features.models.queue.calls import ModelAdminCalls
from dispatcher.features.models.registry import PinRequest
from dispatcher.features.named_streams.redis_streams import get_stream_keys
from dispatcher.queue.contract import (
    DeadLetter,
    Lease,
    Overload,
    Release,
    Settlement,
    SettleStatus,
    UnleasedRequest,
)
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import TEXTS
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.permissions import list_required_permissions
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.queue.redis.server_report import inspect_server
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import encode_answer
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError
from dispatcher.telemetry.events import Event, divert_events
from tests.features.batch_files.files import make_line
from tests.queue.factories import OwnerAndAdmin, answer, claim, member, permit, queues, submission
from tests.queue.redis_users import ROLES, commands, grant, rules, url_of
from tests.queue.servers import Server
from tests.support import wait_until

QWEN = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
NEVER, PAST = 2_000_000_000, 1_700_000_000
"""Deadlines: of no test's time, and of none any more."""
WRITES = {"ZADD", "ZREM", "ZPOPMIN", "ZREMRANGEBYRANK", "HSET", "HDEL", "HINCRBY", "SET", "DEL", "LPUSH"}
UNLEASED = Lease(0, "", b"", 0, 0, 0, 0, 0)


@pytest.fixture
def admin(any_server: Server, client: object) -> Iterator[redis.Redis]:
    """Yield a client of the empty server with all permissions. Each role exists with its own."""
    with any_server.client() as found:
        for role in ROLES:
            grant(found, role)
        yield found


@asynccontextmanager
async def dispatcher(server: Server, owner: str = "a", **options: Any) -> AsyncIterator[OwnerAndAdmin]:
    given = {"owner_timeout_s": 1.0, "poll_s": 0.02, "dead_max": 1, "names": QWEN, **options}
    async with queues(url_of(server, "dispatcher"), owner, **given) as (one,):
        yield one


@contextmanager
def expect_all_commands_used(admin: redis.Redis, role: str) -> Iterator[None]:
    """Fail if the block does not use each command of the role, or if the server rejects a command."""
    admin.config_resetstat()
    yield
    stats = admin.info("commandstats")
    used = {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["calls"]}
    refused = {name for name, stat in stats.items() if stat["rejected_calls"]}
    assert refused <= {
        "cmdstat_client|setinfo",
        "cmdstat_info",
    }  # the client introduces itself and asks what the server is, if it may
    assert commands(role) - used == set(), "permissions that no step needs"


# Permissions that scripts check.


def list_commands(script: str) -> list[str]:
    """Return the commands of a script, in the order of its lines."""
    return re.findall(r"call\('([A-Z]+)'", TEXTS[script])


def test_check_requires_the_permissions_that_the_page_lists() -> None:
    assert {right.command for right in list_required_permissions(QWEN)} | {"subscribe"} == commands(
        "dispatcher"
    )


def test_each_step_of_an_owner_checks_the_commands_of_all_steps() -> None:
    steps = (
        "time",
        "common",
        "queue_order",
        "cancel_markers",
        "list_ttl",
        "write_results",
        "claim",
        "renew",
        "set_lease_units",
        "settle",
        "release",
        "sweep",
        "settle_unleased",
        "sequences",
        "claim_turns",
        "find_remaining_requests",
        "models",
        "waiting_for_model",
        "slices",
        "store_progress",
        "continue_slices",
        "slots",
        "end_turns",
        "claim_next",
        "sweep_sequences",
        "return_waiting_for_models",
        "count_waiting_by_model",
    )
    asked = re.findall(r"'([A-Z]+)'", TEXTS["owner_commands"])
    assert set(asked) == {name for step in steps for name in list_commands(step)}


@pytest.mark.parametrize(
    "script",
    [
        "submit",
        "submit_to_stream",
        "consume_result",
        "requeue_dead",
        "cancel_request",
        "dead_requests",
        "push_results",
    ],
)
def test_every_other_writing_script_checks_permissions_before_it_writes(script: str) -> None:
    before, asked, after = re.split(r"^require_commands\((.*)\)$", TEXTS[script], flags=re.MULTILINE)
    assert not set(re.findall(r"call\('([A-Z]+)'", before)) & WRITES
    of_fragments = {"HDEL"} if "delete_entries(" in after else set()  # of common.lua
    of_fragments |= {"SET", "GETRANGE", "DEL"} if "mark_active(" in after else set()  # of cancel_markers.lua
    of_fragments |= {"TTL", "EXPIRE"} if "set_stream_ttl(" in after else set()  # of named_streams.lua
    needs = set(re.findall(r"call\('([A-Z]+)'", after)) - {"PUBLISH"}  # a wake-up may be missed
    assert needs | of_fragments == set(re.findall(r"'([A-Z]+)'", asked))


def test_sequence_admin_checks_permissions_before_it_runs_any_command() -> None:
    text = TEXTS["sequence_admin"]
    before, asked, _ = re.split(r"^require_commands\((.*)\)$", text, flags=re.MULTILINE)
    assert "call(" not in before
    needs = {
        *list_commands("sequence_admin"),
        *list_commands("sequences"),
        "ZADD",
        "HSET",
        "HGET",
    }  # the last three: return_to_queue, load_entry
    assert needs == set(re.findall(r"'([A-Z]+)'", asked))


@pytest.mark.parametrize(
    "script",
    ["refresh_warm_markers", "warm_up_lock", "pin_versions", "label_or_drain"],
)
def test_model_registry_scripts_check_permissions_before_they_write(script: str) -> None:
    """The functions of model_registry.lua count as well."""
    text = TEXTS[script]
    before, asked, _ = re.split(r"\brequire_commands\((.*)\)", text, flags=re.MULTILINE)
    assert "call(" not in before
    needs = {*list_commands(script), "TIME", "TYPE"}
    for name, runs in (
        ("remove_members", {"ZREM"}),
        ("drop_expired", {"ZREM", "ZADD", "ZRANGEBYSCORE"}),
        ("set_until", {"ZADD", "EXPIRE"}),
        ("clamp_times", {"ZADD", "ZRANGEBYSCORE"}),
    ):
        needs |= runs if f"{name}(" in text else set()
    assert needs == set(re.findall(r"'([A-Z]+)'", asked))


# Permissions that suffice.


async def test_dispatcher_role_has_exactly_the_needed_permissions(
    any_server: Server, admin: redis.Redis
) -> None:
    async with queues(any_server.url, "p", names=QWEN) as (producer,):
        with expect_all_commands_used(admin, "dispatcher"):
            assert (await inspect_server(url_of(any_server, "dispatcher"), QWEN)).can_subscribe
            async with dispatcher(any_server) as queue, dispatcher(any_server, "dying") as dying:
                await producer.submit([submission(f"r-{at}", NEVER + at, token="t") for at in range(6)])
                await producer.submit([submission("late", PAST, token="t")])
                await run_every_step(queue, dying)
    assert pop_result_ids(admin) == ["late", *(f"r-{at}" for at in range(6))]


async def run_every_step(queue: OwnerAndAdmin, dying: RedisQueue) -> None:
    """Run every step that a dispatcher can take."""
    await queue.sweep()
    await wait_until(lambda: expire(queue), what="the late one to be found")
    await claim(dying, 1)
    first, second, third, fourth, fifth = (await claim(queue)).leases
    assert await queue.check_cancelled([("r-1", "t")]) == [False]
    assert await queue.find_invalid_result_lists(["batch-results:alice:1"]) == {}
    assert not (await queue.renew([first, second])).lost_entry_ids
    now = asyncio.get_running_loop().time()
    await queue.share_state(permit(), Overload(now - 1, now - 1, True, 3))
    await queue.settle([answer(first, token="t")])
    await queue.move_to_dead_letters(
        [DeadLetter(answer(lease, token="t"), "why") for lease in (second, third)]
    )
    await queue.release([Release(fourth), Release(fifth, delay_s=0.01)])
    await queue.take_snapshot()
    await queue.take_warm_up_lock("qwen-v1", "10.0.0.1:8000")
    await queue.mark_warm("qwen-v1", "10.0.0.1:8000")
    assert await queue.pin_versions([PinRequest("chat-7", "qwen-v1", (), 100)]) == ["qwen-v1"]
    assert (await queue.refresh_warm_markers((), (), ["qwen-v1"])).models_in_use == {"qwen-v1"}
    assert len(await queue.list_newest_dead(5)) == 1
    assert await queue.read_pause() is None
    await wait_until(
        lambda: are_all_returned(queue), what="the silent one's and the delayed one to come back"
    )
    await asyncio.wait_for(queue.wait_for_work(), 5)
    await queue.settle([answer(lease, token="t") for lease in (await claim(queue)).leases])


async def expire(queue: RedisQueue) -> int:
    found = await queue.find_overdue(10)
    return await queue.settle_unleased([(item, is_overdue(item)) for item in found])


def is_overdue(item: UnleasedRequest) -> Settlement:
    request_id = msgspec.json.decode(item.member)["data"]["id"]
    result = msgspec.json.encode({"id": request_id, "payload": "too late"})
    return Settlement(UNLEASED, result, "", request_id, "t")


async def are_all_returned(queue: RedisQueue) -> bool:
    await queue.sweep()
    return (await queue.count_requests()).pending == 3


def pop_result_ids(admin: redis.Redis) -> list[str]:
    """Return the ids of all results in the default list."""
    return sorted(msgspec.json.decode(one)["id"] for one in admin.lrange(QWEN.result_list, 0, -1))


async def test_producer_role_can_only_submit_cancel_and_read(any_server: Server, admin: redis.Redis) -> None:
    own = "batch-results:alice:1"
    with any_server.client(username="producer", password="its-password") as producer:
        with expect_all_commands_used(admin, "producer"):
            for number in range(2):
                submitted = member(f"r-{number}", NEVER, token=f"t-{number}", results=own)
                assert producer.zadd(QWEN.queue, {submitted: NEVER}) == 1
                producer.publish(QWEN.wake_channel, "work")
            producer.set(QWEN.cancel_key("r-0", "t-0"), "t-0", ex=60)
            async with dispatcher(any_server) as queue:
                assert await queue.check_cancelled([("r-0", "t-0"), ("r-1", "t-1")]) == [True, False]
                leases = (await claim(queue)).leases
                await queue.settle([answer(lease, own, token="t-0") for lease in leases])
            assert producer.brpop([own], 5)
            assert producer.brpop([own], 5)
        for forbidden in (
            lambda: producer.zadd(f"{QWEN.queue_prefix}:leases", {"1:me": 1}),
            lambda: producer.set(QWEN.paused_key, "mine"),
            lambda: producer.delete(QWEN.queue),
            lambda: producer.set(QWEN.queue, "mine"),
            lambda: producer.brpop([QWEN.result_list], 1),
            lambda: producer.brpop(["batch-results:bob:1"], 1),
            lambda: producer.zrange(QWEN.queue, 0, -1),
            lambda: producer.eval("return 1", 0),
            lambda: producer.get(QWEN.cancel_key("r-1", "t-1")),
            lambda: producer.get(QWEN.active_key("r-1")),
            lambda: producer.get("request-active:r-1"),
            lambda: producer.hset(QWEN.progress_key, "1", "forged"),
            lambda: producer.hget(QWEN.progress_key, "1"),
            lambda: producer.zadd(f"{QWEN.queue_prefix}:started", {"1": 1}),
            lambda: producer.publish("batch:{other}:requests:wake", "work"),
        ):
            with pytest.raises(NoPermissionError):
                forbidden()


async def test_operator_role_covers_the_client_and_the_command_line(
    any_server: Server, admin: redis.Redis
) -> None:
    url = url_of(any_server, "operator")
    queue_admin, client = RedisQueueAdmin(connect(url), QWEN), BatchClient(url, pool="qwen")
    with expect_all_commands_used(admin, "operator"):
        handle = await client.enqueue(b'{"prompt": "hi"}')
        assert (await queue_admin.count_requests()).pending == 1
        assert await client.cancel(handle)
        assert await queue_admin.cancel_request(handle.id)
        assert len(await queue_admin.peek_next(10)) == 1
        (found,) = (await queue_admin.find_by_id(handle.id)).requests
        assert await queue_admin.count_ahead(found) == 0
        await queue_admin.pause("me", "why")
        assert await queue_admin.read_pause() == ("me", "why")
        await queue_admin.resume()
        await ModelAdminCalls(queue_admin).set_label("qwen", "stable", "1", "me")
        await ModelAdminCalls(queue_admin).drain_version("qwen-v1", "me")
        assert set((await ModelAdminCalls(queue_admin).read_model_registry()).drained_models) == {"qwen-v1"}
        assert await ModelAdminCalls(queue_admin).undrain_version("qwen-v1")
        async with dispatcher(any_server, dead_max=9) as queue:
            (lease,) = (await claim(queue)).leases
            result = encode_answer(handle.id, 200, b"ok", token=handle.token)
            waiting = asyncio.create_task(client.result(handle, timeout=10))
            await wait_until(lambda: admin.info("clients")["blocked_clients"])
            await queue.settle([Settlement(lease, result, handle.results, handle.id, handle.token)])
            assert (await waiting).status == 200
            await queue_admin.submit([submission("r-1"), submission("r-2"), submission("r-3")])
            first, *others = (await claim(queue)).leases
            await queue.move_to_dead_letters([DeadLetter(answer(lease), "why") for lease in others])
            await queue.release([Release(first)])
        assert len(await queue_admin.peek_next(10)) == 1
        dead, _ = await queue_admin.list_dead(10)
        assert len(await queue_admin.list_newest_dead(10)) == 2
        assert await queue_admin.requeue_dead([dead.entry_id], NEVER) == 1
        assert await queue_admin.purge_dead() == 1
        await queue_admin.submit([submission("r-9")])
        entries = await queue_admin.search_requests([])
        pending = await queue_admin.search_requests([], entries.after)
        assert [len(page.requests) for page in (entries, pending)] == [1, 2]
        assert await queue_admin.restore_requests("another", pending.requests) == 2
        async with BatchClient(url, pool="qwen", name="nightly") as nightly:
            with pytest.raises(NoResultError):
                await nightly.result("never-submitted", timeout=0.1)
            stream = nightly.stream([Item({"prompt": "hi"}, id="r-1")], name="nightly")
            waiting = asyncio.create_task(anext(stream))
            await wait_until(lambda: admin.exists(get_stream_keys(QWEN, "nightly")[0]))
            waiting.cancel()
            await asyncio.wait([waiting])
            assert (await nightly.stream_status("nightly")).unconsumed == 1
            await nightly.forget_stream("nightly")
        oldest, _ = await queue_admin.read_results(QWEN.result_list, 9)
        assert await queue_admin.take_result(QWEN.result_list, oldest)
    await queue_admin.aclose()
    await client.aclose()


async def test_unreadable_cancel_marker_does_not_hide_others(any_server: Server, admin: redis.Redis) -> None:
    """`list` and `describe` continue without it."""
    blind = [rule for rule in rules("operator") if rule != "~request-cancel:*"]
    admin.execute_command("ACL", "SETUSER", "operator", *blind)
    queue_admin = RedisQueueAdmin(connect(url_of(any_server, "operator")), QWEN)
    await queue_admin.submit([submission(f"r-{at}", NEVER + at, token="t") for at in range(3)])
    admin.set(QWEN.cancel_key("r-1", "t"), "t")
    admin.set("request-cancel:r-2", "t")
    asked = [(f"r-{at}", "t") for at in range(3)]
    assert await queue_admin.check_cancelled(asked) == [False, True, False]
    await queue_admin.aclose()


async def test_operator_role_suffices_for_an_interrupted_batch_file(
    any_server: Server, admin: redis.Redis, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(make_line("a") + b"\n" + make_line("b"))
    async with BatchClient(url_of(any_server, "operator"), pool="qwen") as client:
        first = asyncio.create_task(client.run_file(source, output))
        await wait_until(lambda: admin.zcard(QWEN.queue) == 2)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(client.run_file(source, output))
        async with dispatcher(any_server) as queue:
            for lease in (await claim(queue)).leases:
                asked = parse_member(lease.member)
                assert isinstance(asked, Request)
                result = encode_answer(asked.id, 200, b"{}", token=asked.token)
                await queue.settle([Settlement(lease, result, asked.results, asked.id, asked.token)])
            assert (await asyncio.wait_for(second, 20)).answered == 2


async def test_dispatcher_role_can_pause_cancel_and_submit_but_not_read_results(
    any_server: Server, admin: redis.Redis
) -> None:
    """It is the only user in the pod, for `kubectl exec` and `helm test`. With a few more permissions, it
    also reads results."""
    url = url_of(any_server, "dispatcher")
    queue_admin, client = RedisQueueAdmin(connect(url), QWEN), BatchClient(url, pool="qwen")
    await queue_admin.pause("me", "why")
    await queue_admin.resume()
    assert await queue_admin.read_pause() is None
    handle = await client.enqueue(b'{"prompt": "hi"}')
    assert await queue_admin.cancel_request(handle.id)
    with pytest.raises(QueueUnreachableError, match="does not permit"):
        await client.result(handle, timeout=5)
    with pytest.raises(CallRefusedError, match="lrange"):
        await queue_admin.read_results(QWEN.result_list_for_id(handle.id), 9)
    grant(admin, "dispatcher", "+lrange", "+rpop", "+ttl", "+blmove")
    assert await queue_admin.read_results(QWEN.result_list_for_id(handle.id), 9) == []
    with pytest.raises(NoResultError):
        await client.result(handle, timeout=2.5)
    await queue_admin.aclose()
    await client.aclose()


async def test_consumer_role_can_only_pop_results(any_server: Server, admin: redis.Redis) -> None:
    admin.lpush(QWEN.result_list, b"one")
    with any_server.client(username="consumer", password="its-password") as consumer:
        with expect_all_commands_used(admin, "consumer"):
            assert consumer.brpop([QWEN.result_list], 5) == (QWEN.result_list.encode(), b"one")
        for forbidden in (
            lambda: consumer.lpush(QWEN.result_list, b"forged"),
            lambda: consumer.zrange(QWEN.queue, 0, -1),
            lambda: consumer.get("request-active:r-1"),
        ):
            with pytest.raises(NoPermissionError):
                forbidden()


async def test_result_list_without_permission_is_rejected_for_its_request_only(
    any_server: Server, admin: redis.Redis
) -> None:
    """The list may belong to another program or pool. Only that request is rejected, whatever the settings
    allow."""
    others = ["celery", "batch:{other}:results", "batch:{other}:elsewhere"]
    admin.lpush("celery", "a task")
    anywhere = QueueNames(QWEN.queue, QWEN.result_list, ("*",))
    async with (
        queues(any_server.url, "p", names=QWEN) as (producer,),
        dispatcher(any_server, names=anywhere) as queue,
    ):
        await producer.submit([submission(f"r-{at}", NEVER + at) for at in range(4)])
        leases = (await claim(queue)).leases
        lists = [*others, "batch-results:alice:1"]
        assert list(await queue.find_invalid_result_lists(lists)) == others, (
            "known before the request is sent"
        )
        said = await queue.settle([answer(lease, name) for lease, name in zip(leases, lists, strict=True)])
    assert said == [SettleStatus.BAD_LIST] * 3 + [SettleStatus.DONE]
    assert pop_result_ids(admin) == ["r-0", "r-1", "r-2"]
    assert admin.llen("batch-results:alice:1") == 1
    assert admin.lrange("celery", 0, -1) == [b"a task"]
    assert admin.ttl("celery") == -1
    assert not admin.exists(*others[1:])


# Missing permissions.


async def test_missing_command_is_named_and_no_request_is_lost_or_answered_twice(
    any_server: Server, admin: redis.Redis
) -> None:
    """The permission is removed during the work, and then restored."""
    outside = {"eval", "evalsha", "ping", "subscribe"}
    for command in sorted(commands("dispatcher") - outside) + sorted(outside - {"ping"}):
        sentences = await run_without_permissions(any_server, admin, f"-{command}")
        assert any(re.search(rf"\b{command}\b", sentence) for sentence in sentences), (command, sentences)
        assert not [sentence for sentence in sentences if " on @" in sentence], "location inside a script"


@pytest.mark.parametrize("key", ["~request-cancel:*", "~batch:{qwen}:requests:*", "~batch:{qwen}:results"])
async def test_missing_key_permission_loses_and_duplicates_no_request(
    any_server: Server, admin: redis.Redis, key: str
) -> None:
    user: Any = admin.acl_getuser("dispatcher")
    rules = user["keys"]
    kept = [each if isinstance(each, str) else each.decode() for each in rules]
    assert key in kept
    assert await run_without_permissions(
        any_server, admin, "resetkeys", *(each for each in kept if each != key)
    )


async def run_without_permissions(any_server: Server, admin: redis.Redis, *rules: str) -> list[str]:
    """Remove permissions of a working dispatcher, let it try each step, and restore them. Return its error
    messages."""
    admin.flushdb()
    admin.script_flush()
    said: list[str] = []

    def hear(event: Event, fields: Any) -> None:
        said.extend([fields["why"]] if event is Event.WAKE_UPS_UNAVAILABLE else [])

    async def try_to(act: Callable[[], Awaitable[object]]) -> None:
        try:
            await act()
        except QueueUnavailableError as error:
            said.append(str(error))

    async with (
        queues(any_server.url, "p", names=QWEN) as (producer,),
        dispatcher(any_server, owner_timeout_s=20) as queue,
    ):
        await producer.submit([submission(f"r-{at}", NEVER + at, token="t") for at in range(5)])
        await producer.submit([submission("late", PAST, token="t")])
        await queue.sweep()
        late, first, second, third, fourth = (await claim(queue, 5)).leases
        await queue.move_to_dead_letters([DeadLetter(answer(late, token="t"), "why")])
        grant(admin, "dispatcher", *rules)
        taken: list[Lease] = []

        async def take() -> None:
            taken.extend((await claim(queue)).leases)

        async def listen() -> None:
            with divert_events(hear):
                waiting = asyncio.create_task(queue.wait_for_work())
            if rules == ("-subscribe",):
                await wait_until(lambda: said)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

        for act in (
            take,
            lambda: queue.check_cancelled([("r-1", "t")]),
            lambda: queue.renew([second]),
            lambda: queue.settle([answer(first, token="t")]),
            lambda: queue.settle([answer(first, token="t")]),
            lambda: queue.move_to_dead_letters([DeadLetter(answer(third, token="t"), "why")]),
            lambda: queue.release([Release(fourth, delay_s=0.001)]),
            lambda: queue.find_overdue(10),
            lambda: queue.take_snapshot(),
            lambda: queue.list_newest_dead(5),
            lambda: queue.read_pause(),
            lambda: queue.sweep(),
            listen,
        ):
            await try_to(act)
        grant(admin, "dispatcher")
        ours = [answer(lease, token="t") for lease in (first, second, third, fourth, *taken)]
        await queue.settle(ours)
        await wait_until(lambda: have_all_ended(queue), what="every request to end")
    assert pop_result_ids(admin) == ["late", *(f"r-{at}" for at in range(5))], rules
    return said


async def have_all_ended(queue: RedisQueue) -> bool:
    await queue.sweep()
    await queue.settle([answer(lease, token="t") for lease in (await claim(queue)).leases])
    counts = await queue.count_requests()
    return counts.pending + counts.leased + counts.delayed == 0


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (["-hdel", "-getrange", "-time"], "+getrange, +hdel, +time"),
        (
            ["resetkeys", "~batch:{qwen}:requests*"],
            "~batch:{qwen}:results, ~request-active:*, ~request-cancel:*",
        ),
        (["resetkeys", "~batch:{qwen}:re*", "~request-*", "-get"], "+get"),
        (["-eval"], "eval"),
        (["-ping", "-evalsha"], "+evalsha, +ping"),
    ],
)
async def test_check_names_all_missing_permissions_at_once(
    any_server: Server, admin: redis.Redis, rules: list[str], sentence: str
) -> None:
    grant(admin, "dispatcher", *rules)
    before = admin.dbsize()
    with pytest.raises(QueueUnavailableError, match=re.escape(sentence)):
        await inspect_server(url_of(any_server, "dispatcher"), QWEN)
    assert admin.dbsize() == before == 0


async def test_check_warns_about_a_missing_channel_permission(any_server: Server, admin: redis.Redis) -> None:
    grant(admin, "dispatcher", "resetchannels")
    assert not (await inspect_server(url_of(any_server, "dispatcher"), QWEN)).can_subscribe
