"""The verbs `batch-dispatcher models …`."""
