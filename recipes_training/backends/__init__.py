"""What takes a run's checkpoints: the backends of `recipes_training.checkpoints`."""
