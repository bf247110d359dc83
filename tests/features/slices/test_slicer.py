"""Long generations in slices, with the loop, a queue in memory, and servers that generate text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_config

from dispatcher.features.models.availability import ModelTerms, WhenNotServed
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.features.models.versions import FamilyTerms
from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.equality import CHECK_ID
from dispatcher.features.slices.progress import Progress, Stage, encode_progress
from dispatcher.features.slices.support import DOUBT_S, EQUAL_S, MAX_TEMPLATE_OPTIONS, SupportTable
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Options
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.poll import Poll
from dispatcher.queue.contract import Release
from dispatcher.requests.outcomes.outcome import Delivered, Evicted, Failed, FailureKind, Outcome, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.telemetry import catalogue as series
from dispatcher.wire_format import PoppedResult
from tests.features.memory_queue import MemoryQueue
from tests.features.models.model_scene import change_models, update_listings
from tests.features.scene import Scene, run_in_scene
from tests.features.slices.generation_gateway import GenerationGateway, generate_whole
from tests.features.slices.slice_scene import (
    CHAT,
    CHECK_CALLS,
    CHECK_TOKENS,
    COMPLETION,
    build_options,
    build_payload,
    check_model,
    find_slicer,
    submit,
    summarize,
    wait_for_calls,
    wait_for_results,
)
from tests.queue.factories import claim


class RepeatingGateway(GenerationGateway):
    """Servers whose answers to a continued message begin with all of the message so far."""

    async def forward(self, request: Request, **options: Any) -> AttemptResult:
        result = await super().forward(request, **options)
        asked = msgspec.json.decode(request.payload)
        if not asked.get("continue_final_message") or not isinstance(result.outcome, Delivered):
            return result
        answer = msgspec.json.decode(result.outcome.body)
        message = answer["choices"][0]["message"]
        message["content"] = asked["messages"][-1]["content"] + message["content"]
        return result.copy_with(outcome=Delivered(200, msgspec.json.encode(answer)))


def run_one(
    path: str,
    payload: bytes,
    config: GenerationConfig | None = None,
    options: Options | None = None,
    outcomes: Iterable[Outcome | None] = (),
    **fields: Any,
) -> tuple[PoppedResult, GenerationGateway, Scene]:
    """Run one request to its result."""
    gateway = GenerationGateway(config or GenerationConfig())
    gateway.next_outcomes.extend(outcomes)
    found: list[Any] = []

    async def check(scene: Scene) -> None:
        await submit(scene, path, payload, **fields)
        found.extend([(await wait_for_results(scene, 1))["r-1"], gateway, scene])

    run_in_scene(check, gateway, options or build_options())
    return found[0], found[1], found[2]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_long_generation_is_sent_in_slices_and_has_the_answer_of_one_call(path: str) -> None:
    config = GenerationConfig(end_probability=0.0)
    payload = build_payload(path)
    result, gateway, _ = run_one(path, payload, config)
    assert result.status_code == 200
    assert summarize(result.payload) == summarize(generate_whole(path, payload, config))
    sliced = [call for call in gateway.calls if call.max_tokens <= 20]
    assert result.slices is not None
    assert result.slices >= 5
    assert len(sliced) >= result.slices
    assert "token_ids" not in result.payload


def test_slices_of_a_request_differ_in_size() -> None:
    options = build_options(spread=0.5, skips_check=True)
    _, gateway, _ = run_one(
        COMPLETION, build_payload(COMPLETION), GenerationConfig(end_probability=0.0), options
    )
    sizes = [call.max_tokens for call in gateway.calls]
    assert sum(sizes) >= 100
    assert len(set(sizes)) >= 4
    assert max(sizes) <= 30


def test_model_is_checked_once_before_its_first_slice() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION))
        await wait_for_results(scene, 1)
        assert [call.max_tokens for call in gateway.calls[CHECK_CALLS:]] == [20] * 5
        calls = len(gateway.calls)
        await submit(scene, COMPLETION, build_payload(COMPLETION, 2), "r-2")
        await wait_for_results(scene, 1)
        assert [call.max_tokens for call in gateway.calls[calls:]] == [20] * 5

    run_in_scene(check, gateway, build_options())


class RecordingGateway(GenerationGateway):
    """Keeps the requests that it gets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requests: list[Request] = []

    async def forward(self, request: Request, **options: Any) -> AttemptResult:
        self.requests.append(request)
        return await super().forward(request, **options)


