"""Requests from lines of plain text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.batch_files.template import Template, TemplateError

CHAT = (
    b'{"model": "m", "messages": [{"role": "system", "content": "@@0@@"}, {"role": "user", "content": "x"}]}'
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_text_replaces_the_field(text: str) -> None:
    body = json.loads(Template(CHAT, "messages.1.content").fill_body(text))
    assert body["messages"] == [{"role": "system", "content": "@@0@@"}, {"role": "user", "content": text}]
    assert json.loads(Template(b'{"model": "m"}', "prompt").fill_body(text)) == {"model": "m", "prompt": text}


@given(TEXTS, TEXTS, TEXTS)
def test_text_replaces_the_placeholder_in_the_field(before: str, text: str, after: str) -> None:
    template = Template(json.dumps({"input": f"{before.replace('{}', '')}{{}}{after}"}).encode(), "input")
    assert json.loads(template.fill_body(text)) == {"input": before.replace("{}", "") + text + after}


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        (b"{", "prompt", "no JSON"),
        (b"\xff", "prompt", "no JSON"),
        (b"[]", "prompt", "no JSON object"),
        (CHAT, "", "has no "),
        (CHAT, "messages.2.content", "has no messages.2: the list has 2 elements, counted from 0"),
        (CHAT, "messages.-1.content", "has no messages.-1"),
        (CHAT, "model.name", "has no model.name"),
        (CHAT, "nothing.there", "has no nothing"),
    ],
)
def test_missing_field_is_named(body: bytes, field: str, expected: str) -> None:
    with pytest.raises(TemplateError, match=expected):
        Template(body, field)
