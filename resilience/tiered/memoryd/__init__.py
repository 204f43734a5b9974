"""The daemon of one node: keeps checkpoints in memory and outlives the workers."""
