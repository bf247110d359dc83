"""Which servers the model watch asks for their models, how often, and what a round publishes."""

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

from dispatcher.features.models.availability import Listing
from dispatcher.features.models.versions import parse_version
from dispatcher.features.models.watch import MAX_CONCURRENT, ModelWatch
from dispatcher.gateway.direct import DirectServers, ServerAccess
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import NO_KUBERNETES, Endpoints
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER
from tests.signals.fakes import hanging, raw_server
from tests.signals.modelservers import FakeServer, model_server
from tests.support import free_port, wait_until

MODELS = "models: [{name: m}, {name: n}]\n"


def create_settings(
    serving: str = "",
    *,
    interval_s: float = 0.1,
    models: str = MODELS,
    gateway: str = "{url: http://gateway.invalid}",
) -> Settings:
    found = parse_settings(
        f"gateway: {gateway}\n{models}serving: {{interval_s: {interval_s}, {serving}}}\n", {}
    )
    assert isinstance(found, Settings), found
    return found


class RoundRecorder:
    """Recorder of the rounds that a watch publishes, in order."""

    def __init__(self, settings: Settings, **more: Any) -> None:
        self.history: list[tuple[Listing, ...]] = []
        self.watch = ModelWatch(settings, self._record, **{"access": NO_CLUSTER, **more})

    def _record(self, listings: Sequence[Listing]) -> None:
        self.history.append(tuple(listings))

    @property
    def latest(self) -> dict[str, tuple[str, ...] | str]:
        """Models of each endpoint in the latest round, or its problem."""
        if not self.history:
            return {}
        return {
            each.endpoint: each.models if each.models is not None else each.problem
            for each in self.history[-1]
        }

    async def wait_for_named(self, **expected: tuple[str, ...]) -> None:
        """Wait for a round with exactly these models by endpoint name."""
        await self.wait_for_models(expected)

    async def wait_for_models(self, expected: dict[str, tuple[str, ...]]) -> None:
        await wait_until(
            lambda: self.history and self.latest == expected, what=f"{expected}, not {self.latest}"
        )

    async def wait_for_rounds(self, rounds: int = 2) -> None:
        """Wait for this many further rounds. The first of them may have begun before."""
        after = len(self.history) + rounds
        await wait_until(lambda: len(self.history) >= after)


@contextlib.asynccontextmanager
async def run_watch(settings: Settings, **more: Any) -> AsyncIterator[RoundRecorder]:
    rounds = RoundRecorder(settings, **more)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rounds.watch.run())
        try:
            yield rounds
        finally:
            task.cancel()


async def wait_for_other_watch(rounds: int = 3) -> None:
    """Wait until another watch with the shortest interval has published this many rounds."""
    async with model_server("x") as server, run_watch(create_settings(urls_setting(server))) as other_rounds:
        await other_rounds.wait_for_rounds(rounds)


def endpoints_of(*servers: FakeServer) -> Endpoints:
    return Endpoints(len(servers), addresses=tuple(server.address for server in servers), is_complete=True)


def urls_setting(*servers: FakeServer) -> str:
    return f"urls: {[server.url for server in servers]}"


async def test_each_configured_server_is_asked_periodically() -> None:
    async with model_server("m") as one, model_server("m", "n") as two:
        async with run_watch(create_settings(urls_setting(one, two))) as rounds:
            await rounds.wait_for_models({one.address: ("m",), two.address: ("m", "n")})
            one.models = ["n"]
            await rounds.wait_for_models({one.address: ("n",), two.address: ("m", "n")})
        request_count = one.list_request_count
        await wait_for_other_watch()
        assert one.list_request_count == request_count, "a watch that has ended asks no server"
        assert one.requested_paths[0] == "/v1/models"


