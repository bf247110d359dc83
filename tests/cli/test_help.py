"""The help of each verb on a terminal of 80 columns."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dispatcher.cli import VERBS, app

INNER = [["dead", "requeue"], ["dead", "purge"], ["queue", "copy"]]


@pytest.mark.parametrize("verb", [[], *([each] for each in VERBS), *INNER], ids=" ".join)
def test_help_is_not_truncated_in_80_columns(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated names, such as variables and paths, could not be typed."""
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, [*verb, "--help"])
    assert output.exit_code == 0
    assert not [line for line in output.stdout.splitlines() if line.rstrip(" │").endswith("…")]
    assert max(map(len, output.stdout.splitlines())) <= 80
    assert not verb or "<bool>" not in output.stdout
