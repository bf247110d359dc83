"""docs/explanation/architecture.md: it names every module and no other, imports as they are, functions that are there."""

from __future__ import annotations

import re
import tomllib

import pytest

from dispatcher.queue.keys import (
    MODEL_REGISTRY_KEYS,
    POOL_KEYS,
    QUEUE_KEYS,
    SEQUENCE_KEYS,
    WAITING_FOR_MODEL_KEYS,
)
from tests.paths import DOCS, PACKAGE, ROOT
from tests.structure.symbols import exists, symbols

PAGE = (DOCS / "explanation" / "architecture.md").read_text()
WAYS = ["The way of a request", "The way of a reading"]


def section(title: str) -> str:
    found = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def mapped() -> list[tuple[str, str]]:
    """(room, module) as the page has them."""
    return [
        (room.strip("`"), module)
        for room, modules, _ in rows("Rooms")
        for module in re.findall(r"`(\w+)`", modules)
    ]


def built() -> list[tuple[str, str]]:
    return [
        (str(path.parent.relative_to(ROOT)), path.stem)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    ]


def test_the_map_names_every_module_and_no_other() -> None:
    assert sorted(mapped()) == sorted(built())


def test_every_room_says_what_it_knows() -> None:
    assert [row[0] for row in rows("Rooms") if len(row) != 3 or not row[2]] == []


def test_folders_of_other_files_are_there() -> None:
    assert all((PACKAGE / folder).is_dir() for folder in ("queue/lua", "admin/page"))


@pytest.mark.parametrize("page", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_the_arrows_are_those_that_the_linter_checks(page: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    checked = [re.findall(r"dispatcher\.(\w+)", layer) for layer in layers]
    (line,) = re.findall(r"^ {4}(cli → .*)$", (ROOT / page).read_text(), re.MULTILINE)
    drawn = [layer.split(", ") for layer in line.split(" → ")]
    assert [sorted(layer) for layer in drawn] == [sorted(layer) for layer in checked]


@pytest.mark.parametrize("way", WAYS)
def test_a_way_has_ten_steps_and_each_names_what_is_there(way: str) -> None:
    steps = re.findall(r"^(\d+)\. (.+)$", section(way), re.MULTILINE)
    assert [number for number, _ in steps] == [str(number) for number in range(1, 11)]
    assert [text for _, text in steps if not symbols(text)] == []
    assert [name for name in symbols(section(way)) if not exists(name)] == []


def test_every_lasting_key_has_its_place() -> None:
    """Those of the pool and those of the line, each among its own."""
    owner, found = "", {"the pool": set[str](), "the line": set[str]()}
    for belongs, keys, _ in rows("What is where in Redis"):
        owner = belongs.partition(",")[0] or owner
        if owner in found:
            found[owner] |= set(re.findall(r"`([\w:]+)`", keys))
    assert found["the pool"] == {suffix for suffix, _ in (*POOL_KEYS.values(), *MODEL_REGISTRY_KEYS.values())}
    assert found["the line"] == {
        suffix
        for suffix, _ in (*QUEUE_KEYS.values(), *SEQUENCE_KEYS.values(), *WAITING_FOR_MODEL_KEYS.values())
        if suffix
    }


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    named = symbols(
        "`core.limit.limiter.Limiter.pole`, `core.limits`, `claim.lua`, `core.limit.limiter.Limiter.poll`"
    )
    assert [exists(name) for name in named] == [False, False, True]
    assert exists("core.limit.budget.Policy.reserve")
    assert exists("ports.Lease.units")
