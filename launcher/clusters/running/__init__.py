"""Runs that have been started: what a cluster says of one, prints of it, and does about it."""
