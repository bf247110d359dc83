"""Each world of docs/explanation/worlds.md is one command, and its figures are those of the page."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from typer.main import get_command

from dispatcher.cli.simulate import simulate
from tests.lab.simulation.worlds import COLUMNS, DOCUMENT, SEEDS, WORLDS, Figures, World, mean, page, play

VERB = typer.Typer()
VERB.command()(simulate)
SIMULATE = get_command(VERB)
ROUGHLY = {"utilization": 0.02, "closed": 15.0, "refused_per_1000": 5.0}
"""A mathematics library that rounds otherwise moves single requests, and what follows from them."""


def ids(world: World) -> str:
    return world.name


def shown() -> dict[str, list[float]]:
    """Each world's figures as the page has them."""
    rows = re.findall(r"^\| ([^|]+) \| ([0-9].*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: [float(cell.replace(",", "")) for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.parametrize("world", WORLDS, ids=ids)
def test_each_world_is_one_command_that_the_page_names(world: World) -> None:
    verb, *options = shlex.split(world.command)[1:]
    assert verb == "simulate"
    SIMULATE.make_context(verb, options)
    assert f"{world.command}  # {world.name}" in DOCUMENT.read_text()
    assert len(shown()[world.name]) == len(COLUMNS)


def test_names_are_of_one_world_each() -> None:
    assert len({world.name for world in WORLDS}) == len(WORLDS)


def test_table_shows_what_was_beside_what_is() -> None:
    now: dict[str, Figures] = {WORLDS[0].name: dict.fromkeys((field for field, _ in COLUMNS.values()), 1.0)}
    then = {WORLDS[0].name: {**now[WORLDS[0].name], "utilization": 0.5}}
    assert "| 0.500 → 1.000 |" in page(now, SEEDS, then)
    assert "→" not in page(now, SEEDS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS, ids=ids)
def test_figures_are_those_of_the_page(world: World) -> None:
    found = mean([play(world, seed) for seed in SEEDS])
    for (field, _), stands in zip(COLUMNS.values(), shown()[world.name], strict=True):
        limit = pytest.approx(stands, rel=0.2, abs=ROUGHLY.get(field, 0.1))
        assert found[field] == limit, f"{field}: run python -m tests.lab.simulation.worlds"
