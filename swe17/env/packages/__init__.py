"""Whole packages with their own test suites, to be repaired."""
