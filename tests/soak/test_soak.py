"""Hours of changing load, with checks that memory, descriptors and keys do not grow.

SOAK_S: duration in seconds.
"""

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

from tests.benchmarks.process_costs import make_stage, read_rss_mib
from tests.scenarios.processes import Producer
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.serial]

SOAK_S = float(os.environ.get("SOAK_S", "7200"))
PAYLOAD_SIZES = (100, 1_000, 50_000)
"""Sizes of payloads in bytes. The first rounds use each of them, after which pools and caches are filled."""
SLOTS = 128
MAX_RSS_MIB = 110
"""Maximum memory according to docs/contributing/benchmarks.md, without twice the payloads in flight.

The heap keeps the memory of an earlier round for some time.
"""


def are_all_answered(producer: Producer, submitted_count: int) -> bool:
    return len(producer.collect()) >= submitted_count


def test_memory_descriptors_and_keys_do_not_grow_and_no_request_is_lost(tmp_path: Path) -> None:
    random_source = random.Random(1)
    with make_stage(tmp_path) as stage:
        world = stage.world(slots=SLOTS, seconds=0.02, log_max=1000)
        dispatcher = stage.dispatcher(
            stage.settings(world, max_sys=SLOTS, queue={"lease_s": 10, "result_ttl_s": 60})
        )
        producer, process = stage.producer, psutil.Process(dispatcher.child.pid)
        end_at = time.monotonic() + SOAK_S
        measurements: list[Any] = []
        in_flight = 0
        while time.monotonic() < end_at or len(measurements) <= len(PAYLOAD_SIZES):
            world.control(
                realtime=random_source.choice([0, 20, 60]), path_s=random_source.choice([0.0, 0.01])
            )
            size = (
                PAYLOAD_SIZES[len(measurements)]
                if len(measurements) < len(PAYLOAD_SIZES)
                else random_source.choice(PAYLOAD_SIZES)
            )
            submitted_count = len(
                producer.submit(100_000_000 // max(50_000, 20 * size), b'{"p":"%s"}' % (b"x" * size))
            )
            wait_until_sync(
                partial(are_all_answered, producer, submitted_count), 300, what="all results", every_s=0.1
            )
            assert producer.count_results() == {"200": submitted_count}
            assert not producer.find_duplicates()
            # Results are dropped, so that the memory of the producer does not grow. Ids stay unique.
            producer.results.clear()
            measurements.append(
                (
                    round(read_rss_mib(dispatcher), 1),
                    process.num_fds(),
                    count_keys_without_ttl(producer.client),
                )
            )
            print(f"{submitted_count:,} of {size:,} bytes: {measurements[-1]}", flush=True)
            in_flight = max(in_flight, min(submitted_count, SLOTS) * size)
            assert measurements[-1][0] <= MAX_RSS_MIB + 2 * in_flight / 2**20
    memory, descriptors, keys = zip(*measurements, strict=True)
    # A round of large payloads takes 10 MiB and frees them, so growth shows in the minimum of several rounds.
    half = len(memory) // 2
    assert min(memory[half:]) <= min(memory[:half]) + 5
    assert max(descriptors[len(PAYLOAD_SIZES) :]) <= max(descriptors[: len(PAYLOAD_SIZES)]) + 130, (
        "at most one more connection for each slot"
    )
    assert max(keys) < 20, "other keys of the queue expire"


def count_keys_without_ttl(client: redis.Redis) -> int:
    """Return the number of keys that do not expire."""
    keyspace = client.info("keyspace").get("db0", {"keys": 0, "expires": 0})
    return int(keyspace["keys"] - keyspace["expires"])
