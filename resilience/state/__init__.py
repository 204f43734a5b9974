"""What a training state is: shards, replicas, reports, digests, and moving tensors."""
