"""The limit: how many batch requests may be in flight, by what was read of the pool."""
