"""The page uses the reasons and status fields of the program. No browser is needed to check that."""

from __future__ import annotations

import re
from dataclasses import fields

from dispatcher.features import find_files, import_modules
from dispatcher.limit.budget import Reason
from dispatcher.limit.health import Health
from dispatcher.telemetry.status import Status
from tests.paths import ROOT

PAGE = ROOT / "dispatcher" / "service" / "admin" / "page"
SCRIPT = (PAGE / "page.js").read_text()
FEATURES = "".join(file.read_text() for file in find_files("page.js"))


def test_each_health_has_a_symbol_and_a_colour_of_its_own() -> None:
    table = SCRIPT.partition("const HEALTH = {\n")[2].partition("\n};")[0]
    found = re.findall(r'^  ([a-z]+): \["(--[a-z]+)", "(M[^"]+)"\],$', table, re.MULTILINE)
    assert [name for name, _, _ in found] == [str(health) for health in Health]
    assert len({shape for _, _, shape in found}) == len(Health), "a colour alone is not accessible"
    defined = set(re.findall(r"(--[a-z]+): #", (PAGE / "page.css").read_text()))
    assert {colour for _, colour, _ in found} <= defined


def test_each_reason_has_a_colour_in_the_light_and_the_dark_theme() -> None:
    colours = re.findall(r"--r-([a-z-]+): #", (PAGE / "page.css").read_text())
    assert sorted(colours) == sorted(2 * [str(reason) for reason in Reason])


def test_page_reads_only_existing_fields_of_the_status() -> None:
    sections = [type(getattr(Status(), each.name)) for each in fields(Status) if each.name != "features"]
    sections += [module.SECTION for module in import_modules("status").values()]
    known = {each.name for part in sections for each in fields(part)}
    read = set(re.findall(r"\bstatus\.([a-z_0-9]+)\b", SCRIPT + FEATURES))
    assert len(read) > 30
    assert read - known == set()
