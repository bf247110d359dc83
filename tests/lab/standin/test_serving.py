"""Model servers of the live world: what they list, and what becomes of a request for something else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import aiohttp
import pytest

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.core.models.availability import Listing
from dispatcher.core.network_errors import is_connection_refused
from dispatcher.core.requests.request import Request
from dispatcher.forward import DirectServers, HttpGateway
from dispatcher.lab.standin.live import Adapter, Answer, Config, Control, Fault, LiveWorld, Roll
from dispatcher.lab.standin.serving import parse_models
from dispatcher.settings import Settings, parse_settings
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER
from dispatcher.signals.models.listing import find_waiting_adapters, parse_list
from dispatcher.signals.models.watch import ModelWatch
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
        return parse_list(body).names if status == 200 else None

    async def waiting(self, number: int) -> tuple[str, ...]:
        """The adapters that wait, as the dispatcher reads them off the server's page."""
        _, body = await self.get(self._world.metrics_url.replace("/metrics", f"/servers/{number}/metrics"))
        page = PageParser(["vllm:lora_requests_info"])
        page.feed(body)
        return find_waiting_adapters(page.close())

    async def send(
        self, model: str, *, to: str | None = None, straight: str = "", path: str = "/v1/completions"
    ) -> int:
        """The status that a request gets which may go `to` these alone, or goes straight to a URL."""
        headers = {} if to is None else {"X-Subset": to}
        url = (straight or self._world.gateway_url) + path
        body = {"model": model, "input": "hi"}
        async with self._http.post(url, json=body, headers=headers) as reply:
            await reply.read()
            return reply.status

    def server(self, number: int) -> str:
        """The URL of a model server."""
        return self._world.metrics_url.replace("/metrics", f"/servers/{number}")

    def labels(self, *numbers: int) -> str:
        return ",".join(self.server(number).removeprefix("http://") for number in numbers)

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
        assert world.gateway.build_report()["arrived"] == 1, "lists are no requests"
        assert world.build_report()["models"] == {"lists": 5, "unknown": 0, "servers": [["m"], ["m"]]}


async def test_each_server_lists_its_own_and_the_gateway_all(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=3, models="a,b; a")) as world:
        visitor = Visitor(http, world)
        assert [await visitor.listed(number) for number in range(3)] == [("a", "b"), ("a",), ("a",)]
        assert await visitor.listed() == ("a", "b")
        await world.apply_control(Control(models=[[], ["c"]]))
        assert [await visitor.listed(number) for number in range(3)] == [(), ("c",), ("c",)]
        await world.apply_control(Control(endpoints=4))
        assert await visitor.listed(3) == ("c",)
        assert await visitor.listed() == ("c",)
        await world.apply_control(Control(models=None))
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
        assert [entry.model_server for entry in world.gateway.log] == [0, 1, 0, 1]
        assert (await visitor.post(None))[0] == 200, "vLLM takes its own model where none is named"
        assert world.build_report()["models"]["unknown"] == 2
        assert world.pool.build_report()["finished"]["batch"] == 3


async def test_servers_are_replaced_one_by_one(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, slots=8, endpoints=2, models="a")) as world:
        visitor = Visitor(http, world)
        await world.apply_control(Control(roll=Roll(to=["b"], gone_s=0.4, pause_s=0.4)))
        await wait_until(lambda: world.servers.present == [1])
        assert (world.pool.slots, world.picker.endpoints) == (4, 1)
        assert [await visitor.listed(number) for number in range(2)] == [None, ("a",)]
        assert (await visitor.get(world.metrics_url.replace("/metrics", "/servers/0/metrics")))[0] == 404
        await wait_until(lambda: world.servers.present == [0, 1])
        assert await visitor.listed() == ("b", "a")
        assert world.pool.slots == 8
        await wait_until(lambda: world.servers.present == [0])
        assert (await visitor.post("b"))[0] == 200
        assert (await visitor.post("a"))[0] == 404
        await wait_until(lambda: world.build_report()["models"]["servers"] == [["b"], ["b"]])


