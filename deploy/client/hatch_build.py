"""Add the modules that the client imports to its wheel, at once or later, and all Lua files.

A client runs two thirds of the Lua files, those of features included, because a script that ends a request
ends what features store with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parents[2]
START = ("dispatcher.client", "dispatcher.batched.worker_program")
"""The client, and the program of its worker processes. No module imports that program: it is named in the
code that a new interpreter is given."""
FEATURES = ("batch_files", "named_streams", "sequences")
"""Features that the client has methods for."""
_MODULE_NAME = re.compile(r"dispatcher(\.\w+)+")


def find_file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.exists()), None)


def find_imports(path: Path) -> Iterator[str]:
    """Yield each name that a module imports, which may be the name of a module or of something in it."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        # Modules that are loaded on first use are named by strings.
        elif isinstance(node, ast.Constant) and _MODULE_NAME.fullmatch(str(node.value)):
            yield str(node.value)
        # So are parts of features, by one name for all of them.
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_modules":
            yield from (f"dispatcher.features.{each}.{ast.literal_eval(node.args[0])}" for each in FEATURES)


def find_modules() -> dict[str, Path]:
    """Return the modules that the client needs, itself included, with their files."""
    modules: dict[str, Path] = {}
    names = [*START]
    while names:
        name = names.pop()
        path = find_file(name)
        if name in modules or path is None or not name.startswith("dispatcher"):
            continue
        modules[name] = path
        names += [name.rpartition(".")[0] or name, *find_imports(path)]
    return modules


class ClientModules(BuildHookInterface):  # type: ignore[type-arg]
    """Build hook of hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for path in (*find_modules().values(), *ROOT.glob("dispatcher/**/lua/*.lua")):
            build_data["force_include"][str(path)] = f"batch_dispatcher_client/{path.relative_to(ROOT)}"
