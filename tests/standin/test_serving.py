"""Model servers of the live world: what they list, and what becomes of a request for something else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from dispatcher.core.served import Listing
from dispatcher.settings import Settings, parse
from dispatcher.signals.cluster import NO_CLUSTER
from dispatcher.signals.exposition import Page
from dispatcher.signals.listing import read_list, waiting_adapters
from dispatcher.signals.models import ModelWatch
from dispatcher.standin.live import Adapter, Answer, Config, Control, Fault, LiveWorld, Roll
from dispatcher.standin.serving import parse_models
from tests.support import wait_until


class Visitor:
    """Asks a world what anybody could ask it."""

    def __init__(self, http: aiohttp.ClientSession, world: LiveWorld) -> None:
        self._http, self._world = http, world

    async def get(self, url: str) -> tuple[int, bytes]:
        async with self._http.get(url) as reply:
            return reply.status, await reply.read()

    async def listed(self, number: int | None = None) -> tuple[str, ...] | None:
        """The models of a server, of the gateway without a number; None: it does not answer."""
        world = self._world
        base = (
            world.gateway_url
            if number is None
            else world.metrics_url.replace("/metrics", f"/servers/{number}")
        )
        try:
            status, body = await self.get(f"{base}/v1/models")
        except aiohttp.ClientError:
            return None
        return read_list(body).names if status == 200 else None

    async def waiting(self, number: int) -> tuple[str, ...]:
        """The adapters that wait, as the dispatcher reads them off the server's page."""
        _, body = await self.get(self._world.metrics_url.replace("/metrics", f"/servers/{number}/metrics"))
        page = Page(["vllm:lora_requests_info"])
        page.feed(body)
        return waiting_adapters(page.close())

    async def post(self, model: str | None) -> tuple[int, Any]:
        body = {"prompt": "hi"} | ({} if model is None else {"model": model})
        async with self._http.post(f"{self._world.gateway_url}/v1/completions", json=body) as reply:
            return reply.status, json.loads(await reply.read())

    async def timed(self, model: str) -> float:
        before = time.monotonic()
        assert (await self.post(model))[0] == 200
        return time.monotonic() - before


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


async def test_without_a_word_of_models_any_name_is_served_and_one_listed(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2)) as world:
        visitor = Visitor(http, world)
        assert await visitor.listed() == await visitor.listed(0) == await visitor.listed(1) == ("m",)
        assert await visitor.listed(2) is None
        assert (await visitor.post("whatever"))[0] == 200
        assert world.gateway.log[-1].model_server == -1
        assert world.gateway.report()["arrived"] == 1, "lists are no requests"
        assert world.observed()["models"] == {"lists": 5, "unknown": 0, "servers": [["m"], ["m"]]}


async def test_each_server_lists_its_own_and_the_gateway_all(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=3, models="a,b; a")) as world:
        visitor = Visitor(http, world)
        assert [await visitor.listed(number) for number in range(3)] == [("a", "b"), ("a",), ("a",)]
        assert await visitor.listed() == ("a", "b")
        await world.control(Control(models=[[], ["c"]]))
        assert [await visitor.listed(number) for number in range(3)] == [(), ("c",), ("c",)]
        await world.control(Control(endpoints=4))
        assert await visitor.listed(3) == ("c",)
        assert await visitor.listed() == ("c",)
        await world.control(Control(models=None))
        assert await visitor.listed() == ("m",)


async def test_the_server_whose_turn_it_is_answers_404_for_what_it_does_not_serve(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a;b")) as world:
        visitor = Visitor(http, world)
        answers = [await visitor.post("b") for _ in range(4)]
        assert [status for status, _ in answers] == [404, 200, 404, 200]
        assert answers[0][1] == {
            "error": {
                "message": "The model `b` does not exist.",
                "type": "NotFoundError",
                "param": "model",
                "code": 404,
            }
        }
        assert [entry.model_server for entry in world.gateway.log] == [-1, 1, -1, 1]
        assert (await visitor.post(None))[0] == 200, "vLLM takes its own model where none is named"
        assert world.observed()["models"]["unknown"] == 2
        assert world.pool.report()["finished"]["batch"] == 3


async def test_servers_are_replaced_one_by_one(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, slots=8, endpoints=2, models="a")) as world:
        visitor = Visitor(http, world)
        await world.control(Control(roll=Roll(to=["b"], gone_s=0.4, pause_s=0.4)))
        await wait_until(lambda: world.servers.present == [1])
        assert (world.pool.slots, world.epp.endpoints) == (4, 1)
        assert [await visitor.listed(number) for number in range(2)] == [None, ("a",)]
        assert (await visitor.get(world.metrics_url.replace("/metrics", "/servers/0/metrics")))[0] == 404
        await wait_until(lambda: world.servers.present == [0, 1])
        assert await visitor.listed() == ("b", "a")
        assert world.pool.slots == 8
        await wait_until(lambda: world.servers.present == [0])
        assert (await visitor.post("b"))[0] == 200
        assert (await visitor.post("a"))[0] == 404
        await wait_until(lambda: world.observed()["models"]["servers"] == [["b"], ["b"]])


