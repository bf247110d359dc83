"""Long generations run in slices: what may be sliced, the body of each slice, and the answer of the whole."""
