"""The distribution `batch-dispatcher-client`: what it contains, alone and beside the whole program."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tests.client.fake_dispatcher import FakeDispatcher
from tests.paths import ROOT
from tests.queue.servers import Server

FOLDER = ROOT / "deploy" / "client"
PACKAGES = ("hiredis", "msgspec", "redis")
"""The packages that the distribution requires, and that these require."""
PROGRAM = """
import asyncio, sys
from dispatcher.client import BatchClient, batched

@batched()
class Double:
    def transform(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

async def main():
    async with BatchClient(sys.argv[1], pool="qwen") as client:
        return await client.submit({"model": "m", "prompt": "hi"}, deadline="1m")

if __name__ == "__main__":
    with Double() as double:
        print(asyncio.run(main()).status, double.sync(4))
"""

IMPORT_EVERYTHING = """
import importlib, sys
from dispatcher import client
for name in sys.argv[1:]:
    importlib.import_module(name)
for name in client.__all__:
    getattr(client, name)
"""
OWNER_MODULES = re.compile(
    r"dispatcher\.(check|cli|gateway|kernel|lab|limit|service|settings|signals)\b"
    r"|dispatcher\.features\.(merging|models|slices)\b"
    r"|dispatcher\.queue\.redis\.(owner|result_writer|outbox|steps\.(claim|renew|settle|sweep))$"
)
"""Modules of the process that sends requests, which the client must not contain."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has the distribution and its dependencies only."""
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(FOLDER)]
    subprocess.run([*pip, *build], check=True, timeout=60)
    (wheel,) = folder.glob("batch_dispatcher_client-*.whl")
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=60)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (site_packages(python) / name).symlink_to(Path(spec.origin).parent)
    return python


def site_packages(python: Path) -> Path:
    (folder,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return folder


def run(python: Path, *arguments: str) -> str:
    command = [str(python), "-I", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()


async def test_installed_client_submits_requests(
    python: Path, one_redis: Server, fake_dispatcher: FakeDispatcher, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    async with fake_dispatcher.answer_continuously():
        printed = await asyncio.to_thread(run, python, str(program), one_redis.url)
    assert printed == "200 8"


def test_each_module_can_be_imported_and_none_is_of_the_dispatcher(python: Path) -> None:
    folder = site_packages(python) / "batch_dispatcher_client"
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    modules = sorted(".".join(file.parts).removesuffix(".__init__") for file in files)
    assert len(modules) > 100
    assert [name for name in modules if OWNER_MODULES.match(name)] == []
    run(python, "-c", IMPORT_EVERYTHING, *modules)


def test_modules_of_the_dispatcher_are_used_if_both_are_installed(python: Path) -> None:
    """The files of the two distributions differ, so that either one can be removed."""
    show_origin = ("-c", "from dispatcher import client; print(client.__file__)")
    own_folder = site_packages(python) / "batch_dispatcher_client"
    dispatcher = site_packages(python) / "dispatcher"
    assert Path(run(python, *show_origin)).is_relative_to(own_folder)
    dispatcher.symlink_to(ROOT / "dispatcher")
    assert Path(run(python, *show_origin)).is_relative_to(dispatcher)
    dispatcher.unlink()
    assert Path(run(python, *show_origin)).is_relative_to(own_folder)


def test_both_distributions_require_the_same_versions() -> None:
    ours, all_ = (
        tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (FOLDER, ROOT)
    )
    assert set(ours["dependencies"]) <= set(all_["dependencies"])
    assert ours["requires-python"] == all_["requires-python"]
