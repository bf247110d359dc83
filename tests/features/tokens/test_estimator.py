"""Estimates of the tokens of requests, and what is learned from answers."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest

from dispatcher.features.tokens.body_scan import BodyLength
from dispatcher.features.tokens.estimator import (
    INITIAL_OUTPUT_TOKENS,
    INITIAL_TOKENS_PER_BYTE,
    MAX_ROWS,
    TOKENS_PER_IMAGE,
    CallTokens,
    TokenEstimator,
)

PATH = "/v1/chat/completions"


def learn(estimator: TokenEstimator, body: BodyLength, prompt: int, output: int, times: int = 1) -> None:
    for _ in range(times):
        estimator.learn(estimator.estimate(body, PATH), prompt, output)


def test_first_estimate_is_large() -> None:
    estimator = TokenEstimator()
    call = estimator.estimate(BodyLength(1000, max_tokens=300, copies=2), PATH)
    assert (call.prompt, call.output, call.max_output) == (1000 * INITIAL_TOKENS_PER_BYTE, 600, 600)
    unlimited = estimator.estimate(BodyLength(0, token_ids=40, images=2), PATH)
    assert unlimited.prompt == 40 + 2 * TOKENS_PER_IMAGE
    assert (unlimited.output, unlimited.max_output) == (INITIAL_OUTPUT_TOKENS, math.inf)


def test_tokens_per_byte_are_learned_for_each_path_model_and_size() -> None:
    estimator = TokenEstimator()
    learn(estimator, BodyLength(1000, model="a"), 250, 0)
    learn(estimator, BodyLength(100_000, model="a"), 10_000, 0)
    assert estimator.estimate(BodyLength(900, model="a"), PATH).prompt == pytest.approx(225)
    assert estimator.estimate(BodyLength(99_000, model="a"), PATH).prompt == pytest.approx(9_900)
    # Another size of the same model: the mean of all.
    assert estimator.estimate(BodyLength(10_000, model="a"), PATH).prompt == pytest.approx(1_750)
    for body, path in ((BodyLength(1000, model="b"), PATH), (BodyLength(1000, model="a"), "/v1/completions")):
        assert estimator.estimate(body, path).prompt == 1000 * INITIAL_TOKENS_PER_BYTE


def test_share_of_a_prompt_in_the_prefix_cache_is_learned_for_requests_like_it() -> None:
    estimator = TokenEstimator()
    body = BodyLength(1000, model="a")
    assert estimator.estimate(body, PATH).shared == 0
    estimator.learn(estimator.estimate(body, PATH), 250, 0)  # the first one finds nothing in the cache
    estimator.learn(estimator.estimate(body, PATH), 250, 0, 200)
    assert estimator.estimate(body, PATH).shared == pytest.approx(100)
    for other in (BodyLength(5000, model="a"), BodyLength(1000, model="b")):
        assert estimator.estimate(other, PATH).shared == 0
    for _ in range(400):
        estimator.learn(estimator.estimate(body, PATH), 250, 0)
    assert estimator.estimate(body, PATH).shared < 1


def test_part_of_an_answer_shows_nothing_about_shared_prompts() -> None:
    estimator = TokenEstimator()
    call = msgspec.structs.replace(estimator.estimate(BodyLength(1000), PATH), is_part=True)
    estimator.learn(call, 250, 0, 200)
    assert estimator.estimate(BodyLength(1000), PATH).shared == 0


def test_mean_output_counts_after_eight_answers_and_never_above_the_limit() -> None:
    estimator = TokenEstimator()
    body = BodyLength(100, max_tokens=1000)
    learn(estimator, body, 0, 100, times=7)
    assert estimator.estimate(body, PATH).output == 1000
    learn(estimator, body, 0, 100)
    assert estimator.estimate(body, PATH).output == 100
    # A limit of about the same size shares what was learned; one of another size does not.
    assert estimator.estimate(BodyLength(100, max_tokens=600), PATH).output == 100
    assert estimator.estimate(BodyLength(100, max_tokens=4000), PATH).output == 4000
    learn(estimator, body, 0, 990, times=200)
    assert estimator.estimate(BodyLength(100, max_tokens=600), PATH).output == 600


def test_output_of_several_copies_is_learned_for_one() -> None:
    estimator = TokenEstimator()
    learn(estimator, BodyLength(100, max_tokens=1000, copies=4), 0, 400, times=8)
    assert estimator.estimate(BodyLength(100, max_tokens=1000, copies=2), PATH).output == 200


def test_part_of_an_answer_shows_only_the_prompt() -> None:
    estimator = TokenEstimator()
    body = BodyLength(1000, max_tokens=1000)
    whole = estimator.estimate(body, PATH)
    part = CallTokens(whole.prompt, 50, 50, kind=whole.kind, body=body, is_part=True)
    for _ in range(10):
        estimator.learn(part, 200, 50)
    assert estimator.estimate(body, PATH).output == 1000
    assert estimator.estimate(body, PATH).prompt == pytest.approx(200)
    estimator.learn(CallTokens(5, 5, 5), 10**6, 10**6)  # not made from a body
    assert estimator.estimate(body, PATH).prompt == pytest.approx(200)


def test_image_and_missing_usage_teach_nothing_about_text() -> None:
    estimator = TokenEstimator()
    learn(estimator, BodyLength(1000, images=1), 5000, 0)
    learn(estimator, BodyLength(1000), 0, 0, times=20)
    call = estimator.estimate(BodyLength(1000), PATH)
    assert (call.prompt, call.output) == (1000 * INITIAL_TOKENS_PER_BYTE, INITIAL_OUTPUT_TOKENS)


def draw_prompt(source: random.Random, tokens_per_word: float) -> tuple[BodyLength, int]:
    """Return a body with words of random lengths, and its number of tokens."""
    words = int(source.lognormvariate(5, 1.2)) + 1
    text_bytes = 120 + sum(source.choice((3, 4, 5, 6, 9)) + 1 for _ in range(words))
    tokens = round(words * tokens_per_word * source.uniform(0.9, 1.1)) + 12
    return BodyLength(text_bytes, model="m"), tokens


@pytest.mark.parametrize("seed", range(5))
def test_median_error_is_below_15_percent_after_500_answers_and_200_after_a_change(seed: int) -> None:
    estimator, source = TokenEstimator(), random.Random(seed)

    def run(count: int, tokens_per_word: float) -> list[float]:
        errors = []
        for _ in range(count):
            body, tokens = draw_prompt(source, tokens_per_word)
            call = estimator.estimate(body, PATH)
            errors.append(abs(call.prompt - tokens) / tokens)
            estimator.learn(call, tokens, 0)
        return errors

    run(500, 1.3)
    assert statistics.median(run(200, 1.3)) < 0.15
    run(200, 2.1)  # another tokenizer
    assert statistics.median(run(200, 2.1)) < 0.15
    assert estimator.list_errors()["m"] < 0.25


def test_invented_models_do_not_fill_the_memory() -> None:
    estimator = TokenEstimator()
    for number in range(3 * MAX_ROWS):
        learn(estimator, BodyLength(100, model=f"m-{number}"), 20, 20)
    assert len(estimator.list_errors()) == MAX_ROWS
    assert f"m-{3 * MAX_ROWS - 1}" in estimator.list_errors()
