"""What an operator is shown of the Kubernetes watch: whose word the capacity is, and what is wrong."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from tests.scenarios.cluster import Cluster
from tests.scenarios.processes import Dispatcher, Stage
from tests.signals.apiserver import PODS, POOLS, pod
from tests.support import wait_until_sync

PER_ENDPOINT = 4
POOL_SLOTS = 32
"""What the picker says."""


def dispatcher(stage: Stage, cluster: Cluster, *, find: bool = False, **budget: object) -> Dispatcher:
    world = stage.world(slots=POOL_SLOTS, endpoints=POOL_SLOTS // PER_ENDPOINT)
    settings = stage.settings(world, signals={"interval_s": 0.2})
    settings["budget"] = {"per_endpoint": PER_ENDPOINT, **budget}
    if find:
        settings["signals"] = {"interval_s": 0.2}
    return stage.dispatcher(settings, "--observe", KUBECONFIG=str(cluster.server.kubeconfig))


def test_it_is_shown_whose_word_the_capacity_is(stage: Stage, cluster: Cluster) -> None:
    one = dispatcher(stage, cluster)
    shown = one.wait_for(max_sys_source="watch", watch_endpoints=3)
    assert shown["max_sys"] == 12
    assert (shown["watch_stale_s"], shown["watch_problems"]) == (None, [])
    for number in range(3, POOL_SLOTS // PER_ENDPOINT):
        cluster.do(lambda server, number=number: server.put(PODS, pod(f"p{number}")))  # type: ignore[misc]
    assert one.wait_for(max_sys_source="setting")["max_sys"] == POOL_SLOTS, (
        "budget.per_endpoint times the ready"
    )
    metrics = one.metrics()
    assert metrics["watch_endpoints"] == POOL_SLOTS // PER_ENDPOINT
    assert metrics["watch_failing"] == 0
    assert {name: value for name, value in metrics.items() if name.startswith("max_sys_source")} == {
        "max_sys_source{watch}": 0,
        "max_sys_source{picker}": 0,
        "max_sys_source{server}": 0,
        "max_sys_source{search}": 0,
        "max_sys_source{setting}": 1,
        "max_sys_source{query}": 0,
        "max_sys_source{learned}": 0,
    }
    one.reconfigure(budget={"max_sys": 16})
    assert one.wait_for(max_sys=16)["max_sys_source"] == "setting"


def test_the_watch_bounds_by_nothing_that_is_only_assumed(stage: Stage, cluster: Cluster) -> None:
    """The capacity is set, what an endpoint runs is not: only that there is none left bounds it."""
    one = dispatcher(stage, cluster, per_endpoint="auto", max_sys=100)
    shown = one.wait_for(watch_endpoints=3, max_sys_source="setting")
    assert (shown["max_sys"], shown["per_endpoint"], shown["per_endpoint_source"]) == (100, None, None)
    for number in range(3):
        cluster.do(lambda server, number=number: server.delete(PODS, f"p{number}"))  # type: ignore[misc]
    assert one.wait_for(watch_endpoints=0, reason="no-endpoints")["max_sys"] == 0


def test_a_watch_that_is_lost_is_shown_with_its_age(stage: Stage, cluster: Cluster) -> None:
    one = dispatcher(stage, cluster)
    one.wait_for(max_sys_source="watch", watch_endpoints=3)
    cluster.do(lambda server: setattr(server, "tokens", set()))
    cluster.do(lambda server: server.cut())
    shown = wait_until_sync(lambda: (found := one.status())["watch_problems"] and found, 10)
    assert shown["watch_endpoints"] == 3
    assert shown["max_sys_source"] == "watch"
    assert 0 <= shown["watch_stale_s"] < 60
    assert "Kubernetes: the Kubernetes API answered 401" in shown["explanation"]
    assert one.metrics()["watch_failing"] == 1
    assert one.metrics()["watch_stale_seconds"] >= shown["watch_stale_s"]
    cluster.do(lambda server: setattr(server, "tokens", {"t0"}))
    assert "Kubernetes" not in one.wait_for(watch_problems=[], watch_stale_s=None)["explanation"]


def test_a_server_that_asks_to_wait_is_shown_as_that_and_not_as_a_problem(
    stage: Stage, cluster: Cluster
) -> None:
    one = dispatcher(stage, cluster)
    one.wait_for(max_sys_source="watch", watch_endpoints=3)
    cluster.do(lambda server: setattr(server.faults, "busy_s", 5))
    cluster.do(lambda server: server.cut())
    says = "Kubernetes: the Kubernetes API server asks to wait 5 s"
    wait_until_sync(lambda: says in one.status()["explanation"], 10)
    shown = one.status()
    assert (shown["max_sys_source"], shown["watch_problems"]) == ("watch", [])
    assert one.metrics()["watch_failing"] == 0
    assert [each["ready"] for each in one.events("kubernetes-throttled")] == [3]
    assert one.events("kubernetes-problem") == []


def test_a_pool_that_is_deleted_is_named(stage: Stage, cluster: Cluster) -> None:
    one = dispatcher(stage, cluster)
    one.wait_for(watch_endpoints=3)
    cluster.do(lambda server: server.delete(POOLS, "qwen"))
    problem = "InferencePool default/qwen does not exist (look at: pool.name, pool.namespace)"
    shown = one.wait_for(reason="no-endpoints", watch_endpoints=0, watch_problems=[problem])
    assert (shown["max_sys"], shown["max_sys_source"]) == (0, "watch")
    assert problem in shown["explanation"]
    assert one.metrics()["watch_failing"] == 1


@pytest.mark.parametrize("lacks", ["rights", "credentials"])
def test_a_picker_that_cannot_be_found_is_shown_with_what_mends_it(
    stage: Stage, cluster: Cluster, lacks: str
) -> None:
    cluster.do(
        lambda server: setattr(server.faults, "rules", []) if lacks == "rights" else server.tokens.clear()
    )
    one = dispatcher(stage, cluster, find=True)
    shown = wait_until_sync(
        lambda: (found := one.status())["watch_problems"] and "picker" in found["explanation"] and found, 10
    )
    told = {
        "rights": 'resources: ["inferencepools"], verbs: ["list", "watch"]',
        "credentials": "answered 401",
    }
    assert "no endpoint picker is known" in shown["explanation"]
    assert told[lacks] in shown["explanation"]


def test_status_and_explain_say_it_in_words(stage: Stage, cluster: Cluster) -> None:
    one = dispatcher(stage, cluster)
    one.wait_for(max_sys_source="watch", watch_endpoints=3)
    port = one.events("started")[-1]["admin_port"]
    config = one.folder / "asked.yaml"
    config.write_text(one.config.read_text().replace("port: 0", f"port: {port}"))

    def said(verb: str) -> str:
        done = CliRunner().invoke(app, [verb, "--config", str(config)])
        assert done.exit_code == 0, done.output
        return done.output

    assert "The capacity is 12 by the Kubernetes watch, which sees 3 ready endpoints." in said("explain")
    cluster.do(lambda server: server.tokens.clear())
    cluster.do(lambda server: server.cut())
    wait_until_sync(lambda: one.status()["watch_problems"], 10)
    told = said("status")
    assert "answered 401" in told
    assert re.search(r"by the Kubernetes watch, which saw 3 ready endpoints \d+ s ago", told)
