"""Whatever a server answers: no reply ends a process, and what cannot be written holds up nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from dispatcher.cli.run import _loop_factory
from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import Rejection, parse_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.ports import DeadLetter, Lease, QueueUnavailableError, SettleStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import QueueUrlError, connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.queue.redis.wake_ups import WakeUpListener
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.queue.known import assert_drained
from tests.queue.made import NAMES, Answers, OwnerAndDesk, answer, claim, member, permit, queues, submission
from tests.queue.relay import Relay, relay
from tests.queue.servers import ENGINES, Server, server
from tests.support import wait_until

CLOSED = "unable to perform operation on <TCPTransport closed=True reading=False 0x5>; the handler is closed"
"""What uvloop says of a connection that broke while redis-py wrote its first words to it."""


@pytest.fixture
async def way(any_server: Server, client: object) -> AsyncIterator[Relay]:
    async with relay(any_server) as made:
        yield made


# What nobody foresaw.


@pytest.mark.parametrize(
    "error",
    [
        *(redis.ResponseError("ERR odd"), redis.ResponseError(""), redis.InvalidResponse("?")),
        *(redis.exceptions.ModuleError("ERR x"), redis.DataError("x"), redis.exceptions.ExecAbortError("x")),
        *(RuntimeError(CLOSED), ValueError("invalid literal"), IndexError(), AttributeError("None")),
        *(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), EOFError(), AssertionError()),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_a_call_raises_is_a_sentence(error: Exception) -> None:
    async def fails() -> None:
        raise error

    scripts = ScriptRunner(connect("redis://127.0.0.1:1"))
    with pytest.raises(QueueUnavailableError, match="Redis"):
        await scripts.call_with_retries(fails)


async def test_a_reply_that_repeats_what_it_was_sent_is_cut_short() -> None:
    async def fails() -> None:
        raise redis.ResponseError("ERR unknown command, with args beginning with: " + "x" * 10**6)

    with pytest.raises(QueueUnavailableError) as caught:
        await ScriptRunner(connect("redis://127.0.0.1:1")).call_with_retries(fails)
    assert len(str(caught.value)) < 500


class Breaks:
    """A client whose subscriptions break as a transport does that has just closed."""

    def __init__(self, client: Any) -> None:
        self.exists, self.broke = client.exists, 0

    def pubsub(self) -> Any:
        return self

    async def _break(self, *_: Any, **__: Any) -> Any:
        self.broke += 1
        raise RuntimeError(CLOSED)

    subscribe = get_message = aclose = _break


async def test_a_subscription_that_breaks_in_any_way_leaves_the_looking(
    any_server: Server, client: Any
) -> None:
    breaks = Breaks(client)
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


async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts, and resets at a moment that differs from one connection to the next."""
    delay_s = next(_delays)
    if delay_s:
        await asyncio.sleep(delay_s)
    writer.transport.abort()


_delays = itertools.cycle((0.0, 0.0001, 0.0003, 0.0005, 0.001))


