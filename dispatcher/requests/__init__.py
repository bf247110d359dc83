"""Requests and results: their format, priority, headers, routing, and place in the queue."""
