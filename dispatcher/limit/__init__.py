"""The limit: how many batch requests may be in flight, computed from readings of the pool."""
