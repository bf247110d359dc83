"""Patterns for names: the usual ones pass, and none that could hold the matcher up."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.settings.pattern_check import MAX_PATTERN_CHARS, pattern_fault

USUAL = [
    r"qwen-v(?P<version>\d+)",
    r"qwen-v(?P<version>\d+(?:\.\d+)*)",
    r"qwen-v(?P<version>[0-9]+(-rc[0-9]+)?)",
    r"org/(?P<version>[^/]+)",
    r"(?P<base>.+)-v(?P<version>\d+)",
    r"(?i)qwen(?!.*lora).*",
    r"qwen(-lora|-awq)?",
    r"(?:qwen|llama)-[0-9.]+",
    r"\w+-\d{8}",
    r"^qwen[.]?\Z",
    r"q(?>wen)-v[0-9]++",
    r"größe-[ä-ü]+-\S",
    r"(ab|a)c|d",
    r"(?:ab|cd)*e",
    r"[^a-c\d]x",
    r"\W\D\s.",
    r"q[^\W]*",
]
WRONG = [
    ("(", "is no regular expression: missing ), unterminated subpattern, at character 1"),
    (r"a{3,1}", "min repeat greater than max repeat"),
    (r"(?P<version>a)(?P<version>b)", "is no regular expression: redefinition of group name"),
    (r"a{1,99999999999999}", "it repeats too often, or nests too deep"),
    ("[[a]b", "is doubtful: Possible nested set"),
    ("q*", "matches the empty name"),
    ("q|", "matches the empty name"),
    ("", "matches the empty name"),
    ("q" * (MAX_PATTERN_CHARS + 1), "is longer than 500 characters"),
    (r"(a)\1", "refers to what a group matched before"),
    (r"(?P<v>x)(?(v)a|b)", "refers to what a group matched before"),
    (r"(?:(?=a){1000}){1000}a", "repeats what may match nothing"),
    (r"x(?:$)*", "repeats what may match nothing"),
]
SLOW = [
    r"(a+)+b",
    r"(?:a+?)+b",
    r"(?>(a+)+)b",
    r"(a|a)*b",
    r"(?:a|b|ab)*c",
    r"(?:a{0,3}a){50}b",
    r"(\w+\s?)+!",
    r"(?:\d+[.]?)*x",
    r"(?i:(?:[a-z]+K*)+)",
    r"x(?!(a+)+b).*",
    r"(([a-z])+.)+[A-Z]([a-z])+",
    r"(?:[^b]+a)*c",
    r"(?:\D+a|x)*c",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_the_usual_patterns_pass(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize(("pattern", "said"), WRONG)
def test_what_is_none_or_means_nothing_is_told(pattern: str, said: str) -> None:
    assert said in str(pattern_fault(pattern))


@pytest.mark.parametrize("pattern", SLOW)
def test_what_can_take_exponential_time_is_refused(pattern: str) -> None:
    assert "can take exponential time" in str(pattern_fault(pattern))


def test_what_goes_by_trial_thrice_is_refused() -> None:
    assert pattern_fault(".*qwen.*x") is None
    assert str(pattern_fault(".*qwen.*v.*x")).startswith("leaves open where 3 of its repeats and choices end")


@pytest.mark.parametrize("deep", ["(?:" * 90 + "a" + ")+" * 90, "(" * 249 + "a" + ")" * 249])
def test_a_deep_pattern_is_judged_soon(deep: str) -> None:
    began = time.process_time()
    pattern_fault(deep)
    assert time.process_time() - began < 5


def patterns() -> st.SearchStrategy[str]:
    plain = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\w", r"\d", "!", "1", "(?=a)", "(?!b)", "$"])
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "++", "{0,9}", "{3}", "{2,}"])).map(
                lambda two: f"(?:{two[0]}){two[1]}"
            ),
        ),
        max_leaves=8,
    )


@settings(max_examples=1500)
@given(patterns(), st.text("ab1!", max_size=6))
def test_what_passes_is_matched_soon(pattern: str, end: str) -> None:
    """An exponential one would take 2^200 steps here."""
    if pattern_fault(pattern) is not None:
        return
    compiled = re.compile(pattern)
    began = time.process_time()
    for start in ("a" * 200, "ab" * 100, "1" * 200):
        compiled.fullmatch(start + end)
    assert time.process_time() - began < 2


@settings(max_examples=1000)
@given(st.text(st.sampled_from("ab(|)*+?{},[]^-$\\1dwP<>:=!. é"), max_size=30) | st.text(max_size=30))
def test_whatever_is_written_is_judged(pattern: str) -> None:
    found = pattern_fault(pattern)
    assert found is None or (found and not found.endswith("."))
