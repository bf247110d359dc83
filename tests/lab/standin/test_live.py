"""The stand-in behaves as documented, as measured by an independent client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import re
import signal
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import psutil
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.lab.standin.config import CHANGED_IN_CONFIG, Config, Control, Fault
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.lab.standin.live import LiveWorld, _parse_options
from dispatcher.lab.standin.made_up_traffic import make_burst_trace
from dispatcher.lab.standin.replies import Answer
from tests.support import running_process, wait_until

Post = Callable[..., Coroutine[Any, Any, "Reply"]]
REALTIME = {"x-llm-d-inference-objective": "realtime"}


def write_tls_files(folder: Path) -> ssl.SSLContext:
    """Write a key and a certificate for 127.0.0.1 to the file `pem`, and return a context that trusts it."""
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return trusting


class Reply:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


@pytest.fixture
def post(http: aiohttp.ClientSession) -> Post:
    async def post(
        world: LiveWorld,
        id_: str = "",
        payload: Any = None,
        *,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> Reply:
        body = payload if payload is not None else {"model": "m", "prompt": "hi"}
        data = body if not isinstance(body, dict) else json.dumps(body).encode()
        named = {"x-request-id": id_} | (headers or {})
        async with http.post(
            f"{world.gateway_url}/v1/completions", data=data, headers=named, **options
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    return post


def run_stand_in(**config: Any) -> AbstractAsyncContextManager[LiveWorld]:
    @asynccontextmanager
    async def world() -> AsyncIterator[LiveWorld]:
        async with LiveWorld(Config(**config)) as stand_in:
            yield stand_in

    return world()


async def read_metrics_page(http: aiohttp.ClientSession, world: LiveWorld, **headers: str) -> str:
    async with http.get(world.metrics_url, headers=headers) as reply:
        assert reply.status == 200
        return await reply.text()


async def read_metrics(http: aiohttp.ClientSession, world: LiveWorld, **headers: str) -> dict[str, float]:
    """Return the sum of the samples of each series."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(await read_metrics_page(http, world, **headers)):
        for sample in family.samples:
            name = sample.name.removeprefix("llm_d_epp_")
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def start_times(world: LiveWorld) -> dict[str, float]:
    """Return the start times by id in the order of arrival, without requests that never started."""
    return {entry.id: entry.started_at for entry in world.gateway.log if entry.started_at is not None}


async def test_request_is_answered_with_its_id(post: Post) -> None:
    async with run_stand_in(seconds=0.0) as world:
        reply = await post(world, "r-1")
        assert reply.status == 200
        assert json.loads(reply.body)["id"] == "r-1"
        entry = world.gateway.log[-1]
    assert (entry.id, entry.status, entry.batch) == ("r-1", 200, True)


async def test_requests_beyond_the_slots_wait_in_order(post: Post) -> None:
    async with run_stand_in(slots=2, seconds=0.3) as world:
        replies = [asyncio.create_task(post(world, "r0"))]
        for number in range(1, 7):
            await wait_until(lambda: world.gateway.build_report()["arrived"] == len(replies))
            replies.append(asyncio.create_task(post(world, f"r{number}")))
        await asyncio.gather(*replies)
        started = start_times(world)
        assert list(started) == [entry.id for entry in world.gateway.log] == [f"r{n}" for n in range(7)]
        assert list(started.values()) == sorted(started.values())
        report = world.pool.build_report()
        assert report["running"]["peak"] == 2
        assert report["waiting"]["peak"] > 0


async def test_waiting_realtime_starts_before_waiting_batch(post: Post) -> None:
    async with run_stand_in(slots=1, seconds=0.3) as world:
        first = asyncio.create_task(post(world, "first"))
        await wait_until(lambda: world.pool.running == 1)
        batch = asyncio.create_task(post(world, "batch"))
        await wait_until(lambda: world.pool.waiting == 1)
        realtime = asyncio.create_task(post(world, "user", headers=REALTIME))
        await asyncio.gather(first, batch, realtime)
        started = start_times(world)
        assert started["first"] < started["user"] < started["batch"]
        assert world.gateway.build_report()["realtime"]["peak"] == 1


async def test_requests_start_in_order_of_arrival_without_flow_control(post: Post) -> None:
    async with run_stand_in(slots=1, seconds=0.3, flow_control=False) as world:
        first = asyncio.create_task(post(world, "first"))
        await wait_until(lambda: world.pool.running == 1)
        batch = asyncio.create_task(post(world, "batch"))
        await wait_until(lambda: world.pool.waiting == 1)
        realtime = asyncio.create_task(post(world, "user", headers=REALTIME))
        await asyncio.gather(first, batch, realtime)
        started = start_times(world)
        assert started["first"] < started["batch"] < started["user"]


