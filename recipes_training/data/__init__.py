"""Text to tokens to samples; nothing here knows of models."""
