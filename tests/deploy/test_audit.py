"""`make audit` never reports a pin as good that was not looked up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from audit import evaluate_report, list_licences

GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD: dict[str, Any] = {**GOOD, "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
UNKNOWN: dict[str, Any] = {"name": "b", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("report", "code", "expected_text"),
    [
        (json.dumps({"dependencies": [GOOD, GOOD]}), 0, "2 pins looked up"),
        (json.dumps({"dependencies": [GOOD, BAD, UNKNOWN]}), 1, "a 1: PYSEC-1, fixed in 2"),
        (json.dumps({"dependencies": [GOOD, UNKNOWN]}), 2, "not known: 1 of 2 pins: Dependency not found"),
        (json.dumps({"dependencies": []}), 2, "0 pins looked up"),
        ("", 2, "not known: no advisory source was reached: it is away"),
        ("[]", 2, "not known: no advisory source was reached: it is away"),
    ],
)
def test_only_pins_that_were_looked_up_are_reported_as_good(
    report: str, code: int, expected_text: str
) -> None:
    exit_code, lines = evaluate_report(report, "Traceback\nit is away\n")
    assert exit_code == code
    assert expected_text in "\n".join(lines)


def test_no_installed_package_has_a_copyleft_licence() -> None:
    lines = list(list_licences())
    assert [line for line in lines if line.startswith("CHECK")] == []
    assert [line for line in lines if "aiohttp" in line]
