"""Run a block of code again, in the same process, under the next generation."""
