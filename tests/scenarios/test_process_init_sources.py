"""Each source that `init` offers for the load of a pool works, from the command to an answered request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from tests.fork_server import run_cli
from tests.scenarios.processes import POOL, Stage, World
from tests.support import wait_until_sync

SLOTS = 8
LIMIT = 16


def run_init(folder: Path, *flags: str) -> dict[str, Any]:
    """Run `init` with these flags, load the file that it wrote, and return its content."""
    file = folder / "config.yaml"
    done = run_cli("init", "--pool", POOL, "--output", file, *flags)
    assert done.returncode == 0, done.stderr
    assert isinstance(parse_settings(file.read_text(), {}), Settings)
    return dict(yaml.safe_load(file.read_text()))


def make_flags(kind: str, world: World, queue_url: str) -> list[str]:
    common = ["--queue-url", queue_url]
    match kind:
        case "epp":
            return [*common, "--gateway", world.gateway, "--epp", world.metrics]
        case "fixed":
            return [*common, "--gateway", world.gateway, "--fixed-limit", str(LIMIT)]
        case _:
            return [*common, "--server", world.servers[0], "--per-endpoint", str(SLOTS)]


@pytest.mark.parametrize(
    ("kind", "source"), [("epp", "epp"), ("vllm", "vllm"), ("sglang", "vllm"), ("fixed", "fixed")]
)
def test_config_of_init_passes_check_and_answers_requests(
    stage: Stage, tmp_path: Path, kind: str, source: str
) -> None:
    world = stage.world(
        slots=SLOTS, seconds=0.05, apart=True, engine="sglang" if kind == "sglang" else "vllm"
    )
    config = run_init(tmp_path, *make_flags(kind, world, stage.server.url))
    check = run_cli("check", "--strict", "--config", tmp_path / "config.yaml")
    assert check.returncode == 0, check.stdout + check.stderr

    dispatcher = stage.dispatcher({**config, "admin": {"port": 0}, "log": {"format": "json"}})
    dispatcher.wait_for(source=source)
    ids = stage.producer.submit(2 * SLOTS)
    stage.producer.wait_for_all(ids, timeout_s=30)
    assert stage.producer.count_results() == {"200": len(ids)}


def test_init_writes_prometheus_as_the_only_source(tmp_path: Path) -> None:
    config = run_init(tmp_path, "--gateway", "http://gw", "--prometheus", "http://prometheus:9090")
    assert config["signals"] == {"source": "prometheus", "prometheus": {"url": "http://prometheus:9090"}}


def test_fixed_limit_is_never_exceeded_and_is_lowered_by_refusals(stage: Stage, tmp_path: Path) -> None:
    """A server without metrics runs half of the limit and refuses more requests."""
    world = stage.world(slots=SLOTS, queue_limit=0, seconds=0.3, flow_control=False)
    config = run_init(tmp_path, *make_flags("fixed", world, stage.server.url))
    dispatcher = stage.dispatcher({**config, "admin": {"port": 0}, "log": {"format": "json"}})
    dispatcher.wait_for(source="fixed", max_sys=LIMIT, max_sys_source="setting")

    stage.producer.submit(20 * SLOTS)
    wait_until_sync(
        lambda: dispatcher.status()["max_sys_source"] == "learned", 30, what="refusals to teach a capacity"
    )
    stage.producer.wait_for_all(timeout_s=120)
    assert stage.producer.count_results() == {"200": 20 * SLOTS}
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT
