"""A request and its result: format, priority, headers, routing, and its place in the queue."""
