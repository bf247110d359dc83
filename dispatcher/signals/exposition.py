"""Parse metrics pages in Prometheus' text format and OpenMetrics, and decode only the requested series.

The page of an endpoint picker grows with its pods and flows to several megabytes, and a dozen lines of it
matter. Each line is tested once for a prefix, which is done in C. The few lines that pass are decoded by the
rules of the format. A page that breaks the rules in such a line is rejected as a whole: half a page must not
look like an idle pool.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LINE_MAX_BYTES = 256 * 1024
"""Largest size of a line. Without this bound, a page without line ends would be copied with each slice."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(,|(?=\}))')
_REST = re.compile(r"[ \t]*([^ \t#]+)(?:[ \t]+(-?[0-9.eE+-]+))?[ \t]*(?:#.*)?")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


class MalformedPageError(Exception):
    """The page breaks the rules of its format. The message is a sentence that quotes the place."""


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class OptionalSeries:
    """Series that are read if possible. An error in them does not reject the page."""

    names: frozenset[str]
    max_samples: int
    """Largest number of samples that are read. If there are more, none is used."""
    description: str
    """Description of the series for a message."""


@dataclass(slots=True)
class OptionalSamples:
    """Samples of optional series."""

    samples: list[Sample] = field(default_factory=list)
    problem: str = ""
    """Why `samples` is not complete. Empty if it is."""


class PageParser:
    """Parser for a page that arrives in slices: call `feed` with each slice, and `close` at the end.

    If `open_metrics` is true, the page must end with `# EOF`. The text format has no end mark, so that only a
    page that is cut within a line is noticed here. The HTTP client notices other cuts by the length.

    `optional` are groups of series that are read if possible. Each has its own samples and its own problem.
    """

    def __init__(
        self,
        required_names: Iterable[str],
        *,
        open_metrics: bool = False,
        optional: Iterable[OptionalSeries] = (),
    ) -> None:
        required = frozenset(required_names)
        self.optional = {series: OptionalSamples() for series in optional}
        self._names = required.union(*(series.names for series in self.optional))
        self._required_prefixes = tuple(name.encode() for name in sorted(required))
        self._prefixes = tuple(name.encode() for name in sorted(self._names))
        self._optional_prefixes = [
            (tuple(name.encode() for name in sorted(series.names)), series) for series in self.optional
        ]
        self._open_metrics = open_metrics
        self._partial_line = b""
        self._last_line = b""
        self.samples: list[Sample] = []
        self.size_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse the next slice. Raises MalformedPageError."""
        self.size_bytes += len(data)
        lines = (self._partial_line + data).split(b"\n")
        self._partial_line = lines.pop()
        if len(self._partial_line) > LINE_MAX_BYTES:
            raise MalformedPageError(f"a line longer than {LINE_MAX_BYTES} bytes")
        prefixes = self._prefixes
        for line in [line for line in lines if line.startswith(prefixes)]:
            self._parse_line(line)
        if lines:
            self._last_line = lines[-1]

    def close(self) -> list[Sample]:
        """Return the requested samples in the order of the page. Raises MalformedPageError if it was cut."""
        # OpenMetrics allows the end mark without a line end.
        if self._open_metrics and self._partial_line.rstrip() == b"# EOF":
            self._last_line, self._partial_line = self._partial_line, b""
        if self._partial_line.strip():
            raise MalformedPageError(f"the page ends within a line: {_quote_line(self._partial_line)}")
        if self._open_metrics and self._last_line.rstrip() != b"# EOF":
            raise MalformedPageError("the page ends without its end mark (# EOF)")
        return self.samples

    def _parse_line(self, line: bytes) -> None:
        if line.startswith(self._required_prefixes):
            if (sample := self._parse_sample(line)) is not None:
                self.samples.append(sample)
            return
        for prefixes, series in self._optional_prefixes:
            if line.startswith(prefixes):
                self._parse_optional(line, series, self.optional[series])

    def _parse_optional(self, line: bytes, series: OptionalSeries, found: OptionalSamples) -> None:
        if found.problem:
            return
        try:
            sample = self._parse_sample(line)
        except MalformedPageError as error:
            self._give_up(found, str(error))
            return
        if sample is not None:
            found.samples.append(sample)
            # A part of the samples would be misleading, so that too many mean none.
            if len(found.samples) > series.max_samples:
                self._give_up(found, f"more than {series.max_samples} {series.description}")
                found.samples.clear()

    def _give_up(self, found: OptionalSamples, problem: str) -> None:
        """Record why optional series cannot be used, and skip their lines in the following slices."""
        found.problem = problem
        read = [prefixes for prefixes, series in self._optional_prefixes if not self.optional[series].problem]
        self._prefixes = tuple(itertools.chain(self._required_prefixes, *read))

    def _parse_sample(self, raw: bytes) -> Sample | None:
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise MalformedPageError(f"a line that is not UTF-8: {_quote_line(raw)}") from None
        match = _NAME.match(line)
        if match is None or match.group() not in self._names:
            return None  # a longer name that begins with a requested one
        labels, end = _parse_labels(line, match.end())
        rest = _REST.fullmatch(line, end, len(line.rstrip("\r")))
        if rest is None:
            raise MalformedPageError(f"no value in: {_quote_line(raw)}")
        number = rest.group(1)
        try:
            # Python accepts 1_0 as a number; the format does not.
            value = float(number.replace("_", "?"))
        except ValueError:
            raise MalformedPageError(f"not a number, {number[:40]!r}, in: {_quote_line(raw)}") from None
        return Sample(match.group(), labels, value)


def _parse_labels(line: str, position: int) -> tuple[dict[str, str], int]:
    """Return the labels that start at a position of a line, and the position after them."""
    labels: dict[str, str] = {}
    while position < len(line) and line[position] in " \t":
        position += 1
    if not line.startswith("{", position):
        return labels, position
    position += 1
    while True:
        match = _LABEL.match(line, position)
        if match is None:
            break
        name, value, _ = match.groups()
        if name in labels:
            raise MalformedPageError(f"the label {name} twice in: {_quote_line(line.encode())}")
        labels[name] = _ESCAPE.sub(_unescape_char, value) if "\\" in value else value
        position = match.end()
    position += len(line[position:]) - len(line[position:].lstrip(" \t"))
    if not line.startswith("}", position):
        raise MalformedPageError(f"labels that do not end: {_quote_line(line.encode())}")
    return labels, position + 1


def _unescape_char(match: re.Match[str]) -> str:
    # Unknown escapes stay as they are, as in Prometheus' own parser.
    return _ESCAPED.get(match.group(1), match.group())


def _quote_line(line: bytes) -> str:
    text = line[:120].decode("utf-8", "replace")
    return repr(text + ("…" if len(line) > 120 else ""))
