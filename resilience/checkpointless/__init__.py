"""Who holds what, how a step is committed, and how a rank that lost its state gets it back."""
