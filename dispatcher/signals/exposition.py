"""Prometheus' text format and OpenMetrics, read in slices: only the wanted series are decoded.

An EPP's page grows with its pods and flows to several megabytes, of which a dozen lines matter. Every line
is looked at once by a prefix test in C; the few that pass are decoded with the format's own rules. A page
that breaks those rules where it matters is refused whole: half a page must not pass for an idle pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

LINE_MAX_BYTES = 256 * 1024
"""Without this bound, a page with no line end would be copied again with each slice."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(,|(?=\}))')
_REST = re.compile(r"[ \t]*([^ \t#]+)(?:[ \t]+(-?[0-9.eE+-]+))?[ \t]*(?:#.*)?")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


class MalformedPageError(Exception):
    """The page is not what its format promises; the message is a sentence that quotes the spot."""


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class Page:
    """A page as it arrives: `feed` it slices of any size, then `close` it for the wanted samples.

    `open_metrics`: the page must end with `# EOF`. The text format has no end mark, so that there only a cut
    within a line is seen here; the HTTP client sees the others by the length.

    `also`: series that are nice to have, `also_most` of them: a flaw in those refuses nothing, and is told by
    `spoiled`.
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
        """Why `also` is not all that the page has; empty: it is."""
        self.size_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next slice. Raises MalformedPageError."""
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
        """The wanted samples, in the page's order. Raises MalformedPageError where the page was cut."""
        # OpenMetrics lets the end mark stand without a line end.
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
            return None  # a longer name that begins like a wanted one
        labels, end = _labels(line, found.end())
        rest = _REST.fullmatch(line, end, len(line.rstrip("\r")))
        if rest is None:
            raise MalformedPageError(f"no value in: {_quote(raw)}")
        number = rest.group(1)
        try:
            # Python would take 1_0 for a number; the format does not.
            value = float(number.replace("_", "?"))
        except ValueError:
            raise MalformedPageError(f"not a number, {number[:40]!r}, in: {_quote(raw)}") from None
        return Sample(found.group(), labels, value)


def _labels(line: str, at: int) -> tuple[dict[str, str], int]:
    """The labels that start at a position of a line, and where they end."""
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
    # Unknown escapes stay as they are, as Prometheus' own parser has it.
    return _ESCAPED.get(found.group(1), found.group())


def _quote(line: bytes) -> str:
    text = line[:120].decode("utf-8", "replace")
    return repr(text + ("…" if len(line) > 120 else ""))
