"""Parse metrics pages in Prometheus' text format and OpenMetrics, and decode only the requested series.

The page of an endpoint picker grows with its pods and flows to several megabytes, of which a dozen lines
matter. Each line is tested once for a prefix, which is done in C. The few lines that pass are decoded by the
rules of the format. A page that breaks the rules in such a line is rejected as a whole: half a page must not
look like an idle pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


class Page:
    """Parser for a page that arrives in slices: call `feed` with each slice, and `close` at the end.

    If `open_metrics` is true, the page must end with `# EOF`. The text format has no end mark, so that only a
    page that is cut within a line is noticed here. The HTTP client notices other cuts by the length.

    `optional_names` are series that are read if possible, at most `max_optional` samples. An error in them
    does not reject the page; `optional_problem` describes it.
    """

    def __init__(
        self,
        wanted: Iterable[str],
        *,
        open_metrics: bool = False,
        also: Iterable[str] = (),
        also_most: int = 0,
    ) -> None:
        needed = frozenset(wanted)
        self._wanted = needed | frozenset(also)
        self._also_most = also_most
        self._needed = tuple(name.encode() for name in sorted(needed))
        self._prefixes = tuple(name.encode() for name in sorted(self._wanted))
        self._open_metrics = open_metrics
        self._rest = b""
        self._last = b""
        self.samples: list[Sample] = []
        self.also: list[Sample] = []
        self.spoiled = ""
        """Why `optional_samples` is not complete. Empty if it is."""
        self.size_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse the next slice. Raises MalformedPageError."""
        self.size_bytes += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_MAX_BYTES:
            raise MalformedPageError(f"a line longer than {LINE_MAX_BYTES} bytes")
        prefixes = self._prefixes
        for line in [line for line in lines if line.startswith(prefixes)]:
            self._take(line)
        if lines:
            self._last = lines[-1]

    def close(self) -> list[Sample]:
        """Return the requested samples in the order of the page. Raises MalformedPageError if it was cut."""
        # OpenMetrics allows the end mark without a line end.
        if self._open_metrics and self._rest.rstrip() == b"# EOF":
            self._last, self._rest = self._rest, b""
        if self._rest.strip():
            raise MalformedPageError(f"the page ends within a line: {_quote(self._rest)}")
        if self._open_metrics and self._last.rstrip() != b"# EOF":
            raise MalformedPageError("the page ends without its end mark (# EOF)")
        return self.samples

    def _take(self, line: bytes) -> None:
        if line.startswith(self._needed):
            if (sample := self._sample(line)) is not None:
                self.samples.append(sample)
            return
        if self.spoiled:
            return
        try:
            sample = self._sample(line)
        except MalformedPageError as error:
            self.spoiled = str(error)
            return
        if sample is not None:
            self.also.append(sample)
            # A part of the histograms would be misleading, so that too many mean none.
            if len(self.also) > self._also_most:
                self.spoiled = f"more than {self._also_most} series of requests' latencies"
                self.also.clear()

    def _sample(self, raw: bytes) -> Sample | None:
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise MalformedPageError(f"a line that is not UTF-8: {_quote(raw)}") from None
        found = _NAME.match(line)
        if found is None or found.group() not in self._wanted:
            return None  # a longer name that begins with a requested one
        labels, end = _labels(line, found.end())
        rest = _REST.fullmatch(line, end, len(line.rstrip("\r")))
        if rest is None:
            raise MalformedPageError(f"no value in: {_quote(raw)}")
        number = rest.group(1)
        try:
            # Python accepts 1_0 as a number; the format does not.
            value = float(number.replace("_", "?"))
        except ValueError:
            raise MalformedPageError(f"not a number, {number[:40]!r}, in: {_quote(raw)}") from None
        return Sample(found.group(), labels, value)


def _labels(line: str, at: int) -> tuple[dict[str, str], int]:
    """Return the labels that start at a position of a line, and the position after them."""
    labels: dict[str, str] = {}
    while at < len(line) and line[at] in " \t":
        at += 1
    if not line.startswith("{", at):
        return labels, at
    at += 1
    while True:
        found = _LABEL.match(line, at)
        if found is None:
            break
        name, value, _ = found.groups()
        if name in labels:
            raise MalformedPageError(f"the label {name} twice in: {_quote(line.encode())}")
        labels[name] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        at = found.end()
    at += len(line[at:]) - len(line[at:].lstrip(" \t"))
    if not line.startswith("}", at):
        raise MalformedPageError(f"labels that do not end: {_quote(line.encode())}")
    return labels, at + 1


def _unescape(found: re.Match[str]) -> str:
    # Unknown escapes stay as they are, as in Prometheus' own parser.
    return _ESCAPED.get(found.group(1), found.group())


def _quote(line: bytes) -> str:
    text = line[:120].decode("utf-8", "replace")
    return repr(text + ("…" if len(line) > 120 else ""))
