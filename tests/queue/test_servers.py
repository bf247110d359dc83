"""What the documentation says of a pair of servers, and the tests' own servers rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.queue.servers import ENGINES, Server, in_sync, server
from tests.support import wait_until_sync

_HELD = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1", "--repl-diskless-sync-delay", "0")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replica_counts_before_it_has_loaded_and_only_wait_says_so(engine: str, tmp_path: Path) -> None:
    with (
        server(engine, tmp_path / "primary", *_HELD) as primary,
        server(engine, tmp_path / "replica", "--key-load-delay", "4000") as replica,
        primary.client() as client,
    ):
        client.config_set("min-replicas-to-write", 0)
        client.mset({f"key-{number}": "" for number in range(1000)})
        client.config_set("min-replicas-to-write", 1)
        with replica.client() as other:
            other.replicaof("127.0.0.1", primary.port)

        def taken() -> bool:
            try:
                return bool(client.set("mine", "1"))
            except redis.ResponseError:  # NOREPLICAS
                return False

        wait_until_sync(taken, 10, what="the primary to take writes")
        assert client.wait(1, 1) == 0
        wait_until_sync(lambda: client.info("replication").get("slave0", {}).get("state") == "online", 10)
        assert "sync: Finished" not in replica.log.read_text()
        assert not heard(primary, replica)
        wait_until_sync(lambda: heard(primary, replica), 20, what="the replica to have all")
        with replica.client() as other:
            assert other.get("mine") == b"1"


def heard(primary: Server, replica: Server) -> bool:
    try:
        return in_sync(primary, replica)
    except redis.RedisError:  # while it loads it answers nobody
        return False
