"""Realtime traffic for simulator and stand-ins, from files that operators have.

Requests with their tokens:
  - a CSV with TIMESTAMP, ContextTokens, GeneratedTokens (the Azure LLM inference traces)
  - a CSV with seconds, context_tokens, generated_tokens (the bundled extract of one of those)

Running requests over time, which the monitoring of any pool has:
  - a CSV with time, running (seconds or Unix time; or ISO 8601)
  - the download of a Grafana panel ("Time" and a column for each series); the series are summed
  - a Prometheus range query as JSON (`/api/v1/query_range`, resultType matrix); series are summed

For the second kind requests are generated so that, without batch requests in the pool, exactly the recorded
number of slots is in use at any time (with linear interpolation between samples). Each slot in use is a chain
of requests, each as long as the chat requests of the bundled trace are on average (lognormal around
MEAN_HOLD_S). The recorded requests were already slowed down by the recorded load. A generated request gets
the work that takes its duration under that load, so that it takes longer when batch requests run beside it.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from dispatcher.lab.standin.model import compute_slowdown, compute_work_s

BUNDLED = Path(__file__).parent / "data" / "azure-conv-900s.csv"
MEAN_HOLD_S = 3.4
HOLD_SIGMA = 0.7


NO_SAMPLE = {"", "null", "undefined", "NaN"}
"""Contents of cells without a value in downloads of Grafana."""
UNIX_MS_FROM = 1e11
"""Number above which a time is in milliseconds instead of seconds."""


class TraceError(Exception):
    """Error for a trace that cannot be used. The message has file, line, problem and remedy."""


@dataclass(frozen=True, slots=True)
class RealtimeRequest:
    """Realtime request: its arrival, and its duration in an empty pool."""

    arrives_at: float
    work_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Realtime requests in the order of their arrival. Times start at 0."""

    name: str
    arrivals: Sequence[RealtimeRequest]
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording of realtime traffic: the number of running requests over time, or single requests. Times
    start at 0."""

    name: str
    points: Sequence[tuple[float, float]] = ()
    requests: Sequence[RealtimeRequest] = ()
    starts_s: float = 0.0
    """Start of the recording within a longer one that it was cut from."""

    @property
    def seconds(self) -> float:
        return self.points[-1][0] if self.points else self.requests[-1].arrives_at

    @property
    def peak(self) -> float:
        """Maximum number of running requests, or 0 if only single requests are known."""
        return max((running for _, running in self.points), default=0.0)

    def make_trace(self, *, slots: int, seed: int = 0) -> Trace:
        """Make a trace. `slots` is the capacity of the recorded pool."""
        if self.points:
            trace = make_trace_from_counts(self.name, self.points, slots=slots, seed=seed)
        else:
            trace = Trace(self.name, self.requests, self.seconds)
        name = f"{self.name} from {self.starts_s:g} s" if self.starts_s else self.name
        return Trace(name, trace.arrivals, trace.seconds)

    def cut_busiest(self, seconds: float) -> Recording:
        """Return the period of this length with the highest load, or the whole recording if it is not
        longer."""
        if self.seconds <= seconds:
            return self
        if self.points:
            begin = _find_fullest(self.points, seconds)
            end = begin + seconds
            inside = [(at - begin, running) for at, running in self.points if begin < at < end]
            points = [
                (0.0, _interpolate_count(self.points, begin)),
                *inside,
                (seconds, _interpolate_count(self.points, end)),
            ]
            return Recording(self.name, points=points, starts_s=begin)
        begin = _find_most_work(self.requests, seconds)
        cut = [
            RealtimeRequest(each.arrives_at - begin, each.work_s, each.tokens)
            for each in self.requests
            # The tolerance keeps a request at the end in spite of rounding.
            if 0 <= each.arrives_at - begin <= seconds + 1e-9
        ]
        return Recording(self.name, requests=cut, starts_s=begin)


def load_trace(path: Path, *, slots: int, seed: int = 0) -> Trace:
    """Read a trace in any known format. `slots` is the capacity of the recorded pool.

    Raises TraceError.
    """
    return read_recording(path).make_trace(slots=slots, seed=seed)


def read_recording(path: Path) -> Recording:
    """Read a file in any known format. Raises TraceError."""
    try:
        # Files from Windows programs may start with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text at byte {error.start}") from error
    if text.lstrip()[:1] in ("{", "["):
        return _build_recording(path.name, _parse_prometheus(path, text))
    lines = [
        (number, row)
        for number, row in enumerate(csv.reader(text.splitlines()), 1)
        if row and not row[0].startswith(("#", "sep="))  # separator line for Excel, which Grafana can write
    ]
    if not lines:
        raise TraceError(f"{path}: no line with data")
    header_at, header = lines[0][0], [name.strip().lower() for name in lines[0][1]]
    match header:
        case ["timestamp", "contexttokens", "generatedtokens", *_]:
            return _parse_requests(path, lines[1:])
        case ["seconds", "context_tokens", "generated_tokens", *_]:
            return _parse_requests(path, lines[1:])
        case ["time" | "timestamp" | "seconds", "running", *_]:
            points = [(_parse_time(path, n, row, 0), _parse_number(path, n, row, 1)) for n, row in lines[1:]]
            return _build_recording(path.name, _check_ascending(path, lines[1:], points))
        case ["time", _, *_]:
            kept = [(line, point) for line in lines[1:] if (point := _sum_row(path, *line)) is not None]
            rows, sums = [line for line, _ in kept], [point for _, point in kept]
            return _build_recording(path.name, _check_ascending(path, rows, sums))
    raise TraceError(
        f"{path}:{header_at}: unknown columns {', '.join(header)}; a trace has the columns "
        "TIMESTAMP,ContextTokens,GeneratedTokens or time,running, or is what Grafana downloads (Time and a "
        "column for each series), or a Prometheus range query as JSON"
    )


def parse_recording(name: str, series: Sequence[Mapping[str, Any]]) -> Recording:
    """Build a recording from the series of a range query. Raises TraceError."""
    return _build_recording(name, _sum_series(name, series))


def _build_recording(name: str, points: Sequence[tuple[float, float]]) -> Recording:
    begin = points[0][0]
    return Recording(name, points=[(at - begin, running) for at, running in points])


def _find_fullest(points: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return the start of the period in which the interpolated number of requests has the largest mean."""
    areas = [0.0]
    for (t0, n0), (t1, n1) in itertools.pairwise(points):
        areas.append(areas[-1] + (n0 + n1) / 2 * (t1 - t0))
    times = [at for at, _ in points]

    def area_until(until: float) -> float:
        last = bisect.bisect_right(times, until) - 1
        at, running = points[last]
        return areas[last] + (running + _interpolate_count(points, until)) / 2 * (until - at)

    last = times[-1] - seconds
    # Only periods that start or end at a sample are tried.
    begins = [at for at in times if at <= last] + [at - seconds for at in times if at >= seconds]
    return max(sorted(begins), key=lambda begin: area_until(begin + seconds) - area_until(begin))


