"""`simulate`: a table for people, JSON for programs, a picture, and errors that say what to do."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dispatcher.standin.trace import BUNDLED
from tests.warm import warm_run

COMMAND = [sys.executable, "-m", "dispatcher", "simulate"]
ENVIRON = {**os.environ, "COLUMNS": "160", "TERM": "xterm-256color"}


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return warm_run("simulate", *arguments, env=ENVIRON, timeout_s=100)


def test_every_policy_has_a_row_and_the_columns_are_explained() -> None:
    done = simulate("--seconds", "60")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [line.split()[0] for line in lines[1:8]]
    assert names == ["all-knowing", "law", "point", "cap", "literal", "multiplier", "none"]
    assert "harvest" in lines[0]
    assert "harvest: batch tokens relative to" in done.stdout
    assert "\x1b" not in done.stdout, "no colours where there is no terminal"
    assert done.stderr == ""


def test_json_holds_every_figure_and_repeats_to_the_byte() -> None:
    arguments = ("--seconds", "60", "--policy", "law,none", "--queue-limit", "8", "--json", "--seed", "3")
    first, second = simulate(*arguments), simulate(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    answer = json.loads(first.stdout)
    assert [row["policy"] for row in answer["rows"]] == ["law", "none"]
    law, none = answer["rows"]
    assert 0.8 < law["harvest"] < 1.05
    assert none["harvest"] == 0
    assert none["latency_p50_ratio"] == 1.0
    assert answer["setting"]["queue_limit"] == 8
    for figure in ("over_mean", "over_worst", "wait_p50_s", "wait_p99_s", "refused", "refused_per_1000"):
        assert isinstance(law[figure], int | float)
    for figure in ("wait_mean_s", "wait_p99_s", "realtime_refused"):
        less = f"{figure.removesuffix('_s')}_less_none" + "_s" * figure.endswith("_s")
        assert law[less] == pytest.approx(law[figure] - none[figure], abs=1e-3)
        assert none[less] == 0
    assert answer["warnings"] == []


def test_realtime_that_lacks_slots_itself_is_told() -> None:
    done = simulate("--seconds", "60", "--slots", "16", "--policy", "law")
    assert done.returncode == 0
    assert "realtime alone needs more than 16 slots" in done.stderr
    assert "realtime alone" not in simulate("--seconds", "60", "--policy", "law").stderr


def test_azure_trace_gives_what_the_bundled_cut_gives(tmp_path: Path) -> None:
    original = tmp_path / BUNDLED.name
    lines = [line for line in BUNDLED.read_text().splitlines() if not line.startswith("#")]
    original.write_text("\n".join(["seconds,context_tokens,generated_tokens", *lines[1:]]))
    arguments = ("--seconds", "60", "--policy", "law", "--json")
    assert simulate("--trace", original, *arguments).stdout == simulate(*arguments).stdout


def test_running_requests_of_a_monitoring_system_serve_as_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "pool.csv"
    trace.write_text("time,running\n" + "".join(f"{15 * i},{10 + 10 * (i % 3)}\n" for i in range(9)))
    done = simulate("--trace", trace, "--slots", "40", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["law"]["harvest"] > 0.9
    assert rows["cap"]["harvest"] < rows["law"]["harvest"]


def test_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    done = simulate(
        "--seconds", "60", "--policy", "law,none", "--plot", tmp_path / "out.png", "--metrics-gap", "20:40"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    again = simulate(
        "--seconds", "60", "--policy", "law,none", "--plot", tmp_path / "again.png", "--metrics-gap", "20:40"
    )
    assert again.returncode == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "out.png").read_bytes()
    refused = simulate("--seconds", "10", "--plot", tmp_path / "nowhere" / "out.png")
    assert refused.returncode == 1
    assert "No such file" in refused.stderr


def test_missing_matplotlib_names_the_extra_to_install(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "sys.argv = ['batch-dispatcher', 'simulate', '--plot', 'out.png']\n"
        "from dispatcher.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "run.py"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'batch-dispatcher[plots]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "best"], "--policy best: no such policy; there are all, all-knowing, law"),
        (["--outage", "30"], "two numbers with a colon"),
        (["--outage", "30:20"], "ends before it starts"),
        (["--outage", "10:20", "--outage", "15:30"], "overlap"),
        (["--outage", "-5:20"], "starts at 0"),
        (["--pods-at", "10:1.5"], "not a number of pods"),
        (["--slots-at", "10:-1"], "not a number of slots"),
        (["--seconds", "5000"], "the trace is 900 s long"),
        (["--slots", "0"], "--slots"),
        (["--from", "900"], "nothing from 900 s on"),
        (["--steps", "0:ten"], "is not seconds:level"),
        (["--steps", "0:1", "--trace", "idle"], "in place of a trace"),
        (["--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--scrap", "1"], "--scrape"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(arguments: list[str], said: str) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_bad_trace_exits_2_and_names_the_line(tmp_path: Path) -> None:
    trace = tmp_path / "pool.csv"
    trace.write_text("time,running\n0,3\n15,lots\n")
    done = simulate("--trace", trace)
    assert done.returncode == 2
    assert f"{trace}:3: 'lots' is not a number" in done.stderr


def test_pressure_score_alone_is_warned_of() -> None:
    done = simulate(
        "--seconds", "30", "--policy", "law", "--detector", "utilization", "--signals", "saturation"
    )
    assert done.returncode == 0
    assert "pressure score" in done.stderr


def test_terminal_gets_colour_and_a_progress_bar_when_it_takes_long(tmp_path: Path) -> None:
    """A large pool takes seconds."""
    trace = tmp_path / "pool.csv"
    trace.write_text("time,running\n0,200\n150,400\n")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--trace", str(trace), "--slots", "600", "--policy", "law"],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=ENVIRON,
    )  # fmt: skip
    os.close(follower)
    seen = b""
    give_up_at = time.monotonic() + 100
    try:
        while time.monotonic() < give_up_at:
            if not select.select([leader], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # the other side is closed: the process has ended
                break
            seen += chunk
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert b"simulating" in seen
    assert b"\x1b[1;32m" in seen, "our own row stands out"
