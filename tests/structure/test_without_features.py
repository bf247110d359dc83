"""The program works without the folder of a feature: its tests pass, and it serves requests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dispatcher import features
from tests.paths import ROOT

NEEDED_BY = {"sequences": ("batch_files",)}
"""Features that cannot do without another one: the lines of a batch file may form a sequence, for which
pyproject.toml declares imports."""
QUICK_TESTS = ("tests/kernel/test_admission.py", "tests/queue/test_lua_scripts.py")
KERNEL_TESTS = (
    "tests/kernel",
    "tests/queue/test_lua_scripts.py",
    "tests/limit/test_limiter.py",
    "tests/requests/test_request.py",
    "tests/requests/outcomes/test_outcome.py",
    "tests/requests/outcomes/test_judge.py",
    "tests/client/test_results.py",
)
SERVING_TEST = (
    "tests/scenarios/test_crash.py::test_killed_dispatcher_loses_no_request_and_answers_none_twice[short]"
)
"""Test that serves 200 requests with real processes, and kills the dispatcher meanwhile."""
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import dispatcher
for module in pkgutil.walk_packages(dispatcher.__path__, "dispatcher."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(dispatcher.__path__[0], *dispatcher.features.FEATURES)
"""
alone_and_together = pytest.mark.parametrize(
    "removed",
    [*((feature, *NEEDED_BY.get(feature, ())) for feature in features.ORDER), features.ORDER],
    ids=" and ".join,
)


def copy_tree(target: Path, removed: Sequence[str]) -> Path:
    """Copy program and tests without the folders of some features."""
    for folder in ("dispatcher", "tests"):
        skipped = {ROOT / folder / "features" / each for each in removed}
        shutil.copytree(
            ROOT / folder,
            target / folder,
            ignore=lambda path, names, skipped=skipped: {
                name for name in names if name == "__pycache__" or Path(path, name) in skipped
            },
        )
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def run_python(tree: Path, *arguments: str, timeout_s: float, expected_code: int = 0) -> str:
    """Run Python with the copied tree, and return what it prints. Fails if the exit code is another."""
    # Without the variables of this test run, which pytest and its plugins would take for their own.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == expected_code, done.stdout[-8000:]
    return done.stdout


def run_tests(tree: Path, *tests: str, timeout_s: float) -> None:
    output = run_python(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests, timeout_s=timeout_s
    )
    assert " passed" in output, output


@pytest.mark.timeout(400)
def test_tree_without_features_has_no_trace_of_them(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path, features.ORDER)
    assert run_python(tree, "-c", IMPORT_EVERYTHING, timeout_s=60).split() == [str(tree / "dispatcher")]
    verbs = run_python(tree, "-m", "dispatcher", "--help", timeout_s=60)
    assert "submit" in verbs
    assert not [each for each in ("models", "sequences", "streams") if each in verbs]
    options = run_python(tree, "-m", "dispatcher", "submit", "--help", timeout_s=60)
    assert not [each for each in ("--file", "--sequence") if each in options]
    submit = ("-m", "dispatcher", "submit", "{}", "--sequence", "a", "--queue-url", "redis://127.0.0.1:1")
    refused = run_python(tree, *submit, timeout_s=60, expected_code=2)
    assert "--sequence: this build has no sequences" in refused
    run_tests(tree, *QUICK_TESTS, timeout_s=200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@alone_and_together
def test_tree_without_features_passes_the_tests_of_the_kernel_and_serves_requests(
    tmp_path: Path, removed: tuple[str, ...]
) -> None:
    run_tests(copy_tree(tmp_path, removed), *KERNEL_TESTS, SERVING_TEST, timeout_s=800)
