"""Long generations in slices, with two dispatchers that are killed, and slices that are evicted or cut.

Each token of the stand-in's text depends on all tokens before it, so a generation that is continued wrongly
has another text. The expected answers are computed by the same generator in this process.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest

from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.requests.request import encode_member
from tests.features.slices.generation_gateway import generate_whole
from tests.scenarios.gateway_log import MAX_CHECK_PROMPT, list_slices, summarize
from tests.scenarios.processes import Dispatcher, LogEntry, Stage, World
from tests.support import wait_until_sync

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Streams of single tokens, so that the log and the dispatcher agree about what a cut stream has generated.
CONFIG = GenerationConfig(trims_content=True, chunk_tokens=1)
STOP_STRINGS = ("e", "a ", "\n\n", "th", "é", "漢字")
EVICTED_SHARE = 0.2
"""Share of calls that are evicted, if the test is in time to do it."""
ANSWER_S = 0.5
"""Time within which a dispatcher stores what an answer says."""


@dataclass(frozen=True)
class Case:
    """One run of random requests."""

    sizes: tuple[int, ...]
    """Tokens of a slice. They change while requests wait for their next slice."""
    requests: int
    """Number of requests for each size."""
    is_streamed: bool
    kills: int = 0
    """Number of kills for each size."""
    evicts: bool = False
    cut_share: float = 0.0
    """Share of calls whose answer is cut."""
    paths: tuple[str, ...] = (CHAT, COMPLETION)
    has_stop: bool = True
    """True to give some of the requests stop strings."""


@dataclass
class SlicedRun:
    """Two dispatchers, the requests that they were given, and what they returned."""

    stage: Stage
    case: Case
    source: random.Random
    world: World = field(init=False)
    dispatchers: list[Dispatcher] = field(init=False)
    payloads: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Path and body of each request."""
    lost_calls: int = 0
    """Number of calls that ran when a dispatcher was killed. Some were of the other dispatcher."""

    def __post_init__(self) -> None:
        config = msgspec.json.encode(CONFIG).decode()
        self.world = self.stage.world(generation=config, seconds=0.1, prefix_servers=2)
        settings = self.stage.settings(
            self.world,
            queue={"lease_s": 3 if self.case.kills else 60},
            retry={"base_s": 0.05, "max_s": 0.2, "max_attempts": 50},
            slicing=self._build_slicing(self.case.sizes[0]),
        )
        self.dispatchers = [self.stage.dispatcher(settings) for _ in range(2)]
        self._wait_for_checks(self.case.sizes[0])
        if self.case.cut_share:
            self.world.control(gateway={"answer": {"kind": "cut"}, "share": self.case.cut_share})

    def _wait_for_checks(self, size: int) -> None:
        for dispatcher in self.dispatchers:
            wait_until_sync(partial(self._is_checked, dispatcher, size), 30, what="the check of the model")

    def _is_checked(self, dispatcher: Dispatcher, size: int) -> bool:
        """Return True if the dispatcher slices requests of all paths, else submit more."""
        models = dispatcher.status()["sliced_models"]
        if {model["path"] for model in models if not model["whole_reason"]} == set(self.case.paths):
            return True
        if self.stage.producer.collect().keys() >= self.payloads.keys():
            self._submit_requests(4, size)
        return False

    def _build_slicing(self, size: int) -> dict[str, Any]:
        return {
            "mode": "on",
            "tokens": size,
            "min_tokens": size + 1,
            "stream": self.case.is_streamed,
            "revoke": "off",
        }

    def run(self) -> None:
        for number, size in enumerate(self.case.sizes):
            if number:
                for dispatcher in self.dispatchers:
                    dispatcher.reconfigure(slicing=self._build_slicing(size))
                self._wait_for_checks(size)
            self._submit_requests(self.case.requests, size)
            self._disturb_until_answered()

    def _submit_requests(self, count: int, size: int) -> None:
        deadline, members = int(time.time()) + 3600, {}
        for _ in range(count):
            id_ = f"r-{len(self.payloads)}"
            path, payload = self._draw_request(size)
            self.payloads[id_] = path, payload
            members[encode_member(id_, payload, deadline, endpoint=path)] = float(deadline)
        self.stage.producer.add_members(members)
        self.stage.producer.submitted = [*self.payloads]

    def _draw_request(self, size: int) -> tuple[str, bytes]:
        source = self.source
        text = "".join(source.choices("aeinst é漢\n.", k=2 * MAX_CHECK_PROMPT)) + "."
        path = source.choice(self.case.paths)
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        )
        fields = {"model": "m", "temperature": 0, "max_tokens": source.randint(size + 1, 10 * size + 40)}
        if self.case.has_stop and source.random() < 0.2:
            fields["stop"] = source.sample(STOP_STRINGS, source.randint(1, 2))
        if source.random() < 0.7:
            fields["ignore_eos"] = True
        return path, msgspec.json.encode({**fields, **content})

    def _disturb_until_answered(self) -> None:
        producer, case = self.stage.producer, self.case
        answered_before = len(producer.results)
        # The first requests to end are those of dispatchers that have checked the model.
        thresholds = [
            answered_before + case.requests * number // (case.kills + 1)
            for number in range(1, case.kills + 1)
        ]
        end_at = time.monotonic() + 300
        while len(producer.collect()) < len(self.payloads):
            assert time.monotonic() < end_at, producer.count_requests()
            if thresholds and len(producer.results) >= thresholds[0] and self._find_running():
                thresholds.pop(0)
                self._kill_dispatcher(len(thresholds) % 2)
            for entry in self._find_running() if case.evicts else ():
                if random.Random(entry.number).random() < EVICTED_SHARE:
                    self.world.control(evict=entry.id)
            time.sleep(0.02)

    def _find_running(self) -> list[LogEntry]:
        """Return the calls that run now, without those of checks."""
        after = max(0, int(self.world.observed()["gateway"]["arrived"]) - 200)
        return [entry for entry in list_slices(self.world.log(after)) if entry.ended_at is None]

    def _kill_dispatcher(self, number: int) -> None:
        killed_at = time.monotonic()
        self.dispatchers[number].kill()
        ended_at = time.monotonic()
        self.lost_calls += sum(
            entry.arrived_at < ended_at and (entry.ended_at is None or entry.ended_at > killed_at - ANSWER_S)
            for entry in list_slices(self.world.log())
        )
        self.dispatchers[number].start()

    def find_wrong_results(self) -> list[tuple[object, ...]]:
        """Return what the requests got and should have got, where that differs."""
        wrong: list[tuple[object, ...]] = []
        for id_, (path, payload) in self.payloads.items():
            (result,) = self.stage.producer.results[id_]
            expected = summarize(generate_whole(path, payload, CONFIG))
            got = summarize(result["payload"]) if result.get("status_code") == 200 else (result,)
            if b'"stop":' in payload and got[-1] != expected[-1]:
                # A stop string across a boundary is found when the slice after it has ended.
                is_allowed = 0 < got[-1] - expected[-1] <= max(self.case.sizes)
                got, expected = (got[:-1], expected[:-1]) if is_allowed else (got, expected)
            if got != expected:
                wrong.append((id_, path, payload, got, expected))
        return wrong

    def count_recomputed_tokens(self) -> int:
        """Return how many tokens of completions were generated in vain."""
        generated = Counter[str]()
        for entry in list_slices(self.world.log()):
            generated[entry.id] += entry.generated_tokens
        recomputed = 0
        for id_, (path, _) in self.payloads.items():
            if path == COMPLETION:
                (result,) = self.stage.producer.results[id_]
                recomputed += generated[id_] - summarize(result["payload"])[-1]
        return recomputed


