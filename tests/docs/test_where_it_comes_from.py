"""docs/systems.yaml compares the dispatcher with five systems, and names tests that run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from docs.systems import Row, System, read_systems
from tests.paths import DOCS, ROOT

SYSTEMS = read_systems()
ROWS = [(system, row) for system in SYSTEMS for row in system.rows]
PAGE = (DOCS / "contributing" / "where-it-comes-from.md").read_text()

MARKED_TESTS = """
import pytest

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_short_and_long(size): ...

@pytest.mark.long
def test_long(): ...

@pytest.mark.skip
def test_skipped(): ...

@pytest.mark.xfail
def test_failing(): ...

class TestClass:
    def test_method(self): ...
"""


def collect_tests(files: Iterable[Path], directory: Path = ROOT) -> set[str]:
    """Return the tests of these files that run before each merge, without their parameters.

    This includes slow tests. Tests that are only run in the long form, always skipped or expected to fail do
    not count.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not long and not skip and not xfail", *map(str, files)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def test_every_named_test_runs_by_default() -> None:
    named = {name for _, row in ROWS for name in row.tests}
    files = sorted({ROOT / name.partition("::")[0] for name in named})
    assert [str(path) for path in files if not path.is_file()] == []
    assert sorted(named - collect_tests(files)) == []


def test_long_skipped_and_failing_tests_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: runs only in the long form\n")
    (tmp_path / "test_marks.py").write_text(MARKED_TESTS)
    assert collect_tests([tmp_path / "test_marks.py"], tmp_path) == {
        "test_marks.py::test_short_and_long",
        "test_marks.py::TestClass::test_method",
    }


def test_five_systems_are_compared() -> None:
    assert len(SYSTEMS) == len({system.name for system in SYSTEMS}) == 5
    assert all(system.sources for system in SYSTEMS)


@pytest.mark.parametrize("here", ["works", "differs", "not"])
def test_every_row_with_this_verdict_says_how_and_names_a_test(here: str) -> None:
    rows = [row for _, row in ROWS if row.here == here]
    assert len(rows) > 5
    assert [row.feature for row in rows if not (row.tests and row.how.endswith("."))] == []


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_row_is_on_the_page(system: System) -> None:
    section = PAGE.partition(f"\n## {system.name}\n")[2].partition("\n## ")[0]
    shown = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert [(cells[0].removeprefix("| "), cells[1]) for cells in shown] == [
        (row.feature, row.here) for row in system.rows
    ]
    for cells, row in zip(shown, system.rows, strict=True):
        assert [name.rpartition("::")[2] in cells[3] for name in row.tests] == [True] * len(row.tests)


def test_unknown_verdict_is_rejected() -> None:
    row = {"feature": "f", "here": "perhaps", "how": "h", "tests": []}
    with pytest.raises(msgspec.ValidationError, match="perhaps"):
        msgspec.convert(row, Row)
