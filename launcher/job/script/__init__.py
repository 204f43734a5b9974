"""Training programs of a user's: their arguments, and the rules that a job with one has to meet."""
