"""Check whether slices of a model are equal to whole generations, as the dispatcher does before it slices."""

from __future__ import annotations

import asyncio
import time

from dispatcher.features.slices.equality import CHECK_ID
from dispatcher.features.slices.settings import SlicingSettings
from dispatcher.features.slices.status import SlicedModelStatus, build_model_status
from dispatcher.features.slices.support import SupportTable
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    UncountedError,
    Unreachable,
    describe_outcome,
)
from dispatcher.requests.request import Request
from dispatcher.settings.model import Settings


async def check_paths(settings: Settings, model: str, seconds: float) -> list[SlicedModelStatus | str]:
    """Check a model on each path of `slicing.paths` by calls to the gateway, for up to `seconds` each.

    Return the status of each model, or why it was not checked. Raises OSError if no call can be made.
    """
    gateway = HttpGateway(settings.gateway, subset_header=settings.endpoints_header)
    try:
        await gateway.prepare()
        return [
            await _check_path(gateway, settings, path, model, seconds)
            for path in settings.get_section(SlicingSettings).paths
        ]
    finally:
        await gateway.aclose()


async def _check_path(
    gateway: HttpGateway, settings: Settings, path: str, model: str, seconds: float
) -> SlicedModelStatus | str:
    table, key = SupportTable(settings.get_section(SlicingSettings).stream), (path, model, b"")
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    check = table.begin_check(key, now())
    assert check is not None  # noqa: S101 -- the table is empty
    number = 0
    while (body := check.next_body) is not None:
        number += 1
        result = await gateway.forward(
            Request(id=CHECK_ID, deadline=int(time.time() + seconds) + 1, payload=body, endpoint=path),
            token=f"{CHECK_ID}-{number}",
            deadline=deadline,
        )
        if result.memory is not None:
            result.memory.free_share()
        if not isinstance(result.outcome, Delivered):
            return f"{model} at {path}: not checked: {_describe(result.outcome)}"
        check.record_answer(result.outcome.status, result.outcome.body)
    table.end_check(key, check, now())
    return build_model_status(key, table.find_support(key))


def _describe(outcome: Outcome) -> str:
    """Return why a call had no answer."""
    match outcome:
        case Overloaded() | Evicted() | Failed() | Unreachable() | UncountedError():
            return describe_outcome(outcome)
        case Refused(why):
            return why
        case _:
            return "the check took too long"
