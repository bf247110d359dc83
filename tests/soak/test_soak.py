"""Hours of changing work, and a look each round at what should not grow. SOAK_S: how many seconds."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from tests.benchmarks.stages import rss_mib, stage_in
from tests.scenarios.processes import Producer
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.serial]

SOAK_S = float(os.environ.get("SOAK_S", "7200"))
SIZES = (100, 1_000, 50_000)
"""Of payloads. The first rounds take one each, after which everything has grown to its working size."""
SLOTS = 128
RSS_MIB = 110
"""As docs/explanation/benchmarks.md promises it, and as there twice what payloads in flight make beside
that: the heap keeps for a while what those of an earlier round took."""


def answered(producer: Producer, asked: int) -> bool:
    return len(producer.collect()) >= asked


def test_nothing_grows_and_nothing_is_lost(tmp_path: Path) -> None:
    chance = random.Random(1)
    with stage_in(tmp_path) as stage:
        world = stage.world(slots=SLOTS, seconds=0.02, log_max=1000)
        one = stage.dispatcher(
            stage.settings(world, max_sys=SLOTS, queue={"lease_s": 10, "result_ttl_s": 60})
        )
        producer, process = stage.producer, psutil.Process(one.child.pid)
        ends = time.monotonic() + SOAK_S
        found: list[Any] = []
        in_flight = 0
        while time.monotonic() < ends or len(found) <= len(SIZES):
            world.control(realtime=chance.choice([0, 20, 60]), path_s=chance.choice([0.0, 0.01]))
            size = SIZES[len(found)] if len(found) < len(SIZES) else chance.choice(SIZES)
            asked = len(producer.submit(100_000_000 // max(50_000, 20 * size), b'{"p":"%s"}' % (b"x" * size)))
            wait_until_sync(partial(answered, producer, asked), 300, what="all results", every_s=0.1)
            assert producer.answers() == {"200": asked}
            assert not producer.twice()
            # The producer's own memory must not be what grows: its ids go on counting.
            producer.results.clear()
            found.append((round(rss_mib(one), 1), process.num_fds(), lasting_keys(producer.client)))
            print(f"{asked:,} of {size:,} bytes: {found[-1]}", flush=True)
            in_flight = max(in_flight, min(asked, SLOTS) * size)
            assert found[-1][0] <= RSS_MIB + 2 * in_flight / 2**20
    memory, descriptors, keys = zip(*found, strict=True)
    # A round of large payloads takes 10 MiB and gives them back: what stays shows in the least of them.
    half = len(memory) // 2
    assert min(memory[half:]) <= min(memory[:half]) + 5
    assert max(descriptors[len(SIZES) :]) <= max(descriptors[: len(SIZES)]) + 130, (
        "a connection for each slot at most"
    )
    assert max(keys) < 20, "what the queue keeps beside its own keys expires"


def lasting_keys(client: redis.Redis) -> int:
    """Keys that nothing but a command will remove."""
    space = client.info("keyspace").get("db0", {"keys": 0, "expires": 0})
    return int(space["keys"] - space["expires"])