LONG_SIZES = (1, 3, 7, 16, 40, 64, 100, 200, 350, 500)
long = (pytest.mark.long, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case((30, 7), 30, is_streamed=False, kills=1, evicts=True, cut_share=0.05),
            id="plain",
            marks=pytest.mark.slow,
        ),
        pytest.param(Case((30,), 60, is_streamed=True, kills=2, evicts=True, cut_share=0.05), id="streams"),
        pytest.param(
            Case(LONG_SIZES, 100, is_streamed=False, kills=2, evicts=True, cut_share=0.05),
            id="plain-long",
            marks=long,
        ),
        pytest.param(
            Case(LONG_SIZES, 100, is_streamed=True, kills=2, evicts=True, cut_share=0.05),
            id="streams-long",
            marks=long,
        ),
    ],
)
def test_answers_in_slices_equal_those_of_single_calls_whatever_happens(own_stage: Stage, case: Case) -> None:
    run = SlicedRun(own_stage, case, random.Random(7))
    run.run()
    assert run.find_wrong_results() == []
    producer = own_stage.producer
    assert producer.count_results() == {"200": len(run.payloads)}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
    report(run)
    sliced = [results[0] for results in producer.results.values() if results[0].get("slices")]
    # A dispatcher that was killed sends whole requests until it has checked the model again, which takes long
    # on a busy machine.
    assert len(sliced) > len(run.payloads) / 5
    assert run.lost_calls or not case.kills


@pytest.mark.slow
@pytest.mark.parametrize("requests", [40, pytest.param(500, marks=long)])
def test_killed_dispatcher_costs_at_most_one_slice_of_each_running_call(
    own_stage: Stage, requests: int
) -> None:
    case = Case((30,), requests, is_streamed=False, kills=2, paths=(COMPLETION,))
    run = SlicedRun(own_stage, case, random.Random(8))
    run.run()
    assert run.find_wrong_results() == []
    report(run)
    assert run.lost_calls > 0
    # A slice has up to one and a half of 30 tokens. There may be none if the calls had only begun.
    assert run.count_recomputed_tokens() <= 45 * run.lost_calls


@pytest.mark.slow
@pytest.mark.parametrize("requests", [40, pytest.param(500, marks=long)])
def test_evicted_stream_costs_no_token(own_stage: Stage, requests: int) -> None:
    # With stop strings, a server holds back text of which it has sent the tokens, so that they are not kept.
    case = Case((30,), requests, is_streamed=True, evicts=True, paths=(COMPLETION,), has_stop=False)
    run = SlicedRun(own_stage, case, random.Random(9))
    run.run()
    assert run.find_wrong_results() == []
    report(run)
    assert sum(entry.status == -1 for entry in list_slices(run.world.log())) > requests / 10
    assert run.count_recomputed_tokens() == 0


def report(run: SlicedRun) -> None:
    entries = list_slices(run.world.log())
    statuses = Counter(entry.status for entry in entries)
    results = [results[0] for results in run.stage.producer.results.values()]
    print(
        f"{len(results)} requests, {sum(bool(result.get('slices')) for result in results)} in slices; "
        f"{len(entries)} calls ({statuses[200]} answered, {statuses[-1]} cut, {statuses[0]} abandoned, "
        f"{statuses[429]} refused); {run.lost_calls} ran at a kill; "
        f"{sum(entry.generated_tokens for entry in entries)} tokens generated, "
        f"{run.count_recomputed_tokens()} of completions in vain"
    )
