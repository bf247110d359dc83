"""Targets of the Makefile report missing arguments and tools before they start."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

from tests.paths import ROOT
from tests.support import require_tool


def dry_run(*targets: str) -> list[str]:
    """Return the commands that make would run."""
    command = [require_tool("make"), "--no-print-directory", "--dry-run", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def test_make_image_without_a_registry_explains_how_to_set_it() -> None:
    command = [require_tool("make"), "image"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "make image REGISTRY=registry.example/team" in done.stderr


def test_ci_runs_each_test_but_the_long_forms_once() -> None:
    """Each run of pytest selects tests by marks. An expression of marks has the syntax of Python."""
    targets = re.findall(r"^stage .* make (test\S*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    commands = dry_run(*targets)
    selections = [selection for line in commands for selection in re.findall(r'pytest [^;]*-m "(.*?)"', line)]
    assert len(selections) == 3
    for marks in itertools.product([False, True], repeat=3):
        marked = dict(zip(("serial", "slow", "long"), marks, strict=True))
        run_count = sum(eval(selection, {}, marked) for selection in selections)
        assert run_count == (0 if marked["long"] else 1), marked


def test_cluster_test_checks_its_tools_before_it_builds(tmp_path: Path) -> None:
    """The first command checks the tools and fails if one is missing."""
    make = require_tool("make")
    commands = [line for line in dry_run("cluster-test") if "cluster.mk" not in line]
    assert commands[0].startswith("for tool in etcd unshare ip;")
    for name in ("sh", "getconf", "python3"):
        (tmp_path / name).symlink_to(require_tool(name))
    done = subprocess.run(
        [make, "cluster-programs"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert "make cluster-test needs " in done.stderr
