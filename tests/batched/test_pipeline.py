"""Classes with hooks: the stages of three batches overlap, a crash in any stage loses nothing silently, hooks
get items or lists in either process, and each of several workers has an index."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, assert_type

import psutil
import pytest

from dispatcher.batched.calls import Raised
from dispatcher.batched.stages import PIPELINE_DEPTH, Stage
from dispatcher.batched.sync_functions import ThreadWaiters
from dispatcher.batched.waiting import CallTerms
from dispatcher.client import Batched, BatchError, WorkerCrashedError, WrongLengthError, batched, worker_index
from dispatcher.common.grouping import GroupingRule
from tests.batched.pipelined import (
    FatalStage,
    FatalTransform,
    IndexedWorker,
    LoggedStages,
    MeetingStages,
    SleepingStages,
    SleepingTransform,
    StageLog,
    Words,
    WordsOneByOne,
)
from tests.support import wait_until, wait_until_sync

HookPlace = Literal["worker", "caller"]
STAGES = 3
in_either_process = pytest.mark.parametrize("hooks", ["worker", "caller"])


async def get_outcomes(model: Batched[Any, Any], items: list[Any]) -> list[Any]:
    """Return the result or error of each caller."""
    return await asyncio.gather(*map(model, items), return_exceptions=True)


class ControlledWorker:
    """A pipeline whose batches enter a stage when the test says so."""

    depth = PIPELINE_DEPTH

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.stages: list[SimpleQueue[Stage]] = []
        self.entered: list[Stage] = []

    def run_batch(self, items: list[int], enter_stage: Callable[[Stage], None]) -> list[int | Raised]:
        number = len(self.batches)
        self.stages.append(SimpleQueue())
        self.entered.append(Stage.ACCEPTED)
        self.batches.append(items)
        enter_stage(Stage.ACCEPTED)
        while (stage := self.stages[number].get()) is not Stage.DONE:
            enter_stage(stage)
            self.entered[number] = stage
        return [*items]

    def advance(self, number: int, stage: Stage) -> None:
        """Let a batch enter a stage, and return when it has."""
        self.stages[number].put(stage)
        if stage is not Stage.DONE:
            wait_until_sync(lambda: self.entered[number] is stage)

    def start(self) -> None: ...

    def end(self) -> None: ...

    def kill(self) -> None: ...

    def forget_after_fork(self) -> None: ...


class TestTakingBatches:
    """When a pipeline takes the next batch from the queue."""

    def start(self, timeout_s: float, *, idle_flush: bool = False) -> None:
        self.worker = ControlledWorker()
        rule = GroupingRule(2, (), timeout_s, idle_flush)
        terms = CallTerms("controlled", rule, 100, 1, True, copy_context())
        self.waiters = ThreadWaiters[int, int](lambda _: self.worker, terms, idle_s=inf)
        self.threads = ThreadPoolExecutor(10)

    def submit(self, item: int) -> Future[int]:
        waiting = len(self.waiters)
        running = self.waiters.running_calls
        future = self.threads.submit(self.waiters.wait_for_result_in_thread, item, 30)
        wait_until_sync(lambda: len(self.waiters) != waiting or self.waiters.running_calls != running)
        return future

    def wait_for_batches(self, *batches: list[int]) -> None:
        wait_until_sync(lambda: self.worker.batches == list(batches), what=f"{self.worker.batches}")

    def finish(self, futures: list[Future[int]]) -> None:
        self.waiters.close()
        wait_until_sync(lambda: not len(self.waiters))
        wait_until_sync(lambda: len(self.worker.batches) == len(self.worker.stages))
        for number in range(len(self.worker.batches)):
            self.worker.stages[number].put(Stage.DONE)
        assert [each.result(30) for each in futures] == list(range(len(futures)))
        self.waiters.wait_until_ended()
        self.threads.shutdown()

    def test_one_full_batch_waits_for_the_first_stage(self) -> None:
        self.start(timeout_s=60)
        futures = [self.submit(item) for item in range(6)]
        self.wait_for_batches([0, 1], [2, 3])
        assert len(self.waiters) == 2, "a batch waits for the first stage already"
        self.worker.advance(0, Stage.TRANSFORM)
        self.wait_for_batches([0, 1], [2, 3], [4, 5])
        self.finish(futures)

    def test_batch_is_taken_early_as_soon_as_it_is_full(self) -> None:
        self.start(timeout_s=60)
        futures = [self.submit(item) for item in range(2)]
        self.wait_for_batches([0, 1])
        futures += [self.submit(item) for item in (2, 3)]
        self.wait_for_batches([0, 1], [2, 3])
        self.finish(futures)

    def test_late_batch_gathers_items_until_no_other_is_before_the_end_of_transform(self) -> None:
        self.start(timeout_s=0)
        futures = [self.submit(0)]
        self.wait_for_batches([0])
        futures.append(self.submit(1))
        self.worker.advance(0, Stage.TRANSFORM)
        # Item 2 would be alone if item 1 had been taken although its batch was not full.
        futures.append(self.submit(2))
        self.wait_for_batches([0], [1, 2])
        futures.append(self.submit(3))
        self.worker.advance(1, Stage.TRANSFORM)
        assert len(self.waiters) == 1
        self.worker.advance(0, Stage.POSTPROCESS)
        assert len(self.waiters) == 1
        self.worker.advance(1, Stage.POSTPROCESS)
        self.wait_for_batches([0], [1, 2], [3])
        self.finish(futures)

    def test_item_that_could_wait_for_others_is_taken_when_the_pipeline_is_empty(self) -> None:
        """The callers of the batch in `postprocess` may call again at once, so they are waited for."""
        self.start(timeout_s=60, idle_flush=True)
        futures = [self.submit(0)]
        self.wait_for_batches([0])
        futures.append(self.submit(1))
        self.worker.advance(0, Stage.TRANSFORM)
        self.worker.advance(0, Stage.POSTPROCESS)
        assert self.worker.batches == [[0]]
        self.worker.advance(0, Stage.DONE)
        self.wait_for_batches([0], [1])
        self.finish(futures)

    def test_pipeline_has_a_batch_for_each_stage_and_one_more(self) -> None:
        self.start(timeout_s=60)
        futures = [self.submit(item) for item in range(2 * PIPELINE_DEPTH + 2)]
        for number in range(PIPELINE_DEPTH):
            batch_count = min(number + 2, PIPELINE_DEPTH)
            self.wait_for_batches(*([2 * n, 2 * n + 1] for n in range(batch_count)))
            self.worker.advance(number, Stage.TRANSFORM)
            self.worker.advance(number, Stage.POSTPROCESS)
        assert (self.waiters.running_calls, len(self.waiters)) == (PIPELINE_DEPTH, 2)
        self.worker.advance(1, Stage.DONE)
        wait_until_sync(lambda: not len(self.waiters))
        self.finish(futures)


@in_either_process
async def test_stages_of_three_batches_run_at_the_same_time(hooks: HookPlace, tmp_path: Path) -> None:
    async with batched(max_size=1, hooks=hooks)(MeetingStages)() as model:
        assert await get_outcomes(model, [(tmp_path, number) for number in range(3)]) == [0, 1, 2]


@in_either_process
async def test_each_stage_has_one_batch_at_a_time_in_order(hooks: HookPlace) -> None:
    LoggedStages.log = StageLog()
    items = list(range(60))
    async with batched(max_size=2, hooks=hooks, batch_hooks=True)(LoggedStages)() as model:
        assert await get_outcomes(model, items) == items
        log, max_between = await model(-1)
    hook_stages = {"preprocess", "postprocess"}
    stages = hook_stages | {"transform"} if hooks == "worker" else hook_stages
    assert {name for name, numbers in log.items() if numbers == [*items, -1]} == stages
    assert max_between <= 2 * (STAGES if hooks == "worker" else PIPELINE_DEPTH)


async def measure_s(cls: Any, stage_s: float, runs: int) -> float:
    """Return the shortest time that eight batches took."""
    durations = []
    async with batched(max_size=4, batch_hooks=True)(cls)(stage_s) as model:
        for _ in range(runs):
            begun_at = time.perf_counter()
            assert await get_outcomes(model, list(range(32))) == list(range(32))
            durations.append(time.perf_counter() - begun_at)
    return min(durations)


async def test_pipeline_is_faster_than_the_stages_one_after_the_other() -> None:
    stage_s = 0.05
    one_after_the_other_s = await measure_s(SleepingTransform, stage_s, runs=1)
    pipeline_s = await measure_s(SleepingStages, stage_s, runs=3)
    assert one_after_the_other_s >= 24 * stage_s
    assert 10 * stage_s <= pipeline_s < 0.75 * one_after_the_other_s


class TestCrashes:
    @pytest.mark.parametrize("stage", ["preprocess", "transform", "postprocess"])
    async def test_each_caller_gets_a_result_or_an_error(self, stage: str, tmp_path: Path) -> None:
        items = [(number, stage if number == 9 else "fine") for number in range(24)]
        async with batched(max_size=2)(FatalStage)(tmp_path / "log") as model:
            outcomes = await get_outcomes(model, items)
            assert await model((24, "fine")) == 24
        crashed = [n for n, each in enumerate(outcomes) if isinstance(each, WorkerCrashedError)]
        assert 9 in crashed
        assert len(crashed) <= 2 * STAGES
        assert [each for n, each in enumerate(outcomes) if n not in crashed] == [
            number for number in range(24) if number not in crashed
        ]
        runs = Counter((tmp_path / "log").read_text().splitlines())
        assert max(runs.values()) == 1, "no stage has run an item twice"

    async def test_batch_that_had_not_begun_is_run_by_the_next_process(self, tmp_path: Path) -> None:
        items = [(number, tmp_path) for number in range(6)]
        async with batched(max_size=1, hooks="caller")(FatalTransform)() as model:
            outcomes = await get_outcomes(model, items)
        assert isinstance(outcomes[0], WorkerCrashedError)
        assert outcomes[1:] == [1, 2, 3, 4, 5]
        preprocessed = [(tmp_path / f"preprocessed {number}").read_text() for number, _ in items]
        assert preprocessed == ["once\n"] * 6, "no hook was repeated"


class TestHooks:
    @in_either_process
    async def test_postprocess_with_two_arguments_gets_the_input_of_transform(self, hooks: HookPlace) -> None:
        async with batched(hooks=hooks)(WordsOneByOne)() as model:
            assert_type(model, Batched[str, tuple[str, int]])
            [(text, pid), _] = await get_outcomes(model, [" one ", "three"])
        assert text == "one: 3"
        assert (pid == os.getpid()) == (hooks == "caller")

    @in_either_process
    async def test_sys_exit_in_a_hook_fails_only_its_item(self, hooks: HookPlace) -> None:
        async with batched(hooks=hooks)(WordsOneByOne)() as model:
            _, pid = await model("first")
            outcomes = await get_outcomes(model, ["one", "exit", "two"])
            assert isinstance(outcomes[1], BatchError)
            assert "WordsOneByOne.preprocess raised SystemExit: 7" in str(outcomes[1])
            assert [outcomes[0], outcomes[2]] == [("one: 3", pid), ("two: 3", pid)]

    async def test_input_that_cannot_be_pickled_fails_only_its_item(self) -> None:
        async with batched(hooks="caller", batch_hooks=True)(PassingLambda)() as model:
            outcomes = await get_outcomes(model, [1, "lambda", 2])
        assert [outcomes[0], outcomes[2]] == [1, 2]
        assert "local object" in str(outcomes[1]), outcomes[1]

    async def test_hooks_of_lists_get_and_return_lists(self) -> None:
        async with batched(batch_hooks=True)(Words)() as model:
            assert_type(model, Batched[str, Any])
            assert await get_outcomes(model, [" one ", "three"]) == ["one: 3", "three: 5"]

    async def test_error_of_a_hook_of_lists_belongs_to_its_item(self) -> None:
        words = ["one", "bad before", "two", "bad", "key", "bad after", "three"]
        async with batched(batch_hooks=True)(Words)() as model:
            outcomes = await get_outcomes(model, words)
        assert [repr(each) for each in outcomes] == [
            "'one: 3'",
            "ValueError('not before')",
            "'two: 3'",
            "ValueError('not in transform')",
            "KeyError('before')",
            "ValueError('not after')",
            "'three: 5'",
        ]

    async def test_error_of_a_hook_of_lists_belongs_to_all_without_isolation(self) -> None:
        async with batched(batch_hooks=True, isolate=False)(Words)() as model:
            outcomes = await get_outcomes(model, ["one", "bad before", "two"])
        assert [repr(each) for each in outcomes] == ["ValueError('not before')"] * 3

    async def test_hook_that_returns_too_few_results_is_an_error_for_all(self) -> None:
        async with batched(batch_hooks=True)(Words)() as model:
            outcomes = await get_outcomes(model, ["one", "short before"])
        assert {type(each) for each in outcomes} == {WrongLengthError}
        assert "Words.preprocess returned 1 results" in str(outcomes[0])

    def test_hook_of_the_object_cannot_run_in_the_process_of_the_callers(self) -> None:
        with pytest.raises(TypeError, match=r"FatalStage\.preprocess must be a static method"):
            batched(hooks="caller")(FatalStage)


class PassingLambda:
    """`preprocess` returns a function, which cannot be pickled, for one item."""

    @staticmethod
    def preprocess(items: list[Any]) -> list[Any]:
        return [(lambda: None) if item == "lambda" else item for item in items]

    def transform(self, items: list[Any]) -> list[Any]:
        return items


class TestWorkers:
    async def test_each_worker_has_an_index_that_its_successor_keeps(self, tmp_path: Path) -> None:
        def make_pair(name: str) -> list[Any]:
            folder = tmp_path / name
            folder.mkdir()
            return [(folder, "one", "other"), (folder, "other", "one")]

        async with batched(max_size=1, workers=2)(IndexedWorker)() as model:
            pids = dict(await get_outcomes(model, make_pair("first")))
            assert set(pids) == {0, 1}
            assert len(set(pids.values())) == 2
            os.kill(pids[1], signal.SIGKILL)
            await wait_until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_ZOMBIE)
            later_pids = dict(await get_outcomes(model, make_pair("second")))
        assert set(later_pids) == {0, 1}
        assert later_pids[0] == pids[0], "only the dead process is replaced"
        assert later_pids[1] != pids[1]

    def test_index_is_zero_outside_of_workers(self) -> None:
        assert worker_index() == 0

    def test_concurrency_is_rejected_for_classes(self) -> None:
        with pytest.raises(TypeError, match="use workers"):
            batched(concurrency=2)(IndexedWorker)