async def test_a_world_that_serves_any_name_serves_m_until_it_is_replaced(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2)) as world:
        await world.control(Control(roll=Roll(to=["b"], gone_s=0.0, pause_s=20.0)))
        await wait_until(lambda: world.observed()["models"]["servers"] == [["b"], ["m"]])


async def test_an_adapter_is_loaded_while_the_server_runs(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="base")) as world:
        visitor = Visitor(http, world)
        await world.control(Control(adapter=Adapter(name="lora", takes_s=0.5, servers=[1, 7])))
        await wait_until(lambda: visitor.waiting(1))
        assert await visitor.waiting(1) == ("lora",)
        assert await visitor.waiting(0) == ()
        assert await visitor.listed(1) == ("base",)
        await wait_until(lambda: world.observed()["models"]["servers"] == [["base"], ["base", "lora"]])
        assert await visitor.waiting(1) == ()
        _, body = await visitor.get(world.metrics_url.replace("/metrics", "/servers/1/v1/models"))
        assert [(card["id"], card["parent"]) for card in json.loads(body)["data"]] == [
            ("base", None),
            ("lora", "base"),
        ]
        assert sorted([(await visitor.post("lora"))[0] for _ in range(2)]) == [200, 404]


async def test_the_first_request_to_a_model_on_a_server_takes_longer(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, models="a,b")) as world:
        visitor = Visitor(http, world)
        await world.control(Control(cold_s=0.5))
        took = [await visitor.timed(model) for model in ("a", "a", "b", "b")]
        assert [seconds >= 0.5 for seconds in took] == [True, False, True, False]
        await world.control(Control(models=[["a"]]))  # another server, in effect
        assert await visitor.timed("a") >= 0.5


async def test_servers_answer_who_asks_for_their_lists_as_they_are_told(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0)) as world:
        visitor = Visitor(http, world)
        url = world.metrics_url.replace("/metrics", "/servers/0/v1/models")
        for kind, status, begins in (
            ("error", 500, b"internal"),
            ("garbage", 200, b"<html>"),
            ("unauthorized", 401, b"{"),
            ("ok", 200, b'{"object":"list"'),
        ):
            await world.control(Control(lists=kind))  # type: ignore[arg-type]
            got, body = await visitor.get(url)
            assert (got, body[: len(begins)]) == (status, begins)
        await world.control(Control(lists="hang"))
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await visitor.get(url)


async def test_a_gateway_without_endpoints_lists_nothing_and_no_fault_is_used_up_by_lists(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, models="a")) as world:
        visitor = Visitor(http, world)
        await world.control(Control(gateway=Fault(answer=Answer(kind="status", status=503), times=1)))
        assert await visitor.listed() == ("a",)
        async with http.post(f"{world.gateway_url}/v1/completions", json={"model": "a"}) as reply:
            assert reply.status == 503
        await world.control(Control(endpoints=0))
        assert await visitor.listed() is None
        await world.control(Control(endpoints=2))
        assert await visitor.listed() == ("a",)


async def test_the_dispatcher_sees_what_the_servers_do() -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a")) as world:
        base = world.metrics_url.replace("/metrics", "/servers")
        urls = [f"{base}/{number}/v1/models" for number in range(2)]
        asks = f"serving: {{interval_s: 0.1, urls: {urls}}}\nmodels: [{{name: a}}, {{name: lora}}]\n"
        settings = parse(f"gateway: {{url: '{world.gateway_url}'}}\n{asks}", {})
        assert isinstance(settings, Settings)
        told: list[list[tuple[tuple[str, ...] | None, tuple[str, ...]]]] = []

        def take(listings: Sequence[Listing]) -> None:
            told.append([(each.models, each.loading) for each in listings])

        await world.control(Control(adapter=Adapter(name="lora", takes_s=1.0, servers=[1])))
        watch = ModelWatch(settings, take, access=NO_CLUSTER)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await wait_until(lambda: [(("a",), ()), (("a",), ("lora",))] in told)
            await wait_until(lambda: [(("a",), ()), (("a", "lora"), ())] in told)
            await world.control(Control(roll=Roll(to=["b"], gone_s=0.5, pause_s=60.0)))
            await wait_until(lambda: told[-1] == [(None, ()), (("a", "lora"), ())])
            await wait_until(lambda: told[-1] == [(("b",), ()), (("a", "lora"), ())])
            running.cancel()


def test_models_of_the_command_line() -> None:
    assert parse_models("") is None
    assert parse_models("a") == [["a"]]
    assert parse_models("a, b;;c") == [["a", "b"], [], ["c"]]
