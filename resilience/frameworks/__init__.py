"""Loops of frameworks under `resilience.protect`, each in a module of its own."""
