"""Settings of sequences: their values, and what is rejected."""

from __future__ import annotations

import pytest

from dispatcher.features.sequences.decisions import SequenceOverride, SequenceTerms
from dispatcher.features.sequences.settings import SequenceSettings
from dispatcher.features.sequences.turns import CarryMode, OnError
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings

MINIMAL = "gateway: {url: http://gw}\n"


def test_defaults_equal_those_of_the_core() -> None:
    found = parse_settings(MINIMAL, {})
    assert isinstance(found, Settings)
    assert found.get_section(SequenceSettings).build_terms() == SequenceTerms()
    assert CarryMode(found.get_section(SequenceSettings).carry) is CarryMode.OFF
    assert (
        found.get_section(SequenceSettings).header,
        found.get_section(SequenceSettings).session_id_header,
    ) == ("x-session-token", "x-session-id")


def test_all_keys_are_applied() -> None:
    text = (
        "sequences: {max_idle_s: 5, max_age_s: 50, max_active: 7, max_waiting: 3, on_error: hold, "
        "after_end: refuse, carry: messages}"
    )
    found = parse_settings(MINIMAL + text, {})
    assert isinstance(found, Settings)
    assert found.get_section(SequenceSettings).build_terms() == SequenceTerms(
        5, 50, 7, 3, OnError.HOLD, refuse_after_end=True
    )
    assert CarryMode(found.get_section(SequenceSettings).carry) is CarryMode.MESSAGES


def test_overrides_for_models_keep_their_order() -> None:
    text = "sequences: {models: [{match: big-*, max_active: 2}, {match: '*', max_idle_s: 30}]}"
    found = parse_settings(MINIMAL + text, {})
    assert isinstance(found, Settings)
    assert found.get_section(SequenceSettings).build_terms().overrides == (
        SequenceOverride("big-*", None, 2),
        SequenceOverride("*", 30, None),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{header: authorization}", "has a meaning of its own"),
        ("{header: X-Request-Id}", "has a meaning of its own"),
        ("{session_id_header: content_type}", "has a meaning of its own"),
        ("{session_id_header: 'a b'}", "not a header name"),
        ("{header: x-a, session_id_header: X_A}", "must not be sequences.header"),
        ("{max_active: 0}", "max_active"),
        ("{on_error: stop}", "on_error"),
        ("{models: [{match: ''}]}", "must not be empty"),
        ('{models: [{match: "a\\x00b"}]}', "control characters"),
        ("{models: [{max_active: 2}]}", "match"),
        ("{models: [{match: a, max_active: 0}]}", "max_active"),
        ("{models: [{match: a}, {match: b}, {match: a}]}", "a is there twice"),
        (f"{{models: [{', '.join(f'{{match: m{n}}}' for n in range(21))}]}}", "at most 20"),
    ],
)
def test_invalid_setting_is_rejected(text: str, message: str) -> None:
    found = parse_settings(f"{MINIMAL}sequences: {text}", {})
    assert isinstance(found, list)
    assert message in str(found[0])
