"""Facts about replication that the documentation and the test servers rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.queue.servers import ENGINE_PARAMS, Server, in_sync, server
from tests.support import wait_until_sync

_HELD = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1", "--repl-diskless-sync-delay", "0")


@pytest.mark.parametrize("engine", ENGINE_PARAMS)
def test_loading_replica_counts_for_min_replicas_but_not_for_wait(engine: str, tmp_path: Path) -> None:
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

        def is_write_accepted() -> bool:
            try:
                return bool(client.set("mine", "1"))
            except redis.ResponseError:  # NOREPLICAS
                return False

        wait_until_sync(is_write_accepted, 10, what="the primary to take writes")
        assert client.wait(1, 1) == 0
        wait_until_sync(lambda: client.info("replication").get("slave0", {}).get("state") == "online", 10)
        assert "sync: Finished" not in replica.log.read_text()
        assert not get_replica_state(primary, replica)
        wait_until_sync(lambda: get_replica_state(primary, replica), 20, what="the replica to have all")
        with replica.client() as other:
            assert other.get("mine") == b"1"


def get_replica_state(primary: Server, replica: Server) -> bool:
    try:
        return in_sync(primary, replica)
    except redis.RedisError:  # it answers nothing while it loads
        return False
