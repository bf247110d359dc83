"""Settings of the token budget."""

from __future__ import annotations

import pytest

from dispatcher.features.tokens.check import CHECK
from dispatcher.features.tokens.options import TokenOptions, build_options
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings


def parse(text: str) -> Settings:
    settings = parse_settings(f"gateway: {{url: 'http://g'}}\npool: {{name: p}}\n{text}", {})
    assert isinstance(settings, Settings), settings
    return settings


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", TokenOptions(is_on=True)),
        ("tokens: {mode: off}", TokenOptions(is_on=False)),
        ("tokens: {per_endpoint: 96000}\nbudget: {reserve: 0.2}", TokenOptions(True, 96_000, 0.2)),
    ],
)
def test_options_follow_from_the_settings(text: str, options: TokenOptions) -> None:
    assert build_options(parse(text)) == (options,)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "2000000000"])
def test_invalid_size_of_the_memory_is_rejected(value: str) -> None:
    assert not isinstance(
        parse_settings(f"gateway: {{url: 'http://g'}}\ntokens: {{per_endpoint: {value}}}", {}), Settings
    )


def test_check_reports_a_size_that_is_not_used() -> None:
    assert [*CHECK.check_settings(parse("tokens: {per_endpoint: 9}"))] == []
    (finding,) = CHECK.check_settings(parse("tokens: {mode: off, per_endpoint: 9}"))
    assert (finding.level, finding.what) == (
        "warning",
        "per_endpoint has no effect while tokens.mode is off",
    )