def _find_most_work(requests: Sequence[RealtimeRequest], seconds: float) -> float:
    """Return the start of the period whose requests have the most work."""
    best = work = begin = 0.0
    first = 0
    for each in requests:
        work += each.work_s
        # Sliding window over the requests, which are sorted by time.
        while each.arrives_at - requests[first].arrives_at >= seconds:
            work -= requests[first].work_s
            first += 1
        if work > best:
            best, begin = work, requests[first].arrives_at
    return min(begin, requests[-1].arrives_at - seconds)


def make_trace_from_counts(
    name: str, points: Sequence[tuple[float, float]], *, slots: int, seed: int = 0
) -> Trace:
    """Generate requests that use as many slots as the points (time, running) say."""
    seconds = points[-1][0]
    draws = random.Random(f"{seed}/{name}")
    # So that the mean of the lognormal distribution is MEAN_HOLD_S.
    mu = math.log(MEAN_HOLD_S) - HOLD_SIGMA**2 / 2
    arrivals: list[RealtimeRequest] = []
    for level in range(1, math.ceil(max(running for _, running in points) - 0.5) + 1):
        # Each level is one slot in use: a chain of requests fills every period in which it is.
        for start, end in _find_periods_above(points, level - 0.5):
            at = start
            while at < end:
                left = min(draws.lognormvariate(mu, HOLD_SIGMA), end - at)
                # Undoes the slowdown that the recorded load caused.
                running_now = min(max(1, round(_interpolate_count(points, at))), slots)
                # Tokens follow from the duration, at the speed of an empty pool.
                arrivals.append(
                    RealtimeRequest(at, left / compute_slowdown(running_now, slots), round(left / 0.012))
                )
                at += left
    arrivals.sort(key=lambda arrived: arrived.arrives_at)
    return Trace(name, arrivals, seconds)


def _find_periods_above(points: Sequence[tuple[float, float]], level: float) -> Iterator[tuple[float, float]]:
    """Yield the periods in which the interpolated number of requests is at or above the level."""
    since = points[0][0] if points[0][1] >= level else None
    for (t0, n0), (t1, n1) in itertools.pairwise(points):
        if (n0 >= level) == (n1 >= level):
            continue
        # Linear interpolation between the two samples.
        crossing = t0 + (t1 - t0) * (level - n0) / (n1 - n0)
        if since is None:
            since = crossing
        else:
            yield since, crossing
            since = None
    if since is not None:
        yield since, points[-1][0]


