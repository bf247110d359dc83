"""Unexpected replies never end a process, and a value that cannot be written delays no other."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from dispatcher.cli.run import _loop_factory
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import DeadLetter, Lease, Release, SettleStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import QueueUrlError, connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.queue.redis.wake_ups import WakeUpListener
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import Rejection, parse_member
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.queue.factories import (
    NAMES,
    STARTED,
    InstantGateway,
    OwnerAndAdmin,
    answer,
    claim,
    claim_started,
    member,
    permit,
    queues,
    start_requests,
    submission,
)
from tests.queue.faulty_relay import Relay, relay
from tests.queue.key_checks import assert_drained
from tests.queue.servers import ENGINE_PARAMS, Server, server
from tests.support import wait_until

CLOSED = "unable to perform operation on <TCPTransport closed=True reading=False 0x5>; the handler is closed"
"""What uvloop says of a connection that broke while redis-py wrote its first words to it."""


@pytest.fixture
async def relayed_server(any_server: Server, client: object) -> AsyncIterator[Relay]:
    async with relay(any_server) as made:
        yield made


# Unexpected exceptions.


@pytest.mark.parametrize(
    "error",
    [
        *(redis.ResponseError("ERR unexpected"), redis.ResponseError(""), redis.InvalidResponse("?")),
        *(redis.exceptions.ModuleError("ERR x"), redis.DataError("x"), redis.exceptions.ExecAbortError("x")),
        *(RuntimeError(CLOSED), ValueError("invalid literal"), IndexError(), AttributeError("None")),
        *(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), EOFError(), AssertionError()),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_every_exception_of_a_call_is_explained(error: Exception) -> None:
    async def fails() -> None:
        raise error

    scripts = ScriptRunner(connect("redis://127.0.0.1:1"))
    with pytest.raises(QueueUnavailableError, match="Redis"):
        await scripts.call_with_retries(fails)


async def test_error_that_repeats_its_arguments_is_shortened() -> None:
    async def fails() -> None:
        raise redis.ResponseError("ERR unknown command, with args beginning with: " + "x" * 10**6)

    with pytest.raises(QueueUnavailableError) as caught:
        await ScriptRunner(connect("redis://127.0.0.1:1")).call_with_retries(fails)
    assert len(str(caught.value)) < 500


class BrokenSubscriptionClient:
    """Client whose subscriptions break like a transport that has just closed."""

    def __init__(self, client: Any) -> None:
        self.exists, self.broke = client.exists, 0

    def pubsub(self) -> Any:
        return self

    async def _break(self, *_: Any, **__: Any) -> Any:
        self.broke += 1
        raise RuntimeError(CLOSED)

    subscribe = get_message = aclose = _break


async def test_broken_subscription_falls_back_to_polling(any_server: Server, client: Any) -> None:
    breaks = BrokenSubscriptionClient(client)
    scripts = ScriptRunner(client)
    scripts.client = breaks
    wake_ups = WakeUpListener(scripts, NAMES, 0.01)
    await client.zadd(NAMES.queue, {member(): 1})
    heard: list[Event] = []
    with divert_events(lambda event, _: heard.append(event)):
        await asyncio.wait_for(wake_ups.wait_for_wake_up(), 5)
        wake_ups._subscription = breaks  # type: ignore[assignment]
        await asyncio.wait_for(wake_ups.wait_for_wake_up(), 5)
        await wake_ups.aclose()
    assert heard == [Event.WAKE_UPS_UNAVAILABLE]
    assert breaks.broke >= 3


async def break_connections(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept a connection and reset it, at a different moment for each connection."""
    delay_s = next(_delays)
    if delay_s:
        await asyncio.sleep(delay_s)
    writer.transport.abort()


_delays = itertools.cycle((0.0, 0.0001, 0.0003, 0.0005, 0.001))


