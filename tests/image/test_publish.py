"""`make image`: the choice of the build tool, its arguments, and the error if no tool is available."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher import __version__
from tests.image.container_engine import CERTIFICATES, Engine
from tests.image.registry import run_registry
from tests.paths import ROOT
from tests.support import require_tool

BASE = "debian:trixie-slim@sha256:" + "0" * 64
RECORDING_SCRIPT = """#!/bin/sh
case "$1 $2" in
    {fails}) exit 1 ;;
esac
echo "$0 $@" >>{log}
case "$1" in
    images) echo sha256:1234 ;;
esac
while [ $# -gt 0 ]; do
    case "$1" in
        --digestfile) printf {digest} >"$2" ;;
        --metadata-file) printf '{{"image.name": "a", "containerimage.digest": "{digest}"}}' >"$2" ;;
    esac
    shift
done
"""
DIGEST = "sha256:" + "d" * 64
OTHER_ARCHITECTURE = "arm64" if os.uname().machine == "x86_64" else "amd64"
"""Architecture that differs from this machine."""


class RecordingTools:
    """Stand-ins for docker, podman and buildah that record their arguments and can fail."""

    def __init__(self, directory: Path) -> None:
        self._bin, self._log = directory / "bin", directory / "log"
        self._bin.mkdir()

    def install(self, name: str, fails: str = "nothing") -> None:
        path = self._bin / name
        path.write_text(RECORDING_SCRIPT.format(fails=fails, log=self._log, digest=DIGEST))
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

    def read_commands(self) -> list[list[str]]:
        lines = self._log.read_text().replace(f"{self._bin}/", "").splitlines()
        return [line.split() for line in lines if line.split()[1] != "info"]


@pytest.fixture
def tools(tmp_path: Path) -> RecordingTools:
    return RecordingTools(tmp_path)


def test_missing_tools_are_reported(tools: RecordingTools) -> None:
    tools.install("docker", fails="'buildx version'")
    tools.install("buildah", fails="'info '")
    done = tools.run("registry.example")
    assert done.returncode == 1
    assert done.stderr == (
        "no tool on this machine can build the image: `docker buildx version` fails, podman is not "
        "installed, `buildah info` fails; install or start one of them\n"
    )


def test_docker_builds_and_pushes_every_platform_at_once(tools: RecordingTools) -> None:
    for name in ("docker", "podman"):
        tools.install(name)
    platforms = f"linux/amd64,linux/{OTHER_ARCHITECTURE}"
    done = tools.run("registry.example/team/", "--tag", "7", "--base", BASE, "--platforms", platforms)
    assert done.returncode == 0, done.stderr
    build = tools.read_commands()[-1]
    assert build[:3] == ["docker", "buildx", "build"]
    assert "--push" in build
    assert build[build.index("--tag") + 1] == "registry.example/team/batch-dispatcher:7"
    assert build[build.index("--platform") + 1] == platforms
    assert f"BASE={BASE}" in build
    assert build[build.index("--label") + 1].startswith("org.opencontainers.image.created=20")
    assert f"--set image.registry=registry.example/team --set image.digest={DIGEST}\n" in done.stdout
    assert "--set image.registry=registry.example/team --set image.tag=7\n" in done.stdout


@pytest.mark.parametrize("tool", ["podman", "buildah"])
def test_podman_and_buildah_push_a_list_of_platforms_and_look_up_the_base(
    tools: RecordingTools, tool: str
) -> None:
    tools.install(tool)
    done = tools.run("registry.example:5000", "--pip-conf", "/pip.conf")
    assert done.returncode == 0, done.stderr
    image = f"registry.example:5000/batch-dispatcher:{__version__}"  # there is no git in this PATH
    pull, _, remove, build, push = tools.read_commands()
    assert pull[:2] == [tool, "pull"]
    assert remove == [tool, "manifest", "rm", image]
    assert build[:4] == [tool, "build", "--manifest", image]
    assert "BASE=docker.io/library/debian:trixie-slim@sha256:1234" in build
    assert "id=pip.conf,src=/pip.conf" in build
    assert push[:6] == [tool, "manifest", "push", "--all", "--rm", "--digestfile"]
    assert push[7:] == [image, f"docker://{image}"]
    assert f"pushed {image}@{DIGEST}\n" in done.stdout


def make_checkout(directory: Path) -> Callable[..., str]:
    """Create a checkout with one commit of the program, and return a function that runs git there."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        ask = ["git", "-C", str(directory), *who, *arguments]
        return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("deploy/publish.py", "dispatcher/__init__.py"):
        (directory / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, directory / name)
    git("init")
    git("add", ".")
    git("commit", "--message", "first")
    return git