async def test_a_world_that_serves_any_name_serves_m_until_it_is_replaced(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2)) as world:
        await world.apply_control(Control(roll=Roll(to=["b"], gone_s=0.0, pause_s=20.0)))
        await wait_until(lambda: world.build_report()["models"]["servers"] == [["b"], ["m"]])


async def test_an_adapter_is_loaded_while_the_server_runs(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="base")) as world:
        visitor = Visitor(http, world)
        await world.apply_control(Control(adapter=Adapter(name="lora", takes_s=0.5, servers=[1, 7])))
        await wait_until(lambda: visitor.waiting(1))
        assert await visitor.waiting(1) == ("lora",)
        assert await visitor.waiting(0) == ()
        assert await visitor.listed(1) == ("base",)
        await wait_until(lambda: world.build_report()["models"]["servers"] == [["base"], ["base", "lora"]])
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
        await world.apply_control(Control(cold_s=0.5))
        took = [await visitor.timed(model) for model in ("a", "a", "b", "b")]
        assert [seconds >= 0.5 for seconds in took] == [True, False, True, False]
        await world.apply_control(Control(models=[["a"]]))  # another server, in effect
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
            await world.apply_control(Control(lists=kind))  # type: ignore[arg-type]
            got, body = await visitor.get(url)
            assert (got, body[: len(begins)]) == (status, begins)
        await world.apply_control(Control(lists="hang"))
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await visitor.get(url)


async def test_a_gateway_without_endpoints_lists_nothing_and_no_fault_is_used_up_by_lists(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, models="a")) as world:
        visitor = Visitor(http, world)
        await world.apply_control(Control(gateway=Fault(answer=Answer(kind="status", status=503), times=1)))
        assert await visitor.listed() == ("a",)
        async with http.post(f"{world.gateway_url}/v1/completions", json={"model": "a"}) as reply:
            assert reply.status == 503
        await world.apply_control(Control(endpoints=0))
        assert await visitor.listed() is None
        await world.apply_control(Control(endpoints=2))
        assert await visitor.listed() == ("a",)


async def test_the_dispatcher_sees_what_the_servers_do() -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a")) as world:
        base = world.metrics_url.replace("/metrics", "/servers")
        urls = [f"{base}/{number}/v1/models" for number in range(2)]
        asks = f"serving: {{interval_s: 0.1, urls: {urls}}}\nmodels: [{{name: a}}, {{name: lora}}]\n"
        settings = parse_settings(f"gateway: {{url: '{world.gateway_url}'}}\n{asks}", {})
        assert isinstance(settings, Settings)
        told: list[list[tuple[tuple[str, ...] | None, tuple[str, ...]]]] = []

        def take(listings: Sequence[Listing]) -> None:
            told.append([(each.models, each.loading) for each in listings])

        await world.apply_control(Control(adapter=Adapter(name="lora", takes_s=1.0, servers=[1])))
        watch = ModelWatch(settings, take, access=NO_CLUSTER)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await wait_until(lambda: [(("a",), ()), (("a",), ("lora",))] in told)
            await wait_until(lambda: [(("a",), ()), (("a", "lora"), ())] in told)
            await world.apply_control(Control(roll=Roll(to=["b"], gone_s=0.5, pause_s=60.0)))
            await wait_until(lambda: told[-1] == [(None, ()), (("a", "lora"), ())])
            await wait_until(lambda: told[-1] == [(("b",), ()), (("a", "lora"), ())])
            running.cancel()


def test_models_of_the_command_line() -> None:
    assert parse_models("") is None
    assert parse_models("a") == [["a"]]
    assert parse_models("a, b;;c") == [["a", "b"], [], ["c"]]


# Where a request goes that says where it may go, and one that comes straight.


def servers(world: LiveWorld, after: int = 0) -> list[int]:
    """The servers that requests came to, as the log has them."""
    return [entry.model_server for entry in world.gateway.log if entry.number > after]


async def test_a_request_that_names_servers_goes_to_those_alone_and_in_turn(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=4, subset_header="X-Subset")) as world:
        visitor = Visitor(http, world)
        for _ in range(4):
            assert await visitor.send("m", to=visitor.labels(3, 1)) == 200
            assert await visitor.send("m", to=f" {visitor.labels(0)} , 10.0.0.9:80") == 200
        assert servers(world) == [1, 0, 3, 0, 1, 0, 3, 0]
        assert await visitor.send("m") == 200
        assert servers(world)[-1] == -1, "who names none goes anywhere"
        await world.apply_control(Control(models=[["m"]]))
        before = world.gateway.log[-1].number
        assert [await visitor.send("m") for _ in range(4)] == [200] * 4
        assert sorted(servers(world, before)) == [0, 1, 2, 3]


