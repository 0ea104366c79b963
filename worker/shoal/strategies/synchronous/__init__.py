"""Base of the strategies whose members take each step, or each round of local steps, together."""
