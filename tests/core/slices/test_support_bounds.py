"""Bounds of what is remembered about models, because producers choose the names."""

from __future__ import annotations

from dispatcher.core.slices.eligibility import WholeReason
from dispatcher.core.slices.support import MAX_MODELS, MAX_TEMPLATE_OPTIONS, SupportTable

PATH = "/v1/chat/completions"


def test_number_of_models_that_are_checked_is_bounded() -> None:
    table = SupportTable()
    for number in range(2 * MAX_MODELS):
        check = table.begin_check((PATH, f"m-{number}", b""), at=1.0)
        assert (check is not None) == (number < MAX_MODELS)
    assert len(list(table)) == MAX_MODELS
    assert table.get_support((PATH, "another", b"")).reason is WholeReason.UNCHECKED


def test_number_of_template_options_of_a_model_is_bounded() -> None:
    table = SupportTable()
    for number in range(2 * MAX_TEMPLATE_OPTIONS):
        check = table.begin_check((PATH, "m", b'{"a":%d}' % number), at=1.0)
        assert (check is not None) == (number < MAX_TEMPLATE_OPTIONS)
    assert table.begin_check((PATH, "another", b""), at=1.0) is not None
