"""A Cluster of three nodes: one slot for the queue, an outbox for lists of other slots."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
import redis.asyncio
import redis.asyncio.cluster

from dispatcher.client import BatchClient
from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.sequences.decisions import SequenceTerms, TurnEnd, TurnGranted, TurnWaits
from dispatcher.core.sequences.turns import Turn
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.ports import (
    ClaimResult,
    Permit,
    PinRequest,
    QueueUnavailableError,
    Release,
    ReturnedRequests,
    SettleStatus,
)
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.server_report import inspect_server
from dispatcher.telemetry.metrics import Metrics
from tests.client.answering import Answering
from tests.queue.known import assert_drained
from tests.queue.made import (
    NAMES,
    Answers,
    OwnerAndDesk,
    answer,
    claim,
    claim_one,
    member,
    queues,
    submission,
)
from tests.queue.roles import PASSWORD, grant
from tests.queue.servers import ENGINES, ClusterSet, cluster_set
from tests.support import wait_until


@pytest.fixture(scope="module", params=ENGINES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSet]:
    with cluster_set(request.param, tmp_path_factory.mktemp(f"cluster-{request.param}")) as running:
        for node in running.nodes:
            with node.client() as client:
                client.config_set("cluster-require-full-coverage", "no")
        yield running


@pytest.fixture
async def client(cluster: ClusterSet) -> AsyncIterator[redis.asyncio.cluster.RedisCluster]:
    for node in cluster.nodes:
        with node.client() as blocking:
            blocking.flushall()
    found = redis.asyncio.cluster.RedisCluster.from_url(cluster.url.replace("+cluster", "").split(",")[0])
    yield found
    await found.aclose()


@pytest.fixture
async def queue(cluster: ClusterSet, client: object) -> AsyncIterator[OwnerAndDesk]:
    """It has the time that a busy machine takes to find the nodes."""
    async with queues(cluster.url, "a", attempt_timeout_s=15.0) as (one,):
        yield one


@pytest.fixture
async def impatient(cluster: ClusterSet, client: object) -> AsyncIterator[OwnerAndDesk]:
    """It waits as long as in production for a node that does not answer."""
    async with queues(cluster.url, "a") as (one,):
        yield one


def apart(cluster: ClusterSet, count: int) -> list[str]:
    """List names on other nodes than the queue's."""
    home = cluster.node_of(NAMES.queue)
    names = (f"list-{number}" for number in range(1000))
    return [name for name in names if cluster.node_of(name) is not home][:count]


