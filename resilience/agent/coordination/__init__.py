"""Membership: the coordinator of a run, its generations, and whom each agent follows."""
