"""Knowledge about slicing on each model."""

from __future__ import annotations

import msgspec
import pytest

from dispatcher.core.slices.eligibility import WholeReason
from dispatcher.core.slices.equality import Continuation, EqualityCheck
from dispatcher.core.slices.size import MEASURE_TOKENS, MIN_SAMPLES
from dispatcher.core.slices.support import (
    EQUAL_S,
    INTERRUPTED_S,
    MAX_MODELS,
    MAX_TEMPLATE_OPTIONS,
    MIN_CACHE_SAMPLES,
    UNDECIDED_S,
    UNEQUAL_S,
    ModelKey,
    SupportTable,
)

PATH = "/v1/completions"
KEY: ModelKey = (PATH, "m", b"")


def make_check(
    continuation: Continuation | None = Continuation.TEXT, *, is_undecided: bool = False
) -> EqualityCheck:
    """Return a check that has ended like this."""
    check = EqualityCheck(PATH, "m")
    check.continuation, check.is_undecided, check.why = continuation, is_undecided, "because"
    return check


def make_equal_table(*, judges_cost: bool = True) -> SupportTable:
    table = SupportTable(judges_cost=judges_cost)
    table.end_check(KEY, make_check(), 0.0)
    return table


class TestChecks:
    def test_model_is_unchecked_until_its_check_has_ended(self) -> None:
        table = SupportTable()
        support = table.get_support(KEY)
        assert support.reason is WholeReason.UNCHECKED
        assert table.begin_check(KEY, 0.0) is not None
        assert support.reason is WholeReason.UNCHECKED
        assert table.end_check(KEY, make_check(Continuation.TOKEN_IDS), 1.0)
        support = table.get_support(KEY)
        assert support.reason is None
        assert support.continuation is Continuation.TOKEN_IDS

    def test_only_one_check_runs_at_a_time(self) -> None:
        table = SupportTable()
        assert table.begin_check(KEY, 0.0) is not None
        assert table.begin_check(KEY, 1e9) is None
        assert table.begin_check((PATH, "other", b""), 0.0) is not None

    @pytest.mark.parametrize(
        ("check", "delay_s"),
        [
            (make_check(), EQUAL_S),
            (make_check(None), UNEQUAL_S),
            (make_check(None, is_undecided=True), UNDECIDED_S),
            (None, INTERRUPTED_S),
        ],
        ids=["equal", "unequal", "undecided", "interrupted"],
    )
    def test_check_is_repeated_after_a_time_that_depends_on_its_result(
        self, check: EqualityCheck | None, delay_s: float
    ) -> None:
        table = SupportTable()
        table.begin_check(KEY, 0.0)
        table.end_check(KEY, check, 10.0)
        assert table.begin_check(KEY, 9.9 + delay_s) is None
        assert table.begin_check(KEY, 10.0 + delay_s) is not None

    def test_result_says_whether_it_changes_how_requests_are_sent(self) -> None:
        table = SupportTable()
        assert table.end_check(KEY, make_check(), 0.0)
        assert not table.end_check(KEY, make_check(), 1.0)
        assert table.end_check(KEY, make_check(None), 2.0)
        assert not table.end_check(KEY, make_check(None), 3.0)

    @pytest.mark.parametrize("check", [None, make_check(None, is_undecided=True)])
    def test_check_that_shows_nothing_changes_nothing(self, check: EqualityCheck | None) -> None:
        table = make_equal_table()
        assert not table.end_check(KEY, check, 1.0)
        assert table.get_support(KEY).reason is None
        assert table.get_support(KEY).continuation is Continuation.TEXT

    def test_check_uses_path_model_and_template_options_of_the_requests(self) -> None:
        table = SupportTable(is_streamed=True)
        check = table.begin_check(("/v1/chat/completions", "m", b'{"enable_thinking":false}'), 0.0)
        assert check is not None
        body = msgspec.json.decode(check.next_body or b"")
        assert body["model"] == "m"
        assert body["chat_template_kwargs"] == {"enable_thinking": False}

    def test_reason_that_an_answer_has_shown_holds_until_the_model_is_checked_again(self) -> None:
        table = make_equal_table()
        table.record_reason(KEY, WholeReason.REASONING, "why", 100.0)
        assert table.get_support(KEY).reason is WholeReason.REASONING
        assert table.begin_check(KEY, 99.0 + UNEQUAL_S) is None
        assert table.begin_check(KEY, 100.0 + UNEQUAL_S) is not None


