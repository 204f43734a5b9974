"""Measurements of this project and of others on the same machine; start one with `-m`."""
