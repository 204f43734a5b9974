"""How one step is taken, and what becomes of one that is not finite."""
