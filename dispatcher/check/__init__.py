"""What `batch-dispatcher check` finds, and how it says it: adapters tell facts, this room words them."""
