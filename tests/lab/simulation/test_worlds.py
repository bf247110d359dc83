"""Each world of docs/contributing/worlds.md is one command, and the page shows its figures."""

from __future__ import annotations

import re
import shlex
from typing import cast

import pytest
import typer
from typer.main import get_command

from dispatcher.cli.simulate import simulate
from dispatcher.lab.simulation.scenario_file import Override, ScenarioFile, load_scenario, parse_set
from dispatcher.settings.yaml_source import Problem
from tests.lab.simulation.worlds import (
    COLUMNS,
    DOCUMENT,
    SEEDS,
    WORLDS,
    Figures,
    World,
    average_runs,
    render_page,
    run_world,
)

CLI = typer.Typer()
CLI.command()(simulate)
SIMULATE_COMMAND = get_command(CLI)
TOLERANCES = {
    "utilization": 0.02,
    "closed": 15.0,
    "refused_per_1000": 5.0,
    "realtime_refused_less_none": 1.0,
}
"""Absolute tolerances: a mathematics library that rounds differently moves single requests, and the page
shows whole numbers of refused ones."""


def name_world(world: World) -> str:
    return world.name


def read_page() -> dict[str, list[float]]:
    """Return the figures of each world on the page."""
    rows = re.findall(r"^\| ([^|]+) \| ([0-9].*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: [float(cell.replace(",", "")) for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.parametrize("world", WORLDS, ids=name_world)
def test_each_world_is_one_command_on_the_page(world: World) -> None:
    verb, *options = shlex.split(world.command)[1:]
    assert verb == "simulate"
    overrides = [parse_set(text) for text in SIMULATE_COMMAND.make_context(verb, options).params["settings"]]
    assert not [each for each in overrides if isinstance(each, Problem)]
    assert isinstance(load_scenario(None, cast("list[Override]", overrides)), ScenarioFile)
    assert f"{world.command}  # {world.name}" in DOCUMENT.read_text()
    assert len(read_page()[world.name]) == len(COLUMNS)


def test_world_names_are_unique() -> None:
    assert len({world.name for world in WORLDS}) == len(WORLDS)


def test_table_shows_earlier_figures_next_to_new_ones() -> None:
    now: dict[str, Figures] = {WORLDS[0].name: dict.fromkeys((field for field, _ in COLUMNS.values()), 1.0)}
    then = {WORLDS[0].name: {**now[WORLDS[0].name], "utilization": 0.5}}
    assert "| 0.500 → 1.000 |" in render_page(now, SEEDS, then)
    assert "→" not in render_page(now, SEEDS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS, ids=name_world)
def test_page_shows_the_figures_of_a_run(world: World) -> None:
    averages = average_runs([run_world(world, seed) for seed in SEEDS])
    for (field, _), shown in zip(COLUMNS.values(), read_page()[world.name], strict=True):
        limit = pytest.approx(shown, rel=0.2, abs=TOLERANCES.get(field, 0.1))
        assert averages[field] == limit, f"{field}: run python -m tests.lab.simulation.worlds"
