"""Configuration: load, check, compare and replace it."""
