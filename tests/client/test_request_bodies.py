"""Which request bodies are accepted, and what of them reaches the queue."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.client.item import Item, build_submission, encode_mapping
from dispatcher.features.batch_files.run_options import FileOptions, build_line_reader
from dispatcher.requests.request import Request, parse_member


def encode_payload(body: Any) -> bytes:
    """Return the payload that a dispatcher reads."""
    request = parse_member(build_submission(Item(body), "t", queue="q", results="r").member)
    assert isinstance(request, Request)
    return bytes(request.payload)


@dataclass
class Sampling:
    top_p: float


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": math.nan}, "the body: temperature is nan"),
        ({"a": {"logit_bias": {"7": math.inf}}}, "the body: a.logit_bias.7 is inf"),
        ({"input": [[0.5, None], [1.0, -math.inf]]}, "the body: input.1.1 is -inf"),
        ({"pair": (1.0, math.nan)}, "the body: pair.1 is nan"),
        ({"n": None, "sampling": Sampling(math.inf)}, "the body: sampling.top_p is inf"),
    ],
)
def test_number_that_json_cannot_represent_is_named(body: Any, expected: str) -> None:
    with pytest.raises(ValueError, match="which JSON has no number for") as error:
        encode_payload(body)
    assert str(error.value).startswith(expected)


def test_template_is_checked_for_such_numbers() -> None:
    with pytest.raises(ValueError, match="temperature is nan"):
        build_line_reader(FileOptions(template={"prompt": "", "temperature": math.nan}, field="prompt"))


def test_null_and_the_text_null_are_accepted() -> None:
    body = {"stop": None, "prompt": "null", "raw": msgspec.Raw(b"null")}
    assert json.loads(encode_payload(body)) == {"stop": None, "prompt": "null", "raw": None}


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def has_invalid_number(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(has_invalid_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4))
def test_body_is_encoded_unchanged_or_rejected(body: dict[str, Any]) -> None:
    if has_invalid_number(body):
        with pytest.raises(ValueError, match="which JSON has no number for"):
            encode_mapping(body)
    else:
        assert json.loads(encode_mapping(body)) == body
