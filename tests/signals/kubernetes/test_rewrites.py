"""Names that are served because the endpoint picker turns them into models that are listed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dispatcher.settings import Settings, parse_settings
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER
from dispatcher.signals.kubernetes.objects import ModelRewrite, RewriteRule, parse_rewrite
from dispatcher.signals.kubernetes.rewrites import ModelAliases, RewriteWatch, merge_rewrites
from dispatcher.signals.models.watch import ModelWatch
from dispatcher.telemetry.events import Event, divert_events
from tests.signals.apiserver import OLD_REWRITES, REWRITES, ApiServer, access, rewrite
from tests.signals.modelservers import model_server
from tests.signals.told import QWEN
from tests.support import wait_until


def seen(
    name: str, *rules: tuple[list[str], list[str]], pool: str = "qwen", created: str = "2025"
) -> tuple[str, ModelRewrite]:
    object_ = rewrite(name, *rules, pool=pool, created=created)
    return name, parse_rewrite(msgspec.Raw(msgspec.json.encode(object_)))


def test_of_an_object_its_rules_are_kept() -> None:
    _, found = seen("a", (["chat", "talk"], ["v1", "v2"]), ([], ["base"]), created="2025-11-21T04:00:00Z")
    rules = (RewriteRule(("chat", "talk"), ("v1", "v2")), RewriteRule((), ("base",)))
    assert found == ModelRewrite("qwen", "2025-11-21T04:00:00Z", rules)


@pytest.mark.parametrize(
    "spec",
    [b"{}", b'{"rules":null}', b'{"poolRef":{"name":"qwen"},"rules":[{},{"matches":[],"targets":null}]}'],
)
def test_an_object_that_says_nothing_rewrites_nothing(spec: bytes) -> None:
    found = parse_rewrite(msgspec.Raw(b'{"metadata":{"name":"a"},"spec":' + spec + b"}"))
    assert merge_rewrites([("a", found)], "qwen") == ModelAliases()


def test_a_name_is_served_where_one_of_its_targets_is_listed() -> None:
    found = merge_rewrites([seen("a", (["chat", "talk"], ["v1", "v2"]), (["other"], ["gone"]))], "qwen")
    assert found.add_aliases(["v2"], {"other", "m"}) == ("v2", "chat", "talk")
    assert found.add_aliases(["m", "chat"], set()) == ("m", "chat")
    assert found.add_aliases([], {"chat"}) == ()


def test_a_rule_for_any_name_serves_those_that_the_settings_name() -> None:
    found = merge_rewrites([seen("a", (["chat"], ["gone"]), ([], ["base"]))], "qwen")
    assert found.add_aliases(["base"], {"b", "a", "chat"}) == ("base", "a", "b")
    assert found.add_aliases(["m"], {"a"}) == ("m",)


def test_the_name_goes_before_any_then_the_older_object_then_the_first_rule() -> None:
    objects = [
        seen("any", ([], ["base"]), created="2023"),
        seen("young", (["chat"], ["young"]), ([], ["late"]), created="2025"),
        seen("old", (["chat"], ["old"]), (["chat"], ["second"]), created="2024"),
        seen("elsewhere", (["chat"], ["elsewhere"]), pool="llama", created="2020"),
        seen("b", (["twin"], ["b"]), created="2024"),
        seen("a", (["twin"], ["a"]), created="2024"),
    ]
    for order in itertools.permutations(objects):
        assert merge_rewrites(order, "qwen") == ModelAliases({"chat": ("old",), "twin": ("a",)}, ("base",))


def test_names_that_no_request_could_carry_are_left_out() -> None:
    assert merge_rewrites([seen("a", (["x" * 257, "", "ok"], ["v"]))], "qwen").exact == {"ok": ("v",)}


# The watch.


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer().serve(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def watching(server: ApiServer) -> AsyncIterator[RewriteWatch]:
    watch = RewriteWatch(QWEN, lambda: None, access=access(server))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.run())
        try:
            yield watch
        finally:
            task.cancel()


async def test_both_groups_are_followed(server: ApiServer) -> None:
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
    server.put(OLD_REWRITES, rewrite("b", (["talk"], ["v2"])))
    server.put(REWRITES, rewrite("c", (["elsewhere"], ["v1"])), namespace="another")
    async with watching(server) as watch:
        await wait_until(lambda: watch.is_settled)
        assert watch.aliases.exact == {"chat": ("v1",), "talk": ("v2",)}
        server.put(REWRITES, rewrite("a", (["chat"], ["v2", "v3"])))
        await wait_until(lambda: watch.aliases.exact == {"chat": ("v2", "v3"), "talk": ("v2",)})
        server.delete(OLD_REWRITES, "b")
        await wait_until(lambda: watch.aliases.exact == {"chat": ("v2", "v3")})
        assert watch.problems == ()


async def test_a_cluster_that_does_not_know_them_has_none(server: ApiServer) -> None:
    server.faults.not_served = {REWRITES, OLD_REWRITES}
    told: list[Event] = []
    with divert_events(lambda event, fields: told.append(event)):
        async with watching(server) as watch:
            await wait_until(lambda: watch.is_settled)
            assert (watch.aliases, watch.problems, told) == (ModelAliases(), (), [])
            server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
            server.faults.not_served = set()
            await wait_until(lambda: watch.aliases.exact)


async def test_a_right_that_is_missing_is_told_once_with_its_rule(server: ApiServer) -> None:
    server.put(OLD_REWRITES, rewrite("b", (["talk"], ["v2"])))
    server.faults.forbidden = {REWRITES}
    told: list[dict[str, object]] = []
    with divert_events(lambda event, fields: told.append({"event": event, **fields})):
        async with watching(server) as watch:
            await wait_until(lambda: watch.is_settled and watch.aliases.exact)
            await wait_until(lambda: len(server.asked(REWRITES, watch=False)) > 2)
            (problem,) = watch.problems
            assert problem.what == "not allowed to list inferencemodelrewrites in namespace default"
            assert 'apiGroups: ["llm-d.ai"], resources: ["inferencemodelrewrites"]' in problem.hint
            assert [(each["event"], each["problem"]) for each in told] == [
                (Event.KUBERNETES_PROBLEM, problem.what)
            ]
            server.faults.forbidden = set()
            await wait_until(lambda: watch.problems == ())


async def test_what_was_seen_stands_while_the_api_is_away(server: ApiServer) -> None:
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
    async with watching(server) as watch:
        await wait_until(lambda: watch.is_settled)
        await server.down()
        await wait_until(lambda: watch.problems)
        assert watch.aliases.exact == {"chat": ("v1",)}


async def test_without_kubernetes_there_is_nothing_to_wait_for() -> None:
    watch = RewriteWatch(QWEN, lambda: None, access=NO_CLUSTER)
    assert watch.is_settled
    await watch.run()


async def test_another_way_into_the_cluster_has_the_rewrites_watched_anew(server: ApiServer) -> None:
    """As where the settings begin or cease to name model servers, which are in no pool."""
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
    async with model_server("v1") as one:
        text = "gateway: {url: http://g}\npool: {name: qwen}\nmodels: [{name: m}]\n"
        settings = parse_settings(f"{text}serving: {{urls: ['{one.url}'], interval_s: 3600}}\n", {})
        assert isinstance(settings, Settings)
        rounds: list[tuple[str, ...] | None] = []
        watch = ModelWatch(settings, lambda told: rounds.append(told[0].models), access=NO_CLUSTER)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await wait_until(lambda: rounds == [("v1",)])
            watch.reconfigure(settings, access(server))
            await wait_until(lambda: len(rounds) > 1)
            assert rounds[1] == ("v1", "chat"), "not before they are seen"
            watch.reconfigure(settings, access(server))
            watch.reconfigure(settings, NO_CLUSTER)
            await wait_until(lambda: rounds[-1] == ("v1",))
            server.put(REWRITES, rewrite("a", (["talk"], ["v1"])))
            watch.reconfigure(settings, access(server))
            await wait_until(lambda: rounds[-1] == ("v1", "talk"))
            assert watch.problems == ()
            running.cancel()


async def test_names_of_rewrites_are_told_with_the_models_that_they_become(server: ApiServer) -> None:
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"]), ([], ["v2"])))
    async with model_server("v1") as one, model_server("v2") as two:
        text = (
            "gateway: {url: http://g}\npool: {name: qwen}\nmodels: [{name: m}]\nserving: {interval_s: 3600}\n"
        )
        settings = parse_settings(text, {})
        assert isinstance(settings, Settings)
        rounds: list[dict[str, tuple[str, ...] | None]] = []
        watch = ModelWatch(
            settings,
            lambda listings: rounds.append({each.endpoint: each.models for each in listings}),
            access=access(server),
        )
        watch.update_endpoints(Endpoints(2, addresses=(one.address, two.address), is_complete=True))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await wait_until(lambda: rounds)
            assert rounds[0] == {one.address: ("v1", "chat"), two.address: ("v2", "m")}, (
                "not before they are seen"
            )
            server.delete(REWRITES, "a")
            await wait_until(lambda: rounds[-1] == {one.address: ("v1",), two.address: ("v2",)})
            assert watch.problems == ()
            running.cancel()
