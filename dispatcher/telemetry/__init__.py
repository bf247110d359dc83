"""Events, logs, metrics, status and traces of the dispatcher."""
