"""Default timeouts of batching rules in a running dispatcher."""

from __future__ import annotations

import asyncio
from typing import Any

from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import Release
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.queue_timeouts import RuleTimeout, TimeoutAction, TimeoutOptions
from dispatcher.requests.request import encode_member
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import Scene, UnreachableGateway, read_results, run_in_scene
from tests.queue.factories import claim

PATH = "/v1/completions"


def make_options(action: TimeoutAction = TimeoutAction.REJECT, timeout_s: float | None = 30.0) -> Options:
    rule = RuleTimeout("batching.rules[0].default_timeout_s", (PATH,), timeout_s, action)
    return Options(RetryPolicy(), default_path=PATH, of_features=index_options(TimeoutOptions((rule,))))


def make_submission(
    request_id: str, waited_s: int, *, within_s: int = 10**6, priority: int = 0, **fields: Any
) -> Submission:
    """Return a request that was submitted some seconds ago."""
    now = int(asyncio.get_running_loop().time())
    deadline = now + within_s
    member = encode_member(request_id, b"{}", deadline, created=now - waited_s, token=request_id, **fields)
    return Submission(member, compute_score(deadline, priority), request_id, request_id, deadline)


async def submit_and_wait(scene: Scene, *submissions: Submission) -> None:
    """Submit the requests at once, and wait until they must have ended."""
    await scene.store.submit(submissions)
    await asyncio.sleep(30)


def test_request_that_waited_too_long_is_rejected_and_others_are_sent() -> None:
    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        await submit_and_wait(scene, make_submission("late", 42), make_submission("fresh", 5))
        results = await read_results(scene)
        assert scene.gateway.sent == ["fresh"]
        assert results["late"]["error_code"] == ErrorCode.DEADLINE_EXCEEDED
        assert "batching.rules[0].default_timeout_s is 30 s" in results["late"]["error_message"]
        assert scene.dispatcher.context.timeout_counts == {"reject": 1, "delay": 0}

    run_in_scene(check, options=make_options())


def test_request_that_was_started_in_slices_has_no_timeout() -> None:
    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        await scene.store.submit([make_submission("started", 42)])
        other_owner = MemoryQueue(scene.store, "b")
        (lease,) = (await claim(other_owner)).leases
        await other_owner.release([Release(lease, progress=b"output of the first slice")])
        await asyncio.sleep(30)
        assert scene.gateway.sent == ["started"]
        assert scene.dispatcher.context.timeout_counts["reject"] == 0

    run_in_scene(check, options=make_options())


def test_earlier_deadline_applies_before_the_timeout() -> None:
    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        await submit_and_wait(scene, make_submission("late", 42, within_s=0))
        assert "default_timeout_s" not in (await read_results(scene))["late"]["error_message"]
        assert scene.dispatcher.context.timeout_counts["reject"] == 0

    run_in_scene(check, options=make_options())


def test_request_to_another_path_has_no_timeout() -> None:
    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        await submit_and_wait(scene, make_submission("late", 42, endpoint="/v1/chat/completions"))
        assert scene.gateway.sent == ["late"]

    run_in_scene(check, options=make_options())


def test_delayed_request_is_sent_after_fresher_ones_and_counts_no_delivery() -> None:
    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        await submit_and_wait(
            scene,
            make_submission("late", 42, priority=0),
            make_submission("fresh", 5, priority=3),
            make_submission("late-last", 42, priority=9),
        )
        assert set(scene.gateway.sent) == {"late", "fresh", "late-last"}
        assert scene.gateway.sent.index("fresh") < scene.gateway.sent.index("late")
        assert scene.dispatcher.context.timeout_counts == {"reject": 0, "delay": 1}
        assert all("error_code" not in each for each in (await read_results(scene)).values())

    run_in_scene(check, options=make_options(TimeoutAction.DELAY))


def test_probe_with_a_delayed_request_takes_the_next_request_immediately() -> None:
    """The gateway comes back while many requests that waited too long are first in the queue."""
    gateway = UnreachableGateway()

    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        await scene.store.submit([make_submission("fresh", 0, priority=3)])
        await asyncio.sleep(5)
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        await scene.store.submit([make_submission(f"late-{number}", 42) for number in range(500)])
        gateway.is_unreachable = False
        sent_before = len(gateway.sent)
        await asyncio.sleep(3)
        assert gateway.sent[sent_before] == "fresh"
        assert len(gateway.sent[sent_before:]) == 501

    run_in_scene(check, gateway, make_options(TimeoutAction.DELAY))


def test_changed_timeout_applies_to_requests_that_wait_already() -> None:
    async def check(scene: Scene) -> None:
        scene.dispatcher.reconfigure(make_options(timeout_s=200.0))
        await asyncio.sleep(100)
        await submit_and_wait(scene, make_submission("in time", 42))
        scene.dispatcher.reconfigure(make_options(timeout_s=None))
        await submit_and_wait(scene, make_submission("no timeout", 90))
        assert scene.gateway.sent == ["in time", "no timeout"]

    run_in_scene(check, options=make_options())
