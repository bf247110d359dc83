"""A Valkey of our own, where queue.url is empty: `server` starts and finds it, `supervise` keeps it."""

from dispatcher.queue.embedded.server import EmbeddedError, embedded_valkey, find_server, running_url

__all__ = ["EmbeddedError", "embedded_valkey", "find_server", "running_url"]
