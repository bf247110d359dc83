"""Knowledge about slicing on each model."""

from __future__ import annotations

import msgspec
import pytest

from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.equality import Continuation, EqualityCheck
from dispatcher.features.slices.size import MEASURE_TOKENS, MIN_SAMPLES
from dispatcher.features.slices.support import (
    DOUBT_S,
    EQUAL_S,
    INTERRUPTED_S,
    MIN_CACHE_SAMPLES,
    UNDECIDED_S,
    UNEQUAL_S,
    ModelKey,
    SupportTable,
    Verdict,
)

PATH = "/v1/completions"
KEY: ModelKey = (PATH, "m", b"")


def make_check(
    continuation: Continuation | None = Continuation.TEXT, *, is_undecided: bool = False
) -> EqualityCheck:
    """Return a check that has ended like this."""
    check = EqualityCheck(PATH, "m")
    end_check(check)
    check.continuation, check.is_undecided, check.why = continuation, is_undecided, "because"
    return check


def end_check(check: EqualityCheck) -> None:
    """Answer the calls of a check until it has ended."""
    while check.next_body is not None:
        check.record_answer(500, b"")


def check_model(table: SupportTable, key: ModelKey, at: float, check: EqualityCheck | None = None) -> bool:
    """Run a check that ends like `check`, by default as equal. Return whether it was run."""
    table.get_for_request(key)
    if table.begin_check(key, at) is None:
        return False
    table.end_check(key, check or make_check(), at)
    return True


def make_equal_table(*, judges_cost: bool = True) -> SupportTable:
    table = SupportTable(judges_cost=judges_cost)
    check_model(table, KEY, 0.0)
    return table


class TestChecks:
    def test_model_is_unchecked_until_its_check_has_ended(self) -> None:
        table = SupportTable()
        assert table.find_support(KEY).verdict is Verdict.UNCHECKED
        assert table.begin_check(KEY, 0.0) is not None
        support = table.find_support(KEY)
        assert support.reason is WholeReason.UNCHECKED
        assert table.end_check(KEY, make_check(Continuation.TOKEN_IDS), 1.0)
        support = table.find_support(KEY)
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
            (EqualityCheck(PATH, "m"), INTERRUPTED_S),
        ],
        ids=["equal", "unequal", "undecided", "interrupted"],
    )
    def test_check_is_repeated_after_a_time_that_depends_on_its_result(
        self, check: EqualityCheck, delay_s: float
    ) -> None:
        table = SupportTable()
        table.begin_check(KEY, 0.0)
        table.end_check(KEY, check, 10.0)
        assert table.begin_check(KEY, 9.9 + delay_s) is None
        assert table.begin_check(KEY, 10.0 + delay_s) is not None

    def test_result_says_whether_it_changes_how_requests_are_sent(self) -> None:
        table = SupportTable()
        table.begin_check(KEY, 0.0)
        assert table.end_check(KEY, make_check(), 0.0)
        assert not table.end_check(KEY, make_check(), 1.0)
        assert table.end_check(KEY, make_check(None), 2.0)
        assert not table.end_check(KEY, make_check(None), 3.0)

    def test_interrupted_check_goes_on_where_it_was(self) -> None:
        table = SupportTable()
        check = table.begin_check(KEY, 0.0)
        assert check is not None
        table.end_check(KEY, check, 0.0)
        assert table.begin_check(KEY, INTERRUPTED_S) is check
        table.end_check(KEY, check, INTERRUPTED_S)
        assert table.begin_check(KEY, 2 * UNDECIDED_S) is not check, "the server may be another one"

    def test_interrupted_check_begins_again_if_slices_are_streamed_now(self) -> None:
        table = SupportTable()
        check = table.begin_check(KEY, 0.0)
        assert check is not None
        table.end_check(KEY, check, 0.0)
        table.is_streamed = True
        again = table.begin_check(KEY, INTERRUPTED_S)
        assert again is not None
        assert again.is_streamed

    @pytest.mark.parametrize("check", [EqualityCheck(PATH, "m"), make_check(None, is_undecided=True)])
    def test_check_that_shows_nothing_changes_nothing(self, check: EqualityCheck) -> None:
        table = make_equal_table()
        assert not table.end_check(KEY, check, 1.0)
        assert table.find_support(KEY).reason is None
        assert table.find_support(KEY).continuation is Continuation.TEXT

    def test_check_uses_path_model_and_template_options_of_the_requests(self) -> None:
        table = SupportTable(is_streamed=True)
        check = table.begin_check(("/v1/chat/completions", "m", b'{"enable_thinking":false}'), 0.0)
        assert check is not None
        body = msgspec.json.decode(check.next_body or b"")
        assert body["model"] == "m"
        assert body["chat_template_kwargs"] == {"enable_thinking": False}

    def test_answer_that_contradicts_a_check_decides_nothing_but_lets_the_model_be_checked_again(
        self,
    ) -> None:
        table = make_equal_table()
        table.record_doubt(KEY)
        assert table.find_support(KEY).reason is None
        assert table.begin_check(KEY, DOUBT_S - 1.0) is None
        assert table.begin_check(KEY, DOUBT_S) is not None

    def test_doubts_do_not_lead_to_more_checks_than_their_minimum_distance_allows(self) -> None:
        table = make_equal_table()
        checks = 0
        for at in range(3600):
            table.record_doubt(KEY)
            checks += check_model(table, KEY, float(at))
        assert checks == 3600 / DOUBT_S - 1

    def test_doubt_does_not_bring_the_check_of_an_unequal_model_forward(self) -> None:
        table = SupportTable()
        check_model(table, KEY, 0.0, make_check(None))
        table.record_doubt(KEY)
        assert table.begin_check(KEY, UNEQUAL_S - 1.0) is None

    @pytest.mark.parametrize(
        ("check", "verdict"),
        [
            (make_check(), Verdict.EQUAL),
            (make_check(None), Verdict.UNEQUAL),
            (make_check(None, is_undecided=True), Verdict.UNDECIDED),
        ],
    )
    def test_verdict_is_that_of_the_check(self, check: EqualityCheck, verdict: Verdict) -> None:
        table = SupportTable()
        check_model(table, KEY, 0.0, check)
        assert table.find_support(KEY).verdict is verdict


class TestCost:
    def test_slices_that_find_nothing_in_the_cache_are_not_worth_it(self) -> None:
        table = make_equal_table()
        results = [table.record_cached(KEY, 0, 100, 5.0) for _ in range(MIN_CACHE_SAMPLES)]
        assert results == [False] * (MIN_CACHE_SAMPLES - 1) + [True]
        assert table.find_support(KEY).reason is WholeReason.NOT_WORTH_IT
        assert not table.record_cached(KEY, 0, 100, 5.0)

    def test_slices_that_find_most_in_the_cache_are_worth_it(self) -> None:
        table = make_equal_table()
        for _ in range(5 * MIN_CACHE_SAMPLES):
            assert not table.record_cached(KEY, 80, 100, 5.0)
        assert table.find_support(KEY).cached_share == pytest.approx(0.8)

    def test_share_follows_a_change_and_starts_again_with_a_check(self) -> None:
        table = make_equal_table()
        for _ in range(100):
            table.record_cached(KEY, 100, 100, 5.0)
        assert any(table.record_cached(KEY, 0, 100, 5.0) for _ in range(2 * MIN_CACHE_SAMPLES))
        table.begin_check(KEY, 5.0 + UNEQUAL_S)
        table.end_check(KEY, make_check(), 5.0 + UNEQUAL_S)
        assert not table.record_cached(KEY, 0, 100, 7.0)
        assert table.find_support(KEY).cached_share == 0.0

    def test_prompt_without_tokens_counts_as_not_cached(self) -> None:
        table = make_equal_table()
        assert not table.record_cached(KEY, 0, 0, 5.0)
        assert table.find_support(KEY).cached_share == 0.0

    def test_slices_with_a_long_time_to_the_first_token_are_not_worth_it(self) -> None:
        table = make_equal_table()
        changes = []
        for _ in range(MIN_SAMPLES):
            changes.append(table.record_duration(KEY, 256, 12.0, 5.0))
            changes.append(table.record_duration(KEY, MEASURE_TOKENS, 10.0, 5.0))
        assert changes == [False] * (2 * MIN_SAMPLES - 1) + [True]
        support = table.find_support(KEY)
        assert support.reason is WholeReason.NOT_WORTH_IT
        assert not support.size.is_too_expensive

    def test_cost_does_not_matter_if_it_is_not_judged(self) -> None:
        table = make_equal_table(judges_cost=False)
        for _ in range(2 * MIN_CACHE_SAMPLES):
            assert not table.record_cached(KEY, 0, 100, 5.0)
            assert not table.record_duration(KEY, MEASURE_TOKENS, 10.0, 5.0)
            assert not table.record_duration(KEY, 256, 12.0, 5.0)
        assert table.find_support(KEY).reason is None
