"""The trainer megatron: what Megatron-Core is told of a job. This version renders it alone."""
