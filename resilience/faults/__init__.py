"""Faults that are injected on purpose, to see that a run survives them."""
