"""Output of `status` about the Kubernetes watch: the source of the capacity, and problems."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from tests.scenarios.cluster import Cluster
from tests.scenarios.processes import Dispatcher, Stage
from tests.signals.apiserver import PODS, POOLS, pod
from tests.support import wait_until_sync

SLOTS_PER_ENDPOINT = 4
POOL_SLOTS = 32
"""Capacity of the pool as reported by the picker."""


def start_dispatcher(
    stage: Stage, cluster: Cluster, *, discover_picker: bool = False, **budget: object
) -> Dispatcher:
    world = stage.world(slots=POOL_SLOTS, endpoints=POOL_SLOTS // SLOTS_PER_ENDPOINT)
    settings = stage.settings(world, signals={"interval_s": 0.2})
    settings["budget"] = {"per_endpoint": SLOTS_PER_ENDPOINT, **budget}
    if discover_picker:
        settings["signals"] = {"interval_s": 0.2}
    return stage.dispatcher(settings, "--observe", KUBECONFIG=str(cluster.server.kubeconfig))


def test_source_of_the_capacity_is_shown(stage: Stage, cluster: Cluster) -> None:
    dispatcher = start_dispatcher(stage, cluster)
    status = dispatcher.wait_for(max_sys_source="watch", watch_endpoints=3)
    assert status["max_sys"] == 12
    assert (status["watch_stale_s"], status["watch_problems"]) == (None, [])
    for number in range(3, POOL_SLOTS // SLOTS_PER_ENDPOINT):
        cluster.run_on_server(lambda server, number=number: server.put(PODS, pod(f"p{number}")))  # type: ignore[misc]
    assert dispatcher.wait_for(max_sys_source="setting")["max_sys"] == POOL_SLOTS, (
        "budget.per_endpoint times the ready endpoints"
    )
    metrics = dispatcher.metrics()
    assert metrics["watch_endpoints"] == POOL_SLOTS // SLOTS_PER_ENDPOINT
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
    dispatcher.reconfigure(budget={"max_sys": 16})
    assert dispatcher.wait_for(max_sys=16)["max_sys_source"] == "setting"


def test_watch_does_not_limit_a_configured_capacity_unless_no_endpoint_is_left(
    stage: Stage, cluster: Cluster
) -> None:
    """If per_endpoint is unknown, the watch limits a configured capacity only when no endpoint is ready."""
    dispatcher = start_dispatcher(stage, cluster, per_endpoint="auto", max_sys=100)
    status = dispatcher.wait_for(watch_endpoints=3, max_sys_source="setting")
    assert (status["max_sys"], status["per_endpoint"], status["per_endpoint_source"]) == (100, None, None)
    for number in range(3):
        cluster.run_on_server(lambda server, number=number: server.delete(PODS, f"p{number}"))  # type: ignore[misc]
    assert dispatcher.wait_for(watch_endpoints=0, reason="no-endpoints")["max_sys"] == 0


def test_lost_watch_is_shown_with_its_age(stage: Stage, cluster: Cluster) -> None:
    dispatcher = start_dispatcher(stage, cluster)
    dispatcher.wait_for(max_sys_source="watch", watch_endpoints=3)
    cluster.run_on_server(lambda server: setattr(server, "tokens", set()))
    cluster.run_on_server(lambda server: server.cut_watches())
    status = wait_until_sync(lambda: (status := dispatcher.status())["watch_problems"] and status, 10)
    assert status["watch_endpoints"] == 3
    assert status["max_sys_source"] == "watch"
    assert 0 <= status["watch_stale_s"] < 60
    assert "Kubernetes: the Kubernetes API answered 401" in status["explanation"]
    assert dispatcher.metrics()["watch_failing"] == 1
    assert dispatcher.metrics()["watch_stale_seconds"] >= status["watch_stale_s"]
    cluster.run_on_server(lambda server: setattr(server, "tokens", {"t0"}))
    assert "Kubernetes" not in dispatcher.wait_for(watch_problems=[], watch_stale_s=None)["explanation"]


def test_throttling_api_server_is_shown_but_not_as_a_problem(stage: Stage, cluster: Cluster) -> None:
    dispatcher = start_dispatcher(stage, cluster)
    dispatcher.wait_for(max_sys_source="watch", watch_endpoints=3)
    cluster.run_on_server(lambda server: setattr(server.faults, "retry_after_s", 5))
    cluster.run_on_server(lambda server: server.cut_watches())
    message = "Kubernetes: the Kubernetes API server asks to wait 5 s"
    wait_until_sync(lambda: message in dispatcher.status()["explanation"], 10)
    status = dispatcher.status()
    assert (status["max_sys_source"], status["watch_problems"]) == ("watch", [])
    assert dispatcher.metrics()["watch_failing"] == 0
    assert [each["ready"] for each in dispatcher.events("kubernetes-throttled")] == [3]
    assert dispatcher.events("kubernetes-problem") == []


def test_deleted_pool_is_reported(stage: Stage, cluster: Cluster) -> None:
    dispatcher = start_dispatcher(stage, cluster)
    dispatcher.wait_for(watch_endpoints=3)
    cluster.run_on_server(lambda server: server.delete(POOLS, "qwen"))
    problem = "InferencePool default/qwen does not exist (look at: pool.name, pool.namespace)"
    status = dispatcher.wait_for(reason="no-endpoints", watch_endpoints=0, watch_problems=[problem])
    assert (status["max_sys"], status["max_sys_source"]) == (0, "watch")
    assert problem in status["explanation"]
    assert dispatcher.metrics()["watch_failing"] == 1


@pytest.mark.parametrize("missing", ["rights", "credentials"])
def test_picker_that_cannot_be_discovered_is_shown_with_the_remedy(
    stage: Stage, cluster: Cluster, missing: str
) -> None:
    cluster.run_on_server(
        lambda server: setattr(server.faults, "rules", []) if missing == "rights" else server.tokens.clear()
    )
    dispatcher = start_dispatcher(stage, cluster, discover_picker=True)
    status = wait_until_sync(
        lambda: (
            (status := dispatcher.status())["watch_problems"]
            and "no endpoint picker is known" in status["explanation"]
            and status
        ),
        10,
    )
    expected = {
        "rights": 'resources: ["inferencepools"], verbs: ["list", "watch"]',
        "credentials": "answered 401",
    }
    assert expected[missing] in status["explanation"]


def test_status_and_explain_describe_the_watch(stage: Stage, cluster: Cluster) -> None:
    dispatcher = start_dispatcher(stage, cluster)
    dispatcher.wait_for(max_sys_source="watch", watch_endpoints=3)
    port = dispatcher.events("started")[-1]["admin_port"]
    config = dispatcher.folder / "client.yaml"
    config.write_text(dispatcher.config.read_text().replace("port: 0", f"port: {port}"))

    def run_command(command: str) -> str:
        done = CliRunner().invoke(app, [command, "--config", str(config)])
        assert done.exit_code == 0, done.output
        return done.output

    assert "The capacity is 12 by the Kubernetes watch, which sees 3 ready endpoints." in run_command(
        "explain"
    )
    cluster.run_on_server(lambda server: server.tokens.clear())
    cluster.run_on_server(lambda server: server.cut_watches())
    wait_until_sync(lambda: dispatcher.status()["watch_problems"], 10)
    output = run_command("status")
    assert "answered 401" in output
    assert re.search(r"by the Kubernetes watch, which saw 3 ready endpoints \d+ s ago", output)