def test_check_is_sent_without_the_headers_and_metadata_of_the_request() -> None:
    gateway = RecordingGateway(GenerationConfig(end_probability=0.0))
    fields: dict[str, Any] = {"headers": {"x-route": "canary"}, "metadata": {"tenant": "a"}}

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION), **fields)
        await wait_for_results(scene, 1)

    run_in_scene(check, gateway, build_options())
    checks, slices = gateway.requests[:CHECK_CALLS], gateway.requests[CHECK_CALLS:]
    assert {request.id for request in checks} == {CHECK_ID}
    assert all(not request.headers and not request.metadata and not request.affinity for request in checks)
    assert all(request.endpoint == COMPLETION for request in checks)
    assert all(request.headers == fields["headers"] for request in slices)


def test_evicted_call_of_a_check_is_repeated_and_not_the_whole_check() -> None:
    config = GenerationConfig(end_probability=0.0)
    outcomes = [None] * (CHECK_CALLS - 1) + [Evicted(429, "evicted")]
    result, gateway, _ = run_one(COMPLETION, build_payload(COMPLETION), config, outcomes=outcomes)
    assert result.slices == 5
    assert len(gateway.calls) == CHECK_CALLS + 1 + 5


def test_template_options_of_other_requests_do_not_stop_slicing() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        for number in range(2 * MAX_TEMPLATE_OPTIONS):
            payload = build_payload(CHAT, number, chat_template_kwargs={"invented": number})
            await submit(scene, CHAT, payload, f"odd-{number}")
        await wait_for_results(scene, 2 * MAX_TEMPLATE_OPTIONS)
        await submit(scene, CHAT, build_payload(CHAT), "plain")
        assert ((await wait_for_results(scene, 1))["plain"].slices or 0) > 1

    run_in_scene(check, gateway, build_options())


@pytest.mark.parametrize("options", [{}, {"chat_template_kwargs": None}, {"chat_template_kwargs": {}}])
def test_empty_template_options_are_those_of_a_plain_request(options: dict[str, Any]) -> None:
    _, _, scene = run_one(CHAT, build_payload(CHAT, **options), GenerationConfig(end_probability=0.0))
    assert [key for key, _ in find_slicer(scene).support] == [(CHAT, "m", b"")]


def test_reasoning_in_one_answer_is_no_reason_to_send_others_whole() -> None:
    class ThinkingGateway(GenerationGateway):
        async def forward(self, request: Request, **options: Any) -> AttemptResult:
            result = await super().forward(request, **options)
            if b"/think" not in request.payload or not isinstance(result.outcome, Delivered):
                return result
            answer = msgspec.json.decode(result.outcome.body)
            answer["choices"][0]["message"]["reasoning_content"] = "hm"
            return result.copy_with(outcome=Delivered(200, msgspec.json.encode(answer)))

    gateway = ThinkingGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, CHAT, build_payload(CHAT))
        await wait_for_results(scene, 1)
        thinking = [{"role": "user", "content": "/think"}]
        await submit(scene, CHAT, build_payload(CHAT, messages=thinking), "thinking")
        assert (await wait_for_results(scene, 1))["thinking"].slices is None
        await submit(scene, CHAT, build_payload(CHAT, 2), "next")
        assert ((await wait_for_results(scene, 1))["next"].slices or 0) > 1

    run_in_scene(check, gateway, build_options())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_server_that_begins_to_reason_is_found_by_another_check(is_streamed: bool) -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, CHAT, build_payload(CHAT))
        assert (await wait_for_results(scene, 1))["r-1"].slices
        gateway.config = GenerationConfig(end_probability=0.0, reasoning="reasoning_content")
        await asyncio.sleep(DOUBT_S)
        for number in (2, 3):
            await submit(scene, CHAT, build_payload(CHAT, number), f"r-{number}")
            await wait_for_results(scene, 1)
        ((_, support),) = find_slicer(scene).support
        assert support.reason is WholeReason.REASONING

    run_in_scene(check, gateway, build_options(is_streamed=is_streamed))