@pytest.mark.parametrize(("flow_control", "reason"), [(True, "rejected-saturated"), (False, None)])
async def test_full_queue_is_answered_with_429(post: Post, flow_control: bool, reason: str | None) -> None:
    async with run_stand_in(slots=1, queue_limit=1, seconds=30, flow_control=flow_control) as world:
        taken = [asyncio.create_task(post(world, f"r{n}")) for n in range(2)]
        await wait_until(lambda: world.pool.waiting == 1)
        refused = await post(world, "r2")
        assert (refused.status, refused.headers.get("x-llm-d-request-dropped-reason")) == (429, reason)
        observed = world.build_report()
        assert observed["gateway"]["answers"] == {"429": 1}
        assert observed["pool"]["refused"] == {"batch": 1, "realtime": 0}
        for each in taken:
            each.cancel()


async def test_full_queue_refuses_generated_text_as_well(post: Post) -> None:
    async with run_stand_in(slots=1, queue_limit=0, seconds=30, generation=GenerationConfig()) as world:
        taken = asyncio.create_task(post(world, "r0", {"prompt": "a"}))
        await wait_until(lambda: world.pool.running == 1)
        refused = await post(world, "r1", {"prompt": "a"})
        assert (refused.status, refused.body) == (429, b"inference error: ResourceExhausted - saturated")
        taken.cancel()


async def test_changes_of_a_running_world_leave_its_configuration_unchanged() -> None:
    config = Config(seconds=0.0)
    async with LiveWorld(config) as world:
        await world.apply_control(Control(seconds=5.0))
    assert config == Config(seconds=0.0)


def test_each_setting_that_can_be_changed_is_changed() -> None:
    shared = set(Control.__struct_fields__) & set(Config.__struct_fields__)
    handled = {"declared", "endpoints", "models"}  # they take more than a new value
    assert set(CHANGED_IN_CONFIG) == shared - handled


async def test_service_time_depends_on_tokens_and_running_requests(post: Post) -> None:
    async with run_stand_in(slots=2) as world:
        alone = await measure_seconds(post(world, "a", {"max_tokens": 20}))
        delay_s = world.build_report()["pool"]["delay_s"]["max"]
        both = await asyncio.gather(*(measure_seconds(post(world, id_, {"max_tokens": 20})) for id_ in "bc"))
    work_s = 0.03 + 0.00025 * 500 + 0.012 * 20
    assert work_s <= alone < 2 * work_s + delay_s
    assert max(both) >= 2 * work_s  # The second request starts as one of two in a pool of two slots: f = 2.


async def measure_seconds(awaitable: Awaitable[object]) -> float:
    start = time.monotonic()
    await awaitable
    return time.monotonic() - start


async def test_random_token_count_depends_only_on_seed_and_id(post: Post) -> None:
    tokens = []
    for ids in (("a", "b"), ("b", "a")):
        async with run_stand_in(slots=8, seed=7) as world:
            drawn = {id_: world.gateway._draw_tokens(id_) for id_ in ids}
            tokens.append(drawn)
    assert tokens[0] == tokens[1]
    assert tokens[0]["a"] != tokens[0]["b"]


async def test_path_time_is_added_in_both_directions_outside_the_pool(post: Post) -> None:
    async with run_stand_in(slots=1, seconds=0.05, path_s=1.0) as world:
        took = await measure_seconds(post(world, "r"))
        report = world.pool.build_report()
    assert took >= 2.05
    assert report["time_s"]["batch"]["max"] < 1.0


async def test_disconnected_client_frees_its_slot_and_its_place_in_the_queue(post: Post) -> None:
    async with run_stand_in(slots=1, seconds=30.0) as world:
        runs = asyncio.create_task(post(world, "runs"))
        await wait_until(lambda: world.pool.running == 1)
        waits = asyncio.create_task(post(world, "waits"))
        await wait_until(lambda: world.pool.waiting == 1)
        for gone in (waits, runs):
            gone.cancel()
        await wait_until(lambda: world.pool.running == world.pool.waiting == 0)
        assert [entry.status for entry in world.gateway.log] == [0, 0]
        assert world.build_report()["gateway"]["batch"]["now"] == 0


