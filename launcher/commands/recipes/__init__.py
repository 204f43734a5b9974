"""The commands that tell of recipes' values: where each comes from, and in which two differ."""
