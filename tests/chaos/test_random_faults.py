"""With random faults every accepted request has exactly one result, its own, in the list of its submitter."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.submission import QueueUnavailableError
from tests.chaos.fault_injector import FaultInjector, ScenarioSize, Topology, run_servers
from tests.chaos.submission_oracle import (
    GENERATED_PATH,
    GENERATION,
    SLICE_TOKENS,
    SUBMITTER_COUNT,
    LossWindow,
    SubmittedRequest,
    Submitter,
    compare_with_results,
    read_result_lists,
)
from tests.features.slices.generation_gateway import generate_whole
from tests.queue.key_checks import assert_only_known_keys
from tests.scenarios.processes import NAMES, LogEntry, Stage
from tests.support import wait_until

SLOTS = 32
LIMIT = 30
"""Capacity less the reserve."""
Slicing = Literal["off", "on", "streamed"]
"""Whether half of the plain requests are generations that are sent in slices, and whether their answers are
streamed."""
SLICE_S = 0.1
"""Duration of the call of one slice."""
LONG_RUN = ScenarioSize(
    requests=3000,
    faults=60,
    lease_s=5.0,
    max_request_s=1.2,
    max_pause_s=3.5,
    stop_s=15.0,
    redis_down_s=4.0,
    redis_pause_s=6.0,
    down_s=2.0,
    refused_deadline_s=40.0,
)
SHORT_RUN = replace(
    LONG_RUN,
    requests=300,
    faults=9,
    lease_s=2.0,
    max_request_s=0.6,
    max_pause_s=1.5,
    stop_s=4.0,
    redis_down_s=1.0,
    redis_pause_s=2.0,
    down_s=0.5,
    refused_deadline_s=10.0,
)


async def run_with_random_faults(
    folder: Path,
    seed: int,
    topology: Topology,
    engine: str,
    fsync: str,
    size: ScenarioSize,
    slicing: Slicing = "off",
) -> None:
    started_at = time.monotonic()
    with run_servers(topology, engine, fsync, folder / "queue") as servers, ExitStack() as stack:
        stage = Stage(folder, servers.servers[0], stack)
        generates = slicing != "off"
        world = stage.world(
            slots=SLOTS,
            seed=seed,
            **(
                {"generation": msgspec.json.encode(GENERATION).decode(), "seconds": SLICE_S}
                if generates
                else {}
            ),
        )
        settings = stage.settings(
            world,
            max_sys=SLOTS,
            queue={"url": servers.url, "lease_s": size.lease_s},
            signals={"interval_s": 0.5},
            retry={"base_s": 0.5, "max_s": 5.0, "max_attempts": 5},
            shutdown={"drain_s": 2.0},
            slicing={
                "mode": "on" if generates else "off",
                "tokens": SLICE_TOKENS,
                "min_tokens": SLICE_TOKENS + 1,
                "stream": slicing == "streamed",
                "paths": [GENERATED_PATH],
            },
        )
        for _ in range(2):
            await asyncio.to_thread(stage.dispatcher, settings)
        fault_injector = FaultInjector(stage, world, servers, size, random.Random(seed))
        client, admin = connect(servers.url), RedisQueueAdmin(connect(servers.url), NAMES)
        submitters = [
            Submitter(
                f"caller-{number}",
                servers.url,
                NAMES,
                is_foreign=number == 0,
                seed=f"{seed}-{number}",
                generates=generates,
            )
            for number in range(SUBMITTER_COUNT)
        ]
        try:
            # Submissions keep a little ahead of the faults, so that requests run until the last one.
            async with asyncio.TaskGroup() as tasks:
                fault_task = tasks.create_task(fault_injector.inject_all())
                for submitter in submitters:
                    tasks.create_task(
                        submitter.submit_all(
                            size.requests // SUBMITTER_COUNT,
                            lambda: (
                                1.0 if fault_task.done() else 0.1 + fault_injector.started_count / size.faults
                            ),
                            size.max_request_s,
                            size.refused_deadline_s,
                        )
                    )
            submitted = {
                id_: request for submitter in submitters for id_, request in submitter.submitted.items()
            }

            async def is_queue_empty() -> bool:
                try:
                    counts = await admin.count_requests()
                except QueueUnavailableError:
                    return False
                outbox_size: Any = await client.exists(NAMES.outbox_key)
                return bool(counts.pending + counts.leased + counts.delayed + outbox_size == 0)

            timeout_s = 120 + size.refused_deadline_s + size.requests * size.max_request_s / LIMIT
            await wait_until(is_queue_empty, timeout_s, what="every request to be finished", every_s=0.2)
            for dispatcher in stage.dispatchers:
                fault_injector.exit_codes.append(await asyncio.to_thread(dispatcher.terminate))
            gateway_times = defaultdict(list)
            log = await asyncio.to_thread(world.log)
            for entry in log:
                if entry.ended_at is not None:
                    gateway_times[entry.id].append(entry.ended_at)
            report = compare_with_results(
                submitted, await read_result_lists(client, NAMES), fault_injector.loss_windows, gateway_times
            )
            peak = world.observed()["gateway"]["batch"]["peak"]
            leftovers, marker_count = (
                await count_leftovers(client),
                await count_markers(client, submitted.values()),
            )
            accepted_count = sum(request.is_accepted for request in submitted.values())
            summary = {
                "accepted": accepted_count,
                "unknown": len(submitted) - accepted_count,
                "once": report.answered_once,
                **{kind: len(found) for kind, found in report.found.items()},
                "peak": peak,
                "codes": sorted(set(fault_injector.exit_codes)),
                "left": leftovers,
                "markers": marker_count,
                "ends": dict(report.result_counts),
                "sliced": report.sliced_count,
                "repeated attempts": sum(len(times) > 1 for times in gateway_times.values()),
                "faults": dict(fault_injector.fault_counts),
                "seconds": round(time.monotonic() - started_at),
            }
            print(f"\nseed {seed} {topology} {engine} {fsync}, slices {slicing}:", json.dumps(summary))
            defects = stage.find_defects()
            assert not defects, "\n".join(defects)
            assert report.faults == {}
            assert not leftovers
            # The deletion of markers may be lost, too; then they expire.
            assert not marker_count or not servers.is_durable
            assert set(fault_injector.exit_codes) == {0}
            # A dispatcher that was killed sends whole requests until it has checked the model again.
            assert report.sliced_count > accepted_count / 50 or not generates
            # A lost claim does not count any more, although its requests still run.
            assert peak <= (LIMIT if servers.is_durable else 2 * LIMIT), describe_exceeded_limit(log)
            # A run that lost many writes would prove little, although the loss is allowed.
            assert len(report.forgotten) + len(report.repeated) <= 0.1 * accepted_count
            await assert_only_known_keys(
                client, NAMES, *(request.result_list for request in submitted.values())
            )
        finally:
            await admin.aclose()
            for each in (client, *submitters):
                await each.aclose()


def describe_exceeded_limit(log: list[LogEntry]) -> list[str]:
    """Describe the requests at the gateway when the limit was first exceeded."""
    for request in log:
        arrived_at = request.arrived_at
        present = [
            each for each in log if each.arrived_at <= arrived_at and (each.ended_at or math.inf) > arrived_at
        ]
        if len(present) > LIMIT:
            return [
                f"{each.id} for {arrived_at - each.arrived_at:.3f} s, in the end {each.status}"
                for each in present
            ]
    return []


async def count_leftovers(client: Any) -> dict[str, int]:
    """Count what Redis still stores of finished requests, except dead letters."""
    prefix = NAMES.queue_prefix
    dead = await client.zcard(f"{prefix}:dead")
    counts = {
        "entries": await client.hlen(f"{prefix}:entries") - dead,
        "members": await client.hlen(f"{prefix}:members") - dead,
        "owners": await client.hlen(f"{prefix}:owners"),
        "leases": await client.zcard(f"{prefix}:leases"),
        "delayed": await client.zcard(f"{prefix}:delayed"),
        "order": await client.zcard(f"{prefix}:delayed:order"),
        "outbox": await client.zcard(f"{prefix}:outbox"),
    }
    return {name: count for name, count in counts.items() if count}


async def count_markers(client: Any, requests: Iterable[SubmittedRequest]) -> int:
    """Count markers of accepted requests.

    A submission without a reply may have left one, which is not counted.
    """
    accepted_ids = {request.id for request in requests if request.is_accepted}
    count = 0
    for kind in (NAMES.active_key(""), f"{NAMES.queue_prefix}:cancel:"):
        pattern = f"{kind}*"
        async for key in client.scan_iter(pattern, count=1000):
            count += key.decode().removeprefix(kind).partition(":")[0] in accepted_ids
    return count


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.timeout(240)
async def test_each_request_has_one_result_after_random_faults(tmp_path: Path) -> None:
    await run_with_random_faults(tmp_path, 1, "alone", "valkey", "no", SHORT_RUN)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_each_generation_in_streamed_slices_has_its_answer_after_random_faults(tmp_path: Path) -> None:
    await run_with_random_faults(tmp_path, 2, "alone", "valkey", "no", SHORT_RUN, "streamed")


SLICING_MODES: tuple[Slicing, ...] = ("off", "on", "streamed")
TOPOLOGIES: tuple[Topology, ...] = ("alone", "cluster", "alone", "sentinel", "cluster")


def choose_setup(seed: int) -> tuple[Topology, str, str]:
    """Choose topology, engine and fsync mode, such that 20 seeds cover all combinations."""
    return (
        TOPOLOGIES[(seed - 1) // 4 % 5],
        ("redis", "valkey")[seed % 2],
        ("always", "everysec")[seed // 2 % 2],
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 21))
async def test_each_request_has_one_result_after_many_random_faults(tmp_path: Path, seed: int) -> None:
    slicing = SLICING_MODES[seed % 3]
    await run_with_random_faults(tmp_path, seed, *choose_setup(seed), LONG_RUN, slicing)


def test_20_seeds_cover_all_setups() -> None:
    setups = {choose_setup(seed) for seed in range(1, 21)}
    assert len(setups) == 3 * 2 * 2


def make_result(request: SubmittedRequest, outcome: str = "200", payload: str | None = None) -> bytes:
    status = {"status_code": int(outcome)} if outcome.isdigit() else {"error_code": outcome}
    return json.dumps(
        {"id": request.id, "payload": request.payload if payload is None else payload} | status
    ).encode()


def test_oracle_finds_each_fault_and_nothing_else() -> None:
    names = ("good", "missing", "twice", "elsewhere", "echo", "end", "cancelled")
    submitted = {
        name: SubmittedRequest(name, "mine", f"payload of {name}", "plain", replied_at=10.0) for name in names
    }
    submitted["unknown"] = SubmittedRequest(
        "unknown", "mine", "", "plain", is_accepted=False, replied_at=10.0
    )
    submitted["cancelled"].kind = "cancelled"
    own_results = [
        make_result(submitted["good"]),
        make_result(submitted["twice"]),
        make_result(submitted["twice"]),
        make_result(submitted["echo"], payload=submitted["good"].payload),
        make_result(submitted["end"], "DELIVERIES_EXHAUSTED"),
        make_result(submitted["cancelled"], "CANCELLED"),
    ]
    report = compare_with_results(
        submitted, {"mine": own_results, "yours": [make_result(submitted["elsewhere"])]}
    )
    assert {kind: [each.split()[0] for each in found] for kind, found in report.faults.items()} == {
        "missing": ["missing", "elsewhere"],
        "duplicates": ["twice"],
        "misdelivered": ["elsewhere"],
        "wrong_results": ["echo", "end"],
    }
    assert report.answered_once == 4


def test_oracle_accepts_only_the_generated_text_of_the_same_request() -> None:
    submitted = {
        name: SubmittedRequest(
            name,
            "mine",
            json.dumps({"model": "m", "prompt": name, "max_tokens": 9}),
            "plain",
            is_generation=True,
        )
        for name in ("right", "wrong")
    }
    answer = generate_whole(GENERATED_PATH, submitted["right"].payload.encode(), GENERATION).decode()
    results = [make_result(request, payload=answer) for request in submitted.values()]
    report = compare_with_results(submitted, {"mine": results})
    assert [each.split()[0] for each in report.wrong_results] == ["wrong"]


def test_loss_window_excuses_only_writes_of_its_time() -> None:
    submitted = {
        name: SubmittedRequest(name, "mine", "", "plain", replied_at=replied_at)
        for name, replied_at in {"then": 10.0, "now": 20.0}.items()
    }
    loss_windows = [LossWindow(9.0, 11.0)]
    missing_report = compare_with_results(submitted, {"mine": []}, loss_windows)
    assert (missing_report.forgotten, missing_report.missing) == (["then"], ["now"])
    repeated_report = compare_with_results(
        submitted,
        {"mine": [make_result(request) for request in submitted.values() for _ in range(2)]},
        loss_windows,
    )
    assert (repeated_report.repeated, repeated_report.duplicates) == (["then"], ["now"])
    assert (
        compare_with_results(submitted, {"mine": []}, loss_windows, gateway_times={"now": [10.5]}).missing
        == []
    )
