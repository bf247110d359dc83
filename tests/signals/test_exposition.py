"""The parser of metrics pages gives the same samples for all slice sizes, and rejects incomplete pages."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.signals.epp.series import SERIES_NAMES
from dispatcher.signals.exposition import LINE_MAX_BYTES, MalformedPageError, PageParser, Sample
from tests.signals.fakes import PAGES

WANTED_NAMES = ("queue_size", "pool:saturation")


def parse(text: str | bytes, *, open_metrics: bool = False, slice_bytes: int = 1 << 20) -> list[Sample]:
    data = text if isinstance(text, bytes) else text.encode()
    page = PageParser(WANTED_NAMES, open_metrics=open_metrics)
    for at in range(0, len(data), slice_bytes):
        page.feed(data[at : at + slice_bytes])
    return page.close()


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("queue_size 1", {}, 1),
        ("queue_size{} 1", {}, 1),
        ("queue_size\t{ }\t-1.5e3", {}, -1500),
        ('queue_size{a="x"} +Inf', {"a": "x"}, math.inf),
        ('queue_size {a="x" , b="y",} 2 1764000000000', {"a": "x", "b": "y"}, 2),
        (
            r'queue_size{a="quote \" brace } back\\slash line\nend"} 3',
            {"a": 'quote " brace } back\\slash line\nend'},
            3,
        ),
        (r'queue_size{a="un\known"} 3', {"a": r"un\known"}, 3),
        ('queue_size{a="ü","b"="x"} 3'.replace('"b"', "b"), {"a": "ü", "b": "x"}, 3),
        ('queue_size{a="# no comment"} 4 # {trace_id="t"} 1 2', {"a": "# no comment"}, 4),
        ("queue_size 5\r", {}, 5),
        ("pool:saturation 0.25 1764000000.123", {}, 0.25),
    ],
)
def test_line_is_parsed_by_the_rules_of_the_format(line: str, labels: dict[str, str], value: float) -> None:
    (sample,) = parse(line + "\n")
    assert sample.labels == labels
    assert sample.value == value


def test_nan_is_a_value() -> None:
    assert math.isnan(parse("queue_size NaN\n")[0].value)


@pytest.mark.parametrize("line", ["# queue_size 1", "queue_size_bytes 1", 'other{queue_size="1"} 1', ""])
def test_other_lines_are_ignored(line: str) -> None:
    assert parse(line + "\n") == []


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("queue_size\n", "no value"),
        ("queue_size{} \n", "no value"),
        ("queue_size one\n", "not a number"),
        ("queue_size 1_0\n", "not a number"),
        ("queue_size 1 2 3\n", "no value"),
        ('queue_size{a="x" 1\n', "labels that do not end"),
        ('queue_size{a="x} 1\n', "labels that do not end"),
        ("queue_size{a=x} 1\n", "labels that do not end"),
        ('queue_size{a="x",a="y"} 1\n', "the label a twice"),
        (b'queue_size{a="\xff"} 1\n', "not UTF-8"),
        ("queue_size 12", "ends within a line"),
        ("x" * (LINE_MAX_BYTES + 1), "a line longer"),
    ],
)
def test_malformed_page_is_rejected_with_the_reason(page: str | bytes, why: str) -> None:
    with pytest.raises(MalformedPageError, match=why):
        parse(page, slice_bytes=4096)


def test_openmetrics_page_without_end_marker_is_rejected() -> None:
    """Without the end marker, a page whose last lines were cut off would show an empty queue."""
    assert len(parse("queue_size 1\n# EOF\n", open_metrics=True)) == 1
    assert len(parse("queue_size 1\n# EOF", open_metrics=True)) == 1
    with pytest.raises(MalformedPageError, match="end mark"):
        parse("queue_size 1\n", open_metrics=True)


LABELS = st.dictionaries(st.sampled_from(["a", "b", "model_name"]), st.text(max_size=12), max_size=3)
NUMBERS = st.floats(allow_nan=False)


def render_line(labels: dict[str, str], value: float) -> str:
    escaped = {
        name: text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        for name, text in labels.items()
    }
    label_text = ",".join(f'{name}="{text}"' for name, text in escaped.items())
    return f"queue_size{{{label_text}}} {value!r}\n"


def is_utf8(labels: dict[str, str]) -> bool:
    return all(text.encode("utf-8", "ignore").decode() == text for text in labels.values())


@given(st.lists(st.tuples(LABELS.filter(is_utf8), NUMBERS), max_size=8), st.integers(1, 40))
def test_samples_do_not_depend_on_the_slice_size(
    samples: list[tuple[dict[str, str], float]], slice_bytes: int
) -> None:
    page = "# HELP queue_size x\n" + "".join(f"other 1\n{render_line(*each)}" for each in samples)
    parsed = parse(page, slice_bytes=slice_bytes)
    assert [(dict(sample.labels), sample.value) for sample in parsed] == samples


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_raise_only_malformed_page_error(data: bytes, open_metrics: bool) -> None:
    for page in (data, b"queue_size{" + data + b"\n", b"queue_size " + data + b"\n"):
        with contextlib.suppress(MalformedPageError):
            parse(page, open_metrics=open_metrics)


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.txt")), ids=lambda path: path.stem)
def test_recorded_pages_give_the_samples_of_the_reference_parser(path: Path) -> None:
    text = path.read_text()
    page = PageParser(SERIES_NAMES)
    page.feed(text.encode())
    found = {(each.name, frozenset(each.labels.items()), each.value) for each in page.close()}
    expected = {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in SERIES_NAMES
    }
    assert found == expected
    assert found
