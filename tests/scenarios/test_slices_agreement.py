"""Real processes have the figures that the simulator computes for slices.

The same bursts of realtime requests are played in virtual time, and in real time with stand-in servers over
HTTP, a queue server and dispatchers as processes. Batch requests of 2,000 tokens are sent whole, in slices,
and in slices that are revoked. Tokens per second, and what batch requests add to the mean and to the p99 of
the wait of realtime requests, agree within 10 %.

All worlds have the same realtime traffic. Each has other batch requests, and is read at other moments, so
that its wait differs by about a tenth from that of the next. Therefore means over several worlds are compared
with means over simulations of the same batch requests. The mean of 12 live worlds has a standard error of its
own, up to 5 % of what is compared, and the tolerance is wider by two of them. Worlds whose event loop was
late, because the machine was busy, are left out.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import msgspec
import pytest

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.generation_api import GenerationConfig, parse_request
from dispatcher.lab.standin.model import BATCH_CONTEXT, compute_work_s
from dispatcher.lab.standin.prefixes import BLOCK_TOKENS, TokenCache
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from tests.scenarios.processes import Producer, Stage
from tests.support import has_passed, wait_until_sync

SLOTS, SLICE_TOKENS, RESERVE = 64, 250, 0.05
BATCH = BatchProfile(2000.0)
WORLDS, WORLDS_AT_ONCE = 12, 4
"""Minimum number of worlds of each kind, and how many of them run at the same time."""
MAX_ROUNDS = 5
"""Number of times that worlds are played, if the machine is too busy for most of them."""
PHASES, PROCESSES = 4, 2
"""Number of simulations of each live world, whose readings are at other moments, and how many run at once."""
START_S, WARMUP_S, MEASURED_S = 25.0, 60.0, 420.0
"""Time from the start of a world to its first batch requests, from these to the measurement, and its
duration."""
TOLERANCE = 0.1
LAG_S = 0.01
"""Time from a scrape until its reading counts, without the lag of the dispatcher's event loop."""
MAX_DELAY_S, MAX_DELAY_P99_S = 0.004, 0.06
"""Time by which requests of a world that counts ended late, on average and at the p99."""
MAX_LOOP_LAG_S, LOOP_LAG_INTERVAL_S = 0.03, 10.0
"""Largest mean of the lag of a dispatcher's event loop, and the interval of which a dispatcher reports the
longest lag. A dispatcher waits so much longer before a reading counts, and revokes slices later. So do
simulated ones."""
REQUESTS = 1000
"""More batch requests than a world answers."""
ENGINE = GenerationConfig(chunk_tokens=8)
SLICE_OVERHEAD_S = compute_work_s((1 + BLOCK_TOKENS) // 2, 0.0)
"""Time to the first token of a continued slice. The stand-in processes what it has no complete block of in
its prefix cache: between one token and a whole block."""


@dataclass(frozen=True)
class Way:
    """Way to send batch requests, in the scenario of a simulation and in the settings of a dispatcher."""

    scenario: Mapping[str, Any]
    slicing: Mapping[str, Any]


SLICES: dict[str, Any] = {"slice_tokens": SLICE_TOKENS, "slice_overhead_s": SLICE_OVERHEAD_S}
SLICING: dict[str, Any] = {
    "mode": "on",
    "tokens": SLICE_TOKENS,
    "min_tokens": SLICE_TOKENS + 1,
    "revoke": "off",
}
WAYS = {
    "whole": Way({}, {"mode": "off"}),
    "slices": Way(SLICES, SLICING),
    "revoked slices": Way({**SLICES, "revokes_slices": True}, {**SLICING, "stream": True, "revoke": "on"}),
}


@dataclass(frozen=True)
class Figures:
    """Figures of one world while it was measured, or their means over several worlds."""

    tokens_per_s: float
    """Tokens of answered batch requests."""
    wait_s: float
    """Mean wait of realtime requests."""
    p99_s: float
    """99th percentile of their wait."""

    def __str__(self) -> str:
        return f"{self.tokens_per_s:,.5g} tokens/s, wait {self.wait_s:.3f} s, p99 {self.p99_s:.3f} s"

    def divide(self, other: Figures) -> Figures:
        return Figures(
            self.tokens_per_s / other.tokens_per_s, self.wait_s / other.wait_s, self.p99_s / other.p99_s
        )

    def subtract_waits(self, other: Figures) -> Figures:
        return Figures(self.tokens_per_s, self.wait_s - other.wait_s, self.p99_s - other.p99_s)


def average(each: Iterable[Figures]) -> Figures:
    return Figures(*map(fmean, zip(*map(astuple, each), strict=True)))


def compute_standard_error(each: Sequence[Figures]) -> Figures:
    """Return the standard errors of the means."""
    columns = zip(*map(astuple, each), strict=True)
    return Figures(*(stdev(column) / math.sqrt(len(each)) for column in columns))


def assert_agreement(real: Figures, virtual: Figures, error: Figures) -> None:
    """Check that the figures of real processes agree with those of simulations. `error` is the standard error
    of the real ones."""
    for field in fields(Figures):
        tolerance = TOLERANCE * getattr(virtual, field.name) + 2 * getattr(error, field.name)
        difference = abs(getattr(real, field.name) - getattr(virtual, field.name))
        assert difference <= tolerance, f"{field.name}: {real} live, ± {error}; {virtual} simulated"


# ── simulated ────────────────────────────────────────────────────────────────────────────────────────────


def simulate_worlds(way: str | None, worlds: Sequence[LiveRun]) -> Figures:
    """Return the means over simulations of live worlds."""
    calls = [(run.number, LAG_S + run.loop_lag_s, phase) for run in worlds for phase in range(PHASES)]
    with ProcessPoolExecutor(PROCESSES) as pool:
        return average(pool.map(partial(run_simulation, way), *zip(*calls, strict=True)))


def run_simulation(way: str | None, number: int, lag_s: float, phase: int) -> Figures:
    """Return the figures of one simulation, without batch requests if there is no way to send them.

    The batch requests are those of the live world with this number.
    """
    policy = PolicyName.NONE if way is None else PolicyName.DISPATCHER
    # Readings are at whole seconds, so the traffic is shifted instead.
    offset_s = phase / PHASES
    trace = made_up_traffic.cut_start(made_up_traffic.make_burst_trace(0), START_S - offset_s)
    scenario = Scenario(
        slots=SLOTS,
        reserve=RESERVE,
        batch=BATCH,
        seed=number,
        lag_s=lag_s,
        max_age_s=60.0,
        seconds=offset_s + WARMUP_S,
        **({} if way is None else WAYS[way].scenario),
    )
    # The first run equals the beginning of the second.
    before = run_scenario(scenario, trace, policy)
    run = run_scenario(replace(scenario, seconds=scenario.seconds + MEASURED_S), trace, policy)
    # Requests that still wait at the end have a wait, but no latency.
    waits = sorted(run.waits[len(before.latencies) : len(run.latencies)])
    return Figures(
        (run.tokens - before.tokens) / MEASURED_S, fmean(waits), waits[round(0.99 * (len(waits) - 1))]
    )


def test_slices_take_as_long_at_the_stand_in_as_in_the_simulator() -> None:
    scenario, cache = Scenario(**SLICES), TokenCache()
    prompt, generated = [ord(character) for character in "r-1".ljust(BATCH_CONTEXT, ".")], list[int]()
    for max_tokens in (250, 133, 377, 240):
        tokens = [*prompt, *generated]
        body = {"model": "m", "prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True}
        request = parse_request(json.dumps(body).encode(), is_chat=False, config=ENGINE)
        answer = request.generate_answer(cache.count_cached("m", tokens))
        job = scenario.make_call(BATCH.context, 1000, len(generated), max_tokens)
        assert answer.token_count == job.tokens
        block_s = compute_work_s(BLOCK_TOKENS, 0.0) - compute_work_s(0, 0.0)
        assert answer.work_s == pytest.approx(job.work_s, abs=block_s / 2 if generated else 1e-9)
        cache.record_tokens("m", answer.list_tokens(answer.token_count))
        generated += answer.generation.token_ids
    assert len(generated) == 1000


# ── live ─────────────────────────────────────────────────────────────────────────────────────────────────


class LiveRun:
    """World, queue and dispatcher of one run of several that run at the same time.

    Without a way to send batch requests, there is no dispatcher.
    """

    def __init__(self, stage: Stage, way: str | None, number: int) -> None:
        self.way, self.number = way, number
        pool = f"{(way or 'none').replace(' ', '-')}-{number}"
        names = QueueNames(f"batch:{{{pool}}}:requests", f"batch:{{{pool}}}:results")
        self._producer = Producer(stage.producer.client, names)
        self._random = random.Random(f"{number}/batch")
        self._answered_before: set[str] = set()
        self._loop_lags_s: list[float] = []
        self._world = stage.world(
            pool=pool,
            slots=SLOTS,
            seconds="null",
            detector="utilization",
            kv_at_full=0.1,
            trace="bursts",
            **self._build_engine(),
        )
        self.started_at = time.monotonic()
        if way is None:
            return
        settings = stage.settings(
            self._world,
            max_sys=None,
            pool={"name": pool},
            queue={"lease_s": 30},
            budget={"per_endpoint": SLOTS, "reserve": RESERVE},
            signals={"interval_s": 1.0, "max_age_s": 60.0},
            slicing=WAYS[way].slicing,
        )
        # Dispatchers read the pool at regular intervals from their start.
        wait_until_time(self.started_at + number / WORLDS_AT_ONCE % 1.0)
        self._dispatcher = stage.dispatcher(settings)
        if self._is_sliced:
            # Until a dispatcher has checked the model, it sends requests whole.
            self._producer.add_members({self._build_member("first", 2 * SLICE_TOKENS): time.time() + 3600})
            wait_until_sync(self._is_checked, 30, what="the check of the model")

    def _build_engine(self) -> dict[str, str]:
        """Return the options of a world that generates text. It takes time when many requests start at once,
        and whole requests cost the same without it."""
        return {"generation": msgspec.json.encode(ENGINE).decode()} if self._is_sliced else {}

    @property
    def _is_sliced(self) -> bool:
        return self.way is not None and bool(WAYS[self.way].scenario)

    def _is_checked(self) -> bool:
        return [each["whole_reason"] for each in self._dispatcher.status()["sliced_models"]] == [""]

    def _build_member(self, id_: str, tokens: int) -> bytes:
        body = {
            "model": "m",
            # One token for each byte, and no beginning that another prompt has.
            "prompt": id_.ljust(BATCH_CONTEXT, "."),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return encode_member(id_, json.dumps(body).encode(), int(self.started_at) + 2**31)

    def submit_requests(self) -> None:
        if self.way is not None:
            self._producer.add_members(
                {
                    self._build_member(f"batch-{n:08d}", BATCH.draw_size(self._random)[1]): time.time() + 3600
                    for n in range(REQUESTS)
                }
            )

    def start_measurement(self) -> None:
        self._world.control(restart=True)
        self._answered_before = {*self._producer.collect()}

    def read_loop_lag(self) -> None:
        if self.way is not None:
            self._loop_lags_s.append(self._dispatcher.status()["loop_lag_s"])

    def end_measurement(self) -> None:
        pool = self._world.observed()["pool"]
        results = [
            result for id_, (result,) in self._producer.collect().items() if id_ not in self._answered_before
        ]
        tokens = sum(json.loads(result["payload"])["usage"]["completion_tokens"] for result in results)
        wait_s = pool["wait_s"]["realtime"]
        self.figures = Figures(tokens / MEASURED_S, wait_s["mean"], wait_s["p99"])
        self.delay_s: float = pool["delay_s"]["mean"]
        self.delay_p99_s: float = pool["delay_s"]["p99"]
        self.generated_tokens = pool["tokens"]["batch"]
        self.slices = sum(result.get("slices", 1) for result in results)
        self.results = len(results)
        self.revoked = 0.0
        if self.way is not None:
            assert self._producer.count_requests()["pending"] > 0, "the queue ran empty"
            assert not self._producer.count_requests()["dead"]
            self.revoked = self._dispatcher.metrics()["revoked_slices_total"]
            self._dispatcher.kill()

    @property
    def loop_lag_s(self) -> float:
        """Mean of the longest lags of the dispatcher's event loop."""
        return fmean(self._loop_lags_s or [0.0])

    @property
    def is_late(self) -> bool:
        return (
            self.delay_s > MAX_DELAY_S
            or self.delay_p99_s > MAX_DELAY_P99_S
            or self.loop_lag_s > MAX_LOOP_LAG_S
        )

    def __str__(self) -> str:
        return (
            f"{self.way}: {self.figures}; {self.results} answers in {self.slices} calls, {self.revoked:.0f} "
            f"revoked, {self.generated_tokens / MEASURED_S:,.0f} tokens/s of complete calls; "
            f"late by {1000 * self.delay_s:.1f} ms, p99 {1000 * self.delay_p99_s:.1f} ms, "
            f"dispatcher {1000 * self.loop_lag_s:.0f} ms"
        )


def wait_until_time(moment: float) -> None:
    if (remaining_s := moment - time.monotonic()) > 0:
        wait_until_sync(has_passed(moment), remaining_s + 1.0, every_s=0.02)


def run_live(stage: Stage, round_number: int) -> list[LiveRun]:
    """Play all worlds of a round at the same time."""
    numbers = range(round_number * WORLDS_AT_ONCE, (round_number + 1) * WORLDS_AT_ONCE)
    kinds: list[tuple[str | None, int]] = [(None, round_number)]
    kinds += [(way, number) for number in numbers for way in WAYS]
    runs, steps = [], list[tuple[float, Callable[[], None]]]()
    for way, number in kinds:
        # Some worlds get their first requests before the last ones have started.
        while steps and steps[0][0] <= time.monotonic():
            steps.pop(0)[1]()
        runs.append(run := LiveRun(stage, way, number))
        at = run.started_at + START_S
        steps += [
            (at, run.submit_requests),
            (at + WARMUP_S, run.start_measurement),
            (at + WARMUP_S + MEASURED_S, run.end_measurement),
        ]
        steps += [
            (at + WARMUP_S + interval * LOOP_LAG_INTERVAL_S, run.read_loop_lag)
            for interval in range(1, int(MEASURED_S / LOOP_LAG_INTERVAL_S))
        ]
        steps.sort(key=lambda each: each[0])
    for at, step in steps:
        wait_until_time(at)
        step()
    for run in runs:
        print(run)
    return runs


def play_until_enough(stage: Stage) -> dict[str | None, list[LiveRun]]:
    """Return the worlds that were not late. Play more of them until there are enough."""
    in_time: dict[str | None, list[LiveRun]] = {way: [] for way in (None, *WAYS)}
    for round_number in range(MAX_ROUNDS):
        for run in run_live(stage, round_number):
            if not run.is_late:
                in_time[run.way].append(run)
        if in_time[None] and all(len(in_time[way]) >= WORLDS for way in WAYS):
            return in_time
    counts = {way: len(runs) for way, runs in in_time.items()}
    pytest.fail(f"the machine is too busy: only {counts} worlds were in time")


# ── compared ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_simulated_slices_agree_with_real_processes(stage: Stage) -> None:
    runs = play_until_enough(stage)
    live = {way: average(run.figures for run in each) for way, each in runs.items()}
    errors = {way: compute_standard_error([run.figures for run in each]) for way, each in runs.items()}
    simulated = {way: simulate_worlds(way, each) for way, each in runs.items()}
    added = {
        way: (live[way].subtract_waits(live[None]), simulated[way].subtract_waits(simulated[None]))
        for way in WAYS
    }
    print(f"without batch requests: {live[None]} live; {simulated[None]} simulated")
    for way, (real, virtual) in added.items():
        print(f"added by {way}: {real} live; {virtual} simulated")
    for way, (real, virtual) in added.items():
        assert_agreement(real, virtual, errors[way])
    gains = [whole.divide(slices) for whole, slices in zip(added["whole"], added["slices"], strict=True)]
    assert astuple(gains[0]) == pytest.approx(astuple(gains[1]), rel=TOLERANCE)
