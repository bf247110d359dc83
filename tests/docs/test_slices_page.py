"""docs/how-to/slices.md names each reason, setting and time as the program has them."""

from __future__ import annotations

import re

import msgspec
import pytest

from dispatcher.core.slices.eligibility import Generation, SliceTerms, WholeReason, check_generation
from dispatcher.core.slices.equality import EqualityCheck
from dispatcher.core.slices.size import MEASURE_EVERY, MEASURE_TOKENS, SIZES
from dispatcher.core.slices.support import (
    EQUAL_S,
    INTERRUPTED_S,
    MAX_MODELS,
    MAX_TEMPLATE_OPTIONS,
    UNDECIDED_S,
    UNEQUAL_S,
)
from dispatcher.settings import Settings, parse_settings
from dispatcher.settings.slicing import SlicingSettings
from tests.paths import DOCS

PAGE = (DOCS / "how-to" / "slices.md").read_text()
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
        assert settings.slicing.mode == "auto"
        shown.append(set(re.findall(r"^  (\w+):", example, re.MULTILINE)))
    assert set(SlicingSettings.model_fields) in shown


def test_numbers_of_the_page_are_those_of_the_program() -> None:
    *sizes, last_size = (f"{size:,}" for size in SIZES)
    for expected in (
        f"{', '.join(sizes)} and {last_size}",
        f"slice of {MEASURE_TOKENS} tokens in {MEASURE_EVERY}",
        f"(up to {MAX_TEMPLATE_OPTIONS} for each model, and\n{MAX_MODELS} in all)",
    ):
        assert expected in PAGE
    check = EqualityCheck(PATH, "m")
    assert check.next_body is not None
    max_tokens = msgspec.json.decode(check.next_body)["max_tokens"]
    assert f"short greedy generation of {max_tokens} tokens whole, and then in three slices" in PAGE


@pytest.mark.parametrize("field", ["suffix", "bad_words"])
def test_named_fields_prevent_slices(field: str) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 1000}
    terms = SliceTerms(paths=(PATH,))
    assert isinstance(check_generation(PATH, msgspec.json.encode(body), terms), Generation)
    with_field = msgspec.json.encode({**body, field: ["x"]})
    assert check_generation(PATH, with_field, terms) is WholeReason.FIELD
