"""Embedded Valkey for an empty `queue.url`: `server` starts and finds it, `supervise` keeps it running."""

from dispatcher.queue.embedded.server import EmbeddedError, embedded_valkey, find_server, running_url

__all__ = ["EmbeddedError", "embedded_valkey", "find_server", "running_url"]
