"""The page knows the reasons and the status that the program has; no browser is needed to see that."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_type_hints

from dispatcher.core.health import Health
from dispatcher.core.limit.budget import Reason
from dispatcher.telemetry.status import Status
from tests.paths import ROOT

PAGE = ROOT / "dispatcher" / "admin" / "page"
SCRIPT = (PAGE / "page.js").read_text()


def test_each_health_has_a_symbol_and_a_colour_of_its_own() -> None:
    table = SCRIPT.partition("const HEALTH = {\n")[2].partition("\n};")[0]
    found = re.findall(r'^  ([a-z]+): \["(--[a-z]+)", "(M[^"]+)"\],$', table, re.MULTILINE)
    assert [name for name, _, _ in found] == [str(health) for health in Health]
    assert len({shape for _, _, shape in found}) == len(Health), "the colour alone says nothing"
    defined = set(re.findall(r"(--[a-z]+): #", (PAGE / "page.css").read_text()))
    assert {colour for _, colour, _ in found} <= defined


def test_each_reason_has_a_colour_by_day_and_by_night() -> None:
    colours = re.findall(r"--r-([a-z-]+): #", (PAGE / "page.css").read_text())
    assert sorted(colours) == sorted(2 * [str(reason) for reason in Reason])


def test_the_page_reads_nothing_of_the_status_that_is_not_there() -> None:
    known = {each.name for part in get_type_hints(Status).values() for each in fields(part)}
    read = set(re.findall(r"\bstatus\.([a-z_0-9]+)\b", SCRIPT))
    assert len(read) > 30
    assert read - known == set()
