"""A scene in virtual time whose queue has sequences and models."""

from __future__ import annotations

from tests.features.memory_queue import MemoryQueue, MemoryStore
from tests.kernel import scene


class SceneQueue(scene.QueueWithUnreadableMarkers, MemoryQueue):
    """Queue of a scene that has the calls of sequences and models, too."""


class Scene(scene.Scene):
    """A running dispatcher and everything that it talks to."""

    store_type, queue_type = MemoryStore, SceneQueue
    store: MemoryStore
    queue: SceneQueue


run_in_scene = Scene.run
