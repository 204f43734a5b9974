"""Backends of `recipes_training.checkpoints`: each takes the checkpoints of a run."""
