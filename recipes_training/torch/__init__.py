"""The torch trainer: Hugging Face models in whole copies or under FSDP2."""
