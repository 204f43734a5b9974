"""The torch trainer: Hugging Face models under DDP or FSDP2."""