def test_equal_model_is_checked_again_after_some_time() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, CHAT, build_payload(CHAT))
        await wait_for_results(scene, 1)
        (support,) = (support for _, support in find_slicer(scene).support)
        support.check_at -= EQUAL_S
        gateway.config = replace_config(gateway.config, ignores_continue=True)
        await submit(scene, CHAT, build_payload(CHAT, 2), "r-2")
        result = (await wait_for_results(scene, 1))["r-2"]
        assert result.slices is None, "the server was replaced by one that cannot continue a message"
        assert support.reason is WholeReason.UNEQUAL

    run_in_scene(check, gateway, build_options())


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_process_that_has_not_checked_a_model_continues_generations_of_another(path: str) -> None:
    gateway = RepeatingGateway(GenerationConfig(end_probability=0.0))
    payload = build_payload(path)

    async def check(scene: Scene) -> None:
        await submit(scene, path, payload)
        await wait_for_calls(gateway, 20, 2)
        find_slicer(scene).support = SupportTable()  # as in a process that has just started
        result = (await wait_for_results(scene, 1))["r-1"]
        assert summarize(result.payload) == summarize(generate_whole(path, payload, gateway.config))
        assert result.slices is not None

    run_in_scene(check, gateway, build_options())


def test_slices_of_a_request_go_to_the_same_server_and_use_its_prefix_cache() -> None:
    result, gateway, _ = run_one(COMPLETION, build_payload(COMPLETION), GenerationConfig(end_probability=0.0))
    assert len({call.server for call in gateway.calls if call.max_tokens == 20}) == 1
    assert result.cached_tokens is not None
    assert result.cached_tokens > 100


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GenerationConfig(end_probability=0.0, ignores_continue=True), WholeReason.UNEQUAL),
        (GenerationConfig(end_probability=0.0, ignores_last_answer=True), WholeReason.UNEQUAL),
        (GenerationConfig(end_probability=0.0, reasoning="reasoning_content"), WholeReason.REASONING),
    ],
)
def test_model_whose_slices_are_not_equal_gets_whole_requests(
    config: GenerationConfig, reason: WholeReason
) -> None:
    payload = build_payload(CHAT)
    result, gateway, scene = run_one(CHAT, payload, config)
    assert result.slices is None
    assert gateway.calls[-1].max_tokens == 100
    assert (
        msgspec.json.decode(result.payload)["choices"]
        == (msgspec.json.decode(generate_whole(CHAT, payload, config))["choices"])
    )
    ((_, support),) = find_slicer(scene).support
    assert support.reason is reason
    assert sum(find_slicer(scene).whole_counts.values()) == 1


def test_evicted_or_failed_slice_is_sent_again_from_the_kept_progress() -> None:
    config = GenerationConfig(end_probability=0.0)
    payload = build_payload(COMPLETION)
    failed = Failed("connection reset", kind=FailureKind.CONNECTION_RESET)
    outcomes = [None] * (CHECK_CALLS + 2) + [Evicted(429, "evicted"), None, failed]
    result, gateway, _ = run_one(COMPLETION, payload, config, outcomes=outcomes)
    assert summarize(result.payload) == summarize(generate_whole(COMPLETION, payload, config))
    # The check, five slices of 20, and two of them once more.
    assert gateway.generated_tokens == CHECK_TOKENS + 5 * 20 + 2 * 20


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_evicted_stream_keeps_what_was_generated(path: str) -> None:
    config = GenerationConfig(end_probability=0.0, chunk_tokens=1)
    payload = build_payload(path)
    gateway = GenerationGateway(config, cut_after=0.6)

    async def check(scene: Scene) -> None:
        await submit(scene, path, payload)
        await wait_for_calls(gateway, 20, 1)
        checked_tokens = gateway.generated_tokens
        gateway.next_outcomes.extend([Evicted(429, "evicted"), None, Evicted(429, "evicted")])
        result = (await wait_for_results(scene, 1))["r-1"]
        whole = summarize(generate_whole(path, payload, config))
        assert summarize(result.payload) == whole
        if path == COMPLETION:  # chats cut white space, whose tokens are generated again
            assert gateway.generated_tokens - checked_tokens == 100

    run_in_scene(check, gateway, build_options(is_streamed=True))


