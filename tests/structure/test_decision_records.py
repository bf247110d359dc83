"""Records of decisions are numbered, have one format, and name their replacements on both sides."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.paths import DOCS, ROOT

RECORDS = sorted((DOCS / "contributing" / "decisions").glob("0*.md"))
ACCEPTED_RECORDS = RECORDS[1:]
SECTIONS = ["Context", "Decision", "Measured", "Consequences", "What would change it"]
REPLACES = re.compile(r"(replaces|replaced by) \[(\d+)\]\((\d{4})-[a-z0-9-]+\.md\)")
INVERSE_RELATION = {"replaces": "replaced by", "replaced by": "replaces"}


def number_of(record: Path) -> int:
    return int(record.name[:4])


def status_of(record: Path) -> str:
    """Return the text between the title and the first section as one line."""
    return " ".join(record.read_text().partition("\n## ")[0].split("\n")[1:]).strip()


def test_first_record_is_the_template_and_numbers_are_consecutive() -> None:
    assert RECORDS[0].name == "0000-template.md"
    assert [number_of(record) for record in RECORDS] == list(range(len(RECORDS)))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_record_has_a_title_and_all_sections_in_order(record: Path) -> None:
    text = record.read_text()
    assert re.match(rf"# {number_of(record)}\. \S[^\n]*[^.\n]\n\n", text)
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    assert parts[1::2] == SECTIONS
    assert [name for name, body in zip(SECTIONS, parts[2::2], strict=True) if len(body.split()) < 4] == []


@pytest.mark.parametrize("record", ACCEPTED_RECORDS, ids=lambda record: record.stem)
def test_record_has_a_date_and_status(record: Path) -> None:
    assert re.match(r"\d{4}-\d\d-\d\d, (proposed|accepted)[.;]", status_of(record))


def test_replacement_is_named_in_both_records() -> None:
    relations = set()
    for record in ACCEPTED_RECORDS:
        for relation, number_shown, target in REPLACES.findall(status_of(record)):
            assert int(number_shown) == int(target)
            relations.add((number_of(record), relation, int(target)))
    assert {
        (target, INVERSE_RELATION[relation], number) for number, relation, target in relations
    } == relations
    assert (12, "replaces", 2) in relations


def test_every_dependency_has_a_row_in_the_record_of_libraries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dependencies = [
        *project["dependencies"],
        *(each for name in extras if name != "dev" for each in extras[name]),
    ]
    names = {re.match(r"[\w-]+", each)[0] for each in dependencies}  # type: ignore[index]
    (record,) = [record for record in RECORDS if "libraries" in record.name]
    assert set(re.findall(r"^\| `([\w-]+)` \|", record.read_text(), re.MULTILINE)) == names


def test_index_lists_every_record() -> None:
    index = (DOCS / "contributing" / "decisions" / "README.md").read_text()
    assert [record.name for record in ACCEPTED_RECORDS if f"({record.name})" not in index] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_lines_are_wrapped(record: Path) -> None:
    lines = record.read_text().splitlines()
    assert [line for line in lines if len(line) > 130 and not line.startswith("|")] == []
