"""An exception at any step costs the requests concerned an attempt, and ends nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from dispatcher.features.merging.groups import BatchGroups
from dispatcher.features.merging.merged_calls import MergedCall, MergeTargets
from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.sequences.turn_checker import TurnChecker
from dispatcher.features.slices.slicer import Slicer
from dispatcher.kernel import completions
from dispatcher.kernel.admission import Admission
from dispatcher.kernel.attempts import AttemptRunner
from dispatcher.kernel.cancellation import CancellationCheck
from dispatcher.kernel.claiming import Claimer
from dispatcher.kernel.flush import CompletionFlusher
from dispatcher.kernel.health_watch import HealthWatch
from dispatcher.kernel.journal import Journal
from dispatcher.kernel.lanes import LaneRules
from dispatcher.kernel.maintenance import Maintenance
from dispatcher.kernel.outcome_judge import OutcomeJudge
from dispatcher.kernel.parsed_requests import ParsedRequestCache
from dispatcher.kernel.pipeline import RequestPipeline
from dispatcher.kernel.queue_access import QueueAccess
from dispatcher.kernel.sending import RequestSender
from dispatcher.kernel.weights import UnitAllocator
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.limit.limiter import Limiter
from tests.features.fault_scene import (
    MAX_ATTEMPTS,
    FeatureGateway,
    run_with_faults,
    submit_all_kinds,
    wait_for_results,
)
from tests.features.memory_queue import MemoryQueue as QueueWithFeatures
from tests.features.scene import Scene, run_in_scene
from tests.features.sequences.sequence_scene import build_turns, submit_turns
from tests.kernel.faults import Fault, InjectedError, inject, list_methods
from tests.kernel.scene import AnsweringGateway, read_results

# An exception between two lookups leaves the call of the first one behind.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

COLLABORATORS: list[type | ModuleType] = [
    Admission,
    AttemptRunner,
    BatchGroups,
    CancellationCheck,
    Claimer,
    CompletionFlusher,
    HealthWatch,
    Journal,
    LaneRules,
    Limiter,
    Maintenance,
    MemoryQueue,
    MergeTargets,
    MergedCall,
    ModelRouter,
    OutcomeJudge,
    ParsedRequestCache,
    QueueAccess,
    QueueWithFeatures,
    RequestMerger,
    RequestPipeline,
    RequestSender,
    Slicer,
    TurnChecker,
    UnitAllocator,
    completions,
]


BOUNDARY = {"_run_attempt", "_handle_result", "_handle_never_started", "start_claimed", "get_lease"}
"""Methods of the boundary itself."""
BEFORE_THE_LOOP = {"reconfigure", "use_task_group", "start_tasks"}
"""Methods whose exception means that the dispatcher cannot start."""
CALLED_BY_TEST = {"add_reading"}
LAST_STEPS = {"add_to_group", "add_member"}
"""Methods whose last step hands over a lease or the memory of an answer. They cannot raise after that."""
WHOLE_REPLY = {"claim_turns", "_build_claim_result", "update_from_reply"}
"""Methods for a call to the queue as a whole. If one always raises, nothing can be claimed."""


def list_faults(cls: type | ModuleType, excluded: Set[str] = frozenset(), **fields: Any) -> Iterator[Fault]:
    for method in list_methods(cls):
        if method not in BOUNDARY | BEFORE_THE_LOOP | CALLED_BY_TEST | excluded:
            yield Fault(cls, method, **fields)


async def check_all_are_answered(scene: Scene, gateway: FeatureGateway) -> None:
    names = await submit_all_kinds(scene)
    results = await wait_for_results(scene, names)
    assert {name: result.status_code for name, result in results.items()} == dict.fromkeys(names, 200)


@pytest.mark.parametrize("cls", COLLABORATORS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exception_in_one_call_of_any_method_costs_nobody_a_result(
    cls: type | ModuleType, *, is_late: bool
) -> None:
    for fault in list_faults(cls, LAST_STEPS if is_late else set(), is_late=is_late):
        for at_call in (1, 2, 5):
            again = replace(fault, at_call=at_call)
            run_with_faults(check_all_are_answered, again)
            if again.call_count < at_call:
                break


@pytest.mark.parametrize(
    "cls", [AnsweringGateway, Claimer, HealthWatch, MemoryQueue, ModelRouter, QueueWithFeatures]
)
def test_cancelled_call_is_an_error_like_any_other(cls: type) -> None:
    """A library may raise CancelledError in a task that nobody has cancelled."""
    for fault in list_faults(cls, error=asyncio.CancelledError):
        if inspect.iscoroutinefunction(vars(cls)[fault.method]):
            run_with_faults(check_all_are_answered, replace(fault, at_call=1))


@pytest.mark.slow
@pytest.mark.timeout(400)  # 37 s of CPU for one request: as many runs as there are calls that may raise
@pytest.mark.parametrize("request_id", ["plain-1", "merged-1", "sliced-0", "turn-1"])
def test_request_that_always_raises_an_exception_costs_no_other_a_result(request_id: str) -> None:
    async def check(scene: Scene, gateway: FeatureGateway) -> None:
        names = await submit_all_kinds(scene)
        sequence = request_id.partition("-")[0] == "turn"
        honest = {name for name in names if name != request_id and not (sequence and "turn" in name)}
        results = await wait_for_results(scene, honest)
        codes = {name: result.status_code for name, result in results.items() if name in honest}
        assert codes == dict.fromkeys(honest, 200)
        sent = Counter(gateway.sent)
        assert {sent[name] for name in honest if name.startswith("plain")} == {1}
        await asyncio.sleep(20.0)

    for cls in COLLABORATORS:
        for fault in list_faults(cls, WHOLE_REPLY, request_id=request_id):
            run_with_faults(check, fault)


@pytest.mark.parametrize("method", ["judge_attempt", "judge_lease"])
def test_request_whose_answer_raises_an_exception_ends_after_its_attempts(method: str) -> None:
    async def check(scene: Scene, gateway: FeatureGateway) -> None:
        names = await submit_all_kinds(scene)
        results = await wait_for_results(scene, names)
        failed = results.pop("plain-1")
        assert {result.status_code for result in results.values()} == {200}
        assert failed.error_code == "RETRIES_EXHAUSTED"
        assert f"the dispatcher failed: InjectedError('{method}')" in str(failed.error_message)
        assert gateway.sent.count("plain-1") == MAX_ATTEMPTS

    run_with_faults(check, Fault(OutcomeJudge, method, request_id="plain-1"))


def test_completion_that_the_queue_cannot_take_holds_up_no_other() -> None:
    """It is given up after a while, and the queue gives its request to a later claim."""
    fault = Fault(MemoryQueue, "settle", request_id="plain-1")

    async def check(scene: Scene, gateway: FeatureGateway) -> None:
        names = await submit_all_kinds(scene)
        results = await wait_for_results(scene, names - {"plain-1"}, within_s=30.0)
        assert results.keys() == names - {"plain-1"}
        assert scene.dispatcher.view.problem is None or "InjectedError" in scene.dispatcher.view.problem
        await asyncio.sleep(45.0)
        assert len(scene.dispatcher._in_flight) == 0
        fault.request_id = "no request"
        assert (await wait_for_results(scene, {"plain-1"})).keys() == {"plain-1"}

    run_with_faults(check, fault)


def test_loop_whose_turns_all_fail_counts_as_dead() -> None:
    """Then the liveness probe fails, and the process is started again."""

    async def check(scene: Scene) -> None:
        async def fail() -> None:
            raise InjectedError("claim_work")

        await asyncio.sleep(1.0)
        scene.dispatcher._claimer.claim_work = fail  # type: ignore[method-assign]
        began_at = asyncio.get_running_loop().time()
        await asyncio.sleep(60.0)
        assert scene.dispatcher.last_round_at <= began_at
        assert not scene.task.done()
        del scene.dispatcher._claimer.claim_work
        await asyncio.sleep(3.0)
        assert scene.dispatcher.last_round_at > began_at + 60.0

    run_in_scene(check)


@pytest.mark.parametrize("request_id", ["plain-1", "merged-1", "sliced-0"])
@pytest.mark.parametrize(
    ("cls", "method"), [(completions, "build_internal_failure"), (RequestMerger, "handle_stopped")]
)
def test_lease_runs_out_if_the_handling_of_an_exception_raises_another_one(
    cls: type | ModuleType, method: str, request_id: str
) -> None:
    """Then the queue gives the request to a later claim."""
    first = Fault(OutcomeJudge, "judge_attempt", request_id=request_id)
    second = Fault(cls, method, request_id=request_id)

    async def check(scene: Scene, gateway: FeatureGateway) -> None:
        names = await submit_all_kinds(scene)
        await wait_for_results(scene, names - {request_id})
        first.request_id = second.request_id = "no request"
        results = await wait_for_results(scene, {request_id})
        assert results[request_id].status_code == 200

    run_with_faults(check, first, second)


def test_requests_that_a_flush_has_claimed_are_sent_after_an_exception() -> None:
    """The end of a turn claims the next one in the same call. Without its nonce, the lease of that turn would
    have to run out first."""
    fault = Fault(LaneRules, "record_completion", at_call=1, is_active=True)

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("s", 2))
        await asyncio.sleep(5.0)
        assert fault.raised_count == 1
        assert sorted(await read_results(scene)) == ["s-0", "s-1"]
        assert scene.gateway.sent == ["s-0", "s-1"]

    with inject(fault):
        run_in_scene(check)