class TestBounds:
    def test_models_beyond_the_bound_are_not_remembered_and_not_checked(self) -> None:
        table = SupportTable()
        for number in range(MAX_MODELS + 50):
            table.get_support((PATH, f"m-{number}", b""))
        assert len([*table]) == MAX_MODELS
        late: ModelKey = (PATH, "late", b"")
        assert table.begin_check(late, 1e12) is None
        assert table.get_support(late).reason is WholeReason.UNCHECKED
        assert table.begin_check((PATH, "m-7", b""), 0.0) is not None

    def test_few_template_options_of_a_model_are_remembered(self) -> None:
        table = SupportTable()
        for number in range(MAX_TEMPLATE_OPTIONS + 3):
            table.get_support((PATH, "m", b"%d" % number))
        assert len([*table]) == MAX_TEMPLATE_OPTIONS
        assert table.begin_check((PATH, "other", b""), 0.0) is not None


class TestCost:
    def test_slices_that_find_nothing_in_the_cache_are_not_worth_it(self) -> None:
        table = make_equal_table()
        results = [table.record_cached(KEY, 0, 100, 5.0) for _ in range(MIN_CACHE_SAMPLES)]
        assert results == [False] * (MIN_CACHE_SAMPLES - 1) + [True]
        assert table.get_support(KEY).reason is WholeReason.NOT_WORTH_IT
        assert not table.record_cached(KEY, 0, 100, 5.0)

    def test_slices_that_find_most_in_the_cache_are_worth_it(self) -> None:
        table = make_equal_table()
        for _ in range(5 * MIN_CACHE_SAMPLES):
            assert not table.record_cached(KEY, 80, 100, 5.0)
        assert table.get_support(KEY).cached_share == pytest.approx(0.8)

    def test_share_follows_a_change_and_starts_again_with_a_check(self) -> None:
        table = make_equal_table()
        for _ in range(100):
            table.record_cached(KEY, 100, 100, 5.0)
        assert any(table.record_cached(KEY, 0, 100, 5.0) for _ in range(2 * MIN_CACHE_SAMPLES))
        table.end_check(KEY, make_check(), 6.0)
        assert not table.record_cached(KEY, 0, 100, 7.0)
        assert table.get_support(KEY).cached_share == 0.0

    def test_prompt_without_tokens_counts_as_not_cached(self) -> None:
        table = make_equal_table()
        assert not table.record_cached(KEY, 0, 0, 5.0)
        assert table.get_support(KEY).cached_share == 0.0

    def test_slices_with_a_long_time_to_the_first_token_are_not_worth_it(self) -> None:
        table = make_equal_table()
        changes = []
        for _ in range(MIN_SAMPLES):
            changes.append(table.record_duration(KEY, 256, 12.0, 5.0))
            changes.append(table.record_duration(KEY, MEASURE_TOKENS, 10.0, 5.0))
        assert changes == [False] * (2 * MIN_SAMPLES - 1) + [True]
        support = table.get_support(KEY)
        assert support.reason is WholeReason.NOT_WORTH_IT
        assert not support.size.is_too_expensive

    def test_cost_does_not_matter_if_it_is_not_judged(self) -> None:
        table = make_equal_table(judges_cost=False)
        for _ in range(2 * MIN_CACHE_SAMPLES):
            assert not table.record_cached(KEY, 0, 100, 5.0)
            assert not table.record_duration(KEY, MEASURE_TOKENS, 10.0, 5.0)
            assert not table.record_duration(KEY, 256, 12.0, 5.0)
        assert table.get_support(KEY).reason is None
