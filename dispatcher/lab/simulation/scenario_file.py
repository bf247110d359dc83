"""Scenario files of `batch-dispatcher simulate`: YAML with the keys of `ScenarioFile`, checked like a
configuration.

Options of the command line and `--set KEY=VALUE` stand for keys of the file and override it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from dispatcher.lab.simulation.metrics import Detector, Signals
from dispatcher.lab.simulation.scenario import (
    MIN_JOBS_PER_POD_WHEN_SET,
    SLICE_OVERHEAD_S,
    Order,
    Scenario,
)
from dispatcher.lab.simulation.world import BatchMix, BatchProfile
from dispatcher.lab.standin.made_up_traffic import TRACE_MAKERS
from dispatcher.lab.standin.model import BATCH_CONTEXT, BATCH_SPREAD, BATCH_TOKENS
from dispatcher.settings.load import config_directory, find_problems, read_config
from dispatcher.settings.section import Section
from dispatcher.settings.values import setting_error
from dispatcher.settings.yaml_source import Node, Problem, read_yaml

SET = "--set"


def _parse_pairs(value: object) -> object:
    """Parse `300:360, 500:560` as ((300.0, 360.0), (500.0, 560.0)), sorted."""
    if isinstance(value, tuple):
        return value
    try:
        parts = [part.split(":") for part in str(value).split(",")]
        pairs = sorted((float(first), float(second)) for first, second in parts)
    except ValueError:
        raise setting_error("give two numbers with a colon between them, such as 300:360") from None
    if pairs[0][0] < 0:
        raise setting_error("the simulation starts at 0")
    return tuple(pairs)


def _parse_intervals(value: object) -> object:
    pairs: Any = _parse_pairs(value)
    for start, end in pairs:
        if not start < end:
            raise setting_error(f"{start:g}:{end:g} ends before it starts")
    for (_, end), (start, _) in itertools.pairwise(pairs):
        if start < end:
            raise setting_error(f"two intervals overlap at {start:g}")
    return pairs


def _parse_counts(value: object) -> object:
    pairs: Any = _parse_pairs(value)
    for _, count in pairs:
        if count < 0 or count != int(count):
            raise setting_error(f"give whole numbers from 0 on instead of {count:g}")
    return tuple((at, int(count)) for at, count in pairs)


def _parse_times(value: object) -> object:
    """Parse `100, 200`, or the single number 100."""
    if isinstance(value, tuple):
        return value
    try:
        return tuple(float(part) for part in str(value).split(","))
    except ValueError:
        raise setting_error("give times in seconds, such as 100, 200") from None


def _parse_mix(value: object) -> object:
    """Parse `0.5:500:145`."""
    if value is None or isinstance(value, BatchMix):
        return value
    try:
        share, context, tokens = str(value).split(":")
        mix = BatchMix(float(share), int(context), float(tokens))
    except ValueError:
        raise setting_error("give a share, context tokens and tokens, such as 0.5:500:145") from None
    if not (0 <= mix.share <= 1 and mix.context >= 0 and 1 <= mix.tokens < inf):
        raise setting_error("the share is from 0 to 1, the context from 0 on, and the tokens from 1 on")
    return mix


Pairs = Annotated[tuple[tuple[float, float], ...], BeforeValidator(_parse_pairs)]
Intervals = Annotated[tuple[tuple[float, float], ...], BeforeValidator(_parse_intervals)]
Counts = Annotated[tuple[tuple[float, int], ...], BeforeValidator(_parse_counts)]
Mix = Annotated[BatchMix | None, BeforeValidator(_parse_mix)]
Times = Annotated[tuple[float, ...], BeforeValidator(_parse_times)]


class ScenarioFile(Section):
    """Keys of a scenario file. A key that `Scenario` has means the same there."""

    trace: str = Field(
        "",
        description="Realtime traffic: a file with requests and their tokens (CSV), or with running requests "
        "over time (CSV, Grafana's download, Prometheus range query). idle: no traffic. bursts: synthetic "
        "bursts of dozens. Default: 900 s of a production chat service.",
    )
    steps: str = Field(
        "",
        description="Instead of a trace: number of realtime requests from each time on, such as 0:0, 10:40.",
    )
    prometheus: str = Field(
        "", description="Instead of a trace: URL of the Prometheus that has the running requests."
    )
    last: str = Field("3h", description="With prometheus: length of the recording, 30m, 3h, 7d.")
    query: str = Field(
        "",
        description="With prometheus: query for the running requests. Default: the metric of vLLM, else "
        "SGLang, else TensorRT-LLM.",
    )
    token_file: str = Field("", description="With prometheus: file with a bearer token.")
    whole: bool = Field(
        False, description="Play all of a long trace, not only its busiest quarter of an hour."
    )
    from_s: float = Field(0.0, ge=0, description="Start in the trace, in seconds.")
    copies: int = Field(
        1,
        ge=1,
        description="Play the trace this many times at once, from different starts: a larger pool.",
    )
    seconds: float | None = Field(
        None,
        ge=1,
        description="Duration. Default: the whole trace, or the busiest quarter of an hour of a long one.",
    )
    seed: int = Field(0, description="Seed of the random batch requests.")

    slots: int = Field(64, ge=1, description="Capacity of the pool in requests, as configured.")
    true_slots: int | None = Field(
        None, ge=1, description="Real capacity of the pool, if the configuration is wrong."
    )
    slots_at: Counts = Field(
        (),
        description="Changes of the real capacity, which are not reported, such as 300:48 (TIME:SLOTS).",
    )
    pods: int = Field(1, ge=1, description="Number of pods that share the slots.")
    pods_at: Counts = Field((), description="Changes of the number of pods, such as 600:3 (TIME:PODS).")
    order: Order = Field(
        Order.AUTO,
        strict=False,
        description="Order of waiting requests. auto: realtime first in the EPP, and first come, first "
        "served in the pods, where requests wait without flow control. realtime-first: as with priorities in "
        "the model servers. first-come: everywhere.",
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that the KV memory of the pool holds: contexts, and what running requests have "
        "generated. When it is full, the newest request is preempted and computed again. Default: it never "
        "fills.",
    )
    counts_tokens: bool = Field(
        False,
        description="The dispatcher counts the tokens of batch requests, too, and sends them only if the KV "
        "memory has room.",
    )
    transit_s: float | None = Field(
        None,
        ge=0,
        description="Transit time of requests and answers, in seconds. Default: 0.002 and 0.003.",
    )

    batch_tokens: float = Field(
        BATCH_TOKENS, ge=1, description="Tokens that a batch request generates, on average."
    )
    batch_context: int = Field(BATCH_CONTEXT, ge=0, description="Context tokens of a batch request.")
    batch_spread: float = Field(
        BATCH_SPREAD,
        ge=0,
        le=3,
        description="Standard deviation of the logarithm of the tokens. 0: all are equal.",
    )
    batch_mix: Mix = Field(
        None,
        description="Share of the batch requests that has another size, with its context and its tokens, "
        "such as 0.5:500:145 (SHARE:CONTEXT:TOKENS).",
    )
    batch_seconds: float | None = Field(
        None, ge=0.001, description="Duration of a batch request in an empty pool, instead of tokens."
    )
    slice_tokens: int | None = Field(
        None,
        ge=1,
        description="Send batch requests in slices of this many tokens on average. Default: whole.",
    )
    slice_overhead_s: float = Field(
        SLICE_OVERHEAD_S,
        ge=0,
        description="Seconds to the first token of each continued slice in an empty pool.",
    )
    revokes_slices: bool = Field(
        False,
        description="The dispatcher streams slices, and ends the youngest early when realtime requests wait. "
        "Their tokens are kept.",
    )

    detector: Detector = Field(
        Detector.UTILIZATION,
        strict=False,
        description="Saturation detector of the EPP. utilization is its default. none: no flow control. "
        "servers: there is no EPP, and the metrics of the model servers are read.",
    )
    picker_slots: int | None = Field(
        None,
        ge=1,
        description="Capacity that the EPP's concurrency detector assumes. Default: that at the start.",
    )
    pickers: int = Field(1, ge=1, description="Number of active EPP replicas.")
    scorer_scrape_s: float = Field(
        0.0,
        ge=0,
        description="Seconds between two scrapes of the pods by the EPP, which chooses a pod by the last one "
        "(0.05 in the real one). 0: it sees every change.",
    )
    queue_limit: int | None = Field(
        None,
        ge=0,
        description="Most requests that wait in the EPP, or without flow control in the pods. Others get a "
        "429.",
    )
    evicts: bool = Field(
        False,
        description="The EPP stops the newest batch request of a pod for a realtime request that finds no "
        "free slot there. Its tokens are lost.",
    )
    shows_running: bool = Field(True, description="The EPP exports how many requests it has sent.")
    shows_in_flight: bool = Field(
        False,
        description="The EPP has an in-flight-load producer: it exports how many requests it has sent, by "
        "their priority.",
    )
    flush_s: float = Field(
        5.0, ge=0, description="Seconds between two updates of the EPP's averages. 0: always fresh."
    )
    flush_phase_s: float | None = Field(
        None, ge=0, description="Time of the first update. Default: from the seed."
    )

    signals: Signals = Field(
        Signals.AUTO,
        strict=False,
        description="Signals that the dispatcher reads. requests: for an EPP without flow control.",
    )
    scrape_s: float = Field(1.0, ge=0.01, description="Seconds between two scrapes.")
    lag_s: float = Field(0.05, ge=0, description="Seconds until the result of a scrape is known.")
    jitter: float = Field(
        0.0, ge=0, le=0.99, description="Largest delay of a scrape, as a share of the interval."
    )
    stamp_s: float = Field(0.0, description="Seconds by which samples are dated too late.")
    lost: float = Field(0.0, ge=0, le=1, description="Share of scrapes that fail.")
    gaps: Intervals = Field((), description="Times in which all scrapes fail, such as 400:430 (FROM:UNTIL).")
    max_age_s: float | None = Field(
        None, ge=0.1, description="signals.max_age_s. Default: 10 for fresh readings, else 60."
    )

    reserve: float = Field(
        0.05, ge=0, le=0.99, description="Share of the capacity that batch work never takes."
    )
    has_capacity_setting: bool = Field(
        True,
        description="The configuration names the capacity. Otherwise the dispatcher has to find it.",
    )
    learns_capacity: bool = Field(False, description="budget.capacity is learn.")
    replicas: int = Field(1, ge=1, description="Number of dispatchers that share the queue.")
    deaths: Times = Field((), description="Times at which a replica is killed and replaced: 100, 200.")
    lease_s: float = Field(30.0, ge=0.1, description="queue.lease_s, for killed replicas.")
    outages: Intervals = Field(
        (), description="Times in which the gateway is unreachable, such as 200:260 (FROM:UNTIL)."
    )
    clock_steps: Pairs = Field((), description="Steps of the queue's clock, such as 300:-600 (TIME:SECONDS).")

    time_step_s: float | None = Field(
        None,
        ge=0,
        description="Time step in seconds: batch requests end together at each step, which plays faster. "
        "0: one by one. Default: 0, or 0.2 if more than 30 minutes are played.",
    )
    requests_per_job: int | None = Field(
        None,
        ge=1,
        description="Number of equal batch requests that are simulated as one job with their total weight, "
        "which is faster. Default: 1, or a pod's slots / 100 if more than 30 minutes are played.",
    )
    processes: int | None = Field(None, ge=1, description="Number of runs at once. Default: one per core.")

    @model_validator(mode="after")
    def _check_together(self) -> ScenarioFile:
        if self.revokes_slices and self.slice_tokens is None:
            raise setting_error("revokes_slices: only slices can be ended early; set slice_tokens, too")
        if self.counts_tokens and self.kv_tokens is None:
            raise setting_error("counts_tokens: set kv_tokens, the size of the memory")
        for key in ("slice_tokens", "kv_tokens", "batch_mix"):
            if getattr(self, key) is not None and self.batch_seconds is not None:
                raise setting_error(f"{key} needs requests with tokens: leave out batch_seconds")
        if [bool(self.trace), bool(self.steps), bool(self.prometheus)].count(True) > 1:
            raise setting_error("trace, steps and prometheus: give one of them")
        # A job may take at most a tenth of the slots of a pod.
        maximum = max(1, self.slots // self.pods // MIN_JOBS_PER_POD_WHEN_SET)
        if self.requests_per_job is not None and self.requests_per_job > maximum:
            raise setting_error(
                f"requests_per_job: {self.requests_per_job} is more than a tenth of a pod's slots; "
                f"{maximum} at the most"
            )
        return self

    def make_scenario(self, seconds: float) -> Scenario:
        """Return the scenario with the duration that is played. Time steps are left to the caller."""
        shared = {each.name for each in fields(Scenario)} & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in shared - {"time_step_s", "requests_per_job"}}
        batch = BatchProfile(
            self.batch_tokens, self.batch_spread, self.batch_seconds, self.batch_context, self.batch_mix
        )
        return Scenario(**{**values, "seconds": seconds, "batch": batch})


@dataclass(frozen=True, slots=True)
class Override:
    """Value that the command line gives to a key."""

    source: str
    """Option for messages, such as `--slots`, or `--set`."""
    key: str
    value: object


def parse_set(text: str) -> Override | Problem:
    """Parse the value of `--set`: KEY=VALUE, with VALUE as in the file."""
    key, equals, value = text.partition("=")
    tree, problems = read_yaml(f"value: {value}", SET)
    if not key or not equals or problems or len(tree.value) != 1:
        return Problem(SET, "", f"{text!r} is not KEY=VALUE, such as scrape_s=5")
    return Override(SET, key.strip(), tree.value["value"].to_plain())


def load_scenario(path: Path | None, overrides: Sequence[Override] = ()) -> ScenarioFile | list[Problem]:
    """Return the scenario of a file with the overrides, or all problems of both. Without a path: the
    defaults."""
    text = read_config(path)
    if isinstance(text, Problem):
        return [text]
    name = "" if path is None else path.name
    root, problems = read_yaml(text, name)
    if any(not problem.where for problem in problems):
        return problems  # a file that cannot be read has no further problems
    if path is not None:
        _resolve_paths(root, config_directory(path))
    origins = {each.key: each.source for each in overrides}
    root.value.update({each.key: Node(each.value, None) for each in overrides})
    try:
        scenario = ScenarioFile.model_validate(root.to_plain())
    except ValidationError as error:
        problems += [_name_origin(each, origins) for each in find_problems(error, root, name, ScenarioFile)]
    else:
        if not problems:
            return scenario
    return sorted(problems, key=lambda problem: (problem.line or 0, problem.where))


def _resolve_paths(root: Node, directory: Path) -> None:
    """Make the paths in a file relative to it, as in a configuration."""
    for key in ("trace", "token_file"):
        node = root.value.get(key)
        if node is not None and node.value and isinstance(node.value, str) and node.value not in TRACE_MAKERS:
            node.value = str(directory / node.value)


def _name_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Return the problem with the option that gave the key instead of the file."""
    origin = origins.get(problem.where)
    if origin is None:
        return problem
    return replace(problem, source=origin, where=problem.where if origin == SET else "", line=None)
