"""Versions of recipes: what a recipe resolves to, kept under a number that does not change."""
