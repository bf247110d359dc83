"""Calls of this feature to the queue: the model registry, and requests that wait for their model."""