def apply_reading(scene: Scene, load: float, waiting: float) -> None:
    """Apply a reading of a pool of ten."""
    now = asyncio.get_running_loop().time()
    reading = Reading(Signal.REQUESTS, now, now, load, waiting, 10)
    scene.dispatcher.apply_poll(Poll(completed_at=now, signals=(Signal.REQUESTS,), readings=(reading,)))


def test_youngest_slices_end_early_when_a_reading_shows_that_requests_wait() -> None:
    config = GenerationConfig(end_probability=0.0, chunk_tokens=1)
    gateway = GenerationGateway(config, token_s=0.1)
    payloads = {f"r-{number}": build_payload(COMPLETION, number) for number in range(1, 6)}

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION), "first")
        await wait_for_results(scene, 1)
        apply_reading(scene, 0.3, 0.0)
        checked_tokens = gateway.generated_tokens
        for request_id, payload in payloads.items():
            await submit(scene, COMPLETION, payload, request_id)
            await asyncio.sleep(0.2)
        ids = [call.id for call in gateway.calls[-5:]]
        assert ids == list(payloads)
        apply_reading(scene, 1.0, 0.15)  # two more than fit beside the reserve
        await asyncio.sleep(0.1)
        assert find_slicer(scene).revoked_count == 2
        assert scene.dispatcher.running_count == 3
        apply_reading(scene, 0.3, 0.0)
        results = await wait_for_results(scene, 5)
        for request_id, payload in payloads.items():
            whole = summarize(generate_whole(COMPLETION, payload, config))
            assert summarize(results[request_id].payload) == whole
        assert gateway.generated_tokens - checked_tokens == 5 * 100

    run_in_scene(check, gateway, build_options(is_streamed=True, revokes=True))


def test_slice_without_a_token_ends_after_those_with_tokens() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0, chunk_tokens=1), token_s=0.1)

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION), "first")
        await wait_for_results(scene, 1)
        apply_reading(scene, 0.3, 0.0)
        for number in range(1, 4):
            await submit(scene, COMPLETION, build_payload(COMPLETION, number), f"r-{number}")
            await asyncio.sleep(0.2)
        await submit(scene, COMPLETION, build_payload(COMPLETION, 4), "r-4")
        await asyncio.sleep(0.05)  # half of the time that a token takes
        apply_reading(scene, 1.0, 0.15)  # two more than fit beside the reserve
        await asyncio.sleep(0.1)
        apply_reading(scene, 0.3, 0.0)
        await wait_for_results(scene, 4)
        continued = {call.id for call in gateway.calls[-2:]}
        assert (find_slicer(scene).revoked_count, continued) == (2, {"r-2", "r-3"})

    run_in_scene(check, gateway, build_options(is_streamed=True, revokes=True))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tokens_of_slices_are_counted(is_streamed: bool) -> None:
    config = GenerationConfig(end_probability=0.0)
    options = build_options(is_streamed=is_streamed, skips_check=True)
    result, _, scene = run_one(COMPLETION, build_payload(COMPLETION, n=1), config, options)
    assert result.slices == 5
    prompt_tokens = summarize(result.payload)[2]
    assert scene.metrics.get_value(series.TOKENS, "out") == 100
    assert scene.metrics.get_value(series.TOKENS, "in") == 5 * prompt_tokens + (0 + 20 + 40 + 60 + 80)


def test_attempts_count_for_each_slice() -> None:
    failed = Failed("connection reset", kind=FailureKind.CONNECTION_RESET)
    # Two of three allowed attempts fail in each slice.
    outcomes = [None] * CHECK_CALLS + [failed, failed, None] * 5
    options = build_options()
    options = Options(RetryPolicy(0.1, 1.0, 3), of_features=options.of_features)
    result, _, _ = run_one(
        COMPLETION, build_payload(COMPLETION), GenerationConfig(end_probability=0.0), options, outcomes
    )
    assert result.status_code == 200
    assert result.slices == 5


CUT = Failed("the answer broke off", kind=FailureKind.BROKEN_OFF)


EMPTY_EVENT = b'data: {"object":"text_completion","choices":[{"text":"","token_ids":[]}]}\n\n'


class EmptyStreamGateway(GenerationGateway):
    """Servers that begin the answer of a call with an outcome of `next_outcomes`, and send no token."""

    async def forward(self, request: Request, **options: Any) -> AttemptResult:
        if request.received is not None and self.next_outcomes and self.next_outcomes[0] is not None:
            request.received.append(EMPTY_EVENT)
        return await super().forward(request, **options)


