"""The program that workers run: it turns a job into training steps and events."""