def test_connections_that_break_while_they_open_end_no_task() -> None:
    """This uses the event loop of `run`, whose closed transports raise other errors than OSError."""

    async def run_claims() -> None:
        listening = await asyncio.start_server(break_connections, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        for url in (f"redis://127.0.0.1:{port}", f"redis+cluster://127.0.0.1:{port}"):
            queue = OwnerAndAdmin(connect(url), NAMES, "a", poll_s=0.001)
            for _ in range(3):
                for call in (queue.sweep(), queue.check_cancelled([("r-1", "t")]), queue.wait_for_work()):
                    with pytest.raises(QueueUnavailableError):
                        await call
            await queue.aclose()
        listening.close()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_claims())


ODD = {
    "error": b"-ERR unexpected\r\n",
    "error without words": b"-\r\n",
    "status": b"+OK\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "nothing at all": b"*-1\r\n",
    "text": b"$3\r\nodd\r\n",
    "empty": b"*0\r\n",
    "list": b"*3\r\n" + b"$1\r\nx\r\n" * 3,
    "nested": b"*3\r\n*14\r\n" + b"$1\r\nx\r\n" * 14 + b":0\r\n*2\r\n:1\r\n:2\r\n",
    "errors inside": b"*7\r\n" + b"-ERR unexpected\r\n" * 7,
    "no Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "bytes": b"\x00\xff\xfe\r\n",
    "half": b"*3\r\n$10\r\nab",
    "a length that is none": b"$x\r\n",
    "closed": b"",
}


async def test_unexpected_replies_never_end_the_dispatcher(
    tmp_path: Path,
) -> None:
    """Each unexpected reply answers every command during the work of a dispatcher with its own queue."""
    some = asyncio.Semaphore(5)  # more of them delay each other on one event loop
    with server("redis", tmp_path) as running:
        async with asyncio.TaskGroup() as scenes:
            for number, (bad_reply, said) in enumerate(ODD.items()):
                names = QueueNames(f"batch:{{{number}}}:requests", f"batch:{{{number}}}:results")
                scenes.create_task(survives(running, names, bad_reply, said, some))


async def survives(
    running: Server, names: QueueNames, bad_reply: str, said: bytes, some: asyncio.Semaphore
) -> None:
    async with (
        some,
        relay(running) as relayed_server,
        queues(relayed_server.url, "a", names=names, attempt_timeout_s=1.0) as (queue,),
    ):
        gateway, heard = InstantGateway(), list[Event]()

        def submit(name: str) -> None:
            with running.client() as client:
                client.zadd(names.queue, {member(name): 1})

        limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
        now = asyncio.get_running_loop().time()
        limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 10), now)
        dispatcher = Dispatcher(queue, gateway, limiter, Options(RetryPolicy()), Journal(Metrics()))
        with divert_events(lambda event, _: heard.append(event)):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(dispatcher.run())
                submit("r-1")
                await wait_until(lambda: gateway.sent, 20, what=f"work before {bad_reply}")
                relayed_server.says, before = said, len(heard)
                submit("r-2")
                await wait_until(lambda: dispatcher.view.problem, 20, what=f"{bad_reply} to be noticed")
                await wait_until(
                    lambda: relayed_server.answered >= 12, 20, what=f"{bad_reply} to be heard often"
                )
                assert dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
                # Twice if a call that was under way still succeeded.
                reply = heard[before:]
                assert reply.count(Event.QUEUE_UNREACHABLE) <= 2, f"{bad_reply} is reported once: {reply}"
                assert reply.count(Event.INTERNAL_ERROR) <= 2
                relayed_server.says = None
                await wait_until(lambda: len(gateway.sent) == 2, 20, what=f"work after {bad_reply}")
                dispatcher.drain(5.0)
    with running.client() as client:
        assert client.llen(names.result_list) == 2
        assert not client.exists(*names.claimable_keys, f"{names.queue_prefix}:leases")


# Values that are too large for the server or for the connection.

