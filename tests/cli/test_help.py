"""The help of each verb, on a terminal of 80 columns."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dispatcher.cli import VERBS, app

INNER = [["dead", "list"], ["dead", "requeue"], ["dead", "purge"], ["queue", "copy"]]


@pytest.mark.parametrize("verb", [[], *([each] for each in VERBS), *INNER], ids=" ".join)
def test_nothing_of_a_help_is_cut_off_in_80_columns(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut are names to be typed: variables of the environment, and paths."""
    monkeypatch.setenv("COLUMNS", "80")
    told = CliRunner().invoke(app, [*verb, "--help"])
    assert told.exit_code == 0
    assert not [line for line in told.stdout.splitlines() if line.rstrip(" │").endswith("…")]
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert not verb or "<bool>" not in told.stdout
