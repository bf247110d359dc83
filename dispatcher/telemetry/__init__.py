"""What the dispatcher tells of itself: events, logs, metrics, status, traces."""
