"""The pages on the simulator show the current output of their commands."""

from __future__ import annotations

import re

import pytest

from tests.lab.simulation.simulator_page import PAGES, find_blocks, rerun_block

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"[+-]?\d[\d,]*\.?\d*")


def read_commands() -> list[str]:
    """Return each command of the pages with the output below it."""
    return [
        command
        for page in PAGES
        for block in find_blocks(page.read_text())
        for command in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
        if command
    ]


@pytest.mark.parametrize(
    "i", [pytest.param(i, marks=() if i in (0, 2, 3) else pytest.mark.long) for i in range(12)]
)
def test_page_shows_the_figures_of_a_run(i: int) -> None:
    """Compare with a tolerance of 10 %: a math library that rounds differently moves single requests."""
    commands = read_commands()
    assert len(commands) == 12
    on_page, rerun = commands[i], rerun_block(commands[i])
    assert NUMBER.sub("#", on_page).split() == NUMBER.sub("#", rerun).split()
    page_numbers, rerun_numbers = (
        [float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (on_page, rerun)
    )
    assert page_numbers == pytest.approx(rerun_numbers, rel=0.1, abs=0.15), (
        "run python -m tests.lab.simulation.simulator_page"
    )
