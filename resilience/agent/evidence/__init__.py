"""What tells that silent agents have ended: the folder of the run, locks, the platform."""
