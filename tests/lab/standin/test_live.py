"""The live world does what it says it does; measured by a client that knows nothing of it."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.lab.standin.live import Answer, Config, Control, Fault, LiveWorld
from tests.support import running, wait_until

Post = Callable[..., Coroutine[Any, Any, "Reply"]]
REALTIME = {"x-llm-d-inference-objective": "realtime"}


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
        **more: Any,
    ) -> Reply:
        body = payload if payload is not None else {"model": "m", "prompt": "hi"}
        data = body if not isinstance(body, dict) else json.dumps(body).encode()
        named = {"x-request-id": id_} | (headers or {})
        async with http.post(
            f"{world.gateway_url}/v1/completions", data=data, headers=named, **more
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    return post


def live(**config: Any) -> AbstractAsyncContextManager[LiveWorld]:
    @asynccontextmanager
    async def world() -> AsyncIterator[LiveWorld]:
        async with LiveWorld(Config(**config)) as made:
            yield made

    return world()


async def text(http: aiohttp.ClientSession, world: LiveWorld, **headers: str) -> str:
    async with http.get(world.metrics_url, headers=headers) as reply:
        assert reply.status == 200
        return await reply.text()


async def page(http: aiohttp.ClientSession, world: LiveWorld, **headers: str) -> dict[str, float]:
    return {
        sample.name.removeprefix("llm_d_epp_"): sample.value
        for family in text_string_to_metric_families(await text(http, world, **headers))
        for sample in family.samples
    }


def starts(world: LiveWorld) -> dict[str, float]:
    """When they began to run, in the order in which they came; those that never did are left out."""
    return {entry.id: entry.started_at for entry in world.gateway.log if entry.started_at is not None}


async def test_a_request_is_answered_under_its_id(post: Post) -> None:
    async with live(seconds=0.0) as world:
        reply = await post(world, "r-1")
        assert reply.status == 200
        assert json.loads(reply.body)["id"] == "r-1"
        entry = world.gateway.log[-1]
    assert (entry.id, entry.status, entry.batch) == ("r-1", 200, True)


async def test_no_more_run_than_there_are_slots_and_the_others_wait_in_turn(post: Post) -> None:
    async with live(slots=2, seconds=0.3) as world:
        replies = [asyncio.create_task(post(world, "r0"))]
        for number in range(1, 7):
            await wait_until(lambda: world.gateway.build_report()["arrived"] == len(replies))
            replies.append(asyncio.create_task(post(world, f"r{number}")))
        await asyncio.gather(*replies)
        started = starts(world)
        assert list(started) == [entry.id for entry in world.gateway.log] == [f"r{n}" for n in range(7)]
        assert list(started.values()) == sorted(started.values())
        report = world.pool.build_report()
        assert report["running"]["peak"] == 2
        assert report["waiting"]["peak"] > 0


async def test_realtime_waits_before_batch(post: Post) -> None:
    async with live(slots=1, seconds=0.3) as world:
        first = asyncio.create_task(post(world, "first"))
        await wait_until(lambda: world.pool.running == 1)
        batch = asyncio.create_task(post(world, "batch"))
        await wait_until(lambda: world.pool.waiting == 1)
        realtime = asyncio.create_task(post(world, "user", headers=REALTIME))
        await asyncio.gather(first, batch, realtime)
        started = starts(world)
        assert started["first"] < started["user"] < started["batch"]
        assert world.gateway.build_report()["realtime"]["peak"] == 1


async def test_without_flow_control_whoever_came_first_starts_first(post: Post) -> None:
    async with live(slots=1, seconds=0.3, flow_control=False) as world:
        first = asyncio.create_task(post(world, "first"))
        await wait_until(lambda: world.pool.running == 1)
        batch = asyncio.create_task(post(world, "batch"))
        await wait_until(lambda: world.pool.waiting == 1)
        realtime = asyncio.create_task(post(world, "user", headers=REALTIME))
        await asyncio.gather(first, batch, realtime)
        started = starts(world)
        assert started["first"] < started["batch"] < started["user"]


@pytest.mark.parametrize(("flow_control", "reason"), [(True, "rejected-saturated"), (False, None)])
async def test_a_full_queue_answers_429(post: Post, flow_control: bool, reason: str | None) -> None:
    async with live(slots=1, queue_limit=1, seconds=30, flow_control=flow_control) as world:
        taken = [asyncio.create_task(post(world, f"r{n}")) for n in range(2)]
        await wait_until(lambda: world.pool.waiting == 1)
        refused = await post(world, "r2")
        assert (refused.status, refused.headers.get("x-llm-d-request-dropped-reason")) == (429, reason)
        observed = world.build_report()
        assert observed["gateway"]["answers"] == {"429": 1}
        assert observed["pool"]["refused"] == {"batch": 1, "realtime": 0}
        for each in taken:
            each.cancel()


async def test_service_time_follows_the_tokens_and_the_fullness(post: Post) -> None:
    async with live(slots=2) as world:
        alone = await _seconds(post(world, "a", {"max_tokens": 20}))
        both = await asyncio.gather(*(_seconds(post(world, id_, {"max_tokens": 20})) for id_ in "bc"))
    work_s = 0.03 + 0.00025 * 500 + 0.012 * 20
    assert work_s <= alone < 2 * work_s
    assert max(both) >= 2 * work_s  # the second starts as one of two in a pool of two: f = 2


async def _seconds(what: Awaitable[object]) -> float:
    start = time.monotonic()
    await what
    return time.monotonic() - start


async def test_a_draw_belongs_to_its_id(post: Post) -> None:
    tokens = []
    for ids in (("a", "b"), ("b", "a")):
        async with live(slots=8, seed=7) as world:
            drawn = {id_: world.gateway._draw_tokens(id_) for id_ in ids}
            tokens.append(drawn)
    assert tokens[0] == tokens[1]
    assert tokens[0]["a"] != tokens[0]["b"]


async def test_the_way_is_taken_twice_and_is_no_time_in_the_pool(post: Post) -> None:
    async with live(slots=1, seconds=0.05, path_s=0.1) as world:
        took = await _seconds(post(world, "r"))
        report = world.pool.build_report()
    assert took >= 0.25
    assert report["time_s"]["batch"]["max"] < 0.15


async def test_a_client_that_goes_away_frees_its_slot_and_its_place(post: Post) -> None:
    async with live(slots=1, seconds=30.0) as world:
        runs = asyncio.create_task(post(world, "runs"))
        await wait_until(lambda: world.pool.running == 1)
        waits = asyncio.create_task(post(world, "waits"))
        await wait_until(lambda: world.pool.waiting == 1)
        for gone in (waits, runs):
            gone.cancel()
        await wait_until(lambda: world.pool.running == world.pool.waiting == 0)
        assert [entry.status for entry in world.gateway.log] == [0, 0]
        assert world.build_report()["gateway"]["batch"]["now"] == 0


async def test_levels_tell_peak_and_mean_over_time(post: Post) -> None:
    async with live(slots=4, seconds=0.3) as world:
        await world.apply_control(Control(restart=True))
        start = time.monotonic()
        await asyncio.gather(*(post(world, f"r{n}") for n in range(4)))
        report = world.pool.build_report()["batch"]
        assert report["peak"] == 4
        started = starts(world)
        assert len(started) == 4
        busy = sum((entry.ended_at or math.inf) - started[entry.id] for entry in world.gateway.log)
        assert report["mean"] == pytest.approx(busy / (time.monotonic() - start), rel=0.2)
        await world.apply_control(Control(restart=True))
        assert world.pool.build_report()["batch"]["peak"] == 0
        assert len(world.gateway.log) == 4


class TestPage:
    """What the picker's page says of the pool."""

    @staticmethod
    async def _fill(world: LiveWorld, post: Post, requests: int) -> list[asyncio.Task[Reply]]:
        sent = [asyncio.create_task(post(world, f"fill{n}")) for n in range(requests)]
        await wait_until(lambda: world.pool.running + world.pool.waiting == requests)
        return sent

    async def test_the_concurrency_detector_counts(self, http: aiohttp.ClientSession, post: Post) -> None:
        async with live(slots=4, endpoints=2, seconds=30) as world:
            assert "flow_control_queue_size" not in await page(http, world)
            await self._fill(world, post, 3)
            assert (await page(http, world))["flow_control_pool_saturation"] == 0.75
            sent = [asyncio.create_task(post(world)) for _ in range(3)]
            await wait_until(lambda: world.pool.waiting == 2)
            world.picker.flush_now()
            values = await page(http, world)
            for each in sent:
                each.cancel()
        assert values["flow_control_pool_saturation"] == 1.0
        assert values["flow_control_queue_size"] == 2
        assert values["ready_endpoints"] == 2
        assert (values["average_running_requests"], values["average_queue_size"]) == (2.0, 0.0)

    async def test_a_picker_that_believes_too_much_queues_in_the_model_servers(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with live(slots=2, declared=6, seconds=30) as world:
            await self._fill(world, post, 5)
            world.picker.flush_now()
            values = await page(http, world)
        assert values["flow_control_pool_saturation"] == pytest.approx(5 / 6)
        assert values["flow_control_queue_size"] == 0
        assert values["average_queue_size"] == 3

    async def test_the_utilization_detector_is_a_pressure_score(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with live(
            slots=2, detector="utilization", kv_at_full=0.08, seconds=30, metrics_refresh_s=0.1
        ) as world:
            await self._fill(world, post, 2)

            async def saturation_is(expected: float) -> None:
                async def shown() -> bool:
                    return (await page(http, world))["flow_control_pool_saturation"] == pytest.approx(
                        expected
                    )

                await wait_until(shown)

            await saturation_is(0.1)
            burst = [asyncio.create_task(post(world)) for _ in range(7)]
            await wait_until(lambda: world.pool.waiting == 7)
            assert world.pool.waiting_inside == 7, "all pass before the servers are seen to be full"
            await saturation_is(7 / 5)
            held_back = [asyncio.create_task(post(world)) for _ in range(2)]
            await wait_until(lambda: world.pool.waiting == 9)
            crowded = await page(http, world)
            for each in burst + held_back:
                each.cancel()
        assert crowded["flow_control_queue_size"] == 2
        assert crowded["per_endpoint_queue_size"] == 7

    async def test_only_the_utilization_detector_tells_of_stale_endpoints_under_its_own_name(
        self, http: aiohttp.ClientSession
    ) -> None:
        async with live(slots=2) as world:
            assert "stale_endpoints" not in await text(http, world)
        async with live(slots=2, detector="utilization", detector_name="high-concurrency-pool") as world:
            assert 'stale_endpoints{detector="high-concurrency-pool"} 0' in await text(http, world)

    async def test_a_picker_that_has_just_started_shows_no_endpoint_before_its_first_flush(
        self, http: aiohttp.ClientSession
    ) -> None:
        async with live(slots=2, cold=True, flush_s=0.3) as world:
            values = await page(http, world)
            assert (values["ready_endpoints"], values["flow_control_pool_saturation"]) == (0, 0)
            await wait_until(lambda: world.picker.flushed_at is not None)
            assert (await page(http, world))["ready_endpoints"] == 1

    async def test_without_flow_control_there_are_only_averages(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with live(slots=2, flow_control=False, seconds=30) as world:
            await self._fill(world, post, 3)
            world.picker.flush_now()
            values = await page(http, world)
        assert not [name for name in values if name.startswith("flow_control")]
        assert (values["average_running_requests"], values["average_queue_size"]) == (2, 1)

    async def test_averages_are_as_old_as_their_flush(self, http: aiohttp.ClientSession, post: Post) -> None:
        async with live(slots=4, seconds=30, flush_s=0.3) as world:
            await wait_until(lambda: world.picker.flushed_at is not None)
            await self._fill(world, post, 4)
            assert (await page(http, world))["flow_control_pool_saturation"] == 1.0
            flushed = world.picker.flushed_at
            await wait_until(lambda: world.picker.flushed_at != flushed)
            assert (await page(http, world))["average_running_requests"] == 4

    async def test_lag_shows_the_past(self, http: aiohttp.ClientSession, post: Post) -> None:
        async with live(slots=4, seconds=30, lag_s=0.5) as world:
            await self._fill(world, post, 4)
            filled_at = max(entry.arrived_at for entry in world.gateway.log)
            values = await page(http, world)
            if time.monotonic() < filled_at + 0.5:  # or this machine slept through it
                assert values["flow_control_pool_saturation"] < 1.0

            async def shown() -> bool:
                return (await page(http, world))["flow_control_pool_saturation"] == 1.0

            await wait_until(shown)
            assert time.monotonic() >= filled_at + 0.5

    async def test_without_endpoints_it_refuses_and_the_averages_freeze(
        self, http: aiohttp.ClientSession, post: Post
    ) -> None:
        async with live(slots=2, seconds=30) as world:
            await self._fill(world, post, 2)
            world.picker.flush_now()
            await world.apply_control(Control(endpoints=0))
            reply = await post(world, "r")
            assert reply.status == 503
            assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
            world.picker.flush_now()
            values = await page(http, world)
            assert (values["ready_endpoints"], values["flow_control_pool_saturation"]) == (0, 1.0)
            assert values["average_running_requests"] == 2

    async def test_it_asks_for_its_token(self, http: aiohttp.ClientSession) -> None:
        async with live(metrics_token="t0p") as world:
            async with http.get(world.metrics_url) as reply:
                assert reply.status == 401
            assert "ready_endpoints" in await page(http, world, authorization="Bearer t0p")

    @pytest.mark.parametrize(
        ("kind", "status", "start"),
        [("garbage", 200, b"<html>"), ("empty", 200, b""), ("error", 500, b""), ("unauthorized", 401, b"")],
    )
    async def test_it_breaks_and_mends(
        self, http: aiohttp.ClientSession, kind: Any, status: int, start: bytes
    ) -> None:
        async with live() as world:
            await world.apply_control(Control(metrics=kind))
            async with http.get(world.metrics_url) as reply:
                assert reply.status == status
                assert (await reply.read()).startswith(start)
            await world.apply_control(Control(metrics="ok"))
            assert "ready_endpoints" in await page(http, world)

    async def test_it_goes_away_hangs_and_freezes(self, http: aiohttp.ClientSession, post: Post) -> None:
        async with live(slots=2, seconds=30) as world:
            await world.apply_control(Control(metrics="gone"))
            with pytest.raises(aiohttp.ClientConnectorError):
                await page(http, world)
            await world.apply_control(Control(metrics="hang"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await page(http, world)
            await world.apply_control(Control(metrics="frozen"))
            await self._fill(world, post, 2)
            assert (await page(http, world))["flow_control_pool_saturation"] == 0
            await world.apply_control(Control(metrics="ok"))
            assert (await page(http, world))["flow_control_pool_saturation"] == 1


class TestFaults:
    """Each way in which a gateway breaks, as its client sees it."""

    @pytest.mark.parametrize(
        ("status", "reason", "body"),
        [(401, "", ""), (404, "", ""), (500, "", ""), (504, "", ""), (503, "rejected-shutting-down", "bye")],
    )
    async def test_an_answer_at_once(self, post: Post, status: int, reason: str, body: str) -> None:
        answer = Answer(kind="status", status=status, reason=reason, body=body, retry_after="3")
        async with live(slots=1, seconds=0.0) as world:
            await world.apply_control(Control(gateway=Fault(answer=answer)))
            reply = await post(world, "r")
            assert (reply.status, reply.body.decode()) == (status, body)
            assert reply.headers.get("x-llm-d-request-dropped-reason", "") == reason
            assert reply.headers["retry-after"] == "3"
            assert world.pool.build_report()["finished"]["batch"] == 0
            await world.apply_control(Control(gateway=None))
            assert (await post(world, "r")).status == 200

    async def test_a_reset(self, post: Post) -> None:
        async with live(seconds=0.0) as world:
            await world.apply_control(Control(gateway=Fault(answer=Answer(kind="reset"), times=1)))
            with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
                await post(world, "r")
            assert world.gateway.log[-1].status == -1
            assert (await post(world, "r")).status == 200
            assert world.build_report()["gateway"]["batch"]["now"] == 0

    async def test_half_an_answer(self, post: Post) -> None:
        async with live(seconds=0.0) as world:
            await world.apply_control(Control(gateway=Fault(answer=Answer(kind="cut"))))
            with pytest.raises(aiohttp.ClientPayloadError):
                await post(world, "r")

    async def test_a_slow_answer(self, post: Post) -> None:
        async with live(seconds=0.0) as world:
            slow = {"sim": {"kind": "slow", "slow_s": 0.3}}
            assert await _seconds(post(world, "r", slow)) >= 0.3
            assert world.gateway.log[-1].status == 200

    async def test_an_answer_that_never_comes(self, post: Post) -> None:
        async with live(slots=1, seconds=0.0) as world:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await post(world, "r", {"sim": {"kind": "hang"}})
            await wait_until(lambda: world.pool.running == 0)
            assert (await post(world, "r")).status == 200

    async def test_nobody_listens(self, post: Post) -> None:
        async with live(slots=4, seconds=30) as world:
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

    async def test_a_black_hole(self, post: Post) -> None:
        async with live(slots=4, seconds=0.5) as world:
            swallowed = asyncio.create_task(post(world, "swallowed"))
            await wait_until(lambda: world.pool.running == 1)
            await world.apply_control(Control(gateway=Fault(listener="blackhole")))
            # The connection that is there hangs; a new one does not come to be.
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

    async def test_no_tls_where_there_was(self, post: Post, tmp_path: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        async with live(seconds=0.0, tls_cert=str(tmp_path / "pem")) as world:
            assert (await post(world, "r", ssl=trusting)).status == 200
            await world.apply_control(Control(gateway=Fault(listener="plaintext")))
            with pytest.raises(aiohttp.ClientConnectorSSLError):
                await post(world, "r", ssl=trusting)
            await world.apply_control(Control(gateway=None))
            assert (await post(world, "r", ssl=trusting)).status == 200

    async def test_some_requests_only(self, post: Post) -> None:
        busy = Answer(kind="status", status=429)
        async with live(slots=64, seconds=0.0, seed=3) as world:
            await world.apply_control(Control(gateway=Fault(answer=busy, match="noisy")))
            tenant = {"x-llm-d-inference-fairness-id": "noisy"}
            assert (await post(world, "a", headers=tenant)).status == 429
            assert (await post(world, "b", {"prompt": "noisy neighbour"})).status == 429
            assert (await post(world, "c")).status == 200
            await world.apply_control(Control(gateway=Fault(answer=busy, share=0.5)))
            statuses = [(await post(world, f"d{n}")).status for n in range(100)]
            assert 20 <= statuses.count(429) <= 80  # 50 ± 6 standard deviations


class TestPayloads:
    """What a payload asks for under `lab.simulation`, and what goes through unchanged."""

    @pytest.mark.parametrize("size", [1, 100_000, 16 * 1024 * 1024])
    async def test_an_echo_returns_every_byte(self, post: Post, size: int) -> None:
        body = b'{"sim":{"echo":true,"seconds":0},"prompt":"' + b"\\u0000x" * (size // 7) + b'"}'
        async with live() as world:
            assert (await post(world, "r", body)).body == body

    async def test_a_chunked_request_is_read_whole(self, http: aiohttp.ClientSession) -> None:
        parts = [b'{"sim":{"echo":true}', b',"prompt":"', b"x" * 100_000, b'"}']

        async def stream() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        async with live(seconds=0.0) as world:
            async with http.post(world.gateway_url, data=stream()) as reply:
                assert await reply.read() == b"".join(parts)
            async with http.post(world.gateway_url, data=b"{}", headers={"expect": "100-continue"}) as reply:
                assert reply.status == 200

    async def test_a_stream_of_events(self, post: Post) -> None:
        async with live(seconds=0.0) as world:
            reply = await post(world, "r", {"sim": {"events": 3}})
            assert reply.headers["content-type"] == "text/event-stream"
            assert reply.headers["transfer-encoding"] == "chunked"
            assert reply.body.count(b"data: ") == 4
            assert reply.body.endswith(b"data: [DONE]\n\n")

    async def test_chat_is_answered_by_openais_types(self, http: aiohttp.ClientSession) -> None:
        chat = importlib.import_module("openai.types.chat")
        asked = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "sim": {"answer_bytes": 3}}
        async with live(seconds=0.0) as world:
            url = f"{world.gateway_url}/v1/chat/completions"
            async with http.post(url, json=asked) as reply:
                told = chat.ChatCompletion.model_validate(await reply.json(), strict=True)
            async with http.post(url, json=asked | {"sim": {"events": 3}}) as reply:
                *events, last, end = (await reply.text()).split("\n\n")
        assert (told.model, told.choices[0].message.content) == ("qwen", "xxx")
        assert told.usage.prompt_tokens > 0
        pieces = [json.loads(event.removeprefix("data: ")) for event in events]
        chunks = [chat.ChatCompletionChunk.model_validate(each, strict=True) for each in pieces]
        assert [each.choices[0].delta.content for each in chunks] == ["t0", "t1", "t2"]
        assert [each.choices[0].finish_reason for each in chunks] == [None, None, "stop"]
        assert (last, end) == ("data: [DONE]", "")

    @pytest.mark.parametrize("asked", [{"model": "qwen", "prompt": "hi"}, {"prompt": "hi"}])
    async def test_completions_are_answered_by_openais_types(self, post: Post, asked: dict[str, str]) -> None:
        completion = importlib.import_module("openai.types").Completion
        async with live(seconds=0.0) as world:
            told = completion.model_validate(json.loads((await post(world, "r", asked)).body), strict=True)
        assert (told.model, told.choices[0].text) == (asked.get("model", "m"), "ok")

    async def test_size_compression_and_status(self, post: Post) -> None:
        async with live(seconds=0.0) as world:
            reply = await post(world, "r", {"sim": {"answer_bytes": 50_000, "gzip": True}})
            assert reply.headers["content-encoding"] == "gzip"
            assert len(json.loads(reply.body)["choices"][0]["text"]) == 50_000
            reply = await post(world, "r", {"sim": {"kind": "status", "status": 422, "body": "no"}})
            assert (reply.status, reply.body) == (422, b"no")

    async def test_a_wish_nobody_knows_is_refused(self, post: Post) -> None:
        async with live(seconds=0.0) as world:
            reply = await post(world, "r", {"sim": {"stauts": 422}})
            assert reply.status == 400
            assert b"stauts" in reply.body


async def test_held_realtime_keeps_its_level_and_lets_go() -> None:
    async with live(slots=8, steps="0:3", realtime_seconds=0.02) as world:
        await wait_until(lambda: world.pool.build_report()["finished"]["realtime"] >= 9)
        assert world.pool.levels["realtime"].now == 3
        await world.apply_control(Control(realtime=5))
        assert world.pool.levels["realtime"].now == 5
        await world.apply_control(Control(realtime=0))
        await wait_until(lambda: world.pool.levels["realtime"].now == 0)
        assert world.pool.build_report()["realtime"]["peak"] == 5


async def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [(10, 1, 1), (11, 1, 2), (12, 1, 4), (14, 1, 8)]
    text = "".join(f"{at},{context},{generated}\n" for at, context, generated in rows)
    trace.write_text("seconds,context_tokens,generated_tokens\n" + text)
    config = {"trace": str(trace), "trace_from_s": 1.0, "trace_speed": 20.0, "realtime_seconds": 0.0}
    start = time.monotonic()
    async with live(**config) as world:
        await wait_until(lambda: world.pool.build_report()["finished"]["realtime"] == 3)
        assert time.monotonic() - start >= 3 / 20
        assert world.pool.build_report()["tokens"]["realtime"] == 2 + 4 + 8


async def test_ids_that_come_again_are_told(post: Post) -> None:
    async with live(seconds=0.0) as world:
        await world.apply_control(Control(gateway=Fault(answer=Answer(kind="status", status=503), times=1)))
        for id_ in ("retried", "retried", "twice", "twice", "once"):
            await post(world, id_)
        ids = world.build_report()["gateway"]["ids"]
    assert (ids["distinct"], ids["served"]) == (3, 3)
    assert (ids["arrived_again"], ids["served_again"], ids["examples"]) == (2, 1, {"twice": 2})


async def test_the_control_side(http: aiohttp.ClientSession, post: Post) -> None:
    async with live(slots=4, seconds=0.0) as world:
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


async def test_a_get_is_answered_at_once_and_takes_no_slot(http: aiohttp.ClientSession) -> None:
    async with live(slots=1, seconds=30.0) as world, asyncio.timeout(10):
        async with http.get(f"{world.gateway_url}/v1/completions") as reply:
            assert reply.status == 405
        assert world.build_report()["pool"]["all"]["peak"] == 0


def test_every_option_says_what_it_does_and_its_default() -> None:
    command = (sys.executable, "-m", "dispatcher.lab.standin", "--help")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    options = " ".join(shown.partition("options:")[2].split()).split(" --")[2:]
    assert len(options) == len(msgspec.structs.fields(Config))
    for option in options:
        assert re.search(r"[a-z]{3}.*[.;] Default: .", option), option
    assert "--slots SLOTS Requests that all endpoints together really run at once. Default: 32" in " --".join(
        ["", *options]
    )


def test_it_runs_as_a_process_and_ends_when_told() -> None:
    command = (sys.executable, "-m", "dispatcher.lab.standin", "--seconds", "0", "--slots", "3")
    with running(*command, stdout=subprocess.PIPE) as process:
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
                        going = http.post(urls["gateway"], data=b"{}", timeout=aiohttp.ClientTimeout(0.5))
                        if fault is None:
                            async with going as reply:
                                assert reply.status == 200
                        else:
                            with pytest.raises((aiohttp.ClientError, TimeoutError)):
                                await going
                async with http.get(urls["metrics"]) as reply:
                    assert "llm_d_epp_ready_endpoints" in await reply.text()

        asyncio.run(use())
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--slots", "many", "slots"), ("--trace", "/none", "/none"), ("--steps", "5:x", "steps: '5:x'")],
)
def test_a_wrong_option_says_what_is_wrong(option: str, value: str, said: str) -> None:
    command = (sys.executable, "-m", "dispatcher.lab.standin", option, value)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_request_costs_it_no_more_than_its_client() -> None:
    """By the CPU time that each takes of the same moments; a bare client takes 0.2 ms on an idle machine."""
    command = (sys.executable, "-m", "dispatcher.lab.standin", "--seconds", "0.005", "--slots", "64")
    requests = 3_000
    body = json.dumps({"model": "m", "prompt": "hi " * 100}).encode()
    with running(*command, stdout=subprocess.PIPE) as process:
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
