"""Processes that an agent keeps beside its workers."""
