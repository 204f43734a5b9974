"""What agents and checkpoint daemons have in common: no feature, no torch."""
