"""The token budget: batch requests are sent only if the KV memory of the pool has room for their tokens."""
