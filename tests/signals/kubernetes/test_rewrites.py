"""Model names that are served because the endpoint picker rewrites them to listed models."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dispatcher.features.models.watch import ModelWatch
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER
from dispatcher.signals.kubernetes.objects import ModelRewrite, RewriteRule, parse_rewrite
from dispatcher.signals.kubernetes.rewrites import ModelAliases, RewriteWatch, merge_rewrites
from dispatcher.telemetry.events import Event, divert_events
from tests.signals.apiserver import OLD_REWRITES, REWRITES, ApiServer, access, rewrite
from tests.signals.capacity_recorder import QWEN
from tests.signals.modelservers import model_server
from tests.support import wait_until


def parsed_rewrite(
    name: str, *rules: tuple[list[str], list[str]], pool: str = "qwen", created: str = "2025"
) -> tuple[str, ModelRewrite]:
    object_ = rewrite(name, *rules, pool=pool, created=created)
    return name, parse_rewrite(msgspec.Raw(msgspec.json.encode(object_)))


def test_rules_of_an_object_are_parsed() -> None:
    _, found = parsed_rewrite(
        "a", (["chat", "talk"], ["v1", "v2"]), ([], ["base"]), created="2025-11-21T04:00:00Z"
    )
    rules = (RewriteRule(("chat", "talk"), ("v1", "v2")), RewriteRule((), ("base",)))
    assert found == ModelRewrite("qwen", "2025-11-21T04:00:00Z", rules)


@pytest.mark.parametrize(
    "spec",
    [b"{}", b'{"rules":null}', b'{"poolRef":{"name":"qwen"},"rules":[{},{"matches":[],"targets":null}]}'],
)
def test_object_without_rules_rewrites_nothing(spec: bytes) -> None:
    found = parse_rewrite(msgspec.Raw(b'{"metadata":{"name":"a"},"spec":' + spec + b"}"))
    assert merge_rewrites([("a", found)], "qwen") == ModelAliases()


def test_name_is_served_if_one_of_its_targets_is_listed() -> None:
    found = merge_rewrites(
        [parsed_rewrite("a", (["chat", "talk"], ["v1", "v2"]), (["other"], ["gone"]))], "qwen"
    )
    assert found.add_aliases(["v2"], {"other", "m"}) == ("v2", "chat", "talk")
    assert found.add_aliases(["m", "chat"], set()) == ("m", "chat")
    assert found.add_aliases([], {"chat"}) == ()


def test_rule_for_any_name_serves_the_configured_names() -> None:
    found = merge_rewrites([parsed_rewrite("a", (["chat"], ["gone"]), ([], ["base"]))], "qwen")
    assert found.add_aliases(["base"], {"b", "a", "chat"}) == ("base", "a", "b")
    assert found.add_aliases(["m"], {"a"}) == ("m",)


def test_exact_name_then_older_object_then_first_rule_takes_precedence() -> None:
    objects = [
        parsed_rewrite("any", ([], ["base"]), created="2023"),
        parsed_rewrite("young", (["chat"], ["young"]), ([], ["late"]), created="2025"),
        parsed_rewrite("old", (["chat"], ["old"]), (["chat"], ["second"]), created="2024"),
        parsed_rewrite("elsewhere", (["chat"], ["elsewhere"]), pool="llama", created="2020"),
        parsed_rewrite("b", (["twin"], ["b"]), created="2024"),
        parsed_rewrite("a", (["twin"], ["a"]), created="2024"),
    ]
    for order in itertools.permutations(objects):
        assert merge_rewrites(order, "qwen") == ModelAliases({"chat": ("old",), "twin": ("a",)}, ("base",))


def test_names_that_are_too_long_or_empty_are_omitted() -> None:
    assert merge_rewrites([parsed_rewrite("a", (["x" * 257, "", "ok"], ["v"]))], "qwen").exact == {
        "ok": ("v",)
    }


# The watch


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer().serve(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def run_watch(server: ApiServer) -> AsyncIterator[RewriteWatch]:
    watch = RewriteWatch(QWEN, lambda: None, access=access(server))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.run())
        try:
            yield watch
        finally:
            task.cancel()


async def test_rewrites_of_both_api_groups_are_watched(server: ApiServer) -> None:
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
    server.put(OLD_REWRITES, rewrite("b", (["talk"], ["v2"])))
    server.put(REWRITES, rewrite("c", (["elsewhere"], ["v1"])), namespace="another")
    async with run_watch(server) as watch:
        await wait_until(lambda: watch.is_settled)
        assert watch.aliases.exact == {"chat": ("v1",), "talk": ("v2",)}
        server.put(REWRITES, rewrite("a", (["chat"], ["v2", "v3"])))
        await wait_until(lambda: watch.aliases.exact == {"chat": ("v2", "v3"), "talk": ("v2",)})
        server.delete(OLD_REWRITES, "b")
        await wait_until(lambda: watch.aliases.exact == {"chat": ("v2", "v3")})
        assert watch.problems == ()


async def test_cluster_without_the_api_has_no_rewrites(server: ApiServer) -> None:
    server.faults.not_served = {REWRITES, OLD_REWRITES}
    events: list[Event] = []
    with divert_events(lambda event, fields: events.append(event)):
        async with run_watch(server) as watch:
            await wait_until(lambda: watch.is_settled)
            assert (watch.aliases, watch.problems, events) == (ModelAliases(), (), [])
            server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
            server.faults.not_served = set()
            await wait_until(lambda: watch.aliases.exact)


async def test_missing_right_is_logged_once_with_its_rule(server: ApiServer) -> None:
    server.put(OLD_REWRITES, rewrite("b", (["talk"], ["v2"])))
    server.faults.forbidden = {REWRITES}
    events: list[dict[str, object]] = []
    with divert_events(lambda event, fields: events.append({"event": event, **fields})):
        async with run_watch(server) as watch:
            await wait_until(lambda: watch.is_settled and watch.aliases.exact)
            await wait_until(lambda: len(server.requests_for(REWRITES, watch=False)) > 2)
            (problem,) = watch.problems
            assert problem.what == "not allowed to list inferencemodelrewrites in namespace default"
            assert 'apiGroups: ["llm-d.ai"], resources: ["inferencemodelrewrites"]' in problem.hint
            assert [(each["event"], each["problem"]) for each in events] == [
                (Event.KUBERNETES_PROBLEM, problem.what)
            ]
            server.faults.forbidden = set()
            await wait_until(lambda: watch.problems == ())


async def test_known_rewrites_stay_while_the_api_is_unreachable(server: ApiServer) -> None:
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
    async with run_watch(server) as watch:
        await wait_until(lambda: watch.is_settled)
        await server.stop()
        await wait_until(lambda: watch.problems)
        assert watch.aliases.exact == {"chat": ("v1",)}


async def test_watch_without_kubernetes_is_settled_at_once() -> None:
    watch = RewriteWatch(QWEN, lambda: None, access=NO_CLUSTER)
    assert watch.is_settled
    await watch.run()


async def test_rewrites_are_watched_again_after_a_change_of_the_cluster_access(server: ApiServer) -> None:
    """The access changes, for example, when the settings start or stop naming model servers, which are in no
    pool."""
    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
    async with model_server("v1") as one:
        text = "gateway: {url: http://g}\npool: {name: qwen}\nmodels: [{name: m}]\n"
        settings = parse_settings(f"{text}serving: {{urls: ['{one.url}'], interval_s: 3600}}\n", {})
        assert isinstance(settings, Settings)
        rounds: list[tuple[str, ...] | None] = []
        watch = ModelWatch(settings, lambda listings: rounds.append(listings[0].models), access=NO_CLUSTER)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watch.run())
            await wait_until(lambda: rounds == [("v1",)])
            watch.reconfigure(settings, access(server))
            await wait_until(lambda: len(rounds) > 1)
            assert rounds[1] == ("v1", "chat"), "the first round waits for the rewrites"
            watch.reconfigure(settings, access(server))
            watch.reconfigure(settings, NO_CLUSTER)
            await wait_until(lambda: rounds[-1] == ("v1",))
            server.put(REWRITES, rewrite("a", (["talk"], ["v1"])))
            watch.reconfigure(settings, access(server))
            await wait_until(lambda: rounds[-1] == ("v1", "talk"))
            running.cancel()


async def test_rewritten_names_are_listed_with_their_models(server: ApiServer) -> None:
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
                "the first round waits for the rewrites"
            )
            server.delete(REWRITES, "a")
            await wait_until(lambda: rounds[-1] == {one.address: ("v1",), two.address: ("v2",)})
            running.cancel()
