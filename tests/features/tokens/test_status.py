"""The section of /status about tokens, and what verbs print of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dispatcher.features.tokens.check import CHECK
from dispatcher.features.tokens.status import TokenEstimateStatus, TokensStatus, build_status
from dispatcher.kernel import Options
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.telemetry.status import Status
from tests.features.tokens.token_scene import UsageGateway, build_options, find_budget, show, submit
from tests.kernel.scene import Scene

SECTION = TokensStatus(100_000, 60_000, 20_000, 30_000, 10_000, 12_000, 3, [TokenEstimateStatus("m", 0.1)])


def test_section_has_the_state_of_a_running_dispatcher() -> None:
    async def check(scene: Scene) -> None:
        show(scene, 0.5)
        await asyncio.sleep(0.5)
        await submit(scene, "r-1", 30_000, 1_000)
        await asyncio.sleep(0.5)
        await submit(scene, "r-2", 40_000, 1_000)
        await asyncio.sleep(0.5)
        built = build_status(find_budget(scene), asyncio.get_running_loop().time(), None)
        section = TokensStatus(
            kv_capacity_tokens=100_000,
            kv_used_tokens=50_000,
            kv_batch_tokens=0,
            kv_reserved_tokens=31_000,
            kv_room_tokens=45_000 - 31_000,
            kv_needed_tokens=41_000,
            token_returns=1,
        )
        assert built.section == section
        assert built.problems == ()
        for pending, needed in ((1, 41_000), (0, None)):  # it may have been cancelled
            counts = QueueCounts(pending, 1, 0, 0)
            built = build_status(find_budget(scene), asyncio.get_running_loop().time(), counts)
            assert built.section == replace(section, kv_needed_tokens=needed)
        options = scene.dispatcher.context.options
        scene.dispatcher.reconfigure(Options(RetryPolicy()))
        built = build_status(find_budget(scene), asyncio.get_running_loop().time(), None)
        assert built.section == TokensStatus(token_returns=1), "a counter never falls"
        scene.dispatcher.reconfigure(options)
        show(scene, 0.5)
        await asyncio.sleep(0.5)
        for _ in range(14):
            show(scene, None)
            await asyncio.sleep(1.0)
        built = build_status(find_budget(scene), asyncio.get_running_loop().time(), None)
        assert built.problems == ("the readings do not show the use of the KV memory any more",)

    Scene.run(check, UsageGateway(), build_options())


def test_section_is_empty_if_tokens_are_not_counted() -> None:
    async def check(scene: Scene) -> None:
        show(scene, 0.5)
        await asyncio.sleep(0.5)
        built = build_status(find_budget(scene), asyncio.get_running_loop().time(), None)
        assert built.section == TokensStatus()

    Scene.run(check, UsageGateway(), Options(RetryPolicy()))


def test_line_and_sentence() -> None:
    assert [*SECTION.format_lines()] == [
        "KV memory: 60,000 of 100,000 tokens in use, room for 10,000 more of batch requests."
    ]
    assert [*SECTION.explain()] == []
    assert [*TokensStatus().format_lines()] == []
    overfull = replace(SECTION, kv_room_tokens=-500)
    assert [*overfull.format_lines()] == [
        "KV memory: 60,000 of 100,000 tokens in use, room for 0 more of batch requests."
    ]
    wrong = replace(SECTION, token_estimates=[TokenEstimateStatus("a", 0.3), TokenEstimateStatus("", 0.4)])
    assert [*wrong.explain()] == [
        "The estimated tokens of prompts for requests without a model are wrong by 40% on average."
    ]


def test_check_reports_whether_tokens_are_counted() -> None:
    (finding,) = CHECK.report_status(Status())
    assert finding.level == "ok"
    assert finding.what.startswith("only requests are counted: tokens.per_endpoint, or pages")
    wrong = replace(SECTION, token_estimates=[TokenEstimateStatus("a", 0.3)])
    findings = [(each.level, each.what) for each in CHECK.report_status(Status(features=(wrong,)))]
    assert findings == [
        ("ok", "KV memory: 60,000 of 100,000 tokens in use, room for 10,000 more of batch requests"),
        ("warning", "The estimated tokens of prompts for a are wrong by 30% on average"),
    ]
