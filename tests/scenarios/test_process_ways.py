"""Each way of `init` to learn how full a pool is, from the command to an answered request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher.settings import Settings, parse_settings
from tests.scenarios.processes import POOL, Stage, World
from tests.support import wait_until_sync
from tests.warm import warm_run

SLOTS = 8
LIMIT = 16


def initialized(folder: Path, *flags: str) -> dict[str, Any]:
    """Run `init` with these flags, load the file that it wrote, and return its content."""
    file = folder / "config.yaml"
    done = warm_run("init", "--pool", POOL, "--output", file, *flags)
    assert done.returncode == 0, done.stderr
    assert isinstance(parse_settings(file.read_text(), {}), Settings)
    return dict(yaml.safe_load(file.read_text()))


def flags_of(way: str, world: World, queue_url: str) -> list[str]:
    common = ["--queue-url", queue_url]
    match way:
        case "epp":
            return [*common, "--gateway", world.gateway, "--epp", world.metrics]
        case "fixed":
            return [*common, "--gateway", world.gateway, "--fixed-limit", str(LIMIT)]
        case _:
            return [*common, "--server", world.servers[0], "--per-endpoint", str(SLOTS)]


@pytest.mark.parametrize(
    ("way", "source"), [("epp", "epp"), ("vllm", "vllm"), ("sglang", "vllm"), ("fixed", "fixed")]
)
def test_what_init_writes_passes_check_and_answers_requests(
    stage: Stage, tmp_path: Path, way: str, source: str
) -> None:
    world = stage.world(slots=SLOTS, seconds=0.05, apart=True, engine="sglang" if way == "sglang" else "vllm")
    given = initialized(tmp_path, *flags_of(way, world, stage.server.url))
    checked = warm_run("check", "--strict", "--config", tmp_path / "config.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr

    one = stage.dispatcher({**given, "admin": {"port": 0}, "log": {"format": "json"}})
    one.wait_for(source=source)
    ids = stage.producer.submit(2 * SLOTS)
    stage.producer.wait_for_all(ids, timeout_s=30)
    assert stage.producer.answers() == {"200": len(ids)}


def test_prometheus_is_written_as_the_only_source(tmp_path: Path) -> None:
    given = initialized(tmp_path, "--gateway", "http://gw", "--prometheus", "http://prometheus:9090")
    assert given["signals"] == {"source": "prometheus", "prometheus": {"url": "http://prometheus:9090"}}


def test_a_fixed_limit_is_never_exceeded_and_gives_way_to_refusals(stage: Stage, tmp_path: Path) -> None:
    """A server that nothing shows runs half of the limit, and refuses what is more."""
    world = stage.world(slots=SLOTS, queue_limit=0, seconds=0.3, flow_control=False)
    given = initialized(tmp_path, *flags_of("fixed", world, stage.server.url))
    one = stage.dispatcher({**given, "admin": {"port": 0}, "log": {"format": "json"}})
    one.wait_for(source="fixed", max_sys=LIMIT, max_sys_source="setting")

    stage.producer.submit(20 * SLOTS)
    wait_until_sync(
        lambda: one.status()["max_sys_source"] == "learned", 30, what="refusals to teach a capacity"
    )
    stage.producer.wait_for_all(timeout_s=120)
    assert stage.producer.answers() == {"200": 20 * SLOTS}
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT
