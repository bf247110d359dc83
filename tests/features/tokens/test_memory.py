"""The law of the KV memory: how many tokens more may be reserved."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.features.tokens.estimator import CallTokens
from dispatcher.features.tokens.memory import INITIAL_TOKENS_PER_S, KvMemory

CAPACITY = 100_000.0


def add(
    memory: KvMemory,
    token: str,
    prompt: float,
    output: float,
    max_output: float,
    now: float,
    shared: float = 0.0,
) -> None:
    memory.add_call(token, CallTokens(prompt, output, max_output, shared), now)


def end(memory: KvMemory, token: str, output: int, now: float) -> None:
    """Let a call end whose answer reports that many tokens."""
    memory.calls[token].generated = output
    memory.remove_call(token, now)


def read(memory: KvMemory, used: float, at: float, window_s: float = 0.0, others: int = 0) -> None:
    memory.apply_reading(used, CAPACITY, 0.05, (at - window_s, at), at, others)


def test_room_is_the_free_memory_without_the_reserve_and_without_what_requests_may_grow_to() -> None:
    memory = KvMemory()
    assert memory.compute_room(0) == 0  # nothing is known
    read(memory, 40_000, 1.0)
    assert memory.compute_room(0) == pytest.approx(55_000)
    add(memory, "a", 6_000, 2_000, 2_000, 1.0)
    assert memory.compute_room(0) == pytest.approx(47_000)
    memory.remove_call("a", 2.0)
    assert memory.compute_room(0) == pytest.approx(55_000)


def test_own_tokens_in_the_reading_are_not_reserved_twice() -> None:
    memory = KvMemory()
    add(memory, "a", 6_000, 3_000, 3_000, 100.0)
    at = 100 + 2_000 / INITIAL_TOKENS_PER_S  # two thirds of the answer are generated
    read(memory, 40_000 + 8_000, at)
    assert memory.held == pytest.approx(8_000)
    assert memory.compute_room(0) == pytest.approx(95_000 - 40_000 - 9_000)


def test_least_that_was_held_in_the_window_counts() -> None:
    memory = KvMemory()
    add(memory, "early", 10_000, 0, 0, 0.0)
    add(memory, "late", 20_000, 0, 0, 8.0)
    # The reading may be from before the late request was sent. Then realtime requests had all but 10,000.
    read(memory, 50_000, 10.0, window_s=5.0)
    assert memory.held == 10_000
    assert memory.compute_room(0) == pytest.approx(95_000 - 50_000 + 10_000 - 30_000)
    read(memory, 50_000, 20.0, window_s=5.0)
    assert memory.held == 30_000


def test_request_that_ended_in_the_window_is_not_certain() -> None:
    memory = KvMemory()
    add(memory, "a", 10_000, 0, 0, 0.0)
    memory.remove_call("a", 8.0)
    read(memory, 50_000, 10.0, window_s=5.0)
    assert memory.held == 0
    read(memory, 50_000, 10.0, window_s=1.0)
    assert memory.held == 0
    add(memory, "b", 10_000, 0, 0, 10.5)
    memory.remove_call("b", 30.0)
    read(memory, 50_000, 20.0)  # a late reading of the time when it ran
    assert memory.held == 10_000


def test_window_before_all_that_is_known_proves_nothing() -> None:
    memory = KvMemory()
    for number in range(2_000):
        add(memory, f"{number}", 10, 0, 0, float(number))
    read(memory, 50_000, 1_900.0, window_s=1_000.0)
    assert memory.held == 0


def test_room_is_never_above_that_of_an_idle_pool() -> None:
    memory = KvMemory()
    add(memory, "a", 50_000, 0, 0, 0.0)
    read(memory, 1_000, 10.0)  # less than the request was estimated to hold
    memory.remove_call("a", 11.0)
    assert memory.compute_room(0) == pytest.approx(95_000)


def test_prompts_with_a_shared_prefix_fill_what_the_reading_shows_as_free() -> None:
    memory = KvMemory()
    for number in range(10):
        add(memory, f"{number}", 9_000, 0, 0, 0.0, shared=8_000)
    read(memory, 18_000, 10.0)  # one prefix, and 1,000 tokens for each of the ten
    assert memory.compute_room(0) == pytest.approx(95_000 - 18_000)
    for number in range(9):
        memory.remove_call(f"{number}", 11.0)
    # The other one shares with nobody, so no more than the limit may be reserved.
    assert memory.compute_room(0) == pytest.approx(95_000 - 9_000)


def test_reading_counts_if_prompts_in_the_prefix_cache_are_not_shared() -> None:
    memory, known = KvMemory(), KvMemory()
    for number in range(10):
        add(memory, f"{number}", 9_000, 0, 0, 0.0, shared=8_000)
        add(known, f"{number}", 9_000, 0, 0, 0.0)
    for each in (memory, known):
        read(each, 90_000, 10.0)
    assert memory.compute_room(0) == known.compute_room(0) == pytest.approx(5_000)


def test_requests_of_other_dispatchers_share_like_those_of_this_one() -> None:
    memory = KvMemory()
    memory.record_weights([CallTokens(9_000, 0, 0)])
    for number in range(5):
        add(memory, f"{number}", 9_000, 0, 0, 0.0, shared=8_000)
    read(memory, 18_000, 10.0, others=5)
    assert memory.compute_room(5) == pytest.approx(95_000 - 18_000)


@given(
    st.floats(0, 8_000),
    st.lists(st.tuples(st.integers(0, 29), st.floats(1.0, 30_000.0), st.booleans()), max_size=80),
    st.floats(0, 60_000),
)
@settings(max_examples=300, deadline=None)
def test_shared_prompts_never_overfill_the_memory(
    shared: float, steps: list[tuple[int, float, bool]], realtime: float
) -> None:
    """Requests come if there is room, and end, in any order, between readings that show each prefix once."""
    memory = KvMemory()
    running: dict[str, float] = {}

    def count_used() -> float:
        return sum(running.values()) - shared * max(0, len(running) - 1)

    read(memory, realtime, 0.0)
    for number, (key, private, is_read) in enumerate(steps, start=1):
        token, prompt = f"{key}", shared + private
        if running.pop(token, None) is not None:
            memory.remove_call(token, float(number))
        elif prompt <= memory.compute_room(0):
            running[token] = prompt
            add(memory, token, prompt, 0, 0, float(number), shared=shared)
            assert realtime + count_used() <= 95_000 + shared + 1e-6
        if is_read:
            read(memory, realtime + count_used(), number + 0.5)


@given(st.lists(st.tuples(st.floats(0, 9_000), st.floats(0, 1)), max_size=30), st.floats(0, 100_000))
def test_shared_prompts_change_no_room_that_the_reading_does_not_show(
    calls: list[tuple[float, float]], used: float
) -> None:
    memory, known = KvMemory(), KvMemory()
    for number, (prompt, share) in enumerate(calls):
        add(memory, f"{number}", prompt, 0, 0, 0.0, shared=prompt * share)
        add(known, f"{number}", prompt, 0, 0, 0.0)
    for each in (memory, known):
        read(each, used, 10.0)
    total, parts = sum(prompt for prompt, _ in calls), [prompt * share for prompt, share in calls]
    shared = sum(parts) - max(parts, default=0.0)
    assert known.compute_room(0) - 1e-6 <= memory.compute_room(0) <= 95_000 - used + 1e-6
    assert memory.compute_room(0) <= 95_000 + shared - total + 1e-6


def test_request_that_generates_more_than_estimated_reserves_more() -> None:
    memory = KvMemory()
    add(memory, "a", 1_000, 300, 3_000, 0.0)
    add(memory, "limited", 1_000, 300, 300, 0.0)
    read(memory, 5_000, 600 / INITIAL_TOKENS_PER_S)
    assert memory.reserved == pytest.approx(1_000 + 600 * 1.25 + 1_300)
    read(memory, 5_000, 10**6)
    assert memory.reserved == pytest.approx(1_000 + 3_000 + 1_300)
    memory.remove_call("a", 10**6)
    memory.remove_call("limited", 10**6)
    assert memory.reserved == 0


def test_speed_of_generation_is_learned() -> None:
    memory = KvMemory()
    for output, ended_at in ((1_000, 110.0),) * 500 + ((10**9, 100.0), (0, 110.0)):
        add(memory, "a", 0, 1_000, 1_000, 100.0)
        end(memory, "a", output, ended_at)
    add(memory, "a", 0, 1_000, 1_000, 100.0)
    read(memory, 50_000, 105.0)
    assert memory.held == pytest.approx(500, rel=0.01)  # 100 tokens/s for 5 s


def test_requests_of_other_dispatchers_count_like_those_of_this_one() -> None:
    memory = KvMemory()
    memory.record_weights([CallTokens(6_000, 2_000, 2_000)])
    add(memory, "a", 6_000, 2_000, 2_000, 0.0)
    read(memory, 50_000, 0.0, others=3)
    share = 6_000 / 8_000
    assert memory.held == pytest.approx(3 * 8_000 * share)  # the own request may come after the reading
    room = 95_000 - 50_000 + 3 * 8_000 * share - 8_000
    assert memory.compute_room(3) == pytest.approx(room - 3 * 8_000)
    assert memory.compute_room(4) == pytest.approx(room - 4 * 8_000)
    read(memory, 50_000, 1_000 / INITIAL_TOKENS_PER_S, others=3)  # they have grown like the own request
    assert memory.held == pytest.approx(4 * 7_000)


def test_least_within_a_tenth_of_a_second_is_kept() -> None:
    memory = KvMemory()
    add(memory, "a", 1_000, 5_000, 5_000, 0.0)
    add(memory, "b", 3_000, 0, 0, 10.0)
    memory.remove_call("a", 10.05)  # 3,000 are left
    add(memory, "c", 2_000, 500, 500, 10.06)
    read(memory, 50_000, 10.07)
    assert memory.held == pytest.approx(3_000)


def test_changes_more_than_a_tenth_of_a_second_apart_are_kept_apart() -> None:
    memory = KvMemory()
    add(memory, "a", 4_000, 0, 0, 0.0)
    memory.remove_call("a", 5.0)
    add(memory, "b", 3_000, 0, 0, 5.2)
    read(memory, 50_000, 5.5, window_s=0.15)
    assert memory.held == 3_000
    read(memory, 50_000, 5.5, window_s=0.35)
    assert memory.held == 0


def test_least_output_within_a_tenth_of_a_second_counts_with_the_prompt() -> None:
    memory = KvMemory()
    add(memory, "a", 1_000, 0, 0, 0.0)
    add(memory, "b", 0, 9_000, 9_000, 10.0)
    memory.remove_call("a", 10.05)  # more than 1,000 are left, though no prompt is
    read(memory, 50_000, 10.06)
    assert memory.held == pytest.approx(1_000)


def test_mean_of_recent_calls() -> None:
    memory = KvMemory()
    memory.record_weights([CallTokens(900, 100, 100), CallTokens(1_320, 0, 0)])
    assert memory.mean_call == pytest.approx(1_010)


def test_finished_answer_of_limited_length_reserves_no_more() -> None:
    memory = KvMemory()
    add(memory, "short", 0, 100, 3_000, 0.0)
    read(memory, 5_000, 50 / INITIAL_TOKENS_PER_S)  # it has not reached the estimate
    assert memory.reserved == 100


SECONDS = st.floats(0, 30)
CALLS = st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 5_000), st.integers(0, 5_000)), max_size=12)


@settings(max_examples=500)
@given(CALLS, st.floats(0, 40), st.floats(0, 10), st.floats(0, CAPACITY))
def test_room_is_at_most_what_was_free_plus_what_requests_certainly_held(
    calls: list[tuple[float, float, int, int]], at: float, window_s: float, used: float
) -> None:
    memory = KvMemory()
    changes = sorted(
        [(start, 1, number) for number, (start, _, _, _) in enumerate(calls)]
        + [(start + duration, -1, number) for number, (start, duration, _, _) in enumerate(calls)]
    )
    sums, total = [(-math.inf, 0)], 0
    reading_at = max([at, *(when for when, _, _ in changes)])
    for when, sign, number in sorted(changes, key=lambda each: (each[0], each[2], -each[1])):
        _, _, prompt, output = calls[number]
        if sign > 0:
            add(memory, f"{number}", prompt, output, output, when)
        else:
            memory.remove_call(f"{number}", when)
        total += sign * (prompt + output)
        sums.append((when, total))
    opened_at = at - window_s
    memory.apply_reading(used, CAPACITY, 0.05, (opened_at, at), reading_at, 0)
    before = [each for when, each in sums if when <= opened_at][-1]
    least = min([before, *(each for when, each in sums if opened_at <= when <= at)])
    assert memory.held <= least + 1e-6
    limit = 0.95 * CAPACITY
    assert memory.compute_room(0) <= min(limit, limit - used + least) + 1e-6
    assert (memory.reserved, len(memory.calls)) == (0, 0)


OPERATIONS = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 5), st.floats(0, 1), st.integers(0, 9_000), st.integers(0, 9_000)
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(OPERATIONS)
def test_nothing_stays_reserved_after_any_history(
    operations: list[tuple[bool, int, float, int, int]],
) -> None:
    """Calls that are added twice or removed twice leave nothing behind."""
    memory, now = KvMemory(), 0.0
    present: dict[str, tuple[int, int]] = {}
    for is_added, number, wait_s, prompt, output in operations:
        now += wait_s
        token = f"{number}"
        if is_added:
            add(memory, token, prompt, output, output, now)
            present[token] = prompt, output
        else:
            memory.remove_call(token, now)
            present.pop(token, None)
        assert memory.reserved == pytest.approx(sum(map(sum, present.values())))
        assert len(memory.calls) == len(present)
    for token in present:
        memory.remove_call(token, now)
    assert memory.reserved == 0
