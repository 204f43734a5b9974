"""What a job will take, told before it is submitted: memory, time, and whether it fits."""
