"""What the endpoints of a pool say of their models, and requests for these: for tests in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from dispatcher.core.models.availability import Listing
from dispatcher.core.requests.request import encode_member
from dispatcher.ports import Submission
from dispatcher.telemetry.events import Event
from tests.dispatch.scene import Scene

GONE = b'{"object":"error","message":"The model `%s` does not exist.","type":"NotFoundError","param":"model"}'
"""As vLLM answers."""
EACH_S = 5.0
"""Between two exchanges with other owners, at the longest."""


def told(scene: Scene, **endpoints: str | None) -> None:
    """A round: each endpoint's models, as words; None: it cannot be read."""
    at = asyncio.get_running_loop().time()
    scene.dispatcher.model_router.update_listings(
        [
            Listing(name, at, None, problem="it does not answer")
            if models is None
            else Listing(name, at, tuple(models.split()))
            for name, models in endpoints.items()
        ]
    )


async def submit(
    scene: Scene, *names: str, payload: bytes = b'{"model":"qwen"}', within_s: float = 10**6, **member: Any
) -> None:
    until = int(asyncio.get_running_loop().time() + within_s)
    members = [encode_member(name, payload, until, token="t", **member) for name in names]
    await scene.store.submit(
        [Submission(each, float(until), name, "t", until) for name, each in zip(names, members, strict=True)]
    )


async def results(scene: Scene) -> dict[str, dict[str, Any]]:
    found = [
        json.loads(each) for each in await scene.store.read_results(scene.store.default_result_list, 1000)
    ]
    return {each["id"]: each for each in found}


def states(scene: Scene, version: str) -> list[str]:
    """Those that it went through."""
    return [
        fields["state"]
        for event, fields in scene.events
        if event is Event.VERSION and fields["version"] == version
    ]
