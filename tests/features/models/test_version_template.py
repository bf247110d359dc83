"""Templates for the names of versions: which texts are templates, and which version a name contains."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher.features.models.version_template import PLACEHOLDER, VersionTemplate

LITERALS = st.text(st.characters(exclude_characters="{}"), max_size=10)
VERSIONS = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("qwen-v{version}", "qwen-v3", "3"),
        ("qwen-v{version}", "qwen-v2.1_rc-1", "2.1_rc-1"),
        ("org/qwen:{version}-chat", "org/qwen:7b-chat", "7b"),
        ("{version}", "qwen", "qwen"),
        ("qwen-v{version}", "qwen-v", None),
        ("qwen-v{version}", "QWEN-v3", None),
        ("qwen-v{version}", "a-qwen-v3", None),
        ("qwen-v{version}", "qwen-v3/lora", None),
        ("qwen-v{version}", "qwen-v3\n", None),
        ("qwen.v{version}", "qwen-v3", None),
        ("ab{version}ba", "aba", None),
        ("ab{version}ba", "abba", None),
    ],
)
def test_version_is_what_stands_in_place_of_the_placeholder(
    text: str, name: str, version: str | None
) -> None:
    assert VersionTemplate.parse(text).extract_version(name) == version


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must contain {version} exactly once, as in qwen-v{version}; all other text is literal"),
        ("qwen-v(?P<version>[0-9]+)", "must contain {version} exactly once"),
        ("qwen-v{Version}", "must contain {version} exactly once"),
        ("qwen-v{version}-{version}", "must contain {version} exactly once"),
        ("qwen{size}-v{version}", "must not contain { or } outside of {version}"),
        ("qwen-v{{version}}", "must not contain { or } outside of {version}"),
        ("qwen-v{version}}", "must not contain { or } outside of {version}"),
    ],
)
def test_text_without_exactly_one_placeholder_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="must") as raised:
        VersionTemplate.parse(text)
    assert str(raised.value).startswith(message)


@given(LITERALS, VERSIONS, LITERALS)
@example("q", "3", "3")
def test_each_version_is_found_again_in_the_name_made_of_it(prefix: str, version: str, suffix: str) -> None:
    template = VersionTemplate.parse(prefix + PLACEHOLDER + suffix)
    assert template.extract_version(prefix + version + suffix) == version


@given(LITERALS, st.text(max_size=10), LITERALS)
def test_name_with_other_characters_in_its_version_does_not_match(
    prefix: str, version: str, suffix: str
) -> None:
    allowed = bool(version) and set(version) <= set(string.ascii_letters + string.digits + "._-")
    found = VersionTemplate(prefix, suffix).extract_version(prefix + version + suffix)
    assert found == (version if allowed else None)