def read_default_tag(checkout: Path) -> str:
    ask = [sys.executable, "-B", "-c", "import publish; print(publish.default_tag())"]
    done = subprocess.run(ask, cwd=checkout / "deploy", check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_default_tag_names_the_commit_and_uncommitted_changes(tmp_path: Path) -> None:
    git = make_checkout(tmp_path)
    first = read_default_tag(tmp_path)
    assert first == f"{__version__}-{git('rev-parse', '--short=12', 'HEAD')}"
    (tmp_path / "more.py").touch()
    assert read_default_tag(tmp_path) == f"{first}-dirty"
    git("add", ".")
    git("commit", "--message", "second")
    second = read_default_tag(tmp_path)
    assert second != first
    assert not second.endswith("-dirty")


def test_platform_that_needs_an_emulator_is_rejected_before_the_build(tools: RecordingTools) -> None:
    tools.install("podman")
    if Path(
        "/proc/sys/fs/binfmt_misc", {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}[OTHER_ARCHITECTURE]
    ).exists():
        pytest.skip("this machine has the emulator")
    done = tools.run("registry.example", "--base", BASE, "--platforms", f"linux/{OTHER_ARCHITECTURE}")
    assert done.returncode == 1
    assert f"podman cannot build linux/{OTHER_ARCHITECTURE} on this machine" in done.stderr
    assert "install qemu-user-static" in done.stderr
    assert tools.read_commands() == []


def test_failing_build_pushes_nothing_and_names_the_failed_command(tools: RecordingTools) -> None:
    tools.install("podman", fails="'build --manifest'")
    done = tools.run("registry.example", "--base", BASE)
    assert done.returncode == 1
    assert "`podman build --manifest …` failed" in done.stderr
    assert all("push" not in command for command in tools.read_commands())


@pytest.mark.parametrize("name", ["REGISTRY", "https://registry.example", "registry.example/a:1", ""])
def test_invalid_registry_is_rejected(tools: RecordingTools, name: str) -> None:
    tools.install("podman")
    done = tools.run(name)
    assert done.returncode == 1
    assert f"REGISTRY={name}: name the host of a registry" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(2_400)
@pytest.mark.parametrize("tool", ["podman", "buildah"])
def test_one_command_pushes_the_image_to_a_registry(engine: Engine, tmp_path: Path, tool: str) -> None:
    """The image is pushed twice to a local registry; the second run reuses the results of the first."""
    base, tool_directory = engine.build_base("trixie"), tmp_path / "bin"
    tool_directory.mkdir()
    (tool_directory / tool).symlink_to(require_tool(tool))
    disabled_tools = [each for each in ("docker", "podman", "buildah") if each != tool]
    for each in disabled_tools:
        (tool_directory / each).write_text("#!/bin/sh\nexit 1\n")
        (tool_directory / each).chmod(0o755)
    storage = ROOT / "build" / "image-test"
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{storage}/storage"\nrunroot = "{storage}/run"\n'
    )
    (tmp_path / "containers.conf").write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        f'[containers]\nvolumes = ["{CERTIFICATES}:{CERTIFICATES}.of-host:ro"]\n'
    )
    (tmp_path / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}.of-host\n")
    with run_registry(tmp_path / "ca.pem") as registry:
        environ = {
            **os.environ,
            "PATH": f"{tool_directory}:{os.environ['PATH']}",
            "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
            "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
            "CONTAINERS_CONF": str(tmp_path / "containers.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
        settings = [f"REGISTRY={registry.host}/team", f"BASE={base}", f"PIP_CONF={tmp_path}/pip.conf"]
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
            (tag,) = re.findall(r"--set image\.tag=(\S+)", done.stdout)
            (digest,) = re.findall(r"--set image\.digest=(\S+)", done.stdout)
            media, text = registry.manifests[f"team/batch-dispatcher:{tag}"]
            assert f"sha256:{hashlib.sha256(text).hexdigest()}" == digest
            assert "index" in media or "list" in media
            (image,) = json.loads(text)["manifests"]
            _, manifest = registry.manifests[f"team/batch-dispatcher:{image['digest']}"]
            config = json.loads(registry.blobs[json.loads(manifest)["config"]["digest"]])["config"]
            assert config["Entrypoint"] == ["/opt/batch-dispatcher/bin/batch-dispatcher"]
            assert config["Labels"]["org.opencontainers.image.base.name"] == base
            assert len(config["Labels"]["org.opencontainers.image.revision"]) == 40
