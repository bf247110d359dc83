"""The pages on slices name each reason, setting and time as the program has them."""

from __future__ import annotations

import re

import msgspec
import pytest

from dispatcher.features.slices.eligibility import Generation, SliceTerms, WholeReason, check_generation
from dispatcher.features.slices.equality import CASES, WHOLE_TOKENS
from dispatcher.features.slices.settings import SlicingSettings
from dispatcher.features.slices.size import MEASURE_EVERY, MEASURE_TOKENS, SIZES
from dispatcher.features.slices.support import (
    DOUBT_S,
    EQUAL_S,
    INTERRUPTED_S,
    KEPT_S,
    MAX_MODELS,
    MAX_TEMPLATE_OPTIONS,
    UNDECIDED_S,
    UNEQUAL_S,
)
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from tests.features.slices.slice_scene import CHECK_CALLS, CHECK_TOKENS
from tests.paths import DOCS

PAGE = (DOCS / "how-to" / "slices.md").read_text()
RULES = (DOCS / "contributing" / "features.md").read_text()
PATH = "/v1/completions"


def read_table(header: str) -> list[list[str]]:
    """Return the cells of each row of the table with this first line."""
    rows = PAGE.partition(f"\n{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert rows, header
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_reason_is_explained_in_the_order_of_the_program() -> None:
    assert [reason for reason, _ in read_table("| reason | the request |")] == [
        f"`{reason}`" for reason in WholeReason
    ]


def test_times_until_a_model_is_checked_again_are_those_of_the_program() -> None:
    rows = read_table("| The check finds | Requests for the model | It is checked again |")
    shown = [row[2].partition(",")[0].removeprefix("after ") for row in rows]
    units = {"hours": 3600, "hour": 3600, "seconds": 1, "second": 1}
    seconds = [int(number) * units[unit] for number, unit in (each.split() for each in shown)]
    assert seconds == [EQUAL_S, UNEQUAL_S, UNDECIDED_S, INTERRUPTED_S]


def test_yaml_examples_are_valid_and_one_shows_every_setting() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    shown = []
    for example in examples:
        settings = parse_settings(f"gateway: {{url: http://gw}}\n{example}", {})
        assert isinstance(settings, Settings), settings
        assert settings.get_section(SlicingSettings).mode == "auto"
        shown.append(set(re.findall(r"^  (\w+):", example, re.MULTILINE)))
    assert set(SlicingSettings.model_fields) in shown


def test_numbers_of_the_pages_are_those_of_the_program() -> None:
    *sizes, last_size = (f"{size:,}" for size in SIZES)
    for expected in (
        f"{', '.join(sizes)} and {last_size}",
        f"slice of {MEASURE_TOKENS} tokens in {MEASURE_EVERY}",
        f"{MAX_MODELS} results, among them {MAX_TEMPLATE_OPTIONS} values",
        f"stays for at least {KEPT_S:.0f} seconds",
        f"at the earliest {DOUBT_S / 60:.0f} minutes after the last check",
        f"three short greedy generations of {WHOLE_TOKENS} tokens each, whole and then in four slices",
        f"These are {CHECK_CALLS} calls and {CHECK_TOKENS} tokens",
        f"{CHECK_CALLS} calls with {CHECK_TOKENS} tokens for each model",
    ):
        assert expected in PAGE + RULES
    assert len(CASES) == 3
    assert {len(case.slice_tokens) + 1 for case in CASES} == {4}


@pytest.mark.parametrize("field", ["suffix", "bad_words"])
def test_named_fields_prevent_slices(field: str) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 1000}
    terms = SliceTerms(paths=(PATH,))
    assert isinstance(check_generation(PATH, msgspec.json.encode(body), terms), Generation)
    with_field = msgspec.json.encode({**body, field: ["x"]})
    assert check_generation(PATH, with_field, terms) is WholeReason.FIELD