async def test_levels_report_peak_and_mean_over_time(post: Post) -> None:
    async with run_stand_in(slots=4, seconds=0.3) as world:
        may_begin_at = time.monotonic()
        await world.apply_control(Control(restart=True))
        has_begun_at = time.monotonic()
        await asyncio.gather(*(post(world, f"r{n}") for n in range(4)))
        may_end_at = time.monotonic()
        report = world.pool.build_report()["batch"]
        has_ended_at = time.monotonic()
        assert report["peak"] == 4
        started = start_times(world)
        assert len(started) == 4
        busy = sum((entry.ended_at or math.inf) - started[entry.id] for entry in world.gateway.log)
        # The log is written a moment after the pool has counted.
        assert report["mean"] >= 0.8 * busy / (has_ended_at - may_begin_at)
        assert report["mean"] <= 1.2 * busy / (may_end_at - has_begun_at)
        await world.apply_control(Control(restart=True))
        assert world.pool.build_report()["batch"]["peak"] == 0
        assert len(world.gateway.log) == 4


class TestMetricsPage:
    """The metrics page of the picker shows the state of the pool."""

    @staticmethod
    async def fill_pool(world: LiveWorld, post: Post, requests: int) -> list[asyncio.Task[Reply]]:
        sent = [asyncio.create_task(post(world, f"fill{n}")) for n in range(requests)]
        await wait_until(lambda: world.pool.running + world.pool.waiting == requests)
        return sent

    async def test_concurrency_detector_shows_a_request_count(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(slots=4, endpoints=2, seconds=30) as world:
            assert "flow_control_queue_size" not in await read_metrics(http, world)
            await self.fill_pool(world, post, 3)
            assert (await read_metrics(http, world))["flow_control_pool_saturation"] == 0.75
            sent = [asyncio.create_task(post(world)) for _ in range(3)]
            await wait_until(lambda: world.pool.waiting == 2)
            world.picker.flush_now()
            values = await read_metrics(http, world)
            for each in sent:
                each.cancel()
        assert values["flow_control_pool_saturation"] == 1.0
        assert values["flow_control_queue_size"] == 2
        assert values["ready_endpoints"] == 2
        assert (values["average_running_requests"], values["average_queue_size"]) == (2.0, 0.0)

    async def test_requests_wait_in_the_model_servers_if_the_picker_assumes_too_many_slots(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(slots=2, declared=6, seconds=30) as world:
            await self.fill_pool(world, post, 5)
            world.picker.flush_now()
            values = await read_metrics(http, world)
        assert values["flow_control_pool_saturation"] == pytest.approx(5 / 6)
        assert values["flow_control_queue_size"] == 0
        assert values["average_queue_size"] == 3

    async def test_utilization_detector_shows_a_pressure_score(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(
            slots=2, detector="utilization", kv_at_full=0.08, seconds=30, metrics_refresh_s=0.1
        ) as world:
            await self.fill_pool(world, post, 2)

            async def saturation_is(expected: float) -> None:
                async def shown() -> bool:
                    return (await read_metrics(http, world))["flow_control_pool_saturation"] == pytest.approx(
                        expected
                    )

                await wait_until(shown)

            await saturation_is(0.1)
            burst = [asyncio.create_task(post(world)) for _ in range(7)]
            await wait_until(lambda: world.pool.waiting == 7)
            assert world.pool.waiting_inside == 7, (
                "the picker admits all before it sees that the servers are full"
            )
            await saturation_is(7 / 5)
            held_back = [asyncio.create_task(post(world)) for _ in range(2)]
            await wait_until(lambda: world.pool.waiting == 9)
            crowded = await read_metrics(http, world)
            for each in burst + held_back:
                each.cancel()
        assert crowded["flow_control_queue_size"] == 2
        assert crowded["per_endpoint_queue_size"] == 7

    async def test_requests_between_two_scrapes_wait_while_other_servers_have_room(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(
            slots=12, endpoints=3, scorer_scrape_s=3600.0, flow_control=False, seconds=30
        ) as world:
            sent = await self.fill_pool(world, post, 12)
            counts = world.pool.list_server_counts(3)
            world.picker.flush_now()
            page = await read_metrics_page(http, world)
            for each in sent:
                each.cancel()
        assert world.pool.running < 12
        queues = [float(each) for each in re.findall(r"per_endpoint_queue_size\{.*\} (\S+)", page)]
        assert queues == [waiting for _, waiting in counts]
        assert min(queues) == 0 < max(queues)
        (deviation,) = re.findall(r"std_dev_running_requests\{.*\} (\S+)", page)
        assert float(deviation) == pytest.approx(statistics.pstdev(running for running, _ in counts))

    async def test_requests_after_each_scrape_go_to_the_server_with_the_lowest_load(self, post: Post) -> None:
        async with run_stand_in(
            slots=6, endpoints=3, scorer_scrape_s=1e-6, flow_control=False, seconds=30
        ) as world:
            sent = await self.fill_pool(world, post, 6)
            assert world.pool.running == 6
            for each in sent:
                each.cancel()

    async def test_only_the_utilization_detector_shows_stale_endpoints_with_its_name(
        self, http: aiohttp.ClientSession
    ) -> None:
        async with run_stand_in(slots=2) as world:
            assert "stale_endpoints" not in await read_metrics_page(http, world)
        async with run_stand_in(
            slots=2, detector="utilization", detector_name="high-concurrency-pool"
        ) as world:
            assert 'stale_endpoints{detector="high-concurrency-pool"} 0' in await read_metrics_page(
                http, world
            )

    async def test_started_picker_shows_no_endpoint_before_its_first_flush(
        self, http: aiohttp.ClientSession
    ) -> None:
        async with run_stand_in(slots=2, cold=True, flush_s=0.3) as world:
            values = await read_metrics(http, world)
            assert (values["ready_endpoints"], values["flow_control_pool_saturation"]) == (0, 0)
            await wait_until(lambda: world.picker.flushed_at is not None)
            assert (await read_metrics(http, world))["ready_endpoints"] == 1

    async def test_page_has_only_averages_without_flow_control(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(slots=2, flow_control=False, seconds=30) as world:
            await self.fill_pool(world, post, 3)
            world.picker.flush_now()
            values = await read_metrics(http, world)
        assert not [name for name in values if name.startswith("flow_control")]
        assert (values["average_running_requests"], values["average_queue_size"]) == (2, 1)

    async def test_averages_change_only_when_they_are_flushed(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(slots=4, seconds=30, flush_s=0.3) as world:
            await wait_until(lambda: world.picker.flushed_at is not None)
            await self.fill_pool(world, post, 4)
            assert (await read_metrics(http, world))["flow_control_pool_saturation"] == 1.0
            flushed = world.picker.flushed_at
            await wait_until(lambda: world.picker.flushed_at != flushed)
            assert (await read_metrics(http, world))["average_running_requests"] == 4

    async def test_page_with_lag_shows_an_earlier_state(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(slots=4, seconds=30, lag_s=0.5) as world:
            await self.fill_pool(world, post, 4)
            filled_at = max(entry.arrived_at for entry in world.gateway.log)
            values = await read_metrics(http, world)
            if time.monotonic() < filled_at + 0.5:  # Skip this check if the machine was too slow.
                assert values["flow_control_pool_saturation"] < 1.0

            async def shown() -> bool:
                return (await read_metrics(http, world))["flow_control_pool_saturation"] == 1.0

            await wait_until(shown)
            assert time.monotonic() >= filled_at + 0.5

    async def test_requests_are_refused_and_averages_freeze_without_endpoints(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with run_stand_in(slots=2, seconds=30) as world:
            await self.fill_pool(world, post, 2)
            world.picker.flush_now()
            await world.apply_control(Control(endpoints=0))
            reply = await post(world, "r")
            assert reply.status == 503
            assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
            world.picker.flush_now()
            values = await read_metrics(http, world)
            assert (values["ready_endpoints"], values["flow_control_pool_saturation"]) == (0, 1.0)
            assert values["average_running_requests"] == 2

    async def test_page_requires_its_token(self, http: aiohttp.ClientSession) -> None:
        async with run_stand_in(metrics_token="t0p") as world:
            async with http.get(world.metrics_url) as reply:
                assert reply.status == 401
            assert "ready_endpoints" in await read_metrics(http, world, authorization="Bearer t0p")

    @pytest.mark.parametrize(
        ("kind", "status", "start"),
        [("garbage", 200, b"<html>"), ("empty", 200, b""), ("error", 500, b""), ("unauthorized", 401, b"")],
    )
    async def test_page_can_be_broken_and_repaired(
        self, http: aiohttp.ClientSession, kind: Any, status: int, start: bytes
    ) -> None:
        async with run_stand_in() as world:
            await world.apply_control(Control(metrics=kind))
            async with http.get(world.metrics_url) as reply:
                assert reply.status == status
                assert (await reply.read()).startswith(start)
            await world.apply_control(Control(metrics="ok"))
            assert "ready_endpoints" in await read_metrics(http, world)

    async def test_page_can_disappear_hang_and_freeze(self, http: aiohttp.ClientSession, post: Post) -> None:
        async with run_stand_in(slots=2, seconds=30) as world:
            await world.apply_control(Control(metrics="gone"))
            with pytest.raises(aiohttp.ClientConnectorError):
                await read_metrics(http, world)
            await world.apply_control(Control(metrics="hang"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await read_metrics(http, world)
            await world.apply_control(Control(metrics="frozen"))
            await self.fill_pool(world, post, 2)
            assert (await read_metrics(http, world))["flow_control_pool_saturation"] == 0
            await world.apply_control(Control(metrics="ok"))
            assert (await read_metrics(http, world))["flow_control_pool_saturation"] == 1


class TestFaults:
    """Each fault of a gateway, as a client sees it."""

    @pytest.mark.parametrize(
        ("status", "reason", "body"),
        [(401, "", ""), (404, "", ""), (500, "", ""), (504, "", ""), (503, "rejected-shutting-down", "bye")],
    )
    async def test_fault_answers_at_once_with_a_status(
        self, post: Post, status: int, reason: str, body: str
    ) -> None:
        answer = Answer(kind="status", status=status, reason=reason, body=body, retry_after="3")
        async with run_stand_in(slots=1, seconds=0.0) as world:
            await world.apply_control(Control(gateway=Fault(answer=answer)))
            reply = await post(world, "r")
            assert (reply.status, reply.body.decode()) == (status, body)
            assert reply.headers.get("x-llm-d-request-dropped-reason", "") == reason
            assert reply.headers["retry-after"] == "3"
            assert world.pool.build_report()["finished"]["batch"] == 0
            await world.apply_control(Control(gateway=None))
            assert (await post(world, "r")).status == 200

    async def test_fault_resets_the_connection(self, post: Post) -> None:
        async with run_stand_in(seconds=0.0) as world:
            await world.apply_control(Control(gateway=Fault(answer=Answer(kind="reset"), times=1)))
            with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
                await post(world, "r")
            assert world.gateway.log[-1].status == -1
            assert (await post(world, "r")).status == 200
            assert world.build_report()["gateway"]["batch"]["now"] == 0

    async def test_fault_cuts_the_answer(self, post: Post) -> None:
        async with run_stand_in(seconds=0.0) as world:
            await world.apply_control(Control(gateway=Fault(answer=Answer(kind="cut"))))
            with pytest.raises(aiohttp.ClientPayloadError):
                await post(world, "r")

    async def test_payload_slows_the_answer(self, post: Post) -> None:
        async with run_stand_in(seconds=0.0) as world:
            slow = {"sim": {"kind": "slow", "slow_s": 0.3}}
            assert await measure_seconds(post(world, "r", slow)) >= 0.3
            assert world.gateway.log[-1].status == 200

    async def test_payload_makes_the_answer_hang(self, post: Post) -> None:
        async with run_stand_in(slots=1, seconds=0.0) as world:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await post(world, "r", {"sim": {"kind": "hang"}})
            await wait_until(lambda: world.pool.running == 0)
            assert (await post(world, "r")).status == 200

    async def test_fault_refuses_connections(self, post: Post) -> None:
        async with run_stand_in(slots=4, seconds=30) as world:
            cut_off = asyncio.create_task(post(world, "r"))
            await wait_until(lambda: world.pool.running == 1)
            await world.apply_control(Control(gateway=Fault(listener="refuse")))
            with pytest.raises(aiohttp.ClientError):
                await cut_off
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(world, "r")
            await wait_until(lambda: world.pool.running == 0)
            await world.apply_control(Control(gateway=None, seconds=0.0))
            assert (await post(world, "r")).status == 200

    async def test_fault_swallows_packets(self, post: Post) -> None:
        async with run_stand_in(slots=4, seconds=0.5) as world:
            swallowed = asyncio.create_task(post(world, "swallowed"))
            await wait_until(lambda: world.pool.running == 1)
            await world.apply_control(Control(gateway=Fault(listener="blackhole")))
            # The existing connection hangs, and a new one cannot be established.
            await wait_until(lambda: world.pool.running == 0)
            timeout = aiohttp.ClientTimeout(total=5, sock_connect=0.3)
            with pytest.raises(aiohttp.ServerTimeoutError):
                await post(world, "r", timeout=timeout)
            assert not swallowed.done()
            await world.apply_control(Control(gateway=None))
            with pytest.raises(aiohttp.ClientError):
                await swallowed
            assert (await post(world, "r")).status == 200
            assert world.build_report()["gateway"]["batch"]["now"] == 0

    async def test_fault_replaces_tls_by_plaintext(self, post: Post, tmp_path: Path) -> None:
        trusting = write_tls_files(tmp_path)
        async with run_stand_in(seconds=0.0, tls_cert=str(tmp_path / "pem")) as world:
            assert (await post(world, "r", ssl=trusting)).status == 200
            await world.apply_control(Control(gateway=Fault(listener="plaintext")))
            with pytest.raises(aiohttp.ClientConnectorSSLError):
                await post(world, "r", ssl=trusting)
            await world.apply_control(Control(gateway=None))
            assert (await post(world, "r", ssl=trusting)).status == 200

    async def test_tls_handshake_in_progress_does_not_outlive_a_fault(
        self, post: Post, tmp_path: Path
    ) -> None:
        trusting = write_tls_files(tmp_path)
        async with run_stand_in(seconds=0.0, tls_cert=str(tmp_path / "pem")) as world:
            port = urlsplit(world.gateway_url).port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # Connections are accepted in order, so after this answer the one above has been accepted, too.
            assert (await post(world, "r", ssl=trusting)).status == 200
            await world.apply_control(Control(gateway=Fault(listener="plaintext")))
            answer = b""
            with contextlib.suppress(OSError):
                await writer.start_tls(trusting, server_hostname="127.0.0.1")
                writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = await reader.read(100)
            assert answer == b""
            writer.close()

    async def test_fault_applies_to_matching_requests_or_a_share(self, post: Post) -> None:
        busy = Answer(kind="status", status=429)
        async with run_stand_in(slots=64, seconds=0.0, seed=3) as world:
            await world.apply_control(Control(gateway=Fault(answer=busy, match="noisy")))
            tenant = {"x-llm-d-inference-fairness-id": "noisy"}
            assert (await post(world, "a", headers=tenant)).status == 429
            assert (await post(world, "b", {"prompt": "noisy neighbour"})).status == 429
            assert (await post(world, "c")).status == 200
            await world.apply_control(Control(gateway=Fault(answer=busy, share=0.5)))
            statuses = [(await post(world, f"d{n}")).status for n in range(100)]
            assert 20 <= statuses.count(429) <= 80  # 50 ± 6 standard deviations


class TestPayloads:
    """Options under `sim` in a payload, and payloads that are returned unchanged."""

    @pytest.mark.parametrize("size", [1, 100_000, 16 * 1024 * 1024])
    async def test_echo_returns_every_byte(self, post: Post, size: int) -> None:
        body = b'{"sim":{"echo":true,"seconds":0},"prompt":"' + b"\\u0000x" * (size // 7) + b'"}'
        async with run_stand_in() as world:
            assert (await post(world, "r", body)).body == body

    async def test_chunked_request_is_read_completely(self, http: aiohttp.ClientSession) -> None:
        parts = [b'{"sim":{"echo":true}', b',"prompt":"', b"x" * 100_000, b'"}']

        async def stream() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        async with run_stand_in(seconds=0.0) as world:
            async with http.post(world.gateway_url, data=stream()) as reply:
                assert await reply.read() == b"".join(parts)
            async with http.post(world.gateway_url, data=b"{}", headers={"expect": "100-continue"}) as reply:
                assert reply.status == 200

    async def test_answer_is_a_stream_of_events_on_request(self, post: Post) -> None:
        async with run_stand_in(seconds=0.0) as world:
            reply = await post(world, "r", {"sim": {"events": 3}})
            assert reply.headers["content-type"] == "text/event-stream"
            assert reply.headers["transfer-encoding"] == "chunked"
            assert reply.body.count(b"data: ") == 4
            assert reply.body.endswith(b"data: [DONE]\n\n")

    async def test_chat_answer_matches_the_types_of_openai(self, http: aiohttp.ClientSession) -> None:
        chat = importlib.import_module("openai.types.chat")
        body = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "sim": {"answer_bytes": 3}}
        async with run_stand_in(seconds=0.0) as world:
            url = f"{world.gateway_url}/v1/chat/completions"
            async with http.post(url, json=body) as reply:
                answer = chat.ChatCompletion.model_validate(await reply.json(), strict=True)
            async with http.post(url, json=body | {"sim": {"events": 3}}) as reply:
                *events, last, end = (await reply.text()).split("\n\n")
        assert (answer.model, answer.choices[0].message.content) == ("qwen", "xxx")
        assert answer.usage.prompt_tokens > 0
        pieces = [json.loads(event.removeprefix("data: ")) for event in events]
        chunks = [chat.ChatCompletionChunk.model_validate(each, strict=True) for each in pieces]
        assert [each.choices[0].delta.content for each in chunks] == ["t0", "t1", "t2"]
        assert [each.choices[0].finish_reason for each in chunks] == [None, None, "stop"]
        assert (last, end) == ("data: [DONE]", "")

    @pytest.mark.parametrize("body", [{"model": "qwen", "prompt": "hi"}, {"prompt": "hi"}])
    async def test_completion_answer_matches_the_types_of_openai(
        self, post: Post, body: dict[str, str]
    ) -> None:
        completion = importlib.import_module("openai.types").Completion
        async with run_stand_in(seconds=0.0) as world:
            answer = completion.model_validate(json.loads((await post(world, "r", body)).body), strict=True)
        assert (answer.model, answer.choices[0].text) == (body.get("model", "m"), "ok")

    async def test_payload_selects_size_compression_and_status(self, post: Post) -> None:
        async with run_stand_in(seconds=0.0) as world:
            reply = await post(world, "r", {"sim": {"answer_bytes": 50_000, "gzip": True}})
            assert reply.headers["content-encoding"] == "gzip"
            assert len(json.loads(reply.body)["choices"][0]["text"]) == 50_000
            reply = await post(world, "r", {"sim": {"kind": "status", "status": 422, "body": "no"}})
            assert (reply.status, reply.body) == (422, b"no")

    async def test_unknown_option_in_payload_is_rejected(self, post: Post) -> None:
        async with run_stand_in(seconds=0.0) as world:
            reply = await post(world, "r", {"sim": {"stauts": 422}})
            assert reply.status == 400
            assert b"stauts" in reply.body


async def test_realtime_level_is_held_and_can_be_changed() -> None:
    async with run_stand_in(slots=8, steps="0:3", realtime_seconds=0.02) as world:
        await wait_until(lambda: world.pool.build_report()["finished"]["realtime"] >= 9)
        assert world.pool.levels["realtime"].now == 3
        await world.apply_control(Control(realtime=5))
        assert world.pool.levels["realtime"].now == 5
        await world.apply_control(Control(realtime=0))
        await wait_until(lambda: world.pool.levels["realtime"].now == 0)
        assert world.pool.build_report()["realtime"]["peak"] == 5


async def test_traffic_that_is_made_up_is_replayed() -> None:
    config = {"trace": "bursts", "seed": 3, "trace_speed": 600.0, "realtime_seconds": 0.0, "slots": 1000}
    async with run_stand_in(**config) as world:
        expected = len(make_burst_trace(3).arrivals)
        await wait_until(lambda: world.pool.finished["realtime"] == expected, what="the end of the traffic")


async def test_report_says_how_late_requests_ended(post: Post) -> None:
    async with run_stand_in(seconds=0.1) as world:
        reply = asyncio.create_task(post(world))
        await wait_until(lambda: world.pool.running)
        time.sleep(0.4)  # noqa: ASYNC251 -- the event loop of the stand-in is late
        await reply
        delay_s = world.build_report()["pool"]["delay_s"]
        assert 0.2 < delay_s["max"] == delay_s["mean"]
        await world.apply_control(Control(restart=True))
        assert world.build_report()["pool"]["delay_s"]["max"] is None


async def test_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [(10, 1, 1), (11, 1, 2), (12, 1, 4), (14, 1, 8)]
    rows_text = "".join(f"{at},{context},{generated}\n" for at, context, generated in rows)
    trace.write_text("seconds,context_tokens,generated_tokens\n" + rows_text)
    config = {"trace": str(trace), "trace_from_s": 1.0, "trace_speed": 20.0, "realtime_seconds": 0.0}
    start = time.monotonic()
    async with run_stand_in(**config) as world:
        await wait_until(lambda: world.pool.build_report()["finished"]["realtime"] == 3)
        assert time.monotonic() - start >= 3 / 20
        assert world.pool.build_report()["tokens"]["realtime"] == 2 + 4 + 8


async def test_repeated_ids_are_reported(post: Post) -> None:
    async with run_stand_in(seconds=0.0) as world:
        await world.apply_control(Control(gateway=Fault(answer=Answer(kind="status", status=503), times=1)))
        for id_ in ("retried", "retried", "twice", "twice", "once"):
            await post(world, id_)
        ids = world.build_report()["gateway"]["ids"]
    assert (ids["distinct"], ids["served"]) == (3, 3)
    assert (ids["arrived_again"], ids["served_again"], ids["examples"]) == (2, 1, {"twice": 2})


async def test_control_api_shows_log_and_changes_the_stand_in(
    http: aiohttp.ClientSession, post: Post
) -> None:
    async with run_stand_in(slots=4, seconds=0.0) as world:
        for id_ in "abc":
            await post(world, id_)
        async with http.get(f"{world.control_url}/log", params={"after": "1"}) as reply:
            assert [entry["id"] for entry in await reply.json()] == ["b", "c"]
        change = {"slots": 2, "gateway": {"listener": "refuse"}, "metrics": "gone"}
        async with http.post(f"{world.control_url}/control", json=change) as reply:
            assert (await reply.json())["pool"]["slots"] == 2
        async with http.get(f"{world.control_url}/observed") as reply:
            assert (await reply.json())["gateway"]["arrived"] == 3
        async with http.post(f"{world.control_url}/control", json={"slost": 2}) as reply:
            assert reply.status == 400
            assert "slost" in await reply.text()


async def test_get_request_is_answered_at_once_without_a_slot(http: aiohttp.ClientSession) -> None:
    async with run_stand_in(slots=1, seconds=30.0) as world, asyncio.timeout(10):
        async with http.get(f"{world.gateway_url}/v1/completions") as reply:
            assert reply.status == 405
        assert world.build_report()["pool"]["all"]["peak"] == 0


def test_help_shows_meaning_and_default_of_every_option() -> None:
    command = (sys.executable, "-m", "dispatcher.lab.standin", "--help")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    options = " ".join(shown.partition("options:")[2].split()).split(" --")[2:]
    assert len(options) == len(msgspec.structs.fields(Config))
    for option in options:
        assert re.search(r"[a-z]{3}.*[.;] Default: .", option), option
    assert "--slots SLOTS Requests that all endpoints together really run at once. Default: 32" in " --".join(
        ["", *options]
    )


def test_process_answers_requests_and_ends_on_sigterm() -> None:
    command = (sys.executable, "-m", "dispatcher.lab.standin", "--seconds", "0", "--slots", "3")
    with running_process(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        urls = json.loads(process.stdout.readline())

        async def use() -> None:
            async with aiohttp.ClientSession() as http:
                async with http.post(urls["gateway"] + "/v1/completions", data=b"{}") as reply:
                    assert reply.status == 200
                reset = json.dumps({"sim": {"kind": "reset"}})
                with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
                    await http.post(urls["gateway"] + "/v1/completions", data=reset)
                for listener in ("refuse", "blackhole"):
                    for fault in ({"listener": listener}, None):
                        change = {"gateway": fault}
                        async with http.post(urls["control"] + "/control", json=change) as reply:
                            assert reply.status == 200
                        pending_post = http.post(
                            urls["gateway"], data=b"{}", timeout=aiohttp.ClientTimeout(0.5)
                        )
                        if fault is None:
                            async with pending_post as reply:
                                assert reply.status == 200
                        else:
                            with pytest.raises((aiohttp.ClientError, TimeoutError)):
                                await pending_post
                async with http.get(urls["metrics"]) as reply:
                    assert "llm_d_epp_ready_endpoints" in await reply.text()

        asyncio.run(use())
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_option_with_fields_is_parsed() -> None:
    config = _parse_options(["--generation", '{"merged_tokens": true, "context_length": 100}'])
    assert config.generation == GenerationConfig(merged_tokens=True, context_length=100)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--slots", "many", "slots"),
        ("--trace", "/none", "/none"),
        ("--steps", "5:x", "steps: '5:x'"),
        ("--generation", "{", "JSON"),
        ("--generation", '{"merged": true}', "merged"),
    ],
)
def test_invalid_option_is_reported(option: str, value: str, message: str) -> None:
    command = (sys.executable, "-m", "dispatcher.lab.standin", option, value)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_request_costs_no_more_cpu_time_than_in_its_client() -> None:
    """Compare the CPU time of both in the same period; a bare client takes 0.2 ms on an idle machine."""
    command = (sys.executable, "-m", "dispatcher.lab.standin", "--seconds", "0.005", "--slots", "64")
    requests = 3_000
    body = json.dumps({"model": "m", "prompt": "hi " * 100}).encode()
    with running_process(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["gateway"] + "/v1/completions"
        world = psutil.Process(process.pid)

        async def load() -> None:
            numbers = iter(range(requests))
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

                async def client() -> None:
                    for number in numbers:
                        async with http.post(url, data=body, headers={"x-request-id": f"r{number}"}) as reply:
                            assert reply.status == 200
                            await reply.read()

                await asyncio.gather(*(client() for _ in range(64)))

        before, own = sum(world.cpu_times()[:2]), time.process_time()
        asyncio.run(load())
        world_s, own_s = sum(world.cpu_times()[:2]) - before, time.process_time() - own
    print(f"{world_s / requests * 1e6:.0f} µs of CPU a request, its client {own_s / requests * 1e6:.0f}")
    assert world_s <= own_s
