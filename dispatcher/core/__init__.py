"""Pure decisions: every module takes time, randomness and policy as arguments, and does no I/O."""
