"""Weights in Hugging Face's layout: drawn, read and written; the trainers share them."""
