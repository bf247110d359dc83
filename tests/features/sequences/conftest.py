"""An empty Redis for each test, a queue on it, and a fake dispatcher."""

from tests.client.fixtures import any_engine, any_redis, fake_dispatcher, one_redis, redis_of_session

__all__ = ["any_engine", "any_redis", "fake_dispatcher", "one_redis", "redis_of_session"]
