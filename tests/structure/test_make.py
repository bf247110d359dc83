"""Targets of the Makefile say what is missing before they begin."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.paths import ROOT
from tests.support import require_tool


def test_make_image_without_a_registry_says_how_to_name_one() -> None:
    command = [require_tool("make"), "image"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "make image REGISTRY=registry.example/team" in done.stderr


def test_cluster_test_asks_for_its_tools_before_it_builds(tmp_path: Path) -> None:
    """The first command of the plan is the check, and it fails where a tool is not there."""
    make = require_tool("make")
    plan = subprocess.run(
        [make, "--no-print-directory", "--dry-run", "cluster-test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    commands = [line for line in plan.splitlines() if "cluster.mk" not in line]
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