async def test_a_request_for_servers_that_are_not_there_is_answered_as_a_picker_does(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a", subset_header="x-subset")) as world:
        visitor = Visitor(http, world)
        for named in ("", "10.0.0.9:80", visitor.labels(7)):
            assert await visitor.send("a", to=named) == 503
        assert servers(world) == [-1] * 3
        await world.apply_control(Control(roll=Roll(to=["a"], gone_s=20.0)))
        await wait_until(lambda: world.servers.present == [1])
        assert await visitor.send("a", to=visitor.labels(0)) == 503
        assert await visitor.send("a", to=visitor.labels(0, 1)) == 200
        await world.apply_control(Control(subset_header=""))
        assert await visitor.send("a", to="10.0.0.9:80") == 200, "it is a header like any other"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_a_server_takes_requests_straight_and_the_log_says_so(
    http: aiohttp.ClientSession, path: str
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a;b", path_s=0.0)) as world:
        visitor = Visitor(http, world)
        await world.apply_control(Control(cold_s=0.05))
        assert await visitor.send("b", straight=visitor.server(1), path=path) == 200
        assert await visitor.send("b", straight=visitor.server(1), path=path) == 200
        assert await visitor.send("a", straight=visitor.server(1), path=path) == 404
        assert await visitor.send("b", to="anything", path=path) == 404, "its turn is the first one's"
        assert await visitor.send("b", path=path) == 200
        log = [
            (each.direct, each.model_server, each.model, each.cold, each.status) for each in world.gateway.log
        ]
        assert log == [
            (True, 1, "b", True, 200),
            (True, 1, "b", False, 200),
            (True, 1, "a", False, 404),
            (False, 0, "b", False, 404),
            (False, 1, "b", False, 200),
        ]
        report = world.gateway.build_report()
        assert (report["arrived"], report["direct"], report["answers"]) == (2, 3, {"200": 1, "404": 1})
        assert report["batch"]["now"] == 0
        assert world.pool.build_report()["finished"]["batch"] == 3


async def test_what_is_wrong_with_the_gateway_does_not_meet_who_comes_straight(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, slots=1, queue_limit=0, path_s=30.0)) as world:
        visitor = Visitor(http, world)
        broken = Fault(answer=Answer(kind="status", status=500))
        for fault in (broken, Fault(listener="blackhole"), Fault(listener="refuse"), None):
            await world.apply_control(Control(gateway=fault))
            assert await visitor.send("m", straight=visitor.server(0)) == 200
        with pytest.raises(aiohttp.ClientError):
            await visitor.send("m", straight=visitor.server(3))
        async with http.get(f"{visitor.server(0)}/v1/completions") as reply:
            assert reply.status == 405
        await world.apply_control(Control(seconds=30.0))
        waiting = asyncio.create_task(visitor.send("m", straight=visitor.server(0)))
        await wait_until(lambda: world.pool.running == 1)
        assert await visitor.send("m", straight=visitor.server(0)) == 429
        waiting.cancel()
        await wait_until(lambda: world.pool.running == 0)
        assert world.gateway.log[-2].status == 0, "its client went away"


async def test_a_server_that_was_replaced_is_cold_again_and_breaks_connections_while_it_is_gone(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a", cold_s=0.01)) as world:
        visitor = Visitor(http, world)
        assert [await visitor.send("a", straight=visitor.server(0)) for _ in range(2)] == [200, 200]
        await world.apply_control(Control(roll=Roll(to=["a"], gone_s=0.3, pause_s=30.0)))
        await wait_until(lambda: world.servers.present == [1])
        with pytest.raises(aiohttp.ClientError):
            await visitor.send("a", straight=visitor.server(0))
        await wait_until(lambda: world.servers.present == [0, 1])
        assert await visitor.send("a", straight=visitor.server(0)) == 200
        assert [entry.cold for entry in world.gateway.log] == [True, False, True]


async def test_embeddings_are_vectors_one_for_each_text(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0)) as world:
        url = Visitor(http, world).server(0)
        asked = {"model": "m", "input": ["one", "two"]}
        async with http.post(f"{url}/v1/embeddings", json=asked) as reply:
            told = await reply.json()
        assert [item["index"] for item in told["data"]] == [0, 1]
        async with http.post(f"{url}/v1/embeddings", json={"model": "m"}) as reply:
            assert reply.status == 200, "what it cannot read it answers as anything else"


async def test_servers_apart_have_addresses_of_their_own_where_nobody_listens_while_they_are_gone(
    http: aiohttp.ClientSession,
) -> None:
    config = Config(seconds=0.0, endpoints=2, models="a;b", apart=True, subset_header="x-subset")
    async with LiveWorld(config) as world:
        visitor = Visitor(http, world)
        one, two = world.ports.urls
        for url, model in ((one, "a"), (two, "b")):
            status, body = await visitor.get(f"{url}/v1/models")
            assert (status, parse_list(body).names) == (200, (model,))
            assert (await visitor.get(f"{url}/metrics"))[0] == 200
            assert await visitor.send(model, straight=url) == 200
            assert await visitor.send(model, to=url.removeprefix("http://")) == 200
        assert servers(world) == [0, 0, 1, 1]

        async def listens(url: str) -> bool:
            try:
                return (await visitor.get(f"{url}/v1/models"))[0] == 200
            except aiohttp.ClientConnectorError as error:
                return not is_connection_refused(error)

        await world.apply_control(Control(roll=Roll(to=["c"], gone_s=0.5, pause_s=30.0)))
        await wait_until(lambda: not_(listens(one)))
        assert await listens(two)
        assert await visitor.send("a", to=one.removeprefix("http://")) == 503
        await wait_until(lambda: listens(one))
        assert await visitor.send("c", straight=one) == 200
        await world.apply_control(Control(endpoints=1))
        assert not await listens(two)
        await world.apply_control(Control(endpoints=3))
        assert world.ports.urls[:2] == [one, two], "each keeps its address"
        assert [await listens(url) for url in world.ports.urls] == [True] * 3


async def not_(asked: Awaitable[bool]) -> bool:
    return not await asked


@pytest.mark.parametrize("own", [False, True])
async def test_what_the_dispatcher_sends_straight_or_directed_comes_where_it_is_meant(own: bool) -> None:
    """By the names that its listings have for the servers, at shared and at their own addresses."""
    config = Config(seconds=0.0, endpoints=2, models="a", apart=True, subset_header="x-subset")
    async with LiveWorld(config) as world:
        base = world.metrics_url.removesuffix("/metrics")
        urls = world.ports.urls if own else [f"{base}/servers/{number}/v1/models" for number in range(2)]
        asks = f"gateway: {{url: '{world.gateway_url}'}}\nserving: {{observe: endpoints, urls: {urls}}}\n"
        settings = parse_settings(asks, {})
        assert isinstance(settings, Settings)
        told: list[Sequence[Listing]] = []
        watch = ModelWatch(settings, told.append, access=NO_CLUSTER)
        direct = DirectServers(watch.find_server, lambda: 1 << 20)
        gateway = HttpGateway(settings.gateway, subset_header="x-subset")
        running = asyncio.create_task(watch.run())
        try:
            await wait_until(lambda: told)
            deadline = asyncio.get_running_loop().time() + 20
            for name in (listing.endpoint for listing in told[0]):
                found = await direct.post(name, "/v1/completions", b'{"model":"a"}', deadline=deadline)
                assert isinstance(found, Delivered), found
                request = Request("r", 10**10, b'{"model":"a"}', endpoints=name)
                sent = await gateway.forward(request, token=name, deadline=deadline)
                assert isinstance(sent.outcome, Delivered), sent
        finally:
            running.cancel()
            await asyncio.wait([running])
            await direct.aclose()
            await gateway.aclose()
        assert servers(world) == [0, 0, 1, 1]
        assert [each.direct for each in world.gateway.log] == [True, False, True, False]
