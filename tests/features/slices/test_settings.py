"""Settings of slices, and the options that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.features.slices.options import SliceOptions, build_options
from dispatcher.features.slices.settings import SlicingSettings
from dispatcher.settings.model import Settings


def parse_slicing(**slicing: Any) -> Settings:
    return Settings.model_validate({"gateway": {"url": "http://gw"}, "slicing": slicing})


def test_section_is_found_by_its_class() -> None:
    assert parse_slicing(tokens=100).get_section(SlicingSettings).tokens == 100


@pytest.mark.parametrize(
    ("mode", "is_on", "judges_cost"), [("off", False, False), ("auto", True, True), ("on", True, False)]
)
def test_mode_decides_whether_slices_are_sent_and_their_cost_is_judged(
    mode: str, is_on: bool, judges_cost: bool
) -> None:
    (options,) = build_options(parse_slicing(mode=mode))
    assert (options.is_on, options.judges_cost) == (is_on, judges_cost)


@pytest.mark.parametrize(
    ("revoke", "stream", "revokes"),
    [("auto", False, False), ("auto", True, True), ("on", False, True), ("off", True, False)],
)
def test_slices_are_revoked_by_default_if_they_keep_what_they_have(
    revoke: str, stream: bool, revokes: bool
) -> None:
    (options,) = build_options(parse_slicing(revoke=revoke, stream=stream))
    assert (options.revokes, options.is_streamed) == (revokes, stream)


def test_shortest_sliced_request_has_the_tokens_of_two_slices() -> None:
    (options,) = build_options(parse_slicing(tokens=100))
    assert (options.terms.slice_tokens, options.terms.min_tokens) == (100, 200)
    assert build_options(parse_slicing(tokens=100, min_tokens=150))[0].terms.min_tokens == 150
    assert not options.measures_size
    assert build_options(parse_slicing())[0].measures_size


def test_options_without_settings_are_off() -> None:
    assert not SliceOptions().is_on
