"""Parts that agents and checkpoint daemons share: no feature, no torch."""
