"""Each trace format yields the expected traffic, and an invalid file is reported with its line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.lab.simulation.world import World, make_realtime_jobs
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.model import compute_work_s
from dispatcher.lab.standin.trace import (
    BUNDLED,
    RealtimeRequest,
    Recording,
    Trace,
    TraceError,
    load_trace,
    read_recording,
)

AZURE_CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write_trace(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def count_running_at(trace: Trace, slots: int, times: list[float]) -> list[int]:
    world = World(slots, realtime=make_realtime_jobs(trace))
    counts = []
    for time_s in times:
        world.advance(time_s)
        counts.append(world.observe_pool().running)
    return counts


def test_azure_trace_is_read_as_requests_from_time_zero(tmp_path: Path) -> None:
    trace = load_trace(write_trace(tmp_path, AZURE_CSV), slots=64)
    assert [(arrival.arrives_at, arrival.tokens) for arrival in trace.arrivals] == [
        (0.0, 44),
        (4.314579, 109),
    ]
    assert trace.arrivals[1].work_s == compute_work_s(396, 109)
    assert trace.seconds == 4.314579


def test_bundled_trace_has_900_seconds_and_its_attribution() -> None:
    trace = load_trace(BUNDLED, slots=64)
    assert len(trace.arrivals) == 4424
    assert 899 < trace.seconds <= 900
    head = BUNDLED.read_text().splitlines()[:3]
    assert "CC-BY" in "".join(head)
    assert "Splitwise" in "".join(head)


def test_bundled_trace_starts_like_the_original(tmp_path: Path) -> None:
    bundled = load_trace(BUNDLED, slots=64)
    original = load_trace(write_trace(tmp_path, AZURE_CSV), slots=64)
    assert bundled.arrivals[:2] == original.arrivals


def test_generated_requests_follow_the_recorded_number_of_running_requests(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "time,running\n0,10\n30,40\n60,40\n90,0\n")
    trace = load_trace(path, slots=64)
    times = [1.0, 10.0, 20.0, 45.0, 59.0, 75.0, 89.0]
    expected = [11, 20, 30, 40, 40, 20, 1]
    for counted, expected_count in zip(count_running_at(trace, 64, times), expected, strict=True):
        assert abs(counted - expected_count) <= 2


def test_generated_requests_have_the_usual_length_and_are_reproducible(tmp_path: Path) -> None:
    trace = load_trace(write_trace(tmp_path, "time,running\n0,20\n600,20\n"), slots=64)
    assert 20 * 600 / 3.4 * 0.8 < len(trace.arrivals) < 20 * 600 / 3.4 * 1.25
    assert trace.arrivals == load_trace(tmp_path / "trace.csv", slots=64).arrivals


def test_prometheus_series_are_summed_and_stale_samples_skipped(tmp_path: Path) -> None:
    answer = {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                {"metric": {"pod": "a"}, "values": [[1000, "4"], [1015, "4"], [1030, "NaN"]]},
                {"metric": {"pod": "b"}, "values": [[1000, "6"], [1015, "6"], [1030, "6"]]},
            ],
        },
    }
    trace = load_trace(write_trace(tmp_path, json.dumps(answer), "range.json"), slots=32)
    assert trace.seconds == 30
    assert count_running_at(trace, 32, [7.0, 14.0, 29.5]) == [10, 10, 6]


def test_iso_timestamps_are_accepted(tmp_path: Path) -> None:
    text = "time,running\n2026-01-01T00:00:00Z,3\n2026-01-01T00:01:00Z,3\n"
    trace = load_trace(write_trace(tmp_path, text), slots=8)
    assert trace.seconds == 60
    assert count_running_at(trace, 8, [30.0]) == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line with data"),
        ("a,b\n1,2\n", ":1: unknown columns a, b"),
        ("time,running\n", "two lines of data"),
        ("time,running\n0,1\n", "two lines of data"),
        ("time,running\n0,1\nnoon,2\n", ":3: 'noon' is not a time"),
        ("time,running\n0,1\n1,-2\n", ":3: '-2' is not a number that is 0 or more"),
        ("time,running\n0,1\n1,nan\n", ":3: 'nan' is not a number"),
        ("time,running\n0,1\n1\n", ":3: 1 columns, where column 2 is needed"),
        ("time,running\n5,1\n1,1\n", ":3: the time goes back"),
        ("time,running\n5,1\n5,1\n", "all lines have the same time"),
        ("# a comment\ntime,running\n0,1\ninf,1\n", ":4: 'inf' is not a time"),
        (AZURE_CSV + "2023-11-16 18:15:51,many,3\n", ":4: 'many' is not a number"),
        (AZURE_CSV + "2023-11-16 18:00:00,1,3\n", ":4: the time goes back"),
        ('{"data": \n [1,}', ":2: not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"status": "error", "error": "query timed out"}', "query timed out"),
        ('{"data": {"result": 3}}', "list of series"),
        ('{"data": {"result": [{"value": [1, "2"]}]}}', "result[0] has no `values`"),
        ('{"data": {"result": [{"values": [[1, "2"], [2]]}]}}', "result[0].values[1] is not [time, value]"),
        ('{"data": {"result": []}}', "0 samples"),
    ],
)
def test_invalid_trace_is_reported_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write_trace(tmp_path, text)
    with pytest.raises(TraceError) as error:
        load_trace(path, slots=64)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_missing_and_binary_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "nowhere.csv", slots=64)
    (tmp_path / "binary.csv").write_bytes(b"time\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8 text at byte 4"):
        load_trace(tmp_path / "binary.csv", slots=64)


def test_overlaid_copies_smooth_bursts() -> None:
    original = made_up_traffic.make_burst_trace(0)
    denser = made_up_traffic.overlay_copies(original, 4)
    assert count_in_fullest_second(original) < count_in_fullest_second(denser)
    assert count_in_fullest_second(denser) < 3 * count_in_fullest_second(original)
    assert len(denser.arrivals) == 4 * len(original.arrivals)
    times = [arrival.arrives_at for arrival in denser.arrivals]
    assert times == sorted(times)


def count_in_fullest_second(trace: Trace) -> int:
    """Return the number of requests in the fullest second."""
    return max(Counter(int(arrival.arrives_at) for arrival in trace.arrivals).values())


def test_step_trace_holds_each_level_from_its_time_on() -> None:
    trace = made_up_traffic.make_step_trace([(0.0, 0), (10.0, 40), (30.0, 20)], slots=64)
    # Requests that start together find a pool that is filling up: the first of them run a little faster.
    assert count_running_at(trace, 64, [5.0, 11.0, 29.0, 31.0, 100.0]) == pytest.approx(
        [0, 40, 40, 20, 20], abs=4
    )


def test_cut_start_keeps_the_rest_of_the_trace() -> None:
    rest = made_up_traffic.cut_start(load_trace(BUNDLED, slots=64), 600.0)
    assert rest.seconds == pytest.approx(300, abs=1)
    assert 0 <= rest.arrivals[0].arrives_at < 5
    with pytest.raises(TraceError, match="nothing from"):
        made_up_traffic.cut_start(rest, 300.0)


GRAFANA_CSV = """\
"Time","sum(vllm:num_requests_running)","pod b"
"2026-03-01 12:00:00",3,
"2026-03-01 12:00:15",4,1
"2026-03-01 12:00:30",,
"2026-03-01 12:00:45",NaN,2
"""


def test_columns_of_a_grafana_download_are_summed(tmp_path: Path) -> None:
    assert read_recording(write_trace(tmp_path, GRAFANA_CSV)).points == [(0, 3), (15, 5), (45, 2)]
    in_ms = "sep=,\nTime,a\n1772366400000,3\n1772366415000,5\n"
    assert read_recording(write_trace(tmp_path, in_ms)).points == [(0, 3), (15, 5)]


def test_grafana_value_with_a_unit_is_rejected_with_its_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "Time,a\n2026-03-01 12:00:00,3\n2026-03-01 12:00:15,4 req\n")
    with pytest.raises(TraceError, match=r":3: '4 req' is not a number"):
        read_recording(path)


@given(st.lists(st.floats(0, 50), min_size=2, max_size=60), st.integers(1, 20))
def test_cut_busiest_keeps_the_interval_with_most_running_requests(levels: list[float], samples: int) -> None:
    recording = Recording("levels", points=[(15.0 * i, level) for i, level in enumerate(levels)])
    cut = recording.cut_busiest(15.0 * samples)
    if samples >= len(levels) - 1:
        assert cut is recording
        return
    assert cut.seconds == 15.0 * samples

    def area(points: Sequence[tuple[float, float]]) -> float:
        return sum((n0 + n1) / 2 * (t1 - t0) for (t0, n0), (t1, n1) in pairwise(points))

    largest = max(area(recording.points[i : i + samples + 1]) for i in range(len(levels) - samples))
    assert area(cut.points) == pytest.approx(largest)


@given(st.lists(st.floats(0, 3600), min_size=2, max_size=60, unique=True))
def test_cut_busiest_keeps_at_least_as_many_requests_as_any_interval(times: list[float]) -> None:
    requests = [RealtimeRequest(at, 1.0, 1) for at in sorted(times)]
    recording = Recording("requests", requests=requests)
    cut = recording.cut_busiest(900.0)
    assert all(0 <= request.arrives_at <= 900.0 for request in cut.requests)
    if cut is not recording:
        largest = max(
            sum(end - 899 < request.arrives_at <= end for request in requests) for end in times if end >= 900
        )
        assert len(cut.requests) >= largest
