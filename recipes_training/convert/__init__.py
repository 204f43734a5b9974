"""Weights from one layout to another without training: `python -m recipes_training.convert`."""