MEGABYTE = 2**20
asyncio_closes_lost_connections = pytest.mark.skipif(
    (3, 13) <= sys.version_info < (3, 13, 8),
    reason="after a write to a lost connection, asyncio may not connect again (python/cpython#136234)",
)
"""Mark of tests in which the server closes a connection while a large value is written."""


@pytest.fixture(scope="module", params=ENGINE_PARAMS)
def small_value_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Yield a server that rejects values above a megabyte, as some hosted servers do."""
    home: Path = tmp_path_factory.mktemp(f"narrow-{request.param}")
    with server(request.param, home, "--proto-max-bulk-len", "1mb") as running:
        yield running


async def claim_all(queue: OwnerAndAdmin, count: int) -> list[Lease]:
    await queue.submit([submission(f"r-{number}") for number in range(count)])
    return list((await claim(queue)).leases)


async def pop_codes(client: redis.asyncio.Redis, name: str) -> dict[str, str | None]:
    found = [msgspec.json.decode(one) for one in await client.lrange(name, 0, -1)]
    return {one["id"]: one.get("error_code") for one in found}


@asyncio_closes_lost_connections
@pytest.mark.parametrize("is_dead", [False, True], ids=["settled", "dead-lettered"])
async def test_result_too_large_for_the_server_affects_only_its_request(
    small_value_server: Server, is_dead: bool
) -> None:
    with small_value_server.client() as blocking:
        blocking.flushall()
    client = redis.asyncio.Redis(port=small_value_server.port, protocol=2)
    async with queues(small_value_server.url, "a") as (queue,):
        first, second, third = await claim_all(queue, 3)
        large = "x" * 2 * MEGABYTE
        given = [answer(first), answer(second, "elsewhere", text=large), answer(third, text=large)]

        async def hand_in(some: list[Any]) -> Any:
            if is_dead:
                return await queue.move_to_dead_letters([DeadLetter(each, "why") for each in some])
            return await queue.settle(some)

        assert await hand_in(given) == [SettleStatus.DONE, None, None]
        assert (await queue.count_requests()).leased == 2
        assert await hand_in(given[1:]) == [SettleStatus.TOO_LARGE] * 2
        assert await pop_codes(client, NAMES.result_list) == {"r-0": None, "r-2": "TOO_LARGE"}
        assert await pop_codes(client, "elsewhere") == {"r-1": "TOO_LARGE"}
        counts = await queue.count_requests()
        assert (counts.leased, counts.dead) == (0, 3 if is_dead else 0)
        assert not queue._result_writer._maybe_too_large
        if not is_dead:
            await assert_drained(client, NAMES, "elsewhere")
    await client.aclose()


async def test_large_result_gets_a_longer_timeout(relayed_server: Relay, client: redis.asyncio.Redis) -> None:
    """The transfer takes 1.5 s, and the timeout of a call is 1 s."""
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        leases = await claim_all(queue, 3)
        relayed_server.bytes_per_s = 1.3e6
        given = [
            answer(lease, text="x" * size) for lease, size in zip(leases, (2_000_000, 9, 9), strict=True)
        ]
        assert await queue.settle(given) == [SettleStatus.DONE] * 3
        assert [
            each["id"] for each in map(msgspec.json.decode, await client.lrange(NAMES.result_list, 0, -1))
        ] == [
            "r-0",
            "r-2",
            "r-1",
        ], "the large one last"


async def test_result_that_cannot_be_transferred_ends_as_too_large(
    relayed_server: Relay, client: redis.asyncio.Redis
) -> None:
    """The relay swallows the result: no answer and no error."""
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        leases = await claim_all(queue, 4)
        relayed_server.swallows = 65_536
        given = [answer(leases[0], text="x" * 300_000), *map(answer, leases[1:])]
        assert await queue.settle(given) == [None, *[SettleStatus.DONE] * 3]
        assert await queue.settle(given[:1]) == [SettleStatus.TOO_LARGE]
        assert await pop_codes(client, NAMES.result_list) == {
            "r-0": "TOO_LARGE",
            "r-1": None,
            "r-2": None,
            "r-3": None,
        }


def submit_large(size: int, deadline: int | None = None) -> bytes:
    return member("large", deadline).replace(b'"hi"', b'"' + b"x" * size + b'"')


async def test_large_member_gets_a_longer_timeout(relayed_server: Relay, client: redis.asyncio.Redis) -> None:
    large, late = submit_large(4_000_000), submit_large(4_000_001, 1000)
    await client.zadd(NAMES.queue, {late: 1000, large: 2**31, member("small"): 2**31 + 1})
    async with queues(relayed_server.url, "a", attempt_timeout_s=2.5) as (queue,):
        relayed_server.bytes_per_s = 1.4e6
        assert [item.member for item in await find_overdue_request(queue)] == [late]
        assert [lease.member for lease in (await claim(queue)).leases] == [late]
        assert [lease.member for lease in (await claim(queue)).leases] == [large]
        assert [b"small" in lease.member for lease in (await claim(queue)).leases] == [True]


async def find_overdue_request(queue: RedisQueue) -> list[Any]:
    for _ in range(20):
        if found := await queue.find_overdue(10):
            return list(found)
    return []


async def test_larger_overdue_member_that_takes_the_place_of_another_is_found_later(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    """A search asks for a large member with a second call. Meanwhile the member can be claimed."""
    first, larger = submit_large(1_100_000, 1000), submit_large(1_200_000, 1000)
    await client.zadd(NAMES.queue, {first: 1000})
    async with queues(any_server.url, "a") as (queue,):
        run_script = queue.backend.run_script

        async def run_late(name: str, *arguments: Any, **options: Any) -> Any:
            if name == "find_overdue" and options["size_bytes"] and await client.zrem(NAMES.queue, first):
                await client.zadd(NAMES.queue, {larger: 1000})
            return await run_script(name, *arguments, **options)

        queue.backend.run_script = run_late  # type: ignore[method-assign, assignment]
        assert [item.member for item in await find_overdue_request(queue)] == [larger]


async def test_member_that_cannot_be_transferred_ends_as_too_large(
    relayed_server: Relay, client: redis.asyncio.Redis
) -> None:
    """It is leased, so that no other owner claims it, and its beginning names its result list."""
    await client.zadd(NAMES.queue, {submit_large(1_100_000): 1, member("small"): 2})
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        relayed_server.mute = 65_536
        for _ in range(2):
            with pytest.raises(QueueUnavailableError, match="in time"):
                await queue.claim(10, "nonce", permit())
        (lease,) = (await queue.claim(10, "nonce", permit())).leases
        reply = parse_member(lease.member)
        assert isinstance(reply, Rejection)
        assert (reply.code, reply.id) == ("TOO_LARGE", "large")
        head = await client.hget(f"{NAMES.queue_prefix}:members", str(lease.entry_id))
        assert head is not None
        assert len(head) < 20_000
        assert len((await claim(queue)).leases) == 1
        assert not queue._failed_transfers


async def test_member_that_is_too_long_is_not_transferred(
    relayed_server: Relay, client: redis.asyncio.Redis
) -> None:
    """Redis keeps only its beginning."""
    await client.zadd(NAMES.queue, {submit_large(3_000_000, 1000): 1000, member("small"): 2**31})
    async with queues(relayed_server.url, "a", max_payload_bytes=1_000_000) as (queue,):
        relayed_server.mute = 65_536  # a large transfer would be noticed
        assert await find_overdue_request(queue) == []
        first, second = (*(await claim(queue)).leases, *(await claim(queue)).leases)
        reply = parse_member(first.member)
        assert isinstance(reply, Rejection)
        assert (reply.code, reply.id) == ("TOO_LARGE", "large")
        assert b"small" in second.member
        used = await client.memory_usage(f"{NAMES.queue_prefix}:members")
        assert used is not None
        assert used < 50_000


async def test_no_result_counts_as_too_large_while_the_server_is_unreachable(
    relayed_server: Relay, client: redis.asyncio.Redis
) -> None:
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        (lease,) = await claim_all(queue, 1)
        given = [answer(lease, text="x" * 300_000)]
        for relayed_server.says in (b"", b"-ERR unexpected\r\n"):
            for _ in range(3):
                with pytest.raises(QueueUnavailableError):
                    await queue.settle(given)
        relayed_server.says = None
        assert await queue.settle(given) == [SettleStatus.DONE]
        assert await pop_codes(client, NAMES.result_list) == {"r-0": None}


# Options of a URL.


@pytest.mark.parametrize("kind", ["redis://h", "redis+sentinel://h/mymaster", "redis+cluster://h"])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("foo=bar", "foo is not an option"),
        ("socket_timeout=soon", "(?i)invalid value for '?socket_timeout"),
    ],
)
def test_unknown_url_option_is_rejected_before_the_first_call(kind: str, option: str, says: str) -> None:
    with pytest.raises(QueueUrlError, match=says):
        connect(f"{kind}?{option}")


def test_number_in_a_url_is_parsed_alike_for_every_scheme() -> None:
    assert connect("redis+cluster://h?socket_timeout=5").connection_kwargs["socket_timeout"] == 5.0  # type: ignore[union-attr]


@pytest.mark.parametrize("url", ["redis://:s3cret/x@h", "redis://:s3cret#@h:6379", "redis://u:s3cret?@h:1"])
def test_password_that_breaks_its_url_is_not_shown(url: str) -> None:
    with pytest.raises(QueueUrlError) as caught:
        connect(url)
    assert "s3cret" not in str(caught.value)


def test_scripts_are_read_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without free file descriptors must be able to run a script for the first time."""
    from dispatcher.queue.lua_files import TEXTS
    from dispatcher.queue.redis.lua_scripts import load_script

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    assert len(TEXTS) > 50
    for name in TEXTS:
        assert load_script(name).text


