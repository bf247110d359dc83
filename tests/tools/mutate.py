"""Check that tests notice small errors: change one token of the code, and run the tests that reach it.

Line coverage says that a line ran, not that a test looked at what it computed. Here a change of one
comparison, one `and` or `or`, one `+` or `-`, one `min` or `max` must make a test fail. The changes are drawn
by a seed, so that the same seed on the same code draws the same changes.

    python -m tests.tools.mutate dispatcher/limit --tests tests/limit --count 50

Nothing is written into the checkout: a process for each change loads the changed module in place of the file.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import coverage
import hypothesis  # noqa: F401 -- loaded once, before the processes are forked
import pytest

OPERATORS: dict[type[ast.AST], tuple[str, type[ast.AST], str]] = {
    ast.Lt: ("<", ast.LtE, "<="),
    ast.LtE: ("<=", ast.Lt, "<"),
    ast.Gt: (">", ast.GtE, ">="),
    ast.GtE: (">=", ast.Gt, ">"),
    ast.Eq: ("==", ast.NotEq, "!="),
    ast.NotEq: ("!=", ast.Eq, "=="),
    ast.Is: ("is", ast.IsNot, "is not"),
    ast.IsNot: ("is not", ast.Is, "is"),
    ast.In: ("in", ast.NotIn, "not in"),
    ast.NotIn: ("not in", ast.In, "in"),
    ast.And: ("and", ast.Or, "or"),
    ast.Or: ("or", ast.And, "and"),
    ast.Add: ("+", ast.Sub, "-"),
    ast.Sub: ("-", ast.Add, "+"),
}
"""Name of each operator, and the operator that replaces it with its name."""
FUNCTIONS = {"min": "max", "max": "min"}
TIME_LIMIT_S = 120.0
"""Time after which a change counts as noticed, because it keeps a test from ending."""
EXIT_PASSED, EXIT_NO_TESTS = int(pytest.ExitCode.OK), int(pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True)
class Change:
    """A change of one token of a file."""

    path: Path
    line: int
    number: int
    """Number of the token among those of the file that can be changed."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.new} instead of {self.old}"


class _Tokens(ast.NodeVisitor):
    """Visits the tokens that can be changed, always in the same order, and changes the one of `target`."""

    def __init__(self, target: int = -1) -> None:
        self.found: list[tuple[int, str, str]] = []
        """Line, name and replacement of each token."""
        self._target = target

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            node.ops[at] = self._replace(node.comparators[at].lineno, operator)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        node.op = self._replace(node.values[0].lineno, node.op)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # Text cannot be subtracted, which is an error of every run.
        if not _is_text(node.left) and not _is_text(node.right):
            node.op = self._replace(node.lineno, node.op)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_text(node.value):
            node.op = self._replace(node.lineno, node.op)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in FUNCTIONS:
            if len(self.found) == self._target:
                node.func = ast.copy_location(ast.Name(FUNCTIONS[name], ast.Load()), node.func)
            self.found.append((node.lineno, name, FUNCTIONS[name]))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Skip the annotation of a parameter."""

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def _replace(self, line: int, operator: Any) -> Any:
        known = OPERATORS.get(type(operator))
        if known is None:
            return operator
        old, replacement, new = known
        self.found.append((line, old, new))
        return replacement() if len(self.found) - 1 == self._target else operator


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def list_changes(paths: Iterable[Path]) -> list[Change]:
    """Return every change of one token of these files."""
    changes = []
    for path in sorted(paths):
        tokens = _Tokens()
        tokens.visit(ast.parse(path.read_bytes()))
        changes += [
            Change(path, line, number, old, new) for number, (line, old, new) in enumerate(tokens.found)
        ]
    return changes


def compile_changed(change: Change) -> CodeType:
    """Compile the file with the change."""
    tree = ast.parse(change.path.read_bytes())
    _Tokens(change.number).visit(tree)
    return compile(tree, str(change.path.resolve()), "exec")


class _ChangedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the changed module, and leaves all others to the ordinary loaders."""

    def __init__(self, change: Change) -> None:
        self._name = ".".join(change.path.with_suffix("").parts).removesuffix(".__init__")
        self._path = change.path.resolve()
        self._code = compile_changed(change)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        is_package = self._path.name == "__init__.py"
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path), is_package=is_package)
        if is_package:
            spec.submodule_search_locations = [str(self._path.parent)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._path)
        exec(self._code, module.__dict__)


