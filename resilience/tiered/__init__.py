"""Checkpoints in tiers: the node's memory, its peers' memory, S3 or a folder."""
