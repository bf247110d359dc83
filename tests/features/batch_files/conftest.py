"""An empty Redis for each test, a queue on it, and a fake dispatcher; a stage with real processes."""

from tests.client.fixtures import any_engine, any_redis, fake_dispatcher, one_redis, redis_of_session
from tests.features.batch_files.files import paths
from tests.scenarios.fixtures import queue_server, stage

__all__ = [
    "any_engine",
    "any_redis",
    "fake_dispatcher",
    "one_redis",
    "paths",
    "queue_server",
    "redis_of_session",
    "stage",
]