class _SelectedTests:
    """Plugin of pytest that runs the tests with these names."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._names]


def measure_reach(
    folders: Sequence[Path], tests: Sequence[str], data_file: Path, jobs: int
) -> coverage.CoverageData:
    """Run the tests once, and return which test ran which line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "-m", "not serial and not long"]
    command += ["--cov-context=test", "--cov-report=", *(f"--cov={folder}" for folder in folders), *tests]
    subprocess.run(command, check=True, env={**os.environ, "COVERAGE_FILE": str(data_file)})
    data = coverage.CoverageData(basename=str(data_file))
    data.read()
    return data


def find_tests(change: Change, data: coverage.CoverageData) -> frozenset[str]:
    """Return the tests that run the changed line. If that is only run by an import, those of its file."""
    by_line = data.contexts_by_lineno(str(change.path.resolve()))
    contexts = [context for context in by_line.get(change.line, ()) if context]
    if not contexts:
        contexts = [context for found in by_line.values() for context in found if context]
    return frozenset(context.rpartition("|")[0] for context in contexts)


def run_tests(change: Change, names: frozenset[str], log: Path) -> int:
    """Run these tests on the changed code in this process, and return the exit code of pytest."""
    sys.meta_path.insert(0, _ChangedModule(change))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    files = sorted({name.partition("::")[0] for name in names})
    arguments = ["-x", "-q", "--timeout=60", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov"]
    arguments += ["-m", "not serial and not long", "--hypothesis-seed=0"]
    return int(pytest.main([*arguments, *files], plugins=[_SelectedTests(names)]))


@dataclass
class _Run:
    """Process that tests a change."""

    change: Change
    process_id: int
    ends_by: float


def check_changes(
    changes: Sequence[Change], data: coverage.CoverageData, jobs: int, folder: Path
) -> Iterator[tuple[Change, bool]]:
    """Yield each change and whether a test noticed it."""
    running: list[_Run] = []
    remaining = list(reversed(changes))
    while remaining or running:
        while remaining and len(running) < jobs:
            change = remaining.pop()
            names = find_tests(change, data)
            if not names:
                yield change, False
                continue
            process_id = os.fork()
            if process_id == 0:
                code = 3
                try:
                    code = run_tests(change, names, folder / f"{os.getpid()}.log")
                finally:
                    os._exit(code)
            running.append(_Run(change, process_id, time.monotonic() + TIME_LIMIT_S))
        time.sleep(0.05)
        for run in list(running):
            ended, status = os.waitpid(run.process_id, os.WNOHANG)
            if not ended:
                if time.monotonic() < run.ends_by:
                    continue
                os.kill(run.process_id, 9)
                os.waitpid(run.process_id, 0)
                status = 1
            running.remove(run)
            yield run.change, os.waitstatus_to_exitcode(status) not in (EXIT_PASSED, EXIT_NO_TESTS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="code that is changed")
    parser.add_argument("--tests", nargs="+", required=True, help="tests that must notice it")
    parser.add_argument("--count", type=int, default=200, help="number of changes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at the same time")
    parser.add_argument("--least", type=float, default=0.9, help="share of noticed changes that is required")
    options = parser.parse_args()
    possible = list_changes(path for folder in options.folders for path in folder.rglob("*.py"))
    drawn = random.Random(options.seed).sample(possible, min(options.count, len(possible)))
    unnoticed: list[Change] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "examples")
        data = measure_reach(options.folders, options.tests, folder / "coverage", options.jobs)
        for change, is_noticed in check_changes(drawn, data, options.jobs, folder):
            if not is_noticed:
                unnoticed.append(change)
                print("unnoticed:", change, flush=True)
    noticed_count = len(drawn) - len(unnoticed)
    share = noticed_count / len(drawn)
    print(
        f"seed {options.seed}: {noticed_count} of {len(drawn)} changes noticed ({share:.1%}), "
        f"drawn from {len(possible)}; required {options.least:.0%}"
    )
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