def _interpolate_count(points: Sequence[tuple[float, float]], at: float) -> float:
    after = bisect.bisect_right(points, at, lo=1, hi=len(points) - 1, key=itemgetter(0))
    (t0, n0), (t1, n1) = points[after - 1], points[after]
    return n0 if t1 <= t0 else n0 + (n1 - n0) * (at - t0) / (t1 - t0)


def _parse_requests(path: Path, lines: Sequence[tuple[int, list[str]]]) -> Recording:
    times = [(_parse_time(path, n, row, 0), 0.0) for n, row in lines]
    _check_ascending(path, lines, times)
    begin = times[0][0]
    arrivals: list[RealtimeRequest] = []
    for (n, row), (at, _) in zip(lines, times, strict=True):
        context, generated = (int(_parse_number(path, n, row, column)) for column in (1, 2))
        # Differences of Unix times have rounding errors below a microsecond; the same trace in seconds must
        # give the same bytes.
        arrivals.append(RealtimeRequest(round(at - begin, 6), compute_work_s(context, generated), generated))
    return Recording(path.name, requests=arrivals)


def _sum_row(path: Path, line: int, row: Sequence[str]) -> tuple[float, float] | None:
    """Sum a row of a Grafana download, in which an empty cell is a series without a sample."""
    cells = [column for column, cell in enumerate(row) if column and cell.strip() not in NO_SAMPLE]
    if not cells:
        return None
    return _parse_time(path, line, row, 0), math.fsum(
        _parse_number(path, line, row, column) for column in cells
    )


def _check_ascending(
    path: Path, lines: Sequence[tuple[int, list[str]]], points: Sequence[tuple[float, float]]
) -> Sequence[tuple[float, float]]:
    if len(points) < 2:
        raise TraceError(f"{path}: a trace needs two lines of data at least")
    for (n, _), before, after in zip(lines[1:], points, points[1:], strict=False):
        if after[0] < before[0]:
            raise TraceError(f"{path}:{n}: the time goes back; sort the trace by time")
    if points[-1][0] <= points[0][0]:
        raise TraceError(f"{path}: all lines have the same time")
    return points


def _parse_time(path: Path, line: int, row: Sequence[str], column: int) -> float:
    field = row[column].strip()
    try:
        at = float(field)
    except ValueError:
        try:
            moment = datetime.fromisoformat(field)
        except ValueError:
            raise TraceError(
                f"{path}:{line}: {field!r} is not a time; seconds or 2023-11-16 18:15:46.680 would be"
            ) from None
        at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(at):
        raise TraceError(f"{path}:{line}: {field!r} is not a time")
    return at / 1000 if at > UNIX_MS_FROM else at


def _parse_number(path: Path, line: int, row: Sequence[str], column: int) -> float:
    if len(row) <= column:
        raise TraceError(f"{path}:{line}: {len(row)} columns, where column {column + 1} is needed")
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise TraceError(f"{path}:{line}: {row[column]!r} is not a number that is 0 or more")
    return value


def _parse_prometheus(path: Path, text: str) -> Sequence[tuple[float, float]]:
    """Parse the points of a range query. Series are summed at each time at which they have a sample."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise TraceError(f"{path}{at}: not JSON: {why}") from error
    if isinstance(answer, dict) and answer.get("status") == "error":
        raise TraceError(f"{path}: Prometheus answered with an error: {answer.get('error')}")
    for key in ("data", "result"):
        answer = answer[key] if isinstance(answer, dict) and key in answer else answer
    if not (isinstance(answer, list) and all(isinstance(series, dict) for series in answer)):
        raise TraceError(f"{path}: not a Prometheus answer; expected data.result to be a list of series")
    return _sum_series(str(path), answer)


def _sum_series(where: str, answer: Sequence[Mapping[str, Any]]) -> Sequence[tuple[float, float]]:
    sums: dict[float, float] = {}
    for i, series in enumerate(answer):
        samples = series.get("values")
        if not isinstance(samples, list):
            raise TraceError(
                f"{where}: result[{i}] has no `values`; export a range query, not an instant one"
            )
        for sampled_at, value in _parse_samples(where, i, samples):
            sums[sampled_at] = sums.get(sampled_at, 0.0) + value
    if len(sums) < 2:
        raise TraceError(f"{where}: {len(sums)} samples; a trace needs two at least")
    return sorted(sums.items())


def _parse_samples(where: str, series: int, samples: Iterable[object]) -> Iterator[tuple[float, float]]:
    for i, sample in enumerate(samples):
        try:
            at, value = (float(part) for part in sample)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise TraceError(
                f"{where}: result[{series}].values[{i}] is not [time, value]: {sample!r}"
            ) from None
        if math.isfinite(at) and math.isfinite(value):  # NaN marks a stale series in Prometheus
            yield at, max(0.0, value)
