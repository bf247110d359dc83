"""Containers of a release run as local processes with the command, environment and files of their pods."""

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
from tests.deploy.release import CHART, Release, read_environment, render
from tests.support import free_port, running_process, wait_until_sync

QUEUE_ADDRESS = "night-batch-dispatcher-valkey.llm.svc:6379"
ADMIN_SERVICE = ("night-batch-dispatcher.llm.svc", "8080")
"""Host and port of the Service through which the test pod reaches the dispatcher."""


class LocalKubelet:
    """Translates mounts, names and ports of a pod to this machine."""

    def __init__(self, release: Release, directory: Path, queue: str) -> None:
        self._mount = directory / "config"
        self._mount.mkdir()
        (self._mount / "config.yaml").write_text(release.config_text().replace(QUEUE_ADDRESS, queue))
        self._admin = str(release.settings().admin.port)

    def build_command(self, container: dict[str, Any]) -> list[str]:
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        (config,) = (each for each in mounts if each.endswith("/config"))
        arguments = [str(each).replace(config, str(self._mount)) for each in container["args"]]
        return [sys.executable, "-m", "dispatcher", *arguments]

    def build_environment(self, container: dict[str, Any], home: Path) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")
        }
        container_environment = read_environment(container)
        if "BATCH_DISPATCHER__ADMIN__HOST" in container_environment:
            assert (
                container_environment["BATCH_DISPATCHER__ADMIN__HOST"],
                container_environment["BATCH_DISPATCHER__ADMIN__PORT"],
            ) == ADMIN_SERVICE
            container_environment |= {
                "BATCH_DISPATCHER__ADMIN__HOST": "127.0.0.1",
                "BATCH_DISPATCHER__ADMIN__PORT": self._admin,
            }
        return {**clean, **container_environment, "HOME": str(home)}

    def run_batch(self, container: dict[str, Any], home: Path) -> subprocess.CompletedProcess[str]:
        """Run a container until it exits."""
        return subprocess.run(
            self.build_command(container),
            env=self.build_environment(container, home),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def gateway_and_picker() -> Iterator[tuple[int, int]]:
    """Run a gateway and an endpoint picker, and return their ports."""
    gateway, picker = free_port(), free_port()
    flags = [f"--port={gateway}", f"--metrics-port={picker}", "--slots=32"]
    with running_process(sys.executable, "-m", "dispatcher.lab.standin", *flags):
        yield gateway, picker


def test_containers_of_a_release_answer_a_request(
    gateway_and_picker: tuple[int, int], tmp_path: Path
) -> None:
    """Valkey, dispatcher, probes, check and `helm test` work, and SIGTERM ends the dispatcher."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    gateway, picker = gateway_and_picker
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
    kubelet = LocalKubelet(release, tmp_path, f"127.0.0.1:{queue}")
    pods = dict(release.pods())
    (valkey,) = pods["StatefulSet night-batch-dispatcher-valkey"]["spec"]["containers"]
    (test,) = pods["Pod night-batch-dispatcher-test"]["spec"]["containers"]
    (check,) = pods["Job night-batch-dispatcher-check"]["spec"]["containers"]

    with ExitStack() as stack:
        data = [each.replace("/data", str(tmp_path)) for each in valkey["args"]]
        stack.enter_context(running_process(server, *data, "--port", str(queue), "--bind", "127.0.0.1"))
        dispatcher = stack.enter_context(
            running_process(
                *kubelet.build_command(release.container),
                env=kubelet.build_environment(release.container, tmp_path),
                stop_s=30,
            )
        )
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5))
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = release.container[probe]["httpGet"]["path"]
            wait_until_sync(partial(is_ok, client, path), 30, what=path, every_s=0.1)
        check_run = kubelet.run_batch(check, tmp_path)
        assert check_run.returncode == 0, check_run.stdout + check_run.stderr
        test_run = kubelet.run_batch(test, tmp_path)
        assert test_run.returncode == 0, test_run.stderr
        assert '"choices"' in test_run.stdout
        dispatcher.terminate()
        assert dispatcher.wait(30) == 0


def get_status_code(client: httpx.Client, path: str) -> int:
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


def is_ok(client: httpx.Client, path: str) -> bool:
    return get_status_code(client, path) == 200


def test_valkey_service_has_the_address_in_the_settings() -> None:
    release = render({})
    assert release.settings().queue.url.reveal() == f"redis://{QUEUE_ADDRESS}"
    service = release.find_one("Service", "valkey")
    assert (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
        == QUEUE_ADDRESS.partition(":")[0]
    )
    assert service["spec"]["ports"][0]["port"] == 6379
    assert yaml.safe_load((CHART / "values.yaml").read_text())["valkey"]["enabled"] is None


@pytest.mark.parametrize("observe", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_helm_test_reports_why_nothing_was_sent(tmp_path: Path, observe: bool) -> None:
    """The endpoint picker cannot be reached, so the dispatcher is never ready and sends nothing."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    admin, queue, closed_port = free_port(), free_port(), free_port()
    release = render(
        {
            "gateway": {"url": f"http://127.0.0.1:{closed_port}"},
            "kubernetes": {"enabled": False},
            "observe": observe,
            "config": {
                "admin": {"port": admin},
                "signals": {"epp": {"urls": [f"http://127.0.0.1:{closed_port}"]}},
            },
            "test": {"deadline": 4},
        }
    )
    kubelet = LocalKubelet(release, tmp_path, f"127.0.0.1:{queue}")
    (test,) = release.find_one("Pod")["spec"]["containers"]
    environment = kubelet.build_environment(release.container, tmp_path)
    with (
        running_process(server, "--port", str(queue), "--bind", "127.0.0.1", "--save", "", cwd=tmp_path),
        running_process(*kubelet.build_command(release.container), env=environment, stop_s=30),
        httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5) as client,
    ):
        wait_until_sync(partial(is_ok, client, "/livez"), 30, what="/livez", every_s=0.1)
        done = kubelet.run_batch(test, tmp_path)
    assert done.returncode == 1, done.stdout
    assert (
        f"no reading yet of saturation and requests: 127.0.0.1:{closed_port}: connection refused"
        in done.stderr
    )
    assert done.stderr.startswith("not ready after 4 s: ") == observe
    assert ("DEADLINE_EXCEEDED" in done.stderr) != observe


def test_helm_test_reports_that_no_dispatcher_answers(tmp_path: Path) -> None:
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    queue = free_port()
    release = render({"test": {"deadline": 1}, "config": {"admin": {"port": free_port()}}})
    kubelet = LocalKubelet(release, tmp_path, f"127.0.0.1:{queue}")
    (test,) = release.find_one("Pod")["spec"]["containers"]
    with running_process(server, "--port", str(queue), "--bind", "127.0.0.1", "--save", "", cwd=tmp_path):
        done = kubelet.run_batch(test, tmp_path)
    assert done.returncode == 1
    (last,) = (line for line in done.stderr.splitlines() if line.startswith("no result for "))
    assert re.search(r"within 1[01] s: no dispatcher answers: nothing listens on", last)
