"""Weights from one layout to another without training: `python -m training.convert`."""
