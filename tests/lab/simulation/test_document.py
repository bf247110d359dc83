"""docs/how-to/simulator.md shows what the commands print."""

from __future__ import annotations

import re

import pytest

from tests.lab.simulation.document import DOCUMENT, blocks, rerun

NUMBER = re.compile(r"[+-]?\d[\d,]*\.?\d*")


def each_shown() -> list[str]:
    """Each command of the document with what stands below it."""
    return [
        one
        for block in blocks(DOCUMENT.read_text())
        for one in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
        if one
    ]


@pytest.mark.parametrize(
    "i", [pytest.param(i, marks=() if i in (0, 2, 3) else pytest.mark.long) for i in range(14)]
)
def test_figures_in_the_document_are_those_of_a_run(i: int) -> None:
    """To a tenth: a mathematics library that rounds otherwise moves single requests."""
    found = each_shown()
    assert len(found) == 14
    stands, should = found[i], rerun(found[i])
    assert NUMBER.sub("#", stands).split() == NUMBER.sub("#", should).split()
    shown, printed = ([float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (stands, should))
    assert shown == pytest.approx(printed, rel=0.1, abs=0.15), "run python -m tests.lab.simulation.document"
