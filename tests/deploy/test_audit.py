"""`make audit`: what nobody looked up is never called good."""

from __future__ import annotations

import json
from typing import Any

import pytest
from audit import judged, licensed

GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD: dict[str, Any] = {**GOOD, "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
UNKNOWN: dict[str, Any] = {"name": "b", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("report", "code", "says"),
    [
        (json.dumps({"dependencies": [GOOD, GOOD]}), 0, "2 pins looked up"),
        (json.dumps({"dependencies": [GOOD, BAD, UNKNOWN]}), 1, "a 1: PYSEC-1, mended in 2"),
        (json.dumps({"dependencies": [GOOD, UNKNOWN]}), 2, "not known: 1 of 2 pins: Dependency not found"),
        (json.dumps({"dependencies": []}), 2, "0 pins looked up"),
        ("", 2, "not known: no advisory source was reached: it is away"),
        ("[]", 2, "not known: no advisory source was reached: it is away"),
    ],
)
def test_only_what_was_looked_up_is_called_good(report: str, code: int, says: str) -> None:
    found, lines = judged(report, "Traceback\nit is away\n")
    assert found == code
    assert says in "\n".join(lines)


def test_nothing_that_is_installed_asks_for_more_than_a_notice() -> None:
    told = list(licensed())
    assert [line for line in told if line.startswith("LOOK AT")] == []
    assert [line for line in told if "aiohttp" in line]
