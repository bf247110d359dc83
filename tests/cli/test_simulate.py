"""`simulate` prints a table, JSON or a picture, and errors with a hint."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web

from dispatcher.lab.simulation.scenario_file import ScenarioFile, load_scenario
from dispatcher.lab.standin.trace import BUNDLED
from tests.fork_server import run_cli
from tests.paths import DOCS
from tests.signals.fakes import serving
from tests.support import wait_until_sync

COMMAND = [sys.executable, "-m", "dispatcher", "simulate"]
ENVIRON = {**os.environ, "COLUMNS": "160", "TERM": "xterm-256color"}


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_cli("simulate", *arguments, env=ENVIRON, timeout_s=100)


def test_table_has_a_row_for_every_policy_and_explains_its_columns() -> None:
    done = simulate("--seconds", "60", "--policy", "all")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [line.split()[0] for line in lines[1:8]]
    assert names == ["all-knowing", "dispatcher", "point", "cap", "literal", "multiplier", "none"]
    assert "utilization" in lines[0]
    assert "utilization: batch tokens relative to" in done.stdout
    assert "\x1b" not in done.stdout, "no colours where there is no terminal"
    assert done.stderr == ""


def test_table_describes_the_effect_on_users_and_ends_with_a_sentence() -> None:
    done = simulate("--seconds", "60")
    assert done.returncode == 0, done.stderr
    header, law, none, *_, last = done.stdout.splitlines()
    assert header.split()[:4] == ["policy", "tokens/s", "users'", "p50"]
    assert (law.split()[0], none.split()[0]) == ("dispatcher", "none")
    told = re.fullmatch(
        r"batch gets ([\d,]+) tokens/s; your users' p99 becomes ([\d.]+) × what it is, and for a slot it "
        r"waits ([\d.]+) s longer",
        last,
    )
    assert told is not None, last
    assert law.split()[1] == told[1]
    assert f"{told[2]} ×" in law
    assert f"+{told[3]} s" in law


def test_sweep_has_the_rows_of_single_runs_and_target_selects_one() -> None:
    arguments = ("--seconds", "60", "--json")
    done = simulate(*arguments, "--sweep", "reserve=.3,0,0.1", "--target", "latency p99 <= 1.40")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["reserve"] for row in answer["rows"]] == [0.0, 0.1, 0.3]
    alone = json.loads(simulate(*arguments, "--policy", "dispatcher", "--reserve", "0.1").stdout)["rows"][0]
    swept = answer["rows"][1]
    own = {
        "utilization",
        "overshoot_less_all_knowing",
        "reserve",
    }  # the ideal policy is not simulated again for each value
    assert {k: v for k, v in swept.items() if k not in own} == {
        k: v for k, v in alone.items() if k not in own
    }
    keeping = [row for row in answer["rows"] if row["latency_p99_ratio"] <= 1.40]
    assert answer["target"]["value"] == max(keeping, key=lambda row: row["batch_tokens_per_s"])["reserve"]
    assert answer["target"]["sentence"].startswith(
        f"choose reserve {answer['target']['value']:g}: batch gets "
    )


def test_unreachable_target_names_the_nearest_value() -> None:
    done = simulate("--seconds", "30", "--sweep", "reserve=0,.5", "--target", "p99 <= 1.01 and wait p99 <= 1")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        "no reserve of these keeps p99 <= 1.01 and wait p99 <= 1: 0.5 comes nearest, where "
    )


@pytest.mark.slow
def test_busiest_part_of_a_long_trace_is_played(tmp_path: Path) -> None:
    trace = tmp_path / "grafana.csv"
    levels = [(60 * minute, 18 if 30 <= minute <= 45 else 3) for minute in range(60)]
    lines = [f'"2026-03-01 12:{at // 60:02}:00",{level},' for at, level in levels]
    trace.write_text('"Time","sum(vllm:num_requests_running)","empty"\n' + "\n".join(lines) + "\n")
    done = simulate("--trace", trace, "--slots", "16", "--policy", "none", "--json")
    assert done.returncode == 0, done.stderr
    assert "59 min long: its busiest 15 min are played, 30 min after its beginning" in done.stderr
    assert "up to 18 requests running at once, and --slots is 16" in done.stderr
    played = json.loads(done.stdout)
    assert played["scenario"]["seconds"] == 900
    assert "1800 s" in played["trace"]
    assert (played["scenario"]["time_step_s"], played["scenario"]["requests_per_job"]) == (0.0, 1)
    whole = simulate("--trace", trace, "--slots", "200", "--policy", "none", "--json", "--set", "whole=true")
    setting = json.loads(whole.stdout)["scenario"]
    assert (setting["seconds"], setting["time_step_s"], setting["requests_per_job"]) == (59 * 60, 0.2, 2)
    assert whole.stderr.startswith("59 min are played in steps of 0.2 s, "), "no other output"
    assert (
        "with 2 batch requests going as one (--set time_step_s=0 --set requests_per_job=1: " in whole.stderr
    )
    assert whole.stderr.count("\n") == 1
    exact = simulate(
        "--trace", trace, "--slots", "200", "--policy", "none", "--json", "--set", "whole=true",
        "--set", "time_step_s=0", "--set", "requests_per_job=1",
    )  # fmt: skip
    setting = json.loads(exact.stdout)["scenario"]
    assert (setting["time_step_s"], setting["requests_per_job"]) == (0.0, 1)
    assert exact.stderr == ""


async def test_running_requests_are_read_from_prometheus(tmp_path: Path) -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append({**request.query, "token": request.headers.get("Authorization", "")})
        values = [[1_700_000_000 + 15 * i, str(4 + i % 3)] for i in range(12)]
        series = [{"metric": {}, "values": values}] if "sglang" in request.query["query"] else []
        data = {"resultType": "matrix", "result": series}
        return web.json_response({"status": "success", "data": data})

    token = tmp_path / "token"
    token.write_text("secret\n")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("token_file: token\n")  # relative to the file
    async with serving(answer) as port:
        url = f"http://127.0.0.1:{port}"
        done = await asyncio.to_thread(
            simulate,
            "--prometheus",
            url,
            "--last",
            "2h",
            "--scenario",
            scenario,
            "--policy",
            "none",
            "--json",
        )
        nothing = await asyncio.to_thread(simulate, "--prometheus", url, "--set", "query=sum(other)")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scenario"]["seconds"] == 165
    first, second, _ = asked
    assert (first["query"], second["query"]) == (
        "sum(vllm:num_requests_running)", "sum(sglang:num_running_reqs)",
    )  # fmt: skip
    assert first["token"] == "Bearer secret"
    assert float(first["end"]) - float(first["start"]) == 7200
    assert nothing.returncode == 2
    assert "there is nothing in the last 3h for sum(other)" in " ".join(nothing.stderr.split())


def test_errors_of_simulate_are_json_with_json_output() -> None:
    told = simulate("--policy", "best", "--json")
    assert (told.returncode, told.stdout) == (2, "")
    assert json.loads(told.stderr)["error"].startswith("--policy best: no such policy")


def test_ctrl_c_ends_all_processes() -> None:
    process = subprocess.Popen(
        [
            *(*COMMAND, "--slots", "512", "--set", "copies=8", "--set", "processes=2"),
            *("--sweep", "reserve=0,.1,.2"),
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=ENVIRON, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until_sync(lambda: len(children_of(process.pid)) == 2, 60)
        children = children_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) not in (0, None)
        wait_until_sync(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 10)
    finally:
        process.kill()
        process.wait()


def test_killed_command_leaves_no_process_behind() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--slots", "512", "--set", "copies=8", "--policy", "dispatcher"],
        stdout=subprocess.DEVNULL,
        env=ENVIRON,
    )
    try:
        wait_until_sync(lambda: len(children_of(process.pid)) >= 1, 60)
        children = children_of(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_until_sync(lambda: not any(_runs(child) for child in children), 60)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    """Return whether the process runs. A zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_json_contains_every_figure_and_is_reproducible() -> None:
    arguments = (
        "--seconds",
        "60",
        "--policy",
        "dispatcher,none",
        "--set",
        "queue_limit=8",
        "--json",
        "--seed",
        "3",
    )
    first, second = simulate(*arguments), simulate(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    answer = json.loads(first.stdout)
    assert [row["policy"] for row in answer["rows"]] == ["dispatcher", "none"]
    law, none = answer["rows"]
    assert 0.8 < law["utilization"] < 1.05
    assert none["utilization"] == 0
    assert none["latency_p50_ratio"] == 1.0
    assert answer["scenario"]["queue_limit"] == 8
    for figure in (
        "overshoot_mean",
        "overshoot_worst",
        "wait_p50_s",
        "wait_p99_s",
        "refused",
        "refused_per_1000",
    ):
        assert isinstance(law[figure], int | float)
    for figure in ("wait_mean_s", "wait_p99_s", "realtime_refused"):
        less = f"{figure.removesuffix('_s')}_less_none" + "_s" * figure.endswith("_s")
        assert law[less] == pytest.approx(law[figure] - none[figure], abs=1e-3)
        assert none[less] == 0
    assert answer["warnings"] == []


def test_slices_are_compared_with_whole_requests() -> None:
    done = simulate("--seconds", "120", "--batch-tokens", "2000", "--slice", "250")
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    waits = {row.split()[0]: float(row[header.index("wait p99") :].split()[0]) for row in rows[:3]}
    assert list(waits) == ["dispatcher", "whole", "none"]
    assert waits["whole"] > 2 * waits["dispatcher"]
    assert "slices of 250 tokens (later ones + 0.04 s)" in done.stdout
    sliced, whole = done.stdout.splitlines()[-2:]
    assert sliced.startswith("in slices of 250 tokens, batch gets ")
    assert whole.startswith("without slices, batch gets ")


def test_json_and_picture_show_slices_and_whole_requests(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    picture = tmp_path / "out.svg"
    done = simulate(
        "--seconds", "60", "--batch-tokens", "2000", "--slice", "250", "--json", "--plot", picture
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["policy"] for row in answer["rows"]] == ["dispatcher", "whole", "none"]
    assert (answer["scenario"]["slice_tokens"], answer["scenario"]["slice_overhead_s"]) == (250, 0.04)
    titles = [text for text in written_in(picture) if text.startswith(("dispatcher: ", "whole: "))]
    assert titles == ["dispatcher: this dispatcher", "whole: this dispatcher without slices"]
    assert any(text.endswith(", slices of 250 tokens") for text in written_in(picture))


def test_evicted_requests_have_a_column() -> None:
    done = simulate("--seconds", "120", "--batch-tokens", "2000", "--set", "evicts=true")
    assert done.returncode == 0, done.stderr
    header, dispatcher, none, *_ = done.stdout.splitlines()
    column = header.index("evicted") - 2
    assert int(dispatcher[column:].split()[0]) > 10
    assert int(none[column:].split()[0]) == 0
    assert "evicted: batch requests stopped for a realtime request" in done.stdout


def test_realtime_traffic_that_exceeds_the_slots_is_reported() -> None:
    done = simulate("--seconds", "60", "--slots", "16", "--policy", "dispatcher")
    assert done.returncode == 0
    assert "realtime alone needs more than 16 slots" in done.stderr
    assert "realtime alone" not in simulate("--seconds", "60", "--policy", "dispatcher").stderr
    told = simulate("--seconds", "60", "--slots", "16", "--policy", "dispatcher", "--json")
    assert "realtime alone needs more than 16 slots" in json.loads(told.stderr)["warning"]


def test_azure_trace_gives_the_same_result_as_its_bundled_part(tmp_path: Path) -> None:
    original = tmp_path / BUNDLED.name
    lines = [line for line in BUNDLED.read_text().splitlines() if not line.startswith("#")]
    original.write_text("\n".join(["seconds,context_tokens,generated_tokens", *lines[1:]]))
    arguments = ("--seconds", "60", "--policy", "dispatcher", "--json")
    assert simulate("--trace", original, *arguments).stdout == simulate(*arguments).stdout


def test_recorded_running_requests_are_accepted_as_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "pool.csv"
    trace.write_text("time,running\n" + "".join(f"{15 * i},{10 + 10 * (i % 3)}\n" for i in range(9)))
    done = simulate("--trace", trace, "--slots", "40", "--policy", "dispatcher,cap", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["dispatcher"]["utilization"] > 0.9
    assert rows["cap"]["utilization"] < rows["dispatcher"]["utilization"]


@pytest.mark.slow
def test_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    done = simulate(
        "--seconds",
        "60",
        "--policy",
        "dispatcher,none",
        "--plot",
        tmp_path / "out.png",
        "--set",
        "gaps=20:40",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    again = simulate(
        "--seconds",
        "60",
        "--policy",
        "dispatcher,none",
        "--plot",
        tmp_path / "again.png",
        "--set",
        "gaps=20:40",
    )
    assert again.returncode == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "out.png").read_bytes()
    refused = simulate("--seconds", "10", "--plot", tmp_path / "nowhere" / "out.png")
    assert refused.returncode == 1
    assert "No such file" in refused.stderr


def written_in(picture: Path) -> list[str]:
    """Return the texts of an SVG in the order of drawing."""
    return re.findall(r"<!-- (.+?) -->", picture.read_text())


def test_timelines_name_policies_as_the_table_does_and_share_one_scale(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    picture = tmp_path / "out.svg"
    done = simulate("--seconds", "60", "--policy", "all", "--plot", picture)
    assert done.returncode == 0, done.stderr
    policies = [line.split()[0] for line in done.stdout.splitlines()[1:8]]
    texts = written_in(picture)
    assert [sum(text.startswith(f"{policy}: ") for text in texts) for policy in policies] == [1] * 7
    assert any("cut off here" in text for text in texts), "one series exceeds the scale"
    axes = picture.read_text().split('<g id="axes_')[1:]
    scales = {tuple(re.findall(r"<!-- (\d+) -->", each.split("matplotlib.axis_")[2])) for each in axes}
    assert len(axes) == 7
    assert len(scales) == 1


def test_sweep_is_drawn_with_gain_and_cost_of_each_value(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    picture = tmp_path / "out.svg"
    wanted = ("--seconds", "60", "--sweep", "reserve=.05,.3,.4", "--policy", "dispatcher,cap", "--json")
    done = simulate(*wanted, "--plot", picture)
    assert done.returncode == 0, done.stderr
    added = [row["latency_p95_less_none_s"] for row in json.loads(done.stdout)["rows"][::2]]
    assert added == sorted(added, reverse=True)
    assert added[0] > added[-1] > 0
    texts = written_in(picture)
    for text in ("0.05", "0.3", "0.4", "reserve"):
        assert texts.count(text) >= 2, f"{text} is below both panels"
    assert {"batch work, tokens/s", "additional realtime latency, p95, s"} <= set(texts)
    assert [text for text in texts if text.startswith(("dispatcher: ", "cap: "))] == [
        "dispatcher: this dispatcher",
        "cap: at most H requests in flight",
    ]


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
        (["--sweep", "slots=1,2"], "cannot be swept; reserve, scrape_s"),
        (["--sweep", "reserve=0,1.5"], "'1.5' is not a number from 0 to 0.99"),
        (["--sweep", "reserve="], "give 1 to 100 values"),
        (["--target", "fast"], "is no target; one is p99 <= 1.2"),
        (["--target", "wait <= 1 and p99 <= 0.5"], "p99 <= 0.5 cannot be kept: "),
        (["--prometheus", "http://127.0.0.1:9", "--last", "soon"], "--last soon: give 1m to 31d"),
        (["--prometheus", "http://127.0.0.1:9", "--trace", "idle"], "give one of them"),
        (["--prometheus", "http://u:secret@127.0.0.1:9"], "--prometheus http://…@127.0.0.1:9: "),
        (["--policy", "best"], "--policy best: no such policy; there are all, all-knowing, dispatcher"),
        (["--set", "outages=30"], "--set: outages: give two numbers with a colon between them"),
        (["--set", "outages=30:20"], "ends before it starts"),
        (["--set", "outages=10:20,15:30"], "overlap"),
        (["--set", "outages=-5:20"], "starts at 0"),
        (["--set", "pods_at=10:1.5"], "give whole numbers from 0 on instead of 1.5"),
        (["--set", "slots_at=10:-1"], "give whole numbers from 0 on instead of -1"),
        (["--set", "deaths=soon"], "give times in seconds"),
        (["--set", "scrap_s=1"], "--set: scrap_s: unknown key (did you mean scrape_s?)"),
        (["--set", "detector=epp"], "must be one of utilization, concurrency"),
        (["--set", "scrape_s"], "is not KEY=VALUE"),
        (["--seconds", "5000"], "the trace is 900 s long"),
        (["--slots", "0"], "--slots: must be at least 1, not 0"),
        (["--set", "requests_per_job=7"], "more than a tenth of a pod's slots; 6 at the most"),
        (["--set", "requests_per_job=2", "--set", "pods=100"], "1 at the most"),
        (["--set", "from_s=900"], "nothing from 900 s on"),
        (["--set", "steps=0:ten"], "is not seconds:level"),
        (["--set", "steps=0:1", "--trace", "idle"], "trace, steps and prometheus: give one of them"),
        (["--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--scenario", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--slice", "0"], "--slice: must be at least 1, not 0"),
        (["--slice", "250", "--set", "batch_seconds=1"], "leave out batch_seconds"),
        (["--set", "kv_tokens=1000", "--set", "batch_seconds=1"], "kv_tokens needs requests with tokens"),
        (["--set", "batch_mix=.5:500"], "give a share, context tokens and tokens, such as 0.5:500:145"),
        (["--set", "batch_mix=1.5:500:145"], "the share is from 0 to 1"),
        (["--set", "batch_mix=.5:500:0"], "the tokens from 1 on"),
        (["--set", "batch_mix=.5:500:145", "--set", "batch_seconds=1"], "batch_mix needs requests with"),
        (["--policy", "whole"], "without --slice, dispatcher sends requests whole as well"),
        (["--set", "revokes_slices=true"], "set slice_tokens, too"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(arguments: list[str], said: str) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_scenario_file_is_played_and_options_override_it(tmp_path: Path) -> None:
    scenario = tmp_path / "night.yaml"
    scenario.write_text(
        "slots: 32\nseconds: 30\nslots_at: 10:16, 20:24\ndetector: none\nreserve: 0.5\nbatch_mix: 1:5:14\n"
    )
    done = simulate(
        "--scenario", scenario, "--reserve", "0.1", "--set", "lag_s=0.2", "--policy", "none", "--json"
    )
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)["scenario"]
    expected = {"slots": 32, "seconds": 30, "slots_at": [[10, 16], [20, 24]], "detector": "none"}
    assert played == played | expected | {"reserve": 0.1, "lag_s": 0.2}
    assert played["batch"]["mix"] == [1, 5, 14]


def test_problems_of_a_scenario_file_have_their_lines(tmp_path: Path) -> None:
    scenario = tmp_path / "night.yaml"
    scenario.write_text("slots: many\n\nscrap_s: 5\noutages: 30\n")
    done = simulate("--scenario", scenario)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "night.yaml: line 1: slots: a whole number is expected",
        "night.yaml: line 3: scrap_s: unknown key (did you mean scrape_s?)",
        "night.yaml: line 4: outages: give two numbers with a colon between them, such as 300:360",
    ]


def test_documented_scenario_file_has_all_keys_with_their_defaults(tmp_path: Path) -> None:
    page = (DOCS / "reference" / "scenario-file.md").read_text()
    (text,) = re.findall(r"<!-- keys -->\n\n```yaml\n(.*?)```", page, re.DOTALL)
    documented = tmp_path / "scenario.yaml"
    documented.write_text(text)
    assert load_scenario(documented) == ScenarioFile()
    assert (
        set(re.findall(r"^(?:# )?([a-z_]+):(?: |$)", text, re.MULTILINE)) >= ScenarioFile.model_fields.keys()
    )


def test_bad_trace_exits_2_and_names_the_line(tmp_path: Path) -> None:
    trace = tmp_path / "pool.csv"
    trace.write_text("time,running\n0,3\n15,lots\n")
    done = simulate("--trace", trace)
    assert done.returncode == 2
    assert f"{trace}:3: 'lots' is not a number" in done.stderr


def test_pressure_score_as_only_signal_gives_a_warning() -> None:
    done = simulate("--seconds", "30", "--policy", "dispatcher", "--set", "signals=saturation")
    assert done.returncode == 0
    assert "pressure score" in done.stderr


@pytest.mark.slow
def test_terminal_shows_colour_and_a_progress_bar_for_long_runs(tmp_path: Path) -> None:
    """The simulation of a large pool takes seconds."""
    trace = tmp_path / "pool.csv"
    trace.write_text("time,running\n0,200\n150,400\n")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--trace", str(trace), "--slots", "600", "--policy", "dispatcher"],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=ENVIRON | {"COLUMNS": "80"},
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
    assert b"\x1b[32m\x1b[1m" in seen, "the row of this dispatcher stands out"
    written = re.sub(r"\x1b\[[0-9;]*[mK]", "", seen.decode()).replace("\r\n", "\n").splitlines()
    shown = [line.rpartition("\r")[2] for line in written]
    assert any(line.startswith("batch gets") for line in shown)
    assert max(map(len, shown)) <= 80, "broken between words, not by the terminal"
