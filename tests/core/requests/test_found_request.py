"""Spellings under which a text may be stored in the JSON of a request."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.found_request import encode_spellings


@given(st.text(max_size=20))
def test_each_spelling_is_the_text_inside_a_json_string(text: str) -> None:
    spellings = encode_spellings(text)
    assert json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="surrogatepass") in spellings
    for spelling in spellings:
        assert json.loads(b'"' + spelling + b'"') == text


def test_escaped_slashes_and_angle_brackets_are_among_the_spellings() -> None:
    spellings = encode_spellings("a/b<c>")
    assert b"a\\/b<c>" in spellings
    assert any(b"\\u003c" in spelling for spelling in spellings)
