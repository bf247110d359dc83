"""Long generations run in slices: the stage that plans them, and what their answers lead to."""
