"""Which models the endpoints of a pool serve."""