@pytest.mark.parametrize("cut", [CUT, Delivered(200, EMPTY_EVENT)], ids=["broken off", "ended early"])
def test_stream_that_ends_early_and_brings_nothing_is_a_failed_attempt(cut: Outcome) -> None:
    gateway = EmptyStreamGateway(GenerationConfig(end_probability=0.0, chunk_tokens=1), cut_after=0.0)
    options = replace(build_options(is_streamed=True), retry=RetryPolicy(0.1, 1.0, max_attempts=3))

    async def check(scene: Scene) -> None:
        await check_model(scene, COMPLETION)
        calls = len(gateway.calls)
        gateway.next_outcomes.extend([None] + [cut] * 20)
        await submit(scene, COMPLETION, build_payload(COMPLETION))
        result = (await wait_for_results(scene, 1))["r-1"]
        assert result.error_code == "RETRIES_EXHAUSTED"
        assert len(gateway.calls) - calls == 4, "a slice, and three attempts of the next one"

    run_in_scene(check, gateway, options)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_stream_that_breaks_off_after_new_tokens_is_no_failed_attempt(path: str) -> None:
    config = GenerationConfig(end_probability=0.0, chunk_tokens=1)
    gateway = GenerationGateway(config, cut_after=0.5)
    options = replace(build_options(is_streamed=True), retry=RetryPolicy(0.1, 1.0, max_attempts=1))

    async def check(scene: Scene) -> None:
        await check_model(scene, path)
        gateway.next_outcomes.extend([None] + [CUT] * 5)
        await submit(scene, path, build_payload(path))
        result = (await wait_for_results(scene, 1))["r-1"]
        assert summarize(result.payload) == summarize(generate_whole(path, build_payload(path), config))
        assert not gateway.next_outcomes
        assert scene.metrics.get_value(series.ATTEMPTS, "uncounted", "none") == 5

    run_in_scene(check, gateway, options)


def test_attempts_begin_anew_after_new_tokens() -> None:
    config = GenerationConfig(end_probability=0.0, chunk_tokens=1)
    gateway = GenerationGateway(config, cut_after=0.5)
    options = replace(build_options(is_streamed=True), retry=RetryPolicy(0.1, 1.0, max_attempts=2))

    async def check(scene: Scene) -> None:
        await check_model(scene, COMPLETION)
        calls = len(gateway.calls) + 1
        await submit(scene, COMPLETION, build_payload(COMPLETION))
        await wait_for_calls(gateway, None, calls)
        for share in (0.0, 0.5) * 3:
            gateway.cut_after = share
            gateway.next_outcomes.append(CUT)
            calls += 1
            await wait_for_calls(gateway, None, calls)
        assert (await wait_for_results(scene, 1))["r-1"].status_code == 200

    run_in_scene(check, gateway, options)


@dataclass
class LyingGateway(GenerationGateway):
    """Servers whose answers to slices have other fields than they should have."""

    lie: Mapping[str, Any] = field(default_factory=dict)

    async def forward(self, request: Request, **options: Any) -> AttemptResult:
        result = await super().forward(request, **options)
        if not isinstance(result.outcome, Delivered):
            return result
        answer = msgspec.json.decode(result.outcome.body)
        body = msgspec.json.encode(answer | self.lie | {"usage": answer["usage"] | self.lie.get("usage", {})})
        return result.copy_with(outcome=Delivered(200, body))


