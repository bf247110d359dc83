"""Bounds of what is remembered about models, because producers choose their names and template options."""

from __future__ import annotations

import pytest

from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.equality import Continuation, EqualityCheck
from dispatcher.features.slices.support import (
    KEPT_S,
    MAX_KEY_BYTES,
    MAX_MODELS,
    MAX_TEMPLATE_OPTIONS,
    ModelKey,
    SupportTable,
)

PATH = "/v1/chat/completions"
PLAIN: ModelKey = (PATH, "m", b"")
LATE = 10 * KEPT_S


def send_request(table: SupportTable, key: ModelKey, at: float, *, is_undecided: bool = False) -> bool:
    """Do what a request to the model does. Return whether it is sliced."""
    support = table.get_for_request(key)
    if support.is_check_due(at) and table.begin_check(key, at) is not None:
        check = EqualityCheck(*key[:2])
        while check.next_body is not None:
            check.record_answer(404, b"")
        check.is_undecided, check.why = is_undecided, "the server answered 404"
        check.continuation = None if is_undecided else Continuation.TEXT
        table.end_check(key, check, at)
    return table.find_support(key).reason is None


def make_option(number: int) -> ModelKey:
    return PATH, "m", b'{"a":%d}' % number


def test_number_of_entries_is_bounded() -> None:
    table = SupportTable()
    for number in range(5 * MAX_MODELS):
        send_request(table, (PATH, f"m-{number}", b""), number * KEPT_S)
        send_request(table, make_option(number), number * KEPT_S)
    assert len(list(table)) <= MAX_MODELS
    assert sum(key[1] == "m" for key, _ in table) <= MAX_TEMPLATE_OPTIONS


def test_models_that_do_not_exist_displace_no_verdict_and_keep_no_model_out() -> None:
    table = SupportTable()
    assert send_request(table, PLAIN, 0.0)
    for number in range(3 * MAX_MODELS):
        assert not send_request(table, (PATH, f"none-{number}", b""), LATE, is_undecided=True)
    assert table.find_support(PLAIN).reason is None
    assert send_request(table, (PATH, "new", b""), LATE)


def test_invented_template_options_displace_no_verdict_of_plain_requests() -> None:
    table = SupportTable()
    for number in range(MAX_MODELS):
        assert send_request(table, (PATH, f"m-{number}", b""), 0.0)
    for number in range(3 * MAX_TEMPLATE_OPTIONS):
        assert not send_request(table, make_option(number), LATE + number * KEPT_S)
    assert all(support.reason is None for _, support in table)


def test_invented_template_options_do_not_keep_plain_requests_out() -> None:
    table = SupportTable()
    for number in range(2 * MAX_TEMPLATE_OPTIONS):
        send_request(table, make_option(number), 0.0)
    assert send_request(table, PLAIN, 0.0)


def test_template_options_used_once_go_before_those_that_are_used_again() -> None:
    table = SupportTable()
    for _ in range(3):
        assert send_request(table, make_option(0), 0.0)
    for number in range(1, 5 * MAX_TEMPLATE_OPTIONS):
        assert send_request(table, make_option(number), number * KEPT_S)
    assert table.find_support(make_option(0)).reason is None


def test_models_used_longest_ago_go_first() -> None:
    table = SupportTable()
    for number in [*range(MAX_MODELS), *range(MAX_MODELS)]:
        assert send_request(table, (PATH, f"m-{number}", b""), 0.0)
    send_request(table, (PATH, "m-0", b""), LATE)
    assert send_request(table, (PATH, "new", b""), LATE)
    assert table.find_support((PATH, "m-0", b"")).reason is None
    assert table.find_support((PATH, "m-1", b"")).reason is WholeReason.UNCHECKED


def test_requests_with_template_options_of_their_own_are_not_checked_each() -> None:
    table = SupportTable()
    for number in range(1000):
        send_request(table, make_option(number), number * KEPT_S / 1000)
    assert sum(support.reason is None for _, support in table) == MAX_TEMPLATE_OPTIONS
    assert table.find_support(make_option(0)).reason is None


def test_model_is_remembered_before_it_is_checked_but_displaces_no_verdict() -> None:
    table = SupportTable()
    assert table.get_for_request(PLAIN) is table.get_for_request(PLAIN)
    for number in range(MAX_MODELS):
        assert send_request(table, (PATH, f"m-{number}", b""), 0.0)
    assert table.get_for_request((PATH, "late", b"")) is not table.get_for_request((PATH, "late", b""))
    assert sum(support.reason is None for _, support in table) == MAX_MODELS


def test_entry_whose_check_runs_is_not_displaced() -> None:
    table = SupportTable()
    assert table.begin_check(PLAIN, 0.0) is not None
    for number in range(2 * MAX_MODELS):
        send_request(table, (PATH, f"m-{number}", b""), number * KEPT_S)
    assert table.find_support(PLAIN).is_being_checked


@pytest.mark.parametrize("key", [(PATH, "m" * MAX_KEY_BYTES, b"x"), (PATH, "m", b"x" * MAX_KEY_BYTES)])
def test_very_long_names_are_not_remembered(key: ModelKey) -> None:
    table = SupportTable()
    assert not send_request(table, key, 0.0)
    assert not list(table)
