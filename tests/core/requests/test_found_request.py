"""Requests that were found: the name by which a copy knows them, and the spellings of what is sought."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.found_request import encode_spellings


@given(st.text(max_size=20))
def test_each_spelling_is_the_text_inside_a_json_string(text: str) -> None:
    found = encode_spellings(text)
    assert json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="surrogatepass") in found
    for each in found:
        assert json.loads(b'"' + each + b'"') == text


def test_slashes_and_what_html_could_misread_are_found_too() -> None:
    found = encode_spellings("a/b<c>")
    assert b"a\\/b<c>" in found
    assert any(b"\\u003c" in each for each in found)