@pytest.mark.parametrize(
    "lie",
    [
        {"created": 2**70},
        {"created": 10**300},
        {"usage": {"prompt_tokens": 2**70}},
        {"usage": {"prompt_tokens": -(2**70)}},
        {"usage": {"completion_tokens": 2**70}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": 2**70}}},
        {"id": 2**70, "model": {}, "object": [2**70]},
        {"id": "x" * 2**20},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_answers_with_absurd_fields_cost_nobody_an_answer(path: str, lie: Mapping[str, Any]) -> None:
    config = GenerationConfig(end_probability=0.0)
    gateway = LyingGateway(config, lie=lie)

    async def check(scene: Scene) -> None:
        await submit(scene, path, build_payload(path))
        result = (await wait_for_results(scene, 1))["r-1"]
        text = summarize(generate_whole(path, build_payload(path), config))[0]
        assert summarize(result.payload)[0] == text
        assert len(gateway.calls) <= 8

    run_in_scene(check, gateway, build_options(skips_check=True))


def test_prompt_of_tokens_is_sent_whole_after_a_server_has_returned_no_tokens() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))
    payload = build_payload(COMPLETION, prompt=[*b"text"])

    async def check(scene: Scene) -> None:
        await check_model(scene, COMPLETION)
        gateway.config = GenerationConfig(end_probability=0.0, no_token_ids=True)
        await submit(scene, COMPLETION, payload)
        result = (await wait_for_results(scene, 1))["r-1"]
        assert summarize(result.payload) == summarize(generate_whole(COMPLETION, payload, gateway.config))
        assert [call.max_tokens for call in gateway.calls[-2:]] == [20, 100]
        assert find_slicer(scene).whole_counts == {WholeReason.PROMPT: 1}

    run_in_scene(check, gateway, build_options())


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "wasted_tokens"), [(10, 3000, 0), (10, 10**12, 0), (1500, 1600, 20)]
)
def test_request_that_the_server_rejects_for_its_length_is_rejected_before_it_is_generated(
    path: str, prompt_length: int, max_tokens: int, wasted_tokens: int
) -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0, context_length=3000))

    async def check(scene: Scene) -> None:
        await check_model(scene, path)
        generated_tokens = gateway.generated_tokens
        payload = build_payload(path, int("1" * prompt_length), max_tokens)
        await submit(scene, path, payload)
        result = (await wait_for_results(scene, 1))["r-1"]
        assert result.status_code == 400
        assert gateway.generated_tokens - generated_tokens == wasted_tokens

    run_in_scene(check, gateway, build_options())


def test_server_is_asked_once_whether_it_accepts_a_length() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        for number in range(3):
            payload = build_payload(COMPLETION, number, max_tokens=3000)
            await submit(scene, COMPLETION, payload, f"r-{number}")
            result = (await wait_for_results(scene, 1))[f"r-{number}"]
            assert summarize(result.payload) == summarize(generate_whole(COMPLETION, payload, gateway.config))
        assert [call.max_tokens for call in gateway.calls].count(3000) == 1
        assert gateway.generated_tokens < 3 * 3000 + 500

    run_in_scene(check, gateway, build_options(100))


def test_expired_request_returns_what_was_generated() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0), token_s=0.1)

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION), in_s=20)
        result = (await wait_for_results(scene, 1))["r-1"]
        assert result.error_code == "DEADLINE_EXCEEDED"
        assert result.partial is True
        text, finish_reason, *_ = summarize(result.payload)
        whole = summarize(generate_whole(COMPLETION, build_payload(COMPLETION), gateway.config))
        assert text
        assert whole[0].startswith(text)
        assert finish_reason is None

    run_in_scene(check, gateway, build_options())


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_request_with_an_unknown_field_is_sent_whole(path: str) -> None:
    _, gateway, scene = run_one(path, build_payload(path, new_field=1), GenerationConfig(end_probability=0.0))
    assert find_slicer(scene).whole_counts == {WholeReason.FIELD: 1}
    assert [call.max_tokens for call in gateway.calls] == [100], "the model is not even checked"


def test_generation_beyond_the_kept_bytes_goes_on_in_one_call() -> None:
    payload = build_payload(COMPLETION, max_tokens=400)
    result, gateway, scene = run_one(
        COMPLETION, payload, GenerationConfig(end_probability=0.0), build_options(max_kept_bytes=100)
    )
    assert summarize(result.payload) == summarize(
        generate_whole(COMPLETION, payload, GenerationConfig(end_probability=0.0))
    )
    assert find_slicer(scene).whole_counts == {WholeReason.TOO_LARGE: 1}
    *slices, rest = [call.max_tokens for call in gateway.calls[CHECK_CALLS:]]
    assert set(slices) == {20}
    assert rest >= 200


