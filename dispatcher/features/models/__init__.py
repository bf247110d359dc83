"""Models: which models the pool serves, their versions, and warm-up."""
