"""`make image`: which tool builds, what it is told, and what is said where none can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dispatcher import __version__
from tests.image.engine import CERTIFICATES, Engine
from tests.image.registry import registry
from tests.paths import ROOT
from tests.support import require_tool

BASE = "debian:trixie-slim@sha256:" + "0" * 64
RECORDS = """#!/bin/sh
case "$1 $2" in
    {fails}) exit 1 ;;
esac
echo "$0 $@" >>{log}
case "$1" in
    images) echo sha256:1234 ;;
esac
"""
OTHER = "arm64" if os.uname().machine == "x86_64" else "amd64"
"""An architecture that is not this machine's."""


class Tools:
    """Programs in place of docker, podman and buildah, which record their arguments and may be broken."""

    def __init__(self, directory: Path) -> None:
        self._bin, self._log = directory / "bin", directory / "log"
        self._bin.mkdir()

    def put(self, name: str, fails: str = "nothing") -> None:
        path = self._bin / name
        path.write_text(RECORDS.format(fails=fails, log=self._log))
        path.chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, ROOT / "deploy" / "publish.py", *arguments],
            env={"PATH": str(self._bin)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def told(self) -> list[list[str]]:
        lines = self._log.read_text().replace(f"{self._bin}/", "").splitlines()
        return [line.split() for line in lines if line.split()[1] != "info"]


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


def test_machine_without_a_tool_is_told_what_is_missing(tools: Tools) -> None:
    tools.put("docker", fails="'buildx version'")
    tools.put("buildah", fails="'info '")
    done = tools.run("registry.example")
    assert done.returncode == 1
    assert done.stderr == (
        "no tool on this machine can build the image: `docker buildx version` fails, podman is not "
        "installed, `buildah info` fails; install or start one of them\n"
    )


def test_docker_builds_and_pushes_every_platform_at_once(tools: Tools) -> None:
    for name in ("docker", "podman"):
        tools.put(name)
    platforms = f"linux/amd64,linux/{OTHER}"
    done = tools.run("registry.example/team/", "--tag", "7", "--base", BASE, "--platforms", platforms)
    assert done.returncode == 0, done.stderr
    build = tools.told()[-1]
    assert build[:3] == ["docker", "buildx", "build"]
    assert "--push" in build
    assert build[build.index("--tag") + 1] == "registry.example/team/batch-dispatcher:7"
    assert build[build.index("--platform") + 1] == platforms
    assert f"BASE={BASE}" in build
    assert "--set image.registry=registry.example/team --set image.tag=7\n" in done.stdout


@pytest.mark.parametrize("tool", ["podman", "buildah"])
def test_podman_and_buildah_push_a_list_of_platforms_and_look_up_the_base(tools: Tools, tool: str) -> None:
    tools.put(tool)
    done = tools.run("registry.example:5000", "--pip-conf", "/pip.conf")
    assert done.returncode == 0, done.stderr
    image = f"registry.example:5000/batch-dispatcher:{__version__}"
    pull, _, remove, build, push = tools.told()
    assert pull[:2] == [tool, "pull"]
    assert remove == [tool, "manifest", "rm", image]
    assert build[:4] == [tool, "build", "--manifest", image]
    assert "BASE=docker.io/library/debian:trixie-slim@sha256:1234" in build
    assert "id=pip.conf,src=/pip.conf" in build
    assert push == [tool, "manifest", "push", "--all", "--rm", image, f"docker://{image}"]


def test_platform_that_needs_an_emulator_is_refused_before_the_build(tools: Tools) -> None:
    tools.put("podman")
    if Path("/proc/sys/fs/binfmt_misc", {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}[OTHER]).exists():
        pytest.skip("this machine has the emulator")
    done = tools.run("registry.example", "--base", BASE, "--platforms", f"linux/{OTHER}")
    assert done.returncode == 1
    assert f"podman cannot build linux/{OTHER} on this machine" in done.stderr
    assert "install qemu-user-static" in done.stderr
    assert tools.told() == []


def test_failing_build_pushes_nothing_and_says_which_command_failed(tools: Tools) -> None:
    tools.put("podman", fails="'build --manifest'")
    done = tools.run("registry.example", "--base", BASE)
    assert done.returncode == 1
    assert "`podman build --manifest …` failed" in done.stderr
    assert all("push" not in command for command in tools.told())


@pytest.mark.parametrize("name", ["REGISTRY", "https://registry.example", "registry.example/a:1", ""])
def test_registry_is_named_by_host_and_path(tools: Tools, name: str) -> None:
    tools.put("podman")
    done = tools.run(name)
    assert done.returncode == 1
    assert f"REGISTRY={name}: name the host of a registry" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(2_400)
@pytest.mark.parametrize("tool", ["podman", "buildah"])
def test_image_is_in_the_registry_by_one_command(engine: Engine, tmp_path: Path, tool: str) -> None:
    """Pushed to a registry on loopback, twice: a second run starts from what the first has left."""
    base, only = engine.build_base("trixie"), tmp_path / "bin"
    only.mkdir()
    (only / tool).symlink_to(require_tool(tool))
    hidden = [each for each in ("docker", "podman", "buildah") if each != tool]
    for each in hidden:
        (only / each).write_text("#!/bin/sh\nexit 1\n")
        (only / each).chmod(0o755)
    storage = ROOT / "build" / "image-test"
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{storage}/storage"\nrunroot = "{storage}/run"\n'
    )
    (tmp_path / "containers.conf").write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        f'[containers]\nvolumes = ["{CERTIFICATES}:{CERTIFICATES}.of-host:ro"]\n'
    )
    (tmp_path / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}.of-host\n")
    with registry(tmp_path / "ca.pem") as served:
        environ = {
            **os.environ,
            "PATH": f"{only}:{os.environ['PATH']}",
            "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
            "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
            "CONTAINERS_CONF": str(tmp_path / "containers.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
        settings = [f"REGISTRY={served.host}/team", f"BASE={base}", f"PIP_CONF={tmp_path}/pip.conf"]
        for _ in range(2):
            done = subprocess.run(
                ["nice", "-n", "19", "make", "image", *settings],
                cwd=ROOT,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=1_800,
            )
            assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
            media, text = served.manifests[f"team/batch-dispatcher:{__version__}"]
            assert "index" in media or "list" in media
            (image,) = json.loads(text)["manifests"]
            _, manifest = served.manifests[f"team/batch-dispatcher:{image['digest']}"]
            config = json.loads(served.blobs[json.loads(manifest)["config"]["digest"]])["config"]
            assert config["Entrypoint"] == ["/opt/batch-dispatcher/bin/batch-dispatcher"]
            assert config["Labels"]["org.opencontainers.image.base.name"] == base
            assert len(config["Labels"]["org.opencontainers.image.revision"]) == 40