def test_no_further_request_is_sliced_while_many_wait() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0), token_s=0.5)

    async def check(scene: Scene) -> None:
        scene.limiter.set_policy(Policy(max_sys=10, max_age_s=1e6, max_in_flight=1), 2.0)
        await submit_with_priority(scene, "low", 9)
        await wait_for_calls(gateway, 20, 1)
        # Both run before the next slice of the first request. The second one takes so long that the number of
        # requests that wait for their next slice is known when the third one is claimed.
        await submit_with_priority(scene, "long", 0, metadata={"slicing": "off"})
        await submit_with_priority(scene, "further", 1)
        results = await wait_for_results(scene, 3)
        assert {name: result.slices for name, result in results.items()} == {
            "low": 5,
            "long": None,
            "further": None,
        }
        assert find_slicer(scene).whole_counts == {
            WholeReason.DECLINED: 1,
            WholeReason.TOO_MANY_STARTED: 1,
        }

    run_in_scene(check, gateway, build_options(max_started=1))


async def submit_with_priority(scene: Scene, name: str, priority: int, **fields: Any) -> None:
    deadline = 10**6
    payload = build_payload(COMPLETION)
    member = encode_member(name, payload, deadline, token="t", endpoint=COMPLETION, **fields)
    score = compute_score(deadline, priority)
    await scene.store.submit([Submission(member, score, name, "t", deadline)])


def test_request_that_expires_in_the_queue_returns_what_was_generated() -> None:
    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION), in_s=20)
        other_owner = MemoryQueue(scene.store, "b")
        (lease,) = (await claim(other_owner)).leases
        progress = encode_progress(Progress(Stage.SLICES, 1, "once upon", object="text_completion"))
        await other_owner.release([Release(lease, delay_s=30, progress=progress)])
        result = (await wait_for_results(scene, 1))["r-1"]
        assert (result.error_code, result.partial) == ("DEADLINE_EXCEEDED", True)
        assert summarize(result.payload)[0] == "once upon"

    run_in_scene(check, GenerationGateway(GenerationConfig()), build_options())


@pytest.mark.parametrize("stored", [b"\xff", b"\x91\xa4none", b"\x93\xa6slices\xa1x\xa1y", b"\x91" * 5000])
def test_unreadable_progress_starts_the_generation_again(stored: bytes) -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))
    payload = build_payload(COMPLETION)

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, payload)
        other_owner = MemoryQueue(scene.store, "b")
        (lease,) = (await claim(other_owner)).leases
        await other_owner.release([Release(lease, progress=stored)])
        result = (await wait_for_results(scene, 1))["r-1"]
        assert summarize(result.payload) == summarize(
            generate_whole(COMPLETION, payload, GenerationConfig(end_probability=0.0))
        )
        assert result.slices == 5

    run_in_scene(check, gateway, build_options())


def test_request_declines_slices() -> None:
    result, gateway, scene = run_one(COMPLETION, build_payload(COMPLETION), metadata={"slicing": "off"})
    assert result.slices is None
    assert [call.max_tokens for call in gateway.calls] == [100]
    assert find_slicer(scene).whole_counts == {WholeReason.DECLINED: 1}


@pytest.mark.parametrize(("listing", "version"), [("qwen-v1 qwen-v2", "qwen-v1"), ("qwen-v2", "qwen-v2")])
def test_generation_stays_on_its_version_or_begins_again(listing: str, version: str) -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0), token_s=0.01)
    family = FamilyTerms("qwen", VersionTemplate("qwen-v"))
    terms = ModelTerms({"qwen": WhenNotServed.WAIT})
    options = change_models(build_options(), terms=terms, families=(family,))

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit(scene, COMPLETION, build_payload(COMPLETION, model="qwen"))
        await wait_for_calls(gateway, 20, 2)
        update_listings(scene, a=listing)
        result = (await wait_for_results(scene, 1))["r-1"]
        payload = build_payload(COMPLETION, model=version)
        assert summarize(result.payload) == summarize(generate_whole(COMPLETION, payload, gateway.config))
        assert result.model_version == version

    run_in_scene(check, gateway, options)


def test_generations_that_began_in_slices_are_completed_when_slicing_is_turned_off() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0), token_s=0.01)

    async def check(scene: Scene) -> None:
        await submit(scene, COMPLETION, build_payload(COMPLETION))
        await wait_for_calls(gateway, 20, 2)
        scene.dispatcher.reconfigure(Options(RetryPolicy()))
        result = (await wait_for_results(scene, 1))["r-1"]
        whole = generate_whole(COMPLETION, build_payload(COMPLETION), gateway.config)
        assert summarize(result.payload) == summarize(whole)
        assert gateway.calls[-1].max_tokens > 20

    run_in_scene(check, gateway, build_options())


