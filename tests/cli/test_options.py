"""Options that are one parameter of a verb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from dispatcher.cli.options import unfold_options


@dataclass(frozen=True, slots=True)
class Place:
    city: Annotated[str, typer.Option("--city", "-c")] = ""
    floor: Annotated[int, typer.Option("--floor")] = 0


@dataclass(frozen=True, slots=True)
class Door(Place):
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


def test_a_verb_gets_them_as_one_value() -> None:
    given: list[object] = []
    arguments = ["ann", "-c", "Ulm", "--locked", "--last", "z"]
    told = CliRunner().invoke(program(given), arguments)
    assert told.exit_code == 0, told.output
    assert given == ["ann", "", Door("Ulm", 0, locked=True), "z"]


def test_what_is_not_given_is_the_default_of_its_field() -> None:
    given: list[object] = []
    assert CliRunner().invoke(program(given), ["ann"]).exit_code == 0
    assert given == ["ann", "", Door(), ""]


def test_they_stand_where_the_parameter_does() -> None:
    shown = CliRunner().invoke(program([]), ["--help"]).output
    assert "Go in." in shown
    places = [shown.index(f"--{each}") for each in ("first", "city", "floor", "locked", "last")]
    assert places == sorted(places)


def test_a_verb_without_any_stays_what_it_is() -> None:
    def plain(name: str) -> None: ...

    assert unfold_options(plain) is plain


def test_a_field_is_read_as_its_type() -> None:
    told = CliRunner().invoke(program([]), ["ann", "--floor", "x"])
    assert told.exit_code == 2
    assert "--floor" in told.output
