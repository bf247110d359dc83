"""`check --probe` in front of a pool whose capacity nobody names."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.scenarios.processes import Stage, World
from tests.support import free_port, wait_until_sync
from tests.warm import warm, warm_run

SLOTS, SERVERS = 32, 2


def quiet_world(stage: Stage) -> World:
    """A pool whose picker shows a pressure score and no capacity."""
    return stage.world(
        slots=SLOTS,
        endpoints=SERVERS,
        detector="utilization",
        kv_at_full=0.1,
        seconds=1.0,
        realtime_seconds=1.0,
    )


def environment() -> dict[str, str]:
    """Return this process's environment without a cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
    return kept | {"KUBECONFIG": "/nonexistent"}


def command(stage: Stage, world: World, folder: Path, admin_port: int | None = None) -> list[str]:
    config = folder / "config.yaml"
    admin = {"host": "127.0.0.1", "port": admin_port or free_port()}
    config.write_text(yaml.safe_dump(stage.settings(world, max_sys=None, admin=admin)))
    return ["check", "--config", str(config), "--probe", "--probe-model", "m", "--json"]


def probe(stage: Stage, world: World, folder: Path, admin_port: int | None = None) -> dict[str, Any]:
    """Run `check --probe` and return its last finding about the capacity of an endpoint."""
    done = warm_run(*command(stage, world, folder, admin_port), env=environment())
    found = [each for each in json.loads(done.stdout)["findings"] if each["where"] == "budget.per_endpoint"]
    return dict(found[-1])


def sent(world: World) -> int:
    """Requests of the probe that came to the gateway; `check` itself sends one GET."""
    return sum(entry.id.startswith("capacity-probe-") for entry in world.log())


def test_probe_measures_a_quiet_pool_without_overfilling_it(stage: Stage, tmp_path: Path) -> None:
    world = quiet_world(stage)
    found = probe(stage, world, tmp_path)
    assert found["level"] == "ok"
    assert f"on {SERVERS} endpoints while others waited" in found["what"]
    measured = int(found["what"].rpartition("set budget.per_endpoint to ")[2])
    assert measured == pytest.approx(SLOTS / SERVERS, rel=0.15)
    assert world.observed()["pool"]["all"]["peak"] <= 1.3 * SLOTS
    wait_until_sync(lambda: world.in_flight() == 0, 5.0, what="no request of the probe is left")


def test_probe_sends_nothing_while_others_use_the_pool(stage: Stage, tmp_path: Path) -> None:
    world = quiet_world(stage)
    world.control(realtime=20, flush=True)
    found = probe(stage, world, tmp_path)
    assert found["level"] == "warning"
    assert "this is not a quiet hour" in found["what"]
    assert "nothing was sent" in found["what"]
    assert sent(world) == 0


def test_interrupted_probe_leaves_no_request_behind(stage: Stage, tmp_path: Path) -> None:
    world = quiet_world(stage)
    world.control(seconds=60.0)
    with warm("dispatcher", *command(stage, world, tmp_path), env=environment()) as child:
        wait_until_sync(lambda: sent(world) > 0, 30.0, what="the probe sends")
        child.send_signal(signal.SIGINT)
        assert child.wait(10.0) != 0
    wait_until_sync(lambda: world.in_flight() == 0, 5.0, what="no request of the probe is left")


def test_probe_sends_nothing_while_a_dispatcher_runs_on_the_configuration(
    stage: Stage, tmp_path: Path
) -> None:
    world = quiet_world(stage)
    one = stage.dispatcher(stage.settings(world, max_sys=None))
    found = probe(stage, world, tmp_path, admin_port=one.admin_port)
    assert found["level"] == "warning"
    assert "a dispatcher runs on this configuration" in found["what"]
    assert sent(world) == 0
