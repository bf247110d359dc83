"""Queue on a Cluster of three nodes: one slot for the queue, and an outbox for lists in other slots."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import cast

import msgspec
import pytest
import redis.asyncio
import redis.asyncio.cluster

from dispatcher.client import BatchClient
from dispatcher.features.models.queue.waiting import ModelWait, ReturnedRequests
from dispatcher.features.models.registry import PinRequest
from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnGranted,
    TurnWaits,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import Turn
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import Release, SettleStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import QueueOptions, RedisQueue
from dispatcher.queue.redis.server_report import inspect_server
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.metrics import Metrics
from tests.client.fake_dispatcher import FakeDispatcher
from tests.queue.factories import (
    NAMES,
    InstantGateway,
    OwnerAndAdmin,
    answer,
    claim,
    claim_one,
    member,
    queues,
    submission,
)
from tests.queue.key_checks import assert_drained
from tests.queue.redis_users import PASSWORD, grant
from tests.queue.servers import ENGINE_PARAMS, ClusterSet, cluster_set
from tests.support import wait_until


@pytest.fixture(scope="module", params=ENGINE_PARAMS)
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
    # Otherwise the first call would find the nodes, which may ask one that a test has frozen.
    await found.initialize()
    yield found
    await found.aclose()


@pytest.fixture
async def queue(cluster: ClusterSet, client: object) -> AsyncIterator[OwnerAndAdmin]:
    """Yield a queue with a timeout that suffices to find the nodes on a busy machine."""
    async with queues(cluster.url, "a", attempt_timeout_s=15.0) as (one,):
        yield one


@pytest.fixture
async def queue_with_short_timeout(cluster: ClusterSet, client: object) -> AsyncIterator[OwnerAndAdmin]:
    """Yield a queue that waits as long as in production for a node that does not answer."""
    async with queues(cluster.url, "a") as (one,):
        # Without a timeout, because finding the nodes takes long on a busy machine.
        await one.backend.scripts.client.initialize()
        yield one


def find_lists_on_other_nodes(cluster: ClusterSet, count: int) -> list[str]:
    """Return names of lists on other nodes than the queue."""
    home = cluster.node_of(NAMES.queue)
    names = (f"list-{number}" for number in range(1000))
    return [name for name in names if cluster.node_of(name) is not home][:count]


async def test_request_is_served_on_a_cluster_and_leaves_no_keys(
    queue: OwnerAndAdmin, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    (elsewhere,) = find_lists_on_other_nodes(cluster, 1)
    await queue.submit([submission(f"r-{number}", token="t") for number in range(4)])
    assert await queue.cancel_request("r-3")
    asked = [(f"r-{number}", "t") for number in range(4)]
    assert (
        await queue.check_cancelled(asked)
        == await queue.queue_admin.check_cancelled(asked)
        == [False] * 3 + [True]
    )
    snapshot = await queue.take_snapshot(1.0, 1.0)
    assert (snapshot.pending_count, snapshot.settled_count, len(snapshot.first_requests)) == (4, 0, 1)
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
    assert (await client.llen(elsewhere), await client.ttl(elsewhere)) == (3, -1), (
        "the list of another program has no lifetime"
    )
    await assert_drained(client, NAMES, elsewhere, "{pool}-list")
    assert not [key async for key in client.scan_iter("request-*")]
    markers = [
        *[key async for key in client.scan_iter("*:active:*")],
        *[key async for key in client.scan_iter("*:cancel:*")],
    ]
    assert not markers, "markers of finished requests are deleted"


async def test_default_list_in_another_slot_gets_results(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    names = QueueNames("batch:{pool}:requests", find_lists_on_other_nodes(cluster, 1)[0])
    async with queues(cluster.url, "a", names=names) as (queue,):
        await queue.submit([submission("r-1")])
        assert await queue.settle([answer(await claim_one(queue))]) == [SettleStatus.DONE]
        assert await client.llen(names.result_list) == 1


async def test_list_of_the_wrong_type_in_another_slot_is_answered_on_the_default_list(
    queue: OwnerAndAdmin, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    (elsewhere,) = find_lists_on_other_nodes(cluster, 1)
    await client.set(elsewhere, "a string", ex=60)
    await queue.submit([submission("r-1"), submission("r-2")])
    first, second = (await claim(queue)).leases
    await queue.settle([answer(first, elsewhere), answer(second)])
    results = [msgspec.json.decode(one) for one in await client.lrange(NAMES.result_list, 0, -1)]
    assert {one["id"]: one.get("error_code") for one in results} == {"r-1": "INVALID_REQUEST", "r-2": None}
    await assert_drained(client, NAMES)


@pytest.mark.parametrize("kind", ["list", "text"])
async def test_foreign_key_in_place_of_a_marker_affects_only_its_list(
    queue: OwnerAndAdmin, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet, kind: str
) -> None:
    """A producer knows the name, and may have had a result written there."""
    (elsewhere,) = find_lists_on_other_nodes(cluster, 1)
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


async def test_list_name_whose_slot_no_marker_can_share_is_rejected(
    queue: OwnerAndAdmin, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """`a}b` has no hash tag, so no other name is in its slot."""
    await queue.submit([submission("r-1")])
    assert await queue.settle([answer(await claim_one(queue), "a}b")]) == [SettleStatus.BAD_LIST]
    assert b"INVALID_REQUEST" in cast("bytes", await client.lindex(NAMES.result_list, 0))


async def test_concurrent_and_crashing_deliveries_push_each_result_once(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """Three owners deliver at the same time, and the removal from the outbox fails again and again."""
    (elsewhere,) = find_lists_on_other_nodes(cluster, 1)
    async with queues(cluster.url, "a", "b", "c") as owners:
        await owners[0].submit([submission(f"r-{number}") for number in range(90)])
        for owner in owners:
            drop_removals(owner)

        async def work(owner: RedisQueue) -> None:
            while leases := (await claim(owner, 3)).leases:
                with suppress(QueueUnavailableError):
                    await owner.settle([answer(lease, elsewhere) for lease in leases])

        await asyncio.gather(*map(work, owners))
        await wait_until(lambda: is_delivered(owners[0], client), 20)
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


async def is_delivered(owner: RedisQueue, client: redis.asyncio.cluster.RedisCluster) -> bool:
    with suppress(QueueUnavailableError):
        await owner.sweep()
    return not await client.exists(NAMES.outbox_key)


async def test_result_for_an_unreachable_node_is_kept_until_the_node_is_back(
    queue_with_short_timeout: OwnerAndAdmin, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    (elsewhere,) = find_lists_on_other_nodes(cluster, 1)
    away = cluster.node_of(elsewhere)
    await queue_with_short_timeout.submit([submission("r-1"), submission("r-2")])
    leases = (await claim(queue_with_short_timeout)).leases
    clock = asyncio.get_running_loop().time
    with away.frozen():
        first_started_at = clock()
        assert await queue_with_short_timeout.settle([answer(leases[0], elsewhere)]) == [SettleStatus.DONE]
        # Results for other lists are delivered without waiting for that node again and again.
        started_at = clock()
        assert await queue_with_short_timeout.settle([answer(leases[1])]) == [SettleStatus.DONE]
        await queue_with_short_timeout.sweep()
        assert clock() - started_at < (started_at - first_started_at) / 2
        assert (await queue_with_short_timeout.count_requests()).leased == 0
        assert await client.zcard(NAMES.outbox_key) == 1
    await wait_until(lambda: is_delivered(queue_with_short_timeout, client), 20)
    assert await client.llen(elsewhere) == 1


async def test_results_for_an_unreachable_list_do_not_delay_others(
    queue_with_short_timeout: OwnerAndAdmin, client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    """Only the sweep checks whether the list is back, and skips its results."""
    near, elsewhere = "{pool}-list", find_lists_on_other_nodes(cluster, 1)[0]
    other = next(
        name
        for name in find_lists_on_other_nodes(cluster, 50)
        if cluster.node_of(name) is not cluster.node_of(elsewhere)
    )
    await queue_with_short_timeout.submit([submission(f"r-{number}") for number in range(300)])
    leases = (await claim(queue_with_short_timeout)).leases
    reads, read = [], queue_with_short_timeout.backend.scripts.client.zrangebyscore

    async def counted(*args: object, **options: object) -> object:
        reads.append(args)
        return await read(*args, **options)

    queue_with_short_timeout.backend.scripts.client.zrangebyscore = counted
    with cluster.node_of(elsewhere).frozen():
        await queue_with_short_timeout.settle([answer(lease, elsewhere) for lease in leases[:290]])
        reads.clear()
        for lease in leases[290:]:
            await queue_with_short_timeout.settle([answer(lease, other if lease is leases[-1] else near)])
        assert len(reads) == 0
        await queue_with_short_timeout.sweep()
        assert await client.llen(other) == 1
    await wait_until(lambda: is_delivered(queue_with_short_timeout, client), 20)
    assert await client.llen(elsewhere) == 290


async def test_wake_up_reaches_owners_on_other_nodes(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    async with (
        queues(cluster.url, "a", "b", poll_s=600) as (hearing, submitting),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(hearing.wait_for_work())
        await wait_until(lambda: hearing._wake_ups._subscription is not None)
        await submitting.submit([submission("r-1")])
        async with asyncio.timeout(60):
            await waiting


async def test_release_and_sweep_work_on_a_cluster(queue: OwnerAndAdmin) -> None:
    await queue.submit([submission("r-1")])
    await queue.release([Release(await claim_one(queue), delay_s=0.01, is_failed_attempt=True)])

    async def due() -> bool:
        return (await queue.sweep()).due_count == 1

    assert await queue.get_sweep_age_s() is None
    await wait_until(due)
    assert (await claim_one(queue)).failed_attempts == 1
    assert 0 <= (await queue.get_sweep_age_s() or 0.0) < 30


async def test_sequence_runs_in_order_on_a_cluster(queue: OwnerAndAdmin) -> None:
    """All keys of the sequence are on one shard."""
    await queue.submit([submission(f"r-{number}") for number in range(3)])
    leases = (await claim(queue)).leases
    turns = [(lease, Turn("s", 2 - at)) for at, lease in enumerate(leases)]
    said = (await queue.claim_turns(turns, SequenceTerms())).decisions
    assert [type(one) for one in said] == [TurnWaits, TurnWaits, TurnGranted]
    await queue.settle(
        [answer(leases[2]).copy_with(extra=TurnEnd(turns[2][1], has_failed=True, cause="it broke"))]
    )
    unserved = await queue.find_remaining_requests(9)
    assert [(one.error_code, one.message) for one in unserved] == [("SEQUENCE_ABORTED", "it broke")] * 2
    items = [(one.request, answer(leases[0]).copy_with(result_list="elsewhere")) for one in unserved]
    assert await queue.settle_unleased(items) == 2
    assert (await queue.count_requests()).pending == 0
    assert [one.id for one in (await queue.list_sequences(9)).sequences] == ["s"]


async def test_requests_that_wait_for_a_model_are_returned_cancelled_and_ended_on_a_cluster(
    queue: OwnerAndAdmin,
) -> None:
    await queue.submit([submission(f"r-{number}", token="t") for number in range(3)])
    await queue.submit([submission("late", 1_700_000_000, token="t")])
    leases = (await claim(queue)).leases
    await queue.release([Release(lease, extra=ModelWait("m")) for lease in leases])
    assert await queue.cancel_request("r-2", "t")
    assert (await queue.sweep()).freed_count == 1
    (late,) = await queue.find_overdue(9)
    assert await queue.settle_unleased([(late, answer(leases[0]))]) == 1
    assert await queue.count_waiting_by_model() == {"m": 2}
    assert await queue.return_waiting_for_models(["m"]) == ReturnedRequests(2, 0)
    assert len((await claim(queue)).leases) == 3


async def test_model_registry_is_shared_on_a_cluster(queue: OwnerAndAdmin) -> None:
    assert await queue.take_warm_up_lock("qwen-v1", "10.0.0.1:8000")
    await queue.mark_warm("qwen-v1", "10.0.0.1:8000")
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    assert await queue.pin_versions([PinRequest("chat-7", "qwen-v1", (), 100)]) == ["qwen-v1"]
    reply = await queue.refresh_warm_markers([("qwen-v1", "10.0.0.1:8000")], (), ["qwen-v1"])
    assert reply == await queue.read_model_registry()
    assert (set(reply.warm_markers), set(reply.models_in_use)) == (
        {("qwen-v1", "10.0.0.1:8000")},
        {"qwen-v1"},
    )
    assert (reply.labels, set(reply.drained_models)) == ({("qwen", "stable"): "1"}, {"qwen-v2"})
    assert await queue.undrain_version("qwen-v2")


async def test_only_requests_wait_whose_cancel_markers_are_on_an_unreachable_node(
    client: redis.asyncio.cluster.RedisCluster, cluster: ClusterSet
) -> None:
    home = cluster.node_of(NAMES.queue)
    names = [f"r-{number}" for number in range(100)]
    held = next(name for name in names if cluster.node_of(f"request-cancel:{name}") is not home)
    away = cluster.node_of(f"request-cancel:{held}")
    others = [name for name in names if cluster.node_of(f"request-cancel:{name}") is not away]
    gateway = InstantGateway()
    queue = RedisQueue(connect(cluster.url), NAMES, "a", QueueOptions(attempt_timeout_s=1.0))
    limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
    now = asyncio.get_running_loop().time()
    limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 10), now)
    dispatcher = Dispatcher(queue, gateway, limiter, Options(RetryPolicy()), Journal(Metrics()))
    await client.zadd(NAMES.queue, {member(held, token="t"): 1})
    assert await queue.check_cancelled([(held, "t")]) == [False], "the client knows the nodes"
    with away.frozen():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            await wait_until(lambda: dispatcher.view.markers_problem is not None)
            await client.zadd(NAMES.queue, {member(name, token="t"): 2 for name in others})
            await wait_until(lambda: sorted(gateway.sent) == sorted(others), 20)
            assert dispatcher.view.problem is None
            os.kill(away.pid, signal.SIGCONT)
            await wait_until(lambda: held in gateway.sent, 40)
            await wait_until(lambda: dispatcher.view.markers_problem is None, 20)
            dispatcher.drain(5.0)
    await queue.aclose()


async def test_node_that_does_not_answer_delays_few_lookups_of_cancel_markers(
    queue: OwnerAndAdmin, cluster: ClusterSet
) -> None:
    home = cluster.node_of(NAMES.queue)
    name = next(
        name
        for name in (f"r-{number}" for number in range(100))
        if cluster.node_of(f"request-cancel:{name}") is not home
    )
    # Time enough for the first call, which finds the nodes and loads the script.
    async with queues(cluster.url, "b", attempt_timeout_s=3.0) as (impatient,):
        assert await impatient.check_cancelled([(name, "t")]) == [False]
        with cluster.node_of(f"request-cancel:{name}").frozen():
            first: list[object] = list(await impatient.check_cancelled([(name, "t")]))
            assert isinstance(first[0], QueueUnavailableError)
            for _ in range(100):
                assert await impatient.check_cancelled([(name, "t")]) == first, "the error is kept"


async def test_documented_permissions_suffice_on_a_cluster(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """The page lists additional permissions for a Cluster."""
    (elsewhere,) = find_lists_on_other_nodes(cluster, 1)
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


async def test_list_without_permission_in_another_slot_is_answered_on_the_default_list(
    cluster: ClusterSet, client: redis.asyncio.cluster.RedisCluster
) -> None:
    """The list is in another slot, where the settle script cannot see it."""
    forbidden, allowed = find_lists_on_other_nodes(cluster, 2)
    refusals = f"~{NAMES.result_list}:posted:*"
    more = ("+command", "+cluster|slots", refusals, f"~{allowed}")  # but not the key of its marker
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
            assert await client.zcard(NAMES.outbox_key) == 1, "the operator has to add the missing permission"
            for node in cluster.nodes:
                with node.client() as admin:
                    grant(admin, "dispatcher", *more, f"~{{{allowed}}}:posted:*", tag="pool")
            await wait_until(lambda: is_delivered(queue, client), 20)
            assert await client.llen(allowed) == 1
    finally:
        for node in cluster.nodes:
            with node.client() as admin:
                admin.acl_deluser("dispatcher")


async def test_our_client_gets_results_whose_list_is_in_another_slot(
    cluster: ClusterSet, queue: OwnerAndAdmin
) -> None:
    """This applies to a client without a name and to a named one, whose results the next client of that name
    finds by id."""
    async with FakeDispatcher(queue).answer_continuously():
        async with BatchClient(cluster.url, queue=NAMES.queue) as client:
            results = await asyncio.gather(*(client.submit({"n": n}) for n in range(20)))
            assert [result.json() for result in results] == [{"n": n} for n in range(20)]
        async with BatchClient(cluster.url, queue=NAMES.queue, name="nightly") as first:
            await first.enqueue({"n": 1}, id="mine")
        async with BatchClient(cluster.url, queue=NAMES.queue, name="nightly") as second:
            assert (await second.result("mine")).json() == {"n": 1}
