"""Who is asked which models are served, how often, and what a round tells."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.core.models.availability import Listing
from dispatcher.core.models.versions import parse_version
from dispatcher.forward import DirectServers
from dispatcher.settings import Settings, parse_settings
from dispatcher.signals.kubernetes.capacity import NO_KUBERNETES, Endpoints
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER
from dispatcher.signals.models.watch import MAX_CONCURRENT, ModelWatch, ServerAccess
from tests.signals.fakes import hanging, raw_server
from tests.signals.modelservers import FakeServer, model_server
from tests.support import free_port, wait_until

NAMED = "models: [{name: m}, {name: n}]\n"


def configured(
    serving: str = "",
    *,
    interval_s: float = 0.1,
    models: str = NAMED,
    gateway: str = "{url: http://gateway.invalid}",
) -> Settings:
    found = parse_settings(
        f"gateway: {gateway}\n{models}serving: {{interval_s: {interval_s}, {serving}}}\n", {}
    )
    assert isinstance(found, Settings), found
    return found


class Rounds:
    """What the watch told, in order."""

    def __init__(self, settings: Settings, **more: Any) -> None:
        self.told: list[tuple[Listing, ...]] = []
        self.watch = ModelWatch(settings, self._take, **{"access": NO_CLUSTER, **more})

    def _take(self, listings: Sequence[Listing]) -> None:
        self.told.append(tuple(listings))

    @property
    def newest(self) -> dict[str, tuple[str, ...] | str]:
        """The models of each endpoint, or its problem."""
        if not self.told:
            return {}
        return {
            each.endpoint: each.models if each.models is not None else each.problem for each in self.told[-1]
        }

    async def come(self, **wanted: tuple[str, ...]) -> None:
        """A round with exactly these."""
        await self.comes(wanted)

    async def comes(self, wanted: dict[str, tuple[str, ...]]) -> None:
        await wait_until(lambda: self.told and self.newest == wanted, what=f"{wanted}, not {self.newest}")

    async def more(self, rounds: int = 2) -> None:
        """So many rounds more: the first of them may have begun before."""
        after = len(self.told) + rounds
        await wait_until(lambda: len(self.told) >= after)


@contextlib.asynccontextmanager
async def watching(settings: Settings, **more: Any) -> AsyncIterator[Rounds]:
    rounds = Rounds(settings, **more)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rounds.watch.run())
        try:
            yield rounds
        finally:
            task.cancel()


async def others_ask(rounds: int = 3) -> None:
    """So long that a watch beside asked so often at its shortest interval."""
    async with model_server("x") as server, watching(configured(urls(server))) as beside:
        await beside.more(rounds)


def of(*servers: FakeServer) -> Endpoints:
    return Endpoints(len(servers), addresses=tuple(server.address for server in servers), is_complete=True)


def urls(*servers: FakeServer) -> str:
    return f"urls: {[server.url for server in servers]}"


async def test_each_server_of_the_settings_is_asked_again_and_again() -> None:
    async with model_server("m") as one, model_server("m", "n") as two:
        async with watching(configured(urls(one, two))) as rounds:
            await rounds.comes({one.address: ("m",), two.address: ("m", "n")})
            one.models = ["n"]
            await rounds.comes({one.address: ("n",), two.address: ("m", "n")})
        asked = one.lists
        await others_ask()
        assert one.lists == asked, "nobody is asked once it has ended"
        assert one.asked[0] == "/v1/models"


async def test_servers_whose_pages_are_read_are_asked_where_no_others_are_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("theirs")

    def settings(serving: str = "") -> Settings:
        vllm = f"{{urls: ['{one.url}/metrics', '{two.url}'], token_file: '{token}'}}"
        return configured(serving, models=f"{NAMED}signals: {{vllm: {vllm}}}\n")

    async with (
        model_server("m") as one,
        model_server("n") as two,
        model_server("m", "n") as third,
        watching(settings()) as rounds,
    ):
        await rounds.comes({one.address: ("m",), two.address: ("n",)})
        assert one.headers[-1]["Authorization"] == two.headers[-1]["Authorization"] == "Bearer theirs"
        token.unlink()
        await wait_until(lambda: "cannot be read" in str(rounds.newest.get(one.address)))
        assert str(rounds.newest[one.address]).startswith("signals.vllm.token_file: ")
        rounds.watch.reconfigure(settings(urls(third)), NO_CLUSTER)
        await rounds.comes({third.address: ("m", "n")})
        assert "Authorization" not in third.headers[-1]


async def test_servers_of_one_address_are_told_apart_by_their_paths() -> None:
    async with model_server("m") as server:
        listed = f"urls: ['{server.url}/a/v1/models', '{server.url}/b/v1/models', '{server.url}/list']"
        async with watching(configured(listed)) as rounds:
            at = server.address
            await wait_until(lambda: rounds.told)
            assert set(rounds.newest) == {f"{at}/a", f"{at}/b", f"{at}/list"}
            assert {"/a/v1/models", "/b/v1/models", "/list"} <= set(server.asked)


async def test_endpoints_that_kubernetes_shows_are_asked_and_those_that_leave_are_not_told() -> None:
    async with model_server("m") as one, model_server("n") as two, watching(configured()) as rounds:
        rounds.watch.update_endpoints(of(one, two))
        await rounds.comes({one.address: ("m",), two.address: ("n",)})
        rounds.watch.update_endpoints(of(two))
        await rounds.comes({two.address: ("n",)})
        rounds.watch.update_endpoints(of())
        await rounds.comes({})
        asked = one.lists, two.lists
        await rounds.more()
        assert (one.lists, two.lists) == asked


async def test_settings_name_the_servers_before_kubernetes_does() -> None:
    async with model_server("m") as one, model_server("n") as two, watching(configured(urls(one))) as rounds:
        rounds.watch.update_endpoints(of(two))
        await rounds.comes({one.address: ("m",)})
        assert two.asked == []


@pytest.mark.parametrize(
    "found", [NO_KUBERNETES, Endpoints(is_complete=True)], ids=["no Kubernetes", "it does not say"]
)
async def test_where_no_server_is_known_the_gateway_is_asked_for_all(found: Endpoints) -> None:
    async with model_server("m", "n") as gateway:
        way = f"{{url: '{gateway.url}/prefix', headers: {{X-Route: llm}}}}"
        async with watching(configured(gateway=way)) as rounds:
            rounds.watch.update_endpoints(found)
            await rounds.come(gateway=("m", "n"))
        assert gateway.asked[0] == "/prefix/v1/models"
        assert gateway.headers[0]["X-Route"] == "llm"


async def test_the_gateway_is_not_asked_before_kubernetes_had_its_time() -> None:
    async with model_server("g") as gateway, model_server("m") as server:
        settings = configured(gateway=f"{{url: '{gateway.url}'}}")
        async with watching(settings) as rounds:
            rounds.watch.update_endpoints(Endpoints())
            await others_ask()
            assert rounds.told == []
            rounds.watch.update_endpoints(of(server))
            await rounds.comes({server.address: ("m",)})
        assert gateway.asked == []
        async with watching(settings, discovery_wait_s=0.2) as rounds:
            await rounds.come(gateway=("g",))


async def test_the_gateway_is_asked_where_the_settings_say_so_whatever_is_known() -> None:
    async with model_server("g") as gateway, model_server("m") as server:
        settings = configured("observe: gateway", gateway=f"{{url: '{gateway.url}'}}")
        async with watching(settings) as rounds:
            rounds.watch.update_endpoints(of(server))
            await rounds.come(gateway=("g",))
            assert server.asked == []


async def test_where_endpoints_are_to_be_asked_and_none_is_known_that_is_told() -> None:
    async with watching(configured("observe: endpoints")) as rounds:
        rounds.watch.update_endpoints(NO_KUBERNETES)
        await wait_until(lambda: rounds.told)
        why = "no model server is known: serving.urls, or run where the Kubernetes watch works"
        assert rounds.newest == {"endpoints": why}


@pytest.mark.parametrize(("observe", "models"), [("off", NAMED), ("auto", "")])
async def test_nobody_is_asked_where_nothing_is_to_be_known(observe: str, models: str) -> None:
    async with model_server("m") as server:
        off = configured(f"observe: {observe}, {urls(server)}", models=models)
        async with watching(off) as rounds:
            rounds.watch.update_endpoints(of(server))
            await others_ask()
            assert (rounds.told, server.asked) == ([], [])
            rounds.watch.reconfigure(configured(urls(server)), NO_CLUSTER)
            await rounds.comes({server.address: ("m",)})
            rounds.watch.reconfigure(off, NO_CLUSTER)
            told = len(rounds.told)
            await others_ask()
            assert len(rounds.told) == told


async def test_new_settings_count_at_once_and_no_round_of_the_old_ones_is_told() -> None:
    async with model_server("m") as slow, model_server("n") as server:
        slow.slow_s = 0.5
        async with watching(configured(urls(slow), interval_s=3600)) as rounds:
            await wait_until(lambda: slow.running)
            rounds.watch.reconfigure(configured(urls(server)), NO_CLUSTER)
            await rounds.comes({server.address: ("n",)})
            assert all(each.endpoint == server.address for told in rounds.told for each in told)


async def test_a_change_of_other_settings_asks_nothing_anew() -> None:
    async with model_server("m") as server:
        hourly = f"gateway: {{url: http://g}}\nserving: {{interval_s: 3600, {urls(server)}}}\n{NAMED}"
        old, new = parse_settings(hourly, {}), parse_settings(hourly + "budget: {reserve: 0.2}", {})
        assert isinstance(old, Settings)
        assert isinstance(new, Settings)
        async with watching(old) as rounds:
            await rounds.comes({server.address: ("m",)})
            rounds.watch.reconfigure(new, NO_CLUSTER)
            await others_ask(8)
            assert (len(rounds.told), server.lists) == (1, 1)


async def test_one_that_cannot_be_read_spoils_nothing_for_the_others() -> None:
    async with model_server("m") as good, model_server() as bad, raw_server(hanging) as port:
        bad.answer = web.Response(text="<html>sign in</html>")
        gone = f"127.0.0.1:{free_port()}"
        addresses = (gone, f"127.0.0.1:{port}", bad.address, good.address)
        async with watching(configured()) as rounds:
            rounds.watch.update_endpoints(Endpoints(4, addresses=addresses, is_complete=True))
            await wait_until(lambda: rounds.told)
            told = rounds.told[0]
        assert [each.endpoint for each in told] == list(addresses)
        assert [each.models for each in told] == [None, None, None, ("m",)]
        assert "refused" in told[0].problem
        assert told[1].problem == "no whole answer within 1 s"
        assert "malformed" in told[2].problem


async def test_many_endpoints_are_asked_few_at_a_time() -> None:
    async with model_server("m") as server:
        server.slow_s = 0.02
        port = server.address.rpartition(":")[2]
        addresses = tuple(f"127.0.0.{number}:{port}" for number in range(1, 2)) + tuple(
            f"localhost:{port}" for _ in range(3 * MAX_CONCURRENT)
        )
        async with watching(configured()) as rounds:
            rounds.watch.update_endpoints(Endpoints(len(addresses), addresses=addresses, is_complete=True))
            await wait_until(lambda: rounds.told)
        assert len(rounds.told[0]) == len(addresses)
        assert 1 < server.max_limit <= MAX_CONCURRENT


async def test_endpoints_that_change_all_the_time_bring_no_storm_of_questions() -> None:
    async with model_server("m") as one, model_server("n") as two:
        hourly = configured(interval_s=3600)
        async with watching(hourly) as rounds:
            loop = asyncio.get_running_loop()
            until = loop.time() + 1.2
            while loop.time() < until:
                rounds.watch.update_endpoints(of(one))
                await asyncio.sleep(0.005)
                rounds.watch.update_endpoints(of(one, two))
                await asyncio.sleep(0.005)
            assert 2 <= one.lists <= 4


async def test_the_servers_get_their_token_read_anew_and_the_gateway_its_own(tmp_path: Path) -> None:
    mine, gate = tmp_path / "servers", tmp_path / "gateway"
    mine.write_text("first")
    gate.write_text("gatekey")
    way = f"{{url: 'http://127.0.0.1:1', token_file: '{gate}'}}"
    async with model_server("m") as server:
        async with watching(configured(f"{urls(server)}, token_file: '{mine}'", gateway=way)) as rounds:
            await rounds.comes({server.address: ("m",)})
            assert server.headers[0]["Authorization"] == "Bearer first"
            mine.write_text("second")
            await wait_until(lambda: server.headers[-1]["Authorization"] == "Bearer second")
            mine.unlink()
            await wait_until(lambda: "cannot be read" in str(rounds.newest.get(server.address)))
            assert str(rounds.newest[server.address]).startswith("serving.token_file: ")
        way = way.replace("http://127.0.0.1:1", server.url)
        async with watching(configured("observe: gateway", gateway=way)) as rounds:
            await rounds.come(gateway=("m",))
            assert server.headers[-1]["Authorization"] == "Bearer gatekey"
            gate.unlink()
            await wait_until(lambda: "gateway.token_file: " in str(rounds.newest.get("gateway")))


async def test_user_and_password_of_a_url_are_sent_and_never_shown() -> None:
    async with model_server("m") as server:
        with_secret = server.url.replace("http://", "http://user:hunter2@")
        async with watching(configured(f"urls: ['{with_secret}']")) as rounds:
            await rounds.comes({server.address: ("m",)})
        async with watching(configured("observe: gateway", gateway=f"{{url: '{with_secret}'}}")) as rounds:
            await rounds.come(gateway=("m",))
        assert {headers["Authorization"] for headers in server.headers} == {"Basic dXNlcjpodW50ZXIy"}


async def test_tls_is_as_the_settings_say_and_follows_its_files(tmp_path: Path) -> None:
    right, wrong = trustme.CA(), trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    right.issue_cert("127.0.0.1").configure_cert(theirs)
    trusted = tmp_path / "ca.pem"
    wrong.cert_pem.write_to_path(trusted)
    async with model_server("m", tls=theirs) as server:
        async with watching(configured(f"tls: {{ca_file: '{trusted}'}}")) as rounds:
            rounds.watch.update_endpoints(of(server))  # an address, which is asked by https
            await wait_until(lambda: "not trusted" in str(rounds.newest.get(server.address)))
            right.cert_pem.write_to_path(trusted)
            await rounds.comes({server.address: ("m",)})
            trusted.unlink()
            await wait_until(lambda: "serving.tls: " in str(rounds.newest.get(server.address)))
        right.cert_pem.write_to_path(trusted)
        way = f"{{url: '{server.url}', tls: {{ca_file: '{trusted}'}}}}"
        async with watching(configured("observe: gateway", gateway=way)) as rounds:
            await rounds.come(gateway=("m",))


# How to speak to the servers that were asked.


def access(rounds: Rounds, endpoint: str) -> ServerAccess:
    found = rounds.watch.find_server(endpoint)
    assert isinstance(found, ServerAccess), found
    return found


async def test_who_was_asked_for_models_can_be_spoken_to_about_other_things() -> None:
    async with model_server("m") as one, model_server("m") as two:
        secret = two.url.replace("http://", "http://user:hunter2@")
        listed = f"urls: ['{one.url}/a/v1/models', '{secret}', '{one.url}/list']"
        async with watching(configured(listed)) as rounds:
            assert rounds.watch.find_server(two.address) == "no model server was asked for its models yet"
            await rounds.more(1)
            plain = access(rounds, f"{one.address}/a")
            assert (plain.base_url, dict(plain.headers), plain.tls) == (f"{one.url}/a", {}, None)
            assert access(rounds, two.address).base_url == two.url
            assert dict(access(rounds, two.address).headers) == {"Authorization": "Basic dXNlcjpodW50ZXIy"}
            assert "dXNlcjpodW50ZXIy" not in repr(access(rounds, two.address))
            assert "not at /v1/models" in str(rounds.watch.find_server(f"{one.address}/list"))
            assert rounds.watch.find_server("10.0.0.9:8000") == "no model server of that name is known"


async def test_a_server_that_cannot_be_read_can_be_spoken_to_and_one_that_has_left_cannot() -> None:
    async with model_server("m") as one, watching(configured()) as rounds:
        nobody = f"127.0.0.1:{free_port()}"
        rounds.watch.update_endpoints(Endpoints(2, addresses=(one.address, nobody), is_complete=True))
        await wait_until(lambda: nobody in rounds.newest)
        assert access(rounds, nobody).base_url == f"http://{nobody}"
        assert {each.endpoint: each.is_down for each in rounds.told[-1]} == {one.address: False, nobody: True}
        rounds.watch.update_endpoints(of(one))
        await rounds.comes({one.address: ("m",)})
        assert rounds.watch.find_server(nobody) == "no model server of that name is known"


async def test_where_the_gateway_is_asked_no_server_is_known_and_none_is_down_while_it_is_away() -> None:
    way = f"{{url: 'http://127.0.0.1:{free_port()}'}}"
    async with watching(configured("observe: gateway", gateway=way)) as rounds:
        await rounds.more(1)
        assert "the gateway is asked" in str(rounds.watch.find_server("gateway"))
        (told,) = rounds.told[-1]
        assert "refused" in told.problem
        assert not told.is_down


async def test_servers_are_known_by_the_settings_and_files_of_the_moment(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    async with model_server("m") as one, model_server("m") as two:
        settings = f"{urls(one)}, token_file: '{token}'"
        async with watching(configured(settings)) as rounds:
            await rounds.comes({one.address: ("m",)})
            assert access(rounds, one.address).headers["Authorization"] == "Bearer first"
            token.write_text("second")
            await wait_until(lambda: access(rounds, one.address).headers["Authorization"] == "Bearer second")
            token.unlink()
            await wait_until(lambda: "cannot be read" in str(rounds.watch.find_server(one.address)))
            rounds.watch.reconfigure(configured(urls(two)), NO_CLUSTER)
            assert "yet" in str(rounds.watch.find_server(one.address)), "what it is asked by has changed"
            await rounds.comes({two.address: ("m",)})
            assert dict(access(rounds, two.address).headers) == {}
            rounds.watch.reconfigure(configured("observe: off"), NO_CLUSTER)
            assert "yet" in str(rounds.watch.find_server(two.address))


async def test_servers_are_verified_by_what_they_are_asked_by(tmp_path: Path) -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    settings = configured(f"tls: {{ca_file: '{tmp_path / 'ca.pem'}'}}")
    async with model_server("m", tls=theirs) as server, watching(settings) as rounds:
        rounds.watch.update_endpoints(of(server))
        await rounds.comes({server.address: ("m",)})
        direct = DirectServers(rounds.watch.find_server, lambda: 1024)
        try:
            for _ in range(2):
                found = await direct.post(
                    server.address, "/v1/models", b"{}", deadline=asyncio.get_running_loop().time() + 20
                )
                assert isinstance(found, Delivered), found
        finally:
            await direct.aclose()
        known = access(rounds, server.address)
        await rounds.more()
        assert access(rounds, server.address).tls is known.tls, "kept while its files are what they were"


async def test_others_have_their_turns_while_thousands_of_new_names_are_matched() -> None:
    """A name is also not matched again in the rounds that follow."""
    names = tuple(f"turns-{number}" for number in range(2_000))
    models = "models: [{name: turns, match: 'turns-(?P<version>.*)'}]\n"
    most, last = 0, parse_version.cache_info().misses
    before = last
    async with model_server(*names) as server, watching(configured(urls(server), models=models)) as rounds:
        while len(rounds.told) < 2:
            most, last = (
                max(most, parse_version.cache_info().misses - last),
                parse_version.cache_info().misses,
            )
            await asyncio.sleep(0)
        assert rounds.newest == {server.address: names}
    assert 0 < most <= 256
    assert parse_version.cache_info().misses - before == len(names)
