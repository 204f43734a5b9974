"""What takes a run's checkpoints: the backends of `training.checkpoints`."""
