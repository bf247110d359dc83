"""Generated text of the stand-in depends on every token before it, and a correct continuation is exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.lab.standin.generation import (
    END,
    MERGED,
    ROLES,
    THINK_END,
    THINK_START,
    VOCABULARY_SIZE,
    Generation,
    decode_tokens,
    encode_text,
    generate_text,
)
from dispatcher.lab.standin.prefixes import TokenCache

PROMPT = encode_text("Write a story. ")
LENGTH = 400
CUTS = st.lists(st.integers(1, 60), min_size=1, max_size=12)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def generate(prompt: Sequence[int] = PROMPT, max_tokens: int = LENGTH, **options: Any) -> Generation:
    return generate_text("m", prompt, max_tokens=max_tokens, **options)


def generate_by_ids(prompt: Sequence[int], cuts: Sequence[int], **options: Any) -> list[Generation]:
    """Generate slices of these numbers of tokens, each continuing the tokens of all slices before."""
    slices: list[Generation] = []
    for cut in cuts:
        tokens = [token for each in slices for token in each.token_ids]
        slices.append(generate([*prompt, *tokens], cut, **options))
        if slices[-1].finish_reason == "stop":
            break
    return slices


def generate_by_text(prompt: str, cuts: Sequence[int], **options: Any) -> str:
    """Generate slices of these numbers of tokens, each continuing the text of all slices before."""
    text = ""
    for cut in cuts:
        merged = options.get("merged_tokens", False)
        found = generate(encode_text(prompt + text, merged_tokens=merged), cut, **options)
        text += found.text
        if found.finish_reason == "stop":
            break
    return text


@given(TEXTS, CUTS, st.booleans(), st.booleans())
def test_slices_by_token_ids_join_to_the_whole_text(
    prompt_text: str, cuts: Sequence[int], merged: bool, thinks: bool
) -> None:
    prompt = [ROLES["user"], *encode_text(prompt_text), *([THINK_START] if thinks else [])]
    whole = generate(prompt, sum(cuts), merged_tokens=merged)
    slices = generate_by_ids(prompt, cuts, merged_tokens=merged)
    assert [token for each in slices for token in each.token_ids] == whole.token_ids
    assert "".join(each.text for each in slices) == whole.text
    assert slices[-1].finish_reason == whole.finish_reason


@given(TEXTS.filter(bool), CUTS)
def test_slices_by_text_are_a_begin_of_the_whole_text_with_tokens_of_one_byte(
    prompt: str, cuts: Sequence[int]
) -> None:
    whole = generate(encode_text(prompt), sum(cuts)).text
    # Bytes that a slice withholds are generated again by the next one.
    joined = generate_by_text(prompt, cuts)
    assert whole.startswith(joined)
    assert len(whole.encode()) - len(joined.encode()) <= 3 * len(cuts)


def test_slices_by_text_yield_another_text_with_merged_tokens() -> None:
    whole = generate(encode_text("a story", merged_tokens=True), 200, merged_tokens=True, end_probability=0)
    differing = 0
    for length in range(10, 60):
        joined = generate_by_text("a story", [length] * 6, merged_tokens=True, end_probability=0)
        size = min(len(joined), len(whole.text))
        differing += joined[:size] != whole.text[:size]
    assert differing == 50
    used = set(generate(PROMPT, 20_000, merged_tokens=True, end_probability=0).token_ids)
    assert len([token for token in used if token > THINK_END]) == len(MERGED)


@pytest.mark.parametrize("merged", [False, True])
@given(text=TEXTS | st.just("a<think>b</think>é漢字 the"))
def test_text_survives_its_tokens(merged: bool, text: str) -> None:
    assert decode_tokens(encode_text(text, merged_tokens=merged)) == text


@given(st.integers(0, len(PROMPT) - 1), st.integers(0, 255), st.booleans())
def test_every_token_of_the_prompt_changes_the_text(place: int, token: int, merged: bool) -> None:
    changed = [*PROMPT[:place], token, *PROMPT[place + 1 :]]
    options: dict[str, Any] = {"merged_tokens": merged, "end_probability": 0}
    same = generate(changed, 30, **options).token_ids == generate(PROMPT, 30, **options).token_ids
    assert same == (changed == PROMPT)


def test_model_and_sampling_change_the_text() -> None:
    texts = {
        generate_text(model, PROMPT, max_tokens=40, sampling=sampling, end_probability=0).text
        for model in ("a", "b")
        for sampling in (b"", b'{"seed":1}', b'{"seed":2}')
    }
    assert len(texts) == 6


def test_text_has_characters_of_all_lengths_and_is_valid() -> None:
    text = generate(max_tokens=20_000, end_probability=0).text
    assert {len(character.encode()) for character in text} == {1, 2, 3, 4}
    assert {" ", "\n", "é", "ß", "€", "漢", "字", "\u0301", "\u2028", '"', "\\"} <= set(text)
    assert "\u200d👩" in text
    assert "\ufffd" not in text


@pytest.mark.parametrize("start", [b"\xc3", b"\xe0", b"\xed", b"\xef\xbf", b"\xf0", b"\xf4", b"\xf4\x8f\xbf"])
def test_any_incomplete_character_of_a_prompt_is_completed(start: bytes) -> None:
    found = generate([*PROMPT, *start], 40)
    assert "\ufffd" not in found.text
    assert found.text.encode().startswith(start)


class TestEndInsideACharacter:
    @staticmethod
    def cut_inside(size: int) -> tuple[list[int], str]:
        """Return the tokens up to the first byte of a character of this many bytes, and the whole text."""
        whole = generate(end_probability=0)
        at = next(at for at, each in enumerate(whole.text) if len(each.encode()) == size)
        return whole.token_ids[: len(whole.text[:at].encode()) + 1], whole.text

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_bytes_are_withheld_and_the_next_text_begins_with_the_character(self, size: int) -> None:
        tokens, whole = self.cut_inside(size)
        first = generate(max_tokens=len(tokens), end_probability=0)
        assert first.token_ids == tokens
        assert whole.startswith(first.text)
        rest = generate([*PROMPT, *tokens], LENGTH - len(tokens), end_probability=0)
        assert len(rest.text[0].encode()) == size
        assert first.text + rest.text == whole

    def test_option_writes_the_replacement_character_on_both_sides(self) -> None:
        tokens, whole = self.cut_inside(3)
        first = generate(max_tokens=len(tokens), end_probability=0, replaces_incomplete=True)
        rest = generate([*PROMPT, *tokens], 40, end_probability=0, replaces_incomplete=True)
        assert first.text[-1] == rest.text[0] == "\ufffd"
        assert whole.startswith(first.text[:-1])
        assert rest.text.lstrip("\ufffd")[:5] in whole


class TestStop:
    WHOLE = generate(end_probability=0).text

    def test_text_is_cut_before_the_stop_string(self) -> None:
        stop = self.WHOLE[50:53]
        found = generate(stop=["not in it", stop], end_probability=0)
        at = self.WHOLE.index(stop)
        assert (found.text, found.finish_reason, found.stop_reason) == (self.WHOLE[:at], "stop", stop)
        assert decode_tokens(found.token_ids) == self.WHOLE[:at] + stop, "the tokens include the stop string"

    def test_stop_string_is_only_found_in_new_text(self) -> None:
        stop = self.WHOLE[50:54]
        for at, expected in ((self.WHOLE.index(stop), "stop"), (self.WHOLE.index(stop) + 1, "length")):
            prompt = [*PROMPT, *self.WHOLE[:at].encode()]
            assert generate(prompt, 20, stop=[stop], end_probability=0).finish_reason == expected

    def test_several_characters_at_once_are_searched(self) -> None:
        options: dict[str, Any] = {"merged_tokens": True, "end_probability": 0}
        whole = generate(**options).text
        for at in range(0, 60, 3):
            found = generate(stop=[whole[at : at + 2]], **options)
            assert found.text == whole[: whole.index(whole[at : at + 2])]


def test_text_ends_at_different_lengths() -> None:
    lengths = [len(generate([*PROMPT, number], 5_000).token_ids) for number in range(100)]
    assert len(set(lengths)) > 50
    assert 50 < sum(lengths) / 100 < 300  # 100 characters on average
    assert all(generate([*PROMPT, n], 5_000).token_ids[-1] == END for n in range(5))


def test_text_never_ends_if_its_end_has_no_probability() -> None:
    assert generate(max_tokens=5_000, end_probability=0).finish_reason == "length"


def test_cache_forgets_the_blocks_that_were_not_used_for_longest() -> None:
    cache = TokenCache(max_blocks=4)
    first, second = [1] * 33, [2] * 33
    cache.record_tokens("m", first)
    cache.record_tokens("m", second)
    assert (cache.count_cached("m", first), cache.count_cached("m", second)) == (32, 32)
    assert cache.count_cached("m", first) == 32
    cache.record_tokens("m", [3] * 16)
    # The begin of the second one is gone, without which its other block is of no use.
    assert (cache.count_cached("m", first), cache.count_cached("m", second)) == (32, 0)


def test_reasoning_ends_before_the_text() -> None:
    draws = random.Random(1)
    for _ in range(20):
        prompt = [ROLES["assistant"], THINK_START, draws.randrange(128)]
        tokens = generate(prompt, 5_000).token_ids
        assert tokens[-1] == END
        assert tokens.count(THINK_END) == 1
        assert max(tokens) < VOCABULARY_SIZE
