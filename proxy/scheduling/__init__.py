"""Scheduling: build a scheduler from a configuration, and make a decision for each request."""
