"""Pure helpers that several folders use: they take time and randomness as arguments, and do no I/O."""