async def test_servers_of_the_signals_are_asked_if_no_others_are_configured(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("theirs")

    def settings(serving: str = "") -> Settings:
        vllm = f"{{urls: ['{one.url}/metrics', '{two.url}'], token_file: '{token}'}}"
        return create_settings(serving, models=f"{MODELS}signals: {{vllm: {vllm}}}\n")

    async with (
        model_server("m") as one,
        model_server("n") as two,
        model_server("m", "n") as third,
        run_watch(settings()) as rounds,
    ):
        await rounds.wait_for_models({one.address: ("m",), two.address: ("n",)})
        assert one.headers[-1]["Authorization"] == two.headers[-1]["Authorization"] == "Bearer theirs"
        token.unlink()
        await wait_until(lambda: "cannot be read" in str(rounds.latest.get(one.address)))
        assert str(rounds.latest[one.address]).startswith("signals.vllm.token_file: ")
        rounds.watch.reconfigure(settings(urls_setting(third)), NO_CLUSTER)
        await rounds.wait_for_models({third.address: ("m", "n")})
        assert "Authorization" not in third.headers[-1]


async def test_servers_with_the_same_address_are_distinguished_by_their_paths() -> None:
    async with model_server("m") as server:
        listed = f"urls: ['{server.url}/a/v1/models', '{server.url}/b/v1/models', '{server.url}/list']"
        async with run_watch(create_settings(listed)) as rounds:
            at = server.address
            await wait_until(lambda: rounds.history)
            assert set(rounds.latest) == {f"{at}/a", f"{at}/b", f"{at}/list"}
            assert {"/a/v1/models", "/b/v1/models", "/list"} <= set(server.requested_paths)


async def test_endpoints_of_kubernetes_are_asked_until_they_are_removed() -> None:
    async with model_server("m") as one, model_server("n") as two, run_watch(create_settings()) as rounds:
        rounds.watch.update_endpoints(endpoints_of(one, two))
        await rounds.wait_for_models({one.address: ("m",), two.address: ("n",)})
        rounds.watch.update_endpoints(endpoints_of(two))
        await rounds.wait_for_models({two.address: ("n",)})
        rounds.watch.update_endpoints(endpoints_of())
        await rounds.wait_for_models({})
        request_count = one.list_request_count, two.list_request_count
        await rounds.wait_for_rounds()
        assert (one.list_request_count, two.list_request_count) == request_count


async def test_configured_servers_take_precedence_over_kubernetes() -> None:
    async with (
        model_server("m") as one,
        model_server("n") as two,
        run_watch(create_settings(urls_setting(one))) as rounds,
    ):
        rounds.watch.update_endpoints(endpoints_of(two))
        await rounds.wait_for_models({one.address: ("m",)})
        assert two.requested_paths == []


@pytest.mark.parametrize(
    "found", [NO_KUBERNETES, Endpoints(is_complete=True)], ids=["no Kubernetes", "no addresses"]
)
async def test_gateway_is_asked_if_no_server_is_known(found: Endpoints) -> None:
    async with model_server("m", "n") as gateway:
        gateway_settings = f"{{url: '{gateway.url}/prefix', headers: {{X-Route: llm}}}}"
        async with run_watch(create_settings(gateway=gateway_settings)) as rounds:
            rounds.watch.update_endpoints(found)
            await rounds.wait_for_named(gateway=("m", "n"))
        assert gateway.requested_paths[0] == "/prefix/v1/models"
        assert gateway.headers[0]["X-Route"] == "llm"


async def test_gateway_is_not_asked_before_the_discovery_wait_has_passed() -> None:
    async with model_server("g") as gateway, model_server("m") as server:
        settings = create_settings(gateway=f"{{url: '{gateway.url}'}}")
        async with run_watch(settings) as rounds:
            rounds.watch.update_endpoints(Endpoints())
            await wait_for_other_watch()
            assert rounds.history == []
            rounds.watch.update_endpoints(endpoints_of(server))
            await rounds.wait_for_models({server.address: ("m",)})
        assert gateway.requested_paths == []
        async with run_watch(settings, discovery_wait_s=0.2) as rounds:
            await rounds.wait_for_named(gateway=("g",))


async def test_gateway_is_asked_if_the_settings_say_so_although_servers_are_known() -> None:
    async with model_server("g") as gateway, model_server("m") as server:
        settings = create_settings("observe: gateway", gateway=f"{{url: '{gateway.url}'}}")
        async with run_watch(settings) as rounds:
            rounds.watch.update_endpoints(endpoints_of(server))
            await rounds.wait_for_named(gateway=("g",))
            assert server.requested_paths == []


async def test_missing_endpoints_are_a_problem_if_the_settings_require_endpoints() -> None:
    async with run_watch(create_settings("observe: endpoints")) as rounds:
        rounds.watch.update_endpoints(NO_KUBERNETES)
        await wait_until(lambda: rounds.history)
        why = "no model server is known: serving.urls, or run where the Kubernetes watch works"
        assert rounds.latest == {"endpoints": why}


@pytest.mark.parametrize(("observe", "models"), [("off", MODELS), ("auto", "")])
async def test_no_server_is_asked_while_the_watch_is_off(observe: str, models: str) -> None:
    async with model_server("m") as server:
        off = create_settings(f"observe: {observe}, {urls_setting(server)}", models=models)
        async with run_watch(off) as rounds:
            rounds.watch.update_endpoints(endpoints_of(server))
            await wait_for_other_watch()
            assert (rounds.history, server.requested_paths) == ([], [])
            rounds.watch.reconfigure(create_settings(urls_setting(server)), NO_CLUSTER)
            await rounds.wait_for_models({server.address: ("m",)})
            rounds.watch.reconfigure(off, NO_CLUSTER)
            round_count = len(rounds.history)
            await wait_for_other_watch()
            assert len(rounds.history) == round_count


async def test_new_settings_apply_at_once_and_rounds_of_the_old_ones_are_dropped() -> None:
    async with model_server("m") as slow, model_server("n") as server:
        slow.slow_s = 0.5
        async with run_watch(create_settings(urls_setting(slow), interval_s=3600)) as rounds:
            await wait_until(lambda: slow.running)
            rounds.watch.reconfigure(create_settings(urls_setting(server)), NO_CLUSTER)
            await rounds.wait_for_models({server.address: ("n",)})
            assert all(each.endpoint == server.address for listings in rounds.history for each in listings)


async def test_change_of_other_settings_does_not_repeat_the_round() -> None:
    async with model_server("m") as server:
        hourly = (
            f"gateway: {{url: http://g}}\nserving: {{interval_s: 3600, {urls_setting(server)}}}\n{MODELS}"
        )
        old, new = parse_settings(hourly, {}), parse_settings(hourly + "budget: {reserve: 0.2}", {})
        assert isinstance(old, Settings)
        assert isinstance(new, Settings)
        async with run_watch(old) as rounds:
            await rounds.wait_for_models({server.address: ("m",)})
            rounds.watch.reconfigure(new, NO_CLUSTER)
            await wait_for_other_watch(8)
            assert (len(rounds.history), server.list_request_count) == (1, 1)


async def test_unreadable_server_does_not_affect_the_others() -> None:
    async with model_server("m") as good, model_server() as bad, raw_server(hanging) as port:
        bad.answer = web.Response(text="<html>sign in</html>")
        refusing = f"127.0.0.1:{free_port()}"
        addresses = (refusing, f"127.0.0.1:{port}", bad.address, good.address)
        async with run_watch(create_settings()) as rounds:
            rounds.watch.update_endpoints(Endpoints(4, addresses=addresses, is_complete=True))
            await wait_until(lambda: rounds.history)
            listings = rounds.history[0]
        assert [each.endpoint for each in listings] == list(addresses)
        assert [each.models for each in listings] == [None, None, None, ("m",)]
        assert "refused" in listings[0].problem
        assert listings[1].problem == "no whole answer within 1 s"
        assert "malformed" in listings[2].problem


async def test_number_of_concurrent_requests_is_limited() -> None:
    async with model_server("m") as server:
        server.slow_s = 0.02
        port = server.address.rpartition(":")[2]
        addresses = tuple(f"127.0.0.{number}:{port}" for number in range(1, 2)) + tuple(
            f"localhost:{port}" for _ in range(3 * MAX_CONCURRENT)
        )
        async with run_watch(create_settings()) as rounds:
            rounds.watch.update_endpoints(Endpoints(len(addresses), addresses=addresses, is_complete=True))
            await wait_until(lambda: rounds.history)
        assert len(rounds.history[0]) == len(addresses)
        assert 1 < server.max_concurrent <= MAX_CONCURRENT


async def test_frequent_endpoint_changes_do_not_cause_frequent_requests() -> None:
    async with model_server("m") as one, model_server("n") as two:
        hourly = create_settings(interval_s=3600)
        async with run_watch(hourly) as rounds:
            loop = asyncio.get_running_loop()
            until = loop.time() + 1.2
            while loop.time() < until:
                rounds.watch.update_endpoints(endpoints_of(one))
                await asyncio.sleep(0.005)
                rounds.watch.update_endpoints(endpoints_of(one, two))
                await asyncio.sleep(0.005)
            assert 2 <= one.list_request_count <= 4


async def test_servers_and_gateway_get_their_own_current_tokens(tmp_path: Path) -> None:
    server_token, gateway_token = tmp_path / "servers", tmp_path / "gateway"
    server_token.write_text("first")
    gateway_token.write_text("gatekey")
    gateway_settings = f"{{url: 'http://127.0.0.1:1', token_file: '{gateway_token}'}}"
    async with model_server("m") as server:
        async with run_watch(
            create_settings(f"{urls_setting(server)}, token_file: '{server_token}'", gateway=gateway_settings)
        ) as rounds:
            await rounds.wait_for_models({server.address: ("m",)})
            assert server.headers[0]["Authorization"] == "Bearer first"
            server_token.write_text("second")
            await wait_until(lambda: server.headers[-1]["Authorization"] == "Bearer second")
            server_token.unlink()
            await wait_until(lambda: "cannot be read" in str(rounds.latest.get(server.address)))
            assert str(rounds.latest[server.address]).startswith("serving.token_file: ")
        gateway_settings = gateway_settings.replace("http://127.0.0.1:1", server.url)
        async with run_watch(create_settings("observe: gateway", gateway=gateway_settings)) as rounds:
            await rounds.wait_for_named(gateway=("m",))
            assert server.headers[-1]["Authorization"] == "Bearer gatekey"
            gateway_token.unlink()
            await wait_until(lambda: "gateway.token_file: " in str(rounds.latest.get("gateway")))


async def test_user_and_password_of_a_url_are_sent_and_not_shown() -> None:
    async with model_server("m") as server:
        with_secret = server.url.replace("http://", "http://user:hunter2@")
        async with run_watch(create_settings(f"urls: ['{with_secret}']")) as rounds:
            await rounds.wait_for_models({server.address: ("m",)})
        async with run_watch(
            create_settings("observe: gateway", gateway=f"{{url: '{with_secret}'}}")
        ) as rounds:
            await rounds.wait_for_named(gateway=("m",))
        assert {headers["Authorization"] for headers in server.headers} == {"Basic dXNlcjpodW50ZXIy"}


async def test_tls_settings_apply_and_follow_their_files(tmp_path: Path) -> None:
    trusted_authority, other_authority = trustme.CA(), trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trusted_authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    ca_file = tmp_path / "ca.pem"
    other_authority.cert_pem.write_to_path(ca_file)
    async with model_server("m", tls=server_tls) as server:
        async with run_watch(create_settings(f"tls: {{ca_file: '{ca_file}'}}")) as rounds:
            rounds.watch.update_endpoints(
                endpoints_of(server)
            )  # an address without a scheme, which is asked by https
            await wait_until(lambda: "not trusted" in str(rounds.latest.get(server.address)))
            trusted_authority.cert_pem.write_to_path(ca_file)
            await rounds.wait_for_models({server.address: ("m",)})
            ca_file.unlink()
            await wait_until(lambda: "serving.tls: " in str(rounds.latest.get(server.address)))
        trusted_authority.cert_pem.write_to_path(ca_file)
        gateway_settings = f"{{url: '{server.url}', tls: {{ca_file: '{ca_file}'}}}}"
        async with run_watch(create_settings("observe: gateway", gateway=gateway_settings)) as rounds:
            await rounds.wait_for_named(gateway=("m",))


# Access to the servers that were asked


def find_access(rounds: RoundRecorder, endpoint: str) -> ServerAccess:
    found = rounds.watch.find_server(endpoint)
    assert isinstance(found, ServerAccess), found
    return found


async def test_access_to_each_asked_server_is_known() -> None:
    async with model_server("m") as one, model_server("m") as two:
        secret = two.url.replace("http://", "http://user:hunter2@")
        listed = f"urls: ['{one.url}/a/v1/models', '{secret}', '{one.url}/list']"
        async with run_watch(create_settings(listed)) as rounds:
            assert rounds.watch.find_server(two.address) == "no model server was asked for its models yet"
            await rounds.wait_for_rounds(1)
            plain = find_access(rounds, f"{one.address}/a")
            assert (plain.base_url, dict(plain.headers), plain.tls) == (f"{one.url}/a", {}, None)
            assert find_access(rounds, two.address).base_url == two.url
            assert dict(find_access(rounds, two.address).headers) == {
                "Authorization": "Basic dXNlcjpodW50ZXIy"
            }
            assert "dXNlcjpodW50ZXIy" not in repr(find_access(rounds, two.address))
            assert "not at /v1/models" in str(rounds.watch.find_server(f"{one.address}/list"))
            assert rounds.watch.find_server("10.0.0.9:8000") == "no model server of that name is known"


async def test_access_to_an_unreadable_server_is_known_and_to_a_removed_one_is_not() -> None:
    async with model_server("m") as one, run_watch(create_settings()) as rounds:
        refusing = f"127.0.0.1:{free_port()}"
        rounds.watch.update_endpoints(Endpoints(2, addresses=(one.address, refusing), is_complete=True))
        await wait_until(lambda: refusing in rounds.latest)
        assert find_access(rounds, refusing).base_url == f"http://{refusing}"
        assert {each.endpoint: each.is_down for each in rounds.history[-1]} == {
            one.address: False,
            refusing: True,
        }
        rounds.watch.update_endpoints(endpoints_of(one))
        await rounds.wait_for_models({one.address: ("m",)})
        assert rounds.watch.find_server(refusing) == "no model server of that name is known"


async def test_no_server_is_known_or_down_if_the_gateway_is_asked() -> None:
    gateway_settings = f"{{url: 'http://127.0.0.1:{free_port()}'}}"
    async with run_watch(create_settings("observe: gateway", gateway=gateway_settings)) as rounds:
        await rounds.wait_for_rounds(1)
        assert "the gateway is asked" in str(rounds.watch.find_server("gateway"))
        (gateway_listing,) = rounds.history[-1]
        assert "refused" in gateway_listing.problem
        assert not gateway_listing.is_down


async def test_access_follows_changes_of_settings_and_files(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    async with model_server("m") as one, model_server("m") as two:
        settings = f"{urls_setting(one)}, token_file: '{token}'"
        async with run_watch(create_settings(settings)) as rounds:
            await rounds.wait_for_models({one.address: ("m",)})
            assert find_access(rounds, one.address).headers["Authorization"] == "Bearer first"
            token.write_text("second")
            await wait_until(
                lambda: find_access(rounds, one.address).headers["Authorization"] == "Bearer second"
            )
            token.unlink()
            await wait_until(lambda: "cannot be read" in str(rounds.watch.find_server(one.address)))
            rounds.watch.reconfigure(create_settings(urls_setting(two)), NO_CLUSTER)
            assert "yet" in str(rounds.watch.find_server(one.address)), "its access has changed"
            await rounds.wait_for_models({two.address: ("m",)})
            assert dict(find_access(rounds, two.address).headers) == {}
            rounds.watch.reconfigure(create_settings("observe: off"), NO_CLUSTER)
            assert "yet" in str(rounds.watch.find_server(two.address))


async def test_direct_requests_use_the_tls_settings_of_the_watch(tmp_path: Path) -> None:
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    settings = create_settings(f"tls: {{ca_file: '{tmp_path / 'ca.pem'}'}}")
    async with model_server("m", tls=server_tls) as server, run_watch(settings) as rounds:
        rounds.watch.update_endpoints(endpoints_of(server))
        await rounds.wait_for_models({server.address: ("m",)})
        direct = DirectServers(rounds.watch.find_server, lambda: 1024)
        try:
            for _ in range(2):
                found = await direct.post(
                    server.address, "/v1/models", b"{}", deadline=asyncio.get_running_loop().time() + 20
                )
                assert isinstance(found, Delivered), found
        finally:
            await direct.aclose()
        first_access = find_access(rounds, server.address)
        await rounds.wait_for_rounds()
        assert find_access(rounds, server.address).tls is first_access.tls, (
            "kept while its files do not change"
        )


async def test_event_loop_is_not_blocked_while_thousands_of_new_names_are_matched() -> None:
    """A name is matched once, and not again in later rounds."""
    names = tuple(f"turns-{number}" for number in range(2_000))
    models = "models: [{name: turns, match: 'turns-{version}'}]\n"
    max_matches, last = 0, parse_version.cache_info().misses
    before = last
    async with (
        model_server(*names) as server,
        run_watch(create_settings(urls_setting(server), models=models)) as rounds,
    ):
        while len(rounds.history) < 2:
            max_matches, last = (
                max(max_matches, parse_version.cache_info().misses - last),
                parse_version.cache_info().misses,
            )
            await asyncio.sleep(0)
        assert rounds.latest == {server.address: names}
    assert 0 < max_matches <= 256
    assert parse_version.cache_info().misses - before == len(names)
