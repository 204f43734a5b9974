"""Resolve a recipe into a job, render it for a cluster, and submit or run it."""

VERSION = "0.1.0"
"""The launcher's own version, which is the project's."""
SCHEMA_VERSION = 1
"""The newest layout of recipe files that this launcher knows."""
