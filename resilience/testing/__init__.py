"""Fakes to test with: shipped, so that users can test what they build on this package."""