def run_random_requests(source: random.Random) -> tuple[int, int]:
    """Run random requests on random servers. Return the number of answers that differ from those of single
    calls, and of requests that were sliced."""
    config = GenerationConfig(
        end_probability=source.choice([0.0, 0.01]),
        merged_tokens=source.random() < 0.3,
        replaces_incomplete=source.random() < 0.3,
        no_token_ids=source.random() < 0.3,
        rejects_unknown_fields=source.random() < 0.1,
        trims_content=source.random() < 0.5,
        chunk_tokens=source.randint(1, 5),
    )
    gateway = GenerationGateway(config, cut_after=source.random())
    size = source.randint(1, 60)
    payloads = {}
    for number in range(5):
        path = source.choice([CHAT, COMPLETION])
        stop = {"stop": source.sample(["a", "é ", "\n", "b c"], 1)} if source.random() < 0.3 else {}
        payload = build_payload(path, source.randint(0, 10**6), source.randint(size + 1, 400), **stop)
        payloads[f"r-{number}"] = path, payload
    evicted = Evicted(429, "evicted")
    outcomes = [evicted if source.random() < 0.1 else None for _ in range(source.randint(0, 100))]
    differing: list[object] = []
    sliced: list[bool] = []

    async def check(scene: Scene) -> None:
        for number, path in enumerate((CHAT, COMPLETION)):  # so that both are checked
            await submit(scene, path, build_payload(path), f"first-{number}")
        await wait_for_results(scene, 2)
        gateway.next_outcomes.extend(outcomes)
        for request_id, (path, payload) in payloads.items():
            await submit(scene, path, payload, request_id)
        results = await wait_for_results(scene, len(payloads))
        for request_id, (path, payload) in payloads.items():
            sliced.append((results[request_id].slices or 0) > 1)
            expected = summarize(generate_whole(path, payload, config))
            got = summarize(results[request_id].payload)
            # After a stop string across a boundary, more tokens were generated than one call would have.
            if (got[:3], got[4]) != (expected[:3], expected[4]):
                differing.append((config, size, path, payload, got, expected))

    run_in_scene(check, gateway, build_options(size, spread=0.5, is_streamed=source.random() < 0.5))
    for each in differing:
        print(each)
    return len(differing), sum(sliced)


def test_random_requests_cut_everywhere_have_the_answers_of_single_calls() -> None:
    source = random.Random(1)
    differing, sliced = zip(*(run_random_requests(source) for _ in range(40)), strict=True)
    assert sum(differing) == 0
    assert sum(sliced) > 70


@pytest.mark.slow
def test_model_that_was_equal_is_checked_again_after_some_hours() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, CHAT, build_payload(CHAT))
        assert (await wait_for_results(scene, 1))["r-1"].slices
        # The servers are replaced by others.
        gateway.config = GenerationConfig(end_probability=0.0, ignores_continue=True)
        await asyncio.sleep(EQUAL_S)
        await submit(scene, CHAT, build_payload(CHAT, 2), "r-2")
        assert (await wait_for_results(scene, 1))["r-2"].slices is None

    run_in_scene(check, gateway, build_options())


def test_streamed_answer_that_is_not_joined_is_no_stream_for_the_consumer() -> None:
    gateway = GenerationGateway(GenerationConfig(end_probability=0.0))

    async def check(scene: Scene) -> None:
        await submit(scene, CHAT, build_payload(CHAT, max_tokens=200))
        assert (await wait_for_results(scene, 1))["r-1"].slices
        # A model that reasons, whose answer ends in the first slice.
        gateway.config = GenerationConfig(end_probability=0.3, reasoning="reasoning_content")
        await submit(scene, CHAT, build_payload(CHAT, 2, max_tokens=200), "r-2")
        result = (await wait_for_results(scene, 1))["r-2"]
        assert gateway.calls[-1].max_tokens == 100
        answer = msgspec.json.decode(result.payload)
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["reasoning_content"]

    run_in_scene(check, gateway, build_options(100, is_streamed=True))