@asyncio_closes_lost_connections
async def test_progress_that_the_server_does_not_take_is_left_out(small_value_server: Server) -> None:
    with small_value_server.client() as blocking:
        blocking.flushall()
    async with queues(small_value_server.url, "a") as (queue,):
        await start_requests(queue, "r-1", "r-2", "r-3")
        first, second, third = await claim_started(queue)
        large = b"x" * (2 * MEGABYTE)
        releases = [
            Release(first, progress=b"small"),
            Release(second, progress=large, is_failed_attempt=True),
            Release(third, is_failed_attempt=True),
        ]
        assert await queue.release(releases) == [SettleStatus.DONE] * 3
        found = [(lease.progress, lease.failed_attempts) for lease in await claim_started(queue)]
        assert found == [(b"small", 0), (b"part 1", 1), (b"part 1", 1)]


async def test_large_progress_gets_a_longer_timeout(relayed_server: Relay) -> None:
    """The transfer takes 1.5 s, and the timeout of a call is 1 s."""
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        await queue.submit([submission("r-1")])
        (lease,) = await claim_started(queue)
        relayed_server.bytes_per_s = 1.3e6
        progress = b"x" * 2_000_000
        assert await queue.release([Release(lease, progress=progress)]) == [SettleStatus.DONE]
        (lease,) = await claim_started(queue)
        assert lease.progress == progress


async def test_request_whose_progress_cannot_be_transferred_starts_again(relayed_server: Relay) -> None:
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        await start_requests(queue, "r-1", progress=b"x" * 1_100_000)
        relayed_server.mute = 65_536
        for _ in range(2):
            with pytest.raises(QueueUnavailableError, match="in time"):
                await queue.claim(10, "nonce", permit(), max_per_lane=STARTED)
        (lease,) = (await queue.claim(10, "nonce", permit(), max_per_lane=STARTED)).leases
        assert (lease.progress, b"r-1" in lease.member) == (b"", True)
        assert not queue._failed_transfers
