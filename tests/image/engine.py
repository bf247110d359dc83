"""podman, as far as the image's proof needs it: a base of debootstrap's, builds, containers locked down."""

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
SLIM = (
    "path-exclude /usr/share/doc/*\npath-include /usr/share/doc/*/copyright\npath-exclude /usr/share/man/*\n"
)
LOCKED_DOWN = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:mode=1777,noexec"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
    # Who builds and tests inside a container may not raise limits: podman would, by default.
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
)
"""What a pod of the security standard `restricted` is given, with a read-only root, and no network added."""


class Engine:
    """podman with a storage of its own in `directory`. Everything it started ends with `close`."""

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
        """What a podman command printed. An error says all that it said."""
        done = self.try_(*arguments, timeout_s=timeout_s)
        assert not check or done.returncode == 0, (
            f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout.strip()

    def try_(self, *arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, check=False, timeout=timeout_s
        )

    def command(self, *arguments: str | Path) -> list[str]:
        return [*self._command, *(str(each) for each in arguments)]

    def build_base(self, suite: str) -> str:
        """A Debian from its packages, as bare as the published slim ones, by its digest; made once."""
        name = f"localhost/debian:{suite}-slim"
        if self.try_("image", "exists", name).returncode != 0:
            tree, archive = self._directory / suite, self._directory / f"{suite}.tar"
            _run("nice", "-n", "19", require_tool("debootstrap"), "--variant=minbase", suite, tree)
            (tree / "etc/dpkg/dpkg.cfg.d/slim").write_text(SLIM)
            for documents in (tree / "usr/share/doc").iterdir():
                if documents.is_symlink():  # to those of another package
                    documents.unlink()
            _run("tar", "--create", "--directory", tree, "--file", archive, ".")
            self("import", archive, name)
            _run("rm", "-rf", "--one-file-system", tree, archive)
        return f"localhost/debian@{self.inspect(name)['Digest']}"

    def build(self, base: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
        """Build the checkout's Dockerfile; pip trusts whom this machine trusts."""
        settings = self._directory / "pip.conf"
        settings.write_text(f"[global]\ncert = {CERTIFICATES}.of-host\n")
        ours = ["--build-arg", f"BASE={base}", "--secret", f"id=pip.conf,src={settings}"]
        ours += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}.of-host:ro"]
        build = self.command("build", "--isolation", "chroot", "--layers", *ours, *options, ROOT)
        return subprocess.run(
            ["nice", "-n", "19", *build], capture_output=True, text=True, check=False, timeout=1_800
        )

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self("image", "inspect", name))
        assert isinstance(found, dict)
        return found

    def start(self, image: str, *options: str | Path, then: Sequence[str | Path] = ()) -> str:
        """A container in the background, locked down; its id."""
        started = self("run", "--detach", *LOCKED_DOWN, *options, image, *then)
        self._started.append(started)
        return started

    def run(
        self, image: str, *options: str | Path, network: str = "none", then: Sequence[str | Path] = ()
    ) -> str:
        """What a container printed that is locked down, once it has ended well."""
        return self("run", "--rm", "--network", network, *LOCKED_DOWN, *options, image, *then)

    def network(self, container: str) -> Path:
        """The container's network namespace."""
        return Path("/proc", self("inspect", "--format", "{{.State.Pid}}", container), "ns/net")

    def close(self) -> None:
        if self._started:
            self("rm", "--force", "--ignore", "--time", "0", *self._started, check=False)
        self("image", "unmount", "--all", check=False)
        storage = self._directory / "storage" / "overlay"
        if os.path.ismount(storage):  # podman leaves it mounted, and nobody could remove the directory
            subprocess.run(["umount", storage], check=False)


def _run(*command: str | Path) -> None:
    subprocess.run([str(each) for each in command], check=True, capture_output=True)