async def test_a_request_goes_all_the_way_and_leaves_nothing(
    queue: OwnerAndDesk, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    (elsewhere,) = apart(cluster, 1)
    await queue.submit([submission(f"r-{number}", token="t") for number in range(4)])
    assert await queue.cancel_request("r-3")
    asked = [(f"r-{number}", "t") for number in range(4)]
    assert (
        await queue.check_cancelled(asked) == await queue.desk.check_cancelled(asked) == [False] * 3 + [True]
    )
    line = await queue.take_snapshot(1.0, 1.0)
    assert (line.pending_count, line.settled_count, len(line.first_requests)) == (4, 0, 1)
    leases = (await claim(queue)).leases
    lists = ["", elsewhere, "{pool}-list", elsewhere]
    said = await queue.settle(
        [answer(lease, name, token="t") for lease, name in zip(leases, lists, strict=True)]
    )
    assert said == [SettleStatus.DONE] * 4
    assert [await client.llen(name) for name in (NAMES.result_list, elsewhere, "{pool}-list")] == [1, 2, 1]
    assert await client.ttl(elsewhere) > 0
    await client.persist(elsewhere)
    await queue.submit([submission("r-4")])
    await queue.settle([answer(await claim_one(queue), elsewhere)])
    assert (await client.llen(elsewhere), await client.ttl(elsewhere)) == (3, -1), "somebody keeps it"
    await assert_drained(client, NAMES, elsewhere, "{pool}-list")
    assert not [key async for key in client.scan_iter("request-*")]
    marks = [
        *[key async for key in client.scan_iter("*:active:*")],
        *[key async for key in client.scan_iter("*:cancel:*")],
    ]
    assert not marks, "of finished requests"


async def test_default_list_in_another_slot(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    names = QueueNames("batch:{pool}:requests", apart(cluster, 1)[0])
    async with queues(cluster.url, "a", names=names) as (queue,):
        await queue.submit([submission("r-1")])
        assert await queue.settle([answer(await claim_one(queue))]) == [SettleStatus.DONE]
        assert await client.llen(names.result_list) == 1


async def test_list_of_the_wrong_type_in_another_slot_is_answered_on_the_default_list(
    queue: OwnerAndDesk, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    (elsewhere,) = apart(cluster, 1)
    await client.set(elsewhere, "a string", ex=60)
    await queue.submit([submission("r-1"), submission("r-2")])
    first, second = (await claim(queue)).leases
    await queue.settle([answer(first, elsewhere), answer(second)])
    results = [msgspec.json.decode(one) for one in await client.lrange(NAMES.result_list, 0, -1)]
    assert {one["id"]: one.get("error_code") for one in results} == {"r-1": "INVALID_REQUEST", "r-2": None}
    await assert_drained(client, NAMES)


@pytest.mark.parametrize("kind", ["list", "text"])
async def test_a_key_in_the_place_of_a_marker_costs_the_results_of_that_list_alone(
    queue: OwnerAndDesk, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet, kind: str
) -> None:
    """A producer may have had a result put there, for it knows the name."""
    (elsewhere,) = apart(cluster, 1)
    marker = f"{{{elsewhere}}}:posted:{NAMES.queue.replace('{', '').replace('}', '')}"
    await (client.rpush(marker, "x") if kind == "list" else client.set(marker, "x"))
    await queue.submit([submission("r-1"), submission("r-2"), submission("r-3")])
    first, second, third = (await claim(queue)).leases
    said = await queue.settle([answer(first, elsewhere), answer(second, "{other}-list"), answer(third)])
    assert said == [SettleStatus.DONE] * 3
    await queue.sweep()
    results = [msgspec.json.decode(one) for one in await client.lrange(NAMES.result_list, 0, -1)]
    assert {one["id"]: one.get("error_code") for one in results} == {"r-1": "INVALID_REQUEST", "r-3": None}
    assert await client.llen("{other}-list") == 1
    assert await client.type(marker) == (b"list" if kind == "list" else b"string")
    assert await client.ttl(marker) == -1
    assert not await client.exists(NAMES.outbox_key)


async def test_name_that_no_marker_can_join_is_refused(
    queue: OwnerAndDesk, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """`a}b` has no hash tag, and no other key can be put into its slot by name."""
    await queue.submit([submission("r-1")])
    assert await queue.settle([answer(await claim_one(queue), "a}b")]) == [SettleStatus.BAD_LIST]
    assert b"INVALID_REQUEST" in cast("bytes", await client.lindex(NAMES.result_list, 0))


async def test_carriers_that_work_and_die_at_once_double_nothing(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """Three owners carry at the same time; the removal from the outbox is lost again and again."""
    (elsewhere,) = apart(cluster, 1)
    async with queues(cluster.url, "a", "b", "c") as owners:
        await owners[0].submit([submission(f"r-{number}") for number in range(90)])
        for owner in owners:
            drop_removals(owner)

        async def work(owner: RedisQueue) -> None:
            while leases := (await claim(owner, 3)).leases:
                with suppress(QueueUnavailableError):
                    await owner.settle([answer(lease, elsewhere) for lease in leases])

        await asyncio.gather(*map(work, owners))
        await wait_until(lambda: carried(owners[0], client), 20)
    results = [msgspec.json.decode(one)["id"] for one in await client.lrange(elsewhere, 0, -1)]
    assert sorted(results) == sorted(f"r-{number}" for number in range(90))


def drop_removals(owner: RedisQueue) -> None:
    """Every other removal from the outbox fails before it is sent: a crash between push and removal."""
    act, turns = owner.backend.scripts.client.zrem, iter(range(10**6))

    async def flaky(*args: object) -> object:
        if next(turns) % 2:
            raise redis.ConnectionError("cut")
        return await act(*args)

    owner.backend.scripts.client.zrem = flaky


async def carried(owner: RedisQueue, client: redis.asyncio.cluster.RedisCluster) -> bool:
    with suppress(QueueUnavailableError):
        await owner.sweep()
    return not await client.exists(NAMES.outbox_key)


async def test_node_of_a_result_list_away_keeps_the_result_until_it_is_back(
    impatient: OwnerAndDesk, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    (elsewhere,) = apart(cluster, 1)
    away = cluster.node_of(elsewhere)
    await impatient.submit([submission("r-1"), submission("r-2")])
    leases = (await claim(impatient)).leases
    with away.frozen():
        assert await impatient.settle([answer(leases[0], elsewhere)]) == [SettleStatus.DONE]
        # Neighbours are served as ever, without waiting for that node again and again.
        started = asyncio.get_running_loop().time()
        assert await impatient.settle([answer(leases[1])]) == [SettleStatus.DONE]
        await impatient.sweep()
        assert asyncio.get_running_loop().time() - started < 0.9
        assert (await impatient.count_requests()).leased == 0
        assert await client.zcard(NAMES.outbox_key) == 1
    await wait_until(lambda: carried(impatient, client), 20)
    assert await client.llen(elsewhere) == 1


async def test_what_waits_for_a_list_that_is_away_costs_the_others_nothing(
    impatient: OwnerAndDesk, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    """They leave it to the sweep to look whether that is back, and to pass over what waits for it."""
    near, elsewhere = "{pool}-list", apart(cluster, 1)[0]
    other = next(
        name for name in apart(cluster, 50) if cluster.node_of(name) is not cluster.node_of(elsewhere)
    )
    await impatient.submit([submission(f"r-{number}") for number in range(300)])
    leases = (await claim(impatient)).leases
    reads, read = [], impatient.backend.scripts.client.zrangebyscore

    async def counted(*args: object, **options: object) -> object:
        reads.append(args)
        return await read(*args, **options)

    impatient.backend.scripts.client.zrangebyscore = counted
    with cluster.node_of(elsewhere).frozen():
        await impatient.settle([answer(lease, elsewhere) for lease in leases[:290]])
        reads.clear()
        for lease in leases[290:]:
            await impatient.settle([answer(lease, other if lease is leases[-1] else near)])
        assert len(reads) == 0
        await impatient.sweep()
        assert await client.llen(other) == 1
    await wait_until(lambda: carried(impatient, client), 20)
    assert await client.llen(elsewhere) == 290


async def test_wake_up_is_heard_across_nodes(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    async with queues(cluster.url, "a", "b", poll_s=5) as (hearing, submitting), asyncio.TaskGroup() as tasks:
        started = asyncio.get_running_loop().time()
        waiting = tasks.create_task(hearing.wait_for_work())
        await wait_until(lambda: hearing._wake_ups._subscription is not None)
        await submitting.submit([submission("r-1")])
        await waiting
        assert asyncio.get_running_loop().time() - started < 4


async def test_release_and_sweep_on_a_cluster(queue: OwnerAndDesk) -> None:
    await queue.submit([submission("r-1")])
    await queue.release([Release(await claim_one(queue), delay_s=0.01, is_failed_attempt=True)])

    async def due() -> bool:
        return (await queue.sweep()).due_count == 1

    assert await queue.get_sweep_age_s() is None
    await wait_until(due)
    assert (await claim_one(queue)).failed_attempts == 1
    assert 0 <= (await queue.get_sweep_age_s() or 0.0) < 30


async def test_a_sequence_goes_in_order_on_a_cluster(queue: OwnerAndDesk) -> None:
    """One shard has all of it."""
    await queue.submit([submission(f"r-{number}") for number in range(3)])
    leases = (await claim(queue)).leases
    turns = [(lease, Turn("s", 2 - at)) for at, lease in enumerate(leases)]
    said = (await queue.claim_turns(turns, SequenceTerms())).decisions
    assert [type(one) for one in said] == [TurnWaits, TurnWaits, TurnGranted]
    await queue.settle(
        [answer(leases[2]).copy_with(turn_end=TurnEnd(turns[2][1], has_failed=True, cause="it broke"))]
    )
    unserved = await queue.find_remaining_requests(9)
    assert [(one.error_code, one.message) for one in unserved] == [("SEQUENCE_ABORTED", "it broke")] * 2
    items = [(one.request, answer(leases[0]).copy_with(result_list="elsewhere")) for one in unserved]
    assert await queue.settle_unleased(items) == 2
    assert (await queue.count_requests()).pending == 0
    assert [one.id for one in (await queue.list_sequences(9)).sequences] == ["s"]


async def test_what_waits_for_its_model_is_recalled_cancelled_and_ended_on_a_cluster(
    queue: OwnerAndDesk,
) -> None:
    await queue.submit([submission(f"r-{number}", token="t") for number in range(3)])
    await queue.submit([submission("late", 1_700_000_000, token="t")])
    leases = (await claim(queue)).leases
    await queue.release([Release(lease, missing_model="m") for lease in leases])
    assert await queue.cancel_request("r-2", "t")
    assert (await queue.sweep()).cancelled_count == 1
    (late,) = await queue.find_overdue(9)
    assert await queue.settle_unleased([(late, answer(leases[0]))]) == 1
    assert await queue.count_waiting_by_model() == {"m": 2}
    assert await queue.return_waiting_for_models(["m"]) == ReturnedRequests(2, 0)
    assert len((await claim(queue)).leases) == 3


async def test_what_is_said_of_versions_is_shared_on_a_cluster(queue: OwnerAndDesk) -> None:
    assert await queue.take_warm_up_lock("qwen-v1", "10.0.0.1:8000")
    await queue.mark_warm("qwen-v1", "10.0.0.1:8000")
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    assert await queue.pin_versions([PinRequest("chat-7", "qwen-v1", (), 100)]) == ["qwen-v1"]
    told = await queue.refresh_warm_markers([("qwen-v1", "10.0.0.1:8000")], (), ["qwen-v1"])
    assert told == await queue.read_model_registry()
    assert (set(told.warm_markers), set(told.models_in_use)) == ({("qwen-v1", "10.0.0.1:8000")}, {"qwen-v1"})
    assert (told.labels, set(told.drained_models)) == ({("qwen", "stable"): "1"}, {"qwen-v2"})
    assert await queue.undrain_version("qwen-v2")


class Counts(RedisQueue):
    """Counts what it claims."""

    record_claim = 0

    async def claim(self, max_count: int, nonce: str, permit: Permit, **how: Any) -> ClaimResult:
        claimed = await super().claim(max_count, nonce, permit, **how)
        self.record_claim += len(claimed.leases)
        return claimed


async def test_node_of_the_markers_away_claims_nothing_until_it_is_back(
    client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    """Whether the request was cancelled cannot be known: it waits, and is not claimed again and again."""
    names = (f"r-{number}" for number in range(1000))
    home = cluster.node_of(NAMES.queue)
    name = next(one for one in names if cluster.node_of(f"request-cancel:{one}") is not home)
    gateway, queue = Answers(), Counts(connect(cluster.url), NAMES, "a", attempt_timeout_s=0.5)
    limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
    now = asyncio.get_running_loop().time()
    limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 10), now)
    dispatcher = Dispatcher(queue, gateway, limiter, Options(RetryPolicy()), Journal(Metrics()))
    await client.zadd(NAMES.queue, {member(name, token="t"): 1})
    with cluster.node_of(f"request-cancel:{name}").frozen():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            await wait_until(lambda: "markers" in (dispatcher.view.problem or ""))
            told_at = asyncio.get_running_loop().time()
            await wait_until(lambda: asyncio.get_running_loop().time() > told_at + 3, 10)
            assert "markers" in (dispatcher.view.problem or "")
            assert queue.record_claim == 1
            assert (await queue.count_requests()).pending == 1
            assert gateway.sent == []
            os.kill(cluster.node_of(f"request-cancel:{name}").pid, signal.SIGCONT)
            await wait_until(lambda: gateway.sent == [name], 10)
            dispatcher.drain(5.0)
    assert dispatcher.view.problem is None
    await queue.aclose()


async def test_the_rights_of_the_page_suffice_on_a_cluster(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """With what the page adds for one."""
    (elsewhere,) = apart(cluster, 1)
    for node in cluster.nodes:
        with node.client() as admin:
            more = ("+command", "+cluster|slots", f"~{elsewhere}", f"~{{{elsewhere}}}:posted:*")
            grant(admin, "dispatcher", *more, tag="pool")
    url = cluster.url.replace("://", f"://dispatcher:{PASSWORD}@", 1)
    try:
        async with queues(cluster.url, "p") as (producer,), queues(url, "a") as (queue,):
            await producer.submit([submission("r-1", token="t"), submission("r-2", token="t")])
            await queue.sweep()
            assert await queue.check_cancelled([("r-1", "t"), ("r-2", "t")]) == [False, False]
            first, second = (await claim(queue)).leases
            said = await queue.settle([answer(first, elsewhere, token="t"), answer(second, token="t")])
            assert said == [SettleStatus.DONE] * 2
            assert [await client.llen(name) for name in (NAMES.result_list, elsewhere)] == [1, 1]
            assert (await inspect_server(url, NAMES)).can_subscribe
            async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
                tasks.create_task(queue.wait_for_work())
                await producer.submit([submission("r-3")])
    finally:
        for node in cluster.nodes:
            with node.client() as admin:
                admin.acl_deluser("dispatcher")


async def test_a_list_that_this_user_may_not_touch_is_answered_on_the_default_list(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """In another slot, where the script that settles cannot see it."""
    forbidden, allowed = apart(cluster, 2)
    refusals = f"~{NAMES.result_list}:posted:*"
    more = ("+command", "+cluster|slots", refusals, f"~{allowed}")  # but not its marker
    for node in cluster.nodes:
        with node.client() as admin:
            grant(admin, "dispatcher", *more, tag="pool")
    url = cluster.url.replace("://", f"://dispatcher:{PASSWORD}@", 1)
    try:
        async with queues(cluster.url, "p") as (producer,), queues(url, "a") as (queue,):
            await producer.submit([submission("r-1"), submission("r-2"), submission("r-3")])
            first, second, third = (await claim(queue)).leases
            said = await queue.settle([answer(first, forbidden), answer(second, allowed), answer(third)])
            assert said == [SettleStatus.DONE] * 3
            results = [msgspec.json.decode(one) for one in await client.lrange(NAMES.result_list, 0, -1)]
            assert {one["id"]: one.get("error_code") for one in results} == {
                "r-1": "INVALID_REQUEST",
                "r-3": None,
            }
            assert await client.zcard(NAMES.outbox_key) == 1, "what the operator has forgotten is his to mend"
            for node in cluster.nodes:
                with node.client() as admin:
                    grant(admin, "dispatcher", *more, f"~{{{allowed}}}:posted:*", tag="pool")
            await wait_until(lambda: carried(queue, client), 20)
            assert await client.llen(allowed) == 1
    finally:
        for node in cluster.nodes:
            with node.client() as admin:
                admin.acl_deluser("dispatcher")


async def test_our_client_awaits_results_whose_list_is_in_another_slot(
    cluster: ClusterSet, queue: OwnerAndDesk
) -> None:
    """Alone and under a name, whose results the next client of that name finds by their ids."""
    async with Answering(queue).always():
        async with BatchClient(cluster.url, queue=NAMES.queue) as client:
            results = await asyncio.gather(*(client.submit({"n": n}) for n in range(20)))
            assert [result.json() for result in results] == [{"n": n} for n in range(20)]
        async with BatchClient(cluster.url, queue=NAMES.queue, name="nightly") as first:
            await first.enqueue({"n": 1}, id="mine")
        async with BatchClient(cluster.url, queue=NAMES.queue, name="nightly") as second:
            assert (await second.result("mine")).json() == {"n": 1}
