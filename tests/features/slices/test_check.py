"""`check` reports whether slices of models are equal to whole generations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dispatcher.check.finding import Finding
from dispatcher.features.slices.check import CHECK, MAX_MODELS
from dispatcher.features.slices.equality import CHECK_ID
from dispatcher.features.slices.status import SlicedModelStatus, SlicingStatus
from dispatcher.lab.standin.generation_api import GenerationConfig, InvalidRequestError, parse_request
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.telemetry.status import Status

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def serve(answer: Callable[[web.Request, bytes], web.Response]) -> AsyncIterator[Settings]:
    """Serve these answers. Return settings with this server as the gateway."""

    async def handle(request: web.Request) -> web.Response:
        return answer(request, await request.read())

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        settings = parse_settings(f"gateway: {{url: 'http://127.0.0.1:{server.port}'}}", {})
        assert isinstance(settings, Settings)
        yield settings


def generate(config: GenerationConfig) -> Callable[[web.Request, bytes], web.Response]:
    def answer(request: web.Request, body: bytes) -> web.Response:
        assert request.headers["x-request-id"] == CHECK_ID
        try:
            parsed = parse_request(body, is_chat=request.path == CHAT, config=config)
        except InvalidRequestError as error:
            return web.Response(status=400, text=error.build_body())
        return web.Response(body=parsed.generate_answer(0).build_body("a", 1))

    return answer


async def run_check(
    answer: Callable[[web.Request, bytes], web.Response], seconds: float = 60
) -> list[Finding]:
    async with serve(answer) as settings:
        return [*await CHECK.probe_model(settings, "m", seconds)]


async def test_model_is_checked_on_each_path() -> None:
    config = GenerationConfig(end_probability=0.0, ignores_last_answer=True)
    completions, chats = await run_check(generate(config))
    assert (completions.level, completions.where) == ("ok", "slicing")
    assert completions.what == "m at /v1/completions: equal, continued by token ids"
    assert chats.level == "warning"
    assert f"m at {CHAT}: none, unequal: the server has begun a new message" in chats.what
    assert "in slices: " in chats.what
    assert "Remedy: " in chats.what


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "none, undecided: the server answered 400"),
        (404, "not checked: "),
        (429, "not checked: "),
        (503, "not checked: "),
    ],
)
async def test_model_that_cannot_be_checked_is_a_warning_or_unknown(status: int, expected: str) -> None:
    for finding in await run_check(lambda request, body: web.Response(status=status)):
        assert expected in finding.what
        assert finding.level in ("ok", "warning")


async def test_check_ends_in_time() -> None:
    for finding in await run_check(generate(GenerationConfig()), seconds=-1.0):
        assert finding.what.endswith("not checked: the check took too long")


def make_model(number: int, **fields: Any) -> SlicedModelStatus:
    return SlicedModelStatus(CHAT, f"m-{number}", **fields)


def report(models: list[SlicedModelStatus], mode: str) -> list[Finding]:
    return [*CHECK.report_status(Status(features=[SlicingStatus(slicing_mode=mode, sliced_models=models)]))]


def test_verdicts_of_a_running_dispatcher_are_reported() -> None:
    models = [
        make_model(1, verdict="unequal", whole_reason="unequal", why="because", remedy="another server"),
        *(make_model(n, verdict="equal", continued_by="text") for n in range(2, MAX_MODELS + 3)),
    ]
    first, *others, last = report(models, "auto")
    assert first.level == "warning"
    assert first.what == f"m-1 at {CHAT}: none, unequal: because. Remedy: another server"
    assert {each.level for each in others} == {"ok"}
    assert last.what == "2 more models: see `status --json`"


@pytest.mark.parametrize(("mode", "count"), [("auto", 1), ("on", 1), ("off", 0), ("", 0)])
def test_dispatcher_that_has_checked_no_model_says_so_if_it_would(mode: str, count: int) -> None:
    assert len(report([], mode)) == count
