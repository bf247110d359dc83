"""Overrides of the settings of sequences: which one applies to a request."""

from __future__ import annotations

import pytest

from dispatcher.features.sequences.decisions import SequenceOverride, SequenceTerms
from dispatcher.features.sequences.overrides import name_override
from dispatcher.features.sequences.turns import Turn
from dispatcher.requests.request import Request, encode_member, parse_member

BIG = SequenceOverride("big-*", max_active=1)


@pytest.mark.parametrize(
    ("payload", "endpoint", "override"),
    [
        (b'{"model":"big-7b"}', "", "big-*"),
        (b'{"model":"small"}', "", ""),
        (b"{}", "", ""),
        (b'{"model":7}', "", ""),
        (b"{}", "/v2/models/big-7b/versions/3/infer", "big-*"),
        (b"{}", "/v1/models/big%2D7b:predict", "big-*"),
        (b'{"model":"small"}', "/v2/models/big-7b/infer", ""),
        (b"{}", "/v2/models/", ""),
    ],
)
def test_override_is_that_of_the_model_in_the_body_or_in_the_path(
    payload: bytes, endpoint: str, override: str
) -> None:
    request = Request("r", 10, payload, endpoint=endpoint, extra=Turn("s"))
    named = name_override(request, SequenceTerms(overrides=(BIG,)), "")
    assert named.extra is not None
    assert named.extra.override == override


def test_model_in_the_default_path_counts_for_requests_without_a_path() -> None:
    request = Request("r", 10, b"{}", extra=Turn("s"))
    named = name_override(request, SequenceTerms(overrides=(BIG,)), "/v2/models/big-7b/infer")
    assert named.extra is not None
    assert named.extra.override == "big-*"


def test_first_matching_override_applies() -> None:
    exempt = SequenceOverride("big-free")
    terms = SequenceTerms(overrides=(exempt, BIG))
    assert terms.match_override("big-free") == "big-free"
    assert terms.get_max_active("big-free") is None
    assert terms.match_override("big-7b") == "big-*"


def test_producer_cannot_choose_the_override() -> None:
    member = encode_member("r", b"{}", 10**9, extra=Turn("s", override="big-*"))
    assert b"big-" not in member
    forged = member.replace(b'"id":"s"', b'"id":"s","override":"big-*"')
    parsed = parse_member(forged)
    assert isinstance(parsed, Request)
    assert parsed.extra is not None
    assert parsed.extra.override == ""
