"""Model servers of the stand-in: their model lists, and requests for models that they do not serve."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import aiohttp
import pytest

from dispatcher.common.network_errors import is_connection_refused
from dispatcher.features.models.availability import Listing
from dispatcher.features.models.listing import find_waiting_adapters, parse_list
from dispatcher.features.models.watch import ModelWatch
from dispatcher.gateway.direct import DirectServers
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.lab.standin.config import Adapter, Config, Control, Fault, Roll
from dispatcher.lab.standin.live import LiveWorld
from dispatcher.lab.standin.replies import Answer
from dispatcher.lab.standin.serving import parse_models
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.requests.request import Request
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER
from tests.support import wait_until


class StandInClient:
    """HTTP client of a stand-in."""

    def __init__(self, http: aiohttp.ClientSession, world: LiveWorld) -> None:
        self._http, self._world = http, world

    async def get(self, url: str) -> tuple[int, bytes]:
        async with self._http.get(url) as reply:
            return reply.status, await reply.read()

    async def list_models(self, number: int | None = None) -> tuple[str, ...] | None:
        """Return the models that a server lists, or the gateway lists; `None` without an answer."""
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

    async def list_waiting_adapters(self, number: int) -> tuple[str, ...]:
        """Return the waiting adapters, as the dispatcher reads them from the metrics page of the server."""
        _, body = await self.get(self._world.metrics_url.replace("/metrics", f"/servers/{number}/metrics"))
        page = PageParser(["vllm:lora_requests_info"])
        page.feed(body)
        return find_waiting_adapters(page.close())

    async def send(
        self,
        model: str,
        *,
        allowed_servers: str | None = None,
        direct_url: str = "",
        path: str = "/v1/completions",
    ) -> int:
        """Send a request, limited to the servers `to` or directly to a URL, and return the status."""
        headers = {} if allowed_servers is None else {"X-Subset": allowed_servers}
        url = (direct_url or self._world.gateway_url) + path
        body = {"model": model, "input": "hi"}
        async with self._http.post(url, json=body, headers=headers) as reply:
            await reply.read()
            return reply.status

    def server_url(self, number: int) -> str:
        """Return the URL of a model server."""
        return self._world.metrics_url.replace("/metrics", f"/servers/{number}")

    def server_addresses(self, *numbers: int) -> str:
        return ",".join(self.server_url(number).removeprefix("http://") for number in numbers)

    async def post_completion(self, model: str | None) -> tuple[int, Any]:
        body = {"prompt": "hi"} | ({} if model is None else {"model": model})
        async with self._http.post(f"{self._world.gateway_url}/v1/completions", json=body) as reply:
            return reply.status, json.loads(await reply.read())

    async def time_completion(self, model: str) -> float:
        before = time.monotonic()
        assert (await self.post_completion(model))[0] == 200
        return time.monotonic() - before


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


async def test_any_model_is_served_and_one_is_listed_without_configured_models(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2)) as world:
        client = StandInClient(http, world)
        assert (
            await client.list_models() == await client.list_models(0) == await client.list_models(1) == ("m",)
        )
        assert await client.list_models(2) is None
        assert (await client.post_completion("whatever"))[0] == 200
        assert world.gateway.log[-1].model_server == -1
        assert world.gateway.build_report()["arrived"] == 1, "model lists do not count as requests"
        assert world.build_report()["models"] == {"lists": 5, "unknown": 0, "servers": [["m"], ["m"]]}


async def test_each_server_lists_its_models_and_the_gateway_lists_all(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=3, models="a,b; a")) as world:
        client = StandInClient(http, world)
        assert [await client.list_models(number) for number in range(3)] == [("a", "b"), ("a",), ("a",)]
        assert await client.list_models() == ("a", "b")
        await world.apply_control(Control(models=[[], ["c"]]))
        assert [await client.list_models(number) for number in range(3)] == [(), ("c",), ("c",)]
        await world.apply_control(Control(endpoints=4))
        assert await client.list_models(3) == ("c",)
        assert await client.list_models() == ("c",)
        await world.apply_control(Control(models=None))
        assert await client.list_models() == ("m",)


async def test_server_in_turn_answers_404_for_a_model_it_does_not_serve(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a;b")) as world:
        client = StandInClient(http, world)
        answers = [await client.post_completion("b") for _ in range(4)]
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
        assert (await client.post_completion(None))[0] == 200, (
            "vLLM uses its own model if the request names none"
        )
        assert world.build_report()["models"]["unknown"] == 2
        assert world.pool.build_report()["finished"]["batch"] == 3


async def test_rolling_update_replaces_servers_one_by_one(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, slots=8, endpoints=2, models="a")) as world:
        client = StandInClient(http, world)
        await world.apply_control(Control(roll=Roll(to=["b"], gone_s=0.4, pause_s=0.4)))
        await wait_until(lambda: world.servers.present == [1])
        assert (world.pool.slots, world.picker.endpoints) == (4, 1)
        assert [await client.list_models(number) for number in range(2)] == [None, ("a",)]
        assert (await client.get(world.metrics_url.replace("/metrics", "/servers/0/metrics")))[0] == 404
        await wait_until(lambda: world.servers.present == [0, 1])
        assert await client.list_models() == ("b", "a")
        assert world.pool.slots == 8
        await wait_until(lambda: world.servers.present == [0])
        assert (await client.post_completion("b"))[0] == 200
        assert (await client.post_completion("a"))[0] == 404
        await wait_until(lambda: world.build_report()["models"]["servers"] == [["b"], ["b"]])


async def test_servers_without_configured_models_list_m_until_they_are_replaced(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2)) as world:
        await world.apply_control(Control(roll=Roll(to=["b"], gone_s=0.0, pause_s=20.0)))
        await wait_until(lambda: world.build_report()["models"]["servers"] == [["b"], ["m"]])


async def test_adapter_is_loaded_while_the_server_runs(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="base")) as world:
        client = StandInClient(http, world)
        await world.apply_control(Control(adapter=Adapter(name="lora", takes_s=0.5, servers=[1, 7])))
        await wait_until(lambda: client.list_waiting_adapters(1))
        assert await client.list_waiting_adapters(1) == ("lora",)
        assert await client.list_waiting_adapters(0) == ()
        assert await client.list_models(1) == ("base",)
        await wait_until(lambda: world.build_report()["models"]["servers"] == [["base"], ["base", "lora"]])
        assert await client.list_waiting_adapters(1) == ()
        _, body = await client.get(world.metrics_url.replace("/metrics", "/servers/1/v1/models"))
        assert [(card["id"], card["parent"]) for card in json.loads(body)["data"]] == [
            ("base", None),
            ("lora", "base"),
        ]
        assert sorted([(await client.post_completion("lora"))[0] for _ in range(2)]) == [200, 404]


async def test_first_request_to_a_model_on_a_server_takes_longer(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0, models="a,b")) as world:
        client = StandInClient(http, world)
        await world.apply_control(Control(cold_s=0.5))
        took = [await client.time_completion(model) for model in ("a", "a", "b", "b")]
        assert [seconds >= 0.5 for seconds in took] == [True, False, True, False]
        await world.apply_control(Control(models=[["a"]]))  # equivalent to a new server
        assert await client.time_completion("a") >= 0.5


async def test_servers_answer_model_list_requests_as_configured(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0)) as world:
        client = StandInClient(http, world)
        url = world.metrics_url.replace("/metrics", "/servers/0/v1/models")
        for kind, status, begins in (
            ("error", 500, b"internal"),
            ("garbage", 200, b"<html>"),
            ("unauthorized", 401, b"{"),
            ("ok", 200, b'{"object":"list"'),
        ):
            await world.apply_control(Control(lists=kind))  # type: ignore[arg-type]
            got, body = await client.get(url)
            assert (got, body[: len(begins)]) == (status, begins)
        await world.apply_control(Control(lists="hang"))
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get(url)


async def test_model_list_fails_without_endpoints_and_does_not_use_up_faults(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, models="a")) as world:
        client = StandInClient(http, world)
        await world.apply_control(Control(gateway=Fault(answer=Answer(kind="status", status=503), times=1)))
        assert await client.list_models() == ("a",)
        async with http.post(f"{world.gateway_url}/v1/completions", json={"model": "a"}) as reply:
            assert reply.status == 503
        await world.apply_control(Control(endpoints=0))
        assert await client.list_models() is None
        await world.apply_control(Control(endpoints=2))
        assert await client.list_models() == ("a",)


async def test_dispatcher_reads_the_model_lists_of_the_servers() -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a")) as world:
        base = world.metrics_url.replace("/metrics", "/servers")
        urls = [f"{base}/{number}/v1/models" for number in range(2)]
        configuration = f"serving: {{interval_s: 0.1, urls: {urls}}}\nmodels: [{{name: a}}, {{name: lora}}]\n"
        settings = parse_settings(f"gateway: {{url: '{world.gateway_url}'}}\n{configuration}", {})
        assert isinstance(settings, Settings)
        listings_seen: list[list[tuple[tuple[str, ...] | None, tuple[str, ...]]]] = []

        def record_listings(listings: Sequence[Listing]) -> None:
            listings_seen.append([(each.models, each.loading) for each in listings])

        await world.apply_control(Control(adapter=Adapter(name="lora", takes_s=1.0, servers=[1])))
        watch = ModelWatch(settings, record_listings, access=NO_CLUSTER)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await wait_until(lambda: [(("a",), ()), (("a",), ("lora",))] in listings_seen)
            await wait_until(lambda: [(("a",), ()), (("a", "lora"), ())] in listings_seen)
            await world.apply_control(Control(roll=Roll(to=["b"], gone_s=0.5, pause_s=60.0)))
            await wait_until(lambda: listings_seen[-1] == [(None, ()), (("a", "lora"), ())])
            await wait_until(lambda: listings_seen[-1] == [(("b",), ()), (("a", "lora"), ())])
            running.cancel()


def test_models_option_is_parsed() -> None:
    assert parse_models("") is None
    assert parse_models("a") == [["a"]]
    assert parse_models("a, b;;c") == [["a", "b"], [], ["c"]]


# Requests limited to some servers, and requests sent directly to a server.


def servers_in_log(world: LiveWorld, after: int = 0) -> list[int]:
    """Return the servers that received requests, from the log."""
    return [entry.model_server for entry in world.gateway.log if entry.number > after]


async def test_request_with_allowed_servers_goes_to_them_in_turn(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=4, subset_header="X-Subset")) as world:
        client = StandInClient(http, world)
        for _ in range(4):
            assert await client.send("m", allowed_servers=client.server_addresses(3, 1)) == 200
            assert (
                await client.send("m", allowed_servers=f" {client.server_addresses(0)} , 10.0.0.9:80") == 200
            )
        assert servers_in_log(world) == [1, 0, 3, 0, 1, 0, 3, 0]
        assert await client.send("m") == 200
        assert servers_in_log(world)[-1] == -1, "a request without the header may go to any server"
        await world.apply_control(Control(models=[["m"]]))
        before = world.gateway.log[-1].number
        assert [await client.send("m") for _ in range(4)] == [200] * 4
        assert sorted(servers_in_log(world, before)) == [0, 1, 2, 3]


async def test_request_whose_allowed_servers_are_missing_is_answered_with_503(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a", subset_header="x-subset")) as world:
        client = StandInClient(http, world)
        for allowed in ("", "10.0.0.9:80", client.server_addresses(7)):
            assert await client.send("a", allowed_servers=allowed) == 503
        assert servers_in_log(world) == [-1] * 3
        await world.apply_control(Control(roll=Roll(to=["a"], gone_s=20.0)))
        await wait_until(lambda: world.servers.present == [1])
        assert await client.send("a", allowed_servers=client.server_addresses(0)) == 503
        assert await client.send("a", allowed_servers=client.server_addresses(0, 1)) == 200
        await world.apply_control(Control(subset_header=""))
        assert await client.send("a", allowed_servers="10.0.0.9:80") == 200, "the header has no meaning then"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_direct_request_to_a_server_is_answered_and_logged_as_direct(
    http: aiohttp.ClientSession, path: str
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a;b", path_s=0.0)) as world:
        client = StandInClient(http, world)
        await world.apply_control(Control(cold_s=0.05))
        assert await client.send("b", direct_url=client.server_url(1), path=path) == 200
        assert await client.send("b", direct_url=client.server_url(1), path=path) == 200
        assert await client.send("a", direct_url=client.server_url(1), path=path) == 404
        assert await client.send("b", allowed_servers="anything", path=path) == 404, (
            "it is the turn of the first server"
        )
        assert await client.send("b", path=path) == 200
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


async def test_gateway_fault_does_not_affect_direct_requests(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, slots=1, queue_limit=0, path_s=30.0)) as world:
        client = StandInClient(http, world)
        broken = Fault(answer=Answer(kind="status", status=500))
        for fault in (broken, Fault(listener="blackhole"), Fault(listener="refuse"), None):
            await world.apply_control(Control(gateway=fault))
            assert await client.send("m", direct_url=client.server_url(0)) == 200
        with pytest.raises(aiohttp.ClientError):
            await client.send("m", direct_url=client.server_url(3))
        async with http.get(f"{client.server_url(0)}/v1/completions") as reply:
            assert reply.status == 405
        await world.apply_control(Control(seconds=30.0))
        pending_request = asyncio.create_task(client.send("m", direct_url=client.server_url(0)))
        await wait_until(lambda: world.pool.running == 1)
        assert await client.send("m", direct_url=client.server_url(0)) == 429
        pending_request.cancel()
        await wait_until(lambda: world.pool.running == 0)
        assert world.gateway.log[-2].status == 0, "its client has disconnected"


async def test_replaced_server_is_cold_again_and_drops_connections_while_it_is_gone(
    http: aiohttp.ClientSession,
) -> None:
    async with LiveWorld(Config(seconds=0.0, endpoints=2, models="a", cold_s=0.01)) as world:
        client = StandInClient(http, world)
        assert [await client.send("a", direct_url=client.server_url(0)) for _ in range(2)] == [200, 200]
        await world.apply_control(Control(roll=Roll(to=["a"], gone_s=0.3, pause_s=30.0)))
        await wait_until(lambda: world.servers.present == [1])
        with pytest.raises(aiohttp.ClientError):
            await client.send("a", direct_url=client.server_url(0))
        await wait_until(lambda: world.servers.present == [0, 1])
        assert await client.send("a", direct_url=client.server_url(0)) == 200
        assert [entry.cold for entry in world.gateway.log] == [True, False, True]


async def test_embeddings_contain_one_vector_per_text(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0)) as world:
        url = StandInClient(http, world).server_url(0)
        body = {"model": "m", "input": ["one", "two"]}
        async with http.post(f"{url}/v1/embeddings", json=body) as reply:
            answer = await reply.json()
        assert [item["index"] for item in answer["data"]] == [0, 1]
        async with http.post(f"{url}/v1/embeddings", json={"model": "m"}) as reply:
            assert reply.status == 200, "a body without input is answered like any other"


async def test_separate_servers_have_own_addresses_that_refuse_connections_while_they_are_gone(
    http: aiohttp.ClientSession,
) -> None:
    config = Config(seconds=0.0, endpoints=2, models="a;b", apart=True, subset_header="x-subset")
    async with LiveWorld(config) as world:
        client = StandInClient(http, world)
        one, two = world.ports.urls
        for url, model in ((one, "a"), (two, "b")):
            status, body = await client.get(f"{url}/v1/models")
            assert (status, parse_list(body).names) == (200, (model,))
            assert (await client.get(f"{url}/metrics"))[0] == 200
            assert await client.send(model, direct_url=url) == 200
            assert await client.send(model, allowed_servers=url.removeprefix("http://")) == 200
        assert servers_in_log(world) == [0, 0, 1, 1]

        async def is_listening(url: str) -> bool:
            try:
                return (await client.get(f"{url}/v1/models"))[0] == 200
            except aiohttp.ClientConnectorError as error:
                return not is_connection_refused(error)

        await world.apply_control(Control(roll=Roll(to=["c"], gone_s=0.5, pause_s=30.0)))
        await wait_until(lambda: negate(is_listening(one)))
        assert await is_listening(two)
        assert await client.send("a", allowed_servers=one.removeprefix("http://")) == 503
        await wait_until(lambda: is_listening(one))
        assert await client.send("c", direct_url=one) == 200
        await world.apply_control(Control(endpoints=1))
        assert not await is_listening(two)
        await world.apply_control(Control(endpoints=3))
        assert world.ports.urls[:2] == [one, two], "each server keeps its address"
        assert [await is_listening(url) for url in world.ports.urls] == [True] * 3


async def negate(awaitable: Awaitable[bool]) -> bool:
    return not await awaitable


@pytest.mark.parametrize("has_own_addresses", [False, True])
async def test_direct_and_targeted_requests_of_the_dispatcher_reach_the_intended_server(
    has_own_addresses: bool,
) -> None:
    """The servers are addressed by their names in the listings, with a shared and with separate addresses."""
    config = Config(seconds=0.0, endpoints=2, models="a", apart=True, subset_header="x-subset")
    async with LiveWorld(config) as world:
        base = world.metrics_url.removesuffix("/metrics")
        urls = (
            world.ports.urls
            if has_own_addresses
            else [f"{base}/servers/{number}/v1/models" for number in range(2)]
        )
        configuration = (
            f"gateway: {{url: '{world.gateway_url}'}}\nserving: {{observe: endpoints, urls: {urls}}}\n"
        )
        settings = parse_settings(configuration, {})
        assert isinstance(settings, Settings)
        listings_seen: list[Sequence[Listing]] = []
        watch = ModelWatch(settings, listings_seen.append, access=NO_CLUSTER)
        direct = DirectServers(watch.find_server, lambda: 1 << 20)
        gateway = HttpGateway(settings.gateway, subset_header="x-subset")
        running = asyncio.create_task(watch.run())
        try:
            await wait_until(lambda: listings_seen)
            deadline = asyncio.get_running_loop().time() + 20
            for name in (listing.endpoint for listing in listings_seen[0]):
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
        assert servers_in_log(world) == [0, 0, 1, 1]
        assert [each.direct for each in world.gateway.log] == [True, False, True, False]