def test_connections_that_break_as_they_are_made_end_nothing() -> None:
    """On the loop that `run` uses, where a transport that has closed raises what is no OSError."""

    async def scene() -> None:
        listening = await asyncio.start_server(breaking, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        for url in (f"redis://127.0.0.1:{port}", f"redis+cluster://127.0.0.1:{port}"):
            queue = OwnerAndDesk(connect(url), NAMES, "a", poll_s=0.001)
            for _ in range(3):
                for call in (queue.sweep(), queue.check_cancelled([("r-1", "t")]), queue.wait_for_work()):
                    with pytest.raises(QueueUnavailableError):
                        await call
            await queue.aclose()
        listening.close()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(scene())


ODD = {
    "error": b"-ERR odd\r\n",
    "error without words": b"-\r\n",
    "status": b"+OK\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "nothing at all": b"*-1\r\n",
    "text": b"$3\r\nodd\r\n",
    "empty": b"*0\r\n",
    "list": b"*3\r\n" + b"$1\r\nx\r\n" * 3,
    "nested": b"*3\r\n*14\r\n" + b"$1\r\nx\r\n" * 14 + b":0\r\n*2\r\n:1\r\n:2\r\n",
    "errors inside": b"*7\r\n" + b"-ERR odd\r\n" * 7,
    "no Redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "bytes": b"\x00\xff\xfe\r\n",
    "half": b"*3\r\n$10\r\nab",
    "a length that is none": b"$x\r\n",
    "closed": b"",
}


async def test_no_reply_ends_the_dispatcher_and_it_works_on_when_they_are_good_again(
    tmp_path: Path,
) -> None:
    """Each odd answer to everything, in the middle of the work; to a dispatcher with a queue of its own."""
    some = asyncio.Semaphore(5)  # more of them stand in each other's way on one event loop
    with server("redis", tmp_path) as running:
        async with asyncio.TaskGroup() as scenes:
            for number, (odd, said) in enumerate(ODD.items()):
                names = QueueNames(f"batch:{{{number}}}:requests", f"batch:{{{number}}}:results")
                scenes.create_task(bears(running, names, odd, said, some))


async def bears(running: Server, names: QueueNames, odd: str, said: bytes, some: asyncio.Semaphore) -> None:
    async with (
        some,
        relay(running) as way,
        queues(way.url, "a", names=names, attempt_timeout_s=1.0) as (queue,),
    ):
        gateway, heard = Answers(), list[Event]()

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
                await wait_until(lambda: gateway.sent, 20, what=f"work before {odd}")
                way.says, before = said, len(heard)
                submit("r-2")
                await wait_until(lambda: dispatcher.view.problem, 20, what=f"{odd} to be noticed")
                await wait_until(lambda: way.answered >= 12, 20, what=f"{odd} to be heard often")
                assert dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
                # Twice where a call that was under way still went through.
                told = heard[before:]
                assert told.count(Event.QUEUE_UNREACHABLE) <= 2, f"{odd} is told once: {told}"
                assert told.count(Event.INTERNAL_ERROR) <= 2
                way.says = None
                await wait_until(lambda: len(gateway.sent) == 2, 20, what=f"work after {odd}")
                dispatcher.drain(5.0)
    with running.client() as client:
        assert client.llen(names.result_list) == 2
        assert not client.exists(*names.claimable_keys, f"{names.queue_prefix}:leases")


# What is too large for the server, or for the way to it.

MEGABYTE = 2**20


@pytest.fixture(scope="module", params=ENGINES)
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes no value above a megabyte, as some of those do that one can rent."""
    home: Path = tmp_path_factory.mktemp(f"narrow-{request.param}")
    with server(request.param, home, "--proto-max-bulk-len", "1mb") as running:
        yield running


async def leased(queue: OwnerAndDesk, count: int) -> list[Lease]:
    await queue.submit([submission(f"r-{number}") for number in range(count)])
    return list((await claim(queue)).leases)


async def codes(client: redis.asyncio.Redis, name: str) -> dict[str, str | None]:
    found = [msgspec.json.decode(one) for one in await client.lrange(name, 0, -1)]
    return {one["id"]: one.get("error_code") for one in found}


@pytest.mark.parametrize("bury", [False, True], ids=["settled", "buried"])
async def test_a_result_too_large_for_the_server_costs_that_request_alone(narrow: Server, bury: bool) -> None:
    with narrow.client() as blocking:
        blocking.flushall()
    client = redis.asyncio.Redis(port=narrow.port, protocol=2)
    async with queues(narrow.url, "a") as (queue,):
        first, second, third = await leased(queue, 3)
        large = "x" * 2 * MEGABYTE
        given = [answer(first), answer(second, "elsewhere", text=large), answer(third, text=large)]

        async def hand_in(some: list[Any]) -> Any:
            if bury:
                return await queue.move_to_dead_letters([DeadLetter(each, "why") for each in some])
            return await queue.settle(some)

        assert await hand_in(given) == [SettleStatus.DONE, None, None]
        assert (await queue.count_requests()).leased == 2
        assert await hand_in(given[1:]) == [SettleStatus.TOO_LARGE] * 2
        assert await codes(client, NAMES.result_list) == {"r-0": None, "r-2": "TOO_LARGE"}
        assert await codes(client, "elsewhere") == {"r-1": "TOO_LARGE"}
        counts = await queue.count_requests()
        assert (counts.leased, counts.dead) == (0, 3 if bury else 0)
        assert not queue._result_writer._maybe_too_large
        if not bury:
            await assert_drained(client, NAMES, "elsewhere")
    await client.aclose()


async def test_a_large_result_gets_the_time_that_it_takes(way: Relay, client: redis.asyncio.Redis) -> None:
    """It takes a second and a half, and a call may take one."""
    async with queues(way.url, "a", attempt_timeout_s=1.0) as (queue,):
        leases = await leased(queue, 3)
        way.bytes_per_s = 1.3e6
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


async def test_a_result_that_never_gets_through_holds_up_nothing_and_ends_as_too_large(
    way: Relay, client: redis.asyncio.Redis
) -> None:
    """The way swallows it: no answer, and no error."""
    async with queues(way.url, "a", attempt_timeout_s=1.0) as (queue,):
        leases = await leased(queue, 4)
        way.swallows = 65_536
        given = [answer(leases[0], text="x" * 300_000), *map(answer, leases[1:])]
        assert await queue.settle(given) == [None, *[SettleStatus.DONE] * 3]
        assert await queue.settle(given[:1]) == [SettleStatus.TOO_LARGE]
        assert await codes(client, NAMES.result_list) == {
            "r-0": "TOO_LARGE",
            "r-1": None,
            "r-2": None,
            "r-3": None,
        }


def weighing(size: int, deadline: int | None = None) -> bytes:
    return member("large", deadline).replace(b'"hi"', b'"' + b"x" * size + b'"')


async def test_a_large_member_gets_the_time_that_it_takes(way: Relay, client: redis.asyncio.Redis) -> None:
    large, late = weighing(2_000_000), weighing(2_000_001, 1000)
    await client.zadd(NAMES.queue, {late: 1000, large: 2**31, member("small"): 2**31 + 1})
    async with queues(way.url, "a", attempt_timeout_s=1.0) as (queue,):
        way.bytes_per_s = 1.3e6
        assert [item.member for item in await found_late(queue)] == [late]
        assert [lease.member for lease in (await claim(queue)).leases] == [late]
        assert [lease.member for lease in (await claim(queue)).leases] == [large]
        assert [b"small" in lease.member for lease in (await claim(queue)).leases] == [True]


async def found_late(queue: RedisQueue) -> list[Any]:
    for _ in range(20):
        if found := await queue.find_overdue(10):
            return list(found)
    return []


async def test_a_member_that_never_gets_through_ends_as_too_large(
    way: Relay, client: redis.asyncio.Redis
) -> None:
    """It is leased, so that nobody else takes it, and its head tells whom to answer."""
    await client.zadd(NAMES.queue, {weighing(1_100_000): 1, member("small"): 2})
    async with queues(way.url, "a", attempt_timeout_s=1.0) as (queue,):
        way.mute = 65_536
        for _ in range(2):
            with pytest.raises(QueueUnavailableError, match="in time"):
                await queue.claim(10, "nonce", permit())
        (lease,) = (await queue.claim(10, "nonce", permit())).leases
        told = parse_member(lease.member)
        assert isinstance(told, Rejection)
        assert (told.code, told.id) == ("TOO_LARGE", "large")
        head = await client.hget(f"{NAMES.queue_prefix}:members", str(lease.entry_id))
        assert head is not None
        assert len(head) < 20_000
        assert len((await claim(queue)).leases) == 1
        assert not queue._failed_transfers


async def test_a_member_too_long_for_any_payload_is_not_moved(
    way: Relay, client: redis.asyncio.Redis
) -> None:
    """Nor kept: Redis forgets all of it but the head."""
    await client.zadd(NAMES.queue, {weighing(3_000_000, 1000): 1000, member("small"): 2**31})
    async with queues(way.url, "a", max_payload_bytes=1_000_000) as (queue,):
        way.mute = 65_536  # whatever is large would be seen
        assert await found_late(queue) == []
        first, second = (*(await claim(queue)).leases, *(await claim(queue)).leases)
        told = parse_member(first.member)
        assert isinstance(told, Rejection)
        assert (told.code, told.id) == ("TOO_LARGE", "large")
        assert b"small" in second.member
        used = await client.memory_usage(f"{NAMES.queue_prefix}:members")
        assert used is not None
        assert used < 50_000


async def test_no_result_is_called_too_large_while_the_server_is_away(
    way: Relay, client: redis.asyncio.Redis
) -> None:
    async with queues(way.url, "a", attempt_timeout_s=1.0) as (queue,):
        (lease,) = await leased(queue, 1)
        given = [answer(lease, text="x" * 300_000)]
        for way.says in (b"", b"-ERR odd\r\n"):
            for _ in range(3):
                with pytest.raises(QueueUnavailableError):
                    await queue.settle(given)
        way.says = None
        assert await queue.settle(given) == [SettleStatus.DONE]
        assert await codes(client, NAMES.result_list) == {"r-0": None}


# What a URL may ask for.


@pytest.mark.parametrize("kind", ["redis://h", "redis+sentinel://h/mymaster", "redis+cluster://h"])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("foo=bar", "foo is not an option"),
        ("socket_timeout=soon", "(?i)invalid value for '?socket_timeout"),
    ],
)
def test_an_option_that_there_is_not_is_told_before_anything_is_asked(
    kind: str, option: str, says: str
) -> None:
    with pytest.raises(QueueUrlError, match=says):
        connect(f"{kind}?{option}")


def test_a_number_in_a_url_is_a_number_everywhere() -> None:
    assert connect("redis+cluster://h?socket_timeout=5").connection_kwargs["socket_timeout"] == 5.0  # type: ignore[union-attr]


@pytest.mark.parametrize("url", ["redis://:s3cret/x@h", "redis://:s3cret#@h:6379", "redis://u:s3cret?@h:1"])
def test_a_password_that_breaks_its_url_is_not_told(url: str) -> None:
    with pytest.raises(QueueUrlError) as caught:
        connect(url)
    assert "s3cret" not in str(caught.value)


def test_scripts_are_read_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no descriptor left when a script is first run must not fail by that."""
    from dispatcher.queue.redis import scripts

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    names = [path.stem for path in Path(str(scripts._FOLDER)).glob("*.lua")]
    assert len(names) > 15
    for name in names:
        assert scripts.build_source(name)[0]
