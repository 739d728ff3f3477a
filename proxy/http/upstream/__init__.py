"""Connections to pods."""
