"""A release, run by hand: each container as a kubelet would start it: command, environment and files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dispatcher.queue.embedded import EmbeddedError, find_server
from tests.deploy.release import CHART, Release, environment, render
from tests.support import free_port, running, wait_until_sync

HOST = "night-batch-dispatcher-valkey.llm.svc:6379"
SERVICE = ("night-batch-dispatcher.llm.svc", "8080")
"""Host and port by which the test pod reaches the dispatcher, whatever port that listens on."""


class Kubelet:
    """Mounts, names and ports of a pod, made into those of this machine."""

    def __init__(self, release: Release, directory: Path, queue: str) -> None:
        self._mount = directory / "config"
        self._mount.mkdir()
        (self._mount / "config.yaml").write_text(release.config_text().replace(HOST, queue))
        self._admin = str(release.settings().admin.port)

    def command(self, container: dict[str, Any]) -> list[str]:
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        (config,) = (each for each in mounts if each.endswith("/config"))
        words = [str(each).replace(config, str(self._mount)) for each in container["args"]]
        return [sys.executable, "-m", "dispatcher", *words]

    def environ(self, container: dict[str, Any], home: Path) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")
        }
        given = environment(container)
        if "BATCH_DISPATCHER__ADMIN__HOST" in given:
            assert (given["BATCH_DISPATCHER__ADMIN__HOST"], given["BATCH_DISPATCHER__ADMIN__PORT"]) == SERVICE
            given |= {
                "BATCH_DISPATCHER__ADMIN__HOST": "127.0.0.1",
                "BATCH_DISPATCHER__ADMIN__PORT": self._admin,
            }
        return {**clean, **given, "HOME": str(home)}

    def run_batch(self, container: dict[str, Any], home: Path) -> subprocess.CompletedProcess[str]:
        """Run a container to its end."""
        return subprocess.run(
            self.command(container),
            env=self.environ(container, home),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def world() -> Iterator[tuple[int, int]]:
    """A gateway and an endpoint picker, by their ports."""
    gateway, picker = free_port(), free_port()
    flags = [f"--port={gateway}", f"--metrics-port={picker}", "--slots=32"]
    with running(sys.executable, "-m", "dispatcher.lab.standin", *flags):
        yield gateway, picker


def test_a_release_answers_a_request_by_what_it_brings_alone(world: tuple[int, int], tmp_path: Path) -> None:
    """Its Valkey, its dispatcher, its probes, its check and its `helm test`, and SIGTERM at the end."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    gateway, picker = world
    admin, queue = free_port(), free_port()
    release = render(
        {
            "gateway": {"url": f"http://127.0.0.1:{gateway}"},
            "kubernetes": {"enabled": False},
            "checkHook": {"enabled": True},
            "config": {
                "admin": {"port": admin},
                "signals": {"epp": {"urls": [f"http://127.0.0.1:{picker}"]}},
                "budget": {"per_endpoint": 32},
            },
        }
    )
    kubelet = Kubelet(release, tmp_path, f"127.0.0.1:{queue}")
    pods = dict(release.pods())
    (valkey,) = pods["StatefulSet night-batch-dispatcher-valkey"]["spec"]["containers"]
    (test,) = pods["Pod night-batch-dispatcher-test"]["spec"]["containers"]
    (check,) = pods["Job night-batch-dispatcher-check"]["spec"]["containers"]

    with ExitStack() as stack:
        data = [each.replace("/data", str(tmp_path)) for each in valkey["args"]]
        stack.enter_context(running(server, *data, "--port", str(queue), "--bind", "127.0.0.1"))
        dispatcher = stack.enter_context(
            running(
                *kubelet.command(release.container),
                env=kubelet.environ(release.container, tmp_path),
                stop_s=30,
            )
        )
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5))
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = release.container[probe]["httpGet"]["path"]
            wait_until_sync(partial(is_well, client, path), 30, what=path, every_s=0.1)
        found = kubelet.run_batch(check, tmp_path)
        assert found.returncode == 0, found.stdout + found.stderr
        answered = kubelet.run_batch(test, tmp_path)
        assert answered.returncode == 0, answered.stderr
        assert '"choices"' in answered.stdout
        dispatcher.terminate()
        assert dispatcher.wait(30) == 0


def answer(client: httpx.Client, path: str) -> int:
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


def is_well(client: httpx.Client, path: str) -> bool:
    return answer(client, path) == 200


def test_valkey_s_service_is_where_the_settings_look_for_it() -> None:
    release = render({})
    assert release.settings().queue.url.reveal() == f"redis://{HOST}"
    service = release.one("Service", "valkey")
    assert f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc" == HOST.partition(":")[0]
    assert service["spec"]["ports"][0]["port"] == 6379
    assert yaml.safe_load((CHART / "values.yaml").read_text())["valkey"]["enabled"] is None


@pytest.mark.parametrize("observe", [False, True])
def test_helm_test_says_in_a_sentence_why_nothing_was_sent(tmp_path: Path, observe: bool) -> None:
    """The endpoint picker cannot be reached, so the dispatcher is never ready and sends nothing."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    admin, queue, nobody = free_port(), free_port(), free_port()
    release = render(
        {
            "gateway": {"url": f"http://127.0.0.1:{nobody}"},
            "kubernetes": {"enabled": False},
            "observe": observe,
            "config": {
                "admin": {"port": admin},
                "signals": {"epp": {"urls": [f"http://127.0.0.1:{nobody}"]}},
            },
            "test": {"deadline": 4},
        }
    )
    kubelet = Kubelet(release, tmp_path, f"127.0.0.1:{queue}")
    (test,) = release.one("Pod")["spec"]["containers"]
    environ = kubelet.environ(release.container, tmp_path)
    with (
        running(server, "--port", str(queue), "--bind", "127.0.0.1", "--save", "", cwd=tmp_path),
        running(*kubelet.command(release.container), env=environ, stop_s=30),
        httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5) as client,
    ):
        wait_until_sync(partial(is_well, client, "/livez"), 30, what="/livez", every_s=0.1)
        done = kubelet.run_batch(test, tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"no reading yet of saturation and requests: 127.0.0.1:{nobody}: connection refused" in done.stderr
    assert done.stderr.startswith("not ready after 4 s: ") == observe
    assert ("DEADLINE_EXCEEDED" in done.stderr) != observe


def test_helm_test_says_that_no_dispatcher_answers(tmp_path: Path) -> None:
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    queue = free_port()
    release = render({"test": {"deadline": 1}, "config": {"admin": {"port": free_port()}}})
    kubelet = Kubelet(release, tmp_path, f"127.0.0.1:{queue}")
    (test,) = release.one("Pod")["spec"]["containers"]
    with running(server, "--port", str(queue), "--bind", "127.0.0.1", "--save", "", cwd=tmp_path):
        done = kubelet.run_batch(test, tmp_path)
    assert done.returncode == 1
    (last,) = (line for line in done.stderr.splitlines() if line.startswith("no result for "))
    assert re.search(r"within 1[01] s: no dispatcher answers: nothing listens on", last)
