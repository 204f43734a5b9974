"""Follow a run by its events and its nodes' logs: its state, recoveries and display."""
