"""The page knows the reasons and the status that the program has; no browser is needed to see that."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from dispatcher.core.budget import Reason
from dispatcher.telemetry.status import Status

PAGE = Path(__file__).parents[2] / "dispatcher" / "admin" / "page"
SCRIPT = (PAGE / "page.js").read_text()


def test_each_reason_has_a_shape_that_there_is() -> None:
    table = SCRIPT.partition("const SHAPE_OF = {\n")[2].partition("};")[0]
    shapes = dict(re.findall(r'"([a-z-]+)": "([a-z]+)"', table))
    assert list(shapes) == [str(reason) for reason in Reason]
    drawn = set(re.findall(r"^  ([a-z]+): \"M", SCRIPT, re.MULTILINE))
    assert set(shapes.values()) <= drawn


def test_each_reason_has_a_colour_by_day_and_by_night() -> None:
    colours = re.findall(r"--r-([a-z-]+): #", (PAGE / "page.css").read_text())
    assert sorted(colours) == sorted(2 * [str(reason) for reason in Reason])


def test_the_page_reads_nothing_of_the_status_that_is_not_there() -> None:
    known = {each.name for part in get_type_hints(Status).values() for each in fields(part)}
    read = set(re.findall(r"\bstatus\.([a-z_0-9]+)\b", SCRIPT))
    assert len(read) > 30
    assert read - known == set()
