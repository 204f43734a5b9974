"""Recovery within a step, for a program's own loop in plain torch."""
