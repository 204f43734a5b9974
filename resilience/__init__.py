"""Keep a training run going through faults; each feature can be used alone."""
