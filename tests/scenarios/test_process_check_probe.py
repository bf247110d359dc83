"""`check --probe` for a pool whose capacity is not configured and not shown by the picker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fork_server import forked_process, run_cli
from tests.scenarios.processes import Stage, World
from tests.support import free_port, wait_until_sync

SLOTS, SERVERS = 16, 2
"""The search starts at 8 requests for each endpoint, so that few steps lead to a pool of this size."""
PROBE_S, PROBE_TIMEOUT_S = 120.0, 240.0
"""A probe of this pool ends after about 23 s by itself. On a busy machine it may take several times that."""


def start_quiet_pool(stage: Stage) -> World:
    """Start a pool without traffic whose picker exports a utilization score and no capacity."""
    return stage.world(
        slots=SLOTS,
        endpoints=SERVERS,
        detector="utilization",
        kv_at_full=0.1,
        seconds=1.0,
        realtime_seconds=1.0,
    )


def environment_without_cluster() -> dict[str, str]:
    """Return the environment of this process without access to Kubernetes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
    return kept | {"KUBECONFIG": "/nonexistent"}


def build_probe_command(stage: Stage, world: World, folder: Path, admin_port: int | None = None) -> list[str]:
    """Write a configuration without a capacity. Return the arguments of `check --probe` for it."""
    config = folder / "config.yaml"
    admin = {"host": "127.0.0.1", "port": admin_port or free_port()}
    config.write_text(yaml.safe_dump(stage.settings(world, max_sys=None, admin=admin)))
    options = ["--probe", "--probe-model=m", f"--probe-seconds={PROBE_S:g}", "--json"]
    return ["check", "--config", str(config), *options]


def run_probe(stage: Stage, world: World, folder: Path, admin_port: int | None = None) -> dict[str, Any]:
    """Run `check --probe` and return its last finding about the capacity of an endpoint."""
    done = run_cli(
        *build_probe_command(stage, world, folder, admin_port),
        env=environment_without_cluster(),
        timeout_s=PROBE_TIMEOUT_S,
    )
    found = [each for each in json.loads(done.stdout)["findings"] if each["where"] == "budget.per_endpoint"]
    return dict(found[-1])


def count_probe_requests(world: World) -> int:
    """Count the requests of the probe that reached the gateway. `check` itself sends one GET."""
    return sum(entry.id.startswith("capacity-probe-") for entry in world.log())


@pytest.mark.first
@pytest.mark.timeout(300)
def test_probe_measures_a_quiet_pool_without_overfilling_it(stage: Stage, tmp_path: Path) -> None:
    world = start_quiet_pool(stage)
    found = run_probe(stage, world, tmp_path)
    assert found["level"] == "ok"
    assert f"on {SERVERS} endpoints while others waited" in found["what"]
    measured = int(found["what"].rpartition("set budget.per_endpoint to ")[2])
    assert measured == pytest.approx(SLOTS / SERVERS, rel=0.15)
    assert world.observed()["pool"]["all"]["peak"] <= 1.3 * SLOTS
    wait_until_sync(lambda: world.in_flight() == 0, 20.0, what="no request of the probe is left")


def test_probe_sends_nothing_while_others_use_the_pool(stage: Stage, tmp_path: Path) -> None:
    world = start_quiet_pool(stage)
    world.control(realtime=20, flush=True)
    found = run_probe(stage, world, tmp_path)
    assert found["level"] == "warning"
    assert "this is not a quiet hour" in found["what"]
    assert "nothing was sent" in found["what"]
    assert count_probe_requests(world) == 0


def test_interrupted_probe_leaves_no_request_behind(stage: Stage, tmp_path: Path) -> None:
    world = start_quiet_pool(stage)
    world.control(seconds=60.0)
    with forked_process(
        "dispatcher", *build_probe_command(stage, world, tmp_path), env=environment_without_cluster()
    ) as child:
        wait_until_sync(lambda: count_probe_requests(world) > 0, 60.0, what="the probe sends")
        child.send_signal(signal.SIGINT)
        assert child.wait(30.0) != 0
    wait_until_sync(lambda: world.in_flight() == 0, 20.0, what="no request of the probe is left")


def test_probe_sends_nothing_while_a_dispatcher_runs_on_the_configuration(
    stage: Stage, tmp_path: Path
) -> None:
    world = start_quiet_pool(stage)
    one = stage.dispatcher(stage.settings(world, max_sys=None))
    found = run_probe(stage, world, tmp_path, admin_port=one.admin_port)
    assert found["level"] == "warning"
    assert "a dispatcher runs on this configuration" in found["what"]
    assert count_probe_requests(world) == 0
