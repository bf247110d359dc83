"""Options that are grouped into one parameter of a verb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from dispatcher.cli.options import unfold_options


@dataclass(frozen=True, slots=True)
class Location:
    city: Annotated[str, typer.Option("--city", "-c")] = ""
    floor: Annotated[int, typer.Option("--floor")] = 0


@dataclass(frozen=True, slots=True)
class Door(Location):
    locked: Annotated[bool, typer.Option("--locked")] = False


def program(given: list[object]) -> typer.Typer:
    def enter(
        name: str,
        first: Annotated[str, typer.Option("--first")] = "",
        *,
        where: Door,
        last: Annotated[str, typer.Option("--last")] = "",
    ) -> None:
        """Go in."""
        given.extend([name, first, where, last])

    app = typer.Typer(add_completion=False)
    app.command()(unfold_options(enter))
    return app


def test_verb_gets_grouped_options_as_one_value() -> None:
    given: list[object] = []
    arguments = ["ann", "-c", "Ulm", "--locked", "--last", "z"]
    output = CliRunner().invoke(program(given), arguments)
    assert output.exit_code == 0, output.output
    assert given == ["ann", "", Door("Ulm", 0, locked=True), "z"]


def test_omitted_option_has_the_default_of_its_field() -> None:
    given: list[object] = []
    assert CliRunner().invoke(program(given), ["ann"]).exit_code == 0
    assert given == ["ann", "", Door(), ""]


def test_grouped_options_have_the_position_of_their_parameter() -> None:
    shown = CliRunner().invoke(program([]), ["--help"]).output
    assert "Go in." in shown
    places = [shown.index(f"--{each}") for each in ("first", "city", "floor", "locked", "last")]
    assert places == sorted(places)


def test_verb_without_grouped_options_is_unchanged() -> None:
    def plain(name: str) -> None: ...

    assert unfold_options(plain) is plain


def test_option_is_parsed_as_the_type_of_its_field() -> None:
    output = CliRunner().invoke(program([]), ["ann", "--floor", "x"])
    assert output.exit_code == 2
    assert "--floor" in output.output
