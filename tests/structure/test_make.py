"""Targets of the Makefile report missing arguments and tools before they start."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.paths import ROOT
from tests.support import require_tool


def test_make_image_without_a_registry_explains_how_to_set_it() -> None:
    command = [require_tool("make"), "image"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "make image REGISTRY=registry.example/team" in done.stderr


def test_cluster_test_checks_its_tools_before_it_builds(tmp_path: Path) -> None:
    """The first command checks the tools and fails if one is missing."""
    make = require_tool("make")
    dry_run = subprocess.run(
        [make, "--no-print-directory", "--dry-run", "cluster-test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    commands = [line for line in dry_run.splitlines() if "cluster.mk" not in line]
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
