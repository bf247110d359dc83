"""Model listings of endpoints, requests for models, and their results, for a scene in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from dispatcher.features.models.availability import Listing
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.status import ModelsStatus, ModelStatus
from dispatcher.kernel import Options
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from dispatcher.settings.model import Settings
from dispatcher.telemetry.events import Event
from tests.features.scene import Scene
from tests.kernel.scene import find_part
from tests.service.limiter_status import build_context_status

MODEL_NOT_FOUND_BODY = (
    b'{"object":"error","message":"The model `%s` does not exist.","type":"NotFoundError","param":"model"}'
)
"""Body with which vLLM answers 404, with a placeholder for the model."""
EXCHANGE_INTERVAL_S = 5.0
"""Maximum time between two exchanges of the model registry with other dispatchers."""


def update_listings(scene: Scene, **endpoints: str | None) -> None:
    """Report the models of each endpoint, with spaces between their names. `None` if they cannot be read."""
    at = asyncio.get_running_loop().time()
    find_part(scene.dispatcher, ModelRouter).update_listings(
        [
            Listing(name, at, None, problem="it does not answer")
            if models is None
            else Listing(name, at, tuple(models.split()))
            for name, models in endpoints.items()
        ]
    )


def change_models(options: Options, **changes: Any) -> Options:
    """Return the options with other options of models."""
    changed = replace(options.of(ModelOptions), **changes)
    return replace(options, of_features={**options.of_features, ModelOptions: changed})


async def submit_requests(
    scene: Scene,
    *request_ids: str,
    payload: bytes = b'{"model":"qwen"}',
    within_s: float = 10**6,
    **fields: Any,
) -> None:
    deadline = int(asyncio.get_running_loop().time() + within_s)
    members = [
        encode_member(request_id, payload, deadline, token="t", **fields) for request_id in request_ids
    ]
    await scene.store.submit(
        [
            Submission(member, float(deadline), request_id, "t", deadline)
            for request_id, member in zip(request_ids, members, strict=True)
        ]
    )


def list_version_states(scene: Scene, version: str) -> list[str]:
    """Return the states of a version, in the order in which they were logged."""
    return [
        fields["state"]
        for event, fields in scene.events
        if event is Event.VERSION and fields["version"] == version
    ]


def build_models_status(scene: Scene) -> ModelsStatus:
    """Return the models as /status shows them."""
    settings = Settings.model_validate({"gateway": {"url": "http://gateway"}})
    at = asyncio.get_running_loop().time()
    return build_context_status(scene.dispatcher.context, at, settings).get_section(ModelsStatus)


def get_model(scene: Scene, name: str) -> ModelStatus:
    """Return a model as /status shows it."""
    return next(model for model in build_models_status(scene).models if model.name == name)
