"""Build the image and push it to a registry; `make image` runs this.

    python3 deploy/publish.py REGISTRY [--tag TAG] [--platforms linux/amd64,linux/arm64]
                              [--base debian:trixie-slim@sha256:…] [--pip-conf FILE]

It builds with docker (buildx), podman or buildah, the first of them that works on this machine. It needs only
the standard library, so that nothing has to be set up before.

The default tag names the commit, because nodes cache images by their tag. An image with the tag of an older
one would never reach these nodes, and Kubernetes would not restart the pods.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = "batch-dispatcher"
DEBIAN = "docker.io/library/debian:trixie-slim"
"""The base whose digest of today is looked up, unless `--base` names one."""
EMULATORS = Path("/proc/sys/fs/binfmt_misc")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architecture of an image → the machine that runs it."""
WORKS = {
    "docker": (["docker", "buildx", "version"], ["docker", "info"]),
    "podman": (["podman", "info"],),
    "buildah": (["buildah", "info"],),
}
"""Tool → commands that succeed where it can build."""


def main() -> None:
    options = _options()
    tool = _tool()
    _require_emulators(tool, options.platforms)
    base = options.base or _todays_base(tool)
    image = f"{options.registry.rstrip('/')}/{NAME}:{options.tag}"
    print(f"{tool} builds {image} from {base}", flush=True)  # noqa: T201 - what a build of minutes is about
    if tool != "docker":  # or the images of a run that failed would stay in the list
        subprocess.run([tool, "manifest", "rm", image], capture_output=True, check=False)
    with tempfile.TemporaryDirectory() as directory:
        digest_file = Path(directory) / "digest"
        for command in build_commands(tool, image, base, options.platforms, options.pip_conf, digest_file):
            subprocess.run(command, check=True)
        digest = read_digest(digest_file)
    registry = f"--set image.registry={options.registry.rstrip('/')}"
    print(  # noqa: T201
        f"pushed {image}@{digest}\n"
        "install it by its digest, which always names this image:\n"
        f"  {registry} --set image.digest={digest}\n"
        "or by its tag, if no older image has the same tag:\n"
        f"  {registry} --set image.tag={options.tag}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the image and push it to a registry.")
    parser.add_argument("registry", help="host of the registry, and the path there, if any")
    parser.add_argument("--tag", default="", help="default: the version and the commit of this checkout")
    parser.add_argument("--platforms", default="", help="default: that of this machine")
    parser.add_argument("--base", default="", help=f"default: {DEBIAN} with its digest of today")
    parser.add_argument("--pip-conf", default="", help="settings of pip, such as an index of your own")
    options = parser.parse_args()
    if not re.fullmatch(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*/?", options.registry):
        sys.exit(f"REGISTRY={options.registry}: name the host of a registry, such as registry.example/team")
    options.tag = options.tag or default_tag()
    return options


def default_tag() -> str:
    """Return the version with the commit, and a mark if the checkout has changes that are not committed."""
    revision = _ask_git("rev-parse", "--short=12", "HEAD")
    mark = "-dirty" if revision and _ask_git("status", "--porcelain") else ""
    return "-".join(filter(None, (version(), revision))) + mark


def version() -> str:
    """Return the version of this checkout without importing it."""
    (found,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "dispatcher/__init__.py").read_text(), re.MULTILINE
    )
    return str(found)


def _tool() -> str:
    """Return the first tool that can build here."""
    problems = []
    for tool, commands in WORKS.items():
        if shutil.which(tool) is None:
            problems.append(f"{tool} is not installed")
        elif failed := [each for each in commands if subprocess.run(each, capture_output=True).returncode]:
            problems.append(f"`{' '.join(failed[0])}` fails")
        else:
            return tool
    sys.exit(
        f"no tool on this machine can build the image: {', '.join(problems)}; install or start one of them"
    )


def _require_emulators(tool: str, platforms: str) -> None:
    """Exit where podman or buildah would fail in the middle; buildx brings emulators of its own."""
    if tool == "docker":
        return
    for each in filter(None, platforms.split(",")):
        machine = MACHINES.get(each.split("/")[1] if "/" in each else each, "")
        if machine != platform.machine() and not (EMULATORS / f"qemu-{machine}").exists():
            sys.exit(
                f"PLATFORMS: {tool} cannot build {each} on this machine ({platform.machine()}) without an "
                "emulator: install qemu-user-static (Debian, Fedora), or leave it out"
            )


def _todays_base(tool: str) -> str:
    """Return the base with its digest, which the registry of Debian's image says."""
    if tool == "docker":
        ask = ["docker", "buildx", "imagetools", "inspect", DEBIAN, "--format", "{{.Manifest.Digest}}"]
    else:
        subprocess.run([tool, "pull", "--quiet", DEBIAN], check=True, stdout=subprocess.DEVNULL)
        ask = [tool, "images", "--digests", "--format", "{{.Digest}}", DEBIAN]
    digest = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[0]
    return f"{DEBIAN}@{digest}"


def build_commands(
    tool: str, image: str, base: str, platforms: str, pip_conf: str, digest_file: Path
) -> list[list[str]]:
    """Return the commands that build the image, for each platform, and push it. The last one writes the
    digest to a file."""
    options = ["--build-arg", f"BASE={base}"]
    # As labels, not as arguments of the Dockerfile: if only arguments have changed, podman 4.3 takes the
    # image from its cache, with the labels of an earlier commit.
    labels = {"created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "revision": _ask_git("rev-parse", "HEAD")}
    for name, text in labels.items():
        options += ["--label", f"org.opencontainers.image.{name}={text}"] if text else []
    options += ["--platform", platforms] if platforms else []
    options += ["--secret", f"id=pip.conf,src={pip_conf}"] if pip_conf else []
    if tool == "docker":
        options += ["--metadata-file", str(digest_file)]
        return [["docker", "buildx", "build", "--push", "--tag", image, *options, str(ROOT)]]
    to_file = ["--digestfile", str(digest_file)]
    return [
        [tool, "build", "--manifest", image, *options, str(ROOT)],
        [tool, "manifest", "push", "--all", "--rm", *to_file, image, f"docker://{image}"],
    ]


def read_digest(file: Path) -> str:
    """Return the digest of the pushed image from a file of docker (JSON), or of podman and buildah (text)."""
    (found,) = re.findall(r'(?:^|"containerimage\.digest": *")(sha256:[0-9a-f]{64})', file.read_text())
    return str(found)


def _ask_git(*arguments: str) -> str:
    """Return the output of git for this checkout. Empty if there is no git or no checkout."""
    if shutil.which("git") is None:
        return ""
    ask = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(ask, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"`{' '.join(error.cmd[:3])} …` failed: what it says above is why nothing was pushed")
