"""Requests that several pods answer together: their legs, and what becomes of them when one fails."""
