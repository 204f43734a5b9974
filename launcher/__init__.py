"""Resolve a recipe into a job, render it for a cluster, and submit or run it."""
