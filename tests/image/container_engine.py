"""Builds images and runs restricted containers with podman, on a base image made by debootstrap."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.support import require_tool

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
DPKG_EXCLUDES = (
    "path-exclude /usr/share/doc/*\npath-include /usr/share/doc/*/copyright\npath-exclude /usr/share/man/*\n"
)
RESTRICTED_OPTIONS = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:mode=1777,noexec"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
    # podman raises limits by default, which fails if the tests themselves run inside a container.
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
)
"""Options that match a pod of the security standard `restricted` with a read-only root."""


class Engine:
    """podman with its own storage in `directory`. `close` ends all containers that it started."""

    def __init__(self, directory: Path) -> None:
        podman = require_tool("podman")
        runtime = require_tool("runc")
        self._command = [
            *(podman, "--runtime", runtime, "--cgroup-manager", "cgroupfs", "--storage-driver", "overlay"),
            *("--root", str(directory / "storage"), "--runroot", str(directory / "run")),
        ]
        self._directory = directory
        self._started: list[str] = []

    def __call__(self, *arguments: str | Path, check: bool = True, timeout_s: float = 120) -> str:
        """Run a podman command and return its output. The error contains all output."""
        done = self.run_unchecked(*arguments, timeout_s=timeout_s)
        assert not check or done.returncode == 0, (
            f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout.strip()

    def run_unchecked(
        self, *arguments: str | Path, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.build_command(*arguments), capture_output=True, text=True, check=False, timeout=timeout_s
        )

    def build_command(self, *arguments: str | Path) -> list[str]:
        return [*self._command, *(str(each) for each in arguments)]

    def build_base(self, suite: str) -> str:
        """Build a minimal Debian image like the slim ones, unless it exists, and return its digest."""
        name = f"localhost/debian:{suite}-slim"
        if self.run_unchecked("image", "exists", name).returncode != 0:
            tree, archive = self._directory / suite, self._directory / f"{suite}.tar"
            _run("nice", "-n", "19", require_tool("debootstrap"), "--variant=minbase", suite, tree)
            (tree / "etc/dpkg/dpkg.cfg.d/slim").write_text(DPKG_EXCLUDES)
            for documents in (tree / "usr/share/doc").iterdir():
                if documents.is_symlink():  # Links to the files of another package.
                    documents.unlink()
            _run("tar", "--create", "--directory", tree, "--file", archive, ".")
            self("import", archive, name)
            _run("rm", "-rf", "--one-file-system", tree, archive)
        return f"localhost/debian@{self.inspect(name)['Digest']}"

    def build(self, base: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
        """Build the Dockerfile of the checkout. pip uses the certificates of this machine."""
        settings = self._directory / "pip.conf"
        settings.write_text(f"[global]\ncert = {CERTIFICATES}.of-host\n")
        arguments = ["--build-arg", f"BASE={base}", "--secret", f"id=pip.conf,src={settings}"]
        arguments += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}.of-host:ro"]
        build = self.build_command("build", "--isolation", "chroot", "--layers", *arguments, *options, ROOT)
        return subprocess.run(
            ["nice", "-n", "19", *build], capture_output=True, text=True, check=False, timeout=1_800
        )

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self("image", "inspect", name))
        assert isinstance(found, dict)
        return found

    def start(self, image: str, *options: str | Path, command: Sequence[str | Path] = ()) -> str:
        """Start a restricted container in the background and return its id."""
        started = self("run", "--detach", *RESTRICTED_OPTIONS, *options, image, *command)
        self._started.append(started)
        return started

    def run(
        self, image: str, *options: str | Path, network: str = "none", command: Sequence[str | Path] = ()
    ) -> str:
        """Run a restricted container until it succeeds and return its output."""
        return self("run", "--rm", "--network", network, *RESTRICTED_OPTIONS, *options, image, *command)

    def network(self, container: str) -> Path:
        """Return the path of the network namespace of a container."""
        return Path("/proc", self("inspect", "--format", "{{.State.Pid}}", container), "ns/net")

    def close(self) -> None:
        if self._started:
            self("rm", "--force", "--ignore", "--time", "0", *self._started, check=False)
        self("image", "unmount", "--all", check=False)
        storage = self._directory / "storage" / "overlay"
        if os.path.ismount(storage):  # podman leaves it mounted, so that the directory could not be removed.
            subprocess.run(["umount", storage], check=False)


def _run(*build_command: str | Path) -> None:
    subprocess.run([str(each) for each in build_command], check=True, capture_output=True)
