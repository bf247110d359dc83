"""Connections by URL: standalone, TLS, Sentinel and Cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from dispatcher.queue.contract import Lease, SettleStatus
from dispatcher.queue.redis.connect import QueueUrlError, connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.requests.submission import QueueUnavailableError
from tests.queue.factories import NAMES, answer, claim, claim_one, queues, submission
from tests.queue.servers import SentinelSet, Server, sentinel_set, server
from tests.support import free_port, require_tool, wait_until


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://host/0", "unknown scheme"),
        ("redis+proxy://host", "unknown scheme"),
        ("redis://host:nan/0", "port"),
        ("redis+sentinel://host:26379", "name of the primary"),
        ("redis+sentinel://host:26379/mymaster/x", "name of the primary"),
        ("redis+sentinel://host:x/mymaster", "host 1 is no host:port"),
        ("redis+cluster://host:7000/3", "no database numbers"),
        ("redis+cluster://host:7000?db=1", "db"),
        ("redis+cluster://,host:7000", "host 1 is no host:port"),
        ("redis+cluster://host:70000", "host 1 is no host:port"),
        ("redis+cluster://" + ",".join(["host:7000"] * 1000), "longer than 8192 characters"),
        ("redis://[host/0", "no address"),
    ],
)
def test_invalid_url_is_explained_without_its_password(url: str, says: str) -> None:
    with pytest.raises(QueueUrlError, match=says) as caught:
        connect(url.replace("://", "://user:hush@"))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize("user", ["", "ann"])
@pytest.mark.parametrize(
    "password", ["s3/cret", "s3?cret", "s3#cret", "s3[cret", "123/456", "123?456", "123#456"]
)
def test_password_that_breaks_a_url_is_not_shown(scheme: str, user: str, password: str) -> None:
    with pytest.raises(QueueUrlError) as refused:
        connect(f"{scheme}://{user}:{password}@host/name")
    reply = str(refused.value)
    assert "percent-encode" in reply
    assert not [part for part in ("s3", "cret", "123", "456") if part in reply]


async def test_all_parts_of_a_sentinel_url_are_used() -> None:
    client: Any = connect(
        "rediss+sentinel://us%40er:p%3Aw@h1:26380,h2,[::1]:26381/mymaster/4"
        "?sentinel_username=watch&sentinel_password=word&ssl_cert_reqs=none"
    )
    pool: Any = client.connection_pool
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("mymaster", 4)
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("us@er", "p:w")
    watchers = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in watchers] == [("h1", 26380), ("h2", 26379), ("::1", 26381)]
    assert {(one["username"], one["password"]) for one in watchers} == {("watch", "word")}
    assert "ssl" in pool.connection_class.__name__.lower()
    assert all(
        "ssl" in one.connection_pool.connection_class.__name__.lower()
        for one in pool.sentinel_manager.sentinels
    )
    await client.aclose()


async def test_all_parts_of_a_cluster_url_are_used() -> None:
    client: Any = connect("rediss+cluster://user:word@h1:7001,h2?ssl_cert_reqs=none")
    nodes = client.nodes_manager.startup_nodes.values()
    assert [(node.host, node.port) for node in nodes] == [("h1", 7001), ("h2", 6379)]
    kwargs = client.connection_kwargs
    assert (kwargs["username"], kwargs["password"]) == ("user", "word")
    assert "ssl" in kwargs["connection_class"].__name__.lower()


async def test_tls_works_with_a_private_authority(tmp_path: Path) -> None:
    require_tool("redis-server")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    ca, certificate, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ("--tls-ca-cert-file", str(ca), "--tls-auth-clients", "no")
    with server("redis", tmp_path / "data", *options):
        async with queues(f"rediss://127.0.0.1:{port}/2?ssl_ca_certs={ca}", "a") as (queue,):
            await queue.submit([submission("r-1")])
            assert await queue.settle([answer(await claim_one(queue))]) == [SettleStatus.DONE]
        async with queues(f"rediss://127.0.0.1:{port}/2", "a") as (stranger,):
            with pytest.raises(QueueUnavailableError, match=r"(?i)certificate"):
                await stranger.count_requests()


async def test_unix_socket_url_works(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with server("redis", tmp_path / "data", "--unixsocket", str(path)):
        async with queues(f"unix://{path}?db=1", "a") as (queue,):
            assert await queue.submit([submission("r-1")]) == 1
            assert (await queue.count_requests()).pending == 1


async def test_work_continues_after_a_failover(tmp_path: Path) -> None:
    """The primary is killed under load. Each request that the new primary knows is answered once. tests/chaos
    does this with Valkey."""
    with sentinel_set("redis", tmp_path) as sentinels:
        async with queues(sentinels.url, "a", attempt_timeout_s=1.0, lease_s=3) as (queue,):
            await queue.submit([submission(f"r-{number}") for number in range(300)])
            first = sentinels.primary()
            await wait_until(lambda: is_replica_caught_up(first), 10)
            work = asyncio.create_task(work_until_empty(queue))
            await wait_until(lambda: settle_once(first) > 30, 20)
            first.kill()
            await wait_until(lambda: has_failed_over(sentinels, first), 30)
            await asyncio.wait_for(work, 60)
            with sentinels.primary().client() as client:
                results = [msgspec.json.decode(one)["id"] for one in client.lrange(NAMES.result_list, 0, -1)]
        assert len(results) == len(set(results))
        # Steps that were not replicated were undone as a whole, so their requests ran again.
        assert set(results) == {f"r-{number}" for number in range(300)}


def is_replica_caught_up(primary: Server) -> bool:
    with primary.client() as client:
        info = client.info("replication")
    return bool(info["slave0"]["offset"] >= info["master_repl_offset"])


def settle_once(primary: Server) -> int:
    with suppress(Exception), primary.client() as client:
        return int(client.llen(NAMES.result_list))
    return 0


def has_failed_over(sentinels: SentinelSet, first: Server) -> bool:
    with suppress(Exception):
        return sentinels.primary() is not first
    return False


async def work_until_empty(queue: RedisQueue) -> None:
    """Claim and settle until no request is left, despite outages."""
    held: list[Lease] = []
    while True:
        try:
            if not held:
                held = list((await claim(queue, 4)).leases)
            await queue.sweep()
            if held:
                await queue.settle([answer(lease) for lease in held])
                held = []
            elif (counts := await queue.count_requests()).pending + counts.leased == 0:
                return
        except QueueUnavailableError:
            continue
