"""Dispatchers that send to different pools from one queue report it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.queue.pool_identity import PoolIdentity
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.service.pool_sharing import INTERVAL_S, VALID_S, PoolSharing, get_pool_identity
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import NO_KUBERNETES, Endpoints

EAST = PoolIdentity("inferencepool", "uid-1", "llm/qwen")
WEST = PoolIdentity("inferencepool", "uid-2", "llm/qwen")


class SharedIdentities:
    """Queue that only shares identities. They count for as long as in Redis."""

    def __init__(self) -> None:
        self.valid_until: dict[bytes, float] = {}
        self.is_reachable = True

    async def share_pool_identity(self, identity: bytes, valid_s: float) -> list[bytes]:
        if not self.is_reachable:
            raise QueueUnavailableError("Redis cannot be reached")
        now = asyncio.get_running_loop().time()
        if identity:
            self.valid_until[identity] = now + valid_s
        return [each for each, until in self.valid_until.items() if until > now]


def start_sharing(
    queue: SharedIdentities, pool: PoolIdentity | None, *, observe: bool = False
) -> tuple[PoolSharing, asyncio.Task[None]]:
    sharing = PoolSharing(cast(RedisQueue, queue), lambda: pool, observe=observe)
    return sharing, asyncio.create_task(sharing.run())


def test_dispatchers_of_two_pools_report_each_other_until_one_has_ended() -> None:
    async def main() -> None:
        queue = SharedIdentities()
        (east, _), (west, ending) = start_sharing(queue, EAST), start_sharing(queue, WEST)
        (replica, _) = start_sharing(queue, EAST)
        await asyncio.sleep(INTERVAL_S + 1)
        for each in (east, west, replica):
            problem = each.problem or ""
            assert problem.startswith("Dispatchers of different pools work on one queue")
            assert "llm/qwen (inferencepool uid-1), llm/qwen (inferencepool uid-2)" in problem
            assert problem.endswith("Give each pool a queue of its own (queue.name)")
        ending.cancel()
        queue.is_reachable = False
        await asyncio.sleep(INTERVAL_S)
        assert east.problem, "an outage of the queue does not hide it"
        queue.is_reachable = True
        await asyncio.sleep(VALID_S + INTERVAL_S)
        assert not east.problem
        assert not replica.problem

    run_in_virtual_time(main())


def test_observer_and_dispatcher_without_known_pool_share_nothing() -> None:
    async def main() -> None:
        queue = SharedIdentities()
        observer, _ = start_sharing(queue, WEST, observe=True)
        starting, _ = start_sharing(queue, None)
        await asyncio.sleep(INTERVAL_S)
        assert queue.valid_until == {}
        start_sharing(queue, EAST)
        await asyncio.sleep(INTERVAL_S + 1)
        assert observer.problem
        assert starting.problem is None

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("signals", "endpoints", "identity"),
    [
        ("", Endpoints(), None),
        ("", Endpoints(pool_uid="uid-1"), PoolIdentity("inferencepool", "uid-1", "llm/qwen")),
        ("", NO_KUBERNETES, PoolIdentity("gateway", "http://gateway", "qwen")),
        (
            "signals: {source: fixed}\nbudget: {max_in_flight: 4}",
            Endpoints(),
            PoolIdentity("gateway", "http://gateway", "qwen"),
        ),
    ],
)
def test_pool_is_identified_by_its_uid_in_kubernetes_and_otherwise_by_the_gateway(
    signals: str, endpoints: Endpoints, identity: PoolIdentity | None
) -> None:
    text = f"pool: {{name: qwen, namespace: llm}}\ngateway: {{url: 'http://gateway'}}\n{signals}"
    settings = parse_settings(text, {})
    assert isinstance(settings, Settings), settings
    assert get_pool_identity(settings, endpoints) == identity
